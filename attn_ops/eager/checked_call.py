"""Checked calls: eager calls on the CPU, of which only the first of each key is checked.

Checks read sizes, strides, dtypes and options, but no contents. So a call passes them if an earlier call of its key
did, and calls the same function of the backend. The key is that of a prepared call
(:mod:`attn_ops.eager.op_cache`) without the device, alignment and capture, and with the sizes of a plan's tensors
in place of their identity. Without the extension module every call is checked.

Ops       :attr:`CheckedCalls.op` behind the dispatcher, :attr:`CheckedCalls.direct` before it
          (:mod:`attn_ops.eager.op_entry`)
Frontend  :func:`call_op`, before the dispatcher too
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.extension import extension
from attn_ops.eager.interposition import INTERPOSITION_CHECKS
from attn_ops.eager.op_cache import MAX_ENTRIES, OP_CACHES, Undispatched, call_cache
from attn_ops.eager.recorded_calls import active_recording
from attn_ops.tracing import is_compiling


class Bases(NamedTuple):
    """The tensors that a function of the frontend was given, of which an op's arguments are views.

    tensors  for each argument of the op the tensor that it is a view of, or the argument itself
    shape    shape of the first output, if it differs from the op's
    """

    tensors: Sequence[Any]
    shape: tuple[int, ...] | None = None


class Check(Protocol):
    """Checks a call of an op: raises its error, or returns the function that runs it and later calls of its key.

    With ``bases``, the function takes ``bases.tensors``, and the tensors among ``kwargs`` by name. It runs no op that
    autocast changes, reads no workspace, and returns None for a call that must run on the op's own arguments. The
    check returns None if the backend has no such function.
    """

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], bases: Bases | None = None, /) -> Any: ...


class CheckedCalls(Undispatched):
    """The function of each key of one op's calls. All are evicted at the limit.

    op      the implementation of the op, behind the dispatcher
    direct  the same before the dispatcher, which it calls if the dispatcher must see the call
    passes  only the checks
    """

    def __init__(self, name: str, check: Check) -> None:
        self.name, self.check = name, check
        self._entries: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(MAX_ENTRIES)
        self._passed: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(MAX_ENTRIES)
        self.passes: Callable[..., Any] = self._check
        self.op: Callable[..., Any] = self._uncached
        self.direct: Callable[..., Any] = self._dispatched
        if extension is not None:
            checks = INTERPOSITION_CHECKS
            self.op = call_cache(self._entries, self._on_miss, on_cuda=False)
            self.direct = call_cache(self._entries, self._on_undispatched_miss, checks, on_cuda=False)
            self.passes = call_cache(self._passed, self._on_unchecked, on_cuda=False)

    def clear(self) -> None:
        self._entries.clear()
        self._passed.clear()

    def _check(self, *args: Any, **kwargs: Any) -> None:
        self.check(args, kwargs)

    def _on_unchecked(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.check(args, kwargs)
        if key is not None:
            self._passed.insert(key, _passed)

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        return self.check(args, kwargs)(*args, **kwargs)

    def _on_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function: Callable[..., Any] = self.check(args, kwargs)
        if key is not None:
            self._entries.insert(key, function)
        return function(*args, **kwargs)


def _passed(*_: Any, **__: Any) -> None:
    """The entry of a key whose checks have passed."""


def call_op(op: str, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.ops.attn.<op>``, before the dispatcher if it can be. The first argument is a tensor."""
    if not is_compiling():
        if args[0].is_cuda:
            recorded = active_recording()
            return OP_CACHES[op].direct(*args, **kwargs) if recorded is None else recorded.call(op, args, kwargs)
        if args[0].is_cpu:
            return CHECKED_CALLS[op].direct(*args, **kwargs)
    return getattr(torch.ops.attn, op)(*args, **kwargs)


CHECKED_CALLS: dict[str, CheckedCalls] = {}
"""The checked calls of each op on the CPU (:mod:`attn_ops.ops.register`)."""
