"""Checks of arguments that hold for every public function and op: their Python types, flags, integers and tensors."""

from __future__ import annotations

import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_ops.errors import ArgumentError, ArgumentTypeError, DTypeError, ShapeError, dtype_name, fail, unsupported
from attn_ops.symbolic_sizes import overlapping_dim

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


class Argument(NamedTuple):
    """An argument, or an element of one, with the annotation that it should satisfy."""

    name: str
    value: Any
    annotation: Any


def integers(where: str, **values: Any) -> tuple[Any, ...]:
    """``values``, with NumPy's integers as Python's.

    A value that is not an integer raises an ArgumentTypeError: arithmetic takes floats and bools too.
    """
    for name, value in values.items():
        if type(value) is not int and not admits(value, int):
            refuse_type(where, Argument(name, value, int))
    return tuple(x if isinstance(x, int | torch.SymInt) else int(x) for x in values.values())


def flags(where: str, **values: Any) -> None:
    """Raise an ArgumentTypeError for a value that is no flag: Python takes any value for true or false."""
    for name, value in values.items():
        if type(value) is not bool and (value is None or not admits(value, bool)):
            refuse_type(where, Argument(name, value, bool))


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


def check_strided(where: str, name: str, t: Tensor) -> None:
    """Raise for a nested tensor, which has no sizes even with a strided layout, and for a sparse one."""
    if t.is_nested:
        fix = f"pass torch.cat({name}.unbind()), or {name}.to_padded_tensor(0)"
        fail(ArgumentError, where, f"{name} is a nested tensor", "a strided tensor", fix)
    if t.layout is not torch.strided:
        layout = str(t.layout).removeprefix("torch.")
        fail(ArgumentError, where, f"{name} is {layout}", "a strided tensor", f"pass {name}.to_dense()")


def check_has_dimensions(where: str, **tensors: Tensor | None) -> None:
    """Raise for a tensor without dimensions."""
    for name, t in tensors.items():
        if t is not None and t.dim() == 0:
            what, expected = f"{name} is a tensor without dimensions", "the dimensions that the documentation names"
            fail(ShapeError, where, what, expected, f"reshape {name}")


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


def refuse_type(where: str, wrong: Argument) -> None:
    """Raise an ArgumentTypeError for a value that its annotation does not admit."""
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
        fix = f"pass {name}.item()" if value.numel() == 1 and admits(1, annotation) else fix
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
    fail(ArgumentTypeError, where, f"{name} is {shown}", expected, fix)


def mismatch(argument: Argument) -> Argument | None:
    """``argument``, or the element of it, that its annotation does not admit; None if it is admitted."""
    name, value, annotation = argument
    if admits(value, annotation):
        return None
    for option in union_types(annotation):
        for i, element in enumerate(_elements(value, option) or ()):
            if not admits(*element):
                return Argument(f"{name}[{i}]", *element)
    return argument


def union_types(annotation: Any) -> tuple[Any, ...]:
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


def admits(value: Any, annotation: Any) -> bool:
    """Whether ``value`` is of the annotated type, or of one of :data:`_ADMITTED` for it."""
    if annotation is Any or isinstance(annotation, TypeVar):
        return True
    options = union_types(annotation)
    if len(options) > 1:
        return any(admits(value, option) for option in options)
    origin = typing.get_origin(annotation)
    if isinstance(origin, type):
        elements = _elements(value, annotation) or ()
        return isinstance(value, _ADMITTED.get(origin, origin)) and all(admits(*element) for element in elements)
    if annotation is bool and type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return True
    if annotation is int and isinstance(value, bool):
        return False
    kinds = _ADMITTED.get(annotation, annotation)
    return isinstance(value, kinds) if isinstance(kinds, type | tuple) else True


def _describe(annotation: Any) -> str:
    """``annotation`` in words, such as ``"a tensor or None"``."""
    options = union_types(annotation)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(map(_describe, options)))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type):
        if issubclass(origin, Mapping):
            return f"a mapping of names to {'tensors' if args[-1:] == (Tensor,) else 'values'}"
        of = _describe(args[0]).removeprefix("a ") if args and args[0] is not Any else "value"
        return f"a {origin.__name__.lower()} of {of}s"
    return _NAMES.get(annotation, f"a {getattr(annotation, '__name__', annotation)}")
