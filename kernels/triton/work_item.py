"""Work items and split tiles of a plan as kernels read and write them: rows of int32 with named columns.

A kernel reads column ``WORK_SLOT`` of ``item`` at ``work + item * WORK_STRIDE + WORK_SLOT``. No function loads
a row or a slot: Inductor's mutation analysis takes what a function returns for an alias of the pointers that it was
given, and would find that a kernel that stores at such a row writes to ``work``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_ops.plan.state import SPLIT_TILE_FIELDS, WORK_FIELDS

WORK_STRIDE = tl.constexpr(len(WORK_FIELDS))
"""Elements from one work item to the next."""

WORK_ROW = tl.constexpr(WORK_FIELDS.index("row"))
WORK_ROWS = tl.constexpr(WORK_FIELDS.index("rows"))
WORK_KV_BEGIN = tl.constexpr(WORK_FIELDS.index("kv_begin"))
WORK_KV_END = tl.constexpr(WORK_FIELDS.index("kv_end"))
WORK_POSITION = tl.constexpr(WORK_FIELDS.index("position"))
WORK_PAGE_START = tl.constexpr(WORK_FIELDS.index("page_start"))
WORK_SLOT = tl.constexpr(WORK_FIELDS.index("slot"))
WORK_REQUEST = tl.constexpr(WORK_FIELDS.index("request"))

SPLIT_TILE_STRIDE = tl.constexpr(len(SPLIT_TILE_FIELDS))
"""Elements from one split tile to the next."""

SPLIT_TILE_ROW = tl.constexpr(SPLIT_TILE_FIELDS.index("row"))
SPLIT_TILE_ROWS = tl.constexpr(SPLIT_TILE_FIELDS.index("rows"))
SPLIT_TILE_SLOT = tl.constexpr(SPLIT_TILE_FIELDS.index("slot"))
SPLIT_TILE_SLOTS = tl.constexpr(SPLIT_TILE_FIELDS.index("slots"))


@triton.jit
def store_work_item(work, item, row, rows, kv_begin, kv_end, position, page_start, slot, request, mask):
    """Write the columns of each ``item``; the values have the shape of ``item``."""
    at = work + item * WORK_STRIDE
    tl.store(at + WORK_ROW, row, mask=mask)
    tl.store(at + WORK_ROWS, rows, mask=mask)
    tl.store(at + WORK_KV_BEGIN, kv_begin, mask=mask)
    tl.store(at + WORK_KV_END, kv_end, mask=mask)
    tl.store(at + WORK_POSITION, position, mask=mask)
    tl.store(at + WORK_PAGE_START, page_start, mask=mask)
    tl.store(at + WORK_SLOT, slot, mask=mask)
    tl.store(at + WORK_REQUEST, request, mask=mask)


@triton.jit
def store_work_items_wide(work, item, row, rows, kv_begin, kv_end, position, page_start, slot, request, mask):
    """:func:`store_work_item` of ``item [ITEMS]`` in wide stores, for which threads exchange columns: faster for many.

    Each ``tl.join`` appends the fastest dimension, hence the order of columns: 0, 4, 2, 6 and 1, 5, 3, 7.
    """
    tl.static_assert(WORK_STRIDE == 8)
    even = tl.join(tl.join(row, position), tl.join(kv_begin, slot))
    odd = tl.join(tl.join(rows, page_start), tl.join(kv_end, request))
    record = tl.reshape(tl.join(even, odd), (item.shape[0], WORK_STRIDE))
    tl.store(work + item[:, None] * WORK_STRIDE + tl.arange(0, WORK_STRIDE), record, mask=mask[:, None])


@triton.jit
def store_split_tile(split_tiles, index, row, rows, slot, slots, mask):
    """Write the columns of each split tile ``index``."""
    at = split_tiles + index * SPLIT_TILE_STRIDE
    tl.store(at + SPLIT_TILE_ROW, row, mask=mask)
    tl.store(at + SPLIT_TILE_ROWS, rows, mask=mask)
    tl.store(at + SPLIT_TILE_SLOT, slot, mask=mask)
    tl.store(at + SPLIT_TILE_SLOTS, slots, mask=mask)
