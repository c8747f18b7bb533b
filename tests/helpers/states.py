"""States that the merge ops take, ``(v, s)``."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def random_states(
    shape: tuple[int, ...], dtype: torch.dtype, spread: float = 5.0, empty: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Random states. A share ``empty`` of them has seen no key: its ``s`` is -inf and its ``v`` is NaN."""
    generator = torch.Generator().manual_seed(0)
    v, s = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[:-1], generator=generator) * spread
    none = torch.rand(s.shape, generator=generator) < empty
    v[none], s[none] = math.nan, -math.inf
    return v, s
