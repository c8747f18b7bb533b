"""Batches for FlashAttention's functions, and what these must return, by its definitions and the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, ln


def visible(
    q_len: int, kv_len: int, causal: bool, window_size: tuple[int | None, int | None], attention_chunk: int = 0
) -> Tensor:
    """bool ``[q_len, kv_len]`` by FlashAttention's definition: row i sees ``[i + shift - left, i + shift + right]``.

    With chunks it sees the keys of its own, those from the multiple of ``attention_chunk`` at or before ``i + shift``.
    """
    left, right = (-1 if side is None else side for side in window_size)
    right = 0 if causal else right
    row, key = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    if attention_chunk:
        begin = row - row % attention_chunk
        seen &= (key >= begin) & (key < begin + attention_chunk)
    return seen


def expected(
    requests: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
    attention_chunk: int = 0,
    padding: int = 0,
) -> Expected:
    """Expected results of ``(q [n, heads, dim], k [m, ...], v [m, ...])`` per request, under FlashAttention's names."""
    masked = [(*r, visible(r[0].shape[0], r[1].shape[0], causal, window_size, attention_chunk)) for r in requests]
    return Expected.of(masked, padding, sm_scale=softmax_scale, logits_soft_cap=softcap, sinks=s_aux)


def dense(batch: int, q_len: int, kv_len: int, *, seed: int = 0, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``q, k, v`` of equal lengths; ``transposed`` as views of ``[batch, heads, seqlen, head_dim]``."""
    heads, kv_heads = more.get("heads", (4, 2))
    dim, dim_v = more.get("head_dims", (64, 64))
    generator = torch.Generator().manual_seed(seed)
    sizes = ((q_len, heads, dim), (kv_len, kv_heads, dim), (kv_len, kv_heads, dim_v))
    tensors = []
    for length, number, width in sizes:
        t = torch.randn(batch, length, number, width, generator=generator).to(DEVICE, more.get("dtype", torch.float16))
        tensors.append(t.transpose(1, 2).contiguous().transpose(1, 2) if more.get("transposed") else t)
    return tensors[0], tensors[1], tensors[2]


def check_dense(want: Expected, out: Tensor, lse: Tensor | None = None, **tolerance: float) -> None:
    """``out [batch, seqlen, heads, dim]`` and the natural ``lse [batch, heads, seqlen]``."""
    if lse is not None:
        assert lse.shape == (out.shape[0], out.shape[2], out.shape[1])
        assert lse.is_contiguous()
        lse = ln(lse.transpose(1, 2).flatten(0, 1))
    want.check(out.flatten(0, 1), lse, **tolerance)


def check_varlen(want: Expected, out: Tensor, lse: Tensor | None = None, **tolerance: float) -> None:
    """``out [tokens, heads, dim]`` and the natural ``lse [heads, tokens]``."""
    if lse is not None:
        assert lse.shape == (out.shape[1], out.shape[0])
        lse = ln(lse.t())
    want.check(out, lse, **tolerance)


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x [rows, heads, dim]`` in float64, pair by pair."""
    x, out = x.detach().cpu().double(), x.detach().cpu().double().clone()
    half = cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (t.detach().cpu().double()[positions.cpu().long(), i, None] for t in (cos, sin))
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., a] * s + x[..., b] * c
    return out


class DenseCache:
    """A cache ``[places, size, kv_heads, dim]`` with requests in some places; other memory is NaN."""

    def __init__(
        self,
        kv_lens: Sequence[int],
        size: int = 40,
        places: Sequence[int] | None = None,
        *,
        kv_heads: int = 2,
        head_dims: tuple[int, int] = (64, 64),
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv_lens, self.places = tuple(kv_lens), tuple(places or range(len(kv_lens)))
        number = max(self.places) + 1
        self.k, self.v = (torch.full((number, size, kv_heads, dim), math.nan) for dim in head_dims)
        self.keys = [torch.randn(n, kv_heads, head_dims[0], generator=generator).to(dtype) for n in kv_lens]
        self.values = [torch.randn(n, kv_heads, head_dims[1], generator=generator).to(dtype) for n in kv_lens]
        for place, keys, values in zip(self.places, self.keys, self.values, strict=True):
            self.k[place, : len(keys)], self.v[place, : len(values)] = keys.float(), values.float()
        self.k, self.v = self.k.to(DEVICE, dtype), self.v.to(DEVICE, dtype)

    @property
    def cache_seqlens(self) -> Tensor:
        return torch.tensor(self.kv_lens, dtype=torch.int32, device=DEVICE)
