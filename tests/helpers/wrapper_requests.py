"""A batch of requests for the wrappers: KV in every form that they take, and the expected result of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from helpers.oracle import Expected, PagedBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Requests:
    """A batch of requests. Without ``qo_lens`` it is a decode batch: one query row per request."""

    kv_lens: tuple[int, ...] = (37, 0, 130, 1)
    qo_lens: tuple[int, ...] = ()
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    kv_layout: str = "NHD"
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    storage: str = "fused"
    num_pages: int | None = None
    seed: int = 0
    rows: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.rows = self.qo_lens or (1,) * len(self.kv_lens)
        self.q = torch.randn(sum(self.rows), self.heads[0], self.head_dims[0], generator=generator)
        self.q = self.q.to(DEVICE, self.dtype)
        used = sum(-(-n // self.page_size) for n in self.kv_lens)
        self.batch = PagedBatch(
            self.kv_lens,
            self.page_size,
            self.heads[1],
            *self.head_dims,
            self.kv_layout,
            self.kv_dtype or self.dtype,
            DEVICE,
            self.storage if self.head_dims[0] == self.head_dims[1] else "pair",
            generator,
            spare_pages=2 if self.num_pages is None else self.num_pages - used,
        )
        self.sinks = torch.randn(self.heads[0], generator=generator).to(DEVICE)
        shapes = list(zip(self.rows, self.kv_lens, strict=True))
        self.masks = [torch.rand(shape, generator=generator) < 0.6 for shape in shapes]
        self.mask = torch.cat([m.flatten() for m in self.masks]).to(DEVICE)

    @property
    def table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.batch.page_table

    @property
    def qo_indptr(self) -> Tensor:
        return _cumulative(self.rows)

    @property
    def kv_indptr(self) -> Tensor:
        """Offsets of each request's tokens in ragged KV."""
        return _cumulative(self.kv_lens)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.kv_lens, dtype=torch.int32, device=DEVICE)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """num_qo_heads, num_kv_heads, head_dim_qk, page_size."""
        return (*self.heads, self.head_dims[0], self.page_size)

    def cache(self, form: str = "pair") -> Any:
        k, v = self.batch.k_cache, self.batch.v_cache
        if form == "tensor":
            return self.batch.memory[0]
        if form == "no page dimension":
            if self.storage == "fused":
                return self.batch.memory[0].squeeze(2 if self.kv_layout == "NHD" else 3)
            return tuple(t.squeeze(1 if self.kv_layout == "NHD" else 2) for t in (k, v))
        return [k, v] if form == "list" else (k, v)

    def ragged(self, kv_layout: str = "NHD") -> tuple[Tensor, Tensor]:
        both = (torch.cat([t.float() for t in parts]).to(DEVICE) for parts in (self.batch.keys, self.batch.values))
        dtype = self.kv_dtype or self.dtype
        k, v = (t.to(dtype) if kv_layout == "NHD" else t.transpose(0, 1).contiguous().to(dtype) for t in both)
        return k, v

    def block_tables(self, spare: int = 1) -> Tensor:
        """``[batch, max_pages + spare]``, -1 behind each request's last page."""
        indptr, indices, _ = (t.cpu() for t in self.table)
        pages = indptr.diff().tolist()
        table = torch.full((len(pages), max(pages, default=0) + spare), -1, dtype=torch.int32)
        for b, n in enumerate(pages):
            table[b, :n] = indices[indptr[b] : indptr[b] + n]
        return table.to(DEVICE)

    def expected(
        self, *, k_scale: float = 1.0, v_scale: float = 1.0, masked: bool = False, sinks: bool = False, **options: Any
    ) -> Expected:
        masks: list[Any] = list(self.masks) if masked else [None] * len(self.rows)
        parts = zip(self.q.split(self.rows), self.batch.keys, self.batch.values, masks, strict=True)
        requests = [(q, k.double() * k_scale, v.double() * v_scale, mask) for q, k, v, mask in parts]
        expected = Expected.of(requests, sinks=self.sinks if sinks else None, **options)
        if DEVICE == "cuda" and options.get("pos_encoding") == "ROPE_LLAMA":
            expected.reach *= 64  # kernels round rotated queries and keys to the dtype of the query
        return expected


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _cumulative(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


def workspace(size: int = 1 << 20 if DEVICE == "cpu" else 1 << 25) -> Tensor:
    return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)


def sink_variant(dtype: torch.dtype = torch.float16, head_dim: int = 64) -> list[Any]:
    """``jit_args`` of FlashInfer's AttentionSink variant."""
    types = (dtype, dtype, dtype, torch.int32, head_dim, head_dim)
    return [
        "a name",
        *types,
        ["sink"],
        ["float"],
        ["sm_scale"],
        ["double"],
        "AttentionSink",
        "struct AttentionSink {};",
    ]


def ln(lse: Tensor) -> Tensor:
    """A natural-log LSE converted to base 2."""
    return lse / math.log(2)
