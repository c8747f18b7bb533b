"""Page tables, and appending to a paged KV cache: a scatter of tokens by page and offset."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.ops.options import DENSE_DIMS
from attn_ops.symbolic_sizes import any_zero


def as_nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A view of a paged cache as ``[pages, page_size, num_kv_heads, head_dim]``."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def block_pages(t: Tensor, page_size: int, kv_layout: str) -> Tensor:
    """A view of dense keys or values as a paged cache of the same layout, whose pages lie in order."""
    token = DENSE_DIMS[kv_layout].token
    return t.unflatten(token, (t.shape[token] // page_size, page_size)).movedim(token, 0)


def bits(cache: Tensor) -> Tensor:
    """An FP8 tensor as bytes, any other as it is: PyTorch does not implement indexing for all FP8 dtypes."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


def gather(cache: Tensor, index: Tensor) -> Tensor:
    """``cache[index]`` for any dtype. It copies whole rows, where indexing on the CPU copies elements."""
    return bits(cache).index_select(0, index.flatten()).unflatten(0, index.shape).view(cache.dtype)


def with_spare_row(t: Tensor) -> Tensor:
    """``t``, with a row of zeros behind the last if the number of rows is symbolic.

    A package may be called without rows, and what is out of range needs a row to read.
    """
    if type(t.shape[0]) is int:
        return t
    return torch.cat((bits(t), bits(t).new_zeros((1, *t.shape[1:])))).view(t.dtype)


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


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    """The request of each appended token and its position in the request's KV; -1, -1 in rows of no request.

    The last appended token of a request is at position ``seq_lens - 1``.
    """
    row = torch.arange(nnz, device=append_indptr.device)
    if any_zero(seq_lens.shape[0]):
        unused = torch.full_like(row, -1).int()
        return unused, unused.clone()
    # The conversion copies: Inductor's searchsorted loses the offset of a view, or does not lower it (PyTorch 2.11).
    request = torch.searchsorted(append_indptr.long(), row, right=True) - 1
    used = (request >= 0) & (request < seq_lens.shape[0])
    r = request.clamp(0, seq_lens.shape[0] - 1)
    position = row - append_indptr[r + 1] + with_spare_row(seq_lens)[r]
    return torch.where(used, request, -1).int(), torch.where(used, position, -1).int()


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """KV tokens of each request, int32 ``[batch]``."""
    pages = kv_indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_len, 0).int()


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The page table ``(kv_indptr, kv_indices, kv_last_page_len)`` of a block table: its used entries, compressed.

    ``kv_indices`` has a place for every entry of the block table; places past the last page are 0. A length past a row
    of the table fills the row.
    """
    batch, max_pages = block_tables.shape
    pages = ((seq_lens.clamp(min=0) - 1) // page_size + 1).clamp(max=max_pages)
    ends = pages.cumsum(0)
    indptr = torch.cat((ends.new_zeros(1), ends)).int()
    column = torch.arange(max_pages, device=block_tables.device)
    used = column < pages[:, None]
    index = torch.where(used, (ends - pages)[:, None] + column, batch * max_pages)  # unused entries go past the end
    indices = block_tables.new_zeros(batch * max_pages + 1).scatter_(0, index.flatten(), block_tables.flatten())
    last = torch.where(pages > 0, (seq_lens - (pages - 1) * page_size).clamp(max=page_size), 0)
    return indptr, indices[:-1].contiguous(), last.int()


def shard_page_table(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    rank: int,
    world: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The pages of ``rank``: page ``p`` of a request is on rank ``p // (interleave // page_size) % world``.

    Entries past the last are 0.
    """
    num_indices, run = kv_indices.shape[0], interleave // page_size
    begins = kv_indptr.long().clamp(0, num_indices)
    pages = begins.diff().clamp(min=0)
    owned = pages // (run * world) * run + (pages % (run * world) - rank * run).clamp(0, run)
    ends = owned.cumsum(0)
    indptr = torch.cat((ends.new_zeros(1), ends)).int()
    ends_here = (pages - 1) // run % world == rank
    last = torch.where(owned > 0, torch.where(ends_here, kv_last_page_len, page_size), 0).int()
    if any_zero(num_indices, pages.shape[0]):
        return indptr, torch.zeros_like(kv_indices), last
    entry = torch.arange(num_indices, device=kv_indices.device)
    request = torch.searchsorted(ends, entry, right=True)
    r = request.clamp(max=pages.shape[0] - 1)
    offset = entry - (ends - owned)[r]
    source = begins[r] + (offset // run * world + rank) * run + offset % run
    page = kv_indices[source.clamp(0, num_indices - 1)]
    return indptr, torch.where(request < pages.shape[0], page, 0).int(), last
