"""Plans made inside a call, for functions without a plan(): shapes alone decide their size, so they trace.

They have room for a request at least, so that a batch of none is no special case.
Under ``torch.compile`` and ``torch.export`` such a call is a page-table op, a plan op and an attention op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.plan.resizable import PlanSpec
from attn_ops.plan.sizing import ctas_per_head, rows_per_tile, splits_per_head
from attn_ops.plan.state import (
    DecodePlan,
    PlanProblem,
    PrefillPlan,
    allocate_decode,
    allocate_prefill,
    split_tokens,
    workspace_size,
)


def bound(size: int) -> int:
    """``size``, at least 1; in graphs the power of 2 from it on, so that a range of sizes shares one."""
    if type(size) is int and not torch.compiler.is_compiling():
        return max(1, size)
    power = 1
    while power < size:
        power *= 2
    return power


def problem_of(shape: PlanSpec, max_kv_len: int, rows: int = 1) -> PlanProblem:
    """``rows``: query rows that a request has, about."""
    tile_rows = shape.tile_rows or rows_per_tile(shape.num_qo_heads, shape.num_kv_heads, rows)
    return PlanProblem(
        page_size=shape.page_size,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim_qk=shape.head_dim_qk,
        head_dim_vo=shape.head_dim_vo,
        max_kv_len=bound(max_kv_len),
        tile_rows=1 if shape.decode else tile_rows,
        window=shape.window_left + 1,
        causal=int(shape.causal),
        split=split_tokens(shape.fixed_split_size, shape.page_size),
    )


def plan_block_tables(
    shape: PlanSpec, block_tables: Tensor, seq_lens: Tensor, qo_indptr: Tensor | None = None, max_rows: int = 0
) -> DecodePlan | PrefillPlan:
    """A plan for ``block_tables [batch, width]`` and ``seq_lens [batch]``, int32 on the query's device."""
    batch, width = max(1, block_tables.shape[0]), block_tables.shape[1]
    page_size, device = shape.page_size, block_tables.device
    kv_indptr, kv_indices, last = torch.ops.attn.page_table(block_tables, seq_lens, page_size)
    problem = problem_of(shape, bound(width) * page_size, _share(max_rows, batch))
    if qo_indptr is None:
        shares = ctas_per_head(device, shape.num_kv_heads)
        decode = allocate_decode(problem, batch, batch * width, shares, device, torch.empty)
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, last, decode)
        return decode
    pieces = splits_per_head(device, problem)
    prefill = allocate_prefill(problem, batch, max_rows, batch * width, device, pieces, torch.empty)
    torch.ops.attn.plan_prefill(qo_indptr, kv_indptr, kv_indices, last, prefill)
    return prefill


def plan_ragged(shape: PlanSpec, qo_indptr: Tensor, kv_indptr: Tensor, max_rows: int, max_kv_len: int) -> PrefillPlan:
    """A plan for ragged KV; both indptr int32 ``[batch + 1]`` on the query's device."""
    batch = max(1, qo_indptr.shape[0] - 1)
    problem, device = problem_of(shape, max_kv_len, _share(max_rows, batch)), qo_indptr.device
    plan = allocate_prefill(problem, batch, max_rows, 0, device, splits_per_head(device, problem), torch.empty)
    none, ones = kv_indptr.new_zeros(0), torch.ones_like(kv_indptr[1:])
    torch.ops.attn.plan_prefill(qo_indptr, kv_indptr, none, ones, plan)
    return plan


def without_window(plan: DecodePlan | PrefillPlan) -> DecodePlan | PrefillPlan:
    """The same batch planned anew, into as much room, for calls that see beyond the planned window."""
    problem = PlanProblem.of(plan.problem)._replace(window=0)
    fields = [problem.as_shape_tensor(plan.kv_len.device), *(torch.empty_like(t) for t in plan[1:])]
    table = plan.kv_indptr, plan.kv_indices, (plan.kv_len - 1) % problem.page_size + 1
    if isinstance(plan, DecodePlan):
        torch.ops.attn.plan_decode(*table, fields)
        return DecodePlan(*fields)
    torch.ops.attn.plan_prefill(plan.qo_indptr, *table, fields)
    return PrefillPlan(*fields)


def _share(rows: int, batch: int) -> int:
    return bound(-(-rows // batch))


def scratch(plan: DecodePlan | PrefillPlan) -> Tensor:
    """A new workspace for the plan."""
    return torch.empty(workspace_size(plan), dtype=torch.float32, device=plan.kv_len.device)
