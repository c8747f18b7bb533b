"""What a warp-specialised Gluon kernel for Hopper is made of: layouts, work items, barriers, packed rows.

Packed row ``p`` of a query tile is query row ``p // GROUP`` of the tile and head ``p % GROUP`` of the KV head's group
(PackGQA). A consumer warpgroup computes :data:`PACKED_ROWS` of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_ops.kernels.triton.image import tensor_descriptor
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.work_item import (
    WORK_KV_BEGIN,
    WORK_KV_END,
    WORK_PAGE_START,
    WORK_POSITION,
    WORK_ROW,
    WORK_ROWS,
    WORK_SLOT,
    WORK_STRIDE,
)
from torch import Tensor
from torch._subclasses import FakeTensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

PACKED_ROWS = gl.constexpr(64)
"""Packed rows of a consumer warpgroup: M of one warpgroup matrix instruction (WGMMA)."""

WARPS = gl.constexpr(4)
"""Warps of a warpgroup."""

OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Shared-memory layout of a matrix that WGMMA reads: ``[rows, columns]`` of 16-bit elements, swizzled by 128 bytes."""


class QueryTile(NamedTuple):
    """The work of one CTA: the packed rows of a work item from ``first_packed_row`` on, and its KV range."""

    row: Any  # first query row of the work item in q
    count: Any  # query rows of the work item
    position: Any  # of the first query row in the KV sequence
    start: Any  # first KV token that is loaded
    end: Any  # one past the last KV token
    slot: Any  # of the partial result in the workspace, negative without a split
    first_packed_row: Any
    first_head: Any  # of the KV head's group


@gluon.jit
def load_page(kv_indices, index, max_pages, num_pages):
    """The page number at ``index`` of the page table, as int64 and always a page of the cache."""
    page = gl.load(kv_indices + index, mask=within(index, max_pages), other=0)
    return gl.minimum(page.to(gl.uint32), num_pages.to(gl.uint32) - 1).to(gl.int64)


@gluon.jit
def load_work_item(
    work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages,
    TILE_ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """``(row, count, kv_begin, kv_end, position, page_start, slot)`` of a work item, bounded by the capacities.

    A work item without rows returns a tile of the query rows that follow the last request's, without keys: the kernel
    writes 0 there, and an LSE of -inf or that of the sink. Such items divide these rows among them.
    """
    record, listed = work + item * WORK_STRIDE, item < max_items
    row = gl.load(record + WORK_ROW, mask=listed, other=0)
    count = gl.load(record + WORK_ROWS, mask=listed, other=0)
    kv_begin = gl.load(record + WORK_KV_BEGIN, mask=listed, other=0)
    kv_end = gl.load(record + WORK_KV_END, mask=listed, other=0)
    position = gl.load(record + WORK_POSITION, mask=listed, other=0)
    page_start = gl.load(record + WORK_PAGE_START, mask=listed, other=0)
    slot = gl.load(record + WORK_SLOT, mask=listed, other=-1)
    page_start = gl.maximum(page_start, 0)
    kv_end = gl.minimum(kv_end, gl.where(num_pages > 0, gl.maximum(max_pages - page_start, 0), 0) * PAGE_SIZE)
    if count <= 0:
        row = gl.load(qo_indptr + max_batch) + (num_items - 1 - item) * TILE_ROWS
        count, kv_end, slot = rows - row, gl.minimum(kv_begin, 0), slot * 0 - 1
    return row, gl.minimum(count, TILE_ROWS), kv_begin, kv_end, position, page_start, slot


@gluon.jit
def locate_packed_rows(tile, first_packed_row, rows, LAYOUT: gl.constexpr, GROUP: gl.constexpr):
    """``(tile_row, head_in_group, exists)``, ``[PACKED_ROWS]`` each, of the packed rows from ``first_packed_row`` on.

    ``exists`` is False for padding rows, which are neither loaded nor stored. ``rows`` are the rows of q.
    """
    packed_row = first_packed_row + gl.arange(0, PACKED_ROWS, gl.SliceLayout(1, LAYOUT))
    tile_row = packed_row // GROUP
    return tile_row, packed_row % GROUP, (tile_row < tile.count) & within(tile.row + tile_row, rows)


@gluon.jit
def clamp_begin(begin, end):
    """``begin`` in ``[0, end]``, whatever the plan contains: an empty range otherwise starts at its end."""
    return gl.maximum(gl.minimum(begin, end), 0)


@gluon.jit
def store_shared(memory, value):
    """Write ``value`` for another warpgroup, which reads it after this one has arrived on a barrier."""
    memory.store(value)


@gluon.jit
def load_shared(memory, like):
    """What another warpgroup wrote with :func:`store_shared`, in the layout of ``like``."""
    return memory.load(like.type.layout)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """``NUMBER`` mbarriers in phase 0, each of which completes a phase after ``ARRIVALS`` arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


def describe(t: Tensor, shape: list[Any], strides: list[Any], box: list[int], layout: Any) -> TensorDescriptor:
    """The tensor map of ``t`` as ``shape`` and ``strides`` in elements, with boxes of ``box``."""
    if isinstance(t, FakeTensor):
        return tensor_descriptor(TensorDescriptor, t, shape, strides, box, layout)
    return TensorDescriptor(t, shape, strides, box, layout)
