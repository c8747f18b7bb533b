"""Positional encodings inside attention: RoPE and ALiBi (docs/guide/masks.md)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half(x: Tensor, position: Tensor, rope_scale: float, rope_theta: float) -> Tensor:
    """ROPE_LLAMA: rotate float32 ``x [..., tokens, heads, dim]`` by ``position [..., tokens]``.

    Element ``i`` of the first half and element ``i`` of the second half form a pair.
    """
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = position.float()[..., None, None] * (torch.pow(rope_theta, -exponent) / rope_scale)
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 ``[num_heads]``: ``2^(-8i/n)`` for the first ``n`` heads, ``n`` the largest power of 2 up to num_heads.

    The other heads have the slopes between these: ``2^(-4i/n)`` for odd ``i``.
    """
    n = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    return torch.where(head < n, torch.exp2(-8 * (head + 1) / n), torch.exp2(-4 * (2 * (head - n) + 1) / n))
