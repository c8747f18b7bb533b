"""The steps that the Gluon kernels for Hopper share."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses import FakeTensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...repeat import ALIGNMENT
from .primitives import within

LONGEST_STRIDE = 1 << 20
"""Elements from a token to the next, of which offsets within a block are 32-bit multiples."""


def aligned(*tensors: Tensor) -> bool:
    """Whether their first elements are at multiples of 16 bytes, as far as they have a place."""
    return all(isinstance(t, FakeTensor) or not t.data_ptr() & ALIGNMENT for t in tensors)


@gluon.jit
def load_page(kv_indices, at, max_pages, num_pages):
    """The pages at ``at`` of the page table, within the cache."""
    page = gl.load(kv_indices + at, mask=within(at, max_pages), other=0)
    return gl.minimum(page.to(gl.uint32), num_pages.to(gl.uint32) - 1).to(gl.int64)
