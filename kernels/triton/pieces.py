"""The pieces of a decode row: states of some heads, which one program stores and another merges."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import LOWEST, exp2, inverse, log_sum


@triton.jit
def store_heads(out, lse, m, norm, value, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """The states ``(m, norm, value)`` of the heads at ``at``."""
    result = (value * inverse(norm)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d, result, mask=mask[:, None] & (d < DIM))
    if LSE:
        tl.store(lse + at, log_sum(m, norm), mask=mask)


@triton.jit
def load_pieces(
    partial, slots, first, stop, heads, mask, d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """``s [PIECES, heads]`` and ``v [PIECES, heads, d]`` of the slots ``[first, stop)``, empty states past them.

    They are read past this multiprocessor's cache: others wrote them.
    """
    slot = first + tl.arange(0, PIECES)
    at, here = slot[:, None].to(tl.int64) * NUM_HEADS + heads, (slot < stop)[:, None] & mask
    sums = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM)
    s = tl.load(sums + at, mask=here, other=float("-inf"), cache_modifier=".cg")
    at, here = at[:, :, None] * DIM + d, here[:, :, None] & (d < DIM)
    return s, tl.load(partial + at, mask=here, other=0.0, cache_modifier=".cg")


@triton.jit
def absorb(m, total, acc, s, v):
    """The state of each head with those of more pieces."""
    top = tl.maximum(m, tl.max(s, 0))
    decay, weight = exp2(m - top), exp2(s - top)
    return top, total * decay + tl.sum(weight, 0), acc * decay[:, None] + tl.sum(weight[:, :, None] * v, 0)


@triton.jit
def merge_pieces(
    partial, slots, first, stop, heads, mask, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The state of the heads of a row whose pieces are in the slots ``[first, stop)``, mostly few."""
    m = tl.full((heads.shape[0],), LOWEST, tl.float32)
    total = tl.zeros((heads.shape[0],), tl.float32)
    acc = tl.zeros((heads.shape[0], d.shape[0]), tl.float32)
    few_s, few_v = load_pieces(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, FEW)
    for i in range(first + FEW, stop, MANY):
        s, v = load_pieces(partial, slots, i, stop, heads, mask, d, NUM_HEADS, DIM, MANY)
        m, total, acc = absorb(m, total, acc, s, v)
    return absorb(m, total, acc, few_s, few_v)
