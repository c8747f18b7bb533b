"""Launches of CUDA kernels: one function, :func:`launch`, in eager calls and in packages.

Eager     the cubin (:mod:`.compile`), loaded and launched by ``attn_ops/native``
Packaged  ``attn::launch_image`` (:mod:`attn_ops.native.packaged_launch`)

A compiled graph that can call Python calls the op. There is no specialization by value: a kernel is compiled for its
macros alone, so a prepared call may launch it again with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attn_ops.kernels.cuda.compile import COMPUTE_CAPABILITY, CompilerError, cubin_of
from attn_ops.kernels.cuda.kernel import SWIZZLES, Specialization, TensorMap
from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.eager import launches
from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import ALIGNMENT_MASK, Launch
from attn_ops.native.images import (
    ALIGNMENT,
    MAP_TYPES,
    MAX_LOADED,
    Image,
    MapSpec,
    NoImageError,
    Parameter,
    collecting,
    load,
)
from attn_ops.native.packaged_launch import PackagedTensors, is_aligned

_loaded: BoundedCache[tuple[Any, ...], Any] = BoundedCache(MAX_LOADED)
"""Loaded kernels by specialization, device, parameters that are null, and tensor maps.

The GPU code of entries that are dropped stays loaded: CUDA graphs may refer to it.
"""


def launch(specialization: Specialization, grid: Sequence[Any], /, **arguments: Any) -> None:
    """Launch a kernel on ``grid``, CTAs in x, y and z, with ``arguments`` by the names of its parameters::

        launch(MERGE_STATES[torch.bfloat16], (ctas,), v=v, s=s, out=out, lse=lse, packed_rows=rows * heads, ...)

    A pointer is a tensor, or None for a null pointer; a tensor without elements may be null, too. A map is a
    :class:`~.kernel.TensorMap`. The first tensor decides the device.
    """
    kernel = specialization.kernel
    values = kernel.in_order(arguments)
    first = next(t for _, t in _pointed(specialization, values) if t is not None)
    if isinstance(first, FakeTensor):
        _launch_in_package(specialization, grid, values)
        return
    for name, t in _pointed(specialization, values):
        if t is not None and name in kernel.aligned and t.data_ptr() & ALIGNMENT_MASK:
            raise ValueError(f"{kernel.function}: {name} is not aligned to {ALIGNMENT} bytes; the check refuses such")
    device = first.get_device()
    slots = iter(range(len(values)))
    parameters, maps = _table(specialization, values, lambda _: next(slots))
    key = specialization, device, tuple([p.kind == "null" for p in parameters]), maps
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded.insert(key, load(_image(specialization, parameters, maps), device))
    tensors = tuple([t for _, t in _pointed(specialization, values) if t is not None])
    integers, floats = _scalars(specialization, values)
    launches.run(Launch(loaded, tensors, (*[*grid, 1, 1][:3], *integers), tuple(floats)), device)


def _launch_in_package(specialization: Specialization, grid: Sequence[Any], values: tuple[Any, ...]) -> None:
    images, kernel = collecting(), specialization.kernel
    if images is None:
        raise RuntimeError(f"{kernel.function}: traced outside of a package; its backend entry is not lowerable")
    named = _pointed(specialization, values)
    mapped = {id(v.base) for v in values if isinstance(v, TensorMap)}
    for name, t in named:
        if t is not None and (name in kernel.aligned or id(t) in mapped) and not is_aligned(t):
            raise NoImageError(f"{name} of {kernel.function} may not be aligned to {ALIGNMENT} bytes")

    def alignment_of(name: str, t: Tensor) -> int:
        return ALIGNMENT if name in kernel.aligned or id(t) in mapped else t.itemsize

    tensors = PackagedTensors(named, kernel.writes, alignment_of)
    image = _image(specialization, *_table(specialization, values, tensors.slot_of))
    tensors.launch(images, image, grid, *_scalars(specialization, values))


def _image(specialization: Specialization, parameters: tuple[Parameter, ...], maps: tuple[MapSpec, ...]) -> Image:
    try:
        cubin = cubin_of(specialization)
    except CompilerError as error:  # the reasons of the backend entry have compiled it before
        raise NoImageError(str(error)) from error
    return Image(
        function=specialization.kernel.function,
        cubin=cubin,
        compute_capability=COMPUTE_CAPABILITY,
        threads=specialization.threads,
        shared_bytes=specialization.shared_bytes,
        pdl=specialization.pdl,
        tensors=(),
        maps=maps,
        parameters=parameters,
        cluster=specialization.cluster,
    )


def _rows(specialization: Specialization, values: Sequence[Any]) -> Iterator[tuple[str, str, Any]]:
    """``(name, kind, value)`` of each parameter."""
    for (name, kind), value in zip(specialization.kernel.parameters.items(), values, strict=True):
        yield name, kind, value


def _pointed(specialization: Specialization, values: Sequence[Any]) -> list[tuple[str, Tensor | None]]:
    """The tensors of the pointers and tensor maps, in the order of the parameters."""
    return [
        (name, value.base if kind == "map" else value)
        for name, kind, value in _rows(specialization, values)
        if kind in ("pointer", "map")
    ]


def _table(
    specialization: Specialization, values: Sequence[Any], slot_of: Callable[[Tensor], int | None]
) -> tuple[tuple[Parameter, ...], tuple[MapSpec, ...]]:
    """The table of the parameters and tensor maps. ``slot_of`` says which tensor of a call one is, if any."""
    parameters: list[Parameter] = []
    maps: list[MapSpec] = []
    for name, kind, value in _rows(specialization, values):
        t = value.base if kind == "map" else value
        slot = slot_of(t) if isinstance(t, Tensor) else None
        if kind == "map":
            if slot is None:
                raise NoImageError(f"{name} of {specialization.kernel.function} has no elements")
            parameters.append(Parameter("map", len(maps), name))
            maps.append(MapSpec(slot, MAP_TYPES[t.dtype], SWIZZLES[value.swizzle], t.element_size(), value.box))
        elif kind == "pointer":
            parameters.append(Parameter("null", 0, name) if slot is None else Parameter("pointer", slot, name))
        else:
            parameters.append(Parameter(kind, 0, name))
    return tuple(parameters), tuple(maps)


def _scalars(specialization: Specialization, values: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """The integers and floats that a launch gives the parameters, in their order."""
    integers: list[Any] = []
    floats: list[float] = []
    for _, kind, value in _rows(specialization, values):
        if kind == "map":
            integers += [*value.shape, *value.strides]
        elif kind == "fp32":
            floats.append(float(value))
        elif kind in ("i32", "i64"):
            integers.append(int(value) if isinstance(value, bool) else value)
    return integers, floats
