"""Properties of GPUs: alignment, compute capability, SMs, shared memory.

Functions with a cache, of one entry for each device, are for eager calls: Dynamo traces through caches, with a warning.
The entry of ``torch.device("cuda")``, without an index, is that of the GPU that was current in its first call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

ALIGNMENT = 16
"""Alignment of addresses in bytes that the widest loads need. Tensor maps need it of addresses and strides."""

ALIGNMENT_MASK = ALIGNMENT - 1
"""``not address & ALIGNMENT_MASK``: the address is aligned."""

HOPPER = 9
"""Major compute capability of Hopper GPUs."""

HOPPER_SHARED_BYTES = (227 << 10, 228 << 10)
"""Shared memory of a Hopper GPU per CTA and per SM."""


def properties(device: torch.device) -> Any:
    """PyTorch's properties of a GPU, also in traced calls, which plan."""
    return torch.cuda.get_device_properties(device)


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a GPU of compute capability 9; also in traced calls."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return bool(properties(device).major == HOPPER)


def is_capturing() -> bool:
    """Whether the current stream captures a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int | None:
    """The address of a GPU's current stream; None for other devices."""
    if device.type != "cuda":
        return None
    found: int = torch._C._cuda_getCurrentRawStream(
        torch.cuda.current_device() if device.index is None else device.index
    )
    return found


@functools.cache
def num_sms(device: torch.device) -> int:
    return int(properties(device).multi_processor_count)


def hopper_sms(device: torch.device) -> int:
    """SMs of a Hopper GPU, 0 for another device; also in traced calls."""
    return int(properties(device).multi_processor_count) if is_hopper(device) else 0


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """``(major, minor)``; None without a GPU, for example where a program for CUDA is exported."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


@functools.cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of shared memory per CTA and per SM; those of Hopper without a GPU."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_BYTES
    gpu = properties(device)
    return gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor
