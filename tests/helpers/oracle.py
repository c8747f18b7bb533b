"""The oracle: what the ops must compute, in float64, written only from the specification.

:func:`attention` computes one request, one query row at a time. :class:`Expected` is the result of a batch and the
error that is allowed in each dtype. :class:`PagedBatch` is a paged cache whose unused memory is NaN, so that a read of
it shows in the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GARBAGE = (1 << 30) + 7
"""A page number that no cache has, for entries of a page table that must not be used."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_theta: float = 1e4,
    rope_scale: float = 1.0,
    rotated_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One request: ``q [n, Hq, Dqk]`` attends to ``k [m, Hkv, Dqk]`` and ``v [m, Hkv, Dvo]``.

    ``mask [n, m]`` is True where a row sees a key, and overrides ``causal``. Returns ``out [n, Hq, Dvo]`` and the
    base-2 ``lse [n, Hq]``, float64 on the CPU. A row without keys gives 0 and -inf, or the
    sink's LSE. Rotated queries and keys are rounded to ``rotated_dtype``, if it is given.
    """
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    (n, num_qo_heads, dim), (m, num_kv_heads, _) = q.shape, k.shape
    scale = 1 / math.sqrt(dim) if sm_scale is None else sm_scale
    if pos_encoding == "ROPE_LLAMA":
        q = rope_llama(q, torch.arange(m - n, m), rope_theta, rope_scale)
        k = rope_llama(k, torch.arange(m), rope_theta, rope_scale)
        if rotated_dtype is not None:
            q, k = (t.to(rotated_dtype).double() for t in (q, k))
    slopes = alibi_slopes(num_qo_heads) if pos_encoding == "ALIBI" else [0.0] * num_qo_heads
    slope = torch.tensor(slopes, dtype=torch.float64)[:, None]
    sink = q.new_full((num_qo_heads,), -math.inf) if sinks is None else sinks.detach().cpu().double()
    groups = num_kv_heads, num_qo_heads // num_kv_heads
    keys, values = k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()

    out = torch.zeros(n, num_qo_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((n, num_qo_heads), -math.inf, dtype=torch.float64)
    j = torch.arange(m)
    for i in range(n):
        hidden = torch.zeros(m, dtype=torch.bool)
        if mask is not None:
            hidden |= ~mask[i].cpu()
        elif causal:
            hidden |= j + n > m + i
        if window_left >= 0:
            hidden |= ~(j + n + window_left >= m + i)
        if window_right >= 0:
            hidden |= j + n > m + i + window_right
        if hidden.all():
            lse[i] = sink / math.log(2)
            continue
        logits = (q[i].unflatten(0, groups) @ keys).flatten(0, 1) * scale + slope * (j - i)
        if logits_soft_cap:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        logits[:, hidden] = -math.inf
        row_max = torch.maximum(logits.amax(-1), sink)
        p = torch.exp(logits - row_max[:, None])
        row_sum = p.sum(-1) + torch.exp(sink - row_max)
        out[i] = (p.unflatten(0, groups) @ values).flatten(0, 1) / row_sum[:, None]
        lse[i] = (row_max + torch.log(row_sum)) / math.log(2)
    return out, lse


def rope_llama(x: Tensor, positions: Tensor, theta: float, scale: float) -> Tensor:
    """Rotate ``x [n, H, D]`` in half-split order: dimension d is paired with dimension d + D/2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / x.shape[-1]) / scale
    angle = positions.double()[:, None, None] * frequency
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def alibi_slopes(num_heads: int) -> list[float]:
    n = 2 ** int(math.log2(num_heads))
    rest = range(1, num_heads - n + 1)
    return [2 ** (-8 * k / n) for k in range(1, n + 1)] + [2 ** (-4 * (2 * m - 1) / n) for m in rest]


