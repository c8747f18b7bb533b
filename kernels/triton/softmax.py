"""Online softmax: the steps that the attention and combine kernels share, for Triton and for Gluon code.

Logits are in base 2: they are multiplied by :data:`LOG2E`. The online-softmax state of a row, ``(m, l, acc)`` in
papers, is

row_max  the largest logit so far
row_sum  sum of ``2^(logit - row_max)``
acc      sum of ``2^(logit - row_max) * value``

The state of a row that has seen no key is ``(row_max, 0, 0)`` with a row_max of -inf or :data:`LOWEST`. No step turns
it into NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-3.0e38)
"""The row_max of an empty state in kernels without :func:`finite`: ``-inf - LOWEST`` is -inf, not NaN."""


if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

else:

    @triton.jit
    def exp2(x):
        """``2^x`` in one instruction. It flushes denormal results to 0; ``tl.exp2`` keeps them in three more."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def finite(row_max):
    """``row_max``, or 0 where it is -inf, so that ``logit - row_max`` is never ``-inf - -inf``."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def online_softmax_update(
    row_max, row_sum, logits, factor,
    MASKED: tl.constexpr = True, FTZ: tl.constexpr = True, SUM_LANES: tl.constexpr = True,
):  # fmt: skip
    """``(row_max, row_sum, p, alpha)`` after one more KV tile; then ``acc = acc * alpha + p @ v``.

    ``p = 2^(logits * factor - row_max)`` are the probabilities before division by row_sum. ``alpha`` rescales what was
    summed relative to the old row_max: ``2^(old - new)``.

    row_max    ``[rows]``, or ``[1]`` for the logits of one row
    row_sum    as row_max; as ``logits`` unless SUM_LANES
    logits     ``[rows, tokens]``, or ``[tokens]`` of one row; -inf where a row does not see a token
    factor     scale of the logits, 1.0 if they are scaled
    MASKED     a row may not have seen any token so far, with a row_max of -inf
    FTZ        use :func:`exp2`, not ``tl.exp2``
    SUM_LANES  sum p over the tile; otherwise row_sum is a partial sum for each column, to be summed after the mainloop
    """
    new_max = tl.maximum(row_max, max_of_rows(logits) * factor)
    anchor = finite(new_max) if MASKED else new_max
    difference = logits * factor - as_column(anchor, logits)
    p = exp2(difference) if FTZ else tl.exp2(difference)
    alpha = exp2(row_max - anchor) if FTZ else tl.exp2(row_max - anchor)
    row_sum = row_sum * alpha + sum_of_rows(p) if SUM_LANES else row_sum * as_column(alpha, logits) + p
    return new_max, row_sum, p, alpha


@triton.jit
def max_of_rows(x):
    """``[rows]`` of ``x [rows, tokens]``, ``[1]`` of ``x [tokens]``."""
    return tl.max(x, 0, keep_dims=True) if len(x.shape) == 1 else tl.max(x, 1)


@triton.jit
def sum_of_rows(x):
    """``[rows]`` of ``x [rows, tokens]``, ``[1]`` of ``x [tokens]``."""
    return tl.sum(x, 0, keep_dims=True) if len(x.shape) == 1 else tl.sum(x, 1)


@triton.jit
def as_column(of_rows, x):
    """``of_rows``, one number for each row of ``x``, in a shape that broadcasts over the tokens of ``x``."""
    return of_rows if len(x.shape) == 1 else of_rows[:, None]


@triton.jit
def combine(max_a, sum_a, max_b, sum_b, MASKED: tl.constexpr = True, FTZ: tl.constexpr = True):
    """``(row_max, row_sum, alpha_a, alpha_b)`` of two states over disjoint keys.

    Then ``acc = acc_a * alpha_a + acc_b * alpha_b``. MASKED and FTZ are those of :func:`online_softmax_update`. A
    normalized output and its LSE are a state with a row_sum of 1.
    """
    row_max = tl.maximum(max_a, max_b)
    anchor = finite(row_max) if MASKED else row_max
    alpha_a = exp2(max_a - anchor) if FTZ else tl.exp2(max_a - anchor)
    alpha_b = exp2(max_b - anchor) if FTZ else tl.exp2(max_b - anchor)
    return row_max, sum_a * alpha_a + sum_b * alpha_b, alpha_a, alpha_b


@triton.jit
def soft_cap(logits, cap):
    """``cap * tanh(logits / cap)``, by an exponential that cannot overflow."""
    e = exp2(tl.abs(logits) * (-2.0 * LOG2E / cap))
    magnitude = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(logits < 0.0, -magnitude, magnitude)


@triton.jit
def join_sink(row_max, row_sum, sink):
    """``(row_max, row_sum, alpha)`` with the base-2 logit ``sink`` of value 0 in every row that has seen a key."""
    new_max = tl.where(row_sum > 0.0, tl.maximum(row_max, sink), row_max)
    alpha = tl.exp2(row_max - finite(new_max))
    return new_max, row_sum * alpha + tl.where(row_sum > 0.0, tl.exp2(sink - finite(new_max)), 0.0), alpha


@triton.jit
def add_sink(row_max, row_sum, acc, sink):
    """The state ``(row_max [rows], row_sum [rows], acc [rows, dim])`` with a sink as in :func:`join_sink`."""
    row_max, row_sum, alpha = join_sink(row_max, row_sum, sink)
    return row_max, row_sum, acc * alpha[:, None]


@triton.jit
def log_sum_exp(row_max, row_sum):
    """The base-2 LSE of a state, -inf if it is empty."""
    return row_max + tl.log2(row_sum)


@triton.jit
def inverse(row_sum):
    """``1 / row_sum``, and 0 for an empty state."""
    return tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)
