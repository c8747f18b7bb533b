"""Pages of the KV cache: who holds which, and the page table that a plan is made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


class PageAllocator:
    """A free list over pages ``0 .. num_pages - 1``; the page freed last is handed out first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned_tensors: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages that nobody holds; MemoryError if there are fewer, and then none is taken."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages were asked for and {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned_tensors.update(pages)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give back ``pages``, all of which must be held."""
        if len(set(pages)) != len(pages) or not self._owned_tensors.issuperset(pages):
            raise ValueError(f"pages {list(pages)} are not all held, each once")
        self._owned_tensors.difference_update(pages)
        self._free.extend(reversed(pages))


class PageTable(NamedTuple):
    """The pages that hold each request's tokens, in the form a planner takes, int32 on the host.

    kv_indptr         ``[batch + 1]``: pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``
    kv_indices        ``[capacity]``: page numbers, zeros past the last
    kv_last_page_len  ``[batch]``: tokens in each request's last page, 0 for an empty request
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


def page_table(pages: Sequence[Sequence[int]], lengths: Sequence[int], page_size: int, capacity: int) -> PageTable:
    """The table of a batch whose request b has ``lengths[b]`` tokens in the first of its ``pages[b]``.

    ``kv_indices`` always has ``capacity`` entries, so the shapes never change from batch to batch.
    """
    indptr = [0]
    indices: list[int] = []
    for held, length in zip(pages, lengths, strict=True):
        indices += held[: pages_for(length, page_size)]
        indptr.append(len(indices))
    last = [(length - 1) % page_size + 1 if length else 0 for length in lengths]
    indices += [0] * (capacity - len(indices))
    return PageTable(*(torch.tensor(values, dtype=torch.int32) for values in (indptr, indices, last)))
