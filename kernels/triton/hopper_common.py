"""The steps that the Gluon kernels for Hopper share."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_ops.kernels.triton.indexing import within
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

PAIRS = gl.constexpr(64)
"""Pairs of a query row and a head that a warpgroup has, as many as a matrix instruction takes."""

WARPS = gl.constexpr(4)
"""Of a warpgroup."""

OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""The layout of what matrix instructions read from shared memory."""


class Tile(NamedTuple):
    """What a program works on: a work item, and which of its pairs of a query row and a head."""

    row: Any  # the first, of all query rows
    count: Any  # of rows
    position: Any  # of the first row among the keys
    start: Any  # of its keys
    end: Any
    slot: Any  # for the results of a piece, or negative
    first_pair: Any
    first_head: Any


@gluon.jit
def load_page(kv_indices, at, max_pages, num_pages):
    """The pages at ``at`` of the page table, within the cache."""
    page = gl.load(kv_indices + at, mask=within(at, max_pages), other=0)
    return gl.minimum(page.to(gl.uint32), num_pages.to(gl.uint32) - 1).to(gl.int64)


@gluon.jit
def load_item(
    work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages, kv_rows,
    TILE_ROWS: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """``(row, count, begin, end, position, page_start, slot)`` of a work item, within what there is.

    One without rows has rows of no request instead, which see nothing: each such item has its share.
    """
    record, listed = work + item * 8, item < max_items
    row, count = gl.load(record, mask=listed, other=0), gl.load(record + 1, mask=listed, other=0)
    begin, end = gl.load(record + 2, mask=listed, other=0), gl.load(record + 3, mask=listed, other=0)
    position, page_start = gl.load(record + 4, mask=listed, other=0), gl.load(record + 5, mask=listed, other=0)
    slot = gl.load(record + 6, mask=listed, other=-1)
    page_start = gl.maximum(page_start, 0)
    if PAGED:
        end = gl.minimum(end, gl.where(num_pages > 0, gl.maximum(max_pages - page_start, 0), 0) * PAGE_SIZE)
    else:
        end = gl.minimum(end, kv_rows - page_start)
    if count <= 0:
        row = gl.load(qo_indptr + max_batch) + (num_items - 1 - item) * TILE_ROWS
        count, end, slot = rows - row, begin, slot * 0 - 1
    return row, gl.minimum(count, TILE_ROWS), begin, end, position, page_start, slot


@gluon.jit
def locate(tile, first_pair, rows, LAYOUT: gl.constexpr, GROUP: gl.constexpr):
    """``(row of the tile, head of the group, whether there is one)`` of the pairs from ``first_pair`` on."""
    pair = first_pair + gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT))
    tile_row = pair // GROUP
    return tile_row, pair % GROUP, (tile_row < tile.count) & within(tile.row + tile_row, rows)


@gluon.jit
def bounded(begin, end):
    """``begin`` between 0 and ``end``, whatever a plan says; one past ``end`` leaves no keys between them."""
    return gl.maximum(gl.minimum(begin, end), 0)


@gluon.jit
def store_shared(memory, value):
    """Put ``value`` where another warpgroup takes it, once it has been told by an arrival at a barrier."""
    memory.store(value)


@gluon.jit
def load_shared(memory, like):
    """What another warpgroup has left, in the layout of ``like``."""
    return memory.load(like.type.layout)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers, each of which waits for so many split_counters."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers
