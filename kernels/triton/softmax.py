"""Online softmax: the steps that the attention and combine kernels share.

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
def empty_state(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``(row_max [ROWS], row_sum [ROWS], acc [ROWS, COLUMNS])`` of rows that have seen no key."""
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    return row_max, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)


@triton.jit
def finite(row_max):
    """``row_max``, or 0 where it is -inf, so that ``logit - row_max`` is never ``-inf - -inf``."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def rescale_factor(old_max, new_max):
    """alpha: ``2^(old_max - new_max)``, which makes sums relative to ``new_max`` of sums relative to ``old_max``.

    Both may be -inf, for rows that have seen no key; alpha is then 0, and the sums are 0.
    """
    return tl.exp2(old_max - finite(new_max))


@triton.jit
def online_softmax_update(
    row_max, row_sum, logits, factor,
    MASKED: tl.constexpr = True, FTZ: tl.constexpr = True, SUM_LANES: tl.constexpr = True,
):  # fmt: skip
    """``(row_max, row_sum, p, alpha)`` after one more KV tile; then ``acc = acc * alpha + p @ v``.

    row_max    ``[rows]``
    row_sum    ``[rows]``, or ``[rows, tokens]`` unless SUM_LANES
    logits     ``[rows, tokens]``, -inf where a row does not see a token
    factor     scale of the logits, 1.0 if they are scaled
    MASKED     a row may have seen no token so far, with a row_max of -inf
    FTZ        use :func:`exp2`, not ``tl.exp2``
    SUM_LANES  sum p over the tile; otherwise row_sum is a partial sum for each column, to be summed after the mainloop
    """
    # Written out instead of calling functions: Triton's line info has a level for every inlined function, and
    # ptxas allocates registers differently for each, in the prefill kernel of sm_100 a third of the stack.
    new_max = tl.maximum(row_max, tl.max(logits, 1) * factor)
    anchor = finite(new_max) if MASKED else new_max
    difference = logits * factor - anchor[:, None]
    p = exp2(difference) if FTZ else tl.exp2(difference)
    alpha = exp2(row_max - anchor) if FTZ else tl.exp2(row_max - anchor)
    row_sum = row_sum * alpha + tl.sum(p, 1) if SUM_LANES else row_sum * alpha[:, None] + p
    return new_max, row_sum, p, alpha


@triton.jit
def combine(max_a, sum_a, max_b, sum_b):
    """``(row_max, row_sum, alpha_a, alpha_b)`` of two states over disjoint keys, with a row_max of LOWEST or more.

    Then ``acc = acc_a * alpha_a + acc_b * alpha_b``. A normalized output is the acc, and its LSE the row_max, of a
    state with a row_sum of 1.
    """
    row_max = tl.maximum(max_a, max_b)
    alpha_a, alpha_b = exp2(max_a - row_max), exp2(max_b - row_max)
    return row_max, sum_a * alpha_a + sum_b * alpha_b, alpha_a, alpha_b


@triton.jit
def combine_splits(row_max, row_sum, lse):
    """``(row_max, row_sum, alpha, split_alpha)`` of a row's state ``[1]`` and partial results with ``lse [splits]``.

    Then ``acc = acc * alpha + sum(split_alpha * partial)``.
    """
    new_max = tl.maximum(row_max, tl.max(lse, 0, keep_dims=True))
    alpha, split_alpha = rescale_factor(row_max, new_max), rescale_factor(lse, new_max)
    return new_max, row_sum * alpha + tl.sum(split_alpha, 0, keep_dims=True), alpha, split_alpha


@triton.jit
def soft_cap(logits, cap):
    """``cap * tanh(logits / cap)``, by an exponential that cannot overflow."""
    e = exp2(tl.abs(logits) * (-2.0 * LOG2E / cap))
    magnitude = cap * ((1.0 - e) / (1.0 + e))
    return tl.where(logits < 0.0, -magnitude, magnitude)


@triton.jit
def add_sink(row_max, row_sum, acc, sink):
    """The state ``(row_max [rows], row_sum [rows], acc [rows, dim])`` with the base-2 logit ``sink`` of value 0.

    A row that has seen no key then has the LSE ``sink``. A sink of -inf changes nothing.
    """
    new_max = tl.maximum(row_max, sink)
    alpha = rescale_factor(row_max, new_max)
    return new_max, row_sum * alpha + rescale_factor(sink, new_max), acc * alpha[:, None]


@triton.jit
def log_sum_exp(row_max, row_sum):
    """The base-2 LSE of a state, -inf if it is empty."""
    return row_max + tl.log2(row_sum)


@triton.jit
def inverse(row_sum):
    """``1 / row_sum``, and 0 for an empty state."""
    return tl.where(row_sum > 0.0, 1.0 / row_sum, 0.0)


@triton.jit
def saturate(value, DTYPE: tl.constexpr):
    """float32 ``value`` in DTYPE. A number beyond the range of an FP8 dtype becomes its largest, and NaN stays NaN."""
    if DTYPE.is_fp8():
        LARGEST: tl.constexpr = 57344.0 if DTYPE == tl.float8e5 else 448.0  # noqa: SIM300
        value = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    return value.to(DTYPE)
