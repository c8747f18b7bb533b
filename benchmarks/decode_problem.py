"""The tensors of a decode row: random paged KV caches, a shuffled page table, and a float32 reference."""

from __future__ import annotations

import torch
from torch import Tensor

import attn_ops
from benchmarks.comparison import largest_error, rotated
from benchmarks.decode_rows import DecodeRow
from benchmarks.page_table import PageTable
from benchmarks.timing import copies_for


class DecodeProblem:
    """Copies of the KV caches, ``k_caches[i]`` and ``v_caches[i]``, in the row's layout, and one page table for all."""

    def __init__(self, row: DecodeRow, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        self.row, self.dtype, self.device = row, dtype, device
        self.kv_dtype = torch.float8_e4m3fn if row.fp8 else dtype
        generator = torch.Generator(device).manual_seed(0)
        self.table = PageTable(row.lengths, row.page_size, generator, device)
        self.copies = copies_for(row.kv_bytes())
        shape = (self.table.num_pages, row.page_size, row.num_kv_heads, row.head_dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.k_caches = [self._nhd(random(*shape).to(self.kv_dtype)).contiguous() for _ in range(self.copies)]
        self.v_caches = [self._nhd(random(*shape).to(self.kv_dtype)).contiguous() for _ in range(self.copies)]
        self.q = random(row.batch, row.num_qo_heads, row.head_dim)

    def _nhd(self, cache: Tensor) -> Tensor:
        """A cache of the row's layout as one in NHD, or the other way round."""
        return cache.transpose(1, 2) if self.row.layout == "HND" else cache

    def planner(self, num_ctas: int | None = None) -> attn_ops.DecodePlanner:
        """A planner of exactly this batch."""
        return attn_ops.DecodePlanner(
            self.row.batch,
            self.table.num_pages,
            page_size=self.row.page_size,
            num_qo_heads=self.row.num_qo_heads,
            num_kv_heads=self.row.num_kv_heads,
            head_dim=self.row.head_dim,
            max_kv_len=max(self.row.lengths),
            num_ctas=num_ctas,
            fp8_cache=self.row.fp8,
            device=self.device,
        )

    def caches(self, copy: int) -> tuple[Tensor, Tensor]:
        return self.k_caches[copy], self.v_caches[copy]

    def contiguous(self, copy: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, num_kv_heads, length, head_dim]`` of a copy. Lengths must be equal."""
        shape = (self.row.batch, -1, self.row.num_kv_heads, self.row.head_dim)
        return tuple(
            self._nhd(cache)[self.table.indices.long()].reshape(shape).transpose(1, 2).contiguous()
            for cache in self.caches(copy)
        )  # type: ignore[return-value]

    def error(self, out: Tensor, copy: int = 0, requests: int = 4) -> float:
        """Largest relative error in norm of ``out`` over some requests, compared with float32."""
        last, step = self.row.batch - 1, max(1, self.row.batch // requests)
        chosen = sorted({0, last, *range(0, self.row.batch, step)})
        return largest_error((out[b], self._expected(b, copy)) for b in chosen)

    def _expected(self, b: int, copy: int) -> Tensor:
        row = self.row
        k, v = (self.table.tokens(self._nhd(cache), b, row.lengths[b]).float() for cache in self.caches(copy))
        q = self.q[b].float()
        if row.rope:
            position = torch.arange(row.lengths[b], device=self.device)
            q, k = rotated(q[None], position[-1:])[0], rotated(k, position)
        q = q.view(row.num_kv_heads, -1, row.head_dim)
        probabilities = torch.softmax(q @ k.permute(1, 2, 0) * row.head_dim**-0.5, -1)
        return (probabilities @ v.transpose(0, 1)).flatten(0, 1)
