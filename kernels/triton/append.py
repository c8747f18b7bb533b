"""Append the keys and values of new tokens to a paged KV cache: a scatter by page table."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.indexing import padded, within
from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ELEMENTS_PER_PROGRAM = 4096
"""Elements of the keys of one token that a program copies, and of its values: at most."""


@triton.jit(do_not_specialize=["batch", "num_indices", "num_pages"])
def append_kernel(
    k,  # [tokens, HEADS, DIM_QK]
    v,  # [tokens, HEADS, DIM_VO]
    k_cache,  # [num_pages, PAGE_SIZE, HEADS, DIM_QK], or heads before tokens: the strides decide
    v_cache,  # the same with DIM_VO
    batch_indices,  # [tokens], -1 for a token to skip
    positions,  # [tokens]: position in the request's KV sequence
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
    stride_kc_token,
    stride_kc_head,
    stride_vc_page,
    stride_vc_token,
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
    """Grid: (tokens, blocks of BLOCK_HEADS heads).

    A program owns one token and one block of heads, and copies their keys and values to the token's page. A token
    without a place in the page table (request, position or page out of range) is skipped.
    With PDL it waits for the preceding kernel before its first load, then lets the next kernel start.
    Bound by memory bandwidth; small batches by launch latency.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    request, position = tl.load(batch_indices + token), tl.load(positions + token)
    valid = (request >= 0) & (request < batch)
    entry = tl.load(kv_indptr + request, mask=valid, other=0) + position // PAGE_SIZE
    listed = valid & (position >= 0) & (entry < tl.load(kv_indptr + request + 1, mask=valid, other=0))
    page = tl.load(kv_indices + entry, mask=listed & within(entry, num_indices), other=-1)
    if within(page, num_pages):
        offset = (position % PAGE_SIZE).to(tl.int64)
        heads = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)[:, None]
        d_qk, d_vo = tl.arange(0, BLOCK_QK)[None, :], tl.arange(0, BLOCK_VO)[None, :]
        k_mask, v_mask = (heads < HEADS) & (d_qk < DIM_QK), (heads < HEADS) & (d_vo < DIM_VO)
        key = tl.load(k + token * stride_k_token + heads * stride_k_head + d_qk, mask=k_mask)
        value = tl.load(v + token * stride_v_token + heads * stride_v_head + d_vo, mask=v_mask)
        k_cache += page.to(tl.int64) * stride_kc_page + offset * stride_kc_token
        v_cache += page.to(tl.int64) * stride_vc_page + offset * stride_vc_token
        tl.store(k_cache + heads * stride_kc_head + d_qk, key, mask=k_mask)
        tl.store(v_cache + heads * stride_vc_head + d_vo, value, mask=v_mask)


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
    block_heads = min(padded(heads), max(1, ELEMENTS_PER_PROGRAM // max(block_qk, block_vo)))
    pdl = supports_pdl(caches[0])
    launch(
        append_kernel,
        (new[0].shape[0], triton.cdiv(heads, block_heads)),
        Options(launch_pdl=pdl),
        k=new[0],
        v=new[1],
        k_cache=caches[0],
        v_cache=caches[1],
        **page_table,
        batch=page_table["kv_indptr"].shape[0] - 1,
        num_indices=page_table["kv_indices"].shape[0],
        num_pages=caches[0].shape[0],
        **strides,
        HEADS=heads,
        DIM_QK=dim_qk,
        DIM_VO=dim_vo,
        PAGE_SIZE=page_size,
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
    token, head = (1, 2) if kv_layout == "NHD" else (2, 1)
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
