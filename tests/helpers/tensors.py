"""Tensors by their place in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor_of_map(one: Any) -> Tensor:
    """The tensor that a tensor map describes. Elements outside of the storage are an error."""
    described: Tensor = one.base.as_strided(one.shape, one.strides, one.base.storage_offset())
    return described


def shifted(t: Tensor) -> Tensor:
    """``t`` one element after the beginning of an allocation; ``t`` itself if it has none."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) if t.numel() else t
