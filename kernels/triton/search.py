"""Binary search in a sorted block of registers."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK, LOG_CHUNK = 512, 9
"""Requests in the block that a program of ``page_table`` or ``packbits`` searches at a time, and its logarithm."""


@triton.jit
def count_at_most(values, x, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """How many of the ascending ``values [SIZE]`` are at most each of ``x``; ``SIZE == 1 << LOG_SIZE``."""
    count = tl.zeros_like(x)
    for i in tl.static_range(LOG_SIZE + 1):
        probe = count + (SIZE >> i)
        value = tl.gather(values, tl.minimum(probe, SIZE) - 1, 0)
        count = tl.where((probe <= SIZE) & (value <= x), probe, count)
    return count


@triton.jit
def find_segment(ends, sizes, x, first, SIZE: tl.constexpr, LOG_SIZE: tl.constexpr):
    """``(found, segment, offset)``: which of ``SIZE`` consecutive segments holds each of ``x``, and where in it.

    The first segment begins at ``first``; ``ends`` are the inclusive sums of ``sizes`` from ``first`` on. Where
    ``found`` is False, ``x`` is in none of them and the other two results mean nothing.
    """
    passed = count_at_most(ends, x, SIZE, LOG_SIZE)
    segment = tl.minimum(passed, SIZE - 1)
    return (x >= first) & (passed < SIZE), segment, x - tl.gather(ends - sizes, segment, 0)
