"""Packed custom masks, by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


def _positions(rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.arange(tokens - rows, tokens)[:, None], torch.arange(tokens)[None]


def causal(rows: int, tokens: int) -> Tensor:
    """What ``causal=True`` lets rows see."""
    row, token = _positions(rows, tokens)
    return token <= row


def band(rows: int, tokens: int) -> Tensor:
    """Up to 40 tokens before the row's position, which is hidden itself."""
    row, token = _positions(rows, tokens)
    return (token < row) & (token >= row - 40)


def documents(rows: int, tokens: int) -> Tensor:
    """The tokens of the row's document. Documents have 150 tokens, and the first of each sees all of them."""
    row, token = _positions(rows, tokens)
    return (token // 150 == row // 150) | ((row % 150 == 0) & (token <= row))


SHAPES: dict[str, Callable[[int, int], Tensor]] = {"causal": causal, "band": band, "documents": documents}
"""Masks that hide whole KV tiles at the beginning or at the end, by name."""


def make(masked: float | str, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
    """The mask of that name, or one of random bits, of which ``masked`` is the share that is True."""
    if isinstance(masked, str):
        return SHAPES[masked](rows, tokens)
    return torch.rand(rows, tokens, generator=generator) < masked


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
