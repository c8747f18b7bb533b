"""Checks of the planning ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ops.ops.backends import Problem
from attn_ops.ops.checks.checker import OpChecker
from attn_ops.plan.state import DecodePlan, PrefillPlan


def _page_table(op: OpChecker, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: Any) -> None:
    device = plan.kv_len
    op.indptr("kv_indptr", kv_indptr, "[batch + 1]", device)
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), device)
    op.tensor("kv_last_page_len", kv_last_page_len, "[batch]", (torch.int32,), device)
    op.size("kv_last_page_len", "length", kv_last_page_len.shape[0], kv_indptr.shape[0] - 1, "kv_indptr less 1")
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


def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("plan_decode")
    typed = op.plan(plan, DecodePlan, plan[0] if plan else None)
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed)
    return Problem("plan_decode", typed.kv_len.device)


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("plan_prefill")
    typed = op.plan(plan, PrefillPlan, plan[0] if plan else None)
    op.indptr("qo_indptr", qo_indptr, "[batch + 1]", typed.kv_len)
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed)
    op.size("qo_indptr", "length", qo_indptr.shape[0], kv_indptr.shape[0], "kv_indptr")
    return Problem("plan_prefill", typed.kv_len.device)
