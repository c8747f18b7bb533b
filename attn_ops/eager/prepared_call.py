"""Eager calls on CUDA: the first of its key is captured, and the others launch its kernels again.

A decode step makes the same calls for every layer and token. To check one, choose its kernel and lay out its parameters
takes the host longer than to launch it. A :class:`CapturedCall` is what a call launched; :meth:`~CapturedCall.bind`
makes it a prepared call, which launches the same for other tensors. A cache finds it by its key without the
interpreter (``attn_ops/native/extension``). Two calls have the same key if they have equal options, the same plan, the
same device and grad mode, both or neither in a CUDA graph capture, and tensors of equal sizes, strides, dtype, device,
alignment and, in grad mode, ``requires_grad``.

Ops      :class:`OpCache`, behind the dispatcher
Methods  :func:`prepared`, for ``run`` of wrappers and ``plan`` of planners, before it. While a mode, transform, tracer
         or profiler must observe the op (``INTERPOSITION_CHECKS``), a method runs as written
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

_C: Any = None
NATIVE_REASON = ""
try:
    _C = importlib.import_module("attn_ops.native._C")
except ImportError as error:
    NATIVE_REASON = f"not prepared, they take more host time: {error}; install with a C++ compiler"

ALIGNMENT_MASK = 15
"""Kernels are compiled for pointers that are multiples of 16 bytes: ``not pointer & ALIGNMENT_MASK``."""

CONSTANT = -1
"""In the place of an argument, for a tensor that is the same in every call."""

MAX_ENTRIES = 4096
"""Entries of a cache. An insertion beyond it first evicts all of them."""

INTERPOSITION_CHECKS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
    torch._C._is_tracing,
)
"""Functions without arguments. If any returns true, a mode, transform, tracer or profiler must observe the op."""


def is_traced() -> bool:
    """Whether the results of ops may become part of a graph, so that they hold for this call alone.

    In a mode or transform, such as ``make_fx`` and ``vmap``, tensors may stand for others.
    """
    return bool(
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
    )


def is_available() -> bool:
    """Whether calls are prepared. Otherwise each is checked in Python and launched by Triton."""
    return _C is not None


def new_caches(device: torch.device, number: int = 0) -> tuple[PreparedCalls, int] | None:
    """For a plan on ``device``; ``number`` belongs to the key. None where calls are not prepared."""
    return (PreparedCalls(), number) if is_available() and device.type == "cuda" else None


class Launch(NamedTuple):
    """A launch of a loaded kernel: an ``Image`` of the extension module, and what its parameters come from."""

    image: Any
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]
    """The grid, then those of the parameters."""
    floats: tuple[float, ...]

    def run(self, device: int, stream: int) -> None:
        row = (self.image, tuple(range(len(self.tensors))), self.integers, self.floats)
        sources = tuple((CONSTANT, t.data_ptr()) for t in self.tensors)
        _C.PreparedCall((row,), sources, (), True).launch(device, stream)


class CapturedCall(NamedTuple):
    """What a call of an op launched, and the tensors that it returned."""

    launches: Sequence[Launch]
    outputs: tuple[Tensor, ...]

    def bind(
        self,
        arguments: Sequence[Tensor],
        constants: Sequence[Tensor],
        destinations: Sequence[Tensor | None] = (),
        unpack: bool = False,
    ) -> Any:
        """A prepared call for other tensors in the place of ``arguments``; None if it cannot be one.

        ``constants`` keep their addresses. An output with a destination, one of the arguments, is written there.
        """
        device = torch.cuda.current_device()
        if any(t.get_device() != device for t in (*arguments, *self.outputs)):
            return None
        targets = [None if t is None else _index(arguments, t) for t in destinations or [None] * len(self.outputs)]
        fits = zip(destinations, targets, self.outputs, strict=False)
        if not all(t is None or (i is not None and _is_output_like(t, output)) for t, i, output in fits):
            return None
        tensors: dict[int, Tensor] = {id(t): t for x in self.launches for t in x.tensors}
        for t in self.outputs:
            tensors.pop(id(t), None)
        sources = [_source(t, arguments, constants) for t in tensors.values()]
        if None in sources:
            return None
        places = {key: i for i, key in enumerate((*tensors, *map(id, self.outputs)))}
        rows = tuple((x.image, tuple(places[id(t)] for t in x.tensors), x.integers, x.floats) for x in self.launches)
        makes = (_allocator(t) if i is None else i for t, i in zip(self.outputs, targets, strict=True))
        return _C.PreparedCall(rows, tuple(sources), tuple(makes), unpack)


def _index(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The position of the object ``t`` among ``tensors``, unless it is there twice: then the next call may pass two."""
    found = [i for i, x in enumerate(tensors) if x is t]
    return found[0] if len(found) == 1 else None


