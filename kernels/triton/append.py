"""Append the keys and values of new tokens to a paged KV cache: a scatter by page table."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.kernels.triton.indexing import padded, within
from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.ops.options import PAGED_DIMS

BLOCK_TOKENS = 2
"""Tokens of a program. Their page numbers take three loads in a row, each of which needs the one before."""

ELEMENTS_PER_TOKEN = 4096
"""Elements of the keys of one token that a program copies, and of its values: at most."""

BYTES_PER_WARP, MAX_WARPS = 512, 8
"""Bytes of the keys that a warp copies, 16 in each thread, up to the largest number of warps."""


@triton.jit(do_not_specialize=["tokens", "batch", "num_indices", "num_pages"])
def append_kernel(
    k,  # [tokens, HEADS, DIM_QK]
    v,  # [tokens, HEADS, DIM_VO]
    k_cache,  # [num_pages, PAGE_SIZE, HEADS, DIM_QK], or heads before tokens: the strides decide
    v_cache,  # the same with DIM_VO
    batch_indices,  # [tokens], -1 for a token to skip
    positions,  # [tokens]: position in the request's KV sequence
    kv_indices,  # [num_indices]
    kv_indptr,  # [batch + 1]
    tokens,
    batch,
    num_indices,
    num_pages,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_page,
    stride_kc_token,
    stride_kc_head,
    stride_vc_page,
    stride_vc_token,
    stride_vc_head,
    HEADS: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of BLOCK_TOKENS tokens, blocks of BLOCK_HEADS heads).

    A program owns a block of tokens and of heads, and copies their keys and values to the pages of the tokens. It loads
    them while it looks the pages up. A token without a place in the page table (request, position or page out of range)
    is not stored.
    With PDL it waits for the preceding kernel before its first load, then lets the next kernel start.
    Bound by memory bandwidth; small batches by launch latency.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)
    heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[None, :, None]
    d_qk, d_vo = tl.arange(0, BLOCK_QK)[None, None, :], tl.arange(0, BLOCK_VO)[None, None, :]
    is_token = token < tokens
    copied = is_token[:, None, None] & (heads < HEADS)
    k_at, v_at = k + (token * stride_k_token)[:, None, None], v + (token * stride_v_token)[:, None, None]
    key = tl.load(k_at + heads * stride_k_head + d_qk, mask=copied & (d_qk < DIM_QK))
    value = tl.load(v_at + heads * stride_v_head + d_vo, mask=copied & (d_vo < DIM_VO))

    request = tl.load(batch_indices + token, mask=is_token, other=-1)
    position = tl.load(positions + token, mask=is_token, other=-1)
    valid = (request >= 0) & (request < batch)
    entry = tl.load(kv_indptr + request, mask=valid, other=0) + position // PAGE_SIZE
    listed = valid & (position >= 0) & (entry < tl.load(kv_indptr + request + 1, mask=valid, other=0))
    page = tl.load(kv_indices + entry, mask=listed & within(entry, num_indices), other=-1)
    copied &= within(page, num_pages)[:, None, None]
    page, offset = page.to(tl.int64), (position % PAGE_SIZE).to(tl.int64)
    k_cache_at = k_cache + (page * stride_kc_page + offset * stride_kc_token)[:, None, None]
    v_cache_at = v_cache + (page * stride_vc_page + offset * stride_vc_token)[:, None, None]
    tl.store(k_cache_at + heads * stride_kc_head + d_qk, key, mask=copied & (d_qk < DIM_QK))
    tl.store(v_cache_at + heads * stride_vc_head + d_vo, value, mask=copied & (d_vo < DIM_VO))


def _append(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    page_table: dict[str, Tensor],
    sizes: tuple[int, int, int, int],
    strides: dict[str, int],
) -> None:
    """``sizes`` is (heads, dim of keys, dim of values, page size); ``page_table`` and ``strides`` by parameter."""
    heads, dim_qk, dim_vo, page_size = sizes
    block_qk, block_vo = padded(dim_qk), padded(dim_vo)
    block_dim, tokens = max(block_qk, block_vo), new[0].shape[0]
    block_heads = min(padded(heads), max(1, ELEMENTS_PER_TOKEN // block_dim))
    num_bytes = BLOCK_TOKENS * block_heads * block_dim * new[0].element_size()
    num_warps = min(MAX_WARPS, max(1, num_bytes // BYTES_PER_WARP))
    pdl = supports_pdl(caches[0])
    launch(
        append_kernel,
        (triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(heads, block_heads)),
        Options(num_warps=num_warps, launch_pdl=pdl),
        k=new[0],
        v=new[1],
        k_cache=caches[0],
        v_cache=caches[1],
        **page_table,
        tokens=tokens,
        batch=page_table["kv_indptr"].shape[0] - 1,
        num_indices=page_table["kv_indices"].shape[0],
        num_pages=caches[0].shape[0],
        **strides,
        HEADS=heads,
        DIM_QK=dim_qk,
        DIM_VO=dim_vo,
        PAGE_SIZE=page_size,
        BLOCK_TOKENS=BLOCK_TOKENS,
        BLOCK_HEADS=block_heads,
        BLOCK_QK=block_qk,
        BLOCK_VO=block_vo,
        PDL=pdl,
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
    token, head = PAGED_DIMS[kv_layout]
    _append(
        (k, v),
        (k_cache, v_cache),
        {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr},
        (k.shape[1], k.shape[2], v.shape[2], k_cache.shape[token]),
        {
            "stride_k_token": k.stride(0),
            "stride_k_head": k.stride(1),
            "stride_v_token": v.stride(0),
            "stride_v_head": v.stride(1),
            "stride_kc_page": k_cache.stride(0),
            "stride_kc_token": k_cache.stride(token),
            "stride_kc_head": k_cache.stride(head),
            "stride_vc_page": v_cache.stride(0),
            "stride_vc_token": v_cache.stride(token),
            "stride_vc_head": v_cache.stride(head),
        },
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
    """As :func:`append_kv` with one head: the latent is the key, the rotary part the value."""
    _append(
        (ckv, kpe),
        (ckv_cache, kpe_cache),
        {"batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr},
        (1, ckv.shape[1], kpe.shape[1], ckv_cache.shape[1]),
        {
            "stride_k_token": ckv.stride(0),
            "stride_k_head": 0,
            "stride_v_token": kpe.stride(0),
            "stride_v_head": 0,
            "stride_kc_page": ckv_cache.stride(0),
            "stride_kc_token": ckv_cache.stride(1),
            "stride_kc_head": 0,
            "stride_vc_page": kpe_cache.stride(0),
            "stride_vc_token": kpe_cache.stride(1),
            "stride_vc_head": 0,
        },
    )
