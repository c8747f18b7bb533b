"""Output specification: the dtype, LSE base, layout and buffers that a caller asked for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import check_no_overlap, optional_flags
from attn_ops.eager.interposition import check_no_grad, is_traced
from attn_ops.errors import ArgumentError, DeviceError, DTypeError, OptionError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import output_dtype
from attn_ops.ops.options import FP8, saturate
from attn_ops.symbolic_sizes import agree, same_elements

LSE_BASES = {"log2": 1.0, "ln": math.log(2)}
"""``lse_base`` -> the factor that converts an LSE of base 2."""

LSE_BASE_NAMES = {"base2": "log2", "basee": "ln"}
"""FlashInfer's other names of bases -> ``lse_base``."""

LSE_LAYOUTS = ("NH", "HN")


class PaddedLse(NamedTuple):
    """An LSE padded to ``[batch, max_rows, heads]``; the rows of request b are ``qo_indptr[b]`` to ``[b + 1]``."""

    qo_indptr: Tensor
    max_rows: int

    def fill(self, padded: Tensor, lse: Tensor) -> Tensor:
        """Copy ``lse [rows, heads]`` to ``padded``; the padding keeps its values."""
        if not lse.shape[0]:
            return padded
        row = self.qo_indptr[:-1, None] + torch.arange(self.max_rows, device=lse.device)
        given = (row < self.qo_indptr[1:, None])[..., None]
        return padded.copy_(torch.where(given, lse[row.clamp(max=lse.shape[0] - 1)], padded))