def merge(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states ``v [rows, S, H, D]``, ``s [rows, S, H]`` (base 2). A state without keys is ignored."""
    v, s = v.detach().cpu().double(), s.detach().cpu().double()
    rows, states, heads, dim = v.shape
    out = torch.zeros(rows, heads, dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            seen = [i for i in range(states) if s[r, i, h] > -math.inf]
            if seen:
                largest = max(float(s[r, i, h]) for i in seen)
                weights = [2 ** (float(s[r, i, h]) - largest) for i in seen]
                out[r, h] = sum(w * v[r, i, h] for w, i in zip(weights, seen, strict=True)) / sum(weights)
                lse[r, h] = largest + math.log2(sum(weights))
    return out, lse


@dataclass
class Expected:
    """The exact result of a batch, and the error that is allowed.

    ``spread`` is the softmax-weighted mean of ``|v|``. A relative error ``e`` in every probability changes the output
    by at most ``e * spread``. A kernel rounds the probabilities to the dtype before PV, and the output once: half an
    eps each, so the error is up to ``eps * spread``. Twice that is allowed.

    ``reach`` is the largest ``sum_d |q_d k_d| * sm_scale`` of a row. Sums in float32 have an error of a few eps of it
    in every logit, and so in the LSE and the probabilities, whatever the dtype. The same holds for the size of the
    LSE, which a sink may dominate. Rotation has an error of an eps of the angle, which is as large as the position;
    where rotated numbers are rounded to 16 bits, it changes the rounding of a few.
    Below the smallest normal number of the dtype nothing is promised.
    """

    out: Tensor
    lse: Tensor
    spread: Tensor
    reach: Tensor

    @classmethod
    def of(cls, requests: Sequence[tuple[Any, ...]], padding: int = 0, **options: Any) -> Expected:
        """From ``(q, k, v)`` or ``(q, k, v, mask)`` of each request. ``padding`` rows of no request follow."""
        rows = []
        for q, k, v, *mask in requests:
            v = v.double()
            both, lse = attention(q, k, torch.cat((v, v.abs()), -1), mask=mask[0] if mask else None, **options)
            reach = _reach(q, k, options.get("sm_scale"))
            if options.get("pos_encoding") == "ROPE_LLAMA" and not options.get("rotated_dtype"):
                reach = reach * (1 + len(k))
            rows.append((*both.split(v.shape[-1], -1), lse, reach))
        out, spread, lse, reach = (torch.cat(column) for column in zip(*rows, strict=True))
        sinks = options.get("sinks")
        no_keys = -math.inf if sinks is None else sinks.detach().cpu().double() / math.log(2)

        def pad(t: Tensor, value: float | Tensor) -> Tensor:
            return torch.cat((t, t.new_zeros((padding, *t.shape[1:])) + value))

        return cls(pad(out, 0), pad(lse, no_keys), pad(spread, 0), pad(reach, 0))

    def rows(self, rows: slice) -> Expected:
        return Expected(self.out[rows], self.lse[rows], self.spread[rows], self.reach[rows])

    def check(
        self,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        float32_eps: float = 2**-23,
        smallest: float = 0.0,
        eps: float = 0.0,
        biased_tile: float = 0.0,
    ) -> None:
        """Raise unless the result is within tolerance.

        ``float32_eps`` is larger for kernels that compute in a lower precision, and ``smallest`` for those that compute
        in a dtype whose smallest normal number exceeds that of ``out``. ``eps`` is that of the dtype of the query, if
        ``out`` has another. ``biased_tile`` is the number of tokens of a KV tile, for kernels with ALiBi that compute
        exponents of a tile relative to the row maximum before it: the bias may exceed this by the slope times that
        number of tokens, and exponents have an error of an eps of that.
        """
        assert out.shape == self.out.shape, f"out is {list(out.shape)}, expected {list(self.out.shape)}"
        arithmetic = 8 * float32_eps * (1 + self.reach + self.lse.abs().nan_to_num(posinf=0))
        if biased_tile:
            slopes = torch.tensor(alibi_slopes(self.lse.shape[1]), dtype=torch.float64)
            arithmetic = arithmetic + float32_eps * biased_tile * slopes
        rounding = 2 * max(eps, 0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps)
        smallest = max(smallest, torch.finfo(out.dtype).smallest_normal)
        underflow = torch.where(self.spread > 0, 4 * smallest, 0.0)
        _compare("out", out, self.out, (arithmetic[..., None] + rounding) * self.spread + underflow)
        if lse is not None:
            assert lse.dtype == torch.float32
            assert lse.shape == self.lse.shape
            _compare("lse", lse, self.lse, arithmetic)


def _reach(q: Tensor, k: Tensor, sm_scale: float | None) -> Tensor:
    q, k = q.detach().cpu().double().abs(), k.detach().cpu().double().abs()
    if not len(k):
        return q.new_zeros(q.shape[:2])
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
    return torch.einsum("nhd,mhd->nhm", q, k).amax(-1) * scale


def _compare(name: str, actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    actual = actual.detach().cpu().double()
    wrong = ~((actual == expected) | ((actual - expected).abs() <= allowed))
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        place = tuple(at)
        raise AssertionError(
            f"{name} differs at {int(wrong.sum())} of {wrong.numel()} places, first {at}: {float(actual[place])}, "
            f"expected {float(expected[place])} within {float(allowed[place]):.3g}"
        )


@dataclass
class PagedBatch:
    """KV of several requests in a paged cache. Memory without a token is NaN.

    ``storage`` is the memory layout of the two caches:

    pair    two contiguous tensors
    fused   views ``[:, 0]`` and ``[:, 1]`` of the 5-D ``cache``
    padded  slices of two larger tensors with different strides
    """

    lengths: Sequence[int]
    page_size: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int
    kv_layout: str
    dtype: torch.dtype
    device: str | torch.device
    storage: str
    generator: torch.Generator
    spare_pages: int = 2
    keys: list[Tensor] = field(init=False)
    values: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = [self._random(n, self.head_dim) for n in self.lengths]
        self.values = [self._random(n, self.head_dim_vo) for n in self.lengths]
        pages = [-(-n // self.page_size) for n in self.lengths]
        used = sum(pages)
        self.num_pages = used + self.spare_pages
        shuffled = torch.randperm(self.num_pages, generator=self.generator)[:used]
        # Entries after the last page, and the last page length of an empty request, must not be used.
        kv_indices = torch.cat((shuffled, torch.tensor([GARBAGE, -1])))
        kv_indptr = torch.tensor([0, *pages]).cumsum(0)
        last = torch.tensor([(n - 1) % self.page_size + 1 if n else -3 for n in self.lengths])
        self.kv_indptr, self.kv_indices, self.kv_last_page_len = (
            t.to(self.device, torch.int32) for t in (kv_indptr, kv_indices, last)
        )
        self._allocate()
        for b, n in enumerate(self.lengths):
            token = torch.arange(n)
            page, offset = shuffled[kv_indptr[b] + token // self.page_size], token % self.page_size
            for cache, tokens in ((self.k_cache, self.keys[b].float()), (self.v_cache, self.values[b].float())):
                nhd = cache if self.kv_layout == "NHD" else cache.transpose(1, 2)
                nhd[page, offset] = tokens
        self._move()

    @property
    def page_table(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.kv_indptr, self.kv_indices, self.kv_last_page_len

    def _random(self, length: int, dim: int) -> Tensor:
        return torch.randn(length, self.num_kv_heads, dim, generator=self.generator).to(self.dtype)

    def _shape(self, dim: int) -> tuple[int, int, int, int]:
        p, n, h = self.num_pages, self.page_size, self.num_kv_heads
        return (p, n, h, dim) if self.kv_layout == "NHD" else (p, h, n, dim)

    def _allocate(self) -> None:
        k, v = self._shape(self.head_dim), self._shape(self.head_dim_vo)
        if self.storage == "pair":
            self.memory = [torch.full(k, math.nan), torch.full(v, math.nan)]
        elif self.storage == "fused":
            self.memory = [torch.full((k[0], 2, *k[1:]), math.nan)]
        else:
            padded = (k[0], k[1] + 1, k[2], k[3] + max(8, 16 // self.dtype.itemsize)), (v[0], v[1], v[2] + 2, v[3] + 16)
            self.memory = [torch.full(shape, math.nan) for shape in padded]
        self._views()

    def _views(self) -> None:
        if self.storage == "fused":
            self.k_cache, self.v_cache = self.memory[0][:, 0], self.memory[0][:, 1]
        else:
            shapes = self._shape(self.head_dim), self._shape(self.head_dim_vo)
            self.k_cache, self.v_cache = (
                t[tuple(slice(n) for n in shape)] for t, shape in zip(self.memory, shapes, strict=True)
            )

    def _move(self) -> None:
        self.memory = [t.to(self.device, self.dtype) for t in self.memory]
        self._views()
