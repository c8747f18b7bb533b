"""One way to launch a kernel, wherever the op runs.

Eager      the kernel that Triton compiled for a call like this one, launched again directly
Traced     ``wrap_triton``, from which Inductor generates the launch
Elsewhere  ``kernel[grid]``: the interpreter, and releases whose launcher is not known here

Triton's own ``kernel[grid](...)`` binds and specialises every argument on every call, which costs about
as much host time as a small kernel runs. A :class:`Launch` is that work done once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.runtime.jit import JITFunction

DIRECT = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
"""Releases whose compiled kernels have ``run(grid, stream, function, metadata, hooks, *args)``."""

ALIGNMENT = 15
"""Triton compiles wide accesses for pointers that are multiples of 16."""


class Options(NamedTuple):
    num_warps: int = 4
    num_stages: int = 1


class Launch:
    """A compiled kernel with its grid and every argument but the tensors."""

    __slots__ = ("_function", "_grid", "_metadata", "_rest", "_run")

    def __init__(self, compiled: Any, grid: Sequence[int], rest: tuple[Any, ...]) -> None:
        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._grid = (*grid, 1, 1)[:3]
        self._rest = rest

    def __call__(self, stream: int, *pointers: int | None) -> None:
        """Launch on the current device; ``pointers`` are 16-byte aligned if the first launch's were."""
        x, y, z = self._grid
        if x and y and z:
            self._run(x, y, z, stream, self._function, self._metadata, None, None, None, *pointers, *self._rest)


_compiled: dict[tuple[Any, ...], Any] = {}


def launch(
    kernel: Any,
    grid: Sequence[Any],
    tensors: Sequence[Tensor | None],
    scalars: Sequence[Any],
    strides: Sequence[Any],
    constants: Sequence[Any],
    options: Options,
) -> Launch | None:
    """Launch ``kernel`` with the arguments ``(*tensors, *scalars, *strides, *constants)``.

    ``scalars`` are the arguments that the kernel lists in ``do_not_specialize``; ``constants`` its
    ``tl.constexpr`` ones. Returns the launch to be repeated on other tensors, if it can be.
    """
    first = tensors[0]
    assert first is not None
    if isinstance(first, FakeTensor):
        kernel = torch.library.wrap_triton(kernel)
    elif DIRECT and isinstance(kernel, JITFunction):
        return _launch_direct(kernel, grid, tensors, scalars, strides, constants, options)
    kernel[tuple(grid)](*tensors, *scalars, *strides, *constants, **options._asdict())
    return None


def _launch_direct(
    kernel: JITFunction[Any],
    grid: Sequence[int],
    tensors: Sequence[Tensor | None],
    scalars: Sequence[Any],
    strides: Sequence[int],
    constants: Sequence[Any],
    options: Options,
) -> Launch | None:
    device = tensors[0].device.index  # type: ignore[union-attr]
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return _launch_direct(kernel, grid, tensors, scalars, strides, constants, options)
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    kinds = tuple(None if t is None else (t.dtype, not p & ALIGNMENT) for t, p in zip(tensors, pointers, strict=True))
    key = (kernel, device, kinds, tuple(strides), tuple(constants), options)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel.warmup(*tensors, *scalars, *strides, *constants, grid=tuple(grid), **options._asdict())
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        _compiled[key] = compiled
    prepared = Launch(compiled, grid, (*scalars, *strides, *constants))
    prepared(torch._C._cuda_getCurrentRawStream(device), *pointers)
    return prepared
