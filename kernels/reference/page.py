"""Writing into a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor


def as_nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A view of a paged cache as ``[pages, page_size, num_kv_heads, head_dim]``."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def bits(cache: Tensor) -> Tensor:
    """An FP8 tensor as bytes: indexing moves elements of any dtype, but is not implemented for all."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


def gather(cache: Tensor, index: Tensor) -> Tensor:
    """``cache[index]`` for any dtype."""
    return bits(cache)[index].view(cache.dtype)


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
    if 0 in (k.shape[0], k_cache.shape[0], kv_indices.shape[0]) or kv_indptr.shape[0] < 2:
        return
    keys, values = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    page_size = keys.shape[1]
    request = batch_indices.clamp(0, kv_indptr.shape[0] - 2)
    place = kv_indptr[request] + positions // page_size
    page = kv_indices[place.clamp(0, kv_indices.shape[0] - 1)]
    written = (
        (batch_indices >= 0)
        & (batch_indices < kv_indptr.shape[0] - 1)
        & (positions >= 0)
        & (place < kv_indptr[request + 1])
        & (place < kv_indices.shape[0])
        & (page >= 0)
        & (page < keys.shape[0])
    )
    # A skipped row repeats a written one, value and place, so that no order of the writes matters;
    # with no row to write, every row puts back what is there.
    source = torch.where(written, torch.arange(k.shape[0], device=k.device), written.int().argmax())
    page = page.clamp(0, keys.shape[0] - 1)[source]
    slot = (positions % page_size)[source]
    for cache, new in ((bits(keys), bits(k)), (bits(values), bits(v))):
        cache.index_put_((page, slot), torch.where(written.any(), new[source], cache[page, slot]))
