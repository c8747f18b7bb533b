"""Prefill on Hopper, in Gluon: one program per work item, KV head and block of the item's pairs of a row and a head.

Warpgroups have roles. One copies blocks of keys and values into a ring in shared memory, as far ahead as it is
long. The others have 64 pairs each or, of a tile that has no more, take turns at its blocks of keys and add up what
they have at the end. They issue the products of the queries with the next keys, and of the weights with the last
values, before they make weights of the next logits: the tensor cores work meanwhile.

Packages of AOTInductor do without: they hold Triton alone. Work items and partial results are those of :mod:`.prefill`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...plan import PlanProblem, PrefillPlan, num_pieces
from .hopper_steps import (
    LONGEST_STRIDE,
    OPERAND,
    PAIRS,
    WARPS,
    Tile,
    aligned,
    allocate_barriers,
    bounded,
    leave,
    load_item,
    load_page,
    locate,
    take,
)
from .launch import Options, launch, starts_early
from .primitives import LOG2E, exp2, finite, inverse, join_sink, log_sum, soft_cap

if TYPE_CHECKING:
    from .prefill import Operands
    from .prefill import Options as AttentionOptions

REGISTERS = gl.constexpr(504)
"""Of three threads, one of each warpgroup, as Triton hands them out."""

COPY_REGISTERS = gl.constexpr(40)
"""Of a thread that copies without a page table; those that attend share the rest."""


class Shape(NamedTuple):
    """Two blocks at least in each ring: the next keys are waited for before the last values are free, but in turns."""

    tokens: int  # of a block
    keys: int  # blocks of keys in their ring
    values: int  # and of values in theirs
    paged_copy_registers: int  # of a thread that copies with a page table


SHAPES = {
    (64, 0, 64): Shape(128, 4, 4, 56),
    (128, 0, 128): Shape(128, 3, 3, 56),
    (128, 64, 128): Shape(128, 2, 2, 40),
    (256, 0, 256): Shape(64, 3, 2, 40),
}
"""By the widths of the two parts of a key and of a value; a result goes through the first part of the query."""


@gluon.jit
def copy_block(
    block, free, phase, cache, kv_indices, page_start, first, end, max_pages, num_pages, stride_page,
    STRIDE: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Start to copy ``block [tokens, dim]`` from token ``first`` on, once it is free; zeros from ``end`` on.

    Eight threads copy 128 bytes of a token at a time; each has a run of tokens, of which the page is looked up once.
    """
    TOKENS: gl.constexpr = block.shape[0]
    RUN: gl.constexpr = TOKENS // (4 * WARPS)
    COPY: gl.constexpr = gl.BlockedLayout([RUN, 8], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    RUNS: gl.constexpr = gl.BlockedLayout([1, RUN], [4, 8], [WARPS, 1], [1, 0])
    token = first + gl.arange(0, TOKENS // RUN, gl.SliceLayout(1, RUNS)) * RUN
    if PAGED:
        page = load_page(kv_indices, page_start + token // PAGE_SIZE, max_pages, num_pages)
        run = page * stride_page + token % PAGE_SIZE * STRIDE
    else:
        run = (page_start + token).to(gl.int64) * STRIDE
    i = gl.arange(0, RUN, gl.SliceLayout(0, RUNS))
    row = gl.reshape(run[:, None] + (i * STRIDE)[None, :], [TOKENS])
    row = gl.convert_layout(row, ROWS, assert_trivial=True)
    there = gl.reshape(token[:, None] + i[None, :] < end, [TOKENS])
    there = gl.convert_layout(there, ROWS, assert_trivial=True)
    d = gl.arange(0, block.shape[1], gl.SliceLayout(0, COPY))
    at = gl.multiple_of(cache + row[:, None] + d[None, :], [1, 16])  # bytes, which the compiler does not know
    mbarrier.wait(free, phase)
    async_copy.async_copy_global_to_shared(block, at, mask=there[:, None])


@gluon.jit
def copy_blocks(
    given, STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr
):  # fmt: skip
    """The role of the warpgroup that copies."""
    keys, values, ready, free, k, v, kv_indices, page_start, start, end, max_pages, num_pages, strides_page = given
    ready_k, ready_v = ready
    free_k, free_v = free
    TOKENS: gl.constexpr = values.shape[1]
    key, key_phase, value, value_phase = 0, 1, 0, 1
    for first in range(start, end, TOKENS):
        for part in gl.static_range(len(keys)):
            copy_block(
                keys[part].index(key), free_k.index(key), key_phase, k + part * keys[0].shape[2], kv_indices,
                page_start, first, end, max_pages, num_pages, strides_page[0], STRIDE_K, PAGED, PAGE_SIZE,
            )  # fmt: skip
        async_copy.mbarrier_arrive(ready_k.index(key), increment_count=False)
        copy_block(
            values.index(value), free_v.index(value), value_phase, v, kv_indices, page_start, first, end, max_pages,
            num_pages, strides_page[1], STRIDE_V, PAGED, PAGE_SIZE,
        )  # fmt: skip
        async_copy.mbarrier_arrive(ready_v.index(value), increment_count=False)
        key, key_phase = advance(key, key_phase, free_k, 1)
        value, value_phase = advance(value, value_phase, free_v, 1)


@gluon.jit
def advance(stage, phase, barriers, BLOCKS: gl.constexpr):
    """The stage of a ring so many blocks after this one, and the parity of its barriers."""
    STAGES: gl.constexpr = barriers.shape[0]
    over = stage >= STAGES - BLOCKS
    return gl.where(over, stage + BLOCKS - STAGES, stage + BLOCKS), gl.where(over, phase ^ 1, phase)


@gluon.jit
def rows_at(
    tile, first_pair, rows, stride_row, stride_head, DIM: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """``(offsets [PAIRS, DIM], whether there is such a pair)``, of 16 bytes a thread."""
    THREADS: gl.constexpr = DIM // 8  # of a row
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [WARPS, 1], [1, 0])
    tile_row, head, used = locate(tile, first_pair, rows, WIDE, GROUP)
    at = (tile.row + tile_row).to(gl.int64) * stride_row + (tile.first_head + head) * stride_head
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
def allocate_meeting(TURNS: gl.constexpr):
    """``(sums, a barrier for both warpgroups, one for what the second leaves)`` where they meet."""
    if TURNS:
        sums = gl.allocate_shared_memory(gl.float32, [2, PAIRS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return sums, allocate_barriers(1, 2), allocate_barriers(1, 1)
    else:  # noqa: RET505  what follows a return is compiled too
        return ()


@gluon.jit
def meet(warpgroup: gl.constexpr, meeting, values, m, total, acc):
    """The state of both warpgroups, for the first of them; it goes through the ring, once neither needs that."""
    sums, both, given = meeting
    passed = values._reinterpret(gl.float32, acc.type.shape, gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    mbarrier.arrive(both.index(0))
    if warpgroup == 1:
        mbarrier.wait(both.index(0), 0)
        leave(passed, acc)
        leave(sums.index(0), m)
        leave(sums.index(1), total)
        mbarrier.arrive(given.index(0))
    else:
        mbarrier.wait(given.index(0), 0)
        their_m, their_total = take(sums.index(0), m), take(sums.index(1), m)
        top = gl.maximum(m, their_m)
        decay, their_decay = exp2(m - finite(top)), exp2(their_m - finite(top))
        m, total = top, total * decay + their_total * their_decay
        ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc = acc * gl.convert_layout(decay, ROWS)[:, None]
        acc += take(passed, acc) * gl.convert_layout(their_decay, ROWS)[:, None]
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
    if SINKS:  # which pieces leave to their merging
        sink = gl.load(sinks + tile.first_head + head, mask=used & (tile.slot < 0), other=float("-inf")) * LOG2E
        m, total, decay = join_sink(m, total, sink)
        norm = inverse(total) * decay
    result = acc * gl.convert_layout(norm, gl.SliceLayout(1, VALUES))[:, None]
    sums = log_sum(m, total)
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
    TURNS: gl.constexpr,
):  # fmt: skip
    """The role of a warpgroup that attends: it has its pairs, or in TURNS every other block of keys for all pairs."""
    query, keys, values, ready, free, meeting, q, strides_q, sinks, results, tile, rows, slots, numbers = given
    out, lse, partial = results
    scale, cap, window_left = numbers
    factor = LOG2E if CAP else scale * LOG2E
    TOKENS: gl.constexpr = values.shape[1]
    DIM: gl.constexpr = values.shape[2]
    DTYPE: gl.constexpr = values.dtype
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ready_k, ready_v = ready
    free_k, free_v = free
    TURN: gl.constexpr = warpgroup if TURNS else 0
    BLOCKS: gl.constexpr = 2 if TURNS else 1
    STEP: gl.constexpr = BLOCKS * TOKENS
    start, end = tile.start + TURN * TOKENS, tile.end
    first_pair = tile.first_pair + (0 if TURNS else warpgroup * PAIRS)

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
        mbarrier.wait(ready_k.index(TURN), 0)
        fence_async_shared()
        logits = warpgroup_mma_wait(0, deps=[start_logits(query, warpgroup, keys, TURN, LOGITS)])
        mbarrier.arrive(free_k.index(TURN))
        if CAP:
            logits = soft_cap(logits * scale, cap)
        logits = hide(logits, start + n, row_position, end, window_left, CAUSAL, WINDOW)
        m = gl.max(logits, 1) * factor
        weight = exp2(logits * factor - finite(m)[:, None])
        total = gl.sum(weight, 1)
        weights = gl.convert_layout(weight.to(DTYPE), WEIGHTS, assert_trivial=True)
        value, value_phase = TURN, 0
        key, key_phase = advance(TURN, 0, free_k, BLOCKS)
        mbarrier.wait(ready_k.index(key), key_phase, pred=start + STEP < end)
        for first in range(start + STEP, end, STEP):
            fence_async_shared()
            logits = start_logits(query, warpgroup, keys, key, LOGITS)
            mbarrier.wait(ready_v.index(value), value_phase)
            fence_async_shared()
            acc = warpgroup_mma(weights, values.index(value), acc, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])
            mbarrier.arrive(free_k.index(key))
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
            key, key_phase = advance(key, key_phase, free_k, BLOCKS)
            # A wait in a loop of its own keeps the assembler from moving the exponentials after the next one.
            if TURNS:  # the next keys may come after what takes the place of these values
                mbarrier.wait(ready_v.index(value), value_phase)
            else:
                mbarrier.wait(ready_k.index(key), key_phase, pred=first + STEP < end)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free_v.index(value))
            if TURNS:
                mbarrier.wait(ready_k.index(key), key_phase, pred=first + STEP < end)
            acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
            weights = gl.convert_layout(weight.to(DTYPE), WEIGHTS, assert_trivial=True)
            value, value_phase = advance(value, value_phase, free_v, BLOCKS)
        mbarrier.wait(ready_v.index(value), value_phase)
        fence_async_shared()
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, values.index(value), acc, is_async=True)])

    if TURNS:
        m, total, acc = meet(warpgroup, meeting, values, m, total, acc)
    if not TURNS or warpgroup == 0:
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
    k,  # [num_pages, ...] of pages of PAGE_SIZE tokens, or [kv_rows, ...], as the strides say
    v,
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
    stride_k_page,
    stride_k_head,
    stride_v_page,
    stride_v_head,
    STRIDE_K: gl.constexpr,  # of a token
    STRIDE_V: gl.constexpr,
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
    PAGED_COPY: gl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TURNS: gl.constexpr = TILE_ROWS * GROUP <= PAIRS
    M: gl.constexpr = PAIRS if TURNS else 2 * PAIRS
    BLOCKS: gl.constexpr = (TILE_ROWS * GROUP + M - 1) // M
    item, num_items = gl.program_id(0) // (NUM_KV_HEADS * BLOCKS), gl.num_programs(0) // (NUM_KV_HEADS * BLOCKS)
    kv_head = gl.program_id(0) // BLOCKS % NUM_KV_HEADS
    first_pair = gl.program_id(0) % BLOCKS * M
    if PLANNED:
        row, count, begin, end, position, page_start, slot = load_item(
            work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages, kv_rows,
            TILE_ROWS, PAGED, PAGE_SIZE,
        )  # fmt: skip
    else:
        row = (num_items - 1 - item) * TILE_ROWS
        count, begin, end = gl.minimum(rows - row, TILE_ROWS), row * 0, kv_rows
        # A slot of -1 is a constant, on which Triton 3.6 fails.
        position, page_start, slot = kv_rows - rows + row, row * 0, -1 - rows
    first_row, last_row = first_pair // GROUP, gl.minimum((first_pair + M - 1) // GROUP, count - 1)
    if first_row > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)
    if WINDOW:
        begin = gl.maximum(begin, position + first_row - window_left)
    start = bounded(begin // 16 * 16 if PAGED else begin, end)

    DTYPE: gl.constexpr = q.dtype.element_ty
    query = allocate_parts(DTYPE, 2, PAIRS, DIM, DIM_B)
    keys = allocate_parts(DTYPE, KEYS, TOKENS, DIM, DIM_B)
    values = gl.allocate_shared_memory(DTYPE, [VALUES, TOKENS, DIM], OPERAND)
    ready = (allocate_barriers(KEYS, 32 * WARPS), allocate_barriers(VALUES, 32 * WARPS))
    READERS: gl.constexpr = 1 if TURNS else 2
    free = (allocate_barriers(KEYS, READERS), allocate_barriers(VALUES, READERS))
    meeting = allocate_meeting(TURNS)
    k += kv_head.to(gl.int64) * stride_k_head
    v += kv_head.to(gl.int64) * stride_v_head
    tile = Tile(row, count, position, start, end, slot, first_pair, kv_head * GROUP)
    strides_page = (stride_k_page, stride_v_page)
    attended = (
        query, keys, values, ready, free, meeting, q, (stride_q_row, stride_q_head), sinks, (out, lse, partial),
        tile, rows, slots, (scale, cap, window_left),
    )  # fmt: skip
    copied = (
        keys, values, ready, free, k, v, kv_indices, page_start, start, end, max_pages, num_pages, strides_page
    )  # fmt: skip
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    COPY: gl.constexpr = PAGED_COPY if PAGED else COPY_REGISTERS
    gl.warp_specialize(
        [
            (attend_pairs, (0, attended, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, TURNS)),
            (attend_pairs, (1, attended, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, TURNS)),
            (copy_blocks, (copied, STRIDE_K, STRIDE_V, PAGED, PAGE_SIZE)),
        ],
        [WARPS, WARPS],
        [(REGISTERS - COPY) // 2, COPY],
    )


def objections(x: Operands, plan: PrefillPlan | None, tile_rows: int, o: AttentionOptions) -> list[str]:
    """Why the kernel does not run this call, which is then left to the general one."""
    tensors, strides = (x.q, x.k, x.v), (*x.q.stride()[:2], *x.k_strides, *x.v_strides)
    in_units = aligned(*tensors) and not any(stride % 8 for stride in strides)
    page_size = PlanProblem.of(plan.problem).page_size if plan is not None and plan.kv_indices.shape[0] else 0
    longest = max(x.k_strides[1], x.v_strides[1])
    checks = [
        (x.q.dtype in (torch.float16, torch.bfloat16), f"{x.q.dtype} is not a 16-bit dtype"),
        (x.k.dtype == x.q.dtype, f"the cache is {x.k.dtype}"),
        (x.dims in SHAPES and not x.shared, f"heads are {x.dims} wide"),
        (page_size % 16 == 0, f"pages of {page_size} are not whole runs of 16 tokens"),
        (in_units, "rows are not aligned to 16 bytes"),
        (longest <= LONGEST_STRIDE and page_size * longest < 1 << 31, "tokens are too far apart"),
        (o.mask is None and o.pos_encoding == "NONE", "a mask or positions are given"),
        (o.kv_scale is None, "scales of keys and values are given"),
    ]
    return [reason for ok, reason in checks if not ok]


def run(
    x: Operands,
    out: Tensor,
    lse: Tensor,
    plan: PrefillPlan | None,
    workspace: Tensor | None,
    tile_rows: int,
    num_items: int,
    o: AttentionOptions,
) -> None:
    """Write ``out`` and, unless it has no elements, ``lse``, or the pieces of the tiles that are split."""
    (num_heads, num_kv_heads), (dim, dim_b, _) = x.heads, x.dims
    group = num_heads // num_kv_heads
    pdl = starts_early(out)
    paged = plan is not None and plan.kv_indices.shape[0] > 0
    capacities = (0,) * 4
    if plan is not None:
        capacities = plan.kv_indices.shape[0], plan.work.shape[0], plan.kv_len.shape[0], num_pieces(plan)
    launch(
        prefill_hopper_kernel,
        (num_items * num_kv_heads * triton.cdiv(tile_rows * group, 2 * PAIRS.value),),
        (
            *(x.q, x.k, x.v, lse if o.sinks is None else o.sinks, out, lse, lse if workspace is None else workspace),
            *((lse,) * 3 if plan is None else (plan.qo_indptr, plan.kv_indices, plan.work)),
        ),
        (
            *(o.sm_scale or 1 / math.sqrt(dim + dim_b), o.logits_soft_cap, min(o.window_left, 1 << 30)),
            *(x.q.shape[0], x.kv_rows, x.k.shape[0], *capacities),
        ),
        (*x.q.stride()[:2], x.k_strides[0], x.k_strides[2], x.v_strides[0], x.v_strides[2]),
        (
            *(x.k_strides[1], x.v_strides[1], num_kv_heads, group, dim, dim_b),
            *(1 if plan is None else PlanProblem.of(plan.problem).page_size, tile_rows, plan is not None, paged),
            *(o.causal, o.window_left >= 0, o.logits_soft_cap > 0, o.sinks is not None, lse.dim() > 1, pdl),
            *SHAPES[x.dims],
        ),
        Options(WARPS.value, launch_pdl=pdl),
    )
