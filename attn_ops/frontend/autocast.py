"""Concatenation without autocast, which raises for float16 tensors in a bfloat16 region, and the reverse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def joined(join: Callable[..., Tensor], tensors: tuple[Tensor, ...], dim: int) -> Tensor:
    """``join(tensors, dim)``, of ``torch.cat`` or ``torch.stack``, without autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return join(tensors, dim)
    with torch.autocast(device, enabled=False):
        return join(tensors, dim)
