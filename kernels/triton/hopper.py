"""Kernels for Hopper, written in Gluon: where there are any, and which calls they take."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from attn_ops.kernels.triton.launch import DIRECT
from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.ops.inductor import stay_a_call


@functools.cache
def hopper(device: torch.device, name: str) -> ModuleType | None:
    """Module ``name`` of this folder, where the GPU is Hopper and this release of Triton has what it is written in."""
    if not DIRECT or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:  # Gluon is experimental, and its names move
        return None


def hopper_for(name: str, q: Tensor, unsupported_reasons: Callable[[ModuleType], list[str]]) -> ModuleType | None:
    """Module ``name`` if it runs a call with the query ``q``, to which it has no ``unsupported_reasons``.

    Inductor generates Triton alone: a call that is being lowered stays one where it can, and else is left to Triton.
    """
    module = hopper(q.device, name)
    if module is None or unsupported_reasons(module):
        return None
    if isinstance(q, FakeTensor):
        stay_a_call()
        return None
    return module
