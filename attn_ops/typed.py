"""Typed errors for arguments of a wrong Python type, by the annotations of the signature.

``@typed`` stands on every public function and method. It costs nothing in calls that succeed: the annotations are read
when a call has already failed with an error of Python or of PyTorch, to name the argument that caused it. Errors about
a page table name the arguments that it was given by.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attn_ops.errors import (
    ArgumentError,
    AttnOpsError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    dtype_name,
    fail,
    unsupported,
)
from attn_ops.policy import NO_EFFECT, UNSUPPORTED
from attn_ops.symbolic_sizes import overlapping_dim

P = ParamSpec("P")
R = TypeVar("R")

_RAW_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that code raises for an unexpected argument. Other errors, and errors of a device, are raised as they are."""

INT64_MAX = torch.iinfo(torch.int64).max

_ADMITTED: dict[Any, tuple[type, ...]] = {
    float: (numbers.Real, torch.SymFloat, torch.SymInt),
    int: (numbers.Integral, torch.SymInt),
    bool: (numbers.Integral, torch.SymBool, type(None)),
    list: (list, tuple),
    torch.device: (torch.device, int),
}
"""Types that an annotation admits in addition to its own, such as NumPy's and symbolic numbers."""

_NAMES = {
    Tensor: "a tensor",
    float: "a number",
    int: "an integer",
    bool: "True or False",
    str: "a string",
    type(None): "None",
    torch.dtype: "a torch.dtype",
    torch.device: "a torch.device",
}


_ABOUT_TYPES = (" of type ", " is None; expected ")
"""Texts in messages about the type of an argument."""


_NAMES_IN_PLANS = {
    "qo_indptr": ("cum_seq_lens_q",),
    "kv_indptr": ("paged_kv_indptr", "indptr", "unique_kv_indptr"),
    "kv_indices": ("paged_kv_indices", "indices", "unique_kv_indices"),
    "kv_last_page_len": ("paged_kv_last_page_len", "last_page_len", "unique_kv_last_page_len"),
    "head_dim_qk": ("head_dim",),
}
"""Arguments of planning, and the names that wrappers and functions have for them."""


class _Argument(NamedTuple):
    """An argument, or an element of one, with the annotation that it should satisfy."""

    name: str
    value: Any
    annotation: Any


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call that fails because of an argument's type raises an error that names the argument.

    The error is an :class:`~attn_ops.errors.ArgumentError`; an :class:`~attn_ops.errors.OptionError` for an integer
    beyond 64 bits; a :class:`~attn_ops.errors.ShapeError` for a tensor without dimensions; or a
    :class:`~attn_ops.errors.DeviceError` for a tensor on ``meta``. An error that no argument's type explains is raised
    as it is. Constructors, whose arguments may be used later, are checked before they run. Compiled and exported graphs
    do not contain the decorator.
    """
    constructs = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return function(*args, **kwargs)
        error = _type_error(function, args, kwargs, _is_read_later) if constructs else None
        if error is None:
            try:
                return function(*args, **kwargs)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except AttnOpsError as raised:
                error = _renamed(raised, function, args, kwargs) or _of_caller(raised, function, args, kwargs)
                if error is None:
                    raise
            except _RAW_ERRORS as raised:
                error = (
                    _type_error(function, args, kwargs, functools.partial(_may_explain, str(raised)))
                    or _value_error(function, args, kwargs)
                    or _flag_error(raised, function, args, kwargs)
                )
                if error is None:
                    raise
        raise error from None

    # Dynamo keeps the graphs, and the sizes that have varied, of each code object: functions do not share one.
    call.__code__ = call.__code__.replace(co_name=function.__qualname__)  # type: ignore[attr-defined]
    return call


def integers(where: str, **values: Any) -> tuple[Any, ...]:
    """``values``, with NumPy's integers as Python's.

    A value that is no integer raises the error of :func:`typed`: arithmetic takes floats and bools too.
    """
    for name, value in values.items():
        if type(value) is not int and not _admits(value, int):
            _refuse_type(where, _Argument(name, value, int))
    return tuple(x if isinstance(x, int | torch.SymInt) else int(x) for x in values.values())


def flags(where: str, **values: Any) -> None:
    """Raise the error of :func:`typed` for a value that is no flag: Python takes any value for true or false."""
    for name, value in values.items():
        if type(value) is not bool and (value is None or not _admits(value, bool)):
            _refuse_type(where, _Argument(name, value, bool))


def optional_flags(where: str, **values: Any) -> None:
    """:func:`flags`, where each value may be None."""
    for name, value in values.items():
        if value is not None:
            flags(where, **{name: value})


def optional_integers(where: str, **values: Any) -> tuple[Any, ...]:
    """:func:`integers`, where each value may be None."""
    return tuple(None if x is None else integers(where, **{name: x})[0] for name, x in values.items())


def check_real(where: str, name: str, t: Tensor) -> None:
    """Raise for a complex tensor: conversions to real dtypes drop its imaginary part."""
    if t.is_complex():
        fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "a tensor of real numbers", f"convert {name}")


def check_no_overlap(where: str, name: str, t: Tensor, otherwise: str) -> None:
    """Raise for a tensor that is written and whose elements share memory, as in an expanded tensor.

    ``otherwise`` ends the fix in the message.
    """
    dim = overlapping_dim(t)
    if dim is not None:
        fail(
            ShapeError,
            where,
            f"{name} is written and its elements overlap, with stride {int(t.stride(dim))} in dimension {dim}",
            "memory of its own for each element",
            f"use {name}.contiguous(), {otherwise}",
        )


def _renamed(
    raised: AttnOpsError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttnOpsError | None:
    """The error with the name of the caller's argument, if ``raised`` is about a type and names an inner argument."""
    message = str(raised)
    about_type = any(words in message for words in _ABOUT_TYPES)
    own = message.startswith(f"{_where(function, args)}: ")
    if not isinstance(raised, ArgumentError) or not (about_type or (" is missing; " in message and not own)):
        return None
    return _type_error(function, args, kwargs, functools.partial(_may_explain, message), message if own else "")


