"""Scales of query, keys and values: numbers are folded, tensors go to the op (docs/guide/fp8.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.errors import OptionError, UnsupportedError
from attn_ops.frontend.arguments import fail

Scale = float | Tensor | None


class Scales(NamedTuple):
    """``sm_scale`` and ``kv_scale`` are the op's arguments; the output is then multiplied by ``output``."""

    sm_scale: float | None
    kv_scale: Tensor | None
    output: float = 1.0


def scalar(where: str, name: str, scale: Scale, device: torch.device) -> Scale:
    """A number, or a float32 0-d tensor; anything per head is refused."""
    if not isinstance(scale, Tensor):
        return None if scale is None else float(scale)
    if scale.numel() != 1:
        fail(
            UnsupportedError,
            where,
            f"{name} has {scale.numel()} values",
            "one for the whole tensor",
            "scales per head are not supported",
        )
    return scale.reshape(()).to(device, torch.float32)


def fold(
    where: str,
    sm_scale: float | None,
    head_dim: int,
    device: torch.device,
    logits: dict[str, Scale],
    values: dict[str, Scale],
) -> Scales:
    """The softmax scale times all of ``logits``, and the output scale times all of ``values``."""
    if not _given(logits) and not _given(values):
        return Scales(sm_scale, None)
    scale, key = _product([scalar(where, name, s, device) for name, s in logits.items()])
    output, value = _product([scalar(where, name, s, device) for name, s in values.items()])
    if scale != 1.0:
        scale *= 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
        if scale <= 0:
            fail(OptionError, where, f"the scales multiply to {scale}", "more than 0", "change a scale")
        sm_scale = scale
    if key is None and value is None:
        return Scales(sm_scale, None, output)
    one = torch.ones((), dtype=torch.float32, device=device)
    return Scales(sm_scale, torch.stack((one if key is None else key, one if value is None else value)), output)


def _given(scales: dict[str, Scale]) -> bool:
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
