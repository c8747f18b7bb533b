"""Kernels for Hopper, written in Gluon, and where there are any."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from .launch import DIRECT


@functools.cache
def hopper(device: torch.device, name: str) -> ModuleType | None:
    """Module ``name`` of this folder, where the GPU is Hopper and this release of Triton has what it is written in."""
    if not DIRECT or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:  # Gluon is experimental, and its names move
        return None
