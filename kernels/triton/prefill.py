"""Prefill: one program per work item, KV head and block of the item's rows.

The query heads of a KV head are packed beside the rows: pair ``m`` of a tile is row ``m // GROUP`` and head
``m % GROUP``. A program goes over blocks of KV tokens in up to three loops: those that the window cuts, those
that every row sees whole, which need no masking, and those that the causal bound or the end cuts.

Items come longest first and start in that order. Items without rows write the query rows after the last
request's instead, of which each has its share.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from attn_ops.kernels.triton.config_prefill import pad, prefill_tile, run_length
from attn_ops.kernels.triton.config_tuned import tuned
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import launch
from attn_ops.kernels.triton.masks import causal_or_window, full_blocks, mask_bits, mask_offset
from attn_ops.kernels.triton.prefill_call import Operands, prefill_ops
from attn_ops.kernels.triton.rope_alibi import alibi_slopes, rotate, rotation_partner
from attn_ops.kernels.triton.softmax import LOG2E, add_sink, finite, inverse, log_sum_exp, soft_cap
from torch import Tensor

from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import PlanProblem, PrefillPlan, num_partials


@triton.jit
def load_pages(
    kv_indices, page_start, first, max_pages, num_pages,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[BLOCK / RUN]``: the page of each run of tokens from ``first`` on, brought into the cache."""
    if PAGED:
        at = page_start + (first + tl.arange(0, BLOCK // RUN) * RUN) // PAGE_SIZE
        pages = tl.load(kv_indices + at, mask=within(at, max_pages), other=0)
        return tl.minimum(pages.to(tl.uint32), tl.cast(num_pages, tl.uint32) - 1)
    else:  # noqa: RET505  what follows a return is compiled too
        return tl.zeros((BLOCK // RUN,), tl.uint32)


@triton.jit
def run_offsets(
    pages, page_start, first, stride_page, stride_slot,
    PAGED: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[BLOCK / RUN]``: where the runs of tokens from ``first`` on begin in the cache, in elements."""
    token = first + tl.arange(0, BLOCK // RUN) * RUN
    if PAGED:
        return pages.to(tl.int64) * stride_page + (token % PAGE_SIZE).to(tl.int64) * stride_slot
    else:  # noqa: RET505
        return (page_start + token).to(tl.int64) * stride_slot


@triton.jit
def load_pairs(q, at, used, d, LIMIT: tl.constexpr):
    """``[pairs, d]`` of the query, 0 from dimension LIMIT on."""
    return tl.load(q + at[:, None] + d[None, :], mask=used[:, None] & (d < LIMIT)[None, :], other=0.0)


@triton.jit
def load_tokens(
    base, runs, stride, count, d, LIMIT: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, RUN: tl.constexpr
):  # fmt: skip
    """``[tokens, d]`` of runs of tokens that begin at ``runs``, 0 from dimension LIMIT on.

    If MASKED, only the first ``count`` tokens are read: what follows may be NaN.
    """
    at = runs[:, None, None] + (tl.arange(0, RUN) * stride)[None, :, None] + d[None, None, :]
    i = tl.arange(0, runs.shape[0])[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if MASKED:
        x = tl.load(base + at, mask=(i < count)[:, :, None] & (d < LIMIT)[None, None, :], other=0.0)
    elif PADDED:
        x = tl.load(base + at, mask=(d < LIMIT)[None, None, :], other=0.0)
    else:
        x = tl.load(base + at)
    return tl.reshape(x, (runs.shape[0] * RUN, d.shape[0]))


@triton.jit
def store_pairs(out, lse, value, sums, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """``value [pairs, d]`` and ``sums [pairs]`` at the pairs' places ``at``."""
    tl.store(out + at[:, None] * DIM + d[None, :], value, mask=mask[:, None] & (d < DIM)[None, :])
    if LSE:
        tl.store(lse + at, sums, mask=mask)


@triton.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "log2_theta", "inverse_rope_scale", "rows", "kv_rows", "num_pages"),
        *("max_pages", "max_items", "max_batch", "slots", "mask_bytes"),
    ]
)
def prefill_kernel(
    q,  # [rows, NUM_KV_HEADS * GROUP, >= DIM_A]: the first part of each query
    q_b,  # the second part, or q
    k,  # [num_pages, ...] of pages of PAGE_SIZE tokens, or [kv_rows, ...], as the strides say
    k_b,
    v,  # or k where SHARED
    sinks,  # [NUM_KV_HEADS * GROUP] or None
    kv_scale,  # [2] or None
    mask,  # [mask_bytes] or None
    out,  # [rows, NUM_KV_HEADS * GROUP, DIM_VO]
    lse,  # [rows, NUM_KV_HEADS * GROUP] or [0]
    partial,  # [slots, TILE_ROWS, NUM_KV_HEADS * GROUP, DIM_VO], then the same without DIM_VO
    qo_indptr,  # [max_batch + 1]; this and those below None for a single request
    kv_indices,  # [max_pages]
    kv_len,  # [max_batch]
    work,  # [max_items, 8]
    scale,
    cap,
    window_left,
    log2_theta,
    inverse_rope_scale,
    rows,
    kv_rows,
    num_pages,
    max_pages,
    max_items,
    max_batch,
    slots,
    mask_bytes,
    stride_q_row,
    stride_q_head,
    stride_qb_row,
    stride_qb_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_kb_page,
    stride_kb_slot,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM_A: tl.constexpr,
    DIM_B: tl.constexpr,
    DIM_VO: tl.constexpr,
    OFFSET_B: tl.constexpr,  # where the second part of a head begins in q_b and k_b
    PAGE_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PLANNED: tl.constexpr,
    PAGED: tl.constexpr,
    SHARED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    KV_SCALE: tl.constexpr,
    MASK: tl.constexpr,
    ROPE: tl.constexpr,
    ALIBI: tl.constexpr,
    LOG2_HEADS: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,  # tokens in a row in one page, wherever a block begins
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_VO: tl.constexpr,
):
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    BLOCKS: tl.constexpr = (TILE_ROWS * GROUP + BLOCK_M - 1) // BLOCK_M
    item = tl.program_id(0) // (NUM_KV_HEADS * BLOCKS)
    num_items = tl.num_programs(0) // (NUM_KV_HEADS * BLOCKS)
    kv_head = tl.program_id(0) // BLOCKS % NUM_KV_HEADS
    first_pair = tl.program_id(0) % BLOCKS * BLOCK_M
    pair = first_pair + tl.arange(0, BLOCK_M)
    tile_row, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    n, d_vo = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_VO)
    if PLANNED:
        # Loaded here, not by a helper: what a call returns, Inductor's analysis of writes takes for an alias of
        # the pointers it was given.
        record, listed = work + item * 8, item < max_items
        row, count = tl.load(record, mask=listed, other=0), tl.load(record + 1, mask=listed, other=0)
        begin, end = tl.load(record + 2, mask=listed, other=0), tl.load(record + 3, mask=listed, other=0)
        position, page_start = tl.load(record + 4, mask=listed, other=0), tl.load(record + 5, mask=listed, other=0)
        slot, request = tl.load(record + 6, mask=listed, other=-1), tl.load(record + 7, mask=listed, other=0)
        count, begin = tl.minimum(count, TILE_ROWS), tl.maximum(begin, 0)
        request = tl.minimum(tl.maximum(request, 0), max_batch - 1)
        if count <= 0:
            first = tl.load(qo_indptr + max_batch) + (num_items - 1 - item) * TILE_ROWS
            unused = (pair < TILE_ROWS * GROUP) & within(first + tile_row, rows)
            at = (first + tile_row).to(tl.int64) * NUM_HEADS + head
            nothing = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            zeros = tl.zeros((BLOCK_M, BLOCK_VO), out.dtype.element_ty)
            store_pairs(out, lse, zeros, nothing, at, unused, d_vo, DIM_VO, LSE)
            return
        page_start = tl.maximum(page_start, 0)
        if PAGED:
            end = tl.minimum(end, tl.where(num_pages > 0, tl.maximum(max_pages - page_start, 0), 0) * PAGE_SIZE)
        else:
            end = tl.minimum(end, kv_rows - page_start)
        row_in_request = row - tl.load(qo_indptr + request) + tile_row
    else:
        row = (num_items - 1 - item) * TILE_ROWS
        count, begin, end, position, page_start, slot = rows - row, 0, kv_rows, kv_rows - rows + row, 0, -1
        count = tl.minimum(count, TILE_ROWS)
        row_in_request = row + tile_row
    used = (tile_row < count) & within(row + tile_row, rows)
    first_row = first_pair // GROUP
    last_row = tl.minimum((first_pair + BLOCK_M - 1) // GROUP, count - 1)
    if first_row > last_row:
        return
    if CAUSAL:
        end = tl.minimum(end, position + last_row + 1)
    if WINDOW:
        begin = tl.maximum(begin, position + first_row - window_left)
    row_position = position + tile_row

    d_a = tl.arange(0, BLOCK_A)
    q_row, q_head = (row + tile_row).to(tl.int64), head.to(tl.int64)
    q_a_at = q_row * stride_q_row + q_head * stride_q_head
    query_a = load_pairs(q, q_a_at, used, d_a, DIM_A)
    if DIM_B > 0:
        d_b = OFFSET_B + tl.arange(0, BLOCK_B)
        q_b_at = q_row * stride_qb_row + q_head * stride_qb_head
        query_b = load_pairs(q_b, q_b_at, used, d_b, OFFSET_B + DIM_B)
    if ROPE:
        DIM: tl.constexpr = DIM_A + DIM_B
        partner_a = rotation_partner(d_a, DIM)
        turned_a = load_pairs(q, q_a_at, used, tl.where(d_a < DIM_A, partner_a, DIM), DIM)
        query_a = rotate(query_a, turned_a, row_position, d_a, log2_theta, inverse_rope_scale, DIM).to(query_a.dtype)
        if DIM_B > 0:
            partner_b = rotation_partner(d_b, DIM)
            turned_b = load_pairs(q, q_a_at, used, tl.where(d_b < DIM, partner_b, DIM), DIM)
            query_b = rotate(query_b, turned_b, row_position, d_b, log2_theta, inverse_rope_scale, DIM).to(
                query_b.dtype
            )
    k += kv_head.to(tl.int64) * stride_k_head
    k_b += kv_head.to(tl.int64) * stride_k_head
    v += kv_head.to(tl.int64) * stride_v_head
    # Without bias or cap the scale is left out of the logits and applied to their differences.
    FOLD: tl.constexpr = not (CAP or ALIBI or KV_SCALE)
    logit_scale = tl.cast(scale, tl.float32)
    value_scale = 1.0
    if KV_SCALE:
        logit_scale *= tl.load(kv_scale)
        value_scale = tl.load(kv_scale + 1)
    factor = logit_scale * LOG2E if FOLD else 1.0
    slope = alibi_slopes(head, LOG2_HEADS) if ALIBI else 0.0
    if MASK:
        length = tl.load(kv_len + request) if PLANNED else kv_rows
        bits_at = mask_offset(qo_indptr, kv_len, request, max_batch, 256) if PLANNED else 0

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_VO), tl.float32)
    start = begin // RUN * RUN if PAGED else begin
    full, after_full, blocks = full_blocks(
        start, end, position + first_row, position + last_row, window_left, CAUSAL, WINDOW, BLOCK_N
    )
    ONE_LOOP: tl.constexpr = MASK or SHARED  # two would not fit the registers of wide shared values
    if ONE_LOOP:
        full, after_full = 0, 0
    pages = load_pages(kv_indices, page_start, start, max_pages, num_pages, PAGED, PAGE_SIZE, RUN, BLOCK_N)
    for phase in tl.static_range(2 if ONE_LOOP else 0 if WINDOW else 1, 3):
        first_block = 0 if phase == 0 else full if phase == 1 else after_full
        stop_block = full if phase == 0 else after_full if phase == 1 else blocks
        for block in range(first_block, stop_block):
            first = start + block * BLOCK_N
            tokens, here = first + n, end - first
            at = run_offsets(pages, page_start, first, stride_k_page, stride_k_slot, PAGED, PAGE_SIZE, RUN, BLOCK_N)
            k_a = load_tokens(k, at, stride_k_slot, here, d_a, DIM_A, DIM_A < BLOCK_A, phase != 1, RUN)
            if ROPE:
                pair_a = tl.where(d_a < DIM_A, partner_a, DIM)
                turned_k = load_tokens(k, at, stride_k_slot, here, pair_a, DIM, True, phase != 1, RUN)
                k_a = rotate(k_a, turned_k, tokens, d_a, log2_theta, inverse_rope_scale, DIM)
            k_a = k_a.to(query_a.dtype)
            logits = tl.dot(query_a, tl.trans(k_a), input_precision="ieee")
            if DIM_B > 0:
                at_b = run_offsets(
                    pages, page_start, first, stride_kb_page, stride_kb_slot, PAGED, PAGE_SIZE, RUN, BLOCK_N
                )
                part = load_tokens(
                    k_b, at_b, stride_kb_slot, here, d_b, OFFSET_B + DIM_B, DIM_B < BLOCK_B, phase != 1, RUN
                )
                if ROPE:
                    pair_b = tl.where(d_b < DIM, partner_b, DIM)
                    turned_part = load_tokens(k, at, stride_k_slot, here, pair_b, DIM, True, phase != 1, RUN)
                    part = rotate(part, turned_part, tokens, d_b, log2_theta, inverse_rope_scale, DIM)
                logits = tl.dot(query_b, tl.trans(part.to(query_b.dtype)), logits, input_precision="ieee")
            if not FOLD:
                logits *= logit_scale
                if ALIBI:
                    logits += slope[:, None] * (tokens[None, :] - row_in_request[:, None]).to(tl.float32)  # type: ignore[index]
                if CAP:
                    logits = soft_cap(logits, tl.cast(cap, tl.float32))
                logits *= LOG2E
            if phase != 1:
                visible = causal_or_window(tokens, row_position, window_left, CAUSAL, WINDOW)
                visible = visible & (n < here)[None, :]
                if MASK:
                    visible = visible & mask_bits(mask, bits_at, row_in_request, length, tokens, mask_bytes)
                logits = tl.where(visible, logits, float("-inf"))
            top = tl.maximum(m, tl.max(logits, 1) * factor)
            anchor = finite(top) if phase != 1 else top
            weights = tl.exp2(logits * factor - anchor[:, None])
            decay = tl.exp2(m - anchor)
            m, total = top, total * decay + tl.sum(weights, 1)
            if SHARED:
                values = k_a
            else:
                at = run_offsets(pages, page_start, first, stride_v_page, stride_v_slot, PAGED, PAGE_SIZE, RUN, BLOCK_N)
                values = load_tokens(v, at, stride_v_slot, here, d_vo, DIM_VO, DIM_VO < BLOCK_VO, phase != 1, RUN)
                values = values.to(query_a.dtype)
            acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
            pages = load_pages(
                kv_indices, page_start, first + BLOCK_N, max_pages, num_pages, PAGED, PAGE_SIZE, RUN, BLOCK_N
            )

    if PLANNED:  # noqa: SIM102  compiled out where there is no slot
        if slot >= 0:
            at = (slot.to(tl.int64) * TILE_ROWS + tile_row) * NUM_HEADS + head
            sums = partial + tl.cast(slots, tl.int64) * (TILE_ROWS * NUM_HEADS * DIM_VO)
            value = acc * (inverse(total) * value_scale)[:, None]
            store_pairs(partial, sums, value, log_sum_exp(m, total), at, used & (slot < slots), d_vo, DIM_VO, True)
            return
    if SINKS:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + head, mask=used, other=0.0) * LOG2E)
    at = q_row * NUM_HEADS + head
    value = (acc * (inverse(total) * value_scale)[:, None]).to(out.dtype.element_ty)
    store_pairs(out, lse, value, log_sum_exp(m, total), at, used, d_vo, DIM_VO, LSE)


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
    """Launch the general kernel (:data:`.prefill_call.LaunchTiles`)."""
    (num_heads, num_kv_heads), (dim_a, dim_b, dim_vo) = x.heads, x.dims
    group = num_heads // num_kv_heads
    problem = None if plan is None else PlanProblem.of(plan.problem)
    tile = prefill_tile(x.q.device, x.q.dtype, dim_a + dim_b, dim_vo, x.shared, tile_rows * group)
    if o.pos_encoding == "NONE":
        page_size = problem.page_size if problem is not None and plan is not None and plan.kv_indices.shape[0] else 0
        dims = (dim_a + dim_b, dim_vo)
        tile = tuned(tile, "prefill", x.q.device, x.q.dtype, x.k.dtype, *dims, group, page_size, tile_rows * group)
    blocks = triton.cdiv(tile_rows * group, tile.rows)
    paged = plan is not None and plan.kv_indices.shape[0] > 0
    run = run_length(problem.page_size, tile.kv) if problem is not None and paged else tile.kv
    token_strides = x.k_strides[1], x.k_b_strides[1], x.v_strides[1]
    if any(type(stride) is int and stride * run >= 1 << 31 for stride in token_strides):
        run = 1  # within a run, offsets have 32 bits
    launch(
        prefill_kernel,
        (num_items * num_kv_heads * blocks,),
        (
            *(x.q, x.q_b, x.k, x.k_b, x.v, o.sinks, o.kv_scale, o.mask, out, lse, workspace),
            *((None,) * 4 if plan is None else (plan.qo_indptr, plan.kv_indices, plan.kv_len, plan.work)),
        ),
        (
            *(o.sm_scale or 1 / math.sqrt(dim_a + dim_b), o.logits_soft_cap, o.window_left),
            *(math.log2(o.rope_theta), 1 / o.rope_scale, x.q.shape[0], x.kv_rows, x.k.shape[0]),
            *((0,) * 4 if plan is None else _capacities(plan)),
            0 if o.mask is None else o.mask.shape[0],
        ),
        (*x.q.stride()[:2], *x.q_b.stride()[:2], *x.k_strides, *x.k_b_strides, *x.v_strides),
        (
            *(num_kv_heads, group, dim_a, dim_b, dim_vo, x.offset_b),
            *(1 if problem is None else problem.page_size, tile_rows, plan is not None, paged, x.shared),
            *(o.causal and o.mask is None, o.window_left >= 0, o.logits_soft_cap > 0, o.sinks is not None),
            *(o.kv_scale is not None, o.mask is not None, o.pos_encoding == "ROPE_LLAMA", o.pos_encoding == "ALIBI"),
            *(num_heads.bit_length() - 1, lse.dim() > 1),
            *(tile.rows, tile.kv, run, pad(dim_a), pad(dim_b), pad(dim_vo)),
        ),
        tile.options,
    )


def _capacities(plan: PrefillPlan) -> tuple[int, int, int, int]:
    return plan.kv_indices.shape[0], plan.work.shape[0], plan.kv_len.shape[0], num_partials(plan)


batch_prefill, ragged_prefill, single_prefill = prefill_ops(launch_tiles)
