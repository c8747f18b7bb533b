"""Launches of CUDA kernels: one function, :func:`launch`, in eager calls and in packages.

Eager     the cubin (:mod:`.compile`) is loaded and launched by ``attn_ops/native``
Packaged  the graph gets a node ``attn::launch_image`` (:mod:`attn_ops.native.packaged_launch`)

A compiled graph that can call Python calls the op. Kernels are specialized only by macros, not by the values of
arguments, so a prepared call may launch a kernel again with other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.eager import launches
from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import Launch
from attn_ops.gpu import ALIGNMENT, ALIGNMENT_MASK
from attn_ops.kernels.cuda.compile import COMPUTE_CAPABILITY, CompilerError, cubin_of
from attn_ops.kernels.cuda.kernel import Specialization, TensorMap
from attn_ops.native.images import MAX_LOADED, Image, MapSpec, NoImageError, Parameter, collecting, load
from attn_ops.native.launch_arguments import LaunchArguments, operands
from attn_ops.native.packaged_launch import PackagedTensors, is_aligned

_loaded: BoundedCache[tuple[Any, ...], Any] = BoundedCache(MAX_LOADED)
"""(specialization, device, which parameters are null, tensor maps) -> the loaded kernel.

The GPU code of an evicted entry stays loaded: CUDA graphs may refer to it.
"""


def launch(specialization: Specialization, grid: Sequence[Any], /, **arguments: Any) -> None:
    """Launch a kernel on ``grid``, CTAs in x, y and z, with a value in ``arguments`` for each of its parameters::

        launch(MERGE_STATES[torch.bfloat16], (ctas,), v=v, s=s, out=out, lse=lse, packed_rows=rows * heads, ...)

    The value of a pointer is a tensor, or None for a null pointer; a tensor without elements may become a null pointer,
    too. The value of a map is a :class:`~.kernel.TensorMap`. The first tensor decides the device.
    """
    kernel = specialization.kernel
    given = LaunchArguments(kernel.parameters, kernel.parameters.values(), kernel.in_order(arguments))
    named = given.named_tensors()
    first = named[0][1]
    if isinstance(first, FakeTensor):
        _launch_in_package(specialization, grid, given)
        return
    for name, t in named:
        if name in kernel.aligned and t.data_ptr() & ALIGNMENT_MASK:
            raise ValueError(f"{kernel.function}: {name} is not aligned to {ALIGNMENT} bytes; the check refuses such")
    device = first.get_device()
    parameters, maps = given.table()
    key = specialization, device, tuple([p.kind == "null" for p in parameters]), maps
    loaded = _loaded.get(key)
    if loaded is None:
        loaded = _loaded.insert(key, load(_image(specialization, parameters, maps), device))
    launches.run(Launch(loaded, *operands(given.kinds, given.values, grid)), device)


def _launch_in_package(specialization: Specialization, grid: Sequence[Any], given: LaunchArguments) -> None:
    images, kernel = collecting(), specialization.kernel
    if images is None:
        raise RuntimeError(f"{kernel.function}: traced outside of a package; its backend entry is not lowerable")
    mapped = {id(v.base) for v in given.values if isinstance(v, TensorMap)}
    for name, t in given.named_tensors():
        if (name in kernel.aligned or id(t) in mapped) and not is_aligned(t):
            raise NoImageError(f"{name} of {kernel.function} may not be aligned to {ALIGNMENT} bytes")

    def alignment_of(name: str, t: Tensor) -> int:
        return ALIGNMENT if name in kernel.aligned or id(t) in mapped else t.itemsize

    tensors = PackagedTensors(given, kernel.writes, alignment_of)
    tensors.launch(images, _image(specialization, *given.table(tensors.slot_of)), grid)


def _image(specialization: Specialization, parameters: tuple[Parameter, ...], maps: tuple[MapSpec, ...]) -> Image:
    try:
        cubin = cubin_of(specialization)
    except CompilerError as error:  # the unsupported reasons of the backend entry have compiled it before
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
