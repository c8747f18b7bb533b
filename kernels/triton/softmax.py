"""The steps that the kernels share, each with a name.

A *state* of attention is ``(m, total, acc)``: the largest base-2 logit, the sum of ``2^(logit - m)``, and the
sum of ``2^(logit - m) * value``. An empty state is ``(m, 0, 0)``, m being -inf or :data:`LOWEST`, and no step makes
a NaN of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

LOWEST = tl.constexpr(-3.0e38)
"""The largest logit of an empty state: finite, so that no step ever takes -inf from -inf."""

CHUNK, LOG_CHUNK = 512, 9
"""Requests that a program looks through at a time."""


def padded(size: int) -> int:
    """The power of 2 that a block of ``size`` elements, or of none, takes."""
    return max(1, triton.next_power_of_2(size))


if triton.knobs.runtime.interpret:

    @triton.jit
    def exp2(x):
        return tl.exp2(x)

else:

    @triton.jit
    def exp2(x):
        """``2^x`` in one instruction; what would be denormal is 0."""
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def publish(stored):
    """Let kernels that read before they wait see what this program has stored, one integer of it at ``stored``."""
    tl.debug_barrier()
    tl.atomic_add(stored, 0, sem="release")


@triton.jit
def acquire():
    """Let this program read what kernels that have ended have published, before it waits for the last of them."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def finite(m):
    """``m`` where there is a largest logit, 0 where there is none, so that ``logit - m`` is never inf - inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def soft_cap(logits, cap):
    """``cap * tanh(logits / cap)``, by an exponential that cannot overflow."""
    decay = exp2(tl.abs(logits) * (-2.0 * LOG2E / cap))
    magnitude = cap * ((1.0 - decay) / (1.0 + decay))
    return tl.where(logits < 0.0, -magnitude, magnitude)


@triton.jit
def join_sink(m, total, sink):
    """``(m, total, decay)``: a base-2 logit of value 0 in each state but empty ones, and what acc is multiplied by."""
    top = tl.where(total > 0.0, tl.maximum(m, sink), m)
    decay = tl.exp2(m - finite(top))
    return top, total * decay + tl.where(total > 0.0, tl.exp2(sink - finite(top)), 0.0), decay


@triton.jit
def add_sink(m, total, acc, sink):
    """The states ``(m [P], total [P], acc [P, D])`` with a base-2 logit of value 0 in each; empty ones stay empty."""
    top, total, decay = join_sink(m, total, sink)
    return top, total, acc * decay[:, None]


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
    return tl.cast(index, tl.uint32) < tl.cast(size, tl.uint32)


@triton.jit
def count_at_most(values, x, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """How many of the ascending ``values [SIZE]`` are at most each of ``x``: a binary search by gathers."""
    count = tl.zeros_like(x)
    for i in tl.static_range(LOG_SIZE + 1):
        probe = count + (SIZE >> i)
        value = tl.gather(values, tl.minimum(probe, SIZE) - 1, 0)
        count = tl.where((probe <= SIZE) & (value <= x), probe, count)
    return count


@triton.jit
def find_segment(ends, sizes, x, total, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """``(whether, which, offset)``: the segment of ``[SIZE]`` that holds each of ``x``, and where in it.

    The segments lie on one line from ``total`` on; ``ends`` are the inclusive sums of their ``sizes``.
    """
    passed = count_at_most(ends, x, SIZE, LOG_SIZE)
    which = tl.minimum(passed, SIZE - 1)
    return (x >= total) & (passed < SIZE), which, x - tl.gather(ends - sizes, which, 0)
