"""The prepared calls of each op: repeated calls of an op launch what the first call of their key launched.

Two calls have the same key if they have equal options, the same plan, the same device and grad mode, both or neither in
a CUDA graph capture, and tensors of equal sizes, strides, dtype, device, alignment and, in grad mode,
``requires_grad``. A cache finds an entry by its key without the interpreter (``attn_ops/native/extension``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import CapturedCall
from attn_ops.eager.extension import extension
from attn_ops.eager.interposition import INTERPOSITION_CHECKS
from attn_ops.eager.op_call import OpCall, flatten_tensors, has_gradients, passed_on
from attn_ops.eager.op_entry import dispatched

MAX_ENTRIES = 4096
"""Entries of a cache. An insertion beyond it first evicts all of them."""


def call_cache(
    entries: dict[Hashable, Any],
    on_miss: Callable[..., Any],
    checks: tuple[Callable[[], Any], ...] = (),
    *,
    on_cuda: bool,
    of_method: bool = False,
    tuple_is_plan: bool = False,
    takes_tensors: bool = False,
) -> Any:
    """A ``CallCache`` of the extension module, as ``_C.pyi`` describes; ``checks`` are ``interposition_checks``."""
    grad_mode = torch.is_grad_enabled
    return extension.CallCache(entries, grad_mode, on_miss, checks, of_method, on_cuda, tuple_is_plan, takes_tensors)


def plan_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call. A plan keeps its tensors, and their addresses, for life."""
    return [t for x in args if isinstance(x, list) for t in x]


Check = Callable[[Sequence[Any], dict[str, Any]], object]
"""``check(args, kwargs)`` raises the error of an invalid call of an op."""

FirstCall = Callable[[Sequence[Any], dict[str, Any]], tuple[Any, CapturedCall | None]]
"""``first_call(args, kwargs)`` calls an op. Returns its result and the captured call, None if it cannot be prepared."""


class Undispatched:
    """A cache of one op's calls that is looked up before the dispatcher. Calls that it cannot make go to the
    dispatcher."""

    name: str
    _on_miss: Callable[..., Any]

    def _dispatched(self, *args: Any, **kwargs: Any) -> Any:
        return dispatched(getattr(torch.ops.attn, self.name))(*args, **kwargs)

    def _on_undispatched_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = None if key is None else passed_on(self.name, args, kwargs)
        return self._dispatched(*args, **kwargs) if call is None else self._on_miss(key, call.args, call.kwargs)


class OpCache(Undispatched):
    """The prepared calls of one op. An entry is evicted when a tensor of its plan is freed, and all at the limit.

    op       the implementation of the op, behind the dispatcher. A plan is a list, of tensors that are the same in
             every call of a key
    planned  the same for calls by the op's name, before the dispatcher, which it calls if the dispatcher must see the
             call. A plan may be a tuple
    direct   the same for calls of this package. The tensors of a plan are arguments like all other tensors
    """

    def __init__(self, name: str, check: Check, first_call: FirstCall) -> None:
        self.name, self.check, self.first_call = name, check, first_call
        self._plans: dict[Hashable, list[weakref.ref[Tensor]]] = {}
        """The tensors of the plans of each entry, with callbacks that evict it."""
        self._entries: BoundedCache[Hashable, Any] = BoundedCache(MAX_ENTRIES, self._plans)
        self._direct_entries: BoundedCache[Hashable, Any] = BoundedCache(MAX_ENTRIES)
        self.op: Callable[..., Any] = self._uncached
        self.planned: Callable[..., Any] = self._dispatched
        self.direct: Callable[..., Any] = self._dispatched
        if extension is not None:
            checks = INTERPOSITION_CHECKS
            self.op = call_cache(self._entries, self._on_miss, on_cuda=True)
            self.planned = call_cache(
                self._entries, self._on_undispatched_miss, checks, on_cuda=True, tuple_is_plan=True
            )
            self.direct = call_cache(self._direct_entries, self._on_direct_miss, checks, on_cuda=True)

    @property
    def num_entries(self) -> int:
        return len(self._entries) + len(self._direct_entries)

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        return self.first_call(args, kwargs)[0]

    def _on_direct_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        converted = None if key is None else OpCall(self.name, tuple(args), kwargs).as_dispatched()
        arguments = flatten_tensors((*args, *kwargs.values()))
        if converted is None or has_gradients(arguments):
            return self._dispatched(*args, **kwargs)
        result, captured = self.first_call(args, converted)
        prepared_call = captured and captured.bind(arguments, unpack=not isinstance(result, tuple))
        self._direct_entries.insert(key, prepared_call or self._dispatched)
        return result

    def _on_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result, captured = self.first_call(args, kwargs)
        if key is None or captured is None:
            return result
        plans = plan_tensors(args)
        arguments = flatten_tensors((*args, *kwargs.values()))
        prepared_call = captured.bind(arguments, plans, unpack=not isinstance(result, tuple))
        if prepared_call is None:
            return result
        self._entries.insert(key, prepared_call, [weakref.ref(t, lambda _: self._evict(key)) for t in plans])
        return result

    def _evict(self, key: Hashable) -> None:
        self._entries.pop(key, None)
        self._plans.pop(key, None)


OP_CACHES: dict[str, OpCache] = {}
"""The cache of each op, for calls on CUDA (:mod:`attn_ops.ops.register`)."""
