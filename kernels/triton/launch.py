"""Kernel launches: one function, :func:`launch`, wherever an op runs.

Eager        the kernel that Triton compiled for this specialization, from a cache, launched by the CUDA driver
Traced       ``torch.library.wrap_triton``, from which Inductor generates the launch
Packaged     ``attn::launch_image``, for kernels that name what they write (:mod:`.image`)
Interpreted  ``kernel[grid](...)``: Triton's interpreter, and Triton releases whose launcher is not supported here

Triton's own ``kernel[grid](...)`` binds and specializes every argument in Python at every launch, which takes about as
long on the host as a small kernel runs on the GPU. Here a launch is one lookup, and :func:`capture_launches` turns the
launches of a whole op into a prepared call (:mod:`attn_ops.eager.launch_cache`), which replays them in C.

What a kernel's parameters may be, since Inductor must be able to generate the launch:

* A tensor, None, or an int or float. A runtime argument cannot be a tuple: ``wrap_triton`` (torch 2.13) keeps a tuple
  out of the graph, together with the symbolic sizes in it, and Inductor has no signature for one. Strides are separate
  parameters, therefore.
* A ``tl.constexpr`` may be a number, or a NamedTuple of numbers that is a :func:`constexpr_table`. A kernel with many
  constants takes a few tables instead: ``SHAPE.HEAD_DIM`` in the kernel, ``SHAPE=Shape(HEAD_DIM=128, ...)`` in the
  launch.
* Kernels that Inductor does not lower (Gluon) also take ``TensorDescriptor``.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from attn_ops.kernels.triton.cubin import LoadedKernel, load_kernel, pack_pointer
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from attn_ops.eager.launch_cache import ALIGNMENT_MASK, native, plan_tensors, runtime_tensors
from attn_ops.eager.startup import wait_until_prepared
from attn_ops.native.images import collecting

DIRECT_LAUNCH = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
"""Triton releases whose compiled kernels have ``run(grid, stream, function, metadata, hooks, *args)``."""

CONCURRENT_COMPILATION = not (3, 11) <= sys.version_info < (3, 11, 8)
"""Python releases in which several threads may compile kernels.

In the others, parsing fails if another thread parses during a garbage collection, with ``SystemError: AST constructor
recursion depth mismatch``: https://github.com/python/cpython/issues/106905.
"""

MAX_KERNELS = 4096
"""Entries of the kernel cache."""

Table = TypeVar("Table", bound=type)


class Options(NamedTuple):
    """Compile and launch options of a kernel."""

    num_warps: int = 4
    num_stages: int = 1
    launch_pdl: bool = False
    min_shared: int = 0
    """The least shared memory of a CTA in bytes. Launches through Triton or Inductor ignore it."""
    writes: tuple[str, ...] = ()
    """The parameters that the kernel writes. A kernel that names them is an image in packages (:mod:`.image`)."""

    def keywords(self) -> dict[str, Any]:
        """The options that Triton compiles for."""
        keywords = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return keywords | {"launch_pdl": True} if self.launch_pdl else keywords


DEFAULT_OPTIONS = Options()


def constexpr_table(cls: Table) -> Table:
    """Class decorator: make a NamedTuple of numbers a legal value of a ``tl.constexpr`` parameter.

    Triton takes any NamedTuple. Inductor writes the ``repr`` of a kernel's constants into the code that it generates,
    where the name of the class is not defined; this ``repr`` imports it. The class is at the top level of its module.
    """

    def table_repr(self: Any) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"__import__({cls.__module__!r}, fromlist=['']).{cls.__qualname__}({fields})"

    cls.__repr__ = table_repr  # type: ignore[method-assign, assignment]
    return cls


@functools.cache  # one entry for each GPU
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def is_eager(t: Tensor) -> bool:
    """Whether kernels on ``t`` are launched now, one by one, rather than traced or captured in a CUDA graph."""
    return (
        DIRECT_LAUNCH and t.is_cuda and not isinstance(t, FakeTensor) and not torch.cuda.is_current_stream_capturing()
    )


def supports_pdl(t: Tensor, image: bool = False) -> bool:
    """Whether a kernel on ``t`` uses programmatic dependent launch, and so has to execute ``griddepcontrol.wait``.

    That saves about a microsecond per kernel. Inductor launches kernels without it. ``image``: in packages the kernel
    is an image, which is launched with it.
    """
    launched_here = not isinstance(t, FakeTensor) or (image and collecting() is not None)
    return DIRECT_LAUNCH and launched_here and _hopper(t.device)


class Parameters(NamedTuple):
    """The parameters of a kernel by kind: their positions, or a function that takes theirs out of all arguments."""

    specialized: tuple[int, ...]
    """Tensors, and ints such as strides: Triton compiles for their alignment or divisibility, and for the value 1."""
    scalars: tuple[int, ...]
    """Those in ``do_not_specialize``: Triton compiles for their type alone."""
    constants: Callable[[Sequence[Any]], Any]


@functools.cache  # one entry for each kernel of this package
def _parameters(kernel: Any) -> Parameters:
    specialized: list[int] = []
    scalars: list[int] = []
    constants: list[Any] = []
    for i, parameter in enumerate(kernel.params):
        kind = constants if parameter.is_constexpr else scalars if parameter.do_not_specialize else specialized
        kind.append(i)
    return Parameters(tuple(specialized), tuple(scalars), operator.itemgetter(*constants or [slice(0)]))


class CapturedLaunch(NamedTuple):
    """A launch of ``kernel`` with all its arguments, in the order of its parameters."""

    kernel: LoadedKernel
    grid: tuple[int, ...]
    arguments: Sequence[Any]


_kernel_cache: dict[tuple[Any, ...], tuple[Any, LoadedKernel | None]] = {}
"""``(compiled, loaded)`` kernels by kernel, device, specialization, constants and options.

