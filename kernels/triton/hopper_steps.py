"""The steps that the Gluon kernels for Hopper share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .primitives import within

LONGEST_STRIDE = 1 << 20
"""Elements from a token to the next, of which offsets within a block are 32-bit multiples."""


@gluon.jit
def load_page(kv_indices, at, max_pages, num_pages):
    """The pages at ``at`` of the page table, within the cache."""
    page = gl.load(kv_indices + at, mask=within(at, max_pages), other=0)
    return gl.minimum(page.to(gl.uint32), num_pages.to(gl.uint32) - 1).to(gl.int64)
