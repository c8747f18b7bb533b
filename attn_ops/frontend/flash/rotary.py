"""Rotary embeddings from tables of cosines and sines, as ``flash_attn_with_kvcache`` applies them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import optional_flags
from attn_ops.eager.checked_call import call_op
from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import ArgumentTypeError, DTypeError, PageTableError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import required
from attn_ops.frontend.autocast import joined
from attn_ops.frontend.flash.cache import CacheBatch, CacheLengths
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import seen
from attn_ops.plan.state import INT32_MAX


class Rotary(NamedTuple):
    """Cosines and sines ``[max_position, rotary_dim / 2]`` of one floating dtype, on the query's device.

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
            fail(ArgumentTypeError, where, f"{missing} is missing", "both tables or none", f"pass {missing}")
        for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
            if t.dim() != 2 or t.shape != cos.shape or not 0 < 2 * t.shape[1] <= head_dim or not t.shape[0]:
                fail(
                    ShapeError,
                    where,
                    f"{name} is {shape_of(t)}",
                    f"[max_position, rotary_dim / 2] with rows, rotary_dim at most {int(head_dim)}, of both tables",
                    "correct it",
                )
            if not t.is_floating_point():
                fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "float", "convert it")
            check_no_grad(where, **{name: t})
        return cls(cos.to(device), sin.to(device), interleaved)

    def check(self, where: str, positions: Tensor) -> None:
        """Raise if positions on the host are beyond the tables. Positions on a device are clamped to the last row."""
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
            first, second = torch.unflatten(rotated, -1, (half, 2)).unbind(-1)
        else:
            first, second = rotated.split(half, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        out = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return joined(torch.cat, (out.to(x.dtype), rest), -1)


def rotate(
    where: str,
    rotary: Rotary,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    batch: CacheBatch,
    lengths_before: CacheLengths,
    options: AttentionOptions,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Rotate the query and the new keys. Returns the rotated query, and the rotated keys with their values.

    New tokens of a request have positions from its length in ``lengths_before`` on. Row i of the query has the position
    of new token i if a mask compares positions; otherwise all rows have the position of new token 0.
    """
    ((k, v),) = required(where, k=new)
    if k.shape[-1] != k_cache.shape[-1]:
        shown = f"k has head_dim {int(k.shape[-1])}"
        fail(ShapeError, where, shown, f"{int(k_cache.shape[-1])} as in k_cache", "make them agree")
    starts = lengths_before.before(where, batch.requests, INT32_MAX, q.device)
    by_row = options.causal or batch.chunk > 0 or max(options.window_left, options.window_right) >= 0
    qo_indptr, new_indptr = batch.qo_indptr(where), batch.new_indptr(where)

    def positions_of(indptr: Tensor, rows: int, steps: bool) -> Tensor:
        request, position = call_op("batch_indices_positions", indptr, starts + indptr.diff(), rows)
        return position if steps else starts[request.clamp(min=0)]

    of_q, of_k = positions_of(qo_indptr, batch.rows, by_row), positions_of(new_indptr, batch.appended, True)
    for positions in (of_k, of_q):
        rotary.check(where, positions)
    return rotary.apply(q, of_q), (rotary.apply(k, of_k), v)
