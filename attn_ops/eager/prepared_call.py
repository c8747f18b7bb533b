"""Prepared calls: the first eager call of a key on CUDA is captured, and later calls replay its kernel launches.

A decode step makes the same calls for every layer and token. To check a call, choose its kernel and lay out the
parameters takes the host longer than the launch. A prepared call makes the launches of an earlier call with other
tensors (:mod:`attn_ops.eager.captured_call`). A cache finds it by its key without the interpreter
(``attn_ops/native/extension``). Two calls have the same key if they have equal options, the same plan, the
same device and grad mode, both or neither in a CUDA graph capture, and tensors of equal sizes, strides, dtype, device,
alignment and, in grad mode, ``requires_grad``.

Ops        :class:`OpCache`, before the dispatcher (:mod:`attn_ops.eager.op_entry`) and behind it
Methods    :func:`prepared`, for ``run`` of wrappers and ``plan`` of planners
Functions  :func:`prepared_function`, for functions that take their plan as an argument or need none

While a mode, transform, tracer or profiler must observe the op (``INTERPOSITION_CHECKS``), methods and functions run as
written, and ops pass through the dispatcher.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import _C, CapturedCall, Launch, index_of, is_available, outputs_of
from attn_ops.eager.interposition import INTERPOSITION_CHECKS
from attn_ops.eager.op_entry import dispatched

P = ParamSpec("P")

TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors in prepared calls. Another subclass may override what an op does."""

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
    return _C.CallCache(entries, grad_mode, on_miss, checks, of_method, on_cuda, tuple_is_plan, takes_tensors)


def current_stream(device: torch.device) -> int | None:
    """The address of a GPU's current stream; None for other devices."""
    if device.type != "cuda":
        return None
    found: int = torch._C._cuda_getCurrentRawStream(
        torch.cuda.current_device() if device.index is None else device.index
    )
    return found


def new_caches(device: torch.device, number: int = 0) -> tuple[PreparedCalls, int] | None:
    """Caches for a plan on ``device``; ``number`` belongs to the key. None where calls are not prepared."""
    return (PreparedCalls(), number) if is_available() and device.type == "cuda" else None


def flatten_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among ``args`` and in tuples among them, as ``CallCache`` orders them. Lists, plans, are left out."""
    tensors: list[Tensor] = []
    for x in args:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, tuple):
            tensors += flatten_tensors(x)
    return tensors


def as_list(x: Any) -> Any:
    """A plan as the list of its tensors, as the dispatcher passes it on. Any other argument is returned as it is."""
    return list(x) if isinstance(x, tuple) else x


def plan_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call. A plan keeps its tensors, and their addresses, for life."""
    return [t for x in args if isinstance(x, list) for t in x]


def has_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel of Autograd may take a call of these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


Check = Callable[[Sequence[Any], dict[str, Any]], object]
"""``check(args, kwargs)`` raises the error of an invalid call of an op."""

FirstCall = Callable[[Sequence[Any], dict[str, Any]], tuple[Any, CapturedCall | None]]
"""``first_call(args, kwargs)`` calls an op. Returns its result and the captured call, None if it cannot be prepared."""


class Undispatched:
    """A cache of one op's calls that is asked before the dispatcher. Calls that it cannot make go to the dispatcher."""

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
        if _C is not None:
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


_TYPE_OF_KIND = {
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "ScalarType": torch.dtype,
    "Tensor": Tensor,
    "List[Tensor]": list,
}


class _Argument(NamedTuple):
    """An argument of a schema: its type, and whether it may be None, may be passed by position, has no default."""

    kind: type
    optional: bool
    positional: bool
    required: bool

    def accepts(self, x: Any) -> bool:
        """Whether the dispatcher passes ``x`` on as it is."""
        if x is None:
            return self.optional
        if self.kind is list:
            return type(x) is list and all(type(t) in TENSOR_TYPES for t in x)
        return type(x) in TENSOR_TYPES if self.kind is Tensor else type(x) is self.kind


@functools.cache  # one entry for each op
def _arguments_of(op: str) -> dict[str, _Argument]:
    found = {}
    for a in getattr(torch.ops.attn, op).default._schema.arguments:
        kind = str(a.real_type)
        inner = kind.removeprefix("Optional[")
        optional = inner != kind
        of = _TYPE_OF_KIND[inner[:-1] if optional else inner]
        found[a.name] = _Argument(of, optional, not a.kwarg_only, not a.has_default_value())
    return found


class Lookup(NamedTuple):
    """How calls find tensors that are not among their arguments, such as the tensors of a plan.

    by       the arguments that decide which tensors are found
    found    the tensors that this call found
    find     finds the tensors of a later call, given its arguments in the place of ``by``; None if that call must run
             as written
    """

    by: tuple[Tensor, ...]
    found: Sequence[Tensor]
    find: Callable[..., Sequence[Tensor] | None]


