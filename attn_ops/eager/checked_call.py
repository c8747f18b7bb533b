"""Eager calls on the CPU: the first of its key is checked, and the others run the same function.

Checks read sizes, strides, dtypes and options, but no contents: a call passes them if it has the key of one that did.
The key is that of a prepared call (:mod:`attn_ops.eager.prepared_call`) without what belongs to a GPU, and with the
sizes of a plan's tensors in the place of their identity. Without the extension module every call is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from attn_ops.eager.prepared_call import _C, MAX_ENTRIES

Check = Callable[[Sequence[Any], dict[str, Any]], Callable[..., Any]]
"""``check(args, kwargs)`` refuses a call of an op, or returns the function that makes it and others of its key."""


class CheckedCalls:
    """The functions of one op's calls by key. All are evicted at the limit."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._entries: dict[Hashable, Callable[..., Any]] = {}
        self.op: Callable[..., Any] = self._uncached
        if _C is not None:
            self.op = _C.CallCache(self._entries, torch.is_grad_enabled, self._on_miss, (), False, False)

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        return self.check(args, kwargs)(*args, **kwargs)

    def _on_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        function = self.check(args, kwargs)
        if key is not None:
            if len(self._entries) >= MAX_ENTRIES:
                self._entries.clear()
            self._entries[key] = function
        return function(*args, **kwargs)


CHECKED_CALLS: dict[str, CheckedCalls] = {}
"""Of each op, for calls on the CPU (:mod:`attn_ops.ops.register`)."""