class OutputSpec(NamedTuple):
    """The form of a call's result.

    out, lse    buffers of the caller, filled and returned
    return_lse  the result is ``(out, lse)``
    dtype       dtype of the output; None for that of ``out``, or of the query. FP8 outputs are saturated
    lse_base    ``"log2"`` or ``"ln"``
    lse_layout  ``"NH"`` for ``[rows, heads]``, ``"HN"`` for ``[heads, rows]``, or ``[batch, heads, seqlen]`` where
                ``rows_shape`` is ``(batch, seqlen)``
    padded      the padding of an ``lse`` buffer of three dimensions
    rows_shape  dimensions of the output in place of ``rows``, for a query of more than three dimensions
    out_name    the caller's name of ``out``
    """

    out: Tensor | None = None
    lse: Tensor | None = None
    return_lse: bool = False
    dtype: torch.dtype | None = None
    lse_base: str = "log2"
    lse_layout: str = "NH"
    padded: PaddedLse | None = None
    rows_shape: tuple[int, ...] | None = None
    out_name: str = "out"

    @property
    def padding(self) -> PaddedLse | None:
        """The padding of the LSE buffer, None without one."""
        return self.padded if self.lse is not None and self.lse.dim() == 3 else None

    @property
    def has_no_buffer(self) -> bool:
        return self.out is None and self.lse is None and self.padded is None

    @property
    def needs_lse(self) -> bool:
        return self.return_lse or self.lse is not None

    def check(self, where: str, q: Tensor, head_dim: int) -> None:
        """Check options and buffers for a query ``q [rows, heads, ...]`` before anything is computed."""
        optional_flags(where, return_lse=self.return_lse)
        if self.lse_base not in LSE_BASES:
            fail(OptionError, where, f"lse_base is {self.lse_base!r}", " or ".join(LSE_BASES), "pass one of the two")
        if self.lse_layout not in LSE_LAYOUTS:
            fail(OptionError, where, f"lse_layout is {self.lse_layout!r}", " or ".join(LSE_LAYOUTS), "pass one")
        if self.out is not None:
            rows = q.shape[:1] if self.rows_shape is None else self.rows_shape
            shape = (*rows, *q.shape[1:-1], head_dim)
            check_buffer(where, self.out_name, self.out, shape, self.dtype or self.out.dtype, q.device)
            output_dtype(where, self.out_name, self.out.dtype)
        if self.lse is not None:
            shape = tuple(q.shape[:-1]) if self.lse_layout == "NH" else tuple(q.shape[-2::-1])
            if self.padding is not None:
                shape = (self.padding.qo_indptr.shape[0] - 1, self.padding.max_rows, q.shape[1])
            check_buffer(where, "lse", self.lse, shape, torch.float32, q.device)
            if self.out is not None:
                check_apart(where, self.out_name, self.out, "lse", self.lse)

    def dtype_for(self, q_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the output for a query of ``q_dtype``."""
        if self.dtype is not None:
            return self.dtype
        return q_dtype if self.out is None else self.out.dtype

    def destinations(self) -> tuple[Tensor | None, ...] | None:
        """The buffers of the op's ``out`` and ``lse``, or None for each; a single None if the LSE is converted."""
        plain_lse = self.lse_base == "log2" and self.lse_layout == "NH" and self.padding is None
        if self.needs_lse and not plain_lse:
            return None
        return self.out, self.lse

    def finalize(
        self, out: Tensor, lse: Tensor | None, dtype: torch.dtype, scale: float | Tensor = 1.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The result, from the op's ``out [rows, heads, head_dim]`` and ``lse``, which may be None if it is not needed.

        The output is multiplied by ``scale``, a number, a 0-dim float32 tensor, or one of shape ``[heads, 1]`` or
        ``[rows, heads, 1]``, and converted to ``dtype``.
        """
        if isinstance(scale, Tensor) or (scale != 1.0 and dtype != out.dtype):
            out = out.float() * scale
        elif scale != 1.0:
            out = out * scale
        if dtype != out.dtype and dtype in FP8:
            out = saturate(out, dtype)
        if self.rows_shape is not None:
            out = out.view(*self.rows_shape, *out.shape[1:])
        if self.out is not None:
            out = self.out.copy_(out)
        elif dtype != out.dtype:
            out = out.to(dtype)
        if not self.needs_lse:
            return out
        assert lse is not None
        if self.lse_base != "log2":
            lse = lse * LSE_BASES[self.lse_base]
        if self.lse_layout == "HN":
            lse = (lse if self.rows_shape is None else torch.unflatten(lse, 0, self.rows_shape)).transpose(-2, -1)
        if self.lse is None:
            lse = lse.contiguous()
        elif self.padding is not None:
            lse = self.padding.fill(self.lse, lse)
        else:
            lse = self.lse.copy_(lse)
        return (out, lse) if self.return_lse else out


def dtype_without_scale(q: Tensor, out: Tensor | None) -> torch.dtype | None:
    """``OutputSpec.dtype`` of functions that do not scale the output: bfloat16 for an FP8 query without ``out``."""
    return torch.bfloat16 if out is None and q.dtype in FP8 else None


def check_buffer(
    where: str, name: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a buffer of the caller is of this shape and dtype, on the query's device, and without overlap."""
    if not agree(buffer.shape, shape):
        fail(ShapeError, where, f"{name} is {shape_of(buffer)}", shape_of(shape), f"pass such a buffer, or no {name}")
    if buffer.dtype != dtype or not buffer.is_floating_point():
        fail(
            DTypeError,
            where,
            f"{name} is {dtype_name(buffer.dtype)}",
            dtype_name(dtype) if dtype.is_floating_point else "a floating-point dtype",
            f"pass such a buffer, or no {name}",
        )
    if buffer.device != device:
        fail(DeviceError, where, f"{name} is on {buffer.device}", f"{device}, where the query is", "move it")
    check_no_grad(where, **{name: buffer})
    check_no_overlap(where, name, buffer, f"or pass no {name}")


def check_apart(where: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    """Raise if two tensors that are written share memory, as far as is known."""
    if _share_memory(a, b):
        fail(ArgumentError, where, f"{second} shares memory with {first}", "memory of its own", "allocate both")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to share memory. Strided tensors may alternate in memory without sharing it."""
    if a is b:
        return True
    if is_traced() or type(a) is not Tensor or type(b) is not Tensor:
        return False
    if not (a.is_contiguous() and b.is_contiguous()):
        return same_elements(a, b)
    first, second = a.data_ptr(), b.data_ptr()  # 0 for a tensor without memory
    return bool(first and second) and first < second + b.nbytes and second < first + a.nbytes
