"""Plans on Hopper: the host side of ``plan_prefill.cu``."""

from __future__ import annotations

from typing import Any

from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.triton.plan_prefill import plan_prefill as plan_of_any_size
from torch import Tensor

from attn_ops.ops.cuda_kernels import CUDA_PLANS
from attn_ops.plan import state
from attn_ops.plan.sizing import ctas_of_tile, planned_cluster_splits, tiles_per_wave
from attn_ops.plan.state import INT32_MAX, KV_BLOCK, PlanProblem, PrefillPlan
from attn_ops.symbolic_sizes import at_least, statically_known_true

MAX_REQUESTS, MAX_ITEMS = 2048, 65536
"""Capacities of the largest plan, which fits in shared memory. The Triton kernel writes larger ones."""

PAGES_OF_CTA = 4096
"""``kPagesOfCta`` of the source."""

_INDPTRS = ("plan_qo_indptr", "plan_kv_indptr", "plan_kv_indices", "plan_kv_len")
_WRITES = (*_INDPTRS, "work", "split_tiles", "queue")

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
    *("KV_BLOCK", "LENGTH_BUCKETS", "SPLIT_CANDIDATES", "MIN_SPLIT_BLOCKS", "BALANCE_WAVES"),
    *("BLOCK_COST", "ITEM_COST", "COMBINE_COST", "MAX_COST"),
)
"""Constants of :mod:`attn_ops.plan.state`, which are macros of these names."""

SPECIALIZATIONS = {
    (threads, one_chunk): Specialization(
        PLAN_PREFILL,
        {"THREADS": threads, "ONE_CHUNK": one_chunk},
        sizes={
            **{name: getattr(state, name) for name in CONSTANTS},
            "MAX_REQUESTS": threads if one_chunk else MAX_REQUESTS,
            "MAX_ITEMS": threads if one_chunk else MAX_ITEMS,
        },
        threads=threads,
    )
    for threads, one_chunk in CUDA_PLANS
}
"""Key of :data:`CUDA_PLANS` -> specialization."""


def _key(max_batch: Any, max_items: Any) -> tuple[int, bool]:
    """The key of a plan with capacity for so many requests and work items."""
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
    max_batch, max_items, max_split_tiles = p.kv_len.shape[0], p.work.shape[0], p.split_tiles.shape[0]
    if not statically_known_true(max_batch <= MAX_REQUESTS) or not statically_known_true(max_items <= MAX_ITEMS):
        plan_of_any_size(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    problem, num_indices = PlanProblem.of(p.problem), kv_indices.shape[0]
    launch(
        SPECIALIZATIONS[_key(max_batch, max_items)],
        (1 + (num_indices + PAGES_OF_CTA - 1) // PAGES_OF_CTA,),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        last_page_len=kv_last_page_len,
        seq_lens=seq_lens,
        plan_qo_indptr=p.qo_indptr,
        plan_kv_indptr=p.kv_indptr,
        plan_kv_indices=p.kv_indices,
        plan_kv_len=p.kv_len,
        work=p.work,
        split_tiles=p.split_tiles,
        queue=p.queue,
        batch=kv_indptr.shape[0] - 1,
        num_indices=num_indices,
        max_batch=max_batch,
        max_pages=p.kv_indices.shape[0] or INT32_MAX,
        max_items=max_items,
        max_split_tiles=max_split_tiles,
        wave=at_least(tiles_per_wave(problem, 2 * max_split_tiles), 1),
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
