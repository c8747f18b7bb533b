"""Plans of one rank's heads, as views of a plan for all heads."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from attn_ops.errors import RankError, fail
from attn_ops.plan.plan_checks import check_head_shards
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan
from attn_ops.typed import typed

__all__ = ["shard_plan"]

Plan = TypeVar("Plan", bound=DecodePlan | PrefillPlan)

_local_fields: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The fields of rank-local plans by ``plan.problem`` and number of ranks, so that repeated calls take equal tensors."""


def check_in_mesh(where: str, mesh: DeviceMesh, fix: str) -> None:
    """Raise a RankError unless there is a process group, and this rank is in the mesh."""
    if not dist.is_initialized():
        what, init = "there is no process group", "call torch.distributed.init_process_group"
        fail(RankError, where, what, "one with the ranks of the mesh", init)
    if mesh.get_coordinate() is None:
        fail(RankError, where, "this rank is not in the mesh", "a rank of the mesh", fix)


@typed
def shard_plan(plan: Plan, mesh: DeviceMesh) -> Plan:
    """The plan of one rank's heads: what an op needs that is called with the rank's local tensors.

    For tensor parallelism without DTensors at the op: local outputs of ``ColwiseParallel``, ``local_map``, or slices by
    hand. An op that is called with DTensors takes ``plan`` itself.

    The result is of views of ``plan``: call this once, and ``planner.plan()`` in every step. The planner's workspace
    serves both.

    Args:
        plan: ``planner.state``, made for the heads of all ranks.
        mesh: the ranks that the heads are divided over, for example ``mesh["tp"]``. All its dimensions count.

    Raises:
        RankError: there is no process group, or this rank is not in the mesh.
        ShapeError: the heads do not divide evenly. A single KV head is on every rank.
    """
    check_in_mesh("shard_plan", mesh, "call it only on those ranks")
    problem, shards = PlanProblem.of(plan.problem), mesh.size()
    check_head_shards("shard_plan", problem.sharded_heads(), shards)
    return local_plan(plan, shards)


def local_plan(plan: Plan, shards: int) -> Plan:
    """``plan`` with the heads of one of ``shards`` ranks, which divide them evenly. Traceable.

    An eager call returns the same tensors every time.
    """
    if type(plan.problem) is not Tensor:  # traced
        return _replace(plan, _make_fields(plan, shards))
    by_shards = _local_fields.setdefault(plan.problem, {})
    source = _counters(plan)
    found = by_shards.get(shards)
    if found is None or found[0] is not source:
        found = by_shards[shards] = source, _make_fields(plan, shards)
    return _replace(plan, found[1])


def _replace(plan: Plan, fields: dict[str, Tensor]) -> Plan:
    return type(plan)(**(plan._asdict() | fields))


def _counters(plan: DecodePlan | PrefillPlan) -> Tensor | None:
    return plan.split_counters if isinstance(plan, DecodePlan) else None


def _make_fields(plan: DecodePlan | PrefillPlan, shards: int) -> dict[str, Tensor]:
    """The fields that depend on the number of heads. All other fields are the same on every rank."""
    problem = PlanProblem.of(plan.problem).shard(shards)
    fields = {"problem": problem.as_shape_tensor(plan.problem.device)}
    if isinstance(plan, DecodePlan):
        slots = plan.split_counters.shape[0]
        memory = plan.split_counters.view(-1)[: slots * problem.num_qo_heads]
        fields["split_counters"] = memory.view(slots, problem.num_qo_heads)
    return fields
