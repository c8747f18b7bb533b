"""The steps that the kernels share, each with a name.

A *state* of attention is ``(m, total, acc)``: the largest base-2 logit, the sum of ``2^(logit - m)``, and the
sum of ``2^(logit - m) * value``. An empty state is ``(-inf, 0, 0)`` and no step makes a NaN of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite(m):
    """``m`` where there is a largest logit, 0 where there is none, so that ``logit - m`` is never inf - inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def soft_cap(logits, cap):
    """``cap * tanh(logits / cap)`` by an exponential that saturates instead of overflowing into NaN."""
    return cap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def add_sink(m, total, acc, sink):
    """The states ``(m [P], total [P], acc [P, D])`` with a base-2 logit of value 0 in each; empty ones stay empty."""
    top = tl.where(m > float("-inf"), tl.maximum(m, sink), m)
    decay = tl.exp2(m - finite(top))
    return top, total * decay + tl.exp2(tl.where(m > float("-inf"), sink, top) - finite(top)), acc * decay[:, None]


@triton.jit
def log_sum(m, total):
    """Base-2 LSE of a state, ``-inf`` if it is empty."""
    return m + tl.log2(total)


@triton.jit
def inverse(total):
    """``1 / total``, and 0 for an empty state."""
    return tl.where(total > 0.0, 1.0 / total, 0.0)


@triton.jit
def within(index, size):
    """``0 <= index < size`` in one comparison."""
    return index.to(tl.uint32) < size.to(tl.uint32)


@triton.jit
def count_at_most(values, x, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """How many of the ascending ``values [SIZE]`` are at most each of ``x``: a binary search by gathers."""
    count = tl.zeros_like(x)
    for i in tl.static_range(LOG_SIZE + 1):
        probe = count + (SIZE >> i)
        value = tl.gather(values, tl.minimum(probe, SIZE) - 1, 0)
        count = tl.where((probe <= SIZE) & (value <= x), probe, count)
    return count
