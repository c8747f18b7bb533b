"""Pages of the KV cache: their allocation to requests, and page tables as planners take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def pages_for(tokens: int, page_size: int) -> int:
    """The number of pages that ``tokens`` tokens need."""
    return -(-tokens // page_size)


class PageAllocator:
    """A free list of pages ``0 .. num_pages - 1``. The last page released is allocated first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` free pages.

        Raises:
            MemoryError: fewer pages are free; none is allocated then.
        """
        if count > len(self._free):
            raise MemoryError(f"{count} pages requested, but {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._allocated.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Return ``pages`` to the free list.

        Raises:
            ValueError: a page is not allocated, or is given twice; none is released then.
        """
        if len(set(pages)) != len(pages) or not self._allocated.issuperset(pages):
            raise ValueError(f"pages {list(pages)} are not all allocated and distinct; release each page once")
        self._allocated.difference_update(pages)
        self._free.extend(reversed(pages))


class PageTable(NamedTuple):
    """A page table as planners take it: int32 tensors on the host.

    Attributes:
        kv_indptr: ``[batch + 1]``; the pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: ``[capacity]``, page numbers, zero after the last one.
        kv_last_page_len: ``[batch]``, tokens in the last page of each request, 0 for an empty slot.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


def page_table(pages: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int, capacity: int) -> PageTable:
    """The page table of a batch. Request b has ``lengths[b]`` tokens, in the first pages of ``pages[b]``.

    ``kv_indices`` has ``capacity`` entries for every batch, so that shapes are static.
    """
    indptr = [0]
    indices: list[int] = []
    for allocated, length in zip(pages, lengths, strict=True):
        indices += allocated[: pages_for(length, page_size)]
        indptr.append(len(indices))
    last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    indices += [0] * (capacity - len(indices))
    return PageTable(*(torch.tensor(values, dtype=torch.int32) for values in (indptr, indices, last)))
