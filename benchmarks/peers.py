"""FlashInfer and FlashAttention 2, as the benchmarks of decode, prefill, MLA and serving steps use them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import NotMeasuredError

FLASHINFER_WORKSPACE_BYTES = 256 << 20


def module(name: str) -> Any:
    """The module of a peer.

    Raises:
        NotMeasuredError: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise NotMeasuredError(f"{name} is not installed")
    return importlib.import_module(name)


def flashinfer(submodule: str = "") -> Any:
    """FlashInfer, or one of its modules.

    Raises:
        NotMeasuredError: it is not installed.
    """
    package = module("flashinfer")
    return importlib.import_module(f"flashinfer.{submodule}") if submodule else package


def flash_attn() -> Any:
    """FlashAttention 2.

    Raises:
        NotMeasuredError: it is not installed.
    """
    return module("flash_attn")


def flashinfer_workspace(device: str) -> Tensor:
    """A workspace buffer of a wrapper."""
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
