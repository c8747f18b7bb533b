"""Prepared calls: methods around one op replay the kernel launches of an earlier eager call with the same cache key.

A wrapper's ``run`` checks its arguments, makes views of them, calls an op and returns what that returns. In Python
and in PyTorch's dispatcher that takes several times as long as the launch. :class:`PreparedMethod` makes a call once
and finds the op's tensors among the arguments; the next call replays the launches that the op has cached
(``launch_cache.py``).

The op is called where a mode, transform or profiler must observe it: a dispatch or function mode, a transform,
``torch.jit.trace``, a profiler.
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
"""Functions that say whether there is one who is to see the op called."""


def flat(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of a call, those in tuples too, as ``repeat.c`` goes over them."""
    tensors: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, tuple):
            tensors += flat(x)
    return tensors


class PreparedMethods(dict[Callable[..., Any], "PreparedMethod"]):
    """What is remembered of each method of an object. A copy of the object begins with nothing."""

    def __reduce__(self) -> Any:
        return PreparedMethods, ()


class HasPreparedMethods(Protocol):
    """What has methods around one op."""

    _memory: PreparedMethods
    """Emptied when the same arguments come to mean something else."""

    def _cache_key(self) -> int | None:
        """The mark of calls from now on; None if none is to be repeated."""

    def _owned_tensors(self) -> Sequence[Tensor]:
        """The tensors of the op that are not among the arguments, which stay what and where they are."""


class _Watch(TorchDispatchMode):
    """Notices ops of this library, copies, and whether anything else is computed."""

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


def _source(t: Tensor, given: Sequence[Tensor], held: Sequence[Tensor]) -> tuple[int, int] | None:
    """Which of ``given`` ``t`` is or is a view of, and how far into it; (-1, address) if it is ``held``."""
    i = _index(given, t)
    if i is not None:
        return i, 0
    if _index(held, t) is not None:
        return -1, t.data_ptr()
    memory = t.untyped_storage().data_ptr()
    around = [i for i, g in enumerate(given) if g.untyped_storage().data_ptr() == memory]
    return (around[0], t.data_ptr() - given[around[0]].data_ptr()) if len(around) == 1 else None


class PreparedMethod:
    """Calls of ``method(owner, *args)``, which calls one op and returns what that returns, or a copy in a buffer given.

    The kernels of a repeated call write to such a buffer at once, unless it shares memory with another argument.
    """

    def __init__(self, owner: HasPreparedMethods, method: Callable[..., Any]) -> None:
        self.owner, self._method = weakref.ref(owner), method
        self._calls: dict[Hashable, Any] = {}
        self.call = self._begin
        """``call(mark, *args, **kwargs)``; calls that are alike have the same mark."""

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        if not launch_cache.is_built():
            return self._plainly(*args, **kwargs)
        module = launch_cache.native()
        if module is None:
            self.call = self._plainly
        else:
            self.call = module.Calls(self._calls, torch.is_grad_enabled, self._remember, INTERPOSITION_CHECKS)
        return self.call(*args, **kwargs)

    def _plainly(self, _mark: int, *args: Any, **kwargs: Any) -> Any:
        return self._method(self.owner(), *args, **kwargs)

    def _remember(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if key is None:
            return self._plainly(*args, **kwargs)
        with _Watch() as watch:
            result = self._plainly(*args, **kwargs)
        if len(self._calls) >= launch_cache.MAX_ENTRIES:
            self._calls.clear()
        self._calls[key] = self._repeat(watch, flat((*args, *kwargs.values())), result) or self._plainly
        return result

    def _repeat(self, watch: _Watch, given: Sequence[Tensor], result: Any) -> Any:
        """The launches of the op that was called, for the arguments of the method; None if that is not all it did."""
        owner = self.owner()
        if watch.computed or len(watch.calls) != 1 or owner is None:
            return None
        op, args, kwargs, returned = watch.calls[0]
        held, outputs = owner._owned_tensors(), list(returned) if isinstance(returned, tuple) else [returned]
        filled: list[int | None] = [None] * len(outputs)
        for target, source in watch.copies:
            i, j = _index(outputs, source), _index(given, target)
            if i is None or j is None or not _like(target, source):
                return None
            outputs[i], filled[i] = target, j
        sources = [_source(t, given, held) for t in launch_cache.runtime_tensors(args, kwargs)]
        stays = all(_index(held, t) is not None for t in launch_cache.plan_tensors(args))
        whole = isinstance(result, tuple)
        ends = same(result, tuple(outputs)) if whole else result is outputs[0]
        found = LAUNCH_CACHES[op].find(args, kwargs)
        if found is None or None in sources or not stays or not ends:
            return None
        return found.through(len(given), tuple(sources), tuple(filled) if returned is not None else (), not whole)


def _index(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """Where ``t`` itself is among ``tensors``."""
    return next((i for i, x in enumerate(tensors) if x is t), None)


def _like(target: Tensor, output: Tensor) -> bool:
    """Whether a kernel can write to ``target`` what it writes to ``output``."""
    alike = (target.shape, target.dtype, target.device) == (output.shape, output.dtype, output.device)
    return alike and target.is_contiguous() and not target.data_ptr() & launch_cache.ALIGNMENT


def same(a: Any, b: Any) -> bool:
    """Whether two values are one object, equal and plain, or tuples of such."""
    if isinstance(a, tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str)) and a == b)


def prepared(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let eager calls of a method of a :class:`HasPreparedMethods` be repeated."""

    @functools.wraps(method)
    def call(self: HasPreparedMethods, *args: Any, **kwargs: Any) -> Any:
        mark = None if torch.compiler.is_compiling() else self._cache_key()
        if mark is None:
            return method(self, *args, **kwargs)
        memory = self._memory.get(method)
        if memory is None or memory.owner() is not self:
            memory = self._memory[method] = PreparedMethod(self, method)
        return memory.call(mark, *args, **kwargs)

    return call
