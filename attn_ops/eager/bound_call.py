"""Bound calls: repeated calls of methods and functions on the CPU, which go straight to the backend's functions.

Checks, scales and options of a call depend only on its key, which is the key of a checked call
(:mod:`attn_ops.eager.checked_call`). The first call of a key runs as written, and is bound: for each tensor that its
ops take, the *bound call* stores where a later call finds it, and no tensor of a caller. A later call of the key calls
the same functions of the backend with its own tensors. The source of each tensor is one of these:

argument   a floating-point tensor among the arguments, or a view of one. Integer tensors are not a source: the first
           call may have checked their contents
lookup     a tensor that each call finds by the contents of other arguments
constant   a tensor of a wrapper's plan, which lives as long as the cache

A call whose ops take any other tensor, such as one that it computes, or that has a buffer for its result is not bound:
every call of its key runs as written. So does a call that a mode, transform, tracer or profiler must observe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Union

from torch import Tensor

from attn_ops.eager.captured_call import CONSTANT, View, allocator, index_of, source_of
from attn_ops.eager.checked_call import CHECKED_CALLS, Bases
from attn_ops.eager.op_call import OpCall, flatten_tensors, passed_on

Source = Union[int, "_View", Callable[[Sequence[Tensor]], Any]]
"""The source of an op's argument: its index in the tensors of a call, or a function of all these tensors."""


class _BoundOp(NamedTuple):
    """A checked call of an op without its tensors.

    function  the backend's function
    sources   the source of each positional argument
    kwargs    keyword arguments
    finalize  makes the result from the outputs; None if the outputs are the result
    """

    function: Callable[..., Any]
    sources: tuple[Source, ...]
    kwargs: dict[str, Any]
    finalize: Callable[[Any], Any] | None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        args = [tensors[s] if type(s) is int else s(tensors) for s in self.sources]  # type: ignore[operator]
        outputs = self.function(*args, **self.kwargs)
        return outputs if self.finalize is None or outputs is None else self.finalize(outputs)


def first_call(
    op_call: OpCall, arguments: Sequence[Tensor], constants: Sequence[Tensor]
) -> tuple[Any, Callable[[Sequence[Tensor]], Any] | None] | None:
    """Check and execute the call. Returns the result and the bound call, a function of ``arguments``, or None for it.

    If the dispatcher must see the call, executes nothing and returns None instead of a tuple.
    """
    given = (op_call, *op_call.before)
    calls = [call for call in (passed_on(x.op, x.args, x.kwargs) for x in given) if call is not None]
    if len(calls) < len(given):
        return None
    # All are checked before anything is written.
    functions = [CHECKED_CALLS[call.op].check(call.args, call.kwargs) for call in calls]
    for call, function in zip(calls[1:], functions[1:], strict=True):
        function(*call.args, **call.kwargs)
    outputs = functions[0](*calls[0].args, **calls[0].kwargs)
    finalize = op_call.finalize
    result = outputs if finalize is None else finalize(*outputs)
    return result, _bound(op_call, calls, functions, arguments, constants)


def _bound(
    op_call: OpCall,
    calls: Sequence[OpCall],
    functions: Sequence[Callable[..., Any]],
    arguments: Sequence[Tensor],
    constants: Sequence[Tensor],
) -> Callable[[Sequence[Tensor]], Any] | None:
    """A function that repeats the checked ``calls`` for other ``arguments``; None if they cannot be bound.

    The first of ``calls`` is ``op_call``, and the others are those that it makes before.
    """
    if not op_call.repeatable:
        return None
    lookup = op_call.lookup
    by, found = ((), ()) if lookup is None else (lookup.by, lookup.found)
    by_places = [index_of(arguments, t) for t in by]
    binder = _Binder(op_call, arguments, found, constants, set(by_places))
    finalizes = [_finalize(op_call, op_call.shape), *[None] * len(op_call.before)]
    ops = [binder.bind(*each) for each in zip(calls, functions, finalizes, strict=True)]
    unread = {i for i, t in enumerate(arguments) if index_of(arguments, t) == i} - binder.used - set(by_places)
    if None in ops or None in by_places or unread:
        return None
    attend, *before = ops
    on_bases = binder.on_bases(calls[0])
    find, kept = None if lookup is None else lookup.find, tuple(constants)

    def call(tensors: Sequence[Tensor]) -> Any:
        if find is not None:
            looked_up = find(*[tensors[i] for i in by_places])  # type: ignore[index]
            if looked_up is None:
                return NotImplemented
            tensors = (*tensors, *looked_up)
        if kept:
            tensors = (*tensors, *kept)
        for op in before:
            op(tensors)  # type: ignore[misc]
        result = None if on_bases is None else on_bases(tensors)
        return attend(tensors) if result is None else result  # type: ignore[misc]

    return call


