"""Overheads of a decode step apart from its kernels: host time, planning, memory, first call, import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import attn_ops
from attn_ops import flash_attn
from attn_ops.ops.schemas import SCHEMAS
from attn_ops.plan.page_table import ragged_pages, uniform_indptr
from benchmarks import report
from benchmarks.comparison import NotMeasuredError
from benchmarks.peers import flashinfer, flashinfer_workspace
from benchmarks.timing import device_microseconds, host_microseconds

NOTE = (
    "Host times are of eager calls that only enqueue work, for 64 requests, in 40 interleaved rounds of 200 calls. "
    "`measured` is the shortest round, since other load only adds to it. `wrapper` is "
    "BatchDecodeWithPagedKVCacheWrapper, of this library and of FlashInfer. Functions plan in each call, for lengths "
    "on the GPU. The empty op shows what PyTorch's dispatcher adds to batch_decode. Memory is that of a plan for 256 "
    "requests of 128k tokens."
)
HEADS: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
PAGE = 16
PLANNED_BATCHES = (64, 1024)
PLANNED_PREFILLS = ((1, 8192, 8192), (64, 200, 200), (8, 512, 8192))
DECODE = "batch_decode"
EMPTY_OP = "an empty op with the schema of batch_decode"
PEER = "FlashInfer's wrapper"
HOST_GOALS = {
    **{f"plan, batch {batch}": "<= 5" for batch in PLANNED_BATCHES},
    DECODE: "<= 9",
    "wrapper.run": "<= 7",
    "wrapper.plan": "<= 20",
}

IMPORT = "import time, torch; t = time.perf_counter(); import attn_ops; print(time.perf_counter() - t)"
FIRST_CALL_PARTS = ("Triton's driver and hash", "plan", "decode")
FIRST_CALL = """
import time, torch, attn_ops
from attn_ops.eager.startup import wait_until_prepared
planner = attn_ops.DecodePlanner(4, 64, page_size=16, num_qo_heads=32, num_kv_heads=8, head_dim=128, device="cuda")
q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
k = torch.randn(64, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
table = [torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0, 16, 32, 48, 64], range(64), [16] * 4)]

def timed(call, *args):
    torch.cuda.synchronize(); t = time.perf_counter()
    call(*args)
    torch.cuda.synchronize(); print(time.perf_counter() - t)

timed(wait_until_prepared)
timed(planner.plan, *table)
timed(torch.ops.attn.batch_decode, q, k, k, planner.state, planner.workspace)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    report.add_output(parser)


