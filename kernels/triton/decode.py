"""``attn::batch_decode``: split-KV decode over the work list of a plan, then a combine of the partial results.

The kernel is persistent. The programs of CTA ``c`` of the plan, one for each KV head and block of query heads, run the
work items ``cta_indptr[c]`` to ``cta_indptr[c + 1]``; neighbouring programs read the same tokens of neighbouring heads.
All items of a program form one software pipeline: the mainloop iterates over KV tiles and advances to the next item
behind the last tile of an item, so that the loads of the next item are in flight before the last one is stored. A query
that is rotated, or converted for an FP8 cache (:mod:`.fp8`), is so once per item.

On Hopper a program reads its work items and first page numbers before the preceding kernel finishes (:mod:`.pdl`).

Partial results are combined by a kernel of its own (:mod:`.combine_decode`) in traced graphs and captures. In eager
calls, where every launch costs host time, the last program to store a split of a row combines them (``COMBINE``); in a
graph that would take longer, since the other programs have nothing to do meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.kernels.triton.combine_decode import combine_slots, store_heads
from attn_ops.kernels.triton.context import token_position, tokens_before
from attn_ops.kernels.triton.fp8 import float16_scale, unpack
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import constexpr_table
from attn_ops.kernels.triton.pdl import acquire
from attn_ops.kernels.triton.rope_alibi import add_angles, alibi_slopes, angles, rotate_halves
from attn_ops.kernels.triton.softmax import LOG2E, LOWEST, add_sink, online_softmax_update, soft_cap
from attn_ops.kernels.triton.work_item import (
    WORK_KV_BEGIN,
    WORK_KV_END,
    WORK_PAGE_START,
    WORK_POSITION,
    WORK_ROW,
    WORK_SLOT,
    WORK_STRIDE,
)

BLOCK_ITEMS = tl.constexpr(32)
"""Work items that a program looks at in one step, before and after its mainloop."""

NO_INDEX = tl.constexpr(2**31 - 1)
"""Larger than every row and work item: the minimum over an empty set."""


@constexpr_table
class Shape(NamedTuple):
    """Sizes of the problem."""

    NUM_KV_HEADS: int
    GROUP: int  # query heads per KV head
    DIM_QK: int
    DIM_VO: int
    PAGE_SIZE: int  # tokens
    RANK: int = 0  # RANK, WORLD and INTERLEAVE: as in :class:`.context.Shard`
    WORLD: int = 1
    INTERLEAVE: int = 0


@constexpr_table
class Strides(NamedTuple):
    """Elements from a query row, head, page or token to the next.

    Heads of a cache are ``stride_k_head`` and ``stride_v_head`` apart, which are no constants: in a cache ``[batch,
    num_kv_heads, tokens, head_dim]`` they grow with its tokens.
    """

    Q_ROW: int
    Q_HEAD: int
    K_PAGE: int
    K_TOKEN: int
    V_PAGE: int
    V_TOKEN: int


@constexpr_table
class Features(NamedTuple):
    """Options of the call that change the code."""

    CAP: bool
    WINDOW: bool
    SINKS: bool
    KV_SCALE: bool
    ROPE: bool
    ALIBI: bool
    LOG2_HEADS: int  # of the largest power of 2 in the number of query heads, for ALiBi
    LSE: bool  # lse is written
    FP8_PAIRS: bool  # FP8 values are loaded two at a time


@constexpr_table
class Tile(NamedTuple):
    """Block sizes of the mainloop, all powers of 2."""

    BLOCK_KV: int  # tokens of a KV tile
    BLOCK_HEADS: int  # query heads of a program
    BLOCK_QK: int  # at least DIM_QK; with ROPE at least half of it
    BLOCK_VO: int  # at least DIM_VO


@triton.jit
def load_kv_range(item_at, mask, max_pages, window_left, SHAPE: tl.constexpr, WINDOW: tl.constexpr):
    """``(begin, end, page_start)`` of the work items at ``item_at``; ``begin == end`` where masked.

    ``begin`` is not before the window, and ``end`` not behind the page table.
    """
    begin = tl.maximum(tl.load(item_at + WORK_KV_BEGIN, mask=mask, other=0), 0)
    end = tl.load(item_at + WORK_KV_END, mask=mask, other=0)
    page_start = tl.load(item_at + WORK_PAGE_START, mask=mask, other=0)
    page_start = tl.minimum(tl.maximum(page_start, 0), max_pages)
    if WINDOW:
        first = tl.load(item_at + WORK_POSITION, mask=mask, other=0) - window_left
        begin = tl.maximum(begin, tokens_before(first, SHAPE))
    return begin, tl.maximum(tl.minimum(end, (max_pages - page_start) * SHAPE.PAGE_SIZE), begin), page_start


@triton.jit
def count_kv_tiles(
    work, first, stop, max_pages, window_left, SHAPE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """KV tiles of the work items ``[first, stop)``, at least one each."""
    num_tiles = 0
    for i in range(first, stop, BLOCK_ITEMS):
        item = i + tl.arange(0, BLOCK_ITEMS)
        item_at = work + item * WORK_STRIDE
        begin, end, _ = load_kv_range(item_at, item < stop, max_pages, window_left, SHAPE, WINDOW)
        count = tl.maximum(tl.cdiv(end, BLOCK_KV) - begin // BLOCK_KV, 1)
        num_tiles += tl.sum(tl.where(item < stop, count, 0), 0)
    return num_tiles


@triton.jit
def load_tile_pages(kv_indices, max_pages, page_start, tile_start, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The page number of each token of a KV tile, unchecked; 0 behind the page table."""
    if BLOCK_KV % PAGE_SIZE == 0:
        at = page_start + tile_start // PAGE_SIZE + tl.arange(0, BLOCK_KV) // PAGE_SIZE
    else:
        at = page_start + (tile_start + tl.arange(0, BLOCK_KV)) // PAGE_SIZE
    return tl.load(kv_indices + at, mask=within(at, max_pages), other=0)