def _of_caller(
    raised: AttnOpsError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttnOpsError | None:
    """The error of planning with the caller's names of the function or method and of its arguments.

    Errors of planners keep their names, which the C++ API has too.
    """
    message, where = str(raised), _where(function, args)
    if "Planner" in where:
        return None
    begin, colon, rest = message.partition(": ")
    of_other = colon and begin != where and (begin == "plan" or begin.endswith(".plan"))
    if of_other:
        message = f"{where}: {rest}"
    parameters = inspect.signature(function).parameters
    given = {argument.name for argument in _arguments(function, args, kwargs) if argument.value is not None}
    names: dict[str, str] = {}
    for name, others in _NAMES_IN_PLANS.items():
        called = [n for n in (name, *others) if n in parameters]
        if called:
            own = next((n for n in called if n in given), called[0])
            names |= {n: own for n in (name, *(others if of_other else ())) if n == name or n not in called}
    message = _with_names(message, names)
    return None if message == str(raised) else type(raised)(message)


def _with_names(message: str, names: Mapping[str, str]) -> str:
    """``message`` with other names of arguments."""
    if not names:
        return message
    words = "|".join(map(re.escape, names))
    return re.sub(rf"(?<!\w)({words})(?!\w)", lambda found: names[found[0]], message)


@contextmanager
def page_table_called(qo_indptr: str, kv_indptr: str, kv_indices: str, kv_last_page_len: str) -> Iterator[None]:
    """Context in which errors of planning have these names for the parts of a page table."""
    parts = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_last_page_len": kv_last_page_len,
    }
    names = {name: called for part, called in parts.items() for name in (part, *_NAMES_IN_PLANS[part])}
    try:
        yield
    except AttnOpsError as error:
        raise type(error)(_with_names(str(error), names)) from None


def _is_read_later(argument: _Argument) -> bool:
    """Whether a method may read an argument of its constructor."""
    return argument.name not in UNSUPPORTED and argument.name not in NO_EFFECT


def _may_explain(message: str, argument: _Argument) -> bool:
    """Whether an argument may be why a call failed. An argument without an effect may well be None."""
    return argument.name not in NO_EFFECT or argument.value is not None or "None" in message