class OpCall(NamedTuple):
    """A call of an op, and what becomes of its outputs.

    finalize      makes the result from the op's outputs; None if the outputs are the result
    destinations  the caller's buffer for each output, or None for an output without one. None in place of the tuple:
                  the result is not the outputs, ``finalize`` computes
    unpack        whether the result is the first output alone
    shape         shape of the first output in the result, if it differs from the op's
    scratch       arguments of the op that the call itself allocated, with undefined contents
    views         pairs ``(view, base)``: arguments of the op that begin where ``base``, a caller's argument, does
    before        calls of ops, without results, that are made first
    lookup        how the call finds tensors that are not its arguments
    repeatable    whether ``finalize`` depends on the op's outputs alone, and keeps no tensor
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finalize: Callable[..., Any] | None = None
    destinations: tuple[Tensor | None, ...] | None = ()
    unpack: bool = True
    shape: tuple[int, ...] | None = None
    scratch: tuple[Tensor, ...] = ()
    views: tuple[tuple[Tensor, Tensor], ...] = ()
    before: tuple[OpCall, ...] = ()
    lookup: Lookup | None = None
    repeatable: bool = False

    def execute(self) -> Any:
        for call in self.before:
            call.execute()
        result = getattr(torch.ops.attn, self.op)(*self.args, **self.kwargs)
        return result if self.finalize is None else self.finalize(*result)

    def first_call(self, arguments: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> tuple[Any, Any]:
        """Execute the call. Returns its result and a prepared call, for other ``arguments``, or None for it."""
        calls = (*self.before, self)
        converted = [call.as_dispatched() for call in calls]
        if self.destinations is None or None in converted:
            return self.execute(), None
        if self.before:  # these calls may write to tensors that this call reads, so it is checked first
            OP_CACHES[self.op].check(self.args, converted[-1] or {})
        launches: list[Launch] | None = []
        for call, kwargs in zip(calls, converted, strict=True):
            result, captured = OP_CACHES[call.op].first_call(call.args, kwargs or {})
            launches = None if captured is None or launches is None else [*launches, *captured.launches]
        prepared_call = None
        if launches is not None:
            prepared_call = CapturedCall(launches, outputs_of(result)).bind(
                arguments, constants, self.unpack, self.destinations, self.shape, self.scratch, self.views
            )
        return result if self.finalize is None else self.finalize(*result), prepared_call

    def op_call(self) -> OpCall:
        return self

    def then(self, function: Callable[[Any], Any], *, repeatable: bool = True) -> OpCall:
        """The call whose result is ``function`` of the result of this call, which has a ``finalize``.

        ``repeatable``: whether ``function`` depends on that result alone, and keeps no tensor.
        """
        finalize = self.finalize
        assert finalize is not None
        return self._replace(
            finalize=lambda *outputs: function(finalize(*outputs)),
            destinations=None,
            repeatable=self.repeatable and repeatable,
        )

    def is_complete(self) -> bool:
        """Whether ``args`` are the op's positional arguments, and the dispatcher passes them on as they are."""
        positional = {name: a for name, a in _arguments_of(self.op).items() if a.positional}
        names, count = list(positional), len(self.args)
        return (
            count <= len(names)
            and all(positional[name].accepts(x) for name, x in zip(names, self.args, strict=False))
            and not any(positional[name].required for name in names[count:])
            and self.kwargs.keys().isdisjoint(names[:count])
        )

    def as_dispatched(self) -> dict[str, Any] | None:
        """``kwargs`` as the dispatcher passes them on; None if it may convert more than ints to floats, or refuse."""
        arguments, converted = _arguments_of(self.op), dict(self.kwargs)
        for name, x in self.kwargs.items():
            argument = arguments.get(name)
            if argument is None:
                return None
            if argument.accepts(x):
                continue
            if argument.kind is not float or type(x) is not int or abs(x) >= 1 << 1023:
                return None
            converted[name] = float(x)
        return converted