@triton.jit
def token_offsets(
    pages, num_pages, tile_start, stride_page, stride_token, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """The offset of each token of a KV tile in a paged cache; page numbers are clamped to the cache."""
    n = tl.arange(0, BLOCK_KV)
    in_page = n % PAGE_SIZE if BLOCK_KV % PAGE_SIZE == 0 else (tile_start + n) % PAGE_SIZE
    page = tl.minimum(pages.to(tl.uint32), tl.cast(num_pages, tl.uint32) - 1)
    return page.to(tl.int64) * stride_page + in_page.to(tl.int64) * stride_token


@triton.jit
def prepare_query(
    q, row, rows, mask, position, d, rope,
    STRIDE_Q_ROW: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``(query, second half, scale)`` of a row: rotated with ROPE, times ``scale`` and converted to DTYPE.

    Without ROPE the second half is the query too. ``scale`` brings the query into the range of float16.
    """
    at, used = q + row.to(tl.int64) * STRIDE_Q_ROW, mask & within(row, rows)
    low = tl.load(at, mask=used, other=0.0).to(tl.float32)
    high = low
    if ROPE:
        log2_theta, inverse_rope_scale = rope
        high = tl.load(at + DIM // 2, mask=used, other=0.0)
        sin, cos = angles(position + tl.zeros((1,), tl.int32), d, log2_theta, inverse_rope_scale, DIM)
        low, high = rotate_halves(low, high, sin, cos)
    scale = 1.0
    if DTYPE == tl.float16:  # noqa: SIM300
        scale = float16_scale(tl.maximum(tl.abs(low), tl.abs(high)))
    return (low * scale).to(DTYPE), (high * scale).to(DTYPE), scale


@triton.jit
def attend_tile(
    state, query, k_cache, v_cache, pages, num_pages, tile_start, begin, end, n, d_qk, d_v, logit_scale, slope, cap,
    rope, SHAPE: tl.constexpr, STRIDES: tl.constexpr, FEATURES: tl.constexpr, BLOCK_KV: tl.constexpr,
    DIM_PART: tl.constexpr, PREPARED: tl.constexpr, DTYPE: tl.constexpr, FP8_DTYPE: tl.constexpr,
):  # fmt: skip
    """The online-softmax ``state`` after the KV tile from token ``tile_start`` on, of an item of tokens [begin, end).

    state    ``(row_max [heads], row_sum [heads, BLOCK_KV], acc [heads, d_v], acc_odd)``; row_sum are partial sums
    query    PREPARED: the result of :func:`prepare_query`; otherwise ``(q, row, rows, mask)``
    n        ``arange(BLOCK_KV)``
    rope     ``(log2_theta, inverse_rope_scale, sin, cos)``, with ROPE :func:`~.rope_alibi.angles` of the positions n
    d_v      columns of v_cache, pairs of them with FP8_PAIRS; then acc holds the even ones and acc_odd the odd ones
    """
    row_max, row_sum, acc, acc_odd = state
    PACK: tl.constexpr = 2 if FEATURES.FP8_PAIRS else 1
    visible = (tile_start + n - begin).to(tl.uint32) < (end - begin).to(tl.uint32)
    k_at = token_offsets(pages, num_pages, tile_start, STRIDES.K_PAGE, STRIDES.K_TOKEN, SHAPE.PAGE_SIZE, BLOCK_KV)
    v_at = token_offsets(
        pages, num_pages, tile_start, STRIDES.V_PAGE // PACK, STRIDES.V_TOKEN // PACK, SHAPE.PAGE_SIZE, BLOCK_KV
    )
    k = tl.load(k_cache + k_at[:, None], mask=visible[:, None] & (d_qk < DIM_PART), other=0.0)
    v = tl.load(v_cache + v_at[:, None], mask=visible[:, None] & (d_v < SHAPE.DIM_VO // PACK), other=0.0)
    if PREPARED:
        q, q_high, query_scale = query
    else:
        q, row, rows, mask = query
        q = tl.load(q + row.to(tl.int64) * STRIDES.Q_ROW, mask=mask & within(row, rows), other=0.0)
    if FEATURES.ROPE:
        log2_theta, inverse_rope_scale, sin_in_tile, cos_in_tile = rope
        k_high = tl.load(k_cache + DIM_PART + k_at[:, None], mask=visible[:, None] & (d_qk < DIM_PART), other=0.0)
        if SHAPE.WORLD == 1:
            first = tile_start + tl.zeros((1,), tl.int32)
            sin, cos = angles(first, d_qk, log2_theta, inverse_rope_scale, SHAPE.DIM_QK)
            sin, cos = add_angles(sin, cos, sin_in_tile, cos_in_tile)
        else:
            position = token_position(tile_start + n, SHAPE)
            sin, cos = angles(position, d_qk, log2_theta, inverse_rope_scale, SHAPE.DIM_QK)
        k, k_high = rotate_halves(k, k_high, sin, cos)

    logits = tl.dot(q, tl.trans(k.to(DTYPE)), input_precision="ieee")
    if FEATURES.ROPE:
        logits = tl.dot(q_high, tl.trans(k_high.to(DTYPE)), logits, input_precision="ieee")
    logits *= logit_scale / query_scale if PREPARED else logit_scale
    if FEATURES.ALIBI:
        logits += slope[:, None] * token_position(tile_start + n, SHAPE).to(tl.float32)[None, :]
    if FEATURES.CAP:
        logits = soft_cap(logits, tl.cast(cap, tl.float32)) * LOG2E
    logits = tl.where(visible[None, :], logits, float("-inf"))
    row_max, row_sum, p, alpha = online_softmax_update(row_max, row_sum, logits, 1.0, MASKED=False, SUM_LANES=False)
    p = p.to(DTYPE)
    if FEATURES.FP8_PAIRS:
        v, v_odd = unpack(v, FP8_DTYPE)
        acc_odd = tl.dot(p, v_odd.to(DTYPE), acc_odd * alpha[:, None], input_precision="ieee")
    acc = tl.dot(p, v.to(DTYPE), acc * alpha[:, None], input_precision="ieee")
    return row_max, row_sum, acc, acc_odd


@triton.jit
def store_or_spill(
    out, lse, partial, row, slot, rows, slots, row_max, row_sum, acc, sink, value_scale, heads, head_mask, d_vo,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Store a whole row to ``out [rows, NUM_HEADS, DIM]`` and lse, or a split's partial result to its slot.

    A sink joins whole rows here, and the rows of splits when they are combined.
    """
    if slot < 0:
        if SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink)
        if within(row, rows):
            at = row.to(tl.int64) * NUM_HEADS + heads
            store_heads(out, lse, row_max, row_sum, acc * value_scale, at, head_mask, d_vo, DIM, LSE)
    elif slot < slots:
        at = slot.to(tl.int64) * NUM_HEADS + heads
        partial_lse = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM)
        store_heads(partial, partial_lse, row_max, row_sum, acc * value_scale, at, head_mask, d_vo, DIM, True)


