"""Positional encodings inside attention (docs/guide/masks.md)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotation_partner(d, DIM: tl.constexpr):
    """The dimension that ``d`` is rotated with: ``d`` plus or minus half the head."""
    return tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)


@triton.jit
def sin_cos(turns):
    """``(sin, cos)`` of ``2 pi turns``, by Taylor series at half the angle, which is at most a quarter turn.

    About as accurate as the library functions in float32. Those also handle huge angles, which takes most of the
    compile time.
    """
    x = (turns - tl.floor(turns + 0.5)) * 3.141592653589793
    y = x * x
    sin = 1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880 + y * (-1 / 39916800 + y / 6227020800)))))
    cos = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * (-1 / 3628800 + y / 479001600)))))
    sin *= x
    return 2.0 * sin * cos, 1.0 - 2.0 * sin * sin


@triton.jit
def angles(position, pair, log2_theta, inverse_scale, DIM: tl.constexpr):
    """``(sin, cos) [tokens, pairs]`` of the ROPE_LLAMA angles of dimension pairs ``pair`` at ``position [tokens]``."""
    exponent = pair.to(tl.float32) * (tl.cast(log2_theta, tl.float32) * (-2.0 / DIM))
    frequency = tl.exp2(exponent) * (tl.cast(inverse_scale, tl.float32) * 0.15915494309189535)
    return sin_cos(position.to(tl.float32)[:, None] * frequency[None, :])


@triton.jit
def rotate(x, partner, position, d, log2_theta, inverse_scale, DIM: tl.constexpr):
    """ROPE_LLAMA of ``x [tokens, d]`` in float32; ``partner`` is x at :func:`rotation_partner`."""
    sin, cos = angles(position, d % (DIM // 2), log2_theta, inverse_scale, DIM)
    sign = tl.where(d < DIM // 2, -1.0, 1.0)
    return x.to(tl.float32) * cos + partner.to(tl.float32) * (sin * sign[None, :])


@triton.jit
def add_angles(sin_a, cos_a, sin_b, cos_b):
    """``(sin, cos)`` of the sums of two angles: fewer instructions than :func:`sin_cos`."""
    return sin_a * cos_b + cos_a * sin_b, cos_a * cos_b - sin_a * sin_b


@triton.jit
def rotate_halves(low, high, sin, cos):
    """:func:`rotate` of the dimensions in halves, ``low`` and ``high``, by the angles of their pairs."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def alibi_slopes(head, LOG2_HEADS: tl.constexpr):
    """ALiBi slopes: powers of ``2^(-8 / n)`` for the first ``n = 2^LOG2_HEADS`` heads, then the powers halfway between.

    n is the largest power of 2 that is at most the number of heads.
    """
    n: tl.constexpr = 1 << LOG2_HEADS
    head = head.to(tl.float32)
    return tl.where(head < n, tl.exp2(-8.0 / n * (head + 1.0)), tl.exp2(-4.0 / n * (2.0 * (head - n) + 1.0)))
