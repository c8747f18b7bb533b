"""``attn::plan_decode``: which kernel fills a plan."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor

from attn_ops.kernels.reference.plan import plan_decode as plan_in_closed_form
from attn_ops.kernels.triton.context import shard_of
from attn_ops.kernels.triton.plan_decode import plan_for_load_balance
from attn_ops.kernels.triton.plan_decode_fixed_split import plan_fixed_split
from attn_ops.kernels.triton.plan_steps import COPY_PAGES
from attn_ops.plan.state import KV_BLOCK, DecodePlan, PlanProblem, is_published


def _arguments(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, seq_lens: Tensor | None, p: DecodePlan
) -> dict[str, Any]:
    """Arguments that the kernels of decode plans share: the page table, the plan and its problem."""
    problem, max_batch, num_ctas = PlanProblem.of(p.problem), p.kv_len.shape[0], p.cta_indptr.shape[0] - 1
    return {
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "last_page_len": kv_last_page_len,
        "seq_lens": seq_lens,
        "plan_kv_indptr": p.kv_indptr,
        "plan_kv_indices": p.kv_indices,
        "plan_kv_len": p.kv_len,
        "work": p.work,
        "cta_indptr": p.cta_indptr,
        "merge_indptr": p.merge_indptr,
        "split_counters": p.split_counters,
        "batch": kv_indptr.shape[0] - 1,
        "num_indices": kv_indices.shape[0],
        "max_batch": max_batch,
        "max_pages": p.kv_indices.shape[0],
        "num_ctas": num_ctas,
        "num_split_counters": p.split_counters.numel(),
        "PAGE_SIZE": problem.page_size,
        "WINDOW": problem.window,
        "SHARD": shard_of(problem, problem.window > 0),
        "KV_BLOCK": KV_BLOCK,
        "B": triton.next_power_of_2(max_batch),
        "C": triton.next_power_of_2(num_ctas + 1),
        "COPY_PAGES": COPY_PAGES,
    }


def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: list[Tensor],
    *,
    seq_lens: Tensor | None = None,
) -> None:
    """Fill ``plan``: by one kernel, or by tensor operations if it is too large to be published."""
    p = DecodePlan(*plan)
    if not is_published(p.kv_len.shape[0]):
        plan_in_closed_form(kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    fill = plan_fixed_split if PlanProblem.of(p.problem).split else plan_for_load_balance
    fill(p, kv_indices.shape[0], _arguments(kv_indptr, kv_indices, kv_last_page_len, seq_lens, p))
