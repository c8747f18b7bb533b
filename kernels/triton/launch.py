"""One way to launch a kernel, wherever the op runs.

Eager      the kernel that Triton compiled for a call like this one; :func:`record` makes whole calls repeatable
Traced     ``wrap_triton``, from which Inductor generates the launch
Elsewhere  ``kernel[grid]``: the interpreter, and releases whose launcher is not known here

Triton's own ``kernel[grid](...)`` binds and specialises every argument on every call, which costs about
as much host time as a small kernel runs. A :class:`.driver.Kernel` is that work done once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from attn_ops.kernels.triton.cubin import Kernel, address, load
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from attn_ops.eager.launch_cache import ALIGNMENT, native, plan_tensors, runtime_tensors
from attn_ops.eager.startup import wait

DIRECT = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
"""Releases whose compiled kernels have ``run(grid, stream, function, metadata, hooks, *args)``."""

TOGETHER = not (3, 11) <= sys.version_info < (3, 11, 8)
"""Releases of Python in which threads can compile kernels together.

In the others, one that parses source fails where another does so while garbage is collected, with ``SystemError: AST
constructor recursion depth mismatch``: https://github.com/python/cpython/issues/106905.
"""


class Options(NamedTuple):
    num_warps: int = 4
    num_stages: int = 1
    launch_pdl: bool = False
    min_shared: int = 0
    """Bytes of shared memory that a program takes at least, where launches are not left to Triton or Inductor."""

    def keywords(self) -> dict[str, Any]:
        """What Triton compiles for."""
        keywords = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return keywords | {"launch_pdl": True} if self.launch_pdl else keywords


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def runs_now(t: Tensor) -> bool:
    """Whether kernels on ``t`` are launched one by one, at the host's cost, rather than recorded or captured."""
    return DIRECT and t.is_cuda and not isinstance(t, FakeTensor) and not torch.cuda.is_current_stream_capturing()


def starts_early(t: Tensor) -> bool:
    """Whether a kernel on ``t`` may be set up while the one before it still runs, and then has to wait for it.

    That saves about a microsecond a kernel. Inductor launches kernels without.
    """
    return DIRECT and not isinstance(t, FakeTensor) and _hopper(t.device)


class Recorded(NamedTuple):
    """A launch of a kernel with the arguments ``(*tensors, *rest)``."""

    kernel: Kernel
    grid: tuple[int, ...]
    tensors: Sequence[Any]
    rest: tuple[Any, ...]


def _base(t: Any) -> Tensor | None:
    """The tensor that a descriptor is of."""
    return t if t is None or isinstance(t, Tensor) else t.base


def _kind(t: Any, pointer: int | None) -> tuple[Any, ...] | None:
    """What a kernel is compiled for."""
    base = _base(t)
    if base is None or pointer is None:
        return None
    return base.dtype, not pointer & ALIGNMENT, () if base is t else (*t.block_shape, t.layout)


def _with(pointer: Any, t: Any) -> Any:
    """A pointer as :meth:`.driver.Kernel.launch` takes it."""
    return pointer if t is None or isinstance(t, Tensor) else (pointer, t)


_ready: dict[tuple[Any, ...], tuple[Any, Kernel | None]] = {}
"""Kernels as compiled and as loaded."""


class _Call(threading.local):
    """What the call that this thread records has launched, None for what cannot be repeated, and what it compiles."""

    recorded: list[Recorded | None] | None = None

    def __init__(self) -> None:
        self.coming: dict[tuple[Any, ...], Any] = {}


_call = _Call()


def launch(
    kernel: Any,
    grid: Sequence[Any],
    tensors: Sequence[Any],
    scalars: Sequence[Any],
    strides: Sequence[Any],
    constants: Sequence[Any],
    options: Options,
    run: bool = True,
) -> None:
    """Launch ``kernel`` with the arguments ``(*tensors, *scalars, *strides, *constants)``.

    ``tensors`` may be None, or Gluon's ``TensorDescriptor`` of one. ``scalars`` are the arguments that the kernel
    lists in ``do_not_specialize``; ``constants`` its ``tl.constexpr`` ones. Unless ``run``, the kernel is only made
    ready to be launched in a capture, where it could not be loaded.
    """
    first = tensors[0]
    assert first is not None
    if isinstance(first, FakeTensor):
        kernel = torch.library.wrap_triton(kernel)
    elif DIRECT and isinstance(kernel, JITFunction):
        _launch_direct(kernel, grid, tensors, scalars, strides, constants, options, run)
        return
    if not run:
        return
    if _call.recorded is not None:
        _call.recorded.append(None)
    kernel[tuple(grid)](*tensors, *scalars, *strides, *constants, **options.keywords())


def _make_ready(key: tuple[Any, ...], compiled: Any) -> None:
    if hasattr(compiled, "result"):
        compiled = compiled.result()
    loaded = load(compiled, key[-1].min_shared)
    if loaded is None:
        _ = compiled.run  # loads it
    _ready[key] = compiled, loaded


