"""Appending to a paged KV cache: a scatter of tokens by page and offset."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.kernels.reference.cache_views import as_nhd, bits
from attn_ops.symbolic_sizes import any_zero


def _scatter(
    new: tuple[Tensor, ...],
    caches: tuple[Tensor, ...],
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """Write row ``i`` of each of ``new [tokens, ...]`` to its cache ``[pages, page_size, ...]``.

    Its page is ``kv_indices[kv_indptr[request] + position // page_size]``, its offset there ``position % page_size``. A
    row whose request, position or page is out of range is skipped.
    """
    num_pages, page_size = caches[0].shape[:2]
    rows = batch_indices.shape[0]
    if any_zero(rows, num_pages, kv_indices.shape[0], kv_indptr.shape[0] - 1):
        return
    request = batch_indices.clamp(0, kv_indptr.shape[0] - 2)
    entry = kv_indptr[request] + positions // page_size
    page = kv_indices[entry.clamp(0, kv_indices.shape[0] - 1)]
    valid = (
        (batch_indices >= 0)
        & (batch_indices < kv_indptr.shape[0] - 1)
        & (positions >= 0)
        & (entry < kv_indptr[request + 1])
        & (entry < kv_indices.shape[0])
        & (page >= 0)
        & (page < num_pages)
    )
    # A skipped row writes the first valid row again, to the same place, so that the order of writes is irrelevant.
    # Without a valid row, every row writes the element that it reads.
    source = torch.where(valid, torch.arange(rows, device=page.device), valid.int().argmax())
    page = page.clamp(0, num_pages - 1)[source]
    offset = (positions % page_size)[source]
    for x, cache in zip(new, caches, strict=True):
        target = bits(cache)
        target.index_put_((page, offset), torch.where(valid.any(), bits(x)[source], target[page, offset]))


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
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    _scatter((k, v), caches, batch_indices, positions, kv_indices, kv_indptr)


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
    _scatter((ckv, kpe), (ckv_cache, kpe_cache), batch_indices, positions, kv_indices, kv_indptr)
