"""Batches whose keys several ranks share: the page table of all ranks, and the cache of one of them.

Every rank makes the same requests and writes the tokens that it owns to a cache of its own, poisoned with NaN.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ops.distributed import ContextShard
from helpers.oracle import Expected
from helpers.page_tables import indptr, int32

DEVICE = os.environ.get("RANKS_ON", "cpu")
PAGE = 16


@dataclass(frozen=True)
class Problem:
    """A batch: the keys of each request before its new rows, and the rows of each; 0 rows of decode mean one."""

    kv_lens: Sequence[int] = (70, 0, 1, 16, 33, 128, 200)
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    dim_vo: int = 32
    interleave: int = PAGE
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_layout: str = "NHD"


class Batch:
    """The requests of a problem, the page table of all ranks, and the cache of the ``shard`` with its tokens.

    ``spare`` tokens of each request are there to :meth:`grow` by.
    """

    def __init__(self, problem: Problem, shard: ContextShard, spare: int = 0, device: str = DEVICE) -> None:
        self.problem, self.shard, self.device = problem, shard, device
        generator = self.generator = torch.Generator().manual_seed(5)
        kv_dtype = problem.kv_dtype or problem.dtype
        self.lens = list(problem.kv_lens)
        heads = problem.heads[1]

        def tokens(dim: int) -> list[Tensor]:
            made = (torch.randn(n + spare, heads, dim, generator=generator) for n in self.lens)
            return [t.to(kv_dtype) for t in made]

        self.keys, self.values = tokens(problem.dim), tokens(problem.dim_vo)
        self.tables: list[list[int]] = []
        free = [torch.randperm(200, generator=generator).tolist() for _ in range(self.shard.world)]
        for n in self.lens:
            pages = range(-(-(n + spare) // PAGE))
            owners = [page * PAGE // problem.interleave % self.shard.world for page in pages]
            self.tables.append([free[owner].pop() for owner in owners])
        size = (201, PAGE, heads)
        self.k_cache, self.v_cache = (
            torch.full((*size, dim), float("nan")).to(kv_dtype).to(self.device) for dim in (problem.dim, problem.dim_vo)
        )

    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        """The page table of the tokens so far."""
        pages = [-(-n // PAGE) for n in self.lens]
        numbers = [number for table, n in zip(self.tables, pages, strict=True) for number in table[:n]]
        last = int32([(n - 1) % PAGE + 1 if n else 0 for n in self.lens])
        return indptr(pages).to(self.device), int32(numbers).to(self.device), last.to(self.device)

    def append(self, counts: Sequence[int]) -> None:
        """Write the last ``counts`` tokens of each request, each on the rank that owns it."""
        kv_indptr, kv_indices, _ = self.table()
        seq_lens = int32(self.lens).to(self.device)
        ends = indptr(counts).to(self.device)
        request, position = torch.ops.attn.batch_indices_positions(ends, seq_lens, sum(counts))
        ranges = [(n - count, n) for n, count in zip(self.lens, counts, strict=True)]
        k, v = (
            torch.cat([t[begin:end] for t, (begin, end) in zip(all_tokens, ranges, strict=True)]).to(self.device)
            for all_tokens in (self.keys, self.values)
        )
        own = self.shard.owned(request, position)
        torch.ops.attn.append_kv(k, v, self.k_cache, self.v_cache, own, position, kv_indices, kv_indptr)

    def grow(self, counts: Sequence[int]) -> None:
        self.lens = [n + count for n, count in zip(self.lens, counts, strict=True)]
        self.append(counts)

    def queries(self, rows: int) -> Tensor:
        heads, dim = self.problem.heads[0], self.problem.dim
        return torch.randn(rows, heads, dim, generator=self.generator).to(self.problem.dtype).to(self.device)

    def sizes(self) -> dict[str, Any]:
        p = self.problem
        heads = {"num_qo_heads": p.heads[0], "num_kv_heads": p.heads[1]}
        return {"page_size": PAGE, **heads, "head_dim": p.dim, "head_dim_vo": p.dim_vo, "device": self.device}

    def requests(self, q: Tensor, rows: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        parts = q.split(list(rows))
        tokens = zip(parts, self.keys, self.values, self.lens, strict=True)
        return [(part, k[:n].float(), v[:n].float()) for part, k, v, n in tokens]

    def cache(self) -> tuple[Tensor, Tensor]:
        """In the layout of the problem."""
        caches = self.k_cache, self.v_cache
        if self.problem.kv_layout == "NHD":
            return caches
        k_cache, v_cache = (t.transpose(1, 2).contiguous() for t in caches)
        return k_cache, v_cache

    def heads(self, t: Tensor) -> Tensor:
        """This rank's share of the heads, in dimension 1."""
        return t.chunk(self.shard.world, 1)[self.shard.rank]


def share(expected: Expected, batch: Batch) -> Expected:
    """The part of ``expected`` that the heads of the rank of ``batch`` have."""
    return Expected(*map(batch.heads, (expected.out, expected.lse, expected.spread, expected.reach)))