@contextmanager
def _compiling_together() -> Iterator[None]:
    """Kernels that are only made ready are compiled beside the others of the block, and ready at its end."""
    outer, _call.coming = _call.coming, {}
    try:
        with ThreadPoolExecutor() as executor, triton.AsyncCompileMode(executor) if TOGETHER else nullcontext():
            yield
        for key, compiled in _call.coming.items():
            with torch.cuda.device(key[1]):
                _make_ready(key, compiled)
    finally:
        _call.coming = outer


def _launch_direct(
    kernel: JITFunction[Any],
    grid: Sequence[int],
    tensors: Sequence[Any],
    scalars: Sequence[Any],
    strides: Sequence[int],
    constants: Sequence[Any],
    options: Options,
    run: bool,
) -> None:
    device = tensors[0].device.index
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _launch_direct(kernel, grid, tensors, scalars, strides, constants, options, run)
            return
    pointers = [None if t is None else t.data_ptr() for t in map(_base, tensors)]
    kinds = tuple(map(_kind, tensors, pointers))
    wide = tuple(type(x) is int and not -(1 << 31) <= x < 1 << 31 for x in scalars)
    key = (kernel, device, kinds, wide, tuple(strides), tuple(constants), options)
    if key not in _ready:
        wait()
        compiled = kernel.warmup(*tensors, *scalars, *strides, *constants, grid=tuple(grid), **options.keywords())
        if not run and hasattr(compiled, "result"):
            _call.coming[key] = compiled
        else:
            _make_ready(key, compiled)
    if not run:
        return
    compiled, loaded = _ready[key]
    rest = (*scalars, *strides, *constants)
    if _call.recorded is not None:
        _call.recorded.append(Recorded(loaded, tuple(grid), tensors, rest) if loaded else None)
    if not all(grid):
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    if loaded:
        addresses = [None if p is None else address(p) for p in pointers]
        arguments = (*map(_with, addresses, tensors), *rest)
        native().Repeat((loaded.launch(grid, arguments),), 0, (), True)(stream)
    else:
        x, y, z = (*grid, 1, 1)[:3]
        settings = (compiled.function, compiled.packed_metadata, None, None, None)
        given = (p if _base(t) is t else t for p, t in zip(pointers, tensors, strict=True))
        compiled.run(x, y, z, stream, *settings, *given, *rest)


def _tensors_of(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def _maker(t: Tensor) -> Callable[[], Tensor]:
    """Allocates a tensor like ``t`` on the current device, as the code that Inductor writes does."""
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{t.device.type}")
    return functools.partial(empty_strided, tuple(t.shape), t.stride(), t.dtype)


def _repeat(given: Sequence[Tensor], result: Any, recorded: Sequence[Recorded]) -> Any:
    """The launches of a call, to be replayed on other tensors (:mod:`attn_ops.eager.launch_cache`)."""
    outputs = _tensors_of(result)
    cells = {id(t): i for i, t in enumerate((*given, *outputs))}

    def pointer(t: Any) -> Any:
        base = _base(t)
        place = None if base is None else cells[id(base)] if id(base) in cells else address(base.data_ptr())
        return _with(place, t)

    launches = tuple(r.kernel.launch(r.grid, (*map(pointer, r.tensors), *r.rest)) for r in recorded if all(r.grid))
    makers = tuple(t if t.numel() == 0 else _maker(t) for t in outputs)
    return native().Repeat(launches, len(given), makers, not isinstance(result, tuple))


class _Watch(TorchDispatchMode):
    """Notices ops other than allocations."""

    ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed |= func.overloadpacket.__name__ not in self.ALLOCATIONS
        return func(*args, **(kwargs or {}))


def capture_launches(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Call ``function``; a ``Repeat`` if it only launched kernels, on tensors that were given or are returned."""
    launches: list[Recorded | None] = []
    outer, _call.recorded = _call.recorded, launches
    try:
        with _Watch() as watch, _compiling_together():
            result = function(*args, **kwargs)
    finally:
        _call.recorded = outer
    recorded = [entry for entry in launches if entry is not None]
    known = len(recorded) == len(launches) > 0
    given, outputs = runtime_tensors(args, kwargs), _tensors_of(result)
    free, device = [*given, *outputs], torch.cuda.current_device()
    every = [*free, *plan_tensors(args)]
    there = {id(t) for t in every}
    repeats = (
        known
        and len(there) == len(every)  # of a tensor in two places, another call may pass two
        and not watch.computed
        and all(t.get_device() == device and not t.data_ptr() & ALIGNMENT for t in free)
        and all(t.is_contiguous() for t in outputs)
        and all(t is None or id(_base(t)) in there for r in recorded for t in r.tensors)
    )
    return result, _repeat(given, result, recorded) if repeats else None
