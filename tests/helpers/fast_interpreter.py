"""Triton's interpreter without work that has no effect: about a third of its time is left.

It is Triton's own code, some of it private. What a release of Triton does not have stays as it is.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any


def install() -> None:
    """Make the interpreter of this process faster. All its kernels are interpreted from then on."""
    from triton.runtime import interpreter

    _call_builtins_directly(interpreter)
    _patch_the_language_once(interpreter)
    _leave_out_checks_that_are_off(interpreter)
    _look_dtypes_up(interpreter)
    _describe_types_once(interpreter)
    _convert_operands_once(interpreter)
    _make_handles_directly(interpreter)


def _call_builtins_directly(interpreter: Any) -> None:
    """Two wrappers stand around each function of the language: one copies the keywords, one checks them."""
    semantic = getattr(interpreter, "interpreter_semantic", None)
    if semantic is None or not hasattr(interpreter, "_patch_attr"):
        return

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, _semantic=semantic, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch


def _patch_the_language_once(interpreter: Any) -> None:
    """The interpreter looks for functions to replace at each call of a device function, and finds none after the first.

    Here they are replaced once, and stay replaced.
    """
    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return
    tl = interpreter.tl
    everything = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    patch(everything)
    nothing = scope()
    interpreter._patch_lang = lambda fn: nothing


def _leave_out_checks_that_are_off(interpreter: Any) -> None:
    """The interpreter computes each sum and product in int64 too, for assertions that it makes only with ``debug``."""
    builder = interpreter.interpreter_builder
    options = builder.options
    if not options.debug and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _look_dtypes_up(interpreter: Any) -> None:
    """The interpreter makes a table of dtypes at each look-up."""
    look_up = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    found: dict[str, Any] = {}

    def of_name(dtype: Any) -> Any:
        name = dtype.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = of_name


def _describe_types_once(interpreter: Any) -> None:
    """Each operation makes a type and a tensor. What follows from the elements' type and the shape is kept here."""
    core, semantic = interpreter.tl.core, getattr(interpreter, "TritonSemantic", None)
    if semantic is None or not hasattr(core, "tuple"):
        return
    broadcast = semantic.broadcast_impl_value
    make_type, equal, item = core.block_type.__init__, core.dtype.__eq__, core.tuple.__getitem__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types or element_ty.is_ptr():
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        else:
            vars(self).update(types[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            shapes[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
        self.shape, self.numel = shapes[key]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_others
    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.tuple.__getitem__ = lambda self, i: self.values[i] if type(i) is int else item(self, i)


MAX_CONSTANTS = 10_000


def _convert_operands_once(interpreter: Any) -> None:
    """Operands of a binary operation are checked, converted and broadcast. Those that fit stay as they are.

    A number becomes a tensor of the other operand's type and shape, which is kept: no operation writes to its operands.
    """
    core = interpreter.tl.core
    semantic: Any = getattr(interpreter, "TritonSemantic", None)
    convert = getattr(semantic, "binary_op_type_checking_impl", None)
    if convert is None or not hasattr(core, "tuple"):
        return
    tensor = core.tensor
    kept: dict[Any, Any] = {}

    def convert_once(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        how = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        on_left, on_right = type(lhs) is tensor, type(rhs) is tensor
        if on_left and on_right:
            if lhs.dtype is rhs.dtype and not div_or_mod and not lhs.dtype.is_ptr():
                return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
            return convert(self, lhs, rhs, *how)
        if not on_left and not on_right:
            return convert(self, lhs, rhs, *how)
        one, number = (lhs, rhs) if on_left else (rhs, lhs)
        key = (on_left, number, type(number), one.dtype.name, id(one.shape), how)  # shapes are kept
        if (constant := kept.get(key)) is None:
            left, right = convert(self, lhs, rhs, *how)
            same, constant = (left, right) if on_left else (right, left)
            if same is not one:
                return left, right
            if len(kept) >= MAX_CONSTANTS:
                kept.clear()
            kept[key] = constant
        return (one, constant) if on_left else (constant, one)

    semantic.binary_op_type_checking_impl = convert_once


def _make_handles_directly(interpreter: Any) -> None:
    """A handle is a dataclass that checks the array that NumPy made for it."""
    handle = interpreter.TensorHandle
    if [field.name for field in dataclasses.fields(handle)] != ["data", "dtype", "attr"]:
        return

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    handle.__init__ = init
