"""Plans that are made inside a call: for one-shot calls, and for calls that an earlier plan does not fit.

A plan's capacity depends only on shapes, so the host waits for no device, and the call traces: under
``torch.compile`` and ``torch.export`` it is a page-table op (for block tables), a plan op and an attention op.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_ops.eager.checked_call import call_op
from attn_ops.eager.interposition import is_traced
from attn_ops.eager.recorded_calls import allocated
from attn_ops.frontend.call import AttentionCall, Planned
from attn_ops.frontend.context import RankKeys
from attn_ops.frontend.masks import tree_mask_bits
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import BatchSize, ragged_pages, uniform_indptr
from attn_ops.plan.sizing import (
    ctas_per_head,
    general_ctas_per_head,
    max_splits_for,
    most_tiles,
    splits_per_head,
)
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import (
    DecodePlan,
    PlanProblem,
    PrefillPlan,
    allocate_decode,
    allocate_prefill,
    workspace_size,
)
from attn_ops.symbolic_sizes import at_least, at_most

Plan = TypeVar("Plan", bound=DecodePlan | PrefillPlan)


def problem_of(spec: PlanSpec, device: torch.device, max_kv_len: int, rows: int = 1) -> PlanProblem:
    """The problem of a plan of ``spec`` for about ``rows`` query rows of each request."""
    return PlanProblem.of_options(
        page_size=spec.page_size,
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_qk=spec.head_dim_qk,
        head_dim_vo=spec.head_dim_vo,
        max_kv_len=at_least(max_kv_len, 1),
        tile_rows=1 if spec.decode else spec.tile_rows(device, rows),
        window_left=spec.window_left,
        causal=spec.causal,
        window_right=spec.window_right,
        fixed_split_size=spec.fixed_split_size,
        short_kv=int(spec.short_kv),
    )


def with_workspace(plan: DecodePlan | PrefillPlan) -> Planned:
    """The plan and a new workspace for it."""
    memory = torch.empty(workspace_size(plan), dtype=torch.float32, device=plan.kv_len.device)
    return Planned(plan, allocated(memory))


def without_window(plan: Plan) -> Plan:
    """The same batch in a new plan of the same capacity, for calls that see keys outside the planned window."""
    return _replanned(plan, PlanProblem.of(plan.problem)._replace(window=0), plan.kv_indices)


def with_pages(plan: PrefillPlan, kv_indices: Tensor) -> PrefillPlan:
    """The same batch in a new plan over other pages: ``kv_indices``, of the same number as in ``plan``."""
    return _replanned(plan, PlanProblem.of(plan.problem), kv_indices)


def _replanned(plan: Plan, problem: PlanProblem, kv_indices: Tensor) -> Plan:
    replanned = type(plan)(problem.as_shape_tensor(plan.kv_len.device), *(torch.empty_like(t) for t in plan[1:]))
    table = plan.kv_indptr, kv_indices, _last_page_len(plan)
    if isinstance(plan, DecodePlan):
        call_op("plan_decode", *table, replanned)
    else:
        call_op("plan_prefill", plan.qo_indptr, *table, replanned)
    return replanned


def _last_page_len(plan: DecodePlan | PrefillPlan) -> Tensor:
    return (plan.kv_len - 1) % PlanProblem.of(plan.problem).page_size + 1


def with_rows(plan: DecodePlan, spec: PlanSpec, batch: int, rows: int) -> PrefillPlan:
    """The first ``batch`` requests in a new plan of ``spec``, a prefill of ``rows`` query rows of each."""
    device = plan.kv_len.device
    problem = problem_of(spec, device, PlanProblem.of(plan.problem).max_kv_len, rows)
    pages, qo_indptr = plan.kv_indices.shape[0], uniform_indptr(batch, rows, device)
    splits = splits_per_head(device, problem, most_tiles(problem, batch, batch * rows))
    if problem.split:
        splits = max_splits_for(problem, batch, batch * rows, pages * spec.page_size)
    table = plan.kv_indptr[: batch + 1], plan.kv_indices, _last_page_len(plan)[:batch]
    return _prefill_plan(problem, qo_indptr, table, (max(1, batch), batch * rows, pages), 0 if spec.unsplit else splits)


def _prefill_plan(
    problem: PlanProblem,
    qo_indptr: Tensor,
    table: tuple[Tensor, Tensor, Tensor],
    capacity: tuple[int, int, int],
    splits: int,
    **options: Tensor,
) -> PrefillPlan:
    """A new plan of a page table, with ``capacity`` for requests, query rows and pages, and for ``splits``."""
    plan = allocate_prefill(problem, *capacity, qo_indptr.device, splits, torch.empty)
    call_op("plan_prefill", qo_indptr, *table, plan, **options)
    return plan


def expected_keys(longest: int | Tensor | None) -> int | None:
    """``longest``, the most keys of one request as the caller says. No result may depend on it.

    None where it is not known, and in traced calls: another number would compile another graph. Plans are then for the
    capacity of the tables or keys.
    """
    return None if is_traced() or isinstance(longest, Tensor) else longest or None


class BlockTables(NamedTuple):
    """A batch given by ``block_tables [batch, width]`` and ``seq_lens [batch]``, int32 on the query's device.

    qo_indptr  ``[batch + 1]``; None for decode, one query row per request
    rows       query rows of the batch
    tree_mask  which of the last tokens of its request each row sees, in place of ``causal``
    keys       the keys of one rank; None for all keys
    expected   the result of :func:`expected_keys`
    """

    spec: PlanSpec
    block_tables: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor | None
    rows: int
    tree_mask: Tensor | None = None
    keys: RankKeys | None = None
    expected: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.spec.head_dims

    def check(self, call: AttentionCall) -> None:
        return None

    def plan(self) -> DecodePlan | PrefillPlan:
        # Capacity for one request at least: an empty batch is no special case.
        batch, width = max(1, self.block_tables.shape[0]), self.block_tables.shape[1]
        page_size, device = self.spec.page_size, self.block_tables.device
        kv_lens = self.seq_lens if self.keys is None else self.keys.visible(self.seq_lens)
        table = call_op("page_table", self.block_tables, kv_lens, page_size)
        capacity = width * page_size
        expected = capacity if self.expected is None else at_most(capacity, self.expected)
        spec = self.spec.of_batch(device, BatchSize(batch, self.rows, 0, expected))
        problem = problem_of(spec, device, capacity, -(-self.rows // batch))
        problem, options = (problem, {}) if self.keys is None else self.keys.planned(problem)
        if self.qo_indptr is None:
            if spec.general_decode:
                ctas = general_ctas_per_head(device, problem.num_kv_heads)
            else:
                ctas = ctas_per_head(device, problem, spec.fp8_decode)
            decode = allocate_decode(problem, batch, batch * width, ctas, device, torch.empty)
            call_op("plan_decode", *table, decode, **options)
            return decode
        splits = splits_per_head(device, problem, most_tiles(problem, batch, self.rows))
        return _prefill_plan(problem, self.qo_indptr, table, (batch, self.rows, batch * width), splits, **options)

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        plan = self.plan()
        if self.tree_mask is not None:
            assert isinstance(plan, PrefillPlan)
            capacity = self.block_tables.shape[1] * self.spec.page_size
            options = options._replace(mask=tree_mask_bits(self.tree_mask, plan, capacity))
        return with_workspace(plan), options


class RaggedLengths(NamedTuple):
    """A batch of ragged KV given by cumulative lengths, int32 ``[batch + 1]`` on the query's device.

    ``rows`` and ``keys`` are sizes of the query and of the keys. ``max_kv_len``: most keys of one request, if known.
    ``expected``: most keys of one request as the caller says, on which no result may depend.
    """

    spec: PlanSpec
    qo_indptr: Tensor
    kv_indptr: Tensor
    rows: int
    keys: int
    max_kv_len: int | None = None
    expected: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.spec.head_dims

    def check(self, call: AttentionCall) -> None:
        return None

    def plan(self) -> PrefillPlan:
        batch = max(1, self.qo_indptr.shape[0] - 1)
        longest = self.keys if self.max_kv_len is None else self.max_kv_len
        device = self.qo_indptr.device
        expected = longest if self.expected is None else self.expected
        spec = self.spec.of_batch(device, BatchSize(batch, self.rows, 0, expected))
        problem = problem_of(spec, device, longest, -(-self.rows // batch))
        table = self.kv_indptr, *ragged_pages(self.kv_indptr)
        return _prefill_plan(problem, self.qo_indptr, table, (batch, self.rows, 0), splits_per_head(device, problem))

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        return with_workspace(self.plan()), options
