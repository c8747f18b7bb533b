"""Compiled kernels as the CUDA driver launches them: which parameters a kernel takes, as bytes laid out once.

Triton's launcher reads every argument at every launch, constants too, and before Triton 3.7 a C compiler builds one for
each kernel, in a third of a second. Here the launch is C code of this library (``attn_ops/eager/launch_cache.c``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from attn_ops.eager.launch_cache import native

SCALARS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
"""C types of the parameters that are not pointers, by Triton's name of the type."""

Layout = tuple[tuple[int, "str | dict[str, Any]"], ...]
"""See :func:`parameter_layout`."""

MAP_TYPES = {torch.float16: 6, torch.bfloat16: 9}
"""Element types of a tensor map: the values of ``CUtensorMapDataType``."""


def pack_pointer(pointer: int) -> bytes:
    """A constant pointer as a kernel parameter."""
    return pointer.to_bytes(8, sys.byteorder)


NO_SCRATCH = (pack_pointer(0),) * 2
"""Triton's last two parameters, the global scratch and the profile scratch, which kernels here do not use."""


def pack_array(c_type: Any, values: Sequence[int]) -> bytes:
    return bytes((c_type * len(values))(*values))


def tensor_map_parameters(argument: tuple[Any, Any], metadata: dict[str, Any]) -> tuple[Any, ...]:
    """The parameters of ``(pointer, TensorDescriptor)``: the tensor map as ``PreparedCall`` takes it, sizes, strides.

    ``metadata`` is Triton's ``tensordesc_meta`` entry of the tensor map.
    """
    pointer, t = argument
    strides = [stride * t.base.element_size() for stride in t.strides[-2::-1]]
    tensor_map = (
        *(pointer, MAP_TYPES[t.base.dtype], metadata["swizzle"]),
        *(pack_array(ctypes.c_uint64, t.shape[::-1]), pack_array(ctypes.c_uint64, strides)),
        pack_array(ctypes.c_uint32, metadata["block_size"][::-1]),
    )
    sizes = (bytes(ctypes.c_int32(size)) for size in t.shape)
    return tensor_map, *sizes, *(bytes(ctypes.c_int64(stride)) for stride in t.strides)


class LoadedKernel(NamedTuple):
    """A compiled kernel that is loaded on the current device."""

    function: int
    """The ``CUfunction`` handle."""
    threads: int
    """Threads in a CTA."""
    shared: int
    """Dynamic shared memory of a CTA in bytes."""
    pdl: bool
    """Whether it is launched with the attribute for programmatic dependent launch."""
    layout: Layout
    """Its :func:`parameter_layout`."""

    def launch_tuple(self, grid: Sequence[int], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """A launch as ``PreparedCall`` takes it.

        ``arguments`` has a pointer for each tensor: :func:`pack_pointer` if it is constant, else the index of the
        runtime tensor; for a tensor descriptor, the pair of such a pointer and the descriptor.
        """
        parameters: list[Any] = []
        for i, kind in self.layout:
            if isinstance(kind, dict):
                parameters += tensor_map_parameters(arguments[i], kind)
            else:
                parameters.append(arguments[i] if kind[0] == "*" else bytes(SCALARS[kind](arguments[i])))
        return self.function, (*grid, 1, 1)[:3], self.threads, self.shared, self.pdl, (*parameters, *NO_SCRATCH)


def parameter_layout(compiled: Any) -> Layout | None:
    """``(index of the argument, Triton's type)`` of each parameter; for a tensor map, its metadata as the type.

    After these, a kernel takes :data:`NO_SCRATCH`. None if a launch needs more than parameters (clusters, a cooperative
    grid, scratch memory) or a parameter of a type that is not known here.
    """
    meta = compiled.metadata
    maps = iter(getattr(meta, "tensordesc_meta", None) or ())
    layout = tuple(
        (i, next(maps, "unknown") if str(kind).startswith("tensordesc") else str(kind))
        for i, kind in enumerate(compiled.src.signature.values())
        if kind != "constexpr"
    )
    plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    known = all(isinstance(kind, dict) or kind in SCALARS or kind[0] == "*" for _, kind in layout)
    return None if not known or not plain or meta.global_scratch_size or meta.profile_scratch_size else layout


def load_kernel(compiled: Any, min_shared: int = 0) -> LoadedKernel | None:
    """Load a kernel that Triton compiled, with at least ``min_shared`` bytes of shared memory in a CTA.

    None without a :func:`parameter_layout`, and without the C module (``native()``). Triton's launcher launches such
    kernels.
    """
    layout = parameter_layout(compiled)
    if layout is None or native() is None:
        return None
    meta, driver = compiled.metadata, triton.runtime.driver.active
    shared = max(meta.shared, min_shared)
    _, function, *_ = driver.utils.load_binary(compiled.name, compiled.kernel, shared, driver.get_current_device())
    return LoadedKernel(function, 32 * meta.num_warps, shared, bool(meta.launch_pdl), layout)
