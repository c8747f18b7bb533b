"""Calls of ops as values, and whether the dispatcher passes their arguments on as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

TENSOR_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors in prepared calls. Another subclass may override what an op does."""


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


def has_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel of Autograd may take a call of these tensors."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


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

    by        the arguments that decide which tensors are found
    found     the tensors that this call found
    find      finds the tensors of a later call, given its arguments in place of ``by``; None if there are none
    is_kept   whether the tensors of a call that finds none are kept for later calls: it must run as written
    """

    by: tuple[Tensor, ...]
    found: Sequence[Tensor]
    find: Callable[..., Sequence[Tensor] | None]
    is_kept: Callable[[], bool] = lambda: True


class OpCall(NamedTuple):
    """A call of an op, and how its outputs become the result.

    finalize      makes the result from the op's outputs; None if the outputs are the result
    destinations  the caller's buffer for each output, or None for an output without one. None in place of the tuple:
                  the result is not the outputs, ``finalize`` computes
    unpack        whether the result is only the first output
    shape         shape of the first output in the result, if it differs from the op's
    scratch       arguments of the op that the call itself allocated, with undefined contents
    views         pairs ``(view, base)``: arguments of the op that begin where ``base``, a caller's argument, does
    before        calls of ops, without results, that are made first
    lookup        how the call finds tensors that are not its arguments
    repeatable    whether ``finalize`` depends only on the op's outputs, and keeps no tensor
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

    def op_call(self) -> OpCall:
        return self

    def then(self, function: Callable[[Any], Any], *, repeatable: bool = True) -> OpCall:
        """The call whose result is ``function`` of the result of this call, which has a ``finalize``.

        ``repeatable``: whether ``function`` depends only on that result, and keeps no tensor.
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
