"""What every peer of another library needs."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .contest import NotMeasuredError

FLASHINFER_WORKSPACE = 256 << 20


def flashinfer() -> Any:
    """The module, or :class:`NotMeasuredError`."""
    if importlib.util.find_spec("flashinfer") is None:
        raise NotMeasuredError("flashinfer is not installed")
    import flashinfer

    return flashinfer


def flashinfer_workspace(device: str) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
