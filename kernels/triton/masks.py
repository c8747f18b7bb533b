"""Masks: which keys a query row sees by a packed custom mask, the causal bound and the window (docs/guide/masks.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_ops.kernels.triton.context import tokens_before
from attn_ops.plan.plan_checks import MAX_KV_TOKENS

MAX_POSITION = tl.constexpr(MAX_KV_TOKENS)
"""Bound of the position of a query row in the KV."""


@triton.jit
def mask_offset(qo_indptr, kv_len, request, max_batch, BLOCK: tl.constexpr):
    """The byte at which the mask of ``request`` begins. The mask of every request is padded to whole bytes."""
    total = tl.zeros((BLOCK,), tl.int64)
    stop = tl.minimum(request, max_batch)
    for first in range(0, stop, BLOCK):
        b = first + tl.arange(0, BLOCK)
        begin, end = tl.load(qo_indptr + b, mask=b < stop, other=0), tl.load(qo_indptr + b + 1, mask=b < stop, other=0)
        bits = (end - begin).to(tl.int64) * tl.load(kv_len + b, mask=b < stop, other=0)
        total += (bits + 7) // 8
    return tl.sum(total, 0)


@triton.jit
def mask_bits(mask, offset, row, length, tokens, mask_bytes):
    """bool ``[rows, tokens]``: bit ``row * length + token`` from byte ``offset`` on, False outside of the mask."""
    bit = row.to(tl.int64)[:, None] * length + tokens[None, :]
    byte = offset + (bit >> 3)
    bits = tl.load(mask + byte, mask=(byte >= 0) & (byte < mask_bytes), other=0)
    return ((bits >> (bit & 7).to(tl.uint8)) & 1) > 0


@triton.jit
def causal_or_window(
    tokens, position, window_left, window_right, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RIGHT: tl.constexpr
):
    """bool ``[rows, tokens]``: the tokens that rows at ``position [rows]`` of the KV sequence see."""
    distance = position[:, None] - tokens[None, :]
    visible = distance >= -(1 << 30)
    if CAUSAL:
        visible = distance >= 0
    if RIGHT:
        visible = distance >= -window_right
    if WINDOW:
        visible = visible & (distance <= window_left)
    return visible


@triton.jit
def end_of_window(end, position, window_right, SHARD: tl.constexpr):
    """``min(end, position + 1 + window_right)`` without overflow of int32; with ranks, in this rank's tokens."""
    if SHARD.WORLD == 1:
        return position + 1 + tl.minimum(window_right, end - (position + 1))
    else:  # noqa: RET505  what follows a return is compiled too
        behind = position + 1 + tl.minimum(window_right, -(position + 1) + MAX_POSITION)
        return tl.minimum(end, tokens_before(behind, SHARD))


@triton.jit
def full_blocks(
    begin, end, first_position, last_position, window_left, window_right,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RIGHT: tl.constexpr, BLOCK: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """``(first, stop, blocks)`` of the KV tiles of BLOCK tokens from ``begin`` on: ``[first, stop)`` need no mask.

    ``blocks`` counts all KV tiles. ``first_position`` and ``last_position``: positions of the first and the last row.
    """
    blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK)
    seen_by_all = tl.minimum(end, tokens_before(first_position + 1, SHARD)) if CAUSAL else end
    if RIGHT:
        seen_by_all = end_of_window(end, first_position, window_right, SHARD)
    stop = tl.maximum(seen_by_all - begin, 0) // BLOCK
    if WINDOW:
        seen_by_last = tokens_before(last_position - window_left, SHARD)
        first = tl.minimum(tl.cdiv(tl.maximum(seen_by_last - begin, 0), BLOCK), blocks)
    else:
        first = blocks * 0
    return first, tl.maximum(stop, first), blocks
