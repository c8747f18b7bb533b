"""The allocator of the C library keeps memory that is freed.

By default, glibc gives a large block back to the system, which fills the next one with zeros, page by page. That was a
quarter of the time of tests with large tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import os

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # of malloc.h
MMAP_BYTES, TRIM_BYTES = 1 << 30, (1 << 31) - 1


def install() -> None:
    """For this process, and those that tests start."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES), "MALLOC_TRIM_THRESHOLD_": str(TRIM_BYTES)}
