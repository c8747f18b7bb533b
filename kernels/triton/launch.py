"""Kernel launches: one function, :func:`launch`, wherever an op runs.

Eager        the kernel that Triton compiled for this specialization, from a cache, launched by ``attn_ops/native``
Traced       ``torch.library.wrap_triton``, from which Inductor generates the launch
Packaged     ``attn::launch_image``, for kernels that name what they write (:mod:`.image`)
Otherwise    ``kernel[grid](...)``: Triton's interpreter, Triton releases whose kernels' parameters are not known here,
             and an installation without the extension module

Triton's own ``kernel[grid](...)`` binds and specializes every argument in Python at every launch, which takes about as
long on the host as a small kernel runs on the GPU. Here a launch is one lookup. What a whole op launches is captured
(:mod:`attn_ops.eager.launches`), and a prepared call is made of it (:mod:`attn_ops.eager.prepared_call`).

What a kernel's parameters may be, since Inductor must be able to generate the launch:

* A tensor, None, or an int or float. A runtime argument cannot be a tuple: ``wrap_triton`` (torch 2.13) keeps a tuple
  out of the graph, together with the symbolic sizes in it, and Inductor has no signature for one. Strides are separate
  parameters, therefore.
* A ``tl.constexpr`` may be a number, or a NamedTuple of numbers that is a :func:`constexpr_table`. A kernel with many
  constants takes a few tables instead: ``SHAPE.HEAD_DIM`` in the kernel, ``SHAPE=Shape(HEAD_DIM=128, ...)`` in the
  launch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.runtime.jit import JITFunction

from attn_ops.eager import launches
from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import Launch
from attn_ops.eager.extension import is_available
from attn_ops.eager.startup import wait_until_prepared
from attn_ops.gpu import ALIGNMENT, ALIGNMENT_MASK, compute_capability
from attn_ops.kernels.triton import image
from attn_ops.kernels.triton.cubin import Layout, parameter_layout
from attn_ops.native.images import MAX_LOADED, collecting, load
from attn_ops.native.launch_arguments import operands

DIRECT_LAUNCH = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
"""Triton releases in which the parameters of a compiled kernel are known (:mod:`.cubin`)."""

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
    A kernel is compiled for numbers: a symbol of a graph becomes one, with a guard, as Inductor does with a constant
    that is a symbol by itself.
    """
    new = cls.__new__

    def of_numbers(cls: type, *args: Any, **kwargs: Any) -> Any:
        table = new(cls, *args, **kwargs)
        if not any(isinstance(x, torch.SymInt) for x in table):
            return table
        return new(cls, *[int(x) if isinstance(x, torch.SymInt) else x for x in table])

    def table_repr(self: Any) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
        return f"__import__({cls.__module__!r}, fromlist=['']).{cls.__qualname__}({fields})"

    cls.__new__ = of_numbers  # type: ignore[method-assign, assignment]
    cls.__repr__ = table_repr  # type: ignore[method-assign, assignment]
    return cls


def _has_pdl(device: torch.device) -> bool:
    capability = compute_capability(device)
    return capability is not None and capability >= (9, 0)


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
    return DIRECT_LAUNCH and launched_here and _has_pdl(t.device)


class Parameters(NamedTuple):
    """The parameters of a kernel by kind: their positions, or a function that selects their values of all arguments."""

    specialized: tuple[int, ...]
    """Tensors, and ints such as strides: Triton compiles for their alignment or divisibility, and for the value 1."""
    scalars: tuple[int, ...]
    """Parameters in ``do_not_specialize``: Triton compiles only for their type."""
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


_kernel_cache: BoundedCache[tuple[Any, ...], tuple[Any, Layout] | tuple[()]] = BoundedCache(MAX_LOADED)
"""Images and their layout by kernel, device, specialization, constants and options; empty: Triton launches the kernel.

The GPU code of entries that are dropped stays loaded, since CUDA graphs may refer to it. Triton keeps the compiled
kernels, so a launch after that looks its kernel up there and loads it once more.
"""


def launch(kernel: Any, grid: Sequence[Any], options: Options = DEFAULT_OPTIONS, /, **arguments: Any) -> None:
    """Launch ``kernel`` on ``grid`` with ``arguments``, by the names of its parameters::

        launch(decode_kernel, (programs,), Options(num_warps=8), q=q, out=out, rows=rows, HEAD_DIM=128)

    Every parameter of the kernel is given, in any order; a ``TypeError`` lists missing and unknown names. The first
    parameter of the kernel is a tensor, never None; it decides the device and whether the launch is eager or traced.
    Scalars that change from call to call belong into the kernel's ``do_not_specialize``.
    """
    values = _in_order(kernel, arguments)
    if isinstance(values[0], FakeTensor):
        images = collecting()
        if images is not None and options.writes:
            image.launch(images, kernel, grid, values, options)
            return
        kernel = torch.library.wrap_triton(kernel)
    elif DIRECT_LAUNCH and is_available() and isinstance(kernel, JITFunction):
        _launch_direct(kernel, grid, values, options)
        return
    _launch_by_triton(kernel, grid, values, options)


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


def _class_of(x: Any) -> Any:
    """Equal for the values of a specialized parameter that share a compiled kernel, as Triton specializes ints."""
    return (x == 1, x % ALIGNMENT == 0, _needs_64_bits(x)) if type(x) is int else x


def _insert(key: tuple[Any, ...], values: Sequence[Any], compiled: Any) -> tuple[Any, Layout] | tuple[()]:
    """Load a compiled kernel and add it to the kernel cache. A CUDA graph capture may do so too."""
    if hasattr(compiled, "result"):  # of a program in Triton's AsyncCompileMode
        compiled = compiled.result()
    device, options = key[1], key[-1]
    layout = parameter_layout(compiled)
    if layout is None:
        return _kernel_cache.insert(key, ())
    made = image.image_of(compiled, options, layout.arguments(values))
    return _kernel_cache.insert(key, (load(made, device), layout))


def _launch_direct(kernel: JITFunction[Any], grid: Sequence[int], values: tuple[Any, ...], options: Options) -> None:
    """Launch with ``values`` in the order of the kernel's parameters."""
    device = values[0].get_device()
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _launch_direct(kernel, grid, values, options)
            return
    parameters = _parameters(kernel)
    specialization: list[Any] = []
    for i in parameters.specialized:
        value = values[i]
        if isinstance(value, Tensor):
            specialization.append((value.dtype, not value.data_ptr() & ALIGNMENT_MASK))
        else:
            specialization.append(_class_of(value))
    wide = tuple([_needs_64_bits(values[i]) for i in parameters.scalars])
    key = (kernel, device, tuple(specialization), wide, parameters.constants(values), options)
    entry = _kernel_cache.get(key)
    if entry is None:
        wait_until_prepared()
        entry = _insert(key, values, kernel.warmup(*values, grid=tuple(grid), **options.keywords()))
    if not entry:
        _launch_by_triton(kernel, grid, values, options)
        return
    loaded, layout = entry
    launches.run(Launch(loaded, *operands(layout.kinds, layout.select(values), grid)), device)


def _launch_by_triton(kernel: Any, grid: Sequence[Any], values: Sequence[Any], options: Options) -> None:
    launches.record(None)
    if all(grid):
        kernel[tuple(grid)](*values, **options.keywords())
