"""Typed errors for arguments of a wrong Python type, by the annotations of the signature.

``@typed`` decorates every public function and method. It costs nothing in calls that succeed: the annotations are read
when a call has already failed with an error of Python or of PyTorch, to name the argument that caused it. Errors about
a page table name the arguments that it was given by.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from attn_ops.argument_checks import (
    Argument,
    admits,
    check_has_dimensions,
    check_real,
    check_strided,
    mismatch,
    refuse_type,
    union_types,
)
from attn_ops.errors import (
    ArgumentTypeError,
    AttnOpsError,
    DeviceError,
    OptionError,
    fail,
)
from attn_ops.policy import NO_EFFECT, UNSUPPORTED
from attn_ops.tracing import is_compiling

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

_NAMES_IN_PLANS = {
    "qo_indptr": ("cum_seq_lens_q",),
    "kv_indptr": ("paged_kv_indptr", "indptr", "unique_kv_indptr"),
    "kv_indices": ("paged_kv_indices", "indices", "unique_kv_indices"),
    "kv_last_page_len": ("paged_kv_last_page_len", "last_page_len", "unique_kv_last_page_len"),
    "head_dim_qk": ("head_dim",),
}
"""Arguments of planning, and the names that wrappers and functions have for them."""


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call that fails because of an argument's type raises an error that names the argument.

    The error is an :class:`~attn_ops.errors.ArgumentTypeError`; an :class:`~attn_ops.errors.OptionError` for an integer
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


def _renamed(
    raised: AttnOpsError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttnOpsError | None:
    """The error with the name of the caller's argument, if ``raised`` is about a type and names an inner argument."""
    if not isinstance(raised, ArgumentTypeError):
        return None
    message = str(raised)
    named = message if raised.where == _where(function, args) else ""
    return _type_error(function, args, kwargs, functools.partial(_may_explain, message), named)


def _of_caller(
    raised: AttnOpsError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> AttnOpsError | None:
    """The error of planning with the caller's names of the function or method and of its arguments.

    Errors of planners keep their names, which the C++ API has too.
    """
    message, where = str(raised), _where(function, args)
    if "Planner" in where:
        return None
    of_other = raised.where != where and (raised.where == "plan" or raised.where.endswith(".plan"))
    if of_other:
        message = where + message.removeprefix(raised.where)
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


def _is_read_later(argument: Argument) -> bool:
    """Whether a method may read an argument of its constructor."""
    return argument.name not in UNSUPPORTED and argument.name not in NO_EFFECT


def _may_explain(message: str, argument: Argument) -> bool:
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
    counts: Callable[[Argument], bool],
    unless_in: str = "",
) -> AttnOpsError | None:
    """The error of the first argument that ``counts`` and that its annotation does not admit; None if there is none.

    None too if the message ``unless_in`` names the argument already.
    """
    for argument in filter(counts, _arguments(function, args, kwargs)):
        wrong = mismatch(argument)
        if wrong is not None and re.search(rf"(?<!\w){re.escape(wrong.name)}(?!\w)", unless_in):
            return None
        if wrong is not None:
            return _caught(refuse_type, _where(function, args), wrong)
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
            return _caught(refuse_type, _where(function, args), argument)
    return None


def _caught(refuse: Callable[..., None], *args: Any) -> AttnOpsError | None:
    try:
        refuse(*args)
    except AttnOpsError as error:
        return error.with_traceback(None)
    return None


def _arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
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
    return [Argument(name, bound.arguments[name], hints[name]) for name in sorted(named, key=NO_EFFECT.__contains__)]


def _devices(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The devices among the arguments, default values included."""
    given = {argument.name for argument in _arguments(function, args, kwargs)}
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    found = {name: p.default for name, p in parameters.items() if name not in given and p.default is not p.empty}
    found |= {argument.name: argument.value for argument in _arguments(function, args, kwargs)}
    return [(name, x) for name, x in found.items() if x is not None and torch.device in union_types(hints.get(name))]


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


def _refuse_tensors(where: str, leaves: Sequence[Argument]) -> None:
    for leaf in leaves:
        check_strided(where, leaf.name, leaf.value)
        check_real(where, leaf.name, leaf.value)
        if not admits(1.0, leaf.annotation):
            check_has_dimensions(where, **{leaf.name: leaf.value})
    real = next((leaf for leaf in leaves if not leaf.value.is_meta), None)
    for leaf in leaves:
        if leaf.value.is_meta:
            expected = "a device with contents" if real is None else f"{real.value.device}, where {real.name} is"
            fail(DeviceError, where, f"{leaf.name} is on meta, without contents", expected, f"move {leaf.name}")


def _tensors(argument: Argument) -> Iterator[Argument]:
    """The tensors of an argument. An argument annotated Any is left out: it takes every tensor."""
    name, value, annotation = argument
    if isinstance(value, Tensor) and annotation is not Any:
        yield argument
    elif isinstance(value, tuple | list) and not any(
        Any in typing.get_args(option) for option in union_types(annotation)
    ):
        for i, element in enumerate(value):
            if isinstance(element, Tensor):
                yield Argument(f"{name}[{i}]", element, Tensor)
