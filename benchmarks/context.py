"""Decode with the keys of each request on several GPUs: the local part, and the ways to merge. Run on N GPUs."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import attn_ops
from attn_ops.distributed import ContextExchange, ContextShard, merge_context
from benchmarks import ranks, report
from benchmarks.comparison import MAX_RELATIVE_ERROR
from benchmarks.timing import Call, copies_for

HEADS, DIM, PAGE = (32, 8), 128, 16
EXCHANGE_US = 10.0
"""Expected time of the exchange, for the size of the CUDA graphs."""

NOTE = (
    "Microseconds of one decode launch and its merge, bf16, 32/8 heads of 128, pages of 16 dealt to the GPUs in turn, "
    "in a CUDA graph over rotating caches: the median of replays, and of the GPUs the slowest. `local` is attention on "
    "a GPU's part of the keys, without a merge."
)


class ContextRow(NamedTuple):
    """A batch of equal requests. ``goal`` is the target in microseconds on four GPUs."""

    batch: int
    length: int
    goal: float | None

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length // 1024}k" if self.length >= 1024 else f"{self.batch} x {self.length}"

    def kv_bytes(self, world: int) -> int:
        """On each of ``world`` GPUs."""
        return 4 * self.batch * self.length * HEADS[1] * DIM // world


ROWS = (
    ContextRow(1, 16 << 10, None),
    ContextRow(1, 128 << 10, 46),
    ContextRow(1, 512 << 10, 137),
    ContextRow(8, 128 << 10, 262),
)


CPU_ROWS = (ContextRow(2, 64, None),)


class ContextProblem:
    """The caches, page table and query of one rank, whose part of the keys is random."""

    def __init__(self, row: ContextRow, rank: int, world: int, device: torch.device) -> None:
        pages = row.length // PAGE
        generator = torch.Generator(device).manual_seed(rank)
        self.row, self.shard = row, ContextShard(rank, world, PAGE)
        owned = torch.arange(pages, device=device).repeat(row.batch) % world == rank
        num_pages = int(owned.sum())
        self.kv_indices = torch.zeros(row.batch * pages, dtype=torch.int32, device=device)
        self.kv_indices[owned] = torch.randperm(num_pages, generator=generator, device=device).int()
        self.kv_indptr = torch.arange(row.batch + 1, device=device, dtype=torch.int32) * pages
        self.last = torch.full((row.batch,), PAGE, device=device, dtype=torch.int32)
        self.copies = copies_for(row.kv_bytes(world)) if device.type == "cuda" else 1
        shape = (self.copies, 2, num_pages, PAGE, HEADS[1], DIM)
        self.caches = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        same = torch.Generator(device).manual_seed(99)
        self.q = torch.randn(row.batch, HEADS[0], DIM, generator=same, device=device, dtype=torch.bfloat16)
        sizes: dict[str, Any] = {"num_qo_heads": HEADS[0], "num_kv_heads": HEADS[1], "head_dim": DIM}
        self.planner = attn_ops.DecodePlanner(
            row.batch, row.batch * pages, page_size=PAGE, **sizes, device=device, context=self.shard
        )
        self.planner.plan(self.kv_indptr, self.kv_indices, self.last)

    def local(self, copy: int) -> tuple[Tensor, Tensor]:
        """Attention on this rank's part of the keys."""
        k_cache, v_cache = self.caches[copy]
        plan, workspace = self.planner.state, self.planner.workspace
        return torch.ops.attn.batch_decode(self.q, k_cache, v_cache, plan, workspace, return_lse=True)

    def merged(self, **options: Any) -> Call:
        """Attention and the merge of all ranks."""
        return lambda copy: merge_context(*self.local(copy), **options)


def calls_of(problem: ContextProblem, exchange: ContextExchange) -> dict[str, Call]:
    """The calls that are measured, by column."""
    calls: dict[str, Call] = {
        "local": problem.local,
        "all-gather": problem.merged(),
        "all-to-all": problem.merged(scatter_heads=True),
    }
    if exchange.unavailable is None:
        calls["one-shot"] = problem.merged(exchange=exchange)
        calls["one-shot, own heads"] = problem.merged(exchange=exchange, scatter_heads=True)
    return calls


def _check(calls: dict[str, Call]) -> None:
    """The ways to merge agree."""
    expected = calls["all-gather"](0)[0].float()  # type: ignore[index]
    for name in ("all-to-all", "one-shot", "one-shot, own heads"):
        if name not in calls:
            continue
        out, part = calls[name](0)[0].float(), expected  # type: ignore[index]
        if out.shape != part.shape:
            part = part.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        error = float((out - part).norm() / part.norm())
        if not error < MAX_RELATIVE_ERROR:
            raise RuntimeError(f"{name} differs from all-gather by {error}")


def _measure(row: ContextRow, rank: int, world: int, exchange: ContextExchange, device: torch.device) -> report.Row:
    expected = row.kv_bytes(world) / report.PEAK_BYTES_PER_US + EXCHANGE_US
    problem = ContextProblem(row, rank, world, device)
    calls = calls_of(problem, exchange)
    _check(calls)
    times = ranks.slowest(ranks.microseconds(calls, problem.copies, expected, device), device)
    del problem, calls
    alone = 0.0
    if rank == 0:
        ranks.release(device)
        whole = ContextProblem(row, 0, 1, device)
        alone = ranks.microseconds({"one GPU": whole.local}, whole.copies, expected * world, device)["one GPU"]
        del whole
    ranks.release(device)
    dist.barrier()
    fastest = min(time for name, time in times.items() if name != "local")
    return {"row": row.name, "one GPU": alone, **times, "speed-up": alone / fastest, "goal on 4": row.goal}


def measure(device: torch.device) -> tuple[list[str], list[report.Row]]:
    """The rows, from every rank."""
    rows = ROWS if device.type == "cuda" else CPU_ROWS
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange = ContextExchange(max(row.batch for row in rows), HEADS[0], DIM, device=device)
    missing = [] if exchange.unavailable is None else [f"No one-shot merge: {exchange.unavailable}.", ""]
    return missing, [_measure(row, rank, world, exchange, device) for row in rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    ranks.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure the rows, with a process for each GPU."""
    ranks.run(args, "context", measure, "Context parallel decode", NOTE)
