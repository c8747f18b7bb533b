"""Writing into a paged cache."""

from __future__ import annotations

import torch
from attn_ops.kernels.reference.sizes import any_zero
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


def _write(
    news: tuple[Tensor, ...],
    caches: tuple[Tensor, ...],
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    """Row i of each of ``news`` goes to its cache ``[pages, page_size, ...]``; a row with no place is skipped."""
    num_pages, page_size = caches[0].shape[:2]
    rows = batch_indices.shape[0]
    if any_zero(rows, num_pages, kv_indices.shape[0]) or kv_indptr.shape[0] < 2:
        return
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
        & (page < num_pages)
    )
    # A skipped row repeats a written one, value and place, so that no order of the writes matters;
    # with no row to write, every row puts back what is there.
    source = torch.where(written, torch.arange(rows, device=page.device), written.int().argmax())
    page = page.clamp(0, num_pages - 1)[source]
    slot = (positions % page_size)[source]
    for new, cache in zip(news, caches, strict=True):
        target = bits(cache)
        target.index_put_((page, slot), torch.where(written.any(), bits(new)[source], target[page, slot]))


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
    _write((k, v), caches, batch_indices, positions, kv_indices, kv_indptr)


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
    _write((ckv, kpe), (ckv_cache, kpe_cache), batch_indices, positions, kv_indices, kv_indptr)


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    """Of each appended row; -1 in rows past the last request's."""
    row = torch.arange(nnz, device=append_indptr.device)
    if seq_lens.shape[0] == 0:
        nothing = torch.full_like(row, -1).int()
        return nothing, nothing.clone()
    request = torch.searchsorted(append_indptr, row, right=True) - 1
    used = request < seq_lens.shape[0]
    safe = request.clamp(max=seq_lens.shape[0] - 1)
    position = row - append_indptr[safe + 1] + seq_lens[safe]
    return torch.where(used, request, -1).int(), torch.where(used, position, -1).int()


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    pages = kv_indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).int()


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of pages to one line of pages, without gaps; the line's end beyond the last page is 0."""
    batch, width = block_tables.shape
    pages = ((seq_lens + page_size - 1) // page_size).clamp(0, width)
    ends = pages.cumsum(0)
    indptr = torch.cat((ends.new_zeros(1), ends)).int()
    column = torch.arange(width, device=block_tables.device)
    used = column < pages[:, None]
    place = torch.where(used, (ends - pages)[:, None] + column, batch * width)
    line = block_tables.new_zeros(batch * width + 1).scatter_(0, place.flatten(), block_tables.flatten())
    last = torch.where(pages > 0, (seq_lens - 1) % page_size + 1, 0)
    return indptr, line[:-1].contiguous(), last.int()
