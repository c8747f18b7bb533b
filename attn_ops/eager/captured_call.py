"""Captured calls: the kernels that an eager call on CUDA launched, and how they are launched again.

A :class:`CapturedCall` is what a call of an op launched; :meth:`~CapturedCall.bind` makes it a prepared call, which
launches the same for other tensors. Both need the extension module (``attn_ops/native/extension``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.gpu import ALIGNMENT_MASK

_C: Any = None
NATIVE_REASON = ""
try:
    _C = importlib.import_module("attn_ops.native._C")
except ImportError as error:
    NATIVE_REASON = f"not prepared, they take more host time: {error}; install with a C++ compiler"

CONSTANT = -1
"""Index of a tensor that is no argument: it is the same in every call."""


def is_available() -> bool:
    """Whether calls are prepared. Otherwise each is checked in Python and launched by Triton."""
    return _C is not None


class Launch(NamedTuple):
    """A launch of a loaded kernel: an ``Image`` of the extension module, and what its parameters come from."""

    image: Any
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]
    """The grid, then those of the parameters."""
    floats: tuple[float, ...]

    def run(self, device: int, stream: int) -> None:
        row = (self.image, tuple(range(len(self.tensors))), self.integers, self.floats)
        sources = tuple((CONSTANT, t.data_ptr()) for t in self.tensors)
        _C.PreparedCall((row,), sources, (), True).launch(device, stream)


class CapturedCall(NamedTuple):
    """What a call of an op launched, and the tensors that it returned."""

    launches: Sequence[Launch]
    outputs: tuple[Tensor, ...]

    def bind(
        self,
        arguments: Sequence[Tensor],
        constants: Sequence[Tensor] = (),
        unpack: bool = False,
        destinations: Sequence[Tensor | None] = (),
        shape: tuple[int, ...] | None = None,
        scratch: Sequence[Tensor] = (),
        views: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Any:
        """A prepared call for other tensors in the place of ``arguments``; None if it cannot be one.

        ``constants`` keep their addresses. An output with a destination, one of the arguments, is written there. The
        rest is as in :class:`OpCall`.
        """
        device = torch.cuda.current_device()
        if any(t.get_device() != device for t in (*arguments, *self.outputs)):
            return None
        outputs = self.outputs
        if shape is not None:
            if not outputs[0].is_contiguous():
                return None
            outputs = outputs[0].view(shape), *outputs[1:]
        targets = [None if t is None else _position(arguments, t) for t in destinations or [None] * len(outputs)]
        fits = zip(destinations, targets, outputs, strict=False)
        if not all(t is None or (i is not None and _is_output_like(t, output)) for t, i, output in fits):
            return None
        used = {id(t): t for x in self.launches for t in x.tensors}
        memory = [t for t in scratch if id(t) in used and t.numel()]
        for t in (*self.outputs, *memory):
            used.pop(id(t), None)
        sources = [source_of(t, arguments, (*constants, *scratch), views) for t in used.values()]
        if None in sources:
            return None
        places = {key: i for i, key in enumerate((*used, *map(id, self.outputs), *map(id, memory)))}
        rows = tuple((x.image, tuple(places[id(t)] for t in x.tensors), x.integers, x.floats) for x in self.launches)
        makes = (allocator(t) if i is None else i for t, i in zip(outputs, targets, strict=True))
        return _C.PreparedCall(rows, tuple(sources), tuple(makes), unpack, tuple(map(allocator, memory)))


def index_of(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The first position of the object ``t`` among ``tensors``. Other calls of the key have one there as often."""
    return next((i for i, x in enumerate(tensors) if x is t), None)


def _position(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The one position of the object ``t``, which is written, among ``tensors``."""
    return index_of(tensors, t) if sum(x is t for x in tensors) == 1 else None


def source_of(
    t: Tensor, arguments: Sequence[Tensor], constants: Sequence[Tensor], views: Sequence[tuple[Tensor, Tensor]] = ()
) -> tuple[int, int] | None:
    """The argument that ``t`` is, or is a view of, with its offset in bytes; or CONSTANT with its address.

    None if it is neither, or a view of several arguments that ``views`` does not decide.
    """
    base = next((base for view, base in views if view is t and view.data_ptr() == base.data_ptr()), t)
    i = index_of(arguments, base)
    if i is None and index_of(constants, t) is not None:
        return CONSTANT, t.data_ptr()
    if i is None:
        storage = t.untyped_storage().data_ptr()
        found = [i for i, x in enumerate(arguments) if x.untyped_storage().data_ptr() == storage]
        i = found[0] if t.numel() and len({id(arguments[i]) for i in found}) == 1 else None
    return None if i is None else (i, t.data_ptr() - arguments[i].data_ptr())


def _is_output_like(target: Tensor, output: Tensor) -> bool:
    """Whether a kernel can write to ``target`` what it writes to ``output``."""
    same_form = (target.shape, target.dtype, target.device) == (output.shape, output.dtype, output.device)
    return same_form and target.is_contiguous() and not target.data_ptr() & ALIGNMENT_MASK


def allocator(t: Tensor) -> Any:
    """Allocates a tensor like ``t`` on the current device; an empty tensor itself, which every call returns."""
    if t.numel() == 0:
        return t
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{t.device.type}")
    return functools.partial(empty_strided, tuple(t.shape), t.stride(), t.dtype)


reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009
"""``reinterpret(base, size, strides, ahead)``: a view that begins ``ahead`` elements after ``base``, as ``as_strided``
makes it, in less time and without what Autograd needs."""


class View(NamedTuple):
    """A view of the memory of another tensor: sizes, strides, and how far ahead of it it begins."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    ahead: int

    @classmethod
    def of(cls, t: Tensor, base: Tensor) -> View:
        """``t`` as a view of ``base``, which is in the same memory."""
        return cls(tuple(t.shape), t.stride(), int(t.storage_offset() - base.storage_offset()))

    def taker(self) -> Callable[[Tensor], Tensor]:
        """A function that takes the view of another base, by :data:`reinterpret`."""
        size, strides, ahead = self
        return lambda base: reinterpret(base, size, strides, ahead)


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)
