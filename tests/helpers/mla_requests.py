"""A batch of MLA requests with latents in a paged cache, and the expected result of attention."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from helpers.oracle import Expected
from helpers.page_tables import indptr, page_table
from helpers.wrapper_requests import DEVICE


class Latents:
    """A batch of MLA requests.

    ``lengths`` are the query rows and KV tokens of each request; ``dims`` the widths of ``ckv`` and ``kpe``.
    """

    def __init__(
        self,
        lengths: tuple[tuple[int, int], ...] = ((1, 70), (5, 9), (0, 3), (20, 130)),
        dims: tuple[int, int] = (64, 16),
        dtype: torch.dtype = torch.float16,
        kv_dtype: torch.dtype | None = None,
        page_size: int = 16,
        num_heads: int = 3,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows, self.tokens = (list(column) for column in zip(*lengths, strict=True))
        self.dims, self.page_size, width = dims, page_size, sum(dims)
        q = torch.randn(sum(self.rows), num_heads, width, generator=generator).to(dtype)
        self.latents = [torch.randn(n, width, generator=generator).to(kv_dtype or dtype) for n in self.tokens]
        kv_indptr, kv_indices, _ = page_table(self.tokens, page_size)
        cache = torch.full((len(kv_indices) + 1, page_size, width), math.nan, dtype=kv_dtype or dtype)
        for b, latent in enumerate(self.latents):
            place = torch.arange(len(latent))
            cache[kv_indices[kv_indptr[b] + place // page_size].long(), place % page_size] = latent
        self.q, self.cache = q.to(DEVICE), cache.to(DEVICE)
        self.table = kv_indptr.to(DEVICE), kv_indices.to(DEVICE), torch.tensor(self.tokens, device=DEVICE)
        self.qo_indptr = indptr(self.rows).to(DEVICE)

    @property
    def block_tables(self) -> Tensor:
        starts, indices, _ = (t.tolist() for t in self.table)
        width = max(b - a for a, b in itertools.pairwise(starts))
        rows = [(indices[a:b] + [0] * width)[:width] for a, b in itertools.pairwise(starts)]
        return torch.tensor(rows, device=DEVICE)

    def split(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return t[..., : self.dims[0]], t[..., self.dims[0] :]

    def expected(self, scale: float = 1.0, pe_scale: float | None = None, **options: Any) -> Expected:
        factor = torch.full((sum(self.dims),), scale, dtype=torch.float64)
        factor[self.dims[0] :] = scale if pe_scale is None else pe_scale
        keys = [(latent.double() * factor)[:, None] for latent in self.latents]
        parts = zip(self.q.split(self.rows), keys, strict=True)
        return Expected.of([(q, k, k[..., : self.dims[0]], None) for q, k in parts], **options)
