"""Eager calls on the CPU: the first of its key is checked, and the others run the same function.

Checks read sizes, strides, dtypes and options, but no contents: a call passes them if it has the key of one that did.
The key is that of a prepared call (:mod:`attn_ops.eager.prepared_call`) without what belongs to a GPU, and with the
sizes of a plan's tensors in the place of their identity. Without the extension module every call is checked.

Ops       behind the dispatcher, and before it (:mod:`attn_ops.eager.op_entry`)
Frontend  :func:`call_op`, before it too
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_compiling

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import _C
from attn_ops.eager.interposition import INTERPOSITION_CHECKS
from attn_ops.eager.prepared_call import MAX_ENTRIES, OP_CACHES, Undispatched, call_cache


class Bases(NamedTuple):
    """How a function of this package has the tensors of an op.

    tensors  in the place of the op's arguments, the tensors that they are views of
    shape    of the first output, if it is another than the op's
    """

    tensors: Sequence[Any]
    shape: tuple[int, ...] | None = None


class Check(Protocol):
    """Refuses a call of an op, or returns the function that makes it and others of its key.

    With ``bases``: a function that takes such tensors, and the tensors among the options. It runs no op that autocast
    changes, reads no workspace, and returns None in calls that it leaves to the other. None if there is none.
    """

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], bases: Bases | None = None, /) -> Any: ...


class CheckedCalls(Undispatched):
    """The functions of one op's calls by key. All are evicted at the limit.

    op      the implementation of the op
    direct  the same for calls that have not passed the dispatcher, but for those that it must see
    passes  the same checks without the call
    """

    def __init__(self, name: str, check: Check) -> None:
        self.name, self.check = name, check
        self._entries: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(MAX_ENTRIES)
        self._passed: BoundedCache[Hashable, Callable[..., Any]] = BoundedCache(MAX_ENTRIES)
        self.passes: Callable[..., Any] = self._check
        self.op: Callable[..., Any] = self._uncached
        self.direct: Callable[..., Any] = self._dispatched
        if _C is not None:
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
    """A call that has the key of one that was checked."""


def call_op(op: str, *args: Any, **kwargs: Any) -> Any:
    """``torch.ops.attn``'s op of these arguments, of which the first is a tensor."""
    if not is_compiling():
        if args[0].is_cuda:
            return OP_CACHES[op].direct(*args, **kwargs)
        if args[0].is_cpu:
            return CHECKED_CALLS[op].direct(*args, **kwargs)
    return getattr(torch.ops.attn, op)(*args, **kwargs)


CHECKED_CALLS: dict[str, CheckedCalls] = {}
"""The checked calls of each op on the CPU (:mod:`attn_ops.ops.register`)."""
