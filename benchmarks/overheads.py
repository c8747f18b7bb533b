"""What a step costs beside the kernels: host time, planning, memory, first call and import."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import attn_ops
from attn_ops.schemas import SCHEMAS

from . import report
from .timing import device_microseconds, host_microseconds

NOTE = (
    "Host times are of eager calls that only enqueue work: the least of 20 rounds of 200 calls, since what else runs "
    "on the machine only adds to it, beside their median. An op that does nothing shows what PyTorch's dispatcher "
    "takes of the time of batch_decode. Memory is of a plan for 256 requests of 128k tokens."
)
HEADS = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
PAGE = 16

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


def _host_row(what: str, call: Callable[[], object], goal: str | None) -> report.Row:
    time = host_microseconds(call)
    return {"what": f"{what}, host", "measured": time.least, "median": time.median, "unit": "us", "goal": goal}


def _planning(batch: int) -> list[report.Row]:
    table = _table(batch, 2048)
    planner = attn_ops.DecodePlanner(batch, table[1].shape[0], page_size=PAGE, device="cuda", **HEADS)
    planner.plan(*table)
    host = _host_row(f"plan, batch {batch}", lambda: planner.plan(*table), "<= 15")
    device = device_microseconds({"plan": lambda _: planner.plan(*table)}, 1, 5)["plan"]
    return [host, _row(f"plan, batch {batch}, device", device, "us", "<= 5")]


def _running(batch: int = 64) -> list[report.Row]:
    table = _table(batch, 256)
    planner = attn_ops.DecodePlanner(batch, table[1].shape[0], page_size=PAGE, device="cuda", **HEADS)
    plan = planner.plan(*table)
    cache = torch.randn(table[1].shape[0], 2, PAGE, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = cache.unbind(1)
    q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
    new_k, new_v = torch.randn(2, batch, 8, 128, device="cuda", dtype=torch.bfloat16).unbind()
    rows = torch.arange(batch, device="cuda", dtype=torch.int32)
    position = plan.kv_len - 1

    def decode() -> object:
        return torch.ops.attn.batch_decode(q, k, v, plan, planner.workspace)

    def nothing() -> object:
        return torch.ops.attn_benchmark.nothing(q, k, v, plan, planner.workspace)

    def append() -> object:
        return torch.ops.attn.append_kv(new_k, new_v, k, v, rows, position, plan.kv_indices, plan.kv_indptr)

    library = torch.library.Library("attn_benchmark", "FRAGMENT")
    library.define("nothing" + SCHEMAS["batch_decode"])
    library.impl("nothing", lambda *args: (q, q), "CUDA")
    host = [
        _host_row("batch_decode", decode, "<= 10"),
        _host_row("an op of that schema that does nothing", nothing, None),
        _host_row("append_kv", append, "<= 10"),
        _host_row("torch.Tensor.add_", lambda: position.add_(0), None),
    ]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    held = decode()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    del held
    return [
        *host,
        _row("allocations of batch_decode, an output and an empty lse", allocations, "", "1 or 2"),
    ]


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
    rows = [row for batch in (64, 1024) for row in _planning(batch)]
    rows += _running() + _memory()
    rows.append(_row("first plan and decode, nothing cached", _fresh(FIRST_CALL), "s", "<= 3"))
    rows.append(_row("import attn_ops over torch", 1e3 * min(_fresh(IMPORT) for _ in range(3)), "ms", "<= 150"))
    report.save("overheads", "Overheads", NOTE, rows, args.output)