@triton.jit
def store_empty_rows(
    out, lse, row, kv_len, sink, heads, head_mask, d_vo,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Zeros, and an LSE of -inf or ``sink``, to those of the rows ``row`` whose ``kv_len`` is 0: they have no item."""
    none = tl.full((), NO_INDEX, tl.int32)
    empty = tl.where(kv_len <= 0, row, none)
    row = tl.min(empty, 0)
    while row < none:
        at = row.to(tl.int64) * NUM_HEADS + heads
        row_max = tl.full((heads.shape[0],), float("-inf"), tl.float32)
        row_sum, acc = tl.zeros_like(row_max), tl.zeros((heads.shape[0], d_vo.shape[0]), tl.float32)
        if SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink)
        store_heads(out, lse, row_max, row_sum, acc, at, head_mask, d_vo, DIM, LSE)
        empty = tl.where(empty == row, none, empty)
        row = tl.min(empty, 0)


@triton.jit
def combine_last_arriver(
    out, lse, partial, counter, row, first_slot, end_slot, slots, sink, heads, head_mask, d_vo,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """Count a stored split of ``row`` in ``counter``; if it is the row's last one, combine all of them.

    The splits are those of the slots ``[first_slot, end_slot)``. They are combined in the order of the request, so the
    result does not depend on which program stores the last one. The counter is 0 again then. All steps are in one loop,
    since a step apart, as the combine kernel has it, adds a fifth to the compilation that a first eager call waits for.
    """
    is_last = False
    if first_slot < end_slot:
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == end_slot - first_slot - 1
    if is_last:
        row_max, row_sum = tl.full((heads.shape[0],), LOWEST, tl.float32), tl.zeros((heads.shape[0],), tl.float32)
        acc = tl.zeros((heads.shape[0], d_vo.shape[0]), tl.float32)
        row_max, row_sum, acc = combine_slots(
            row_max, row_sum, acc, partial, slots, first_slot, end_slot, heads, head_mask, d_vo, NUM_HEADS, DIM,
            SPLITS_PER_STEP,
        )  # fmt: skip
        if SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink)
        at = row.to(tl.int64) * NUM_HEADS + heads
        store_heads(out, lse, row_max, row_sum, acc, at, head_mask, d_vo, DIM, LSE)
        tl.store(counter, 0)


@triton.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "log2_theta", "inverse_rope_scale"),
        *("rows", "max_batch", "num_pages", "max_pages", "max_items", "slots"),
    ]
)
def decode_kernel(
    q,  # [rows, num_qo_heads, DIM_QK]
    k_cache,  # [num_pages, ...] of pages of PAGE_SIZE tokens, in the layout of the strides
    v_cache,
    sinks,  # [num_qo_heads] or None
    kv_scale,  # [2] or None
    out,  # [rows, num_qo_heads, DIM_VO]
    lse,  # [rows, num_qo_heads] or [0]
    partial,  # [slots, num_qo_heads, DIM_VO], then the LSE [slots, num_qo_heads]
    split_counters,  # [slots, num_qo_heads]
    kv_indices,  # [max_pages]
    kv_len,  # [max_batch]
    work,  # [max_items, WORK_STRIDE]
    cta_indptr,  # [num_ctas + 1]
    merge_indptr,  # [max_batch + 1]
    scale,
    cap,
    window_left,
    log2_theta,
    inverse_rope_scale,
    rows,
    max_batch,
    num_pages,
    max_pages,
    max_items,
    slots,
    stride_k_head,
    stride_v_head,  # in units of the loads, which take two FP8 values with FP8_PAIRS
    STRIDES: tl.constexpr,
    SHAPE: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_REQUESTS: tl.constexpr,  # power of 2, at least the requests per CTA
    SPLITS_PER_STEP: tl.constexpr,  # partial results combined at once
    PDL: tl.constexpr,
    COMBINE: tl.constexpr,  # in this kernel
):
    """Grid: ``num_ctas * NUM_KV_HEADS * HEAD_BLOCKS`` programs, CTAs of the plan slowest.
    Owns: the work items of its CTA for BLOCK_HEADS query heads of one KV head; with COMBINE the empty rows
        ``cta + i * num_ctas``, and the split rows whose last split it stores.
    Loop invariant: ``state`` covers the tokens of ``item`` before ``tile_start``; ``pages`` are the tile's, in flight.
    Barriers: ``griddepcontrol.wait`` before anything but the plan is read; with COMBINE a CTA barrier before
        split_counters are incremented.
    Bound by: bandwidth of the KV cache; with short work per CTA latency, item to page number to tile.
    """
    BLOCK_KV: tl.constexpr = TILE.BLOCK_KV
    BLOCK_HEADS: tl.constexpr = TILE.BLOCK_HEADS
    BLOCK_VO: tl.constexpr = TILE.BLOCK_VO
    NUM_KV_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS
    GROUP: tl.constexpr = SHAPE.GROUP
    DIM_QK: tl.constexpr = SHAPE.DIM_QK
    DIM_VO: tl.constexpr = SHAPE.DIM_VO
    PAGE_SIZE: tl.constexpr = SHAPE.PAGE_SIZE
    WINDOW: tl.constexpr = FEATURES.WINDOW
    ROPE: tl.constexpr = FEATURES.ROPE
    FP8_DTYPE: tl.constexpr = v_cache.dtype.element_ty
    FP8: tl.constexpr = k_cache.dtype.element_ty.is_fp8()
    DTYPE: tl.constexpr = tl.float16 if FP8 and q.dtype.element_ty != tl.float32 else q.dtype.element_ty
    PREPARE: tl.constexpr = ROPE or q.dtype.element_ty != DTYPE  # the query is computed once per item, not loaded
    DIM_PART: tl.constexpr = DIM_QK // 2 if ROPE else DIM_QK
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    PACK: tl.constexpr = 2 if FEATURES.FP8_PAIRS else 1
    if PDL:
        acquire()
    program = tl.program_id(0)
    cta = program // (NUM_KV_HEADS * HEAD_BLOCKS)
    kv_head = program // HEAD_BLOCKS % NUM_KV_HEADS
    in_group = program % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    heads, head_mask = kv_head * GROUP + in_group, in_group < GROUP
    n, d_qk, d_vo = tl.arange(0, BLOCK_KV), tl.arange(0, TILE.BLOCK_QK), tl.arange(0, BLOCK_VO)
    d_v = tl.arange(0, BLOCK_VO // PACK)
    if FEATURES.FP8_PAIRS:
        v_cache = v_cache.to(tl.pointer_type(tl.int16))
    q += heads.to(tl.int64)[:, None] * STRIDES.Q_HEAD + d_qk
    k_cache += kv_head.to(tl.int64) * stride_k_head + d_qk[None, :]
    v_cache += kv_head.to(tl.int64) * stride_v_head + d_v[None, :]
    max_pages = tl.where(num_pages > 0, max_pages, 0)

    if COMBINE:
        num_ctas = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_BLOCKS)
        cta_rows = cta + tl.arange(0, BLOCK_REQUESTS) * num_ctas
        cta_kv_len = tl.load(kv_len + cta_rows, mask=cta_rows < tl.minimum(rows, max_batch), other=1)
    # With one request the first item of a CTA is item ``cta``: load it together with cta_indptr, and again if it is
    # another. Row and slot are loaded here and below, not by a function (see work_item.py).
    item_at, listed = work + cta * WORK_STRIDE, cta < max_items
    row = tl.load(item_at + WORK_ROW, mask=listed, other=-1)
    slot = tl.load(item_at + WORK_SLOT, mask=listed, other=-1)
    begin, end, page_start = load_kv_range(item_at, listed, max_pages, window_left, SHAPE, WINDOW)
    first_item = tl.maximum(tl.load(cta_indptr + cta), 0)
    item = first_item
    stop = tl.minimum(tl.load(cta_indptr + cta + 1), max_items)
    if (item != cta) | (item >= stop):
        item_at, listed = work + item * WORK_STRIDE, item < stop
        row = tl.load(item_at + WORK_ROW, mask=listed, other=-1)
        slot = tl.load(item_at + WORK_SLOT, mask=listed, other=-1)
        begin, end, page_start = load_kv_range(item_at, listed, max_pages, window_left, SHAPE, WINDOW)
    tile_start = begin // BLOCK_KV * BLOCK_KV
    pages = load_tile_pages(kv_indices, max_pages, page_start, tile_start, PAGE_SIZE, BLOCK_KV)
    num_tiles = count_kv_tiles(work, item, stop, max_pages, window_left, SHAPE, WINDOW, BLOCK_KV)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    sink = tl.load(sinks + heads, mask=head_mask, other=0.0) * LOG2E if FEATURES.SINKS else 0.0
    to_base_2 = 1.0 if FEATURES.CAP else LOG2E  # a soft cap takes natural logits
    logit_scale = tl.cast(scale, tl.float32) * to_base_2
    slope = alibi_slopes(heads, FEATURES.LOG2_HEADS) * to_base_2 if FEATURES.ALIBI else 0.0
    value_scale = 1.0
    if FEATURES.KV_SCALE:
        logit_scale *= tl.load(kv_scale)
        value_scale = tl.load(kv_scale + 1)
    query_mask = head_mask[:, None] & (d_qk < DIM_PART)
    rope = (log2_theta, inverse_rope_scale)
    sin_in_tile, cos_in_tile = 0.0, 1.0
    if ROPE:
        sin_in_tile, cos_in_tile = angles(n, d_qk, log2_theta, inverse_rope_scale, DIM_QK)
    query, query_high, query_scale = 0.0, 0.0, 1.0
    if PREPARE:
        position = tl.load(work + item * WORK_STRIDE + WORK_POSITION, mask=item < stop, other=0) if ROPE else 0
        query, query_high, query_scale = prepare_query(
            q, row, rows, query_mask, position, d_qk, rope, STRIDES.Q_ROW, DIM_QK, ROPE, DTYPE
        )

    row_max = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_HEADS, BLOCK_KV), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_VO // PACK), tl.float32)
    acc_odd = tl.zeros((BLOCK_HEADS, BLOCK_VO // PACK), tl.float32) if FEATURES.FP8_PAIRS else 0.0
    for _ in range(num_tiles):
        is_last = tile_start + BLOCK_KV >= end
        next_item, next_start = item, tile_start + BLOCK_KV
        next_row, next_begin, next_end, next_page_start, next_slot = row, begin, end, page_start, slot
        next_query, next_query_high, next_query_scale = query, query_high, query_scale
        if is_last:
            next_item += 1
            item_at, more = work + next_item * WORK_STRIDE, next_item < stop
            next_row = tl.load(item_at + WORK_ROW, mask=more, other=-1)
            next_slot = tl.load(item_at + WORK_SLOT, mask=more, other=-1)
            next_begin, next_end, next_page_start = load_kv_range(item_at, more, max_pages, window_left, SHAPE, WINDOW)
            next_start = next_begin // BLOCK_KV * BLOCK_KV
            if PREPARE:
                position = tl.load(item_at + WORK_POSITION, mask=more, other=0) if ROPE else 0
                next_query, next_query_high, next_query_scale = prepare_query(
                    q, next_row, rows, query_mask, position, d_qk, rope, STRIDES.Q_ROW, DIM_QK, ROPE, DTYPE
                )
        next_pages = load_tile_pages(kv_indices, max_pages, next_page_start, next_start, PAGE_SIZE, BLOCK_KV)

        if PREPARE:
            q_tile = (query, query_high, query_scale)
        else:
            q_tile = (q, row, rows, query_mask)  # type: ignore[assignment]
        row_max, row_sum, acc, acc_odd = attend_tile(
            (row_max, row_sum, acc, acc_odd), q_tile, k_cache, v_cache, pages, num_pages,
            tile_start, begin, end, n, d_qk, d_v, logit_scale, slope, cap,
            (log2_theta, inverse_rope_scale, sin_in_tile, cos_in_tile),
            SHAPE, STRIDES, FEATURES, BLOCK_KV, DIM_PART, PREPARE, DTYPE, FP8_DTYPE,
        )  # fmt: skip

        if is_last:
            norm, value = tl.sum(row_sum, 1), acc
            if FEATURES.FP8_PAIRS:
                value = tl.reshape(tl.join(acc, acc_odd), (BLOCK_HEADS, BLOCK_VO))
                acc_odd = tl.zeros_like(acc_odd)
            store_or_spill(
                out, lse, partial, row, slot, rows, slots, row_max, norm, value, sink, value_scale,
                heads, head_mask, d_vo, NUM_HEADS, DIM_VO, FEATURES.SINKS, FEATURES.LSE,
            )  # fmt: skip
            row_max = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
            row_sum = tl.zeros_like(row_sum)
            acc = tl.zeros_like(acc)

        item, row, begin, end, page_start, slot = next_item, next_row, next_begin, next_end, next_page_start, next_slot
        tile_start, pages = next_start, next_pages
        query, query_high, query_scale = next_query, next_query_high, next_query_scale

    if COMBINE:
        store_empty_rows(
            out, lse, cta_rows, cta_kv_len, sink, heads, head_mask, d_vo,
            NUM_HEADS, DIM_VO, FEATURES.SINKS, FEATURES.LSE,
        )  # fmt: skip
        none = tl.full((), NO_INDEX, tl.int32)
        tl.debug_barrier()  # all threads of the program have stored their part of a split before it is counted
        for i in range(first_item, stop, BLOCK_ITEMS):
            items = i + tl.arange(0, BLOCK_ITEMS)
            split_slot = tl.load(work + items * WORK_STRIDE + WORK_SLOT, mask=items < stop, other=-1)
            split_row = tl.load(work + items * WORK_STRIDE + WORK_ROW, mask=items < stop, other=-1)
            is_split = within(split_slot, slots) & within(split_row, tl.minimum(rows, max_batch))
            first_slot = tl.maximum(tl.load(merge_indptr + split_row, mask=is_split, other=0), 0)
            end_slot = tl.minimum(tl.load(merge_indptr + split_row + 1, mask=is_split, other=0), slots)
            pending = tl.where(is_split, items, none)
            item = tl.min(pending, 0)
            while item < none:
                here = items == item
                row = tl.sum(tl.where(here, split_row, 0), 0)
                begin, end = tl.sum(tl.where(here, first_slot, 0), 0), tl.sum(tl.where(here, end_slot, 0), 0)
                counter = split_counters + begin.to(tl.int64) * NUM_HEADS + program % (NUM_KV_HEADS * HEAD_BLOCKS)
                combine_last_arriver(
                    out, lse, partial, counter, row, begin, end, slots, sink, heads, head_mask, d_vo,
                    NUM_HEADS, DIM_VO, FEATURES.SINKS, FEATURES.LSE, SPLITS_PER_STEP,
                )  # fmt: skip
                pending = tl.where(here, none, pending)
                item = tl.min(pending, 0)
