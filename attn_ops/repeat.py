"""Calls like an earlier one skip the checks, the choice of a backend and the set-up of its kernels.

Eager calls only: a decode step makes the same call for every layer and token, and checking it costs more
than launching it. A backend that can repeat a call offers ``record(function, args, kwargs)``, which makes
the call and returns its result with a :class:`Repeat` or None.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Repeat = Callable[[Sequence[Tensor | None]], bool]
"""Makes the call again on other tensors, of :func:`tensors_of`, and says whether it could."""

MOST = 4096
"""Calls remembered of one op; then all are forgotten."""


def key_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
    """Equal for calls that pass the same checks and launch the same kernels.

    A tensor counts by shape, stride, dtype and device, a list of tensors (a plan) by identity.
    """
    grad = torch.is_grad_enabled()
    parts: list[Any] = [grad]
    for x in args:
        if isinstance(x, Tensor):
            parts += (x.shape, x.stride(), x.dtype, x.get_device(), grad and x.requires_grad)
        elif isinstance(x, (list, tuple)):
            parts.append(tuple(map(id, x)))
        else:
            parts.append(x)
    for name, x in kwargs.items():
        parts.append(name)
        if isinstance(x, Tensor):
            parts += (x.shape, x.stride(), x.dtype, x.get_device(), grad and x.requires_grad)
        else:
            parts.append(x)
    return tuple(parts)


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> list[Tensor | None]:
    """The tensors of a call and of its result, always in the same order."""
    tensors: list[Any] = []
    for x in (*args, *kwargs.values(), result):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += x
    return tensors


class Repeats:
    """What one op remembers of its calls."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, tuple[Repeat, list[weakref.ref[Tensor]]]] = {}

    def get(self, key: Hashable) -> Repeat | None:
        found = self._calls.get(key)
        return None if found is None else found[0]

    def add(self, key: Hashable, repeat: Repeat, args: Sequence[Any]) -> None:
        """Remember a call for as long as the plans in ``args`` live: their identity is part of its key."""
        if len(self._calls) >= MOST:
            self._calls.clear()
        plans = [t for x in args if isinstance(x, (list, tuple)) for t in x]
        self._calls[key] = repeat, [weakref.ref(t, lambda _: self._calls.pop(key, None)) for t in plans]
