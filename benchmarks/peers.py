"""FlashInfer, as the benchmarks of decode, prefill, MLA and serving steps use it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import NotMeasuredError

FLASHINFER_WORKSPACE_BYTES = 256 << 20


def flashinfer() -> Any:
    """The module.

    Raises:
        NotMeasuredError: it is not installed.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise NotMeasuredError("flashinfer is not installed")
    import flashinfer

    return flashinfer


def flashinfer_workspace(device: str) -> Tensor:
    """A workspace buffer of a wrapper."""
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
