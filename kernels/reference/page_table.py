"""Page tables, and the positions of appended tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.kernels.reference.cache_views import with_spare_row
from attn_ops.symbolic_sizes import any_zero


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
