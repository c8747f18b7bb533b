"""Decode on Hopper: the host side of ``decode.cu`` for paged KV."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import (
    COLUMNS,
    DTYPES,
    FP8_TYPES,
    OUT_TYPES,
    ROPE_PARAMETERS,
    ROW_BYTES,
    Columns,
    box_of_pages,
    paged_map,
    rope_arguments,
)
from attn_ops.kernels.triton.combine_decode import combine_split_rows
from attn_ops.kernels.triton.launch import is_eager
from attn_ops.meta.outputs import attention as allocate
from attn_ops.ops.cuda_kernels import (
    CUDA_DECODE_HEAD_DIMS,
    CUDA_DECODE_PACKED_ROWS,
    CUDA_DECODE_PADDED_TO,
    DecodeKey,
    cuda_decode_kv_heads,
    planned_decode_kv_heads,
)
from attn_ops.ops.options import PAGED_DIMS, AttentionOptions, softmax_scale
from attn_ops.plan.state import DecodePlan, PlanProblem, is_published, num_slots

TILE_BYTES = 16 << 10
"""Bytes of the keys of a KV tile, and also of its values: ``kTileBytes`` of the source."""

LEAST_SHARED_BYTES = 114 << 10
"""Least shared memory of a CTA, half of an SM's. With the 1 KB that each CTA reserves, an SM runs one CTA at a time.