An insertion beyond ``MAX_KERNELS`` first drops all entries. Their GPU code stays loaded, since CUDA graphs may refer to
it. Triton keeps the compiled kernels, so a launch after that looks its kernel up there and loads it once more.
"""


class _Capture(threading.local):
    """The launches that :func:`capture_launches` observes in this thread, and the kernels that are being compiled."""

    launches: list[CapturedLaunch | None] | None = None
    """None for a launch that cannot be replayed."""

    def __init__(self) -> None:
        self.pending: dict[tuple[Any, ...], Any] = {}
        """Futures of compiled kernels, by key of the kernel cache. Emptied at the end of the captured op."""


_capture = _Capture()


def launch(
    kernel: Any, grid: Sequence[Any], options: Options = DEFAULT_OPTIONS, run: bool = True, /, **arguments: Any
) -> None:
    """Launch ``kernel`` on ``grid`` with ``arguments``, by the names of its parameters::

        launch(decode_kernel, (programs,), Options(num_warps=8), q=q, out=out, rows=rows, HEAD_DIM=128)

    The names are the kernel's, all of them, in any order; a ``TypeError`` lists those missing or unknown. The first
    parameter of the kernel is a tensor, never None; it decides the device and whether the launch is eager or traced.
    Scalars that change from call to call belong into the kernel's ``do_not_specialize``.

    Unless ``run``, the kernel is only compiled and loaded, so that a CUDA graph capture can launch it later.
    """
    values = _in_order(kernel, arguments)
    if isinstance(values[0], FakeTensor):
        images = collecting()
        if images is not None and options.writes:
            from attn_ops.kernels.triton import image

            image.launch(images, kernel, grid, values, options, options.writes)
            return
        kernel = torch.library.wrap_triton(kernel)
    elif DIRECT_LAUNCH and isinstance(kernel, JITFunction):
        _launch_direct(kernel, grid, values, options, run)
        return
    if not run:
        return
    if _capture.launches is not None:
        _capture.launches.append(None)
    kernel[tuple(grid)](*values, **options.keywords())


def _in_order(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    names = kernel.arg_names
    if len(arguments) == len(names):
        try:
            return tuple([arguments[name] for name in names])
        except KeyError:
            pass
    missing, unknown = [n for n in names if n not in arguments], [n for n in arguments if n not in names]
    raise TypeError(f"{kernel.__name__}: launched without {missing} and with unknown {unknown}; expected {names}")


def _needs_64_bits(x: Any) -> bool:
    return type(x) is int and not -(1 << 31) <= x < 1 << 31


def _insert(key: tuple[Any, ...], compiled: Any) -> None:
    """Load a compiled kernel and add it to the kernel cache."""
    if hasattr(compiled, "result"):
        compiled = compiled.result()
    loaded = load_kernel(compiled, key[-1].min_shared)
    if loaded is None:
        _ = compiled.run  # loads it
    if len(_kernel_cache) >= MAX_KERNELS:
        _kernel_cache.clear()
    _kernel_cache[key] = compiled, loaded


@contextmanager
def _concurrent_compilation() -> Iterator[None]:
    """In this block, kernels that are launched with ``run=False`` compile concurrently. They are loaded at its end."""
    outer, _capture.pending = _capture.pending, {}
    try:
        with (
            ThreadPoolExecutor() as executor,
            triton.AsyncCompileMode(executor) if CONCURRENT_COMPILATION else nullcontext(),
        ):
            yield
        for key, compiled in _capture.pending.items():
            with torch.cuda.device(key[1]):
                _insert(key, compiled)
    finally:
        _capture.pending = outer


def _launch_direct(
    kernel: JITFunction[Any], grid: Sequence[int], values: tuple[Any, ...], options: Options, run: bool
) -> None:
    """Launch with ``values`` in the order of the kernel's parameters."""
    device = values[0].device.index
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _launch_direct(kernel, grid, values, options, run)
            return
    parameters = _parameters(kernel)
    arguments = list(values)
    specialization: list[Any] = []
    for i in parameters.specialized:
        value = values[i]
        if isinstance(value, Tensor):
            address = value.data_ptr()
            arguments[i] = pack_pointer(address)
            specialization.append((value.dtype, not address & ALIGNMENT_MASK))
        elif value is None or isinstance(value, (int, float)):
            specialization.append(value)
        else:  # a TensorDescriptor
            address = value.base.data_ptr()
            arguments[i] = pack_pointer(address), value
            specialization.append((value.base.dtype, not address & ALIGNMENT_MASK, *value.block_shape, value.layout))
    wide = tuple([_needs_64_bits(values[i]) for i in parameters.scalars])
    key = (kernel, device, tuple(specialization), wide, parameters.constants(values), options)
    if key not in _kernel_cache:
        wait_until_prepared()
        compiled = kernel.warmup(*values, grid=tuple(grid), **options.keywords())
        if not run and hasattr(compiled, "result"):
            _capture.pending[key] = compiled
        else:
            _insert(key, compiled)
    if not run:
        return
    compiled, loaded = _kernel_cache[key]
    if _capture.launches is not None:
        _capture.launches.append(CapturedLaunch(loaded, tuple(grid), values) if loaded else None)
    if not all(grid):
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    if loaded:
        native().PreparedCall((loaded.launch_tuple(grid, arguments),), 0, (), True)(stream)
    else:
        x, y, z = (*grid, 1, 1)[:3]
        settings = (compiled.function, compiled.packed_metadata, None, None, None)
        compiled.run(x, y, z, stream, *settings, *(v.data_ptr() if isinstance(v, Tensor) else v for v in values))


