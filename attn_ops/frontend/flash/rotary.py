"""Rotary embeddings from tables of cosines and sines, as ``flash_attn_with_kvcache`` applies them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import (
    ArgumentError,
    DTypeError,
    PageTableError,
    ShapeError,
    dtype_name,
    fail,
    shape_of,
)
from attn_ops.frontend.autocast import joined
from attn_ops.plan.page_table import seen
from attn_ops.typed import optional_flags


class Rotary(NamedTuple):
    """Tables ``[max_position, rotary_dim / 2]`` of one floating dtype, on the query's device.

    ``interleaved``: dimension 2i is paired with 2i + 1, else i with i + rotary_dim / 2. Dimensions from rotary_dim on
    are not rotated.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(
        cls, where: str, cos: Tensor | None, sin: Tensor | None, interleaved: bool, head_dim: int, device: torch.device
    ) -> Rotary | None:
        """The checked tables, None without them."""
        optional_flags(where, rotary_interleaved=interleaved)
        if cos is None and sin is None:
            return None
        if cos is None or sin is None:
            missing = "rotary_cos" if cos is None else "rotary_sin"
            fail(ArgumentError, where, f"{missing} is missing", "both tables or none", f"pass {missing}")
        for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
            if t.dim() != 2 or t.shape != cos.shape or not 0 < 2 * t.shape[1] <= head_dim or not t.shape[0]:
                fail(
                    ShapeError,
                    where,
                    f"{name} is {shape_of(t)}",
                    f"[max_position, rotary_dim / 2] with rows, rotary_dim at most {head_dim}, of both tables",
                    "correct it",
                )
            if not t.is_floating_point():
                fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "float", "convert it")
            check_no_grad(where, **{name: t})
        return cls(cos.to(device), sin.to(device), interleaved)

    def check(self, where: str, positions: Tensor) -> None:
        """Raise if positions on the host are beyond the tables. Others are limited to the last row."""
        rows = self.cos.shape[0]
        if seen(positions) and positions.numel() and int(positions.max()) >= rows:
            fail(
                PageTableError,
                where,
                f"a token has position {int(positions.max())} and the rotary tables {rows} rows",
                f"positions below {rows}",
                "pass longer tables",
            )

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [rows, heads, head_dim]`` at ``positions [rows]``, computed in float32, in the dtype of ``x``."""
        index = positions.clamp(0, self.cos.shape[0] - 1).long()
        cos, sin = (t[index].float()[:, None] for t in (self.cos, self.sin))
        half = self.cos.shape[1]
        rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
        if self.interleaved:
            first, second = rotated.unflatten(-1, (half, 2)).unbind(-1)
        else:
            first, second = rotated.split(half, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        out = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return joined(torch.cat, (out.to(x.dtype), rest), -1)