def _source(t: Tensor, arguments: Sequence[Tensor], constants: Sequence[Tensor]) -> tuple[int, int] | None:
    """The argument that ``t`` is, or is a view of, with its offset in bytes; or CONSTANT with its address.

    None if it is neither, or a view of several arguments.
    """
    i = _index(arguments, t)
    if i is None and _index(constants, t) is not None:
        return CONSTANT, t.data_ptr()
    if i is None:
        storage = t.untyped_storage().data_ptr()
        found = [i for i, x in enumerate(arguments) if x.untyped_storage().data_ptr() == storage]
        i = found[0] if len(found) == 1 and t.numel() else None
    return None if i is None else (i, t.data_ptr() - arguments[i].data_ptr())


def _is_output_like(target: Tensor, output: Tensor) -> bool:
    """Whether a kernel can write to ``target`` what it writes to ``output``."""
    same_form = (target.shape, target.dtype, target.device) == (output.shape, output.dtype, output.device)
    return same_form and target.is_contiguous() and not target.data_ptr() & ALIGNMENT_MASK


def _allocator(t: Tensor) -> Any:
    """Allocates a tensor like ``t`` on the current device; an empty tensor itself, which every call returns."""
    if t.numel() == 0:
        return t
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{t.device.type}")
    return functools.partial(empty_strided, tuple(t.shape), t.stride(), t.dtype)


def flatten_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``args`` and in tuples among them, in the order of a cache. Lists are plans."""
    tensors: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, tuple):
            tensors += flatten_tensors(x)
    return tensors


def plan_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call. A plan keeps its tensors, and their addresses, for life."""
    return [t for x in args if isinstance(x, list) for t in x]


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


FirstCall = Callable[[Sequence[Any], dict[str, Any]], tuple[Any, CapturedCall | None]]
"""``first_call(args, kwargs)`` makes a call of an op and captures it; None for one that cannot be prepared."""


