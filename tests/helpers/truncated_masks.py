"""A packed mask that ends too early hides what it does not hold, and nothing behind it is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from helpers.cases import PREFILL_BASE
from helpers.harness import Setup

LENGTHS = (0, 1, 7, 60, 140)


def truncated(masks: list[Tensor], held: int) -> list[Tensor]:
    """The masks as far as the first ``held`` bytes say, False beyond."""
    sizes = [-(-mask.numel() // 8) for mask in masks]
    begins = [0, *accumulate(sizes)]
    bits = [
        torch.arange(mask.numel()).view(mask.shape) // 8 + begin for mask, begin in zip(masks, begins, strict=False)
    ]
    return [mask & (byte < held) for mask, byte in zip(masks, bits, strict=True)]


def check(kind: str, held: int, device: str = "cpu", backend: str = "auto") -> None:
    setup = Setup(kind, replace(PREFILL_BASE, name="short mask", kv_lens=(37, 0, 130, 9), masked=0.8), device)
    memory = setup.packed_mask.clone()
    memory[held:] = 255
    assert held < memory.shape[0]
    setup.masks = truncated(setup.masks, held)
    setup.check(*setup.run(backend, mask=memory[:held]))
