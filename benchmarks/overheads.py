"""What a step costs beside the kernels: host time, planning, memory, first call and import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attn_ops
from attn_ops.ops.schemas import SCHEMAS

from . import report
from .contest import NotMeasuredError
from .peers import flashinfer, flashinfer_workspace
from .timing import device_microseconds, host_microseconds

NOTE = (
    "Host times are of eager calls that only enqueue work, for 64 requests: they take turns in 40 rounds of 200 calls, "
    "and the least is shown, since what else runs on the machine only adds to it, beside the median. `wrapper` is "
    "BatchDecodeWithPagedKVCacheWrapper. An op that does nothing shows what PyTorch's dispatcher takes of the time of "
    "batch_decode. Memory is of a plan for 256 requests of 128k tokens."
)
HEADS: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
PAGE = 16
PLANNED = (64, 1024)
DECODE = "batch_decode"
HOST_GOALS = {
    **{f"plan, batch {batch}": "<= 15" for batch in PLANNED},
    **dict.fromkeys((DECODE, "append_kv", "wrapper.run"), "<= 10"),
}

IMPORT = "import time, torch; t = time.perf_counter(); import attn_ops; print(time.perf_counter() - t)"
FIRST_CALL = """
import time, torch, attn_ops
planner = attn_ops.DecodePlanner(4, 64, page_size=16, num_qo_heads=32, num_kv_heads=8, head_dim=128, device="cuda")
q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
k = torch.randn(64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
table = [torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0, 16, 32, 48, 64], range(64), [16] * 4)]
torch.cuda.synchronize(); t = time.perf_counter()
torch.ops.attn.batch_decode(q, k, k, planner.plan(*table), planner.workspace)
torch.cuda.synchronize(); print(time.perf_counter() - t)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")


def _table(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    pages = length // PAGE
    indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
    indices = torch.randperm(batch * pages, device="cuda").int()
    return indptr, indices, torch.full((batch,), PAGE, device="cuda", dtype=torch.int32)


def _row(what: str, value: float, unit: str, goal: str | None) -> report.Row:
    return {"what": what, "measured": value, "median": None, "unit": unit, "goal": goal}


Calls = dict[str, Callable[[], object]]


def _planning(batch: int) -> Callable[[], object]:
    table = _table(batch, 2048)
    planner = attn_ops.DecodePlanner(batch, table[1].shape[0], page_size=PAGE, device="cuda", **HEADS)
    return lambda: planner.plan(*table)


class _Step:
    """A decode step of short requests: its cache is small, so that the device keeps up with the host."""

    def __init__(self, batch: int = 64, length: int = 2 * PAGE) -> None:
        self.batch, self.table = batch, _table(batch, length)
        self.q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.randn(self.table[1].shape[0], 2, PAGE, 8, 128, device="cuda", dtype=torch.bfloat16)

    def ops(self) -> Calls:
        planner = attn_ops.DecodePlanner(self.batch, self.table[1].shape[0], page_size=PAGE, device="cuda", **HEADS)
        plan, (k, v), q = planner.plan(*self.table), self.cache.unbind(1), self.q
        new_k, new_v = torch.randn(2, self.batch, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
        rows = torch.arange(self.batch, device="cuda", dtype=torch.int32)
        position = plan.kv_len - 1
        library = torch.library.Library("attn_benchmark", "FRAGMENT")
        library.define("nothing" + SCHEMAS["batch_decode"])
        library.impl("nothing", lambda *args: (q, q), "CUDA")
        self.library, ops = library, torch.ops.attn
        return {
            DECODE: lambda: ops.batch_decode(q, k, v, plan, planner.workspace),
            "an op of that schema that does nothing": lambda: torch.ops.attn_benchmark.nothing(
                q, k, v, plan, planner.workspace
            ),
            "append_kv": lambda: ops.append_kv(new_k, new_v, k, v, rows, position, plan.kv_indices, plan.kv_indptr),
            "torch.Tensor.add_": lambda: position.add_(0),
        }

    def wrapper(self, library: Any) -> Calls:
        """``run`` and ``plan`` of a library with FlashInfer's interface."""
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(flashinfer_workspace("cuda"), "NHD")

        def plan() -> None:
            heads = (HEADS["num_qo_heads"], HEADS["num_kv_heads"], HEADS["head_dim"], PAGE)
            wrapper.plan(*self.table, *heads, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)

        plan()
        return {"run": lambda: wrapper.run(self.q, self.cache), "plan": plan}


def _peers(step: _Step) -> Calls:
    try:
        return {f"flashinfer's wrapper.{name}": call for name, call in step.wrapper(flashinfer()).items()}
    except NotMeasuredError as error:
        print(error)
        return {}


def _host() -> list[report.Row]:
    step = _Step()
    calls = {f"plan, batch {batch}": _planning(batch) for batch in PLANNED}
    calls |= {f"wrapper.{name}": call for name, call in step.wrapper(attn_ops).items()}
    calls |= {**step.ops(), **_peers(step)}
    for call in calls.values():
        call()
    times = host_microseconds(calls)
    rows: list[report.Row] = [
        {"what": f"{name}, host", "measured": t.least, "median": t.median, "unit": "us", "goal": HOST_GOALS.get(name)}
        for name, t in times.items()
    ]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    held = calls[DECODE]()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    del held
    return [*rows, _row("allocations of batch_decode, an output and an empty lse", allocations, "", "1 or 2")]


def _device() -> list[report.Row]:
    rows = []
    for batch in PLANNED:
        plan = _planning(batch)
        time = device_microseconds({"plan": lambda _, plan=plan: plan()}, 1, 5)["plan"]  # type: ignore[misc]
        rows.append(_row(f"plan, batch {batch}, device", time, "us", "<= 5"))
    return rows


def _memory() -> list[report.Row]:
    planner = attn_ops.DecodePlanner(256, 256 * 131072 // PAGE, page_size=PAGE, device="cuda", **HEADS)
    sizes = [t.numel() * t.element_size() for t in (*planner.state, planner.workspace)]
    return [_row("plan and workspace, batch 256 of 128k tokens", sum(sizes) / 2**20, "MiB", "<= 16")]


def _fresh(program: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    rows = [*_host(), *_device(), *_memory()]
    rows.append(_row("first plan and decode, nothing cached", _fresh(FIRST_CALL), "s", "<= 3"))
    rows.append(_row("import attn_ops over torch", 1e3 * min(_fresh(IMPORT) for _ in range(3)), "ms", "<= 150"))
    report.save("overheads", "Overheads", NOTE, rows, args.output)