def _table(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """The page table of ``batch`` requests of ``length`` tokens, with shuffled pages."""
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
    """A decode step of short requests, which takes less time on the device than on the host."""

    def __init__(self, batch: int = 64, length: int = 2 * PAGE) -> None:
        self.batch, self.table = batch, _table(batch, length)
        self.q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.randn(self.table[1].shape[0], 2, PAGE, 8, 128, device="cuda", dtype=torch.bfloat16)

    def ops(self) -> Calls:
        planner = attn_ops.DecodePlanner(self.batch, self.table[1].shape[0], page_size=PAGE, device="cuda", **HEADS)
        plan, (k, v), q = planner.plan(*self.table), self.cache.unbind(1), self.q
        new_k, new_v = torch.randn(2, self.batch, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
        rows = torch.arange(self.batch, device="cuda", dtype=torch.int32)
        position, fields = plan.kv_len - 1, list(plan)
        library = torch.library.Library("attn_benchmark", "FRAGMENT")
        library.define("nothing" + SCHEMAS["batch_decode"])
        library.impl("nothing", lambda *args: (q, q), "CUDA")
        self.library, ops = library, torch.ops.attn
        return {
            DECODE: lambda: ops.batch_decode(q, k, v, plan, planner.workspace),
            EMPTY_OP: lambda: torch.ops.attn_benchmark.nothing(q, k, v, fields, planner.workspace),
            "append_kv": lambda: ops.append_kv(new_k, new_v, k, v, rows, position, plan.kv_indices, plan.kv_indptr),
            "torch.Tensor.add_": lambda: position.add_(0),
        }

    def wrapper(self, library: Any) -> Calls:
        """``run`` and ``plan`` of the wrapper of this library or of FlashInfer."""
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(flashinfer_workspace("cuda"), "NHD")

        def plan() -> None:
            heads = (HEADS["num_qo_heads"], HEADS["num_kv_heads"], HEADS["head_dim"], PAGE)
            wrapper.plan(*self.table, *heads, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)

        plan()
        return {"run": lambda: wrapper.run(self.q, self.cache), "plan": plan}

    def functions(self) -> Calls:
        """Functions that plan in each call, as lengths are on the GPU."""
        (k, v), workspace = self.cache.unbind(1), flashinfer_workspace("cuda")
        table, q = self.table[1].view(self.batch, -1), self.q[:, None]
        lengths = torch.full((self.batch,), table.shape[1] * PAGE, device="cuda", dtype=torch.int32)
        rows, keys = (uniform_indptr(self.batch, n, torch.device("cuda")) for n in (1, table.shape[1] * PAGE))
        ragged_k, ragged_v = torch.randn(2, int(keys[-1]), 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
        longest = table.shape[1] * PAGE
        return {
            "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=lengths, block_table=table
            ),
            "flash_attn_varlen_func": lambda: flash_attn.flash_attn_varlen_func(
                self.q, ragged_k, ragged_v, rows, keys, 1, longest
            ),
            "trtllm_batch_decode_with_kv_cache": lambda: attn_ops.trtllm_batch_decode_with_kv_cache(
                self.q, self.cache, workspace, table, lengths, longest, kv_layout="NHD"
            ),
        }


def _peers(step: _Step) -> Calls:
    try:
        return {f"{PEER}.{name}": call for name, call in step.wrapper(flashinfer()).items()}
    except NotMeasuredError as error:
        print(error)
        return {}


def _host() -> list[report.Row]:
    step = _Step()
    calls = {f"plan, batch {batch}": _planning(batch) for batch in PLANNED_BATCHES}
    calls |= {f"wrapper.{name}": call for name, call in step.wrapper(attn_ops).items()}
    calls |= {**step.ops(), **step.functions(), **_peers(step)}
    for call in calls.values():
        call()
    times = host_microseconds(calls)
    rows: list[report.Row] = [
        {"what": f"{name}, host", "measured": t.least, "median": t.median, "unit": "us", "goal": HOST_GOALS.get(name)}
        for name, t in times.items()
    ]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    outputs = calls[DECODE]()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    del outputs
    return [*rows, _row("allocations of batch_decode: an output and an empty LSE", allocations, "", "1 or 2")]


def _prefill_planning(batch: int, rows: int, keys: int) -> Callable[[], object]:
    """Plan ``rows`` query rows of each request over ragged keys."""
    planner = attn_ops.PrefillPlanner(batch, batch * rows, 0, max_kv_len=keys, causal=True, device="cuda", **HEADS)
    qo_indptr, kv_indptr = (uniform_indptr(batch, n, torch.device("cuda")) for n in (rows, keys))
    return lambda: torch.ops.attn.plan_prefill(qo_indptr, kv_indptr, *ragged_pages(kv_indptr), planner.state)


def _device() -> list[report.Row]:
    plans = {f"plan, batch {batch}": (_planning(batch), "<= 5") for batch in PLANNED_BATCHES}
    for batch, rows, keys in PLANNED_PREFILLS:
        plans[f"prefill plan, {batch} x ({rows} on {keys})"] = _prefill_planning(batch, rows, keys), "-"
    measured = []
    for name, (plan, goal) in plans.items():
        time = device_microseconds({"plan": lambda _, plan=plan: plan()}, 1, 5)["plan"]  # type: ignore[misc]
        measured.append(_row(f"{name}, device", time, "us", goal))
    return measured


def _memory() -> list[report.Row]:
    planner = attn_ops.DecodePlanner(256, 256 * 131072 // PAGE, page_size=PAGE, device="cuda", **HEADS)
    sizes = [t.numel() * t.element_size() for t in (*planner.state, planner.workspace)]
    return [_row("plan and workspace, batch 256 of 128k tokens", sum(sizes) / 2**20, "MiB", "<= 9")]


def headline(rows: list[report.Row]) -> str:
    """Host times of the wrapper compared with those of FlashInfer, the one peer with this interface."""
    times = {row["what"]: row["measured"] for row in rows}
    parts = []
    for name in ("run", "plan"):
        ours, peer = times[f"wrapper.{name}, host"], times.get(f"{PEER}.{name}, host")
        parts.append(f"wrapper.{name} takes {ours:.1f} us, " + (f"FlashInfer's {peer:.1f} us" if peer else "no peer"))
    return f"Host time: {'; '.join(parts)}."


def _in_new_process(program: str) -> list[float]:
    """The numbers that the program prints, with an empty Triton cache. Bytecode is cached, as in an installation."""
    with tempfile.TemporaryDirectory() as folder:
        env = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["TRITON_CACHE_DIR"] = folder
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def _first_call() -> list[report.Row]:
    """The first plan and decode, and what they wait for one after the other."""
    parts = _in_new_process(FIRST_CALL)
    rows = [_row("first plan and decode, empty caches", sum(parts), "s", "<= 2")]
    for name, seconds in zip(FIRST_CALL_PARTS, parts, strict=True):
        rows.append(_row(f"of it, {name}", seconds, "s", None))
    return rows


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the overheads."""
    rows = [*_host(), *_device(), *_memory()]
    rows.append(
        _row("import attn_ops after torch", 1e3 * min(_in_new_process(IMPORT)[0] for _ in range(3)), "ms", "<= 50")
    )
    rows += _first_call()
    report.save("overheads", "Overheads", NOTE, rows, args.output, headline(rows))