def _where(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """The function, the class of a constructor, or the class and the method."""
    name = function.__name__
    if not args or function.__qualname__ == name:
        return name
    owner = type(args[0]).__name__
    return owner if name == "__init__" else f"{owner}.{name}"


def _type_error(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    counts: Callable[[_Argument], bool],
    unless_in: str = "",
) -> AttnOpsError | None:
    """The error of the first argument that ``counts`` and that its annotation does not admit; None if there is none.

    None too if the message ``unless_in`` names the argument already.
    """
    for argument in filter(counts, _arguments(function, args, kwargs)):
        wrong = _mismatch(argument)
        if wrong is not None and re.search(rf"(?<!\w){re.escape(wrong.name)}(?!\w)", unless_in):
            return None
        if wrong is not None:
            return _caught(_refuse_type, _where(function, args), wrong)
    return None


def _value_error(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttnOpsError | None:
    """The error of the first argument of a failed call whose type is right and whose value no function takes.

    Such a value is an integer beyond 64 bits, a device that this machine lacks, or a tensor that is nested, sparse or
    complex, has no dimensions, or is on ``meta``.
    """
    for name, value in _devices(function, args, kwargs):
        lacks = _unavailable(value)
        if lacks:
            return DeviceError(f"{_where(function, args)}: {name} is {str(value)!r}{lacks}")
    for name, value, _ in _arguments(function, args, kwargs):
        if isinstance(value, int) and not -INT64_MAX <= value <= INT64_MAX:
            where = _where(function, args)
            return OptionError(f"{where}: {name} is {value}; expected an integer of 64 bits; change it")
    tensors = [t for argument in _arguments(function, args, kwargs) for t in _tensors(argument)]
    return _caught(_refuse_tensors, _where(function, args), tensors)


def _flag_error(
    raised: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttnOpsError | None:
    """The error of the first flag that is None, if ``raised`` is about a None: most code takes it for False."""
    if "None" not in str(raised):
        return None
    for argument in _arguments(function, args, kwargs):
        if argument.value is None and argument.annotation is bool:
            return _caught(_refuse_type, _where(function, args), argument)
    return None


def _caught(refuse: Callable[..., None], *args: Any) -> AttnOpsError | None:
    try:
        refuse(*args)
    except AttnOpsError as error:
        return error.with_traceback(None)
    return None


def _arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Argument]:
    """The named arguments of a call, without ``*args`` and ``**kwargs``. Arguments of NO_EFFECT come last.

    The list is empty if the call does not fit the signature: Python's own message says so.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return []
    hints, parameters = typing.get_type_hints(function), bound.signature.parameters
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name in bound.arguments if name in hints and parameters[name].kind not in collected]
    return [_Argument(name, bound.arguments[name], hints[name]) for name in sorted(named, key=NO_EFFECT.__contains__)]


def _devices(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The devices among the arguments, default values included."""
    given = {argument.name for argument in _arguments(function, args, kwargs)}
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    found = {name: p.default for name, p in parameters.items() if name not in given and p.default is not p.empty}
    found |= {argument.name: argument.value for argument in _arguments(function, args, kwargs)}
    return [(name, x) for name, x in found.items() if x is not None and torch.device in _options(hints.get(name))]


def _unavailable(device: Any) -> str:
    """Why no tensor can be allocated on ``device``, and what to pass; empty if one can."""
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        return "; expected a device of PyTorch; pass cuda or cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch without CUDA asserts
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        return f", which is not available: {reason}; expected a device of this machine; pass another, such as cpu"
    return ""


def _refuse_tensors(where: str, leaves: Sequence[_Argument]) -> None:
    for leaf in leaves:
        if leaf.value.is_nested:  # nested tensors with a strided layout have no sizes either
            fix = f"pass torch.cat({leaf.name}.unbind()), or {leaf.name}.to_padded_tensor(0)"
            fail(ArgumentError, where, f"{leaf.name} is a nested tensor", "a strided tensor", fix)
        if leaf.value.layout is not torch.strided:
            layout = str(leaf.value.layout).removeprefix("torch.")
            fail(ArgumentError, where, f"{leaf.name} is {layout}", "a strided tensor", f"pass {leaf.name}.to_dense()")
        check_real(where, leaf.name, leaf.value)
        if leaf.value.dim() == 0 and not _admits(1.0, leaf.annotation):
            fail(
                ShapeError,
                where,
                f"{leaf.name} is a tensor without dimensions",
                "the dimensions that the documentation names",
                f"reshape {leaf.name}",
            )
    real = next((leaf for leaf in leaves if not leaf.value.is_meta), None)
    for leaf in leaves:
        if leaf.value.is_meta:
            expected = "a device with contents" if real is None else f"{real.value.device}, where {real.name} is"
            fail(DeviceError, where, f"{leaf.name} is on meta, without contents", expected, f"move {leaf.name}")


def _refuse_type(where: str, wrong: _Argument) -> None:
    name, value, annotation = wrong
    if isinstance(value, Tensor) and value.dim() == 0 and torch.jit.is_tracing():
        unsupported(where, "a call in torch.jit.trace", "sizes are tensors there; use torch.export")
    if isinstance(value, torch.fx.Proxy):
        unsupported(where, "a call in torch.fx.symbolic_trace", "proxies have no sizes; use torch.export")
    expected = _describe(annotation)
    fix = f"pass {expected.partition(' or ')[0] if annotation is not bool else expected}"
    if value is None:
        shown, fix = "None", f"pass {name}"
    elif isinstance(value, Tensor) and value.is_nested:
        shown = "a nested tensor"
    elif isinstance(value, Tensor):
        shown = f"a tensor {list(value.shape)}"
        fix = f"pass {name}.item()" if value.numel() == 1 and _admits(1, annotation) else fix
    elif isinstance(value, str | int | float | complex):
        number = float(value) if isinstance(value, float) else value  # a float of a graph may stand for a symbol
        shown = f"{number!r}, of type {type(value).__name__}"
    else:
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        shown = f"of type {module}{kind.__name__}"
        if expected.startswith("a tensor") and isinstance(value, list | tuple):
            fix = f"make a tensor of it with torch.tensor({name})"
        elif expected.startswith("a tensor") and hasattr(value, "__array__"):
            fix = f"make a tensor of it with torch.from_numpy({name})"
        elif name == "plan" and hasattr(value, "plan") and hasattr(value, "state"):
            fix = "pass what its plan() returns"
    fail(ArgumentError, where, f"{name} is {shown}", expected, fix)


def _mismatch(argument: _Argument) -> _Argument | None:
    """``argument``, or the element of it, that its annotation does not admit; None if it is admitted."""
    name, value, annotation = argument
    if _admits(value, annotation):
        return None
    for option in _options(annotation):
        for i, element in enumerate(_elements(value, option) or ()):
            if not _admits(*element):
                return _Argument(f"{name}[{i}]", *element)
    return argument


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _elements(value: Any, annotation: Any) -> list[tuple[Any, Any]] | None:
    """The elements of a list or tuple with their annotations; None if ``value`` is not such a container."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin not in (list, tuple) or not isinstance(value, _ADMITTED.get(origin, origin)) or not args:
        return None
    if issubclass(origin, tuple) and args[-1] is not Ellipsis:
        return list(zip(value, args, strict=False))
    return [(element, args[0]) for element in value]


def _admits(value: Any, annotation: Any) -> bool:
    if annotation is Any or isinstance(annotation, TypeVar):
        return True
    options = _options(annotation)
    if len(options) > 1:
        return any(_admits(value, option) for option in options)
    origin = typing.get_origin(annotation)
    if isinstance(origin, type):
        elements = _elements(value, annotation) or ()
        return isinstance(value, _ADMITTED.get(origin, origin)) and all(_admits(*element) for element in elements)
    if annotation is bool and type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return True
    if annotation is int and isinstance(value, bool):
        return False
    kinds = _ADMITTED.get(annotation, annotation)
    return isinstance(value, kinds) if isinstance(kinds, type | tuple) else True


def _tensors(argument: _Argument) -> Iterator[_Argument]:
    """The tensors of an argument. An argument annotated Any is left out: it takes every tensor."""
    name, value, annotation = argument
    if isinstance(value, Tensor) and annotation is not Any:
        yield argument
    elif isinstance(value, tuple | list) and not any(Any in typing.get_args(option) for option in _options(annotation)):
        for i, element in enumerate(value):
            if isinstance(element, Tensor):
                yield _Argument(f"{name}[{i}]", element, Tensor)


def _describe(annotation: Any) -> str:
    """``annotation`` in words, such as ``"a tensor or None"``."""
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(map(_describe, options)))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type):
        if issubclass(origin, Mapping):
            return f"a mapping of names to {'tensors' if args[-1:] == (Tensor,) else 'values'}"
        of = _describe(args[0]).removeprefix("a ") if args and args[0] is not Any else "value"
        return f"a {origin.__name__.lower()} of {of}s"
    return _NAMES.get(annotation, f"a {getattr(annotation, '__name__', annotation)}")
