"""Eager launches of compiled kernels, and the capture of those that a call makes.

Kernels of every backend are launched through :func:`run`, so that a call may launch kernels of several.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.eager.captured_call import CapturedCall, Launch, outputs_of


class _Captured(threading.local):
    launches: list[Launch | None] | None = None
    """The launches of the call that this thread captures, if any; None for a launch that cannot be replayed."""


_captured = _Captured()


def record(launch: Launch | None) -> None:
    """Add a launch to those of the captured call, if one is captured; None for one that cannot be replayed."""
    if _captured.launches is not None:
        _captured.launches.append(launch)


def run(launch: Launch, device: int) -> None:
    """Record a launch and make it on the device's current stream. One of an empty grid is recorded alone."""
    record(launch)
    if all(launch.integers[:3]):
        launch.run(device, torch._C._cuda_getCurrentRawStream(device))


def capture_launches(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CapturedCall | None]:
    """Call ``function``, which launches kernels and computes nothing else: its result, and what it launched.

    None for a call that launched nothing, or a kernel that cannot be replayed.
    """
    captured: list[Launch | None] = []
    outer, _captured.launches = _captured.launches, captured
    try:
        result = function(*args, **kwargs)
    finally:
        _captured.launches = outer
    launches = [x for x in captured if x is not None]
    if not launches or len(launches) != len(captured):
        return result, None
    return result, CapturedCall([x for x in launches if all(x.integers[:3])], outputs_of(result))
