"""Prepared calls: the first eager call of a key on CUDA is captured, and later calls replay its kernel launches.

A decode step makes the same calls for every layer and token. Checking a call, choosing its kernel and laying out the
parameters takes the host longer than the launch. A prepared call makes the launches of an earlier call with other
tensors (:mod:`attn_ops.eager.captured_call`).

Ops        :mod:`attn_ops.eager.op_cache`, before the dispatcher (:mod:`attn_ops.eager.op_entry`) and behind it
Methods    :func:`prepared`, for ``run`` of wrappers and ``plan`` of planners
Functions  :func:`prepared_function`, for functions that take their plan as an argument or need none

On the CPU methods and functions make bound calls instead (:mod:`attn_ops.eager.bound_call`). While a mode, transform,
tracer or profiler must observe the op (``INTERPOSITION_CHECKS``), methods and functions run as written, and ops pass
through the dispatcher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor

from attn_ops.eager import bound_call
from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import CapturedCall, index_of, outputs_of
from attn_ops.eager.extension import extension
from attn_ops.eager.interposition import INTERPOSITION_CHECKS
from attn_ops.eager.op_cache import MAX_ENTRIES, OP_CACHES, call_cache
from attn_ops.eager.op_call import Executable, Lookup, OpCall, flatten_tensors, has_gradients
from attn_ops.eager.recorded_calls import Recording, TensorsCall, recording
from attn_ops.tracing import is_compiling

P = ParamSpec("P")


class PreparedCalls(dict[Callable[..., Any], Any]):
    """A cache for each prepared method of a plan's owner. A copy of the owner starts without caches."""

    on_cuda = True

    def __reduce__(self) -> Any:
        return type(self), ()


class BoundCalls(PreparedCalls):
    """A cache of bound calls for each prepared method of a plan's owner, on the CPU."""

    on_cuda = False


def new_caches(device: torch.device, number: int = 0, *, on_cpu: bool = False) -> tuple[PreparedCalls, int] | None:
    """Caches for a plan on CUDA, or with ``on_cpu`` on the CPU. None for other plans.

    ``number`` is part of the cache key: the planned rows and ragged keys.
    """
    if extension is None:
        return None
    if device.type == "cuda":
        return PreparedCalls(), number
    return (BoundCalls(), number) if on_cpu and device.type == "cpu" else None


class HasPreparedCalls(Protocol):
    """An object with methods that are decorated with :func:`prepared`."""

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        """The caches of its plan, and a number that is part of the key; None if its calls are not prepared."""

    def _constants(self) -> Sequence[Tensor]:
        """Tensors that the op takes and that are not arguments of the method. They live as long as the caches."""


def first_call(
    op_call: OpCall, arguments: Sequence[Tensor], constants: Sequence[Tensor], recorded: Recording
) -> tuple[Any, Any]:
    """Execute the call. Returns its result and the prepared call, a function of ``arguments``, or None for it.

    ``recorded`` has the ops that were called while the call was built.
    """
    calls = (*op_call.before, op_call)
    converted = [call.as_dispatched() for call in calls]
    if (op_call.destinations is None and not op_call.repeatable) or None in converted:
        return op_call.execute(), None
    if op_call.before:  # these calls may write to tensors that this call reads, so it is checked first
        OP_CACHES[op_call.op].check(op_call.args, converted[-1] or {})
    captures: list[Any] = []
    for call, kwargs in zip(calls, converted, strict=True):
        outputs, captured = OP_CACHES[call.op].first_call(call.args, kwargs or {})
        captures.append(captured)
    prepared_call = None
    if None not in captures:
        launches = [x for one in captures for x in one.launches]
        scratch = [t for one in captures for t in one.scratch]
        captured = CapturedCall(launches, outputs_of(outputs), scratch)
        prepared_call = _prepared_call(op_call, captured, arguments, constants, recorded)
    return outputs if op_call.finalize is None else op_call.finalize(*outputs), prepared_call


def _prepared_call(
    op_call: OpCall,
    captured: CapturedCall,
    arguments: Sequence[Tensor],
    constants: Sequence[Tensor],
    recorded: Recording,
) -> Any:
    """The prepared call of ``captured``, the launches of the call and of what it makes before; None for no such call.

    What was recorded is repeated, or its results are looked up.
    """
    destinations, is_converted = op_call.destinations or (), op_call.destinations is None

    def bind(captured: CapturedCall, found: Sequence[Tensor], made: Recording | None = None) -> Any:
        written, memory = ((), ()) if made is None else (made.constants, made.memory)
        return captured.bind(
            (*arguments, *found),
            (*constants, *written),
            op_call.unpack and not is_converted,
            destinations,
            None if is_converted else op_call.shape,
            (*op_call.scratch, *memory),
            op_call.views,
        )

    lookup, repeated = op_call.lookup, None
    if recorded.complete:
        whole = captured._replace(launches=[*recorded.launches, *captured.launches])
        repeated = bind(whole, [x.result for x in recorded.computed], recorded)
    if not (lookup or is_converted or recorded.constants or recorded.computed):
        return repeated
    if any(t is not None for t in destinations):  # a function does not check them for overlap
        return None
    call = None if repeated is None else recorded.repetition(repeated, arguments)
    if lookup is not None:
        call = _looked_up(bind(captured, lookup.found), lookup, arguments, call)
    return call if call is None or not is_converted else _converted(call, op_call)


