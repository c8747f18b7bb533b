"""CUDA kernels as the host describes them: source and parameters, specializations, and values of tensor maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.gpu import num_sms
from attn_ops.native.images import MAP_TYPES, MapSpec

SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""Bytes of a swizzle -> its ``CUtensorMapSwizzle``."""


class TensorMap(NamedTuple):
    """The value of a parameter of kind ``map``, which becomes a ``CUtensorMap``.

    base     the tensor at whose address the map begins. It must have elements if the kernel loads through the map
    shape    sizes, outermost first, up to five dimensions
    strides  in elements, outermost first. The last is 1; the others are multiples of 16 bytes
    box      elements of a box in each dimension
    swizzle  bytes: 0, 32, 64 or 128
    """

    base: Tensor
    shape: Sequence[Any]
    strides: Sequence[Any]
    box: tuple[int, ...]
    swizzle: int = 128

    def spec(self, slot: int) -> MapSpec:
        """The map as an :class:`~attn_ops.native.images.Image` stores it; ``base`` is tensor ``slot`` of the call."""
        return MapSpec(slot, MAP_TYPES[self.base.dtype], SWIZZLES[self.swizzle], self.base.element_size(), self.box)


class Kernel(NamedTuple):
    """An ``extern "C" __global__`` function of a source in this folder.

    parameters  name -> kind, in the order of the function's parameters. Kinds are ``"pointer"``, ``"map"``, ``"i32"``,
                ``"i64"`` and ``"fp32"``; in C++ ``T*``, ``const __grid_constant__ TensorMap``, ``int``, ``long long``
                (or unsigned) and ``float``
    writes      parameters of kind ``pointer`` whose memory the kernel writes: graphs order calls by them
    aligned     parameters of kind ``pointer`` that must be multiples of 16 bytes. The unsupported reasons of the
                backend entry refuse others
    options     further options of the compiler, such as ``"--maxrregcount=128"``
    """

    source: str
    function: str
    parameters: Mapping[str, str]
    writes: tuple[str, ...]
    aligned: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def in_order(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        """The values of ``arguments`` in the order of the parameters.

        Raises:
            TypeError: names are missing or unknown.
        """
        if arguments.keys() == self.parameters.keys():
            return tuple([arguments[name] for name in self.parameters])
        missing = [name for name in self.parameters if name not in arguments]
        unknown = [name for name in arguments if name not in self.parameters]
        raise TypeError(
            f"{self.function}: launched without {missing} and with unknown {unknown}; expected {list(self.parameters)}"
        )


class Specialization:
    """A kernel, the macros that it is compiled with, and the launch settings that depend on the macros.

    Make each specialization once, as a constant of a module or by a cached function: the cache of loaded kernels
    compares specializations by identity.

    macros        ``{"HEAD_DIM": 128}`` is ``-DHEAD_DIM=128``. Sizes that change from call to call are parameters
    sizes         further macros, which follow from the others, and are not in the name
    threads       threads of a CTA
    shared_bytes  dynamic shared memory of a CTA
    cluster       CTAs of a cluster, in x, y and z. The grid is a multiple of it
    pdl           programmatic dependent launch: the kernel executes ``griddepcontrol.wait`` before it reads memory that
                  an earlier kernel writes, and in at least one CTA in any case
    """

    def __init__(
        self,
        kernel: Kernel,
        macros: Mapping[str, int],
        *,
        sizes: Mapping[str, int] | None = None,
        threads: int,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] = (1, 1, 1),
        pdl: bool = True,
    ) -> None:
        self.kernel, self.macros, self.sizes = kernel, _sorted(macros), _sorted(sizes or {})
        self.threads, self.shared_bytes, self.cluster, self.pdl = threads, shared_bytes, cluster, pdl

    @property
    def name(self) -> str:
        """Function and macros, such as ``"merge_states_kernel DTYPE=1"``."""
        return " ".join([self.kernel.function, *(f"{name}={value}" for name, value in self.macros)])

    @property
    def definitions(self) -> list[str]:
        """The compiler's options of all macros."""
        return [f"-D{name}={value}" for name, value in (*self.macros, *self.sizes)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


def _sorted(macros: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, int(value)) for name, value in macros.items()))


def persistent_grid(items: Any, device: torch.device, ctas_per_sm: int = 1) -> Any:
    """CTAs of a persistent kernel for ``items`` work items: ``ctas_per_sm``, or one per item if there are fewer items.

    In a package ``items`` is symbolic, and the package may run on a GPU with another number of SMs: the kernel must
    take any grid.
    """
    return torch.sym_min(items, ctas_per_sm * num_sms(device))
