"""Rotary position embedding: half-split rotation, and the scalings that long-context checkpoints ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """``kind`` linear divides every frequency by ``factor``; llama3 only those of long wavelength."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position, ``[head_dim / 2]`` float32 on the CPU."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / theta**exponent
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    turns = scaling.original_positions * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (kept + (1 - kept) / scaling.factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x [n, heads, D]`` rotated by the angles of ``cos, sin [n, D / 2]``; dimension i pairs with i + D / 2."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
