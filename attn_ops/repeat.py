"""Calls like an earlier one skip the checks, the choice of a backend and the set-up of its kernels.

Eager calls only: a decode step makes the same call for every layer and token, and checking it costs more
than launching it. A backend that can repeat a call offers ``record(function, args, kwargs)``, which makes
the call and returns its result with a :class:`Repeat` or None.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

Repeat = Callable[[list[int]], Any]
"""Makes the call again on tensors at other addresses, those of :func:`moving`, and returns its result."""

ALIGNMENT = 15
"""Kernels are compiled for pointers that are multiples of 16."""

MOST, ALIKE = 4096, 16
"""Calls remembered of one op, and of those that differ in their tensors alone; then all of them are forgotten."""


def moving(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call but those in lists, which are plans and stay where they are."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def held(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call."""
    return [t for x in args if isinstance(x, (list, tuple)) for t in x]


class Repeats:
    """What one op remembers of its calls.

    Calls are alike if a thread makes them with the same options, plans, grad mode and device, all captured in a graph
    or none, and with tensors of the same type, sizes, strides, dtype, device, need of a gradient and alignment.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[tuple[TensorGuards, Repeat]]] = {}
        self._plans: dict[Hashable, list[weakref.ref[Tensor]]] = {}

    def find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Hashable, Repeat | None, list[int]]:
        """``(key, repeat, addresses)``: what to :meth:`add` a call under, or how to repeat it."""
        values = (*args, *kwargs.values()) if kwargs else args
        tensors: list[Tensor] = []
        addresses: list[int] = []
        options: list[Any] = [*kwargs]
        together = 0
        for x in values:
            if isinstance(x, Tensor):
                address = x.data_ptr()
                tensors.append(x)
                addresses.append(address)
                together |= address
                options.append(Tensor)
            elif isinstance(x, list):
                options += map(id, x)
            else:
                options.append(x)
        key = (
            get_ident(),
            torch.is_grad_enabled(),
            torch._C._cuda_getDevice(),
            torch.cuda.is_current_stream_capturing(),
            together & ALIGNMENT,
            tensors[0].shape,
            *options,
        )
        for like, repeat in self._calls.get(key, ()):
            if like.check(*tensors):
                return key, repeat, addresses
        return key, None, addresses

    def add(self, key: Hashable, repeat: Repeat, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Remember a call for as long as its plans live: their identity is part of the key."""
        if len(self._plans) >= MOST:
            self._calls.clear()
            self._plans.clear()
        calls = self._calls.setdefault(key, [])
        if len(calls) >= ALIKE:
            calls.clear()
        calls.append((TensorGuards(*moving(args, kwargs), dynamic_dims_sizes=None, dynamic_dims_strides=None), repeat))
        self._plans[key] = [weakref.ref(t, lambda _: self._forget(key)) for t in held(args)]

    def _forget(self, key: Hashable) -> None:
        self._calls.pop(key, None)
        self._plans.pop(key, None)
