"""Decode with the heads of a layer divided over several GPUs, compared with one GPU. Run on N GPUs."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attn_ops
from attn_ops.distributed import shard_plan
from benchmarks import ranks, report
from benchmarks.timing import copies_for

DIM, PAGE = 128, 16
NOTE = (
    "Microseconds of one decode launch, bf16, heads of 128, pages of 16, in a CUDA graph over rotating caches: the "
    "median of replays, and of the GPUs the slowest. Each GPU has its share of the heads; nothing is exchanged."
)


class HeadsRow(NamedTuple):
    """A batch of equal requests. ``goal`` is the least speed-up on each number of GPUs."""

    name: str
    batch: int
    length: int
    heads: tuple[int, int]
    goal: dict[int, float]

    def kv_bytes(self, world: int) -> int:
        return 4 * self.batch * self.length * self.heads[1] * DIM // world


ROWS = (HeadsRow("70B layer, 64/8 heads, 32 x 8k", 32, 8 << 10, (64, 8), {4: 3.6}),)
CPU_ROWS = (HeadsRow("4/4 heads, 2 x 64", 2, 64, (4, 4), {}),)


class HeadsProblem:
    """The caches and the query of one rank's heads, with the plan of the whole layer."""

    def __init__(self, row: HeadsRow, mesh: DeviceMesh | None, device: torch.device) -> None:
        world, pages = 1 if mesh is None else mesh.size(), row.batch * -(-row.length // PAGE)
        generator = torch.Generator(device).manual_seed(0)
        qo_heads, kv_heads = (count // world for count in row.heads)
        self.copies = copies_for(row.kv_bytes(world)) if device.type == "cuda" else 1
        shape = (self.copies, 2, pages, PAGE, kv_heads, DIM)
        self.caches = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        self.q = torch.randn(row.batch, qo_heads, DIM, generator=generator, device=device).bfloat16()
        sizes: dict[str, Any] = {"num_qo_heads": row.heads[0], "num_kv_heads": row.heads[1], "head_dim": DIM}
        self.planner = attn_ops.DecodePlanner(
            row.batch, pages, page_size=PAGE, **sizes, device=device, head_shards=world
        )
        self.planner.plan(
            torch.arange(row.batch + 1, device=device, dtype=torch.int32) * (pages // row.batch),
            torch.randperm(pages, generator=generator, device=device).int(),
            torch.full((row.batch,), (row.length - 1) % PAGE + 1, device=device, dtype=torch.int32),
        )
        self.plan = self.planner.state if mesh is None else shard_plan(self.planner.state, mesh)

    def call(self, copy: int) -> Tensor:
        k_cache, v_cache = self.caches[copy]
        return torch.ops.attn.batch_decode(self.q, k_cache, v_cache, self.plan, self.planner.workspace)[0]


def measure(device: torch.device) -> tuple[list[str], list[report.Row]]:
    """The rows, from every rank."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    return [], [_row(row, mesh, device) for row in (ROWS if device.type == "cuda" else CPU_ROWS)]


def _row(row: HeadsRow, mesh: DeviceMesh, device: torch.device) -> report.Row:
    world, times = mesh.size(), dict[str, float]()
    for name, grid in (("one GPU", None), (f"{world} GPUs", mesh)):
        problem = HeadsProblem(row, grid, device)
        expected = row.kv_bytes(1 if grid is None else world) / report.PEAK_BYTES_PER_US
        times |= ranks.microseconds({name: problem.call}, problem.copies, expected, device)
        del problem
        ranks.release(device)
        dist.barrier()
    found = ranks.slowest(times, device)
    alone, shared = found.values()
    return {"row": row.name, **found, "speed-up": alone / shared, "goal": row.goal.get(world)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    ranks.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Measure the rows, with a process for each GPU."""
    ranks.run(args, "heads", measure, "Decode with divided heads", NOTE)
