"""``attn::batch_decode``: a persistent grid over the plan's work items, then a merge of what was split.

Program ``c * num_kv_heads + h`` does the items of CTA ``c`` for KV head ``h``, so that the programs that
run side by side read the same tokens of neighbouring heads. All items of a program make one software
pipeline: its loop goes over blocks of KV tokens and steps to the next item where one ends, so the loads
of the next item are in flight before the last one is finished. A query that is rotated, or converted for an FP8
cache (:mod:`.fp8`), is so once an item.

What a program needs of the plan to begin with it reads before it waits for the kernel ahead
(:func:`.pdl.read_plan_early`).

The merge is a kernel of its own where launches are recorded, in graphs and captures. In eager calls, where the host
pays for each, the last of the programs that share a request merges it (``MERGE``); in graphs that takes longer, as
nobody else does anything meanwhile.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from attn_ops.kernels.triton.combine_decode import merge_pieces, merge_rows, store_heads
from attn_ops.kernels.triton.config_decode import decode_tile, evenly, short_stages
from attn_ops.kernels.triton.config_tuned import tuned
from attn_ops.kernels.triton.fp8 import float16_scale, in_pairs, unpack
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import launch, runs_now
from attn_ops.kernels.triton.pdl import acquire, read_plan_early
from attn_ops.kernels.triton.rope_alibi import alibi_slopes, rotate_halves
from attn_ops.kernels.triton.softmax import LOG2E, LOWEST, add_sink, online_softmax_update, soft_cap
from attn_ops.meta.outputs import attention as allocate
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.plan.state import DecodePlan, PlanProblem, num_slots

ITEMS = tl.constexpr(32)
"""Work items that are looked at together."""

NONE = tl.constexpr(2**31 - 1)

MERGED = 16384
"""Elements of pieces that are merged at a time."""


@triton.jit
def load_extent(record, mask, max_pages, window_left, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """``(begin, end, page_start)`` of work items, which have no tokens where masked.

    ``begin`` leaves out what is left of the window; ``end`` is in reach of the page table.
    """
    begin = tl.maximum(tl.load(record + 2, mask=mask, other=0), 0)
    end = tl.load(record + 3, mask=mask, other=0)
    page_start = tl.load(record + 5, mask=mask, other=0)
    page_start = tl.minimum(tl.maximum(page_start, 0), max_pages)
    if WINDOW:
        begin = tl.maximum(begin, tl.load(record + 4, mask=mask, other=0) - window_left)
    return begin, tl.maximum(tl.minimum(end, (max_pages - page_start) * PAGE_SIZE), begin), page_start


@triton.jit
def count_blocks(
    work, first, stop, max_pages, window_left, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Blocks of KV tokens in the items ``[first, stop)``, at least one each."""
    blocks = 0
    for i in range(first, stop, ITEMS):
        index = i + tl.arange(0, ITEMS)
        begin, end, _ = load_extent(work + index * 8, index < stop, max_pages, window_left, PAGE_SIZE, WINDOW)
        count = tl.maximum(tl.cdiv(end, BLOCK_KV) - begin // BLOCK_KV, 1)
        blocks += tl.sum(tl.where(index < stop, count, 0), 0)
    return blocks


@triton.jit
def load_pages(kv_indices, max_pages, page_start, block, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The page of each token of a block, which may be none of the cache's; 0 beyond the page table."""
    if BLOCK_KV % PAGE_SIZE == 0:
        at = page_start + block // PAGE_SIZE + tl.arange(0, BLOCK_KV) // PAGE_SIZE
    else:
        at = page_start + (block + tl.arange(0, BLOCK_KV)) // PAGE_SIZE
    return tl.load(kv_indices + at, mask=within(at, max_pages), other=0)


@triton.jit
def page_offsets(pages, num_pages, block, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Where each token of a block is in a paged cache, on a page that it has."""
    n = tl.arange(0, BLOCK_KV)
    slot = n % PAGE_SIZE if BLOCK_KV % PAGE_SIZE == 0 else (block + n) % PAGE_SIZE
    page = tl.minimum(pages.to(tl.uint32), tl.cast(num_pages, tl.uint32) - 1)
    return page.to(tl.int64) * stride_page + slot.to(tl.int64) * stride_slot


@triton.jit
def prepare_query(
    q, row, rows, mask, stride_row, position, pair, log2_theta, inverse_rope_scale,
    DIM: tl.constexpr, ROPE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``(query, second half, scale)``: a query rotated and in ``DTYPE``, into whose range ``scale`` brings it."""
    at, used = q + row.to(tl.int64) * stride_row, mask & within(row, rows)
    low = tl.load(at, mask=used, other=0.0).to(tl.float32)
    high = low
    if ROPE:
        high = tl.load(at + DIM // 2, mask=used, other=0.0)
        low, high = rotate_halves(
            low, high, position + tl.zeros((1,), tl.int32), pair, log2_theta, inverse_rope_scale, DIM
        )
    scale = 1.0
    if DTYPE == tl.float16:  # noqa: SIM300
        scale = float16_scale(tl.maximum(tl.abs(low), tl.abs(high)))
    return (low * scale).to(DTYPE), (high * scale).to(DTYPE), scale


@triton.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "log2_theta", "inverse_rope_scale"),
        *("rows", "max_batch", "num_pages", "max_pages", "max_items", "slots"),
    ]
)
def decode_kernel(
    q,  # [rows, num_qo_heads, DIM_QK]
    k_cache,  # [num_pages, ...] of pages of PAGE_SIZE tokens, as the strides say
    v_cache,
    sinks,  # [num_qo_heads] or None
    kv_scale,  # [2] or None
    out,  # [rows, num_qo_heads, DIM_VO]
    lse,  # [rows, num_qo_heads] or [0]
    partial,  # [slots, num_qo_heads, DIM_VO], then [slots, num_qo_heads]
    split_counters,  # [slots, num_qo_heads]
    kv_indices,  # [max_pages]
    kv_len,  # [max_batch]
    work,  # [max_items, 8]
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
    stride_q_row: tl.constexpr,
    stride_q_head: tl.constexpr,
    stride_k_page: tl.constexpr,
    stride_k_slot: tl.constexpr,
    stride_k_head: tl.constexpr,
    stride_v_page: tl.constexpr,
    stride_v_slot: tl.constexpr,
    stride_v_head: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_QK: tl.constexpr,
    DIM_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    KV_SCALE: tl.constexpr,
    ROPE: tl.constexpr,
    ALIBI: tl.constexpr,
    LOG2_HEADS: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    BLOCK_EMPTY: tl.constexpr,  # power of 2, at least the requests for each CTA
    FEW: tl.constexpr,  # pieces merged at a time
    MANY: tl.constexpr,
    PAIRED: tl.constexpr,  # FP8 values are read two at a time
    PDL: tl.constexpr,
    MERGE: tl.constexpr,  # in this kernel
):
    FP8: tl.constexpr = k_cache.dtype.element_ty.is_fp8()
    COMPUTE: tl.constexpr = tl.float16 if FP8 and q.dtype.element_ty != tl.float32 else q.dtype.element_ty
    PREPARE: tl.constexpr = ROPE or q.dtype.element_ty != COMPUTE
    PART: tl.constexpr = DIM_QK // 2 if ROPE else DIM_QK
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    if PDL:
        acquire()
    program = tl.program_id(0)
    cta = program // (NUM_KV_HEADS * HEAD_BLOCKS)
    kv_head = program // HEAD_BLOCKS % NUM_KV_HEADS
    in_group = program % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    heads, head_mask = kv_head * GROUP + in_group, in_group < GROUP
    PACK: tl.constexpr = 2 if PAIRED else 1
    FP8_TYPE: tl.constexpr = v_cache.dtype.element_ty
    n, d_qk, d_vo = tl.arange(0, BLOCK_KV), tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_VO)
    d_pair = tl.arange(0, BLOCK_VO // PACK)
    if PAIRED:
        v_cache = v_cache.to(tl.pointer_type(tl.int16))
    q += heads.to(tl.int64)[:, None] * stride_q_head + d_qk
    k_cache += kv_head.to(tl.int64) * stride_k_head + d_qk[None, :]
    v_cache += kv_head.to(tl.int64) * (stride_v_head // PACK) + d_pair[None, :]
    max_pages = tl.where(num_pages > 0, max_pages, 0)

    if MERGE:
        num_ctas = tl.num_programs(0) // (NUM_KV_HEADS * HEAD_BLOCKS)
        mine = cta + tl.arange(0, BLOCK_EMPTY) * num_ctas
        lengths = tl.load(kv_len + mine, mask=mine < tl.minimum(rows, max_batch), other=1)
    # Row and slot are loaded here and below, not by a helper: what a call returns, Inductor's analysis of
    # writes takes for an alias of the pointers it was given.
    record, listed = work + cta * 8, cta < max_items  # the first item of each CTA, where there is one request
    row = tl.load(record, mask=listed, other=-1)
    slot = tl.load(record + 6, mask=listed, other=-1)
    begin, end, page_start = load_extent(record, listed, max_pages, window_left, PAGE_SIZE, WINDOW)
    first_item = tl.maximum(tl.load(cta_indptr + cta), 0)
    item = first_item
    stop = tl.minimum(tl.load(cta_indptr + cta + 1), max_items)
    if (item != cta) | (item >= stop):
        record, listed = work + item * 8, item < stop
        row = tl.load(record, mask=listed, other=-1)
        slot = tl.load(record + 6, mask=listed, other=-1)
        begin, end, page_start = load_extent(record, listed, max_pages, window_left, PAGE_SIZE, WINDOW)
    block = begin // BLOCK_KV * BLOCK_KV
    pages = load_pages(kv_indices, max_pages, page_start, block, PAGE_SIZE, BLOCK_KV)
    blocks = count_blocks(work, item, stop, max_pages, window_left, PAGE_SIZE, WINDOW, BLOCK_KV)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    sink = tl.load(sinks + heads, mask=head_mask, other=0.0) * LOG2E if SINKS else 0.0
    unit = 1.0 if CAP else LOG2E
    logit_scale = tl.cast(scale, tl.float32) * unit
    slope = alibi_slopes(heads, LOG2_HEADS) * unit if ALIBI else 0.0
    value_scale = 1.0
    if KV_SCALE:
        logit_scale *= tl.load(kv_scale)
        value_scale = tl.load(kv_scale + 1)
    query_mask = head_mask[:, None] & (d_qk < PART)
    query, far_query, query_scale = 0.0, 0.0, 1.0
    if PREPARE:
        position = tl.load(work + item * 8 + 4, mask=item < stop, other=0) if ROPE else 0
        query, far_query, query_scale = prepare_query(
            *(q, row, rows, query_mask, stride_q_row, position, d_qk, log2_theta, inverse_rope_scale),
            *(DIM_QK, ROPE, COMPUTE),
        )

    m = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_HEADS, BLOCK_KV), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_VO // PACK), tl.float32)
    acc_odd = tl.zeros((BLOCK_HEADS, BLOCK_VO // PACK), tl.float32) if PAIRED else 0.0
    for _ in range(blocks):
        last = block + BLOCK_KV >= end
        next_item, next_block = item, block + BLOCK_KV
        next_row, next_begin, next_end, next_page_start, next_slot = row, begin, end, page_start, slot
        next_query, next_far_query, next_query_scale = query, far_query, query_scale
        if last:
            next_item += 1
            record, more = work + next_item * 8, next_item < stop
            next_row, next_slot = tl.load(record, mask=more, other=-1), tl.load(record + 6, mask=more, other=-1)
            next_begin, next_end, next_page_start = load_extent(record, more, max_pages, window_left, PAGE_SIZE, WINDOW)
            next_block = next_begin // BLOCK_KV * BLOCK_KV
            if PREPARE:
                position = tl.load(record + 4, mask=more, other=0) if ROPE else 0
                next_query, next_far_query, next_query_scale = prepare_query(
                    *(q, next_row, rows, query_mask, stride_q_row, position, d_qk, log2_theta, inverse_rope_scale),
                    *(DIM_QK, ROPE, COMPUTE),
                )
        next_pages = load_pages(kv_indices, max_pages, next_page_start, next_block, PAGE_SIZE, BLOCK_KV)

        visible = (block + n - begin).to(tl.uint32) < (end - begin).to(tl.uint32)
        k_at = page_offsets(pages, num_pages, block, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_KV)
        v_at = page_offsets(pages, num_pages, block, stride_v_page // PACK, stride_v_slot // PACK, PAGE_SIZE, BLOCK_KV)
        k = tl.load(k_cache + k_at[:, None], mask=visible[:, None] & (d_qk < PART), other=0.0)
        v = tl.load(v_cache + v_at[:, None], mask=visible[:, None] & (d_pair < DIM_VO // PACK), other=0.0)
        if not PREPARE:
            query = tl.load(q + row.to(tl.int64) * stride_q_row, mask=query_mask & within(row, rows), other=0.0)
        if ROPE:
            far_k = tl.load(k_cache + PART + k_at[:, None], mask=visible[:, None] & (d_qk < PART), other=0.0)
            k, far_k = rotate_halves(k, far_k, block + n, d_qk, log2_theta, inverse_rope_scale, DIM_QK)

        logits = tl.dot(query, tl.trans(k.to(COMPUTE)), input_precision="ieee")
        if ROPE:
            logits = tl.dot(far_query, tl.trans(far_k.to(COMPUTE)), logits, input_precision="ieee")
        logits *= logit_scale / query_scale if PREPARE else logit_scale
        if ALIBI:
            logits += slope[:, None] * (block + n).to(tl.float32)[None, :]  # type: ignore[index]
        if CAP:
            logits = soft_cap(logits, tl.cast(cap, tl.float32)) * LOG2E
        logits = tl.where(visible[None, :], logits, float("-inf"))
        m, total, weights, decay = online_softmax_update(m, total, logits, 1.0, MASKED=False, SUM_LANES=False)
        weights = weights.to(COMPUTE)
        if PAIRED:
            v, v_odd = unpack(v, FP8_TYPE)
            acc_odd = tl.dot(weights, v_odd.to(COMPUTE), acc_odd * decay[:, None], input_precision="ieee")
        acc = tl.dot(weights, v.to(COMPUTE), acc * decay[:, None], input_precision="ieee")

        if last:
            norm, value = tl.sum(total, 1), acc
            if PAIRED:
                value = tl.reshape(tl.join(acc, acc_odd), (BLOCK_HEADS, BLOCK_VO))
                acc_odd = tl.zeros_like(acc_odd)
            if slot < 0:
                if SINKS:
                    m, norm, value = add_sink(m, norm, value, sink)
                if within(row, rows):
                    at = row.to(tl.int64) * NUM_HEADS + heads
                    store_heads(out, lse, m, norm, value * value_scale, at, head_mask, d_vo, DIM_VO, LSE)
            elif slot < slots:
                at = slot.to(tl.int64) * NUM_HEADS + heads
                sums = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM_VO)
                store_heads(partial, sums, m, norm, value * value_scale, at, head_mask, d_vo, DIM_VO, True)
            m = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)

        item, row, begin, end, page_start, slot = next_item, next_row, next_begin, next_end, next_page_start, next_slot
        block, pages = next_block, next_pages
        query, far_query, query_scale = next_query, next_far_query, next_query_scale

    if MERGE:
        none = tl.full((), NONE, tl.int32)
        empty = tl.where(lengths <= 0, mine, none)
        row = tl.min(empty, 0)
        while row < none:
            at = row.to(tl.int64) * NUM_HEADS + heads
            m = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
            nothing = tl.zeros((BLOCK_HEADS, BLOCK_VO), tl.float32)
            store_heads(out, lse, m, tl.zeros_like(m), nothing, at, head_mask, d_vo, DIM_VO, LSE)
            empty = tl.where(empty == row, none, empty)
            row = tl.min(empty, 0)

        tl.debug_barrier()  # every thread's part of a piece is stored before the piece is counted
        for i in range(first_item, stop, ITEMS):
            items = i + tl.arange(0, ITEMS)
            piece_slot = tl.load(work + items * 8 + 6, mask=items < stop, other=-1)
            piece_row = tl.load(work + items * 8, mask=items < stop, other=-1)
            pieces = within(piece_slot, slots) & within(piece_row, tl.minimum(rows, max_batch))
            piece_begin = tl.maximum(tl.load(merge_indptr + piece_row, mask=pieces, other=0), 0)
            piece_end = tl.minimum(tl.load(merge_indptr + piece_row + 1, mask=pieces, other=0), slots)
            todo = tl.where(pieces, items, none)
            item = tl.min(todo, 0)
            while item < none:
                here = items == item
                row = tl.sum(tl.where(here, piece_row, 0), 0)
                begin, end = tl.sum(tl.where(here, piece_begin, 0), 0), tl.sum(tl.where(here, piece_end, 0), 0)
                count = split_counters + begin.to(tl.int64) * NUM_HEADS + program % (NUM_KV_HEADS * HEAD_BLOCKS)
                last = False
                if begin < end:
                    last = tl.atomic_add(count, 1, sem="acq_rel") == end - begin - 1
                if last:
                    m, norm, value = merge_pieces(
                        partial, slots, begin, end, heads, head_mask, d_vo, NUM_HEADS, DIM_VO, FEW, MANY
                    )
                    if SINKS:
                        m, norm, value = add_sink(m, norm, value, sink)
                    at = row.to(tl.int64) * NUM_HEADS + heads
                    store_heads(out, lse, m, norm, value, at, head_mask, d_vo, DIM_VO, LSE)
                    tl.store(count, 0)
                todo = tl.where(here, none, todo)
                item = tl.min(todo, 0)


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    p = DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    out, lse = allocate(q, k_cache, v_cache, return_lse=return_lse)
    rows, group = q.shape[0], problem.num_qo_heads // problem.num_kv_heads
    rope = pos_encoding == "ROPE_LLAMA"
    slot_dim, head_dim = (1, 2) if kv_layout == "NHD" else (2, 1)
    slots, num_ctas = num_slots(p), p.cta_indptr.shape[0] - 1
    short = short_stages(k_cache.dtype, p.kv_indices.shape[0] * problem.page_size, num_ctas)
    dims = (problem.head_dim_qk, problem.head_dim_vo)
    tile = decode_tile(q.device, q.dtype, *dims, group, k_cache.dtype, rope, short)
    if not rope:
        tile = tuned(tile, "decode", q.device, q.dtype, k_cache.dtype, *dims, group, problem.page_size)
    many = max(1, (MERGED if tile.heads < 16 else MERGED // 2) // (tile.heads * tile.dim_vo))
    pdl, now = read_plan_early(q, p.kv_len.shape[0]), runs_now(q)
    programs = num_ctas * problem.num_kv_heads * triton.cdiv(group, tile.heads)
    arguments = (
        decode_kernel,
        (programs,),
        (
            *(q, k_cache, v_cache, sinks, kv_scale, out, lse, workspace),
            *(p.split_counters, p.kv_indices, p.kv_len, p.work, p.cta_indptr, p.merge_indptr),
        ),
        (
            *(sm_scale or 1 / math.sqrt(problem.head_dim_qk), logits_soft_cap, window_left),
            *(math.log2(rope_theta), 1 / rope_scale),
            *(rows, p.kv_len.shape[0], k_cache.shape[0], p.kv_indices.shape[0], p.work.shape[0], slots),
        ),
        (
            *(q.stride(0), q.stride(1)),
            *(k_cache.stride(0), k_cache.stride(slot_dim), k_cache.stride(head_dim)),
            *(v_cache.stride(0), v_cache.stride(slot_dim), v_cache.stride(head_dim)),
        ),
    )
    constants = (
        *(problem.num_kv_heads, group, problem.head_dim_qk, problem.head_dim_vo, problem.page_size),
        *(logits_soft_cap > 0, window_left >= 0, sinks is not None, kv_scale is not None),
        *(rope, pos_encoding == "ALIBI", problem.num_qo_heads.bit_length() - 1, return_lse),
        *(tile.kv, tile.heads, tile.dim_qk, tile.dim_vo),
        *(triton.next_power_of_2(triton.cdiv(p.kv_len.shape[0], num_ctas)), max(1, many // 8), many),
        *(in_pairs(v_cache), pdl),
    )
    options = tile.options._replace(launch_pdl=pdl, min_shared=evenly(q.device, programs) if pdl else 0)
    launch(*arguments, (*constants, False), options, run=not now)
    merge_rows(out, lse, workspace, sinks, p, return_lse, run=not now)
    if now:
        launch(*arguments, (*constants, True), options)
    return out, lse