def passed_on(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> OpCall | None:
    """A call of an op as the dispatcher passes it on; None if it may refuse, change or differentiate the call."""
    call = OpCall(op, tuple(map(as_list, args)), kwargs)
    converted = call.as_dispatched() if call.is_complete() else None
    if converted is None or has_gradients(flatten_tensors((*args, *kwargs.values()))):
        return None
    return call._replace(kwargs=converted)


class Executable(Protocol):
    """A call that a method returns."""

    def execute(self) -> Any: ...

    def op_call(self) -> OpCall: ...


class MappedCall(NamedTuple):
    """A call whose result is ``function`` of the result of ``call``. ``repeatable``: as for :meth:`OpCall.then`."""

    call: Executable
    function: Callable[[Any], Any]
    repeatable: bool = True

    def execute(self) -> Any:
        return self.function(self.call.execute())

    def op_call(self) -> OpCall:
        return self.call.op_call().then(self.function, repeatable=self.repeatable)


class PreparedCalls(dict[Callable[..., Any], Any]):
    """A cache for each prepared method of a plan's owner. A copy of the owner starts without caches."""

    on_cuda = True

    def __reduce__(self) -> Any:
        return type(self), ()


class HasPreparedCalls(Protocol):
    """An object with methods that are decorated with :func:`prepared`."""

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        """The caches of its plan, and a number that belongs to the key; None if its calls are not prepared."""

    def _constants(self) -> Sequence[Tensor]:
        """Tensors that the op takes and that are not arguments of the method. They live as long as the caches."""


def _looked_up(
    prepared_call: Any, lookup: Lookup, arguments: Sequence[Tensor], op_call: OpCall
) -> Callable[[tuple[Tensor, ...]], Any] | None:
    """A function that makes the prepared call with a later call's arguments and the tensors that it looks up."""
    places = [index_of(arguments, t) for t in lookup.by]
    if None in places or any(t is not None for t in op_call.destinations or ()):
        return None
    find = lookup.find

    def call(tensors: tuple[Tensor, ...]) -> Any:
        found = find(*[tensors[i] for i in places])  # type: ignore[index]
        return NotImplemented if found is None else prepared_call.call((*tensors, *found))

    return call


Make = Callable[..., tuple[Executable, list[Tensor], Sequence[Tensor]]]
"""Takes the arguments of a cached call. Returns the call, the tensors among its arguments, and constants."""


def _not_repeated(_: tuple[Tensor, ...]) -> Any:
    """The entry of a key whose calls run as written."""
    return NotImplemented


def _cache_of(make: Make, of_method: bool, on_cuda: bool) -> Any:
    """A cache whose entries take the tensors of a call. If one returns NotImplemented, the call runs as written."""
    entries: BoundedCache[Hashable, Any] = BoundedCache(MAX_ENTRIES)
    first_call = _first_prepared_call if on_cuda else _first_bound_call

    def on_miss(key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        executable, arguments, constants = make(*args, **kwargs)
        if key is None or has_gradients(arguments):
            return executable.execute()
        result, entry = first_call(executable, arguments, constants)
        entries.insert(key, entry or _not_repeated)
        return result

    return call_cache(entries, on_miss, INTERPOSITION_CHECKS, on_cuda=on_cuda, of_method=of_method, takes_tensors=True)


def _first_prepared_call(
    executable: Executable, arguments: list[Tensor], constants: Sequence[Tensor]
) -> tuple[Any, Any]:
    op_call = executable.op_call()
    lookup = op_call.lookup
    found = () if lookup is None else lookup.found
    result, prepared_call = op_call.first_call((*arguments, *found), constants)
    if prepared_call is not None and lookup is not None:
        prepared_call = _looked_up(prepared_call, lookup, arguments, op_call)
    return result, prepared_call


def _first_bound_call(executable: Executable, arguments: list[Tensor], constants: Sequence[Tensor]) -> tuple[Any, Any]:
    from attn_ops.eager.bound_call import first_call  # it imports this module

    return first_call(executable.op_call(), arguments, constants) or (executable.execute(), None)


def _method_cache(method: Callable[..., Executable], on_cuda: bool) -> Any:
    def make(_: int, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return method(owner, *args, **kwargs), flatten_tensors((*args, *kwargs.values())), owner._constants()

    return _cache_of(make, True, on_cuda)


def prepared(method: Callable[..., Executable]) -> Callable[..., Any]:
    """Decorator of a method that returns a call without executing it: execute the call, or its prepared call.

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
            cache = calls[method] = _method_cache(method, calls.on_cuda)
        return cache(number, self, args, kwargs)

    return call


def prepared_function(function: Callable[P, Executable]) -> Callable[P, Any]:
    """:func:`prepared` for a function whose call depends on its arguments alone.

    The first argument, or ``q`` by name, is a tensor. Tensors of a plan are arguments like all other tensors: their
    addresses may change from call to call.
    """

    def make(*args: P.args, **kwargs: P.kwargs) -> Any:
        return function(*args, **kwargs), flatten_tensors((*args, *kwargs.values())), ()

    on_cuda, on_cpu = (None, None) if _C is None else (_cache_of(make, False, True), _cache_of(make, False, False))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        if on_cuda is not None and on_cpu is not None and not is_compiling():
            first = args[0] if args else kwargs.get("q")
            if isinstance(first, Tensor):
                if first.is_cuda:
                    return on_cuda(*args, **kwargs)
                if first.is_cpu:
                    return on_cpu(*args, **kwargs)
        return function(*args, **kwargs).execute()

    return call
