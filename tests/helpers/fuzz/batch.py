"""Random batches: requests with queries, and their KV in a paged cache or in ragged tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from helpers.fuzz.draw import POISON, Draw
from helpers.fuzz.oracle import Options, Request, attend_all
from helpers.oracle import Expected

MAX_LOGITS = 4_000_000
"""Most logits of one request."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Shape:
    """Sizes that the requests of one wrapper or planner agree in."""

    heads: tuple[int, int]
    dims: tuple[int, int]
    page_size: int
    kv_layout: str
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @classmethod
    def draw(cls, d: Draw, *, same_dims: bool = False, mla: bool = False, fp8: bool = True) -> Shape:
        kv_heads = 1 if mla else d.pick(1, 1, 2, 3, 4)
        group = d.pick(*d.by_size((1, 2, 3), (1, 1, 2, 3, 4, 5, 7, 8, 16), (1, 4, 4, 8, 8, 16)))
        dim = d.pick(*d.by_size((16, 40, 64), (8, 16, 64, 72, 96, 128, 192, 256), (64, 128, 128, 80, 192, 256)))
        if d.size == "medium" and d.chance(0.05):
            dim = 34  # even, but no multiple of 8
        vo = dim if same_dims or d.chance(0.75) else d.pick(16, 64, 128)
        if mla:
            medium = (48, 32), (192, 128), (576, 512), (512, 512)
            dim, vo = d.pick(*d.by_size(((48, 32), (32, 32)), medium, ((576, 512),)))
        dtype = d.pick(torch.float16, torch.bfloat16, torch.float32) if fp8 else d.pick(torch.float16, torch.bfloat16)
        if d.backend == "interpreter" and dtype == torch.bfloat16:
            dtype = torch.float16  # NumPy multiplies no bfloat16
        kv_dtype = d.pick(*FP8) if fp8 and d.chance(0.2) else dtype
        page_size = d.pick(1, 1, 2, 3, 5, 8, 16, 16, 16, 32, 64, 128)
        return cls((kv_heads * group, kv_heads), (dim, vo), page_size, d.pick("NHD", "HND"), dtype, kv_dtype)

    @property
    def is_fp8(self) -> bool:
        return self.kv_dtype in FP8


