"""Packed custom masks, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def pack(masks: Sequence[Tensor]) -> Tensor:
    """The bits of the masks ``[rows, tokens]`` of all requests, uint8, and a byte that belongs to none."""
    packed = [np.packbits(mask.flatten().numpy(), bitorder="little") for mask in masks]
    return torch.from_numpy(np.concatenate([*packed, np.zeros(1, np.uint8)]))


def truncated(masks: Sequence[Tensor], num_bytes: int) -> list[Tensor]:
    """The masks of all requests as the first ``num_bytes`` of their packed bytes hold them, False beyond."""
    begins = [0, *accumulate(-(-mask.numel() // 8) for mask in masks)]
    places = [
        torch.arange(mask.numel()).view(mask.shape) // 8 + begin for mask, begin in zip(masks, begins, strict=False)
    ]
    return [mask & (byte < num_bytes) for mask, byte in zip(masks, places, strict=True)]
