"""Positional encodings inside attention (docs/guide/masks.md)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_half(x: Tensor, position: Tensor, rope_scale: float, rope_theta: float) -> Tensor:
    """ROPE_LLAMA: rotate float32 ``x [..., tokens, heads, dim]`` by ``position [..., tokens]``, halves paired."""
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = position.float()[..., None, None] * (torch.pow(rope_theta, -exponent) / rope_scale)
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 ``[num_heads]``: powers of 2^(-8/n), n the largest power of two in num_heads, then those between."""
    n = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    return torch.where(head < n, torch.exp2(-8 * (head + 1) / n), torch.exp2(-4 * (2 * (head - n) + 1) / n))
