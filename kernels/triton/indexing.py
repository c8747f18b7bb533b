"""Bounds of indices, and sizes of blocks."""

from __future__ import annotations

import triton
import triton.language as tl


def padded(size: int) -> int:
    """The power of 2 that a block of ``size`` elements takes, 1 for no elements."""
    return max(1, triton.next_power_of_2(size))


@triton.jit
def within(index, size):
    """``0 <= index < size`` in one comparison; both are int32."""
    return tl.cast(index, tl.uint32) < tl.cast(size, tl.uint32)
