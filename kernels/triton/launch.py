"""One way to launch a kernel, wherever the op runs.

Eager      the kernel that Triton compiled for a call like this one, launched again directly
Traced     ``wrap_triton``, from which Inductor generates the launch
Elsewhere  ``kernel[grid]``: the interpreter, and releases whose launcher is not known here

Triton's own ``kernel[grid](...)`` binds and specialises every argument on every call, which costs about
as much host time as a small kernel runs. A :class:`Launch` is that work done once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from ...repeat import tensors_of

DIRECT = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
"""Releases whose compiled kernels have ``run(grid, stream, function, metadata, hooks, *args)``."""

ALIGNMENT = 15
"""Triton compiles wide accesses for pointers that are multiples of 16."""


class Options(NamedTuple):
    num_warps: int = 4
    num_stages: int = 1
    launch_pdl: bool = False

    def keywords(self) -> dict[str, Any]:
        return {name: value for name, value in self._asdict().items() if name != "launch_pdl" or value}


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def starts_early(t: Tensor) -> bool:
    """Whether a kernel on ``t`` may be set up while the one before it still runs, and then has to wait for it.

    That saves about a microsecond a kernel. Inductor launches kernels without.
    """
    return DIRECT and not isinstance(t, FakeTensor) and _hopper(t.device)


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
_recorded: list[tuple[Launch, Sequence[Tensor | None]] | None] | None = None


def launch(
    kernel: Any,
    grid: Sequence[Any],
    tensors: Sequence[Tensor | None],
    scalars: Sequence[Any],
    strides: Sequence[Any],
    constants: Sequence[Any],
    options: Options,
) -> None:
    """Launch ``kernel`` with the arguments ``(*tensors, *scalars, *strides, *constants)``.

    ``scalars`` are the arguments that the kernel lists in ``do_not_specialize``; ``constants`` its
    ``tl.constexpr`` ones.
    """
    first = tensors[0]
    assert first is not None
    if isinstance(first, FakeTensor):
        kernel = torch.library.wrap_triton(kernel)
    elif DIRECT and isinstance(kernel, JITFunction):
        _launch_direct(kernel, grid, tensors, scalars, strides, constants, options)
        return
    if _recorded is not None:
        _recorded.append(None)
    kernel[tuple(grid)](*tensors, *scalars, *strides, *constants, **options.keywords())


def _launch_direct(
    kernel: JITFunction[Any],
    grid: Sequence[int],
    tensors: Sequence[Tensor | None],
    scalars: Sequence[Any],
    strides: Sequence[int],
    constants: Sequence[Any],
    options: Options,
) -> None:
    device = tensors[0].device.index  # type: ignore[union-attr]
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _launch_direct(kernel, grid, tensors, scalars, strides, constants, options)
            return
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    kinds = tuple(
        None if t is None or p is None else (t.dtype, not p & ALIGNMENT) for t, p in zip(tensors, pointers, strict=True)
    )
    key = (kernel, device, kinds, tuple(strides), tuple(constants), options)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel.warmup(*tensors, *scalars, *strides, *constants, grid=tuple(grid), **options.keywords())
        if hasattr(compiled, "result"):
            compiled = compiled.result()
        _compiled[key] = compiled
    prepared = Launch(compiled, grid, (*scalars, *strides, *constants))
    if _recorded is not None:
        _recorded.append((prepared, tensors))
    prepared(torch._C._cuda_getCurrentRawStream(device), *pointers)


class Repeat:
    """The launches of a call, to be made again on the tensors of a call like it (:mod:`attn_ops.repeat`)."""

    __slots__ = ("_device", "_launches")

    def __init__(self, device: int, launches: list[tuple[Launch, list[int | None]]]) -> None:
        self._device, self._launches = device, launches

    def __call__(self, tensors: Sequence[Tensor | None]) -> bool:
        """False, and nothing done, for unaligned tensors and from another current device."""
        pointers = [0 if t is None else t.data_ptr() for t in tensors]
        together = 0
        for pointer in pointers:
            together |= pointer
        if together & ALIGNMENT or self._device != torch._C._cuda_getDevice():
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for again, places in self._launches:
            again(stream, *[None if place is None else pointers[place] for place in places])
        return True


class _Watch(TorchDispatchMode):
    """Notices ops other than allocations."""

    ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed |= func.overloadpacket.__name__ not in self.ALLOCATIONS
        return func(*args, **(kwargs or {}))


def record(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Repeat | None]:
    """Call ``function``; a repeat if it only launched kernels, on tensors that were given or are returned."""
    global _recorded
    outer, _recorded = _recorded, []
    try:
        with _Watch() as watch:
            result = function(*args, **kwargs)
        recorded = _recorded
    finally:
        _recorded = outer
    tensors = tensors_of(args, kwargs, result)
    if watch.computed or any(t is not None and t.data_ptr() & ALIGNMENT for t in tensors):
        return result, None
    place = {id(t): i for i, t in enumerate(tensors) if t is not None}
    if len(place) < sum(t is not None for t in tensors):
        return result, None  # one tensor twice: another call may pass two, and which is meant is not known
    launches = []
    for entry in recorded:
        if entry is None or any(t is not None and id(t) not in place for t in entry[1]):
            return result, None
        launches.append((entry[0], [None if t is None else place[id(t)] for t in entry[1]]))
    device = next((t.get_device() for t in tensors if t is not None), -1)
    return result, Repeat(device, launches) if launches and device == torch.cuda.current_device() else None
