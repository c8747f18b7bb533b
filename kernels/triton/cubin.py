"""Compiled kernels launched by the CUDA driver, their parameters laid out once (``attn_ops/eager/launch_cache.c``).

Triton's launcher reads every argument of a kernel at every launch, those that are compiled in too, and until Triton 3.7
a C compiler makes one for every kernel, in a third of a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from attn_ops.eager.launch_cache import native

SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""Parameters by Triton's name of their type, beside pointers."""


MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
"""Elements of a tensor map, as ``CUtensorMapDataType`` numbers them."""


def address(pointer: int) -> bytes:
    """A pointer as a parameter that stays the same."""
    return bytes(ctypes.c_uint64(pointer))


NO_SCRATCH = (address(0),) * 2
"""The parameters after a kernel's own: memory that it would share between launches, and that of its profiler."""


def array(kind: Any, values: Sequence[int]) -> bytes:
    return bytes((kind * len(values))(*values))


def tensor_map(given: tuple[Any, Any], description: dict[str, Any]) -> tuple[Any, ...]:
    """The parameters for ``(address, TensorDescriptor)``: a tensor map, as ``Repeat`` takes it, the sizes, the strides.

    ``description`` is what Triton says of the map.
    """
    pointer, t = given
    strides = [stride * t.base.element_size() for stride in t.strides[-2::-1]]
    encoded = (
        *(pointer, MAP_TYPES[t.base.dtype], description["swizzle"]),
        *(array(ctypes.c_uint64, t.shape[::-1]), array(ctypes.c_uint64, strides)),
        array(ctypes.c_uint32, description["block_size"][::-1]),
    )
    sizes = (bytes(ctypes.c_int32(size)) for size in t.shape)
    return encoded, *sizes, *(bytes(ctypes.c_int64(stride)) for stride in t.strides)


class Kernel(NamedTuple):
    """A compiled kernel, loaded on the current device."""

    function: int
    threads: int
    shared: int
    early: bool
    layout: tuple[tuple[int, str | dict[str, Any]], ...]
    """``(argument, type)`` of each parameter, or what Triton says of a tensor map."""

    def launch(self, grid: Sequence[int], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """A launch as ``Repeat`` takes it.

        Pointers among the arguments are :func:`address` or the number of a cell, and in pairs with a tensor descriptor.
        """
        parameters: list[Any] = []
        for i, kind in self.layout:
            if isinstance(kind, dict):
                parameters += tensor_map(arguments[i], kind)
            else:
                parameters.append(arguments[i] if kind[0] == "*" else bytes(SCALARS[kind](arguments[i])))
        return self.function, (*grid, 1, 1)[:3], self.threads, self.shared, self.early, (*parameters, *NO_SCRATCH)


def load(compiled: Any, min_shared: int = 0) -> Kernel | None:
    """Load what Triton compiled; None if it takes more than parameters to launch, or there is no ``native()``."""
    meta = compiled.metadata
    plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    maps = iter(getattr(meta, "tensordesc_meta", None) or ())
    used = tuple(
        (i, next(maps, "unknown") if str(kind).startswith("tensordesc") else str(kind))
        for i, kind in enumerate(compiled.src.signature.values())
        if kind != "constexpr"
    )
    known = all(isinstance(kind, dict) or kind in SCALARS or kind[0] == "*" for _, kind in used)
    if not known or not plain or meta.global_scratch_size or meta.profile_scratch_size or native() is None:
        return None
    driver = triton.runtime.driver.active
    shared = max(meta.shared, min_shared)
    _, function, *_ = driver.utils.load_binary(compiled.name, compiled.kernel, shared, driver.get_current_device())
    return Kernel(function, 32 * meta.num_warps, shared, bool(meta.launch_pdl), used)
