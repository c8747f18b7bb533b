"""Checks of the planning ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_ops.errors import PlanError
from attn_ops.ops.backends import Problem
from attn_ops.ops.checks.checker import OpChecker
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan


def _page_table(
    op: OpChecker,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: DecodePlan | PrefillPlan,
    seq_lens: Tensor | None,
) -> None:
    op.indptr("kv_indptr", kv_indptr, "[batch + 1]", plan.kv_len)
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), plan.kv_len)
    op.per_request("kv_last_page_len", kv_last_page_len, "kv_indptr", kv_indptr)
    for what, needed, capacity, name in (
        ("requests", kv_indptr.shape[0] - 1, plan.kv_len.shape[0], "max_batch"),
        ("pages", kv_indices.shape[0], plan.kv_indices.shape[0], "max_pages"),
    ):
        op.capacity(
            needed,
            capacity,
            f"the batch has {{needed}} {what} and the plan capacity for {{capacity}}",
            f"{name} of at least {{needed}}",
            f"make the planner with that {name}",
        )
    world = PlanProblem.of(plan.problem).world
    if seq_lens is None:
        if world > 1:
            what, expected = f"the plan is for the keys of one of {world} ranks", "seq_lens, the lengths on all ranks"
            op.fail(PlanError, what, expected, "plan with a planner, or pass the result of attn::seq_lens")
        return
    if world == 1:
        what = "seq_lens is given and the plan is for whole requests"
        op.fail(PlanError, what, "a plan for the keys of one of several ranks", "leave seq_lens out")
    op.tensor("seq_lens", seq_lens, "[batch]", (torch.int32,), plan.kv_len)
    op.size("seq_lens", "length", seq_lens.shape[0], kv_last_page_len.shape[0], "kv_last_page_len")


def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    seq_lens: Tensor | None = None,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("plan_decode")
    typed = op.plan(plan, DecodePlan, plan[0] if plan else None)
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed, seq_lens)
    return Problem(op.name, typed.kv_len.device)


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    seq_lens: Tensor | None = None,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("plan_prefill")
    typed = op.plan(plan, PrefillPlan, plan[0] if plan else None)
    op.indptr("qo_indptr", qo_indptr, "[batch + 1]", typed.kv_len)
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed, seq_lens)
    op.size("qo_indptr", "length", qo_indptr.shape[0], kv_indptr.shape[0], "kv_indptr")
    return Problem(op.name, typed.kv_len.device)
