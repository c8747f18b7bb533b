"""Scales of query, keys, values and output: numbers are folded, tensors go to the op (docs/guide/fp8.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import check_real
from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import ArgumentTypeError, OptionError, ShapeError, UnsupportedError, fail
from attn_ops.frontend.arguments import finite
from attn_ops.ops.options import BOUNDS, MAX_SCALAR, MIN_SCALAR, softmax_scale
from attn_ops.plan.page_table import seen
from attn_ops.symbolic_sizes import any_zero

Scale = float | Tensor | None

PER_QUERY_HEAD, PER_KV_HEAD = ("q_scale", "scale_q"), ("k_scale", "scale_k", "v_scale", "scale_v")
"""Names of the scales that may have a value per head, with an FP8 query."""

PER_ROW = ("q_descale", "k_descale", "v_descale")
"""Names of the scales that may have a value per query row and head."""


class Heads(NamedTuple):
    """The numbers of heads of a call whose scales may have a value per head."""

    num_qo_heads: int
    num_kv_heads: int


class ScaleFactors(NamedTuple):
    """Scales by the caller's names: ``logits`` multiply the logits, ``values`` the output."""

    logits: Mapping[str, Scale] = {}
    values: Mapping[str, Scale] = {}

    @classmethod
    def of_products(cls, bmm1_scale: Scale, bmm2_scale: Scale) -> ScaleFactors:
        return cls({"bmm1_scale": bmm1_scale}, {"bmm2_scale": bmm2_scale})

    @classmethod
    def of_tensors(cls, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> ScaleFactors:
        return cls({"q_scale": q_scale, "k_scale": k_scale}, {"v_scale": v_scale})


class FoldedScales(NamedTuple):
    """The op's arguments ``sm_scale`` and ``kv_scale``, and the factors outside of the op.

    query   factor of the query, float32 ``[num_qo_heads, 1]`` or ``[rows, num_qo_heads, 1]``, at most 1; None for 1
    output  factor of the output, a number or a float32 tensor of these shapes or without dimensions
    """

    sm_scale: float | None
    kv_scale: Tensor | None
    output: float | Tensor = 1.0
    query: Tensor | None = None

    @property
    def scales_output(self) -> bool:
        """Whether the output is multiplied by anything but 1. Reads no tensor."""
        return isinstance(self.output, Tensor) or self.output != 1.0


def reciprocal(where: str, name: str, scale: Scale) -> Scale:
    """``1 / scale``, for a scale that divides the output."""
    if scale is None:
        return None
    if isinstance(scale, Tensor):
        check_real(where, name, scale)
        check_no_grad(where, **{name: scale})
        for number in scale.flatten().tolist() if seen(scale) else ():
            positive_number(where, name, number)
        return scale.float().reciprocal()
    return 1 / positive_number(where, name, scale)


def as_number(where: str, name: str, scale: float) -> float:
    """``scale`` as a finite float. Strings and bools, which ``float`` accepts, are refused."""
    if isinstance(scale, str | bool):
        shown = f"{name} is {scale!r}, of type {type(scale).__name__}"
        fail(ArgumentTypeError, where, shown, "a number or a tensor or None", "pass a number")
    number = float(scale)
    finite(where, name, number)
    return number


def positive_number(where: str, name: str, scale: float) -> float:
    """:func:`as_number` of a scale that must be positive."""
    number = as_number(where, name, scale)
    if number <= 0:
        fail(OptionError, where, f"{name} is {number}", "a positive number", "change it")
    return number


def as_factor(where: str, name: str, scale: Scale, device: torch.device, heads: Heads | None) -> Scale:
    """``scale`` as a number or a float32 tensor without dimensions; with ``heads`` also with a value per query head.

    Scales of :data:`PER_ROW` are returned as they are.
    """
    if not isinstance(scale, Tensor):
        return None if scale is None else as_number(where, name, scale)
    check_real(where, name, scale)
    check_no_grad(where, **{name: scale})
    if name in PER_ROW and scale.dim():
        return scale
    if seen(scale):
        for number in scale.flatten().tolist():
            finite(where, name, number)
    values = scale.numel()
    if values == 1:
        return scale.reshape(()).to(device, torch.float32)
    if heads is None or name not in PER_QUERY_HEAD + PER_KV_HEAD:
        fail(
            UnsupportedError,
            where,
            f"{name} has {values} values",
            "one for the whole tensor",
            "scales per head are only for q_scale, k_scale and v_scale of an FP8 query",
        )
    expected = heads.num_qo_heads if name in PER_QUERY_HEAD else heads.num_kv_heads
    if values != expected:
        fail(ShapeError, where, f"{name} has {values} values", f"1, or {expected}, one per head", "correct it")
    return scale.flatten().to(device, torch.float32).repeat_interleave(heads.num_qo_heads // max(1, expected))


def fold(
    where: str,
    sm_scale: float | None,
    head_dim: int,
    device: torch.device,
    factors: ScaleFactors,
    heads: Heads | None = None,
    *,
    scale_in_float32: bool = False,
) -> FoldedScales:
    """The softmax scale times all scales of the logits, and the product of all scales of the output.

    Numbers are folded into ``sm_scale`` and ``output``, tensors into ``kv_scale``, without reading the device. A
    product of numbers that is negative or 0 goes to ``kv_scale`` too, since ``sm_scale`` must be positive. With
    ``scale_in_float32`` tensors that scale the output go to ``output``, since the op rounds after the scale.
    """
    logits, values = factors
    if not _given(logits) and not _given(values):
        return FoldedScales(sm_scale, None)
    scale, key = _product([as_factor(where, name, s, device, heads) for name, s in logits.items()])
    output, value = _product([as_factor(where, name, s, device, heads) for name, s in values.items()])
    if scale <= 0:
        finite(where, f"the product of the logits' scales ({_names(logits)})", scale)
        number = torch.full((), scale, dtype=torch.float32, device=device)
        scale, key = 1.0, number if key is None else key * number
    if scale != 1.0:
        scale *= softmax_scale(sm_scale, head_dim)
        if not BOUNDS["sm_scale"].holds(scale):
            fail(
                OptionError,
                where,
                f"the scales multiply to {scale} ({_names(logits)})",
                "a product of 2^-126 to 2^126, or one that is negative or 0",
                "change a scale",
            )
        sm_scale = scale
    if not -MAX_SCALAR <= output <= MAX_SCALAR:
        finite(where, f"the product of the output's scales ({_names(values)})", output)
    query: Tensor | None = None
    result: float | Tensor = output
    if key is not None and any_zero(*key.shape):
        key = None
    if key is not None and key.dim():  # kv_scale has the largest factor, and the query the ratios to it
        largest = key.abs().amax().clamp(min=MIN_SCALAR)
        key, query = largest, (key / largest)[..., None]
    if value is not None and (value.dim() or scale_in_float32):
        result, value = (value[..., None] if value.dim() else value) * output, None
    if key is None and value is None:
        return FoldedScales(sm_scale, None, result, query)
    one = torch.ones((), dtype=torch.float32, device=device)
    kv_scale = torch.stack((one if key is None else key, one if value is None else value))
    return FoldedScales(sm_scale, kv_scale, result, query)


def _names(scales: Mapping[str, Scale]) -> str:
    return ", ".join(name for name, scale in scales.items() if scale is not None)


def _given(scales: Mapping[str, Scale]) -> bool:
    for scale in scales.values():  # noqa: SIM110  a loop is a microsecond faster, in every call
        if scale is not None:
            return True
    return False


def _product(scales: Sequence[Scale]) -> tuple[float, Tensor | None]:
    number, tensor = 1.0, None
    for scale in scales:
        if isinstance(scale, Tensor):
            tensor = scale if tensor is None else tensor * scale
        elif scale is not None:
            number = number * scale
    return number, tensor