def _converted(call: TensorsCall, op_call: OpCall) -> TensorsCall:
    """A function that makes ``call`` and converts its outputs to the result of ``op_call``."""
    finalize = op_call.finalize
    assert finalize is not None

    def converted(tensors: tuple[Tensor, ...]) -> Any:
        outputs = call(tensors)
        return outputs if outputs is NotImplemented else finalize(*outputs)

    return converted


def _looked_up(
    prepared_call: Any, lookup: Lookup, arguments: Sequence[Tensor], repeated: TensorsCall | None
) -> TensorsCall | None:
    """A function that makes the prepared call with a later call's arguments and the tensors that it looks up.

    A call that finds none is ``repeated``, unless later calls shall find what it makes.
    """
    places = [index_of(arguments, t) for t in lookup.by]
    if None in places or prepared_call is None:
        return None
    find, is_kept = lookup.find, lookup.is_kept

    def call(tensors: tuple[Tensor, ...]) -> Any:
        found = find(*[tensors[i] for i in places])  # type: ignore[index]
        if found is not None:
            return prepared_call.call((*tensors, *found))
        return NotImplemented if repeated is None or is_kept() else repeated(tensors)

    return call


Make = Callable[..., tuple[Executable, list[Tensor], Sequence[Tensor]]]
"""Takes the arguments of a cached call. Returns the call, the tensors among its arguments, and constants."""


def _not_repeated(_: tuple[Tensor, ...]) -> Any:
    """The entry of a key whose calls run as written."""
    return NotImplemented


def _cache_of(make: Make, of_method: bool, on_cuda: bool) -> Any:
    """A cache whose entries take the tensors of a call. If one returns NotImplemented, the call runs as written."""
    entries: BoundedCache[Hashable, Any] = BoundedCache(MAX_ENTRIES)

    def on_miss(key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if key is None:
            return make(*args, **kwargs)[0].execute()
        with recording() as recorded:
            executable, arguments, constants = make(*args, **kwargs)
            call = None if has_gradients(arguments) else executable.op_call()
        if call is None:
            return executable.execute()
        if on_cuda:
            result, entry = first_call(call, arguments, constants, recorded)
        else:
            result, entry = bound_call.first_call(call, arguments, constants) or (executable.execute(), None)
        entries.insert(key, entry or _not_repeated)
        return result

    return call_cache(entries, on_miss, INTERPOSITION_CHECKS, on_cuda=on_cuda, of_method=of_method, takes_tensors=True)


def _method_cache(method: Callable[..., Executable], on_cuda: bool) -> Any:
    def make(_: int, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method(owner, *args, **kwargs), flatten_tensors((*args, *kwargs.values())), owner._constants()

    return _cache_of(make, True, on_cuda)


def prepared(method: Callable[..., Executable]) -> Callable[..., Any]:
    """Decorator of a method that returns a call without executing it: execute the call, or its prepared call.

    The call depends only on the arguments, the plan and the number of :class:`HasPreparedCalls`, and the method does
    nothing that a repetition must do again.
    """

    @functools.wraps(method)
    def call(self: HasPreparedCalls, *args: Any, **kwargs: Any) -> Any:
        caches = None if is_compiling() else self._prepared_calls()
        if caches is None:
            return method(self, *args, **kwargs).execute()
        calls, number = caches
        cache = calls.get(method)
        if cache is None:
            cache = calls[method] = _method_cache(method, calls.on_cuda)
        return cache(number, self, args, kwargs)

    return call


def prepared_function(function: Callable[P, Executable], no_effect: Sequence[str] = ()) -> Callable[P, Any]:
    """:func:`prepared` for a function whose call depends only on its arguments.

    The first parameter, by position or by name, is a tensor. Tensors of a plan are arguments like all other tensors:
    their addresses may change from call to call. Integers ``no_effect`` are parameters that the function does not read:
    calls that differ in them have one key.
    """
    names = list(inspect.signature(function).parameters)
    unread = [(name, names.index(name)) for name in no_effect]

    def make(*args: P.args, **kwargs: P.kwargs) -> Any:
        return function(*args, **kwargs), flatten_tensors((*args, *kwargs.values())), ()

    on_cuda = None if extension is None else _cache_of(make, False, True)
    on_cpu = None if extension is None else _cache_of(make, False, False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if on_cuda is not None and on_cpu is not None and not is_compiling():
            for name, i in unread:
                if i < len(args):
                    args = (*args[:i], 0, *args[i + 1 :])
                elif name in kwargs:
                    kwargs[name] = 0
            first = args[0] if args else kwargs.get(names[0])
            if isinstance(first, Tensor):
                if first.is_cuda:
                    return on_cuda(*args, **kwargs)
                if first.is_cpu:
                    return on_cpu(*args, **kwargs)
        return function(*args, **kwargs).execute()

    return call
