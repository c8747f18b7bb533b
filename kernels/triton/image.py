"""Images of compiled kernels, and the call of ``attn::launch_image`` for one in a package.

A launch on fake tensors, as an op is lowered for a package, compiles the kernel for what the graph knows: dtypes,
alignment, constants. Sizes that the graph leaves open become integers of the call, and parameters of 32 bits. The order
of the parameters is that of eager launches (:mod:`.cubin`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from attn_ops.kernels.triton.cubin import SCRATCH_PARAMETERS, Layout, parameter_layout
from torch import Tensor
from triton.runtime.jit import MockTensor

from attn_ops.eager.startup import wait_until_prepared
from attn_ops.native.images import ALIGNMENT, Image, ImageSet, NoImageError, Parameter
from attn_ops.native.packaged_launch import PackagedTensors, is_aligned
from attn_ops.symbolic_sizes import statically_known_true

GENERAL_SIZE = 3
"""In the place of an integer that only the run knows: no multiple of 16, and not 1. Kernels run any other, too."""


class _Address(MockTensor):
    """Stands for a tensor of ``dtype`` whose address is, or may not be, a multiple of 16 bytes."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        super().__init__(dtype)
        self.address = 0 if aligned else dtype.itemsize

    def data_ptr(self) -> int:
        return self.address


def parameters_of(
    layout: Layout, names: Sequence[str], values: Sequence[Any], slot_of: Callable[[Tensor], int | None]
) -> tuple[Parameter, ...]:
    """The table of a kernel's parameters. ``slot_of`` says which tensor of a call one is, if any."""
    parameters: list[Parameter] = []
    for i, kind in layout:
        if kind[0] == "*":
            slot = slot_of(values[i])
            parameters.append(Parameter("null", 0, names[i]) if slot is None else Parameter("pointer", slot, names[i]))
        else:
            parameters.append(Parameter(kind, 0, names[i]))
    return (*parameters, *[Parameter("null")] * SCRATCH_PARAMETERS)


def scalars_of(layout: Layout, values: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """The integers and floats that a launch gives its parameters, in their order."""
    integers: list[Any] = []
    floats: list[float] = []
    for i, kind in layout:
        if kind == "fp32":
            floats.append(float(values[i]))
        elif kind[0] != "*":
            integers.append(values[i])
    return integers, floats


def tensors_of(layout: Layout, values: Sequence[Any]) -> tuple[Tensor, ...]:
    """The tensors of an eager launch: one for each pointer, in the order of the parameters."""
    return tuple(values[i] for i, kind in layout if kind[0] == "*")


def image_of(compiled: Any, options: Any, parameters: tuple[Parameter, ...]) -> Image:
    """The image of a compiled kernel, without the tensors that a package checks."""
    meta = compiled.metadata
    return Image(
        function=compiled.name,
        cubin=compiled.asm["cubin"],
        compute_capability=int(meta.target.arch),
        threads=32 * meta.num_warps,
        shared_bytes=max(meta.shared, options.min_shared),
        pdl=bool(meta.launch_pdl),
        tensors=(),
        maps=(),
        parameters=parameters,
    )


def eager_image(compiled: Any, layout: Layout, names: Sequence[str], values: Sequence[Any], options: Any) -> Image:
    """The image that eager calls launch, for the tensors of :func:`tensors_of`."""
    slots = iter(range(len(values)))
    return image_of(compiled, options, parameters_of(layout, names, values, lambda _: next(slots)))


def _compile_value(value: Any) -> Any:
    """What the kernel is compiled for in the place of ``value``."""
    if isinstance(value, Tensor):
        return _Address(value.dtype, is_aligned(value))
    if isinstance(value, torch.SymInt):
        return ALIGNMENT if statically_known_true(value % ALIGNMENT == 0) else GENERAL_SIZE
    return value


def launch(images: ImageSet, kernel: Any, grid: Sequence[Any], values: Sequence[Any], options: Any) -> None:
    """Trace a launch of ``kernel`` with ``values`` in the order of its parameters."""
    names = kernel.arg_names
    wait_until_prepared()
    device = values[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton compiles for the current GPU
        compiled = kernel.warmup(*map(_compile_value, values), grid=(1, 1, 1), **options.keywords())
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
    layout = parameter_layout(compiled)
    if layout is None:
        raise NoImageError(
            f"as triton {triton.__version__} compiles {kernel.__name__}, it needs clusters, scratch memory or "
            "parameters that the launcher does not have"
        )
    named = list(zip(names, values, strict=True))
    tensors = PackagedTensors(named, options.writes, lambda _, t: ALIGNMENT if is_aligned(t) else t.itemsize)
    parameters = parameters_of(layout, names, values, tensors.slot_of)
    tensors.launch(images, image_of(compiled, options, parameters), grid, *scalars_of(layout, values))
