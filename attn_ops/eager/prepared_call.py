"""Prepared methods: a method around one op replays the kernel launches of an earlier call with the same cache key.

A wrapper's ``run`` checks its arguments, makes views of them, calls an op and returns what the op returns. In Python
and in PyTorch's dispatcher that takes several times as long as the launch. A :class:`PreparedMethod` runs the method
once, locates the op's tensors among the method's arguments, and binds the op's prepared call
(:mod:`attn_ops.eager.launch_cache`) to these arguments. The next call with the same key replays the launches and
bypasses Python and the dispatcher.

While a mode, transform, tracer or profiler must observe the op (``INTERPOSITION_CHECKS``), the method runs as written.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_ops.eager import launch_cache
from attn_ops.ops.register import LAUNCH_CACHES
from attn_ops.ops.schemas import NAMESPACE

INTERPOSITION_CHECKS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._get_tracing_state,
)
"""Functions without arguments. If any returns true, a mode, transform, tracer or profiler must observe the op."""


def flatten_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``args`` and in tuples among them, in the order of ``add_argument`` in ``launch_cache.c``."""
    tensors: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, tuple):
            tensors += flatten_tensors(x)
    return tensors


class PreparedMethods(dict[Callable[..., Any], "PreparedMethod"]):
    """The prepared methods of one object, by function: one for each decorated method. A copy of the object has none."""

    def __reduce__(self) -> Any:
        return PreparedMethods, ()


class HasPreparedMethods(Protocol):
    """An object with methods that are decorated with :func:`prepared`."""

    _prepared_methods: PreparedMethods
    """The object clears it when a call depends on new state that is not in the arguments or the cache key."""

    def _cache_key(self) -> int | None:
        """The object's part of the cache key; None if its calls are not to be cached."""

    def _owned_tensors(self) -> Sequence[Tensor]:
        """Tensors that the op takes and that are not arguments of the method. They keep their addresses."""


class _ObserveOps(TorchDispatchMode):
    """Records calls of this library's ops, copies, and whether another op computes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == NAMESPACE:
            self.calls.append((func.overloadpacket.__name__, args, kwargs, result))
        elif func is torch.ops.aten.copy_.default:
            self.copies.append(args)
        else:
            self.computed |= not func.is_view
        return result


def _source(t: Tensor, arguments: Sequence[Tensor], owned: Sequence[Tensor]) -> tuple[int, int] | None:
    """Where ``t`` lies: ``(index of an argument, offset in bytes)``, ``(-1, address)`` if owned, None if unknown.

    A view is located by its storage, if exactly one argument has that storage.
    """
    i = _index(arguments, t)
    if i is not None:
        return i, 0
    if _index(owned, t) is not None:
        return -1, t.data_ptr()
    storage = t.untyped_storage().data_ptr()
    same_storage = [i for i, x in enumerate(arguments) if x.untyped_storage().data_ptr() == storage]
    if len(same_storage) != 1:
        return None
    return same_storage[0], t.data_ptr() - arguments[same_storage[0]].data_ptr()


class PreparedMethod:
    """Caches calls of ``method(owner, *args)``, which calls one op and returns its result, or copies it to a buffer.

    In a replay the kernels write directly to such a buffer, unless it overlaps another argument.
    """

    def __init__(self, owner: HasPreparedMethods, method: Callable[..., Any]) -> None:
        self.owner, self._method = weakref.ref(owner), method
        self._entries: dict[Hashable, Any] = {}
        """At most ``MAX_ENTRIES``, after which all are evicted; freed with the owner's ``PreparedMethods``."""
        self.call = self._start
        """``call(key, *args, **kwargs)``, with the owner's part of the cache key. :meth:`_start` replaces it."""

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        """Make calls without the cache until the C module is built, then use it from now on."""
        if not launch_cache.is_built():
            return self._uncached(*args, **kwargs)
        module = launch_cache.native()
        if module is None:
            self.call = self._uncached
        else:
            self.call = module.CallCache(self._entries, torch.is_grad_enabled, self._insert, INTERPOSITION_CHECKS)
        return self.call(*args, **kwargs)

    def _uncached(self, _key: int, *args: Any, **kwargs: Any) -> Any:
        return self._method(self.owner(), *args, **kwargs)

    def _insert(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call and insert it under ``key``, as a prepared call if it can be replayed."""
        if key is None:
            return self._uncached(*args, **kwargs)
        with _ObserveOps() as observed:
            result = self._uncached(*args, **kwargs)
        if len(self._entries) >= launch_cache.MAX_ENTRIES:
            self._entries.clear()
        arguments = flatten_tensors((*args, *kwargs.values()))
        self._entries[key] = self._prepare(observed, arguments, result) or self._uncached
        return result

    def _prepare(self, observed: _ObserveOps, arguments: Sequence[Tensor], result: Any) -> Any:
        """The op's prepared call, bound to the method's arguments; None if the method does more than that call."""
        owner = self.owner()
        if observed.computed or len(observed.calls) != 1 or owner is None:
            return None
        op, args, kwargs, returned = observed.calls[0]
        owned, outputs = owner._owned_tensors(), list(returned) if isinstance(returned, tuple) else [returned]
        destinations: list[int | None] = [None] * len(outputs)
        for target, source in observed.copies:
            i, j = _index(outputs, source), _index(arguments, target)
            if i is None or j is None or not _is_output_like(target, source):
                return None
            outputs[i], destinations[i] = target, j
        sources = [_source(t, arguments, owned) for t in launch_cache.runtime_tensors(args, kwargs)]
        owns_plans = all(_index(owned, t) is not None for t in launch_cache.plan_tensors(args))
        is_tuple = isinstance(result, tuple)
        returns_outputs = same(result, tuple(outputs)) if is_tuple else result is outputs[0]
        prepared_call = LAUNCH_CACHES[op].lookup(args, kwargs)
        if prepared_call is None or None in sources or not owns_plans or not returns_outputs:
            return None
        bound = tuple(destinations) if returned is not None else ()
        return prepared_call.rebind(len(arguments), tuple(sources), bound, not is_tuple)


def _index(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The position of the object ``t`` among ``tensors``."""
    return next((i for i, x in enumerate(tensors) if x is t), None)


def _is_output_like(target: Tensor, output: Tensor) -> bool:
    """Whether a kernel can write to ``target`` what it writes to ``output``."""
    same_form = (target.shape, target.dtype, target.device) == (output.shape, output.dtype, output.device)
    return same_form and target.is_contiguous() and not target.data_ptr() & launch_cache.ALIGNMENT_MASK


def same(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` are one object, equal numbers or strings of one type, or tuples of such values."""
    if isinstance(a, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


def prepared(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: cache the eager calls of a method of a :class:`HasPreparedMethods`."""

    @functools.wraps(method)
    def call(self: HasPreparedMethods, *args: Any, **kwargs: Any) -> Any:
        key = None if torch.compiler.is_compiling() else self._cache_key()
        if key is None:
            return method(self, *args, **kwargs)
        entry = self._prepared_methods.get(method)
        if entry is None or entry.owner() is not self:
            entry = self._prepared_methods[method] = PreparedMethod(self, method)
        return entry.call(key, *args, **kwargs)

    return call
