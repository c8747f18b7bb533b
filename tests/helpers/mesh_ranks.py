"""Cases of tensor and context parallelism on one mesh, ``tp x cp``, run by every rank (see ``rank_processes``).

A rank has its share of the heads (``tp``) and its part of every request's keys (``cp``). Ops get DTensors of the
``tp`` dimension, or local tensors and a plan of the rank's heads; the merge is over ``cp``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import attn_ops
from attn_ops.distributed import ContextShard, merge_context, shard_plan
from helpers.context_batch import DEVICE, Batch, Problem
from helpers.oracle import Expected
from helpers.page_tables import indptr

Group = dist.ProcessGroup
TP = 2
LENS = (70, 0, 1, 33, 130)
ROWS = (5, 0, 1, 3, 17)


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (TP, dist.get_world_size() // TP), mesh_dim_names=("tp", "cp"))


class Rank:
    """The batch of a rank of ``cp``, with the heads of all ranks of ``tp``, and its share of them."""

    def __init__(self, problem: Problem, spare: int = 0) -> None:
        self.group = mesh()["cp"].get_group()
        self.batch = Batch(problem, ContextShard.of(self.group, interleave=problem.interleave), spare)
        self.batch.append(self.batch.lens)
        self.sizes: dict[str, Any] = self.batch.sizes() | {"context": self.batch.shard, "head_shards": TP}

    def own(self, t: Tensor, dim: int) -> Tensor:
        return t.chunk(TP, dim)[mesh()["tp"].get_local_rank()].contiguous()

    def tensors(self, q: Tensor, as_dtensors: bool) -> list[Any]:
        """The query and the caches with this rank's heads."""
        head_dim = 2 if self.batch.problem.kv_layout == "NHD" else 1
        parts = [(self.own(t, dim), dim) for t, dim in ((q, 1), *((t, head_dim) for t in self.batch.cache()))]
        if not as_dtensors:
            return [t for t, _ in parts]
        return [DTensor.from_local(t, mesh()["tp"], [Shard(dim)], run_check=False) for t, dim in parts]

    def attend(self, op: str, q: Tensor, planner: Any, as_dtensors: bool, **options: Any) -> tuple[Tensor, Tensor]:
        plan = planner.state if as_dtensors else shard_plan(planner.state, mesh()["tp"])
        call = (*self.tensors(q, as_dtensors), plan, planner.workspace)
        layout = self.batch.problem.kv_layout
        with torch.no_grad():
            states = getattr(torch.ops.attn, op)(*call, kv_layout=layout, return_lse=True, **options)
        out, lse = (t.to_local() if isinstance(t, DTensor) else t for t in states)
        return out, lse

    def check(self, merged: Sequence[Tensor], q: Tensor, rows: Sequence[int], **options: Any) -> None:
        whole = Expected.of(self.batch.requests(q, rows), **options)
        Expected(*(self.own(t, 1) for t in (whole.out, whole.lse, whole.spread, whole.reach))).check(*merged)


BASE = Problem(LENS, heads=(8, 4), dim=16, dim_vo=16)
PROBLEMS = (
    BASE,
    replace(BASE, heads=(4, 4), kv_layout="HND"),
    replace(BASE, heads=(8, 2), interleave=48),
    replace(BASE, kv_dtype=torch.float8_e4m3fn),
    replace(BASE, dtype=torch.bfloat16),
)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window_left": 20}, {"window_left": 90, "logits_soft_cap": 5.0})


def decode(group: Group) -> None:
    for problem in PROBLEMS:
        rank = Rank(problem)
        q, sinks = rank.batch.queries(len(LENS)), torch.linspace(-2, 2, problem.heads[0]).to(DEVICE)
        for options in OPTIONS:
            planner = attn_ops.DecodePlanner(8, 80, **rank.sizes, window_left=options.get("window_left", -1))
            plan = planner.plan(*rank.batch.table(), validate=True)
            for as_dtensors in (False, True):
                state = rank.attend("batch_decode", q, planner, as_dtensors, **options)
                merged = merge_context(*state, rank.group, sinks=rank.own(sinks, 0), plan=plan)
                rank.check(merged, q, [1] * len(LENS), sinks=sinks, causal=True, **options)


def prefill(group: Group) -> None:
    for problem in PROBLEMS:
        rank = Rank(problem)
        q = rank.batch.queries(sum(ROWS))
        for options in (*({"causal": True, **options} for options in OPTIONS), {"window_left": 9, "window_right": 4}):
            bounds = {name: value for name, value in options.items() if name != "logits_soft_cap"}
            planner = attn_ops.PrefillPlanner(8, sum(ROWS), 80, **rank.sizes, **bounds)
            planner.plan(indptr(ROWS).to(DEVICE), *rank.batch.table())
            for as_dtensors in (False, True):
                state = rank.attend("batch_prefill", q, planner, as_dtensors, **options)
                rank.check(merge_context(*state, rank.group), q, ROWS, **options)


def compiled_steps(group: Group) -> None:
    """Attend and merge in one graph, over steps of growing requests."""
    rank = Rank(BASE, spare=3)
    planner = attn_ops.DecodePlanner(8, 80, **rank.sizes, window_left=40)
    plan = shard_plan(planner.state, mesh()["tp"])

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, workspace: Tensor) -> tuple[Tensor, Tensor]:
        call = (q, k_cache, v_cache, plan, workspace)
        return merge_context(*torch.ops.attn.batch_decode(*call, window_left=40, return_lse=True), rank.group)

    torch._dynamo.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for _ in range(2):
            rank.batch.grow([1] * len(LENS))
            planner.plan(*rank.batch.table())
            q = rank.batch.queries(len(LENS))
            merged = compiled(*rank.tensors(q, as_dtensors=False), plan, planner.workspace)
            rank.check(merged, q, [1] * len(LENS), window_left=40, causal=True)


CASES: dict[str, Callable[[Group], None]] = {case.__name__: case for case in (decode, prefill, compiled_steps)}
