"""Prefill on Hopper, in Gluon: one program per work item, KV head and block of the item's pairs of a row and a head.

Warps have roles. One asks the copy engine (TMA) for blocks of keys, which come into a ring in shared memory, as far
ahead as it is long, and one for blocks of values. Two warpgroups attend. They have 64 pairs each or, of a tile that has
no more, they split its KV tiles and reduce at the end. They issue the products
of the queries with the next keys, and of the weights with the last values, before they make weights of the next logits:
the tensor cores work meanwhile.

Packages of AOTInductor do without: they hold Triton alone. Work items and partial results are those of :mod:`.prefill`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
from attn_ops.kernels.triton.hopper_common import (
    OPERAND,
    PAIRS,
    WARPS,
    Tile,
    allocate_barriers,
    bounded,
    load_item,
    load_page,
    load_shared,
    locate,
    store_shared,
)
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import acquire, read_plan_early
from attn_ops.kernels.triton.prefill_call import Operands, prefill_ops
from attn_ops.kernels.triton.softmax import LOG2E, exp2, finite, inverse, join_sink, log_sum_exp, soft_cap
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import PlanProblem, PrefillPlan, num_partials

REGISTERS = gl.constexpr((240, 24))
"""Of a thread that attends, and of one that copies."""

PAGED_BOX, RAGGED_BOX = 16, 32
"""Tokens that are copied at a time, those of a cache all of one page."""

COLUMNS = gl.constexpr(64)
"""Of a box: 128 bytes, as many as are swizzled."""

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))


class Shape(NamedTuple):
    tokens: int  # of a block
    keys: int  # blocks of keys in their ring
    values: int  # and of values in theirs


SHAPES = {
    (64, 0, 64): Shape(128, 4, 4),
    (128, 0, 128): Shape(128, 3, 3),
    (128, 64, 128): Shape(128, 2, 2),
    (256, 0, 256): Shape(64, 3, 2),
}
"""By the widths of the two parts of a key and of a value; a result goes through the first part of the query."""


class Ring(NamedTuple):
    """Blocks of keys or of values on their way, in turn in each stage.

    There are twice as many barriers for what has come as stages, so that each is always waited for by the same one of
    two warpgroups that load_shared turns, and one more.
    """

    parts: Any  # of a row, each [stages, tokens, columns]
    ready: Any
    free: Any


@gluon.jit
def allocate_ring(
    DTYPE: gl.constexpr, STAGES: gl.constexpr, TOKENS: gl.constexpr, DIM: gl.constexpr, DIM_B: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
    parts = allocate_parts(DTYPE, STAGES, TOKENS, DIM, DIM_B)
    return Ring(parts, allocate_barriers(2 * STAGES + 1, 1), allocate_barriers(STAGES, READERS))


@gluon.jit
def advance(number, phase, LENGTH: gl.constexpr, BLOCKS: gl.constexpr):
    """The barrier so many blocks after this one, of ``LENGTH`` in turn, and its parity."""
    over = number >= LENGTH - BLOCKS
    return gl.where(over, number + BLOCKS - LENGTH, number + BLOCKS), gl.where(over, phase ^ 1, phase)


@gluon.jit
def next_ready(ring, number, phase, BLOCKS: gl.constexpr):
    return advance(number, phase, 2 * ring.free.shape[0], BLOCKS)


@gluon.jit
def stage_of(ring, number):
    """The stage that barrier ``number`` of those that are ready is of."""
    STAGES: gl.constexpr = ring.free.shape[0]
    return gl.where(number >= STAGES, number - STAGES, number)


@gluon.jit
def release(ring, stage):
    """Tell that this thread has read a block.

    ``mbarrier.arrive`` tells it for the warpgroup, whose threads wait for each other first. Here each tells it for
    itself, once what it has copied is there, and it copies nothing.
    """
    async_copy.mbarrier_arrive(ring.free.index(stage), increment_count=False)


@gluon.jit
def box_of(blocks, stage, column, number, BOX: gl.constexpr):
    """``[BOX, COLUMNS]`` of a block; in memory all tokens of its first columns come before the next columns."""
    ROWS: gl.constexpr = blocks.shape[1] // BOX
    WIDTH: gl.constexpr = blocks.shape[2] // COLUMNS
    boxes = blocks._reinterpret(blocks.dtype, [blocks.shape[0] * WIDTH * ROWS, BOX, COLUMNS], OPERAND)
    return boxes.index((stage * WIDTH + column) * ROWS + number)


@gluon.jit
def clear_from(blocks, stage, count, BOX: gl.constexpr):
    """Zeros in a block in the rows from ``count`` on, as far as the box goes that they begin in."""
    STEP: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for number in range(count // STEP, (count + BOX - 1) // BOX * (BOX // STEP)):
        there = number * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT)) < count
        for column in gl.static_range(blocks.shape[2] // COLUMNS):
            rows = box_of(blocks, stage, column, number, STEP)
            store_shared(rows, gl.where(there[:, None], rows.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def copy_blocks(
    given, ring, array, kv_head, CLEARS: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """The role of a warp that has blocks copied from ``array [pages, tokens, heads, dim]``, box by box.

    Boxes from ``end`` on are outside of the array: zeros. What follows ``end`` within a box may be anything in memory;
    the warp clears it where that matters, before it tells that the block has come.
    """
    start, end, page_start, kv_indices, kv_rows, max_pages, num_pages = given
    TOKENS: gl.constexpr = ring.parts[0].shape[1]
    BOX: gl.constexpr = array.block_type.shape[1]
    BOXES: gl.constexpr = TOKENS // BOX
    FIRST: gl.constexpr = ring.parts[0].shape[2]
    ROW: gl.constexpr = FIRST if len(ring.parts) == 1 else FIRST + ring.parts[1].shape[2]
    STAGING_BARRIER: gl.constexpr = ring.ready.shape[0] - 1
    stage, phase, number = 0, 1, 0
    for first in range(start, end, TOKENS):
        places = ()
        for i in gl.static_range(BOXES):
            token = first + i * BOX
            if PAGED:
                page = load_page(kv_indices, page_start + token // PAGE_SIZE, max_pages, num_pages).to(gl.int32)
                places += ((page, gl.where(token < end, token % PAGE_SIZE, PAGE_SIZE)),)  # type: ignore[assignment]
            else:
                places += ((0, gl.where(token < end, page_start + token, kv_rows)),)  # type: ignore[assignment]
        clears = (first + TOKENS > end) & ((end - first) % BOX > 0) if CLEARS else False
        told = ring.ready.index(gl.where(clears, STAGING_BARRIER, number))
        mbarrier.wait(ring.free.index(stage), phase)
        mbarrier.expect(told, TOKENS * ROW * 2)
        for part in gl.static_range(len(ring.parts)):
            for i in gl.static_range(BOXES):
                for column in gl.static_range(ring.parts[part].shape[2] // COLUMNS):
                    box = box_of(ring.parts[part], stage, column, i, BOX)
                    box = box._reinterpret(box.dtype, [1, BOX, 1, COLUMNS], BOX_LAYOUT)
                    at = [places[i][0], places[i][1], kv_head, part * FIRST + column * COLUMNS]
                    tma.async_copy_global_to_shared(array, at, told, box)
        if clears:
            mbarrier.wait(told, 0)
            clear_from(ring.parts[0], stage, end - first, BOX)
            mbarrier.arrive(ring.ready.index(number))
        stage, phase = advance(stage, phase, ring.free.shape[0], 1)
        number, _ = next_ready(ring, number, 0, 1)


@gluon.jit
def rows_at(
    tile, first_pair, rows, stride_row, stride_head, DIM: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """``(offsets [PAIRS, DIM], whether there is such a pair)``, of 16 bytes a thread."""
    THREADS: gl.constexpr = DIM // 8  # of a row
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [WARPS, 1], [1, 0])
    tile_row, head, used = locate(tile, first_pair, rows, WIDE, GROUP)
    at = (tile.row + tile_row).to(gl.int64) * stride_row + (tile.first_head + head).to(gl.int64) * stride_head
    return at[:, None] + gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :], used[:, None]


@gluon.jit
def hide(logits, tokens, row_position, end, window_left, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """``logits [pairs, tokens]``, -inf where a row does not see a token."""
    bound = gl.minimum(end, row_position + 1) if CAUSAL else end + 0 * row_position
    visible = tokens[None, :] < bound[:, None]
    if WINDOW:
        visible = visible & (tokens[None, :] >= (row_position - window_left)[:, None])
    return gl.where(visible, logits, float("-inf"))


@gluon.jit
def start_logits(query, warpgroup, keys, stage, LAYOUT: gl.constexpr):
    """The products of the queries with the keys of a stage, part by part, on their way."""
    TOKENS: gl.constexpr = keys[0].shape[1]
    logits = gl.zeros([PAIRS, TOKENS], gl.float32, LAYOUT)
    for part in gl.static_range(len(keys)):
        transposed = keys[part].index(stage).permute([1, 0])
        logits = warpgroup_mma(query[part].index(warpgroup), transposed, logits, use_acc=part > 0, is_async=True)
    return logits


@gluon.jit
def allocate_meeting(SPLIT_KV_OVER_WARPGROUPS: gl.constexpr):
    """``(sums, a barrier for both warpgroups, one for what the second leaves)`` where they meet."""
    if SPLIT_KV_OVER_WARPGROUPS:
        sums = gl.allocate_shared_memory(gl.float32, [2, PAIRS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return sums, allocate_barriers(1, 2), allocate_barriers(1, 1)
    else:  # noqa: RET505  what follows a return is compiled too
        return ()


@gluon.jit
def reduce_warpgroups(warpgroup: gl.constexpr, meeting, values, m, total, acc):
    """The state of both warpgroups, for the first of them; it goes through the ring, once neither needs that."""
    sums, both, given = meeting
    passed = values._reinterpret(gl.float32, acc.type.shape, gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    mbarrier.arrive(both.index(0))
    if warpgroup == 1:
        mbarrier.wait(both.index(0), 0)
        store_shared(passed, acc)
        store_shared(sums.index(0), m)
        store_shared(sums.index(1), total)
        mbarrier.arrive(given.index(0))
    else:
        mbarrier.wait(given.index(0), 0)
        their_m, their_total = load_shared(sums.index(0), m), load_shared(sums.index(1), m)
        top = gl.maximum(m, their_m)
        decay, their_decay = exp2(m - finite(top)), exp2(their_m - finite(top))
        m, total = top, total * decay + their_total * their_decay
        ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc = acc * gl.convert_layout(decay, ROWS)[:, None]
        acc += load_shared(passed, acc) * gl.convert_layout(their_decay, ROWS)[:, None]
    return m, total, acc


@gluon.jit
def store_result(
    m, total, acc, staged, sinks, out, lse, partial, tile, first_pair, rows, slots,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_ROWS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """The state of the pairs from ``first_pair`` on, by way of ``staged``, to its place or to that of a piece."""
    DIM: gl.constexpr = acc.shape[1]
    LOGITS: gl.constexpr = m.type.layout.parent
    VALUES: gl.constexpr = acc.type.layout
    tile_row, head, used = locate(tile, first_pair, rows, LOGITS, GROUP)
    norm = inverse(total)
    if SINKS:  # which pieces store_shared to their merging
        sink = gl.load(sinks + tile.first_head + head, mask=used & (tile.slot < 0), other=float("-inf")) * LOG2E
        m, total, decay = join_sink(m, total, sink)
        norm = inverse(total) * decay
    result = acc * gl.convert_layout(norm, gl.SliceLayout(1, VALUES))[:, None]
    sums = log_sum_exp(m, total)
    if tile.slot >= 0:
        slot_row = tile.slot.to(gl.int64) * TILE_ROWS
        value_row, value_head, value_used = locate(tile, first_pair, rows, VALUES, GROUP)
        value_at = (slot_row + value_row) * NUM_HEADS + tile.first_head + value_head
        value_d = gl.arange(0, DIM, gl.SliceLayout(0, VALUES))
        there = value_used & (tile.slot < slots)
        gl.store(partial + value_at[:, None] * DIM + value_d[None, :], result, mask=there[:, None])
        partial_sums = partial + slots.to(gl.int64) * (TILE_ROWS * NUM_HEADS * DIM)
        sums_at = partial_sums + (slot_row + tile_row) * NUM_HEADS + tile.first_head + head
        gl.store(sums_at, sums, mask=used & (tile.slot < slots))
    else:
        staged.store(result.to(staged.dtype))
        out_at, wanted = rows_at(tile, first_pair, rows, NUM_HEADS * DIM, DIM, DIM, GROUP)
        gl.store(out + out_at, staged.load(out_at.type.layout), mask=wanted)
        if LSE:
            lse_at = (tile.row + tile_row).to(gl.int64) * NUM_HEADS + tile.first_head + head
            gl.store(lse + lse_at, sums, mask=used)


@gluon.jit
def allocate_parts(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, DIM_B: gl.constexpr
):  # fmt: skip
    """Arrays ``[COUNT, ROWS, width]`` for the parts of queries or keys, of which each is a power of two wide."""
    first = gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, DIM], OPERAND)
    if DIM_B == 0:
        return (first,)
    else:  # noqa: RET505  what follows a return is compiled too
        return first, gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, DIM_B], OPERAND)


@gluon.jit
def attend_pairs(
    warpgroup: gl.constexpr, given, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    SPLIT_KV_OVER_WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """The role of a warpgroup that attends: it has its pairs, or in TURNS every other block of keys for all pairs."""
    query, key_ring, value_ring, meeting, q, strides_q, sinks, results, tile, rows, slots, numbers = given
    keys, values = key_ring.parts, value_ring.parts[0]
    out, lse, partial = results
    scale, cap, window_left = numbers
    factor = LOG2E if CAP else scale * LOG2E
    TOKENS: gl.constexpr = values.shape[1]
    DIM: gl.constexpr = values.shape[2]
    DTYPE: gl.constexpr = values.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    TURN: gl.constexpr = warpgroup if SPLIT_KV_OVER_WARPGROUPS else 0
    BLOCKS: gl.constexpr = 2 if SPLIT_KV_OVER_WARPGROUPS else 1
    STEP: gl.constexpr = BLOCKS * TOKENS
    start, end = tile.start + TURN * TOKENS, tile.end
    first_pair = tile.first_pair + (0 if SPLIT_KV_OVER_WARPGROUPS else warpgroup * PAIRS)

    for part in gl.static_range(len(query)):
        q_at, asked = rows_at(tile, first_pair, rows, strides_q[0], strides_q[1], query[part].shape[2], GROUP)
        query[part].index(warpgroup).store(gl.load(q + part * DIM + q_at, mask=asked, other=0.0))
    fence_async_shared()

    row_position = tile.position + locate(tile, first_pair, rows, LOGITS, GROUP)[0]
    first_position = tile.position + first_pair // GROUP
    last_position = tile.position + (first_pair + PAIRS - 1) // GROUP
    n = gl.arange(0, TOKENS, gl.SliceLayout(0, LOGITS))
    m = gl.full([PAIRS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, LOGITS))
    acc = gl.zeros([PAIRS, DIM], gl.float32, VALUES)
    if end > start:
        mbarrier.wait(key_ring.ready.index(TURN), 0)
        logits = warpgroup_mma_wait(0, deps=[start_logits(query, warpgroup, keys, TURN, LOGITS)])
        release(key_ring, TURN)
        if CAP:
            logits = soft_cap(logits * scale, cap)
        logits = hide(logits, start + n, row_position, end, window_left, CAUSAL, WINDOW)
        m = gl.max(logits, 1) * factor
        weight = exp2(logits * factor - finite(m)[:, None])
        total = gl.sum(weight, 1)
        weights = gl.convert_layout(weight.to(DTYPE), WEIGHTS, assert_trivial=True)
        value, value_phase = TURN, 0
        key, key_phase = next_ready(key_ring, TURN, 0, BLOCKS)
        mbarrier.wait(key_ring.ready.index(key), key_phase, pred=start + STEP < end)
        for first in range(start + STEP, end, STEP):
            key_stage, value_stage = stage_of(key_ring, key), stage_of(value_ring, value)
            logits = start_logits(query, warpgroup, keys, key_stage, LOGITS)
            mbarrier.wait(value_ring.ready.index(value), value_phase)
            acc = warpgroup_mma(weights, values.index(value_stage), acc, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])
            release(key_ring, key_stage)
            if CAP:
                logits = soft_cap(logits * scale, cap)
            cut = first + TOKENS > (gl.minimum(end, first_position + 1) if CAUSAL else end)
            if WINDOW:
                cut = cut | (first < last_position - window_left)
            if cut:
                logits = hide(logits, first + n, row_position, end, window_left, CAUSAL, WINDOW)
            top = gl.maximum(m, gl.max(logits, 1) * factor)
            weight = exp2(logits * factor - finite(top)[:, None])
            decay = exp2(m - finite(top))
            m, total = top, total * decay + gl.sum(weight, 1)
            key, key_phase = next_ready(key_ring, key, key_phase, BLOCKS)
            # A wait in a loop of its own keeps the assembler from moving the exponentials after the next one.
            mbarrier.wait(key_ring.ready.index(key), key_phase, pred=first + STEP < end)
            acc = warpgroup_mma_wait(0, deps=[acc])
            release(value_ring, value_stage)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
            weights = gl.convert_layout(weight.to(DTYPE), WEIGHTS, assert_trivial=True)
            value, value_phase = next_ready(value_ring, value, value_phase, BLOCKS)
        mbarrier.wait(value_ring.ready.index(value), value_phase)
        value_stage = stage_of(value_ring, value)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, values.index(value_stage), acc, is_async=True)])

    if SPLIT_KV_OVER_WARPGROUPS:
        m, total, acc = reduce_warpgroups(warpgroup, meeting, values, m, total, acc)
    if not SPLIT_KV_OVER_WARPGROUPS or warpgroup == 0:
        store_result(
            m, total, acc, query[0].index(warpgroup), sinks, out, lse, partial, tile, first_pair, rows, slots,
            NUM_HEADS, GROUP, TILE_ROWS, SINKS, LSE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "rows", "kv_rows", "num_pages", "max_pages", "max_items", "max_batch", "slots")
    ]
)
def prefill_hopper_kernel(
    q,  # [rows, NUM_KV_HEADS * GROUP, DIM + DIM_B]
    k,  # [num_pages, PAGE_SIZE, NUM_KV_HEADS, DIM + DIM_B] or [1, kv_rows, ...], for the copy engine
    v,  # the same with DIM
    sinks,  # [NUM_KV_HEADS * GROUP], not read unless SINKS
    out,  # [rows, NUM_KV_HEADS * GROUP, DIM]
    lse,  # [rows, NUM_KV_HEADS * GROUP] or [0]
    partial,  # [slots, TILE_ROWS, NUM_KV_HEADS * GROUP, DIM], then the same without DIM
    qo_indptr,  # [max_batch + 1]; this and those below are not read for a single request
    kv_indices,  # [max_pages]
    work,  # [max_items, 8]
    scale,
    cap,
    window_left,
    rows,
    kv_rows,
    num_pages,
    max_pages,
    max_items,
    max_batch,
    slots,
    stride_q_row,
    stride_q_head,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,  # of a value, and of the first part of a key
    DIM_B: gl.constexpr,  # of its second part, or 0
    PAGE_SIZE: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    PLANNED: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    PDL: gl.constexpr,
    TOKENS: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    SPLIT_KV_OVER_WARPGROUPS: gl.constexpr = TILE_ROWS * GROUP <= PAIRS
    M: gl.constexpr = PAIRS if SPLIT_KV_OVER_WARPGROUPS else 2 * PAIRS
    BLOCKS: gl.constexpr = (TILE_ROWS * GROUP + M - 1) // M
    item, num_items = gl.program_id(0) // (NUM_KV_HEADS * BLOCKS), gl.num_programs(0) // (NUM_KV_HEADS * BLOCKS)
    kv_head = gl.program_id(0) // BLOCKS % NUM_KV_HEADS
    first_pair = gl.program_id(0) % BLOCKS * M
    if PLANNED:
        if PDL:
            acquire()
        row, count, begin, end, position, page_start, slot = load_item(
            work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages, kv_rows,
            TILE_ROWS, PAGED, PAGE_SIZE,
        )  # fmt: skip
    else:
        row = (num_items - 1 - item) * TILE_ROWS
        count, begin, end = gl.minimum(rows - row, TILE_ROWS), row * 0, kv_rows
        # A slot of -1 is a constant, on which Triton 3.6 fails.
        position, page_start, slot = kv_rows - rows + row, row * 0, -1 - rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_row, last_row = first_pair // GROUP, gl.minimum((first_pair + M - 1) // GROUP, count - 1)
    if first_row > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)
    if WINDOW:
        begin = gl.maximum(begin, position + first_row - window_left)
    BOX: gl.constexpr = k.block_type.shape[1]
    start = bounded(begin // BOX * BOX if PAGED else begin, end)

    DTYPE: gl.constexpr = q.dtype.element_ty
    query = allocate_parts(DTYPE, 2, PAIRS, DIM, DIM_B)
    READERS: gl.constexpr = 32 * WARPS * (1 if SPLIT_KV_OVER_WARPGROUPS else 2)
    keys = allocate_ring(DTYPE, KEYS, TOKENS, DIM, DIM_B, READERS)
    values = allocate_ring(DTYPE, VALUES, TOKENS, DIM, 0, READERS)
    meeting = allocate_meeting(SPLIT_KV_OVER_WARPGROUPS)
    tile = Tile(row, count, position, start, end, slot, first_pair, kv_head * GROUP)
    attended = (
        query, keys, values, meeting, q, (stride_q_row, stride_q_head), sinks, (out, lse, partial),
        tile, rows, slots, (scale, cap, window_left),
    )  # fmt: skip
    copied = (start, end, page_start, kv_indices, kv_rows, max_pages, num_pages)
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    gl.warp_specialize(
        [
            (
                attend_pairs,
                (0, attended, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, SPLIT_KV_OVER_WARPGROUPS),
            ),
            (
                attend_pairs,
                (1, attended, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, SPLIT_KV_OVER_WARPGROUPS),
            ),
            (copy_blocks, (copied, keys, k, kv_head, False, PAGED, PAGE_SIZE)),
            (copy_blocks, (copied, values, v, kv_head, True, PAGED, PAGE_SIZE)),
        ],
        [WARPS, 1, 1],
        [REGISTERS[0], REGISTERS[1], REGISTERS[1]],
    )


def described(t: Tensor, strides: tuple[int, int, int], page_size: int, x: Operands) -> TensorDescriptor:
    """Keys or values as ``[pages, tokens, heads, dim]``; ragged ones are one page."""
    pages, tokens, stride = (t.shape[0], page_size, strides[0]) if page_size else (1, x.kv_rows, x.kv_rows * strides[1])
    shape, box = [pages, tokens, x.heads[1], t.shape[-1]], PAGED_BOX if page_size else RAGGED_BOX
    return TensorDescriptor(t, shape, [stride, *strides[1:], 1], [1, box, 1, COLUMNS.value], BOX_LAYOUT.value)


def launch_tiles(
    x: Operands,
    out: Tensor,
    lse: Tensor,
    plan: PrefillPlan | None,
    workspace: Tensor | None,
    tile_rows: int,
    num_items: int,
    o: AttentionOptions,
) -> None:
    """Launch the Hopper kernel (:data:`.prefill_call.LaunchTiles`)."""
    (num_heads, num_kv_heads), (dim, dim_b, _) = x.heads, x.dims
    group = num_heads // num_kv_heads
    pdl = starts_early(out) if plan is None else read_plan_early(out, plan.kv_len.shape[0])
    paged = plan is not None and plan.kv_indices.shape[0] > 0
    page_size = 1 if plan is None else PlanProblem.of(plan.problem).page_size
    k, v = (described(*t, page_size if paged else 0, x) for t in ((x.k, x.k_strides), (x.v, x.v_strides)))
    capacities = (0,) * 4
    if plan is not None:
        capacities = plan.kv_indices.shape[0], plan.work.shape[0], plan.kv_len.shape[0], num_partials(plan)
    launch(
        prefill_hopper_kernel,
        (num_items * num_kv_heads * triton.cdiv(tile_rows * group, 2 * PAIRS.value),),
        (
            *(x.q, k, v, lse if o.sinks is None else o.sinks, out, lse, lse if workspace is None else workspace),
            *((lse,) * 3 if plan is None else (plan.qo_indptr, plan.kv_indices, plan.work)),
        ),
        (
            *(o.sm_scale or 1 / math.sqrt(dim + dim_b), o.logits_soft_cap, min(o.window_left, 1 << 30)),
            *(x.q.shape[0], x.kv_rows, x.k.shape[0], *capacities),
        ),
        x.q.stride()[:2],
        (
            *(num_kv_heads, group, dim, dim_b, page_size, tile_rows, plan is not None, paged),
            *(o.causal, o.window_left >= 0, o.logits_soft_cap > 0, o.sinks is not None, lse.dim() > 1, pdl),
            *SHAPES[x.dims],
        ),
        Options(WARPS.value, launch_pdl=pdl),
    )


batch_prefill, ragged_prefill, single_prefill = prefill_ops(launch_tiles)
