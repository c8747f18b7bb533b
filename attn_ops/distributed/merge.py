"""Merge the attention states of ranks that each hold a part of the keys."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from attn_ops.distributed.merge_one_shot import ContextExchange
from attn_ops.errors import DeviceError, DTypeError, PlanError, RankError, ShapeError, dtype_name, fail
from attn_ops.ops.options import FLOATS, LOG2E
from attn_ops.plan.context import context_group
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan
from attn_ops.symbolic_sizes import agree
from attn_ops.tracing import is_compiling
from attn_ops.typed import typed

__all__ = ["merge_context"]


@typed
def merge_context(
    out: Tensor,
    lse: Tensor,
    group: ProcessGroup | None = None,
    *,
    scatter_heads: bool = False,
    sinks: Tensor | None = None,
    replicated: tuple[Tensor, Tensor] | None = None,
    plan: DecodePlan | PrefillPlan | None = None,
    exchange: ContextExchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all ranks, from ``(out, lse)`` of each rank's part. Collective, and traceable.

    One functional collective, then ``attn::merge_states``: a graph contains both (``fullgraph=True``), and so does a
    CUDA graph. All ranks have the same ``rows`` and heads. A rank without keys has an ``out`` of 0 and an ``lse`` of
    -inf, which change nothing.

    Args:
        out: ``[rows, num_heads, head_dim]``, float16, bfloat16 or float32: this rank's attention output.
        lse: float32 ``[rows, num_heads]``, base 2, from ``return_lse=True``.
        group: the ranks; default those of ``exchange``, or all processes.
        scatter_heads: each rank gets its share of the heads, those from ``rank * num_heads / world`` on, by an
            all-to-all: ``1 / world`` of the bytes that every rank receives. Default: every rank gets all heads, by an
            all-gather.
        sinks: float32 ``[num_heads]``, a natural-log logit per head with value 0, which counts once for all ranks. The
            calls of attention on a part of the keys get no sinks. ``scatter_heads`` takes the sinks of all heads too.
        replicated: ``(out, lse)`` of keys that every rank has, such as the new rows of a chunk among themselves, which
            count once. With ``scatter_heads``, ``(out, lse)`` of this rank's heads.
        exchange: memory of the group's ranks, with which one kernel exchanges and merges the states. Without an
            exchange, or if it is unavailable, a collective exchanges them.
        plan: the plan by which ``out`` was computed, to check that it is this rank's plan.

    Returns:
        ``out [rows, heads, head_dim]`` in the dtype of ``out`` and float32 ``lse [rows, heads]``, base 2, over all
        keys. ``heads`` is ``num_heads``, or this rank's share of them.

    Raises:
        PlanError: ``plan`` was made for another rank or another number of ranks.
        ShapeError: the shapes of ``out``, ``lse``, ``sinks`` and ``replicated`` do not agree, or the ranks do not share
            the heads evenly.
        CapacityError: ``out`` has more rows than ``exchange`` has capacity for.
        DTypeError: ``out`` is not one of the dtypes, or ``lse`` or ``sinks`` not float32.
        DeviceError: ``lse``, ``sinks``, ``replicated`` or ``exchange`` is on another device than ``out``.
        RankError: there is no process group, or ``exchange`` is of another group.
    """
    group = context_group("merge_context", exchange.group if group is None and exchange is not None else group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shares = world if scatter_heads else 1
    _check(out, lse, sinks, replicated, shares)
    if replicated is not None:
        _check_replicated(out, replicated, shares)
    if plan is not None:
        _check_plan(plan, rank, world)
    if exchange is not None:
        _check_exchange(exchange, group, rank, world)
    if exchange is not None and exchange.unavailable is None:
        _check_device(out, "exchange.buffers", exchange.buffers)
        out, lse = exchange.merge(out, lse, scatter_heads, sinks)
        sinks = None
    elif world > 1:
        states = _all_to_all if scatter_heads else _all_gather
        out, lse = torch.ops.attn.merge_states(*states(out, lse, group, world))
        if scatter_heads and sinks is not None:
            sinks = sinks.chunk(world)[rank]
    if replicated is not None:
        out, lse = torch.ops.attn.merge_state(out, lse, *replicated)
    return (out, lse) if sinks is None else _add_sinks(out, lse, sinks)


def _check(
    out: Tensor, lse: Tensor, sinks: Tensor | None, replicated: tuple[Tensor, Tensor] | None, shares: int
) -> None:
    where = "merge_context"
    if out.dtype not in FLOATS:
        fail(
            DTypeError,
            where,
            f"out is {dtype_name(out.dtype)}",
            "float16, bfloat16 or float32",
            "call attention for one of them",
        )
    for name, t in (("lse", lse), ("sinks", sinks)):
        if t is not None and t.dtype != torch.float32:
            fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "float32", "convert it")
    state, state_lse = (None, None) if replicated is None else replicated
    others = {"lse": lse, "sinks": sinks, "the out of replicated": state, "the lse of replicated": state_lse}
    for name, t in others.items():
        if t is not None:
            _check_device(out, name, t)
    if out.dim() != 3:
        fail(ShapeError, where, f"out is {list(out.shape)}", "[rows, num_heads, head_dim]", "reshape it")
    if not agree(lse.shape, out.shape[:2]):
        fail(
            ShapeError,
            where,
            f"lse is {list(lse.shape)}",
            f"{list(out.shape[:2])} as out",
            "call attention with return_lse=True",
        )
    if sinks is not None and sinks.shape != out.shape[1:2]:
        fail(
            ShapeError, where, f"sinks is {list(sinks.shape)}", f"{list(out.shape[1:2])}, one a head", "pass all heads"
        )
    if out.shape[1] % shares:
        fail(
            ShapeError,
            where,
            f"{shares} ranks do not share {out.shape[1]} heads evenly",
            "a number of heads that is a multiple of the number of ranks",
            "leave scatter_heads out",
        )