def _base(x: Any) -> Tensor | None:
    """A tensor itself, the tensor that a TensorDescriptor describes, or None for another argument."""
    return x if isinstance(x, Tensor) else x.base if hasattr(x, "block_shape") else None


def _tensors_of(result: Any) -> list[Tensor]:
    return [] if result is None else [result] if isinstance(result, Tensor) else list(result)


def _allocator(t: Tensor) -> Callable[[], Tensor]:
    """Allocates a tensor like ``t`` on the current device, as the code that Inductor generates does."""
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{t.device.type}")
    return functools.partial(empty_strided, tuple(t.shape), t.stride(), t.dtype)


def _prepare_call(tensors: Sequence[Tensor], result: Any, launches: Sequence[CapturedLaunch]) -> Any:
    """A ``PreparedCall`` (:mod:`attn_ops.eager.launch_cache`) that replays ``launches`` for other runtime tensors."""
    outputs = _tensors_of(result)
    index = {id(t): i for i, t in enumerate((*tensors, *outputs))}

    def argument(x: Any) -> Any:
        base = _base(x)
        if base is None:
            return x
        pointer = index[id(base)] if id(base) in index else pack_pointer(base.data_ptr())
        return pointer if base is x else (pointer, x)

    described = [x.kernel.launch_tuple(x.grid, tuple(map(argument, x.arguments))) for x in launches if all(x.grid)]
    allocators = tuple(t if t.numel() == 0 else _allocator(t) for t in outputs)
    return native().PreparedCall(tuple(described), len(tensors), allocators, not isinstance(result, tuple))


class _DetectCompute(TorchDispatchMode):
    """Detects ATen ops other than allocations."""

    ALLOCATIONS = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})

    def __init__(self) -> None:
        super().__init__()
        self.computed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed |= func.overloadpacket.__name__ not in self.ALLOCATIONS
        return func(*args, **(kwargs or {}))


def capture_launches(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Call ``function`` and capture its kernel launches: ``(result, prepared call or None)``.

    There is a prepared call if the function did nothing but launch kernels, on tensors that are arguments or results.
    """
    captured: list[CapturedLaunch | None] = []
    outer, _capture.launches = _capture.launches, captured
    try:
        with _DetectCompute() as detector, _concurrent_compilation():
            result = function(*args, **kwargs)
    finally:
        _capture.launches = outer
    launches = [x for x in captured if x is not None]
    tensors, outputs = runtime_tensors(args, kwargs), _tensors_of(result)
    replaced, device = [*tensors, *outputs], torch.cuda.current_device()
    known = [*replaced, *plan_tensors(args)]
    ids = {id(t) for t in known}
    replayable = (
        len(launches) == len(captured) > 0
        and len(ids) == len(known)  # where one tensor is passed twice, the next call may pass two
        and not detector.computed
        and all(t.get_device() == device and not t.data_ptr() & ALIGNMENT_MASK for t in replaced)
        and all(t.is_contiguous() for t in outputs)
        and all(id(base) in ids for x in launches for base in map(_base, x.arguments) if base is not None)
    )
    return result, _prepare_call(tensors, result, launches) if replayable else None
