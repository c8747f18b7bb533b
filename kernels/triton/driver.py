"""A compiled kernel launched by the CUDA driver, its parameters laid out once.

Triton's launcher reads every argument of a kernel at every launch, those that are compiled in too. Here the
parameters stay in memory; pointers that differ between calls are read from *cells* that the kernels of a
call share.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""Parameters by Triton's name of their type, beside pointers."""

PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CUlaunchAttributeID`` of kernels that start early."""


class Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def fail(code: int) -> NoReturn:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    raise RuntimeError(f"CUDA driver: a kernel could not be launched: {(text.value or b'unknown error').decode()}")


def layout(compiled: Any) -> list[tuple[int, str]] | None:
    """``(argument, type)`` of each parameter of a kernel, None if it is one that :class:`Launch` does not launch."""
    meta = compiled.metadata
    plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    if not plain or meta.global_scratch_size or meta.profile_scratch_size:
        return None
    used = [(i, str(kind)) for i, kind in enumerate(compiled.src.signature.values()) if kind != "constexpr"]
    return used if all(kind in SCALARS or kind[0] == "*" for _, kind in used) else None


class Launch:
    """A kernel with its grid and arguments, of which pointers are given by the address of the cell they are in."""

    __slots__ = ("_attribute", "_config", "_kept", "_launch", "_stream", "_what")

    def __init__(self, compiled: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """``arguments`` are ``ctypes`` values, of which only those of :func:`layout` are read."""
        meta = compiled.metadata
        self._kept = [
            arguments[i] if kind[0] == "*" else SCALARS[kind](arguments[i]) for i, kind in layout(compiled) or ()
        ]
        self._kept += [ctypes.c_uint64(0)] * 2  # scratch memory, of which there is none
        parameters = (ctypes.c_void_p * len(self._kept))(*map(ctypes.addressof, self._kept))
        self._attribute = Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = Config(
            *(*grid, 1, 1)[:3],
            *(32 * meta.num_warps, 1, 1, meta.shared, None, ctypes.pointer(self._attribute), bool(meta.launch_pdl)),
        )
        self._what = ctypes.byref(self._config), ctypes.c_void_p(compiled.function), parameters, None
        self._launch, self._stream = _driver().cuLaunchKernelEx, 0

    def __call__(self, stream: int) -> None:
        """Launch on the current device."""
        if stream != self._stream:
            self._config.stream = self._stream = stream
        code = self._launch(*self._what)
        if code:
            fail(code)