class OpCache:
    """The prepared calls of one op. An entry is evicted when a tensor of its plan is freed, and all at the limit."""

    def __init__(self, first_call: FirstCall) -> None:
        self.first_call = first_call
        self._entries: dict[Hashable, Any] = {}
        self._plans: dict[Hashable, list[weakref.ref[Tensor]]] = {}
        """For each entry, the tensors of its plans, with callbacks that evict the entry."""
        self.op: Callable[..., Any] = self._uncached
        if _C is not None:
            self.op = _C.CallCache(self._entries, torch.is_grad_enabled, self._on_miss, (), False, True)

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        return self.first_call(args, kwargs)[0]

    def _on_miss(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result, captured = self.first_call(args, kwargs)
        if key is None or captured is None:
            return result
        plans = plan_tensors(args)
        arguments = flatten_tensors((*args, *kwargs.values()))
        prepared_call = captured.bind(arguments, plans, unpack=not isinstance(result, tuple))
        if prepared_call is None:
            return result
        if len(self._entries) >= MAX_ENTRIES:
            self._entries.clear()
            self._plans.clear()
        self._entries[key] = prepared_call
        self._plans[key] = [weakref.ref(t, lambda _: self._evict(key)) for t in plans]
        return result

    def _evict(self, key: Hashable) -> None:
        self._entries.pop(key, None)
        self._plans.pop(key, None)


OP_CACHES: dict[str, OpCache] = {}
"""Of each op, for calls on CUDA (:mod:`attn_ops.ops.register`)."""


_SCHEMA_TYPES = {"float": float, "int": int, "bool": bool, "str": str, "ScalarType": torch.dtype}


@functools.cache  # one entry for each op
def _argument_types(op: str) -> dict[str, tuple[type | None, bool]]:
    """Of each argument its type, if that is a number, and whether it may be None."""
    names = {a.name: str(a.real_type) for a in getattr(torch.ops.attn, op).default._schema.arguments}
    return {
        name: (_SCHEMA_TYPES.get(of.removeprefix("Optional[").removesuffix("]")), of.startswith("Optional["))
        for name, of in names.items()
    }


class OpCall(NamedTuple):
    """A call of an op, and what becomes of its outputs.

    finalize      makes the result from the op's outputs; None: the op's result is the result
    destinations  if the result is the outputs, the caller's buffer for each, or None; None: finalize computes
    unpack        the result is the first output
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finalize: Callable[..., Any] | None = None
    destinations: tuple[Tensor | None, ...] | None = ()
    unpack: bool = True

    def execute(self) -> Any:
        result = getattr(torch.ops.attn, self.op)(*self.args, **self.kwargs)
        return result if self.finalize is None else self.finalize(*result)

    def op_call(self) -> OpCall:
        return self

    def as_dispatched(self) -> dict[str, Any] | None:
        """``kwargs`` as the dispatcher passes them on; None if it may convert more than ints to floats, or refuse."""
        types, converted = _argument_types(self.op), dict(self.kwargs)
        for name, x in self.kwargs.items():
            expected, optional = types[name]
            if (x is None and optional) or (x is not None and (expected is None or type(x) is expected)):
                continue
            if expected is not float or type(x) is not int or abs(x) >= 1 << 1023:
                return None
            converted[name] = float(x)
        return converted


class Executable(Protocol):
    """A call that a method returns."""

    def execute(self) -> Any: ...

    def op_call(self) -> OpCall: ...


class PreparedCalls(dict[Callable[..., Any], Any]):
    """The caches of the methods around one plan. A copy of the plan's owner has none."""

    def __reduce__(self) -> Any:
        return PreparedCalls, ()


class HasPreparedCalls(Protocol):
    """An object with methods that are decorated with :func:`prepared`."""

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        """The caches of its plan, and a number that belongs to the key; None if its calls are not prepared."""

    def _constants(self) -> Sequence[Tensor]:
        """Tensors that the op takes and that are not arguments of the method. They live as long as the caches."""


def _method_cache(method: Callable[..., Executable]) -> Any:
    entries: dict[Hashable, Any] = {}

    def uncached(_: int, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method(owner, *args, **kwargs).execute()

    def on_miss(key: Hashable, call: tuple[Any, ...], _: dict[str, Any]) -> Any:
        if key is None:
            return uncached(*call)
        __, owner, args, kwargs = call
        op_call = method(owner, *args, **kwargs).op_call()
        if len(entries) >= MAX_ENTRIES:
            entries.clear()
        dispatched, destinations = op_call.as_dispatched(), op_call.destinations
        if dispatched is None or destinations is None:
            entries[key] = uncached
            return op_call.execute()
        result, captured = OP_CACHES[op_call.op].first_call(op_call.args, dispatched)
        prepared_call = None
        if captured is not None:
            arguments = flatten_tensors((*args, *kwargs.values()))
            prepared_call = captured.bind(arguments, owner._constants(), destinations, op_call.unpack)
        entries[key] = prepared_call or uncached
        return result if op_call.finalize is None else op_call.finalize(*result)

    return _C.CallCache(entries, torch.is_grad_enabled, on_miss, INTERPOSITION_CHECKS, True, True)


def prepared(method: Callable[..., Executable]) -> Callable[..., Any]:
    """Decorator of a method that returns a call without executing it: execute the call, or its prepared one.

    The call depends on the arguments, the plan and the number of :class:`HasPreparedCalls` alone, and the method does
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
            cache = calls[method] = _method_cache(method)
        return cache(number, self, args, kwargs)

    return call
