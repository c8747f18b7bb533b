"""Page tables of shuffled pages."""

from __future__ import annotations

import torch
from torch import Tensor


def indptr(lengths: tuple[int, ...], device: str) -> Tensor:
    """Cumulative lengths, int32 ``[len(lengths) + 1]``."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


class PageTable:
    """A page table of shuffled pages, of requests with ``lengths`` tokens."""

    def __init__(self, lengths: tuple[int, ...], page_size: int, generator: torch.Generator, device: str) -> None:
        pages = tuple(-(-length // page_size) for length in lengths)
        self.num_pages = sum(pages)
        self.indptr = indptr(pages, device)
        self.indices = torch.randperm(self.num_pages, generator=generator, device=device).int()
        self.kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.last_page_len = (self.kv_len - 1) % page_size + 1

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.indices, self.last_page_len

    def block_tables(self) -> Tensor:
        """Page numbers ``[batch, pages of the longest request]``, zero after the last page of each request."""
        rows = [self.indices[a:b] for a, b in zip(self.indptr[:-1], self.indptr[1:], strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def tokens(self, cache: Tensor, b: int, length: int) -> Tensor:
        """The first ``length`` tokens of request b, ``[length, ...]``, in a cache ``[pages, page_size, ...]``."""
        return cache[self.indices[self.indptr[b] : self.indptr[b + 1]].long()].flatten(0, 1)[:length]
