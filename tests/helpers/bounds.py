"""A memory check for kernels in Triton's interpreter: every access must lie in a tensor that the launch was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor


class OutOfBoundsError(AssertionError):
    """An access outside of all tensors of a launch."""


class Extents:
    """The addresses of a launch's tensors, from the first element of each to its last."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def add(self, value: Any) -> None:
        if isinstance(value, tuple):
            for item in value:
                self.add(item)
        elif isinstance(value, Tensor) and value.numel():
            last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            self.found.append((value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size()))

    def check(self, access: str, ptrs: Any, mask: Any) -> None:
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        active = np.broadcast_to(mask, ptrs.data.shape).astype(bool)
        addresses = np.unique(ptrs.data[active].astype(np.uint64))
        inside = np.zeros(addresses.shape, bool)
        for first, end in self.found:
            inside |= (addresses >= np.uint64(first)) & (addresses + np.uint64(size) <= np.uint64(end))
        if not inside.all():
            address = int(addresses[~inside][0])
            first, end = min(self.found, key=lambda extent: min(abs(address - extent[0]), abs(address - extent[1])))
            raise OutOfBoundsError(f"{access} of {size} bytes at {address - first} of a tensor of {end - first} bytes")


@contextlib.contextmanager
def checked_accesses() -> Iterator[None]:
    """Within, an access of an interpreted kernel outside of its tensors raises before it happens."""
    from triton.runtime import interpreter

    extents, builder = Extents(), interpreter.InterpreterBuilder
    init_args = interpreter.GridExecutor._init_args_hst
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def init(self: Any, args: Any, kwargs: Any) -> Any:
        extents.found.clear()
        result = init_args(self, args, kwargs)
        extents.add((*result[0], *result[1].values()))
        return result

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        extents.check("a load", ptrs, mask.data)
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        extents.check("a store", ptrs, mask.data)
        return store(self, ptrs, value, mask, *rest)

    def checked_atomic(self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        extents.check("an atomic", ptr, mask.data)
        return atomic(self, op, ptr, value, mask, *rest)

    with (
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", init),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(builder, "create_atomic_rmw", checked_atomic),
    ):
        yield
