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
from torch import Tensor
from triton.runtime.jit import MockTensor

from attn_ops.eager.startup import wait_until_prepared
from attn_ops.gpu import ALIGNMENT
from attn_ops.kernels.triton.cubin import SCRATCH_PARAMETERS, parameter_layout
from attn_ops.native.images import Image, ImageSet, NoImageError, Parameter
from attn_ops.native.launch_arguments import LaunchArguments
from attn_ops.native.packaged_launch import PackagedTensors, is_aligned
from attn_ops.symbolic_sizes import statically_known_true

GENERAL_SIZE = 3
"""Stands for an integer that is known at run time only: no multiple of 16, not 1. Such a kernel takes any integer."""


class _Address(MockTensor):
    """Stands for a tensor of ``dtype`` whose address is, or may not be, a multiple of 16 bytes."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        super().__init__(dtype)
        self.address = 0 if aligned else dtype.itemsize

    def data_ptr(self) -> int:
        return self.address


def image_of(
    compiled: Any, options: Any, arguments: LaunchArguments, slot_of: Callable[[Tensor], int | None] | None = None
) -> Image:
    """The image of a compiled kernel, without the tensors that a package checks.

    ``slot_of`` is that of :meth:`LaunchArguments.table`.
    """
    meta = compiled.metadata
    parameters, maps = arguments.table(slot_of)
    return Image(
        function=compiled.name,
        cubin=compiled.asm["cubin"],
        compute_capability=int(meta.target.arch),
        threads=32 * meta.num_warps,
        shared_bytes=max(meta.shared, options.min_shared),
        pdl=bool(meta.launch_pdl),
        tensors=(),
        maps=maps,
        parameters=(*parameters, *[Parameter("null")] * SCRATCH_PARAMETERS),
    )


def _compile_value(value: Any) -> Any:
    """What the kernel is compiled for in place of ``value``."""
    if isinstance(value, Tensor):
        return _Address(value.dtype, is_aligned(value))
    if isinstance(value, torch.SymInt):
        return ALIGNMENT if statically_known_true(value % ALIGNMENT == 0) else GENERAL_SIZE
    return value


def launch(images: ImageSet, kernel: Any, grid: Sequence[Any], values: Sequence[Any], options: Any) -> None:
    """Trace a launch of ``kernel`` with ``values`` in the order of its parameters."""
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
    arguments = layout.arguments(values)
    tensors = PackagedTensors(arguments, options.writes, lambda _, t: ALIGNMENT if is_aligned(t) else t.itemsize)
    tensors.launch(images, image_of(compiled, options, arguments, tensors.slot_of), grid)