The CTAs of the next decode kernel start early (PDL). Two CTAs on one SM would share its bandwidth, and leave another SM
idle.
"""


def _kernel(rope: bool, padded: bool) -> Kernel:
    """The kernel, which with ``rope`` rotates queries and keys and with ``padded`` pads heads, and its parameters."""
    return Kernel(
        "decode.cu",
        "decode",
        {
            "q": "pointer",
            **dict.fromkeys(("k", "v"), "map"),
            **dict.fromkeys(("sinks", "kv_scale", "out", "lse", "partial", "split_counters"), "pointer"),
            **dict.fromkeys(("kv_indices", "kv_len", "work", "cta_indptr", "merge_indptr"), "pointer"),
            **dict.fromkeys(("scale", "cap"), "fp32"),
            **(ROPE_PARAMETERS if rope else {}),
            **dict.fromkeys(
                ("window_left", "rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"), "i32"
            ),
            **dict.fromkeys(("stride_q_row", "stride_q_head"), "i64"),
            **({"head_dim": "i32"} if padded else {}),
            **dict.fromkeys(("group", "page_size", "box"), "i32"),
            **dict.fromkeys(("k_page_step", "k_head_step", "v_page_step", "v_head_step"), "i32"),
            **dict.fromkeys(("early", "combines", "query_type", "out_type"), "i32"),
        },
        writes=("out", "lse", "partial"),  # and split_counters in eager calls
        aligned=("q", "out"),
    )


KERNELS = {(rope, padded): _kernel(rope, padded) for rope, padded in ((False, False), (True, False), (False, True))}
"""Whether the kernel rotates queries and keys, and whether it pads heads -> kernel."""


def threads(kv_heads: int, rope: bool) -> int:
    """``kThreads`` of the source: two warpgroups per KV head, the producer warp, with RoPE one more warpgroup."""
    return kv_heads * 2 * 128 + 32 + 128 * rope


def stages(rope: bool) -> int:
    """``kStages`` of the source: KV tiles of the ring."""
    return 4 if rope else 3


def tile_tokens(dim: int, kv_heads: int, fp8: bool) -> int:
    """``kTile`` of the source: tokens of a KV tile."""
    return TILE_BYTES // (kv_heads * dim * (1 if fp8 else 2))


def shared_bytes(key: DecodeKey) -> int:
    """Bytes of ``Shared`` of the source: the ring, the memory of the consumers, barriers and flags.

    A consumer has the query, the probabilities of two KV tiles, a result in float32, maxima or sums of warps, and
    scales of heads. RoPE adds a barrier for each stage, and the turns of each pair of columns.
    """
    dim, consumers, ring = key.head_dim, 2 * key.kv_heads, stages(key.rope)
    blocks = dim // COLUMNS + 2 * tile_tokens(dim, key.kv_heads, key.fp8 is not None) // COLUMNS
    of_consumer = key.packed_rows * (blocks * ROW_BYTES + dim * 4 + 16 + 16 + 4)
    of_rope = ring * 8 + dim // 2 * 8 if key.rope else 0
    return 2 * ring * TILE_BYTES + consumers * (-(-of_consumer // 1024) * 1024) + 3 * ring * 8 + of_rope + 4 * consumers


def specialization(kernel: Kernel, key: DecodeKey, **further: int) -> Specialization:
    """The specialization ``key`` of a kernel of ``decode.cu``, with ``further`` macros."""
    macros = {"HEAD_DIM": key.head_dim, "KV_HEADS": key.kv_heads, "PACKED_ROWS": key.packed_rows, **further}
    macros["DTYPE"] = DTYPES[key.dtype]
    if key.fp8 is not None:
        macros["KV_FP8"] = 1 + FP8_TYPES[key.fp8]
    if key.rope:
        macros["ROPE"] = 1
    if key.padded:
        macros["PADDED"] = 1
    shared = max(shared_bytes(key), LEAST_SHARED_BYTES)
    return Specialization(kernel, macros, threads=threads(key.kv_heads, key.rope), shared_bytes=shared)


SPECIALIZATIONS = {
    key: specialization(KERNELS[rope, padded], key)
    for dim in sorted(CUDA_DECODE_HEAD_DIMS)
    for kv_heads in (1, 2)
    for packed_rows in CUDA_DECODE_PACKED_ROWS
    for rope, padded in KERNELS
    if dim == CUDA_DECODE_PADDED_TO or not padded
    for dtype, fp8 in (*((dtype, None) for dtype in DTYPES), *((torch.float16, fp8) for fp8 in FP8_TYPES))
    if not (rope and fp8) and kv_heads <= cuda_decode_kv_heads(dim, kv_heads, fp8 is not None)
    for key in (DecodeKey(dim, kv_heads, packed_rows, dtype, fp8, rope, padded),)
}


def cache_arguments(
    k_cache: Tensor, v_cache: Tensor, problem: PlanProblem, kv_layout: str, key: DecodeKey
) -> dict[str, Any]:
    """The arguments for keys and values of the specialization ``key``."""
    token, head = PAGED_DIMS[kv_layout]
    fp8 = k_cache.dtype in FP8_TYPES
    tokens = tile_tokens(key.head_dim, key.kv_heads, fp8)
    columns = Columns.overlapping(k_cache) if key.padded and not fp8 else Columns.of(k_cache, padded=key.padded)
    arguments: dict[str, Any] = {"box": box_of_pages(problem.page_size, tokens)}
    for name, t in (("k", k_cache), ("v", v_cache)):
        strides, sizes = (t.stride(0), t.stride(token), t.stride(head)), (problem.num_kv_heads, problem.page_size)
        one, page_step, head_step = paged_map(t, strides, *sizes, arguments["box"], columns, heads_of_box=key.kv_heads)
        arguments |= {name: one, f"{name}_page_step": page_step, f"{name}_head_step": head_step}
    return arguments


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
    dim, num_kv_heads, eager, fp8 = problem.head_dim_vo, problem.num_kv_heads, is_eager(q), k_cache.dtype in FP8_TYPES
    group, num_ctas = problem.num_qo_heads // num_kv_heads, p.cta_indptr.shape[0] - 1
    kv_heads = planned_decode_kv_heads(dim, num_kv_heads, fp8, num_ctas, q.device)
    key = DecodeKey.of(dim, kv_heads, group, q.dtype, k_cache.dtype, o.pos_encoding)
    launch(
        SPECIALIZATIONS[key],
        (num_kv_heads // kv_heads, num_ctas),
        q=q,
        **cache_arguments(k_cache, v_cache, problem, kv_layout, key),
        sinks=o.sinks,
        kv_scale=o.kv_scale,
        out=out,
        lse=lse if return_lse else None,
        partial=workspace,
        split_counters=p.split_counters,
        kv_indices=p.kv_indices,
        kv_len=p.kv_len,
        work=p.work,
        cta_indptr=p.cta_indptr,
        merge_indptr=p.merge_indptr,
        scale=softmax_scale(o.sm_scale, dim),
        cap=o.logits_soft_cap,
        **rope_arguments(o),
        window_left=o.window_left,
        rows=q.shape[0],
        num_pages=k_cache.shape[0],
        max_pages=p.kv_indices.shape[0],
        max_items=p.work.shape[0],
        max_batch=p.kv_len.shape[0],
        slots=num_slots(p),
        stride_q_row=q.stride(0),
        stride_q_head=q.stride(1),
        **({"head_dim": dim} if key.padded else {}),
        group=group,
        page_size=problem.page_size,
        early=is_published(p.kv_len.shape[0]),
        combines=eager,
        query_type=OUT_TYPES[q.dtype],
        out_type=OUT_TYPES[out.dtype],
    )
    if not eager:
        combine_split_rows(out, lse, workspace, o.sinks, p, return_lse, launch_early=True)
    return out, lse
