"""Writing into a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.indexing import padded, within
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ELEMENTS = 4096
"""Elements of a token that a program copies."""


@triton.jit(do_not_specialize=["batch", "num_indices", "num_pages"])
def append_kernel(
    k,  # [tokens, HEADS, DIM_QK]
    v,  # [tokens, HEADS, DIM_VO]
    k_cache,  # [num_pages, ...] of pages of PAGE_SIZE tokens, as the strides say
    v_cache,
    batch_indices,  # [tokens]
    positions,  # [tokens]
    kv_indices,  # [num_indices]
    kv_indptr,  # [batch + 1]
    batch,
    num_indices,
    num_pages,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_page,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_page,
    stride_vc_slot,
    stride_vc_head,
    HEADS: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    request, position = tl.load(batch_indices + token), tl.load(positions + token)
    known = (request >= 0) & (request < batch)
    place = tl.load(kv_indptr + request, mask=known, other=0) + position // PAGE_SIZE
    listed = known & (position >= 0) & (place < tl.load(kv_indptr + request + 1, mask=known, other=0))
    page = tl.load(kv_indices + place, mask=listed & within(place, num_indices), other=-1)
    if within(page, num_pages):
        slot = (position % PAGE_SIZE).to(tl.int64)
        heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        d_qk, d_vo = tl.arange(0, BLOCK_QK)[None, :], tl.arange(0, BLOCK_VO)[None, :]
        k_mask, v_mask = (heads < HEADS) & (d_qk < DIM_QK), (heads < HEADS) & (d_vo < DIM_VO)
        key = tl.load(k + token * stride_k_token + heads * stride_k_head + d_qk, mask=k_mask)
        value = tl.load(v + token * stride_v_token + heads * stride_v_head + d_vo, mask=v_mask)
        k_cache += page.to(tl.int64) * stride_kc_page + slot * stride_kc_slot
        v_cache += page.to(tl.int64) * stride_vc_page + slot * stride_vc_slot
        tl.store(k_cache + heads * stride_kc_head + d_qk, key, mask=k_mask)
        tl.store(v_cache + heads * stride_vc_head + d_vo, value, mask=v_mask)


def _append(
    news: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor, Tensor, Tensor],
    shape: tuple[int, int, int, int],
    strides: tuple[int, ...],
) -> None:
    """``shape`` is (heads, dim of keys, dim of values, page size)."""
    heads, dim_qk, dim_vo, _ = shape
    block_qk, block_vo = padded(dim_qk), padded(dim_vo)
    block_heads = min(padded(heads), max(1, ELEMENTS // max(block_qk, block_vo)))
    _, _, kv_indices, kv_indptr = table
    pdl = starts_early(caches[0])
    launch(
        append_kernel,
        (news[0].shape[0], triton.cdiv(heads, block_heads)),
        (*news, *caches, *table),
        (kv_indptr.shape[0] - 1, kv_indices.shape[0], caches[0].shape[0]),
        strides,
        (*shape, block_heads, block_qk, block_vo, pdl),
        Options(launch_pdl=pdl),
    )


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    kv_layout: str = "NHD",
) -> None:
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    _append(
        (k, v),
        (k_cache, v_cache),
        (batch_indices, positions, kv_indices, kv_indptr),
        (k.shape[1], k.shape[2], v.shape[2], k_cache.shape[slot]),
        (
            *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
            *(k_cache.stride(0), k_cache.stride(slot), k_cache.stride(head)),
            *(v_cache.stride(0), v_cache.stride(slot), v_cache.stride(head)),
        ),
    )


def append_mla_kv(
    ckv: Tensor,
    kpe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    _append(
        (ckv, kpe),
        (ckv_cache, kpe_cache),
        (batch_indices, positions, kv_indices, kv_indptr),
        (1, ckv.shape[1], kpe.shape[1], ckv_cache.shape[1]),
        (*(ckv.stride(0), 0, kpe.stride(0), 0), *ckv_cache.stride()[:2], 0, *kpe_cache.stride()[:2], 0),
    )
