"""Batches with left padding or chunks as batches without, by index arithmetic on the device, which traces.

left padding    a request begins at a token within a page: its page table has pages of one token
chunks          a row sees only its own chunk of keys: each chunk becomes a request, with the rows in it
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.symbolic_sizes import any_zero, at_most


def by_token(table: Tensor, page_size: int) -> Tensor:
    """int32 ``[batch, pages * page_size]``: the same table of pages of one token."""
    place = torch.arange(page_size, dtype=torch.int32, device=table.device)
    return (table[..., None] * page_size + place).flatten(1)


def without_padding(tokens: Tensor, leftpad: Tensor) -> Tensor:
    """``tokens [batch, places]`` of each request from place ``leftpad[b]`` on."""
    places = tokens.shape[1]
    place = leftpad[:, None] + torch.arange(places, device=tokens.device)
    return tokens.gather(1, place.clamp(0, max(0, places - 1)).long())


class Chunks(NamedTuple):
    """The chunks of a batch, each as a request. Row i of a request has position ``i + kv_len - qo_len``, as for a
    causal mask.

    request    int64 ``[chunks]``: the request of each chunk
    number     int64 ``[chunks]``: the index of a chunk in its request; chunk -1 has the rows before the first key
    qo_indptr  int32 ``[chunks + 1]``: cumulative query rows of the chunks
    kv_ends    int64 ``[chunks]``: the end of a chunk's keys, an index of the request's keys
    """

    request: Tensor
    number: Tensor
    qo_indptr: Tensor
    kv_ends: Tensor

    @classmethod
    def of(cls, qo_indptr: Tensor, kv_lens: Tensor, chunk: int, bound: int, all_keys: bool) -> Chunks:
        """``bound`` chunks of ``chunk`` keys; a batch has at most ``bound``. Excess chunks have no rows and no keys.

        ``all_keys``: also chunks without rows, so that the chunks of a request have all its keys.
        """
        indptr, kv_lens = qo_indptr.long(), kv_lens.long()
        rows = indptr.diff()
        shift = kv_lens - rows
        first = torch.full_like(shift, -1) if all_keys else (shift // chunk).clamp(min=-1)
        counts = ((kv_lens - 1) // chunk - first + 1).clamp(min=0)
        ends = counts.cumsum(0)
        index = torch.arange(bound, device=indptr.device)
        request = torch.searchsorted(ends, index, right=True).clamp(max=max(0, ends.shape[0] - 1))
        number = first[request] + index - (ends - counts)[request]
        after = (number + 1) * chunk
        row_ends = indptr[request] + (after - shift[request]).clamp(min=0).minimum(rows[request])
        qo = torch.nn.functional.pad(row_ends, (1, 0)).int()
        return cls(request, number, qo, after.minimum(kv_lens[request]))


def ragged_chunks(qo_indptr: Tensor, kv_indptr: Tensor, chunk: int, keys: int) -> tuple[Tensor, Tensor]:
    """Both indptr, int32, of the chunks of a batch over ragged ``keys``."""
    batch = qo_indptr.shape[0] - 1
    if any_zero(batch):
        return qo_indptr, kv_indptr
    made = Chunks.of(qo_indptr, kv_indptr.diff(), chunk, keys // chunk + 2 * batch, True)
    starts = kv_indptr.long()[made.request]
    return made.qo_indptr, torch.nn.functional.pad(starts + made.kv_ends, (1, 0)).int()


class PagedChunks(NamedTuple):
    """The chunks of a batch over pages: the rows, the pages and the keys of each."""

    qo_indptr: Tensor
    table: Tensor
    kv_lens: Tensor

    @classmethod
    def of(
        cls, qo_indptr: Tensor, table: Tensor, kv_lens: Tensor, page_size: int, chunk: int, rows: int
    ) -> PagedChunks:
        """Chunks of ``table [batch, pages]``, whose pages divide ``chunk``, for ``rows`` query rows."""
        batch, width = table.shape
        if any_zero(batch):
            return cls(qo_indptr, table, kv_lens)
        made = Chunks.of(qo_indptr, kv_lens, chunk, rows // chunk + 2 * batch, False)
        pages = chunk // page_size
        first = made.number.clamp(min=0)
        column = first[:, None] * pages + torch.arange(at_most(pages, width), device=table.device)
        chosen = table[made.request].gather(1, column.clamp(0, max(0, width - 1)))
        lens = (made.kv_ends - first * chunk).clamp(min=0)
        return cls(made.qo_indptr, chosen.contiguous(), lens.int())
