"""Triton's interpreter without work that has no effect: less than half of its time is left.

It is Triton's own code, some of it private. What a release of Triton does not have stays as it is.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any


def install() -> None:
    """Make the interpreter of this process faster. All its kernels are interpreted from then on."""
    from triton.runtime import interpreter

    _patch_the_language_once(interpreter)
    _leave_out_checks_that_are_off(interpreter)
    _look_dtypes_up(interpreter)


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
