"""``attn::batch_decode``: a persistent grid over the plan's work items, then a merge of what was split.

Program ``c * num_kv_heads + h`` does the items of CTA ``c`` for KV head ``h``, so that the programs that
run side by side read the same tokens of neighbouring heads. All items of a program make one software
pipeline: its loop goes over blocks of KV tokens and steps to the next item where one ends, so the loads
of the next item are in flight before the last one is finished.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...meta.outputs import attention as allocate
from ...plan import DecodePlan, PlanProblem, num_slots
from .launch import launch, starts_early
from .merge import merge_pieces
from .primitives import LOG2E, LOWEST, add_sink, exp2, inverse, log_sum, soft_cap, within
from .tiles import decode_tile


@triton.jit
def load_extent(record, mask, max_pages, window_left, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """``(begin, end, page_start)`` of work items, which have no tokens where masked.

    ``begin`` leaves out what is left of the window; ``end`` is in reach of the page table.
    """
    begin = tl.maximum(tl.load(record + 2, mask=mask, other=0), 0)
    end = tl.load(record + 3, mask=mask, other=0)
    page_start = tl.minimum(tl.maximum(tl.load(record + 5, mask=mask, other=0), 0), max_pages)
    if WINDOW:
        begin = tl.maximum(begin, tl.load(record + 4, mask=mask, other=0) - window_left)
    return begin, tl.maximum(tl.minimum(end, (max_pages - page_start) * PAGE_SIZE), begin), page_start


@triton.jit
def count_blocks(
    work, first, stop, max_pages, window_left, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr
):
    """Blocks of KV tokens in the items ``[first, stop)``, at least one each."""
    blocks = 0
    for i in range(first, stop, 32):
        index = i + tl.arange(0, 32)
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
    return page.to(tl.int64) * stride_page + slot * stride_slot


@triton.jit(do_not_specialize=["scale", "cap", "window_left", "rows", "num_pages", "max_pages", "max_items", "slots"])
def decode_kernel(
    q,  # [rows, num_qo_heads, DIM_QK]
    k_cache,  # [num_pages, ...] of pages of PAGE_SIZE tokens, as the strides say
    v_cache,
    sinks,  # [num_qo_heads] or None
    out,  # [rows, num_qo_heads, DIM_VO]
    lse,  # [rows, num_qo_heads] or [0]
    partial,  # [slots, num_qo_heads, DIM_VO], then [slots, num_qo_heads]
    kv_indices,  # [max_pages]
    work,  # [max_items, 8]
    cta_indptr,  # [num_ctas + 1]
    scale,
    cap,
    window_left,
    rows,
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
    LSE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_VO: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_HEADS - 1) // BLOCK_HEADS
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    program = tl.program_id(0)
    cta = program // (NUM_KV_HEADS * HEAD_BLOCKS)
    kv_head = program // HEAD_BLOCKS % NUM_KV_HEADS
    in_group = program % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    heads, head_mask = kv_head * GROUP + in_group, in_group < GROUP
    n, d_qk, d_vo = tl.arange(0, BLOCK_KV), tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_VO)
    q += heads[:, None] * stride_q_head + d_qk
    k_cache += kv_head * stride_k_head + d_qk[None, :]
    v_cache += kv_head * stride_v_head + d_vo[None, :]
    sink = tl.load(sinks + heads, mask=head_mask, other=0.0) * LOG2E if SINKS else 0.0
    logit_scale = tl.cast(scale, tl.float32) if CAP else tl.cast(scale, tl.float32) * LOG2E
    max_pages = tl.where(num_pages > 0, max_pages, 0)

    item = tl.maximum(tl.load(cta_indptr + cta), 0)
    stop = tl.minimum(tl.load(cta_indptr + cta + 1), max_items)
    # Row and slot are loaded here and below, not by a helper: what a call returns, Inductor's analysis of
    # writes takes for an alias of the pointers it was given.
    row = tl.load(work + item * 8, mask=item < stop, other=-1)
    slot = tl.load(work + item * 8 + 6, mask=item < stop, other=-1)
    begin, end, page_start = load_extent(work + item * 8, item < stop, max_pages, window_left, PAGE_SIZE, WINDOW)
    block = begin // BLOCK_KV * BLOCK_KV
    pages = load_pages(kv_indices, max_pages, page_start, block, PAGE_SIZE, BLOCK_KV)

    m = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_HEADS, BLOCK_KV), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_VO), tl.float32)
    for _ in range(count_blocks(work, item, stop, max_pages, window_left, PAGE_SIZE, WINDOW, BLOCK_KV)):
        last = block + BLOCK_KV >= end
        next_item, next_block = item, block + BLOCK_KV
        next_row, next_begin, next_end, next_page_start, next_slot = row, begin, end, page_start, slot
        if last:
            next_item += 1
            record, more = work + next_item * 8, next_item < stop
            next_row, next_slot = tl.load(record, mask=more, other=-1), tl.load(record + 6, mask=more, other=-1)
            next_begin, next_end, next_page_start = load_extent(record, more, max_pages, window_left, PAGE_SIZE, WINDOW)
            next_block = next_begin // BLOCK_KV * BLOCK_KV
        next_pages = load_pages(kv_indices, max_pages, next_page_start, next_block, PAGE_SIZE, BLOCK_KV)

        visible = (block + n - begin).to(tl.uint32) < (end - begin).to(tl.uint32)
        k_at = page_offsets(pages, num_pages, block, stride_k_page, stride_k_slot, PAGE_SIZE, BLOCK_KV)
        v_at = page_offsets(pages, num_pages, block, stride_v_page, stride_v_slot, PAGE_SIZE, BLOCK_KV)
        k = tl.load(k_cache + k_at[:, None], mask=visible[:, None] & (d_qk < DIM_QK), other=0.0)
        v = tl.load(v_cache + v_at[:, None], mask=visible[:, None] & (d_vo < DIM_VO), other=0.0)
        query_mask = head_mask[:, None] & (d_qk < DIM_QK) & within(row, rows)
        query = tl.load(q + row.to(tl.int64) * stride_q_row, mask=query_mask, other=0.0)

        logits = tl.dot(query, tl.trans(k), input_precision="ieee") * logit_scale
        if CAP:
            logits = soft_cap(logits, tl.cast(cap, tl.float32)) * LOG2E
        logits = tl.where(visible[None, :], logits, float("-inf"))
        top = tl.maximum(m, tl.max(logits, 1))
        weights, decay = exp2(logits - top[:, None]), exp2(m - top)
        m, total = top, total * decay[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")

        if last:
            norm, value = tl.sum(total, 1), acc
            mask = head_mask[:, None] & (d_vo < DIM_VO)
            if slot < 0:
                if SINKS:
                    m, norm, value = add_sink(m, norm, value, sink)
                if within(row, rows):
                    at = row.to(tl.int64) * NUM_HEADS + heads
                    result = (value * inverse(norm)[:, None]).to(out.dtype.element_ty)
                    tl.store(out + at[:, None] * DIM_VO + d_vo, result, mask=mask)
                    if LSE:
                        tl.store(lse + at, log_sum(m, norm), mask=head_mask)
            elif slot < slots:
                at = slot.to(tl.int64) * NUM_HEADS + heads
                tl.store(partial + at[:, None] * DIM_VO + d_vo, value * inverse(norm)[:, None], mask=mask)
                sums = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM_VO)
                tl.store(sums + at, log_sum(m, norm), mask=head_mask)
            m = tl.full((BLOCK_HEADS,), LOWEST, tl.float32)
            total = tl.zeros_like(total)
            acc = tl.zeros_like(acc)

        item, row, begin, end, page_start, slot = next_item, next_row, next_begin, next_end, next_page_start, next_slot
        block, pages = next_block, next_pages


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
    tile = decode_tile(q.device, q.dtype, problem.head_dim_qk, problem.head_dim_vo, group)
    slot_dim, head_dim = (1, 2) if kv_layout == "NHD" else (2, 1)
    slots, num_ctas = num_slots(p), p.cta_indptr.shape[0] - 1
    pdl = starts_early(q)
    launch(
        decode_kernel,
        (num_ctas * problem.num_kv_heads * triton.cdiv(group, tile.heads),),
        (q, k_cache, v_cache, sinks, out, lse, workspace, p.kv_indices, p.work, p.cta_indptr),
        (
            *(sm_scale or 1 / math.sqrt(problem.head_dim_qk), logits_soft_cap, window_left),
            *(rows, k_cache.shape[0], p.kv_indices.shape[0], p.work.shape[0], slots),
        ),
        (
            *(q.stride(0), q.stride(1)),
            *(k_cache.stride(0), k_cache.stride(slot_dim), k_cache.stride(head_dim)),
            *(v_cache.stride(0), v_cache.stride(slot_dim), v_cache.stride(head_dim)),
        ),
        (
            *(problem.num_kv_heads, group, problem.head_dim_qk, problem.head_dim_vo, problem.page_size),
            *(logits_soft_cap > 0, window_left >= 0, sinks is not None, return_lse),
            *(tile.kv, tile.heads, tile.dim_qk, tile.dim_vo, pdl),
        ),
        tile.options._replace(launch_pdl=pdl),
    )
    merge_pieces(out, lse, workspace, sinks, p, return_lse)
    return out, lse
