"""Eager launches of compiled kernels, and the capture of the launches of a call.

Kernels of every backend are launched through :func:`run`, so a captured call may launch kernels of several backends.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.captured_call import CapturedCall, Launch, outputs_of


class _Captured(threading.local):
    """The capture of a call in a thread."""

    launches: list[Launch | None] | None = None
    """The launches of the call that this thread captures, if any; None for a launch that cannot be replayed."""

    scratch: Sequence[Tensor] = ()
    """The tensors of :func:`scratch` in that call."""


_captured = _Captured()


def record(launch: Launch | None) -> None:
    """Add a launch to the call that is being captured, if any. None stands for a launch that cannot be replayed."""
    if _captured.launches is not None:
        _captured.launches.append(launch)


def scratch(t: Tensor) -> Tensor:
    """``t``, which a call has allocated for its launches, with undefined contents. A captured call allocates it too."""
    if _captured.launches is not None:
        _captured.scratch = (*_captured.scratch, t)
    return t


def run(launch: Launch, device: int) -> None:
    """Record a launch and make it on the device's current stream. A launch of an empty grid is recorded only."""
    record(launch)
    if all(launch.integers[:3]):
        launch.run(device, torch._C._cuda_getCurrentRawStream(device))


def capture_launches(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CapturedCall | None]:
    """Call ``function``, which launches kernels and computes nothing else. Returns its result and the captured call.

    The captured call is None if there was no launch, or one that cannot be replayed.
    """
    captured: list[Launch | None] = []
    outer = _captured.launches, _captured.scratch
    _captured.launches, _captured.scratch = captured, ()
    try:
        result = function(*args, **kwargs)
        allocated = _captured.scratch
    finally:
        _captured.launches, _captured.scratch = outer
    launches = [x for x in captured if x is not None]
    if not launches or len(launches) != len(captured):
        return result, None
    return result, CapturedCall([x for x in launches if all(x.integers[:3])], outputs_of(result), allocated)
