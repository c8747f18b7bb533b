"""Offsets of requests in packed tensors, in tokens or in elements as cuDNN's, or that repeat another argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attn_ops.eager.interposition import is_traced
from attn_ops.errors import DTypeError, OptionError, ShapeError, UnsupportedError, dtype_name, fail, shape_of
from attn_ops.gpu import is_capturing
from attn_ops.symbolic_sizes import guard_or_true

OFFSET_UNITS = ("elements", "tokens")


def token_offsets(indptr: Tensor, seq_lens: Tensor | None, elements: int) -> Tensor:
    """``indptr`` of a plan() of ``backend="cudnn"`` in tokens.

    It is in units of ``elements`` per token where the lengths say so. Without lengths, and where it is neither in
    tokens nor in elements, it is returned as it is. Copies to the host.
    """
    if seq_lens is None:
        return indptr
    ends = seq_lens.flatten().cpu().long().cumsum(0)
    packed = torch.cat((ends.new_zeros(1), ends)) * elements
    return indptr // elements if torch.equal(indptr.cpu().long(), packed) else indptr


def check_repeated(where: str, name: str, tensor: Tensor | None, indptr_name: str, indptr: Tensor, step: int) -> None:
    """Raise unless ``tensor``, if given, equals ``indptr``, in tokens or in ``step`` elements per token."""
    if tensor is None or (tensor.shape == indptr.shape and _is_packed(tensor, indptr, (1, step))):
        return
    fail(
        UnsupportedError,
        where,
        f"{name} differs from {indptr_name}",
        f"the tokens of {indptr_name}, or {step} elements for each of them",
        f"omit {name}",
    )


def check_offsets(
    where: str,
    units: str,
    indptr: Tensor,
    offsets: Mapping[str, tuple[Tensor | None, tuple[int, ...]]],
    *,
    without_end: bool = False,
) -> None:
    """Raise unless each given tensor has the offsets of packed tokens: ``indptr``, times elements per token.

    Contents are not compared while tracing or capturing.

    Args:
        offsets: for each name the tensor and the accepted numbers of elements per token, by size and by stride.
        without_end: whether a tensor may have one element per request, without the end of the last one.
    """
    if units not in OFFSET_UNITS:
        fail(OptionError, where, f"batch_offsets_units is {units!r}", " or ".join(OFFSET_UNITS), "pass one of the two")
    for name, (tensor, _) in offsets.items():
        if tensor is not None:
            _check_form(where, name, tensor, indptr.shape[0] - 1, without_end)
    if is_traced() or (indptr.is_cuda and is_capturing()):
        return
    for name, (tensor, elements) in offsets.items():
        if tensor is not None and not _is_packed(tensor, indptr, elements if units == "elements" else (1,)):
            what = f"{name} leaves gaps between requests"
            fail(UnsupportedError, where, what, "tokens packed without gaps", "pack the tensor")


def _check_form(where: str, name: str, offsets: Tensor, batch: int, without_end: bool) -> None:
    """Raise unless ``offsets`` are integers ``[batch + 1]``, or with other dimensions of size 1."""
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        fail(DTypeError, where, f"{name} is {dtype_name(offsets.dtype)}", "int32 or int64", "convert it")
    sizes = (batch, batch + 1) if without_end else (batch + 1,)
    if not offsets.dim() or not any(guard_or_true(offsets.numel() == size) for size in sizes):
        shapes = " or ".join([shape_of([size]) for size in sizes])
        expected = f"{shapes}, for the {int(batch)} requests of the batch"
        fail(ShapeError, where, f"{name} is {shape_of(offsets)}", expected, "make the two agree")


def _is_packed(offsets: Tensor, indptr: Tensor, steps: Sequence[int]) -> bool:
    """Whether ``offsets`` are the first of ``indptr``, times one of ``steps``. Copies to the host."""
    given, tokens = offsets.cpu().long().flatten(), indptr[: offsets.numel()].cpu().long()
    return any(torch.equal(given, tokens * step) for step in steps)
