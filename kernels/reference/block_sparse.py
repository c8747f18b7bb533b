"""The page table of a block map: block rows are requests, and block columns are runs of pages."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.meta.outputs import block_sparse_table as allocate
from attn_ops.symbolic_sizes import any_zero


def block_sparse_table(
    block_mask: Tensor, row_indptr: Tensor, col_indptr: Tensor, page_size: int, max_pages: int, *, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if any_zero(*block_mask.shape):
        return tuple(t.zero_() for t in allocate(block_mask, row_indptr, col_indptr, page_size, max_pages))  # type: ignore[return-value]
    # The conversion copies: Inductor's searchsorted loses the offset of a view, or does not lower it (PyTorch 2.11).
    rows, keys = row_indptr.long(), col_indptr.long()
    first_key, num_rows, num_keys = keys[:, None, :-1], rows[:, -1:], keys[:, -1:]
    begin, end = rows[:, :-1], rows[:, 1:]

    # The tokens that each block row reads of each block column, [maps, block rows, block columns].
    tokens = torch.where(block_mask & (end > begin)[..., None], keys.diff(dim=1).clamp(min=0)[:, None], 0)
    first_position = begin + num_keys - num_rows
    if causal:
        tokens = torch.minimum(tokens, (first_position + end - begin)[..., None] - first_key).clamp(min=0)
    kv_len = tokens.sum(-1)
    positions = kv_len - (end - begin)
    if causal:
        # Rows whose own block column is not selected see all keys that were left in.
        diagonal = torch.searchsorted(keys, first_position, right=True) - 1
        selected = block_mask.gather(2, diagonal.clamp(0, block_mask.shape[2] - 1)[..., None])[..., 0]
        positions = torch.where(selected & (first_position >= 0), positions, kv_len)

    pages = (tokens + page_size - 1) // page_size
    ends = pages.sum(-1).flatten().cumsum(0)
    page_ends = pages.flatten().cumsum(0)
    entry = torch.arange(max_pages, device=block_mask.device)
    block = torch.searchsorted(page_ends, entry, right=True).clamp(max=page_ends.shape[0] - 1)
    first_page = (first_key + (num_keys.cumsum(0) - num_keys)[:, None]) // page_size
    first_page = first_page.expand(pages.shape).reshape(-1) - page_ends + pages.flatten()
    indices = torch.where(entry < page_ends[-1], first_page[block] + entry, 0)
    last = torch.where(kv_len > 0, (kv_len - 1) % page_size + 1, 0)
    indptr = torch.cat((ends.new_zeros(1), ends))
    return indptr.int(), indices.int(), last.flatten().int(), positions.flatten().int()