def _check_device(out: Tensor, name: str, t: Tensor) -> None:
    if t.device != out.device:
        what, expected = f"{name} is on {t.device}", f"{out.device} as out"
        fail(DeviceError, "merge_context", what, expected, "move it, or make it there")


def _check_plan(plan: DecodePlan | PrefillPlan, rank: int, world: int) -> None:
    problem = PlanProblem.of(plan.problem)
    if (problem.rank, problem.world) != (rank, world):
        fail(
            PlanError,
            "merge_context",
            f"the plan was made for rank {problem.rank} of {problem.world}",
            f"a plan for rank {rank} of {world}",
            "make the planner with context=ContextShard.of(group, interleave=...)",
        )


def _check_exchange(exchange: ContextExchange, group: ProcessGroup, rank: int, world: int) -> None:
    if (exchange.rank, exchange.world) != (rank, world):
        fail(
            RankError,
            "merge_context",
            f"the exchange is of rank {exchange.rank} of {exchange.world}",
            f"that of rank {rank} of {world}, as in the group",
            "make the exchange with this group",
        )
    if exchange.group.group_name != group.group_name:
        fail(
            RankError,
            "merge_context",
            f"the exchange is of group {exchange.group.group_name}",
            f"that of group {group.group_name}",
            "make the exchange with this group, or leave group out",
        )


def _check_replicated(out: Tensor, replicated: tuple[Tensor, Tensor], shares: int) -> None:
    rows, heads, dim = out.shape
    shapes, expected = [list(t.shape) for t in replicated], [[rows, heads // shares, dim], [rows, heads // shares]]
    if shapes != expected:
        fail(
            ShapeError,
            "merge_context",
            f"replicated is {shapes}",
            f"{expected} as the merged result",
            "pass (out, lse) of the same rows and heads",
        )
    dtypes = [t.dtype for t in replicated]
    if dtypes != [out.dtype, torch.float32]:
        fail(DTypeError, "merge_context", f"replicated is {dtypes}", f"{[out.dtype, torch.float32]}", "convert it")


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    """float32 ``[..., elements]``: the bits of ``out [..., heads, dim]``, then ``lse [..., heads]``: one message."""
    rows = out.flatten(-2)
    if rows.shape[-1] * rows.element_size() % 4:
        rows = rows.float()
    rows = rows.contiguous()
    if not is_compiling() and rows.storage_offset() * rows.element_size() % 4:  # Dynamo does not trace storage_offset
        rows = rows.clone()
    return torch.cat((rows.view(torch.float32), lse), -1)


def _unpacked(packed: Tensor, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``v [rows, states, heads, dim]``, ``s [rows, states, heads]``: views of ``packed [states, rows, elements]``."""
    packed = packed.transpose(0, 1)
    out, lse = packed[..., :-heads], packed[..., -heads:]
    if out.shape[-1] != heads * dim:
        out = out.view(dtype)
    return torch.unflatten(out.to(dtype), -1, (heads, dim)), lse


def _all_gather(out: Tensor, lse: Tensor, group: ProcessGroup, world: int) -> tuple[Tensor, Tensor]:
    (rows, heads, dim), packed = out.shape, _packed(out, lse)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, world, group.group_name)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    return _unpacked(torch.unflatten(gathered, 0, (world, rows)), heads, dim, out.dtype)


def _all_to_all(out: Tensor, lse: Tensor, group: ProcessGroup, world: int) -> tuple[Tensor, Tensor]:
    """The states of this rank's heads from every rank."""
    rows, heads, dim = out.shape
    share = heads // world
    by_rank = (torch.unflatten(t, 1, (world, share)).transpose(0, 1) for t in (out, lse))
    packed = _packed(*by_rank).flatten(0, 1)
    sizes = [rows] * world
    received = torch.ops._c10d_functional.all_to_all_single(packed, sizes, sizes, group.group_name)
    received = torch.ops._c10d_functional.wait_tensor(received)
    return _unpacked(torch.unflatten(received, 0, (world, rows)), share, dim, out.dtype)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The states with a logit per head of value 0 in the denominator: ``2^lse`` becomes ``2^lse + exp(sink)``."""
    merged = torch.logaddexp2(lse, sinks * LOG2E)
    share = torch.where(merged > -torch.inf, torch.exp2(lse - merged), 0.0)
    return (out * share[..., None]).to(out.dtype), merged