class Batch:
    """Requests of one shape. With ``decode`` each has one query row, with ``equal`` all have the same lengths."""

    def __init__(
        self,
        d: Draw,
        shape: Shape,
        *,
        decode: bool = True,
        requests: int | None = None,
        rows: int | None = None,
        max_rows: int | None = None,
        longest: int | None = None,
        nonempty: bool = False,
        equal: bool = False,
    ) -> None:
        self.d, self.shape = d, shape
        count = d.pick(1, 1, 2, 3, 4, 6, *d.by_size((), (9,), (17,))) if requests is None else requests
        self.kv_lens = [self._length(longest, nonempty) for _ in range(count)]
        most = max_rows or d.by_size(5, 40, 150)
        self.qo_lens = [1 if decode else d.pick(0, 1, 1, 2, 3, d.integer(1, most)) for _ in range(count)]
        if rows is not None:
            self.qo_lens = [rows] * count
        (hq, hkv), (dim, vo) = shape.heads, shape.dims
        if rows is None and not decode:  # the oracle has all logits of a request in memory
            pairs = zip(self.qo_lens, self.kv_lens, strict=True)
            self.qo_lens = [min(n, MAX_LOGITS // (hq * max(m, 1))) for n, m in pairs]
        if equal:
            self.kv_lens, self.qo_lens = [self.kv_lens[0]] * count, [self.qo_lens[0]] * count
        size = d.pick(1.0, 1.0, 0.1, 3.0)
        self.q_rows = [(d.normal(n, hq, dim) * size).to(shape.dtype) for n in self.qo_lens]
        self.keys = [d.normal(n, hkv, dim).to(shape.kv_dtype) for n in self.kv_lens]
        self.values = [d.normal(n, hkv, vo).to(shape.kv_dtype) for n in self.kv_lens]
        self.masks: list[Tensor] | None = None

    def _length(self, longest: int | None, nonempty: bool) -> int:
        d, page = self.d, self.shape.page_size
        most = longest or d.by_size(70, 300, 1500)
        n = d.pick(0, 1, page, page + 1, 2 * page - 1, 64, 65, d.integer(1, most), d.integer(1, most))
        return min(max(n, 1) if nonempty else n, most)

    # Queries

    @cached_property
    def q(self) -> Tensor:
        """``[rows, Hq, Dqk]`` on the device."""
        return self.d.place(torch.cat(self.q_rows))

    @property
    def rows(self) -> int:
        return sum(self.qo_lens)

    def out(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.d.buffer(self.rows, self.shape.heads[0], self.shape.dims[1], dtype=dtype or self.shape.dtype)

    def lse(self) -> Tensor:
        return self.d.buffer(self.rows, self.shape.heads[0], dtype=torch.float32)

    # Paged KV

    @cached_property
    def pages(self) -> list[list[int]]:
        """The pages of each request, shuffled. A request may share full pages with an earlier one."""
        d, size = self.d, self.shape.page_size
        counts = [-(-n // size) for n in self.kv_lens]
        numbers = list(range(sum(counts) + d.pick(0, 1, 4)))
        d.random.shuffle(numbers)
        self._num_pages = max(1, len(numbers))
        pages: list[list[int]] = []
        for b, count in enumerate(counts):
            mine = [numbers.pop() for _ in range(count)]
            if b and d.chance(0.2):
                donor = d.integer(0, b - 1)
                shared = d.integer(0, min(self.kv_lens[donor], self.kv_lens[b]) // size)
                mine[:shared] = pages[donor][:shared]
                for tokens in (self.keys, self.values):
                    tokens[b][: shared * size] = tokens[donor][: shared * size]
            pages.append(mine)
        return pages

    @cached_property
    def num_pages(self) -> int:
        assert self.pages is not None
        return self._num_pages

    def _cache(self, tokens: list[Tensor], dim: int) -> Tensor:
        """``[pages, page_size, heads, dim]``, NaN where there is no token."""
        cache = torch.full((self.num_pages, self.shape.page_size, self.shape.heads[1], dim), math.nan)
        for mine, request in zip(self.pages, tokens, strict=True):
            for n, page in enumerate(mine):
                part = request[n * self.shape.page_size : (n + 1) * self.shape.page_size]
                cache[page, : len(part)] = part.float()
        return cache.to(self.shape.kv_dtype)

    @cached_property
    def both(self) -> tuple[Tensor, Tensor]:
        """K and V caches ``[pages, page_size, heads, dim]`` on the host."""
        assert self.pages is not None  # shared pages decide the tokens
        return self._cache(self.keys, self.shape.dims[0]), self._cache(self.values, self.shape.dims[1])

    def caches(self, kv_layout: str | None = None) -> tuple[Tensor, Tensor]:
        """K and V caches in the layout, each at its own place and with its own strides."""
        layout = kv_layout or self.shape.kv_layout
        k, v = (t if layout == "NHD" else t.transpose(1, 2) for t in self.both)
        return self.d.place(k), self.d.place(v)

    def stacked(self, kv_layout: str | None = None) -> Tensor:
        """``[pages, 2, ...]``: both in one tensor."""
        layout = kv_layout or self.shape.kv_layout
        k, v = (t.float() if layout == "NHD" else t.float().transpose(1, 2) for t in self.both)
        return self.d.place(torch.stack((k, v), 1).to(self.shape.kv_dtype))

    def page_table(self, *, host: bool = False, wide: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """``(indptr, indices, last_page_len)``, with entries behind the last page that nothing may use."""
        d, size = self.d, self.shape.page_size
        indptr = torch.tensor([0, *(len(mine) for mine in self.pages)]).cumsum(0)
        indices = torch.tensor([*(page for mine in self.pages for page in mine), *[POISON] * d.pick(0, 2)])
        last = torch.tensor([(n - 1) % size + 1 if n else d.pick(0, -3, 1) for n in self.kv_lens])
        dtype = d.pick(torch.int32, torch.int32, torch.int64) if wide else torch.int32
        device = "cpu" if host and d.chance(0.5) else d.device
        a, b, c = (t.to(device, dtype) for t in (indptr, indices, last))
        return a, b, c

    def block_tables(self) -> Tensor:
        width = max(map(len, self.pages)) + self.d.pick(0, 1, 5)
        table = torch.full((len(self.pages), max(width, 1)), self.d.pick(-1, POISON), dtype=torch.int32)
        for b, mine in enumerate(self.pages):
            table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        return table.to(self.d.device)

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.kv_lens, dtype=torch.int32, device=self.d.device)

    def qo_indptr(self, dtype: torch.dtype = torch.int32, device: str | None = None) -> Tensor:
        return torch.tensor([0, *self.qo_lens]).cumsum(0).to(device or self.d.device, dtype)

    def kv_indptr(self, dtype: torch.dtype = torch.int32, device: str | None = None) -> Tensor:
        """Offsets of ragged KV, in tokens."""
        return torch.tensor([0, *self.kv_lens]).cumsum(0).to(device or self.d.device, dtype)

    # Ragged KV

    def ragged(self, kv_layout: str | None = None) -> tuple[Tensor, Tensor]:
        layout = kv_layout or self.shape.kv_layout
        k, v = (torch.cat([t.float() for t in tokens]).to(self.shape.kv_dtype) for tokens in (self.keys, self.values))
        return tuple(self.d.place(t if layout == "NHD" else t.transpose(0, 1)) for t in (k, v))  # type: ignore[return-value]

    # Masks

    def draw_masks(self) -> Tensor:
        """Random masks; returns them as one flat bool tensor."""
        share = self.d.pick(0.02, 0.5, 0.9, 1.0)
        shapes = zip(self.qo_lens, self.kv_lens, strict=True)
        self.masks = [torch.rand(shape, generator=self.d.generator) < share for shape in shapes]
        return torch.cat([mask.flatten() for mask in self.masks]).to(self.d.device)

    def packed_masks(self, *, whole_bytes: bool = True) -> Tensor:
        """The masks in little-endian bits, each request from a whole byte on if ``whole_bytes``."""
        assert self.masks is not None
        packed = []
        for mask in self.masks if whole_bytes else [torch.cat(self.masks)]:
            bits = torch.nn.functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
            packed.append((bits * (1 << torch.arange(8))).sum(1).to(torch.uint8))
        return torch.cat(packed).to(self.d.device)

    # The expected result

    def requests(self) -> list[Request]:
        masks: list[Tensor | None] = [None] * len(self.qo_lens) if self.masks is None else [*self.masks]
        return [Request(*parts) for parts in zip(self.q_rows, self.keys, self.values, masks, strict=True)]

    def expected(self, o: Options, padding: int = 0) -> Expected:
        assert self.pages is not None  # shared pages decide the tokens
        return attend_all(self.requests(), o, padding)

    def __str__(self) -> str:
        return f"{self.shape}, qo_lens={self.qo_lens}, kv_lens={self.kv_lens}"


def draw_prefill_options(d: Draw, shape: Shape, *without: str) -> Options:
    """:func:`draw_options`, and those that only prefill has."""
    right = d.pick(0, 1, 7, 63, 64, 200, 100000, (1 << 30) - 1) if d.chance(0.3) else -1
    return replace(draw_options(d, shape, *without), window_right=right)


def draw_options(d: Draw, shape: Shape, *without: str) -> Options:
    """Options of a call, all but ``without`` of them."""
    values: dict[str, object] = {}
    if d.chance(0.5):
        values["causal"] = True
    if d.chance(0.3):
        values["window_left"] = d.pick(0, 1, 7, 63, 64, 200, 100000)
    if d.chance(0.25):
        values["soft_cap"] = d.pick(0.5, 5.0, 50.0)
    if d.chance(0.5):
        values["sm_scale"] = d.pick(0.01, 0.1, 0.3, 1.0)
    if d.chance(0.25):
        values["sinks"] = (d.normal(shape.heads[0]) * d.pick(1.0, 30.0)).to(d.device)
    if d.chance(0.25):
        values["pos_encoding"] = d.pick("ROPE_LLAMA", "ALIBI")
        if values["pos_encoding"] == "ROPE_LLAMA" and d.chance(0.5):
            values["rope_scale"], values["rope_theta"] = d.pick(1.0, 2.0, 8.0), d.pick(500.0, 1e4, 1e6)
    if shape.is_fp8 and d.chance(0.7):
        values["k_scale"], values["v_scale"] = d.pick(0.5, 1.0, 3.0), d.pick(0.25, 1.0, 2.0)
    return Options(**{k: v for k, v in values.items() if k not in without})  # type: ignore[arg-type]


def tolerance(d: Draw, shape: Shape, o: Options) -> dict[str, float]:
    """How much further than the reference kernels may be from the oracle: :meth:`helpers.harness.Setup.tolerance`."""
    if d.device == "cpu" and d.backend in ("auto", "reference"):
        return {}
    found: dict[str, float] = {}
    if o.pos_encoding == "ROPE_LLAMA" and shape.dtype != torch.float32:
        found["float32_eps"] = torch.finfo(shape.dtype).eps / 8
    if shape.is_fp8 and shape.dtype != torch.float32:
        found["smallest"] = torch.finfo(torch.float16).smallest_normal
    return found
