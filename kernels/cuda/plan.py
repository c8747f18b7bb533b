"""Plans on Hopper: the host side of ``plan_prefill.cu``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.triton.plan_prefill import plan_prefill as plan_of_any_size
from attn_ops.kernels.triton.plan_prefill import shared_arguments
from attn_ops.kernels.triton.plan_steps import COPY_PAGES
from attn_ops.ops.cuda_kernels import CUDA_PLANS
from attn_ops.plan import state
from attn_ops.plan.sizing import ctas_of_tile, planned_cluster_splits
from attn_ops.plan.state import KV_BLOCK, PlanProblem, PrefillPlan
from attn_ops.symbolic_sizes import statically_known_true

MAX_REQUESTS, MAX_ITEMS = 2048, 65536
"""Capacities of the largest plan, which fits in shared memory. The Triton kernel writes larger ones."""

_WRITES = (
    "plan_qo_indptr",
    "plan_kv_indptr",
    "plan_kv_indices",
    "plan_kv_len",
    "work",
    "split_tiles",
    "queue",
)

PLAN_PREFILL = Kernel(
    "plan_prefill.cu",
    "plan_prefill_kernel",
    {
        **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "last_page_len", "seq_lens", *_WRITES), "pointer"),
        **dict.fromkeys(("batch", "num_indices"), "i32"),
        **dict.fromkeys(("max_batch", "max_pages", "max_items", "max_split_tiles", "wave"), "i32"),
        **dict.fromkeys(("page_size", "tile_rows", "window", "ahead"), "i32"),
        **dict.fromkeys(("ctas", "cluster_splits", "split_blocks", "rank", "world", "interleave"), "i32"),
    },
    writes=_WRITES,
)

CONSTANTS = (
    "KV_BLOCK",
    "LENGTH_BUCKETS",
    "SPLIT_CANDIDATES",
    "MIN_SPLIT_BLOCKS",
    "BALANCE_WAVES",
    "BLOCK_COST",
    "ITEM_COST",
    "COMBINE_COST",
    "MAX_COST",
)
"""Constants of :mod:`attn_ops.plan.state`, which are macros of these names."""

SPECIALIZATIONS = {
    (threads, one_chunk): Specialization(
        PLAN_PREFILL,
        {"THREADS": threads, "ONE_CHUNK": one_chunk},
        sizes={
            **{name: getattr(state, name) for name in CONSTANTS},
            "COPY_PAGES": COPY_PAGES,
            "MAX_REQUESTS": threads if one_chunk else MAX_REQUESTS,
            "MAX_ITEMS": threads if one_chunk else MAX_ITEMS,
        },
        threads=threads,
    )
    for threads, one_chunk in CUDA_PLANS
}
"""Key of :data:`CUDA_PLANS` -> specialization."""


def _key(max_batch: Any, max_items: Any) -> tuple[int, bool]:
    """The key of a plan with capacity for ``max_batch`` requests and ``max_items`` work items."""
    for threads, one_chunk in CUDA_PLANS:
        if statically_known_true(max_items <= threads) and statically_known_true(max_batch <= threads):
            return threads, one_chunk
    return CUDA_PLANS[-1]


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: list[Tensor],
    *,
    seq_lens: Tensor | None = None,
) -> None:
    p = PrefillPlan(*plan)
    max_batch, max_items = p.kv_len.shape[0], p.work.shape[0]
    if not statically_known_true(max_batch <= MAX_REQUESTS) or not statically_known_true(max_items <= MAX_ITEMS):
        plan_of_any_size(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    problem = PlanProblem.of(p.problem)
    launch(
        SPECIALIZATIONS[_key(max_batch, max_items)],
        (1 + (kv_indices.shape[0] + COPY_PAGES - 1) // COPY_PAGES,),
        **shared_arguments(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, seq_lens, p),
        page_size=problem.page_size,
        tile_rows=problem.tile_rows,
        window=problem.window,
        ahead=problem.ahead,
        ctas=problem.num_kv_heads * ctas_of_tile(problem),
        cluster_splits=planned_cluster_splits(p),
        split_blocks=problem.split // KV_BLOCK,
        rank=problem.rank,
        world=problem.world,
        interleave=problem.interleave,
    )
