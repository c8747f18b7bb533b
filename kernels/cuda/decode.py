"""Decode on Hopper: the host side of ``decode.cu``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from attn_ops.kernels.cuda.combine_decode import combine_split_rows
from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import DTYPES, OUT_TYPES, box_of_pages, paged_map
from attn_ops.meta.outputs import attention as allocate
from torch import Tensor

from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.ops.unsupported import CUDA_DECODE_HEAD_DIMS, cuda_decode_key
from attn_ops.plan.state import MAX_PUBLISHED_REQUESTS, DecodePlan, PlanProblem, num_slots

TILE_BYTES, STAGES = 16 << 10, 3
"""Of the keys of a KV tile, and of its values: ``kTileBytes``; and KV tiles of the ring, ``kStages`` of the source."""

THREADS = 160
"""``kThreads`` of the source."""

KERNEL = Kernel(
    "decode.cu",
    "decode",
    {
        "q": "pointer",
        **dict.fromkeys(("k", "v"), "map"),
        **dict.fromkeys(("sinks", "kv_scale", "out", "lse", "partial"), "pointer"),
        **dict.fromkeys(("kv_indices", "work", "cta_indptr"), "pointer"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
        **dict.fromkeys(("window_left", "rows", "num_pages", "max_pages", "max_items", "slots"), "i32"),
        **dict.fromkeys(("stride_q_row", "stride_q_head"), "i64"),
        **dict.fromkeys(("group", "page_size", "box"), "i32"),
        **dict.fromkeys(("k_page_step", "k_head_step", "v_page_step", "v_head_step"), "i32"),
        **dict.fromkeys(("early", "query_type", "out_type"), "i32"),
    },
    writes=("out", "lse", "partial"),
    aligned=("q", "out"),
)

KV_TYPES: dict[torch.dtype | None, int] = {None: 0, **{dtype: 1 + number for number, dtype in enumerate(FP8)}}
"""Dtype of an FP8 cache -> the macro KV_FP8."""


def tile_tokens(dim: int, fp8: bool) -> int:
    """``kTile`` of the source."""
    return TILE_BYTES // (dim * (1 if fp8 else 2))


def shared_bytes(heads: int) -> int:
    """Shared memory of a CTA: the ring, maxima and sums of four warps, and barriers."""
    return -(-(2 * STAGES * TILE_BYTES + 2 * 4 * heads * 4 + 3 * STAGES * 8) // 1024) * 1024


def _specialization(dim: int, heads: int, dtype: torch.dtype, fp8: torch.dtype | None) -> Specialization:
    macros = {"HEAD_DIM": dim, "HEADS": heads, "DTYPE": DTYPES[dtype], "KV_FP8": KV_TYPES[fp8]}
    return Specialization(KERNEL, macros, threads=THREADS, shared_bytes=shared_bytes(heads))


SPECIALIZATIONS: dict[tuple[Hashable, ...], Specialization] = {
    (dim, heads, dtype, fp8): _specialization(dim, heads, dtype, fp8)
    for dim in sorted(CUDA_DECODE_HEAD_DIMS)
    for heads in (8, 16)
    # With an FP8 cache products are in float16, and the dtype of the query is a parameter.
    for dtype, fp8 in (*((dtype, None) for dtype in DTYPES), *((torch.float16, dtype) for dtype in FP8))
}
"""By :func:`attn_ops.ops.unsupported.cuda_decode_key`."""


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    o, p = AttentionOptions(**options), DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    out, lse = allocate(q, k_cache, v_cache, return_lse=return_lse, out_dtype=o.out_dtype)
    dim, fp8, page_size = problem.head_dim_vo, k_cache.dtype in FP8, problem.page_size
    group, num_ctas = problem.num_qo_heads // problem.num_kv_heads, p.cta_indptr.shape[0] - 1
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    box = box_of_pages(page_size, tile_tokens(dim, fp8))
    (k, k_page_step, k_head_step), (v, v_page_step, v_head_step) = (
        paged_map(t, (t.stride(0), t.stride(token), t.stride(head)), problem.num_kv_heads, page_size, box)
        for t in (k_cache, v_cache)
    )
    launch(
        SPECIALIZATIONS[cuda_decode_key(dim, group, q.dtype, k_cache.dtype)],
        (problem.num_kv_heads, num_ctas),
        q=q,
        k=k,
        v=v,
        sinks=o.sinks,
        kv_scale=o.kv_scale,
        out=out,
        lse=lse if return_lse else None,
        partial=workspace,
        kv_indices=p.kv_indices,
        work=p.work,
        cta_indptr=p.cta_indptr,
        scale=o.sm_scale or 1 / math.sqrt(dim),
        cap=o.logits_soft_cap,
        window_left=o.window_left,
        rows=q.shape[0],
        num_pages=k_cache.shape[0],
        max_pages=p.kv_indices.shape[0],
        max_items=p.work.shape[0],
        slots=num_slots(p),
        stride_q_row=q.stride(0),
        stride_q_head=q.stride(1),
        group=group,
        page_size=page_size,
        box=box,
        k_page_step=k_page_step,
        k_head_step=k_head_step,
        v_page_step=v_page_step,
        v_head_step=v_head_step,
        early=bool(p.kv_len.shape[0] <= MAX_PUBLISHED_REQUESTS),
        query_type=OUT_TYPES[q.dtype],
        out_type=OUT_TYPES[out.dtype],
    )
    combine_split_rows(out, lse, workspace, o.sinks, p)
    return out, lse
