"""The arguments of a launch, of a Triton or a CUDA kernel, in an eager call or in a package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from attn_ops.native.images import MapSpec, NoImageError, Parameter


def operands(
    kinds: Collection[str], values: Sequence[Any], grid: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[Any, ...], tuple[float, ...]]:
    """The tensors without nulls, the integers, which begin with the three of the grid, and the floats of a launch.

    ``kinds`` and ``values`` are those of :class:`LaunchArguments`.
    """
    tensors: list[Tensor] = []
    integers: list[Any] = [*grid, 1, 1][:3]
    floats: list[float] = []
    for i, kind in enumerate(kinds):
        value = values[i]
        if kind == "pointer":
            if value is not None:
                tensors.append(value)
        elif kind == "fp32":
            floats.append(float(value))
        elif kind == "map":
            tensors.append(value.base)
            integers += [*value.shape, *value.strides]
        else:
            integers.append(value)
    return tuple(tensors), tuple(integers), tuple(floats)


class LaunchArguments(NamedTuple):
    """The names, kinds and values of a kernel's parameters, in their order.

    kinds   ``"pointer"``, ``"map"``, ``"i32"``, ``"i64"`` or ``"fp32"``
    values  a tensor or None, which is null, of a pointer; a :class:`~attn_ops.kernels.cuda.kernel.TensorMap` of a map;
            a number of the others
    """

    names: Collection[str]
    kinds: Collection[str]
    values: Sequence[Any]

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors of :func:`operands` with the names of their parameters."""
        found = []
        for name, kind, value in zip(self.names, self.kinds, self.values, strict=True):
            if kind == "map":
                found.append((name, value.base))
            elif kind == "pointer" and value is not None:
                found.append((name, value))
        return found

    def table(
        self, slot_of: Callable[[Tensor], int | None] | None = None
    ) -> tuple[tuple[Parameter, ...], tuple[MapSpec, ...]]:
        """The table of the parameters and tensor maps.

        ``slot_of``: the position of a tensor in the call; None makes its pointer null. By default that of
        :func:`operands`.
        """
        parameters: list[Parameter] = []
        maps: list[MapSpec] = []
        tensors = 0
        for name, kind, value in zip(self.names, self.kinds, self.values, strict=True):
            slot: int | None = None
            if kind in ("pointer", "map") and value is not None:
                slot = tensors if slot_of is None else slot_of(value.base if kind == "map" else value)
                tensors += 1
            if kind == "map":
                if slot is None:
                    raise NoImageError(f"the tensor of {name} has no elements")
                parameters.append(Parameter("map", len(maps), name))
                maps.append(value.spec(slot))
            elif kind == "pointer":
                parameters.append(Parameter("null", 0, name) if slot is None else Parameter("pointer", slot, name))
            else:
                parameters.append(Parameter(kind, 0, name))
        return tuple(parameters), tuple(maps)