def _is_outputs(op_call: OpCall) -> bool:
    """Whether the result is the op's outputs or its first output, which may have another shape in the result."""
    return op_call.finalize is not None and op_call.destinations == (None, None)


def _finalize(op_call: OpCall, shape: tuple[int, ...] | None) -> Callable[[Any], Any] | None:
    """A function that makes the result from the outputs, the first one as ``shape``; None if they are the result."""
    finalize = op_call.finalize
    if finalize is None:
        return None
    if not _is_outputs(op_call):
        return lambda outputs: finalize(*outputs)
    if op_call.unpack:
        return itemgetter(0) if shape is None else lambda outputs: outputs[0].view(shape)
    return None if shape is None else lambda outputs: (outputs[0].view(shape), *outputs[1:])


class _View(NamedTuple):
    """A view of the tensor at index ``base`` of a call's tensors."""

    base: int
    view: View

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        t, (size, strides, ahead) = tensors[self.base], self.view
        return t.as_strided(size, strides, t.storage_offset() + ahead)


class _Binder:
    """Finds the source of each tensor of a call. Indices count the arguments, looked-up tensors, then constants.

    ``used`` are the indices of the arguments that the bound ops read.
    """

    def __init__(
        self,
        op_call: OpCall,
        arguments: Sequence[Tensor],
        found: Sequence[Tensor],
        constants: Sequence[Tensor],
        by: set[int | None],
    ) -> None:
        self.arguments, self.constants, self.by = arguments, constants, by
        self.others = (*found, *constants)
        self.op_call, self.scratch, self.views = op_call, op_call.scratch, op_call.views
        self.used: set[int] = set()

    def bind(self, call: OpCall, function: Callable[..., Any], finalize: Callable[..., Any] | None) -> _BoundOp | None:
        sources = [self._source(x) for x in call.args]
        keywords = flatten_tensors(tuple(call.kwargs.values()))
        if None in sources or any(index_of(self.constants, t) is None for t in keywords):
            return None
        return _BoundOp(function, tuple(sources), call.kwargs, finalize)  # type: ignore[arg-type]

    def on_bases(self, call: OpCall) -> _BoundOp | None:
        """``call``, which can be bound, on the tensors that its arguments are views of (:class:`Bases`).

        The result returns None for a call that must run on the views. None if the backend has no such function.
        """
        tensors, sources = [], []
        for x in call.args:
            source = self._source(x)
            is_view = isinstance(source, _View)
            tensors.append(self.arguments[source.base] if is_view else x)  # type: ignore[union-attr]
            sources.append(source.base if is_view else source)  # type: ignore[union-attr]
        shape = self.op_call.shape if _is_outputs(self.op_call) else None
        function = CHECKED_CALLS[call.op].check(call.args, call.kwargs, Bases(tensors, shape))
        if function is None:
            return None
        kwargs = {name: x for name, x in call.kwargs.items() if isinstance(x, Tensor)}
        return _BoundOp(function, tuple(sources), kwargs, _finalize(self.op_call, None))  # type: ignore[arg-type]

    def _source(self, x: Any) -> Source | None:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if not isinstance(x, list | tuple):
            return lambda _: x
        places = [self._tensor(t) if isinstance(t, Tensor) else None for t in x]
        if not all(type(place) is int for place in places) or len(places) < 2:
            return None
        return itemgetter(*places)

    def _tensor(self, t: Tensor) -> Source | None:
        other = index_of(self.others, t)
        if other is not None:
            return len(self.arguments) + other
        if index_of(self.scratch, t) is not None:
            allocate = allocator(t)
            return (lambda _: allocate()) if t.numel() else (lambda _: t)
        source = source_of(t, self.arguments, (), self.views)
        if source is None or source[0] == CONSTANT:
            return None
        i, base = source[0], self.arguments[source[0]]
        if i in self.by or not base.is_floating_point() or base.dtype != t.dtype:
            return None
        self.used.add(i)
        if base is t:
            return i
        return _View(i, View.of(t, base))
