"""Rotary position embedding (RoPE): half-split rotation, and linear and Llama 3 frequency scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling. ``linear`` divides every frequency by ``factor``, ``llama3`` only those of long wavelength."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angular frequencies in radians per position, ``[head_dim / 2]`` float32 on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / theta**exponent
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    rotations = scaling.original_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = ((rotations - low) / (high - low)).clamp(0, 1)
    return inv_freq * (unscaled + (1 - unscaled) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [n, heads, D]`` by the angles of ``cos, sin [n, D / 2]``. Dimension i pairs with i + D / 2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
