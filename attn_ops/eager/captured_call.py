"""Captured calls: the launches of an eager call on CUDA, and the sources of the tensors that they take.

A :class:`CapturedCall` has the launches of a call of an op. :meth:`~CapturedCall.bind` makes a prepared call from it,
which makes the same launches with other tensors. Both need the extension module (:mod:`attn_ops.eager.extension`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.extension import extension
from attn_ops.gpu import ALIGNMENT_MASK

CONSTANT = -1
"""In place of the index of an argument: a tensor that is not an argument, and is the same in every call."""


class Launch(NamedTuple):
    """A launch of a loaded kernel.

    image     an ``Image`` of the extension module
    tensors   the tensors whose addresses or tensor maps are parameters
    integers  the grid, then the integer parameters
    floats    the floating-point parameters
    """

    image: Any
    tensors: tuple[Tensor, ...]
    integers: tuple[int, ...]
    floats: tuple[float, ...]

    def run(self, device: int, stream: int) -> None:
        row = (self.image, tuple(range(len(self.tensors))), self.integers, self.floats)
        sources = tuple((CONSTANT, t.data_ptr()) for t in self.tensors)
        extension.PreparedCall((row,), sources, (), True).launch(device, stream)


class CapturedCall(NamedTuple):
    """The launches of a call of an op, and the tensors that it returned.

    scratch  tensors of the launches that the op allocated, with undefined contents
    """

    launches: Sequence[Launch]
    outputs: tuple[Tensor, ...]
    scratch: Sequence[Tensor] = ()

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
        """A prepared call, which takes other tensors in place of ``arguments``; None if there can be none.

        Args:
            arguments: the tensors of the call, in the order in which a later call passes its tensors.
            constants: tensors that keep their addresses.
            unpack: return the first output instead of a tuple of all.
            destinations: for each output the argument that it is written to, or None to allocate it.
            shape: shape of the first output, if it differs from the op's.
            scratch: tensors of the launches that each call allocates, in addition to those of the op.
            views: pairs ``(view, base)``: tensors of the launches that begin where the argument ``base`` does.
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
        scratch = (*scratch, *self.scratch)
        memory = list({id(t): t for t in scratch if id(t) in used and t.numel()}.values())
        for t in (*self.outputs, *memory):
            used.pop(id(t), None)
        found = [source_of(t, arguments, (*constants, *scratch), views) for t in used.values()]
        sources = tuple(source for source in found if source is not None)
        if len(sources) < len(found):
            return None
        places = {key: i for i, key in enumerate((*used, *map(id, self.outputs), *map(id, memory)))}
        rows = tuple((x.image, tuple(places[id(t)] for t in x.tensors), x.integers, x.floats) for x in self.launches)
        makes = (allocator(t) if i is None else i for t, i in zip(outputs, targets, strict=True))
        return extension.PreparedCall(rows, sources, tuple(makes), unpack, tuple(map(allocator, memory)))


def index_of(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The first index of the object ``t`` in ``tensors``, or None. Calls of one key repeat tensors at equal indices."""
    return next((i for i, x in enumerate(tensors) if x is t), None)


def _position(tensors: Sequence[Tensor], t: Tensor) -> int | None:
    """The index of the object ``t``, which is written, in ``tensors``; None unless it is there exactly once."""
    return index_of(tensors, t) if sum(x is t for x in tensors) == 1 else None


def source_of(
    t: Tensor, arguments: Sequence[Tensor], constants: Sequence[Tensor], views: Sequence[tuple[Tensor, Tensor]] = ()
) -> tuple[int, int] | None:
    """The index of the argument that ``t`` is, or is a view of, and the offset of ``t`` in it in bytes.

    For a tensor of ``constants`` that is no argument: CONSTANT and its address, and for one without elements a null
    pointer. None if ``t`` is none of these, or shares memory with several arguments, and ``views`` does not name one of
    them.
    """
    base = next((base for view, base in views if view is t and view.data_ptr() == base.data_ptr()), t)
    i = index_of(arguments, base)
    if i is None and index_of(constants, t) is not None:
        return CONSTANT, t.data_ptr()
    if i is None:
        storage = t.untyped_storage().data_ptr()
        found = [i for i, x in enumerate(arguments) if x.untyped_storage().data_ptr() == storage]
        i = found[0] if t.numel() and len({id(arguments[i]) for i in found}) == 1 else None
    if i is None and not t.numel():
        return CONSTANT, 0
    return None if i is None else (i, t.data_ptr() - arguments[i].data_ptr())


def _is_output_like(target: Tensor, output: Tensor) -> bool:
    """Whether a kernel that writes ``output`` can write to ``target`` instead."""
    same_form = (target.shape, target.dtype, target.device) == (output.shape, output.dtype, output.device)
    return same_form and target.is_contiguous() and not target.data_ptr() & ALIGNMENT_MASK


def allocator(t: Tensor) -> Any:
    """A function that allocates a tensor like ``t`` on the current device. If ``t`` is empty: ``t``, to be returned."""
    if t.numel() == 0:
        return t
    empty_strided = getattr(torch._C._dynamo.guards, f"_empty_strided_{t.device.type}")
    return functools.partial(empty_strided, tuple(t.shape), t.stride(), t.dtype)


reinterpret: Any = getattr(torch._C._dynamo.guards, "_reinterpret_tensor")  # noqa: B009
"""``reinterpret(base, size, strides, ahead)``: a view that begins ``ahead`` elements after ``base``. It takes less time
than ``as_strided``, and Autograd does not track it."""


class View(NamedTuple):
    """A view of another tensor, its base: sizes, strides, and its offset from the base in elements."""

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
