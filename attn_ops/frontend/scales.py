"""Scales of query, keys and values: numbers are folded, tensors go to the op (docs/guide/fp8.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.errors import OptionError, UnsupportedError, fail
from attn_ops.frontend.arguments import finite
from attn_ops.ops.options import BOUNDS, MAX_SCALAR
from attn_ops.plan.page_table import seen

Scale = float | Tensor | None


class ScaleFactors(NamedTuple):
    """Scales by the names that the caller gave them: those of the logits, and those of the output."""

    logits: Mapping[str, Scale] = {}
    values: Mapping[str, Scale] = {}


class FoldedScales(NamedTuple):
    """``sm_scale`` and ``kv_scale`` are the op's arguments; the output is then multiplied by ``output``."""

    sm_scale: float | None
    kv_scale: Tensor | None
    output: float = 1.0


def scalar(where: str, name: str, scale: Scale, device: torch.device) -> Scale:
    """A number, or a float32 0-d tensor; anything per head is refused."""
    if not isinstance(scale, Tensor):
        if scale is None:
            return None
        number = float(scale)
        finite(where, name, number)
        return number
    if scale.numel() != 1:
        fail(
            UnsupportedError,
            where,
            f"{name} has {scale.numel()} values",
            "one for the whole tensor",
            "scales per head are not supported",
        )
    if seen(scale):
        finite(where, name, float(scale))
    return scale.reshape(()).to(device, torch.float32)


def fold(
    where: str, sm_scale: float | None, head_dim: int, device: torch.device, factors: ScaleFactors
) -> FoldedScales:
    """The softmax scale times all scales of the logits, and the product of those of the output.

    Numbers are folded into ``sm_scale`` and ``output``, tensors into ``kv_scale``, without reading the device.
    """
    logits, values = factors
    if not _given(logits) and not _given(values):
        return FoldedScales(sm_scale, None)
    scale, key = _product([scalar(where, name, s, device) for name, s in logits.items()])
    output, value = _product([scalar(where, name, s, device) for name, s in values.items()])
    if scale != 1.0:
        scale *= 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
        if not BOUNDS["sm_scale"].holds(scale):
            fail(
                OptionError,
                where,
                f"the scales multiply to {scale} ({_names(logits)})",
                "a positive number (2^-126 to 2^126)",
                "change a scale",
            )
        sm_scale = scale
    if not -MAX_SCALAR <= output <= MAX_SCALAR:
        finite(where, f"the product of the output's scales ({_names(values)})", output)
    if key is None and value is None:
        return FoldedScales(sm_scale, None, output)
    one = torch.ones((), dtype=torch.float32, device=device)
    return FoldedScales(sm_scale, torch.stack((one if key is None else key, one if value is None else value)), output)


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
