"""Prefill on any GPU, in Triton: attention of query tiles over the KV ranges of a plan's work items.

A CTA computes ``BLOCK_M`` packed rows of one work item for one KV head. Packed row ``p`` of a query tile is query row
``p // GROUP`` of the tile and head ``p % GROUP`` of the KV head's group (PackGQA). The mainloop over KV tiles runs in
up to three phases:

0  tiles that the window on the left masks
1  tiles that every row sees whole: no mask
2  tiles that the causal bound, the window on the right or the end of the KV masks

Work items start in the order of the work list, longest first. A tile that is not split goes to ``out``; the partial
result of a split goes to its slot of the workspace, and :mod:`.combine_prefill` combines the splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.config_prefill import pad, prefill_tile, run_length
from attn_ops.kernels.triton.config_tuned import tuned
from attn_ops.kernels.triton.context import shard_of, token_position, tokens_before
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import constexpr_table, launch
from attn_ops.kernels.triton.masks import (
    MAX_POSITION,
    causal_or_window,
    end_of_window,
    full_blocks,
    mask_bits,
    mask_offset,
)
from attn_ops.kernels.triton.prefill_call import Batch, Operands, plan_arguments, prefill_ops, work_items
from attn_ops.kernels.triton.rope_alibi import alibi_slopes, rotate, rotation_partner
from attn_ops.kernels.triton.softmax import (
    LOG2E,
    add_sink,
    empty_state,
    inverse,
    log_sum_exp,
    online_softmax_update,
    saturate,
    soft_cap,
)
from attn_ops.kernels.triton.work_item import (
    WORK_KV_BEGIN,
    WORK_KV_END,
    WORK_PAGE_START,
    WORK_POSITION,
    WORK_REQUEST,
    WORK_ROW,
    WORK_ROWS,
    WORK_SLOT,
    WORK_STRIDE,
)
from attn_ops.ops.options import AttentionOptions, softmax_scale
from attn_ops.plan import equal_requests
from attn_ops.plan.plan_checks import MAX_QUERY_ROWS
from attn_ops.plan.state import PlanProblem, PrefillPlan

SPLIT_BLOCK = tl.constexpr(equal_requests.SPLIT_BLOCK)

MIN_POSITION = tl.constexpr(-MAX_QUERY_ROWS)
"""Least value of the position of a query row minus the first token of its work item.

The position of a request's first row is the KV length minus the rows, and no item begins after the end of the KV.
"""


@constexpr_table
class Shape(NamedTuple):
    """Sizes that the kernel is compiled for. Keys have a part A and, unless DIM_B is 0, a part B of their columns."""

    NUM_KV_HEADS: int
    GROUP: int  # query heads of a KV head
    DIM_A: int  # columns of part A of a key
    DIM_B: int  # columns of part B
    DIM_VO: int  # columns of a value
    PAGE_SIZE: int
    TILE_ROWS: int  # query rows of a work item
    LOG2_HEADS: int  # floor of the logarithm of the number of query heads
    RANK: int = 0  # RANK, WORLD and INTERLEAVE: as in :class:`.context.Shard`
    WORLD: int = 1
    INTERLEAVE: int = 0


@constexpr_table
class Features(NamedTuple):
    """What the kernel is compiled with. Sinks, scales, masks and plans are compiled in if their tensors are given."""

    PAGED: bool
    SHARED: bool  # the value is part A of the key: multi-head latent attention
    CAUSAL: bool
    WINDOW: bool  # on the left
    RIGHT: bool  # a window on the right, without CAUSAL
    CAP: bool
    ROPE: bool
    ALIBI: bool
    LSE: bool


@constexpr_table
class Tile(NamedTuple):
    """Block sizes, powers of 2."""

    BLOCK_M: int  # packed rows of a CTA
    BLOCK_N: int  # tokens of a KV tile
    RUN: int  # consecutive tokens of a KV tile that lie in one page
    BLOCK_A: int  # at least DIM_A
    BLOCK_B: int  # at least DIM_B
    BLOCK_VO: int  # at least DIM_VO


@triton.jit
def load_pages(
    kv_indices, page_start, first, max_pages, num_pages, SHAPE: tl.constexpr, PAGED: tl.constexpr, TILE: tl.constexpr
):
    """``[BLOCK_N / RUN]``: the page of each run of the KV tile from token ``first`` on, always one of the cache's."""
    RUN: tl.constexpr = TILE.RUN
    RUNS: tl.constexpr = TILE.BLOCK_N // RUN
    if PAGED:
        at = page_start + (first + tl.arange(0, RUNS) * RUN) // SHAPE.PAGE_SIZE
        pages = tl.load(kv_indices + at, mask=within(at, max_pages), other=0)
        return tl.minimum(pages.to(tl.uint32), tl.cast(num_pages, tl.uint32) - 1)
    else:  # noqa: RET505  what follows a return is compiled too
        return tl.zeros((RUNS,), tl.uint32)


@triton.jit
def run_offsets(
    pages, page_start, first, stride_page, stride_token, SHAPE: tl.constexpr, PAGED: tl.constexpr, TILE: tl.constexpr
):
    """``[BLOCK_N / RUN]``: offset in the cache, in elements, of each run of the KV tile from token ``first`` on."""
    RUN: tl.constexpr = TILE.RUN
    RUNS: tl.constexpr = TILE.BLOCK_N // RUN
    token = first + tl.arange(0, RUNS) * RUN
    if PAGED:
        return pages.to(tl.int64) * stride_page + (token % SHAPE.PAGE_SIZE).to(tl.int64) * stride_token
    else:  # noqa: RET505
        return (page_start + token).to(tl.int64) * stride_token


@triton.jit
def load_runs(
    base, runs, stride_token, count, d, END: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, RUN: tl.constexpr
):
    """``[tokens, d]`` of the runs that begin at ``runs``; 0 in columns from END on (PADDED).

    If MASKED, only the first ``count`` tokens are loaded and the others are 0: memory after them may be NaN.
    """
    at = runs[:, None, None] + (tl.arange(0, RUN) * stride_token)[None, :, None] + d[None, None, :]
    token = tl.arange(0, runs.shape[0])[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if MASKED:
        x = tl.load(base + at, mask=(token < count)[:, :, None] & (d < END)[None, None, :], other=0.0)
    elif PADDED:
        x = tl.load(base + at, mask=(d < END)[None, None, :], other=0.0)
    else:
        x = tl.load(base + at)
    return tl.reshape(x, (runs.shape[0] * RUN, d.shape[0]))


@triton.jit
def load_packed_rows(q, at, exists, d, END: tl.constexpr):
    """``[packed rows, d]`` of the query; 0 in columns from END on."""
    return tl.load(q + at[:, None] + d[None, :], mask=exists[:, None] & (d < END)[None, :], other=0.0)


@triton.jit
def store_packed_rows(out, lse, value, sums, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """Store ``value [packed rows, d]`` and ``sums [packed rows]`` at the rows ``at`` of out and lse."""
    tl.store(out + at[:, None] * DIM + d[None, :], value, mask=mask[:, None] & (d < DIM)[None, :])
    if LSE:
        tl.store(lse + at, sums, mask=mask)


@triton.jit
def rotate_query(query, q, at, exists, position, d, rope, END: tl.constexpr, DIM: tl.constexpr):
    """ROPE_LLAMA of ``query``, columns ``d < END`` of rows ``at`` of ``q``."""
    log2_theta, inverse_rope_scale = rope
    partner = load_packed_rows(q, at, exists, tl.where(d < END, rotation_partner(d, DIM), DIM), DIM)
    return rotate(query, partner, position, d, log2_theta, inverse_rope_scale, DIM).to(query.dtype)


@triton.jit
def load_keys(
    x, runs, stride_token, k, k_runs, stride_k_token, first, count, d, rope,
    END: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr,
    RUN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """``[tokens, d]`` of part ``x`` of the keys from token ``first`` on, rotated if ROPE.

    The rotation reads the partner columns from ``k``, which has whole heads.
    """
    key = load_runs(x, runs, stride_token, count, d, END, PADDED, MASKED, RUN)
    if ROPE:
        log2_theta, inverse_rope_scale = rope
        tokens = token_position(first + tl.arange(0, runs.shape[0] * RUN), SHAPE)
        partner_d = tl.where(d < END, rotation_partner(d, DIM), DIM)
        partner = load_runs(k, k_runs, stride_k_token, count, partner_d, DIM, True, MASKED, RUN)
        key = rotate(key, partner, tokens, d, log2_theta, inverse_rope_scale, DIM)
    return key


@triton.jit
def qk_product(
    query, kv, columns, strides, pages, page_start, first, count, rope,
    MASKED: tl.constexpr, SHAPE: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``(logits [packed rows, tokens], key_a [tokens, BLOCK_A])`` of the KV tile from token ``first`` on.

    query, columns  of parts A and B
    kv, strides     of k and v; ``(page, token)`` strides each
    """
    query_a, query_b = query
    k, k_b = kv
    d_a, d_b = columns
    k_strides, b_strides = strides
    if not FEATURES.SHARED:
        k_b, b_strides = k, k_strides
    stride_page, stride_token = k_strides
    stride_b_page, stride_b_token = b_strides
    DIM: tl.constexpr = SHAPE.DIM_A + SHAPE.DIM_B
    # Part B is a tensor of its own, or follows part A in the same heads.
    END_B: tl.constexpr = SHAPE.DIM_B if FEATURES.SHARED else DIM
    runs = run_offsets(pages, page_start, first, stride_page, stride_token, SHAPE, FEATURES.PAGED, TILE)
    key_a = load_keys(
        k, runs, stride_token, k, runs, stride_token, first, count, d_a, rope,
        SHAPE.DIM_A, SHAPE.DIM_A < TILE.BLOCK_A, MASKED, FEATURES.ROPE, DIM, TILE.RUN, SHAPE,
    ).to(query_a.dtype)  # fmt: skip
    logits = tl.dot(query_a, tl.trans(key_a), input_precision="ieee")
    if SHAPE.DIM_B > 0:
        b_runs = run_offsets(pages, page_start, first, stride_b_page, stride_b_token, SHAPE, FEATURES.PAGED, TILE)
        key_b = load_keys(
            k_b, b_runs, stride_b_token, k, runs, stride_token, first, count, d_b, rope,
            END_B, SHAPE.DIM_B < TILE.BLOCK_B, MASKED, FEATURES.ROPE, DIM, TILE.RUN, SHAPE,
        )  # fmt: skip
        logits = tl.dot(query_b, tl.trans(key_b.to(query_b.dtype)), logits, input_precision="ieee")
    return logits, key_a


@triton.jit
def load_values(
    v, strides, pages, page_start, first, count, d,
    MASKED: tl.constexpr, SHAPE: tl.constexpr, FEATURES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``[tokens, BLOCK_VO]`` of the values of the KV tile from token ``first`` on."""
    stride_page, stride_token = strides
    runs = run_offsets(pages, page_start, first, stride_page, stride_token, SHAPE, FEATURES.PAGED, TILE)
    return load_runs(
        v, runs, stride_token, count, d, SHAPE.DIM_VO, SHAPE.DIM_VO < TILE.BLOCK_VO, MASKED, TILE.RUN
    )  # fmt: skip


@triton.jit
def bias_and_cap(logits, logit_scale, cap, slope, distance, ALIBI: tl.constexpr, CAP: tl.constexpr):
    """Scaled base-2 logits with the ALiBi bias and the soft cap."""
    logits *= logit_scale
    if ALIBI:
        logits += slope[:, None] * distance.to(tl.float32)
    if CAP:
        logits = soft_cap(logits, tl.cast(cap, tl.float32))
    return logits * LOG2E


@triton.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "window_right", "log2_theta", "inverse_rope_scale", "rows", "num_pages"),
        *("max_pages", "max_items", "max_batch", "slots", "mask_bytes"),
    ]
)
def prefill_kernel(
    q,  # [rows, NUM_HEADS, >= DIM_A]: part A of the query
    q_b,  # part B if SHARED, otherwise q
    k,  # [num_pages, ...] of pages of PAGE_SIZE tokens, or of tokens, as the strides say
    v,  # [num_pages, ...]; part B of the keys if SHARED, where part A is the value
    sinks,  # [NUM_HEADS] or None
    kv_scale,  # float32 [2] or None
    mask,  # uint8 [mask_bytes] or None
    out,  # [rows, NUM_HEADS, DIM_VO]
    lse,  # float32 [rows, NUM_HEADS] or [0]
    partial,  # float32 [slots, TILE_ROWS, NUM_HEADS, DIM_VO], then the LSE without DIM_VO. Without a plan the query
    # rows of a request take the place of TILE_ROWS, or it is None if no keys are split
    qo_indptr,  # [max_batch + 1]; this and those below are None without a plan, when requests have equal lengths
    kv_indices,  # [max_pages]
    kv_len,  # [max_batch]
    work,  # [max_items, WORK_STRIDE]
    scale,  # of the logits
    cap,
    window_left,
    log2_theta,
    inverse_rope_scale,
    rows,  # of q
    window_right,
    num_pages,  # of the cache, or tokens of ragged KV
    max_pages,
    max_items,
    max_batch,
    slots,  # of the workspace
    mask_bytes,
    stride_q_row,
    stride_q_head,
    stride_qb_row,
    stride_qb_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    SHAPE: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: work items x KV heads x blocks of BLOCK_M packed rows of an item, blocks fastest.
    Owns: BLOCK_M packed rows of one work item and one KV head, and all KV tokens of the item.
    Loop invariant: ``(row_max, row_sum, acc)`` include the tokens before ``first``; ``pages`` are those of the KV tile
    at ``first``, loaded one iteration ahead.
    Barriers: none of its own; Triton's pipeliner overlaps loads with ``num_stages``.
    Bound by: tensor cores for long chunks; KV loads for few query rows on long KV.
    """
    NUM_HEADS: tl.constexpr = SHAPE.NUM_KV_HEADS * SHAPE.GROUP
    TILE_ROWS: tl.constexpr = SHAPE.TILE_ROWS
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_VO: tl.constexpr = TILE.BLOCK_VO
    PLANNED: tl.constexpr = work is not None
    MASK: tl.constexpr = mask is not None
    DIM: tl.constexpr = SHAPE.DIM_A + SHAPE.DIM_B
    # Part B is a tensor of its own, or follows part A in the same heads.
    END_B: tl.constexpr = SHAPE.DIM_B if FEATURES.SHARED else DIM
    BLOCKS: tl.constexpr = (TILE_ROWS * SHAPE.GROUP + BLOCK_M - 1) // BLOCK_M
    item = tl.program_id(0) // (SHAPE.NUM_KV_HEADS * BLOCKS)
    num_items = tl.num_programs(0) // (SHAPE.NUM_KV_HEADS * BLOCKS)
    kv_head = tl.program_id(0) // BLOCKS % SHAPE.NUM_KV_HEADS
    first_packed_row = tl.program_id(0) % BLOCKS * BLOCK_M
    packed_row = first_packed_row + tl.arange(0, BLOCK_M)
    tile_row, head = packed_row // SHAPE.GROUP, kv_head * SHAPE.GROUP + packed_row % SHAPE.GROUP
    n, d_vo = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_VO)
    if PLANNED:
        # Loaded here, not by a function: see work_item.py.
        record, listed = work + item * WORK_STRIDE, item < max_items
        row = tl.load(record + WORK_ROW, mask=listed, other=0)
        count = tl.load(record + WORK_ROWS, mask=listed, other=0)
        begin = tl.load(record + WORK_KV_BEGIN, mask=listed, other=0)
        end = tl.load(record + WORK_KV_END, mask=listed, other=0)
        position = tl.load(record + WORK_POSITION, mask=listed, other=0)
        page_start = tl.load(record + WORK_PAGE_START, mask=listed, other=0)
        slot = tl.load(record + WORK_SLOT, mask=listed, other=-1)
        request = tl.load(record + WORK_REQUEST, mask=listed, other=0)
        count, begin = tl.minimum(count, TILE_ROWS), tl.maximum(begin, 0)
        request = tl.minimum(tl.maximum(request, 0), max_batch - 1)
        page_start = tl.maximum(page_start, 0)
        # Only a plan that no planner made has an item outside of these bounds. Sums of its fields could exceed int32.
        is_item = (count > 0) & (begin <= end) & (position >= begin + MIN_POSITION) & (position < MAX_POSITION)
        # A cache without pages, or ragged KV that is shorter than planned, may leave an item without tokens.
        if FEATURES.PAGED:
            end = tl.minimum(end, tl.where(num_pages > 0, tl.maximum(max_pages - page_start, 0), 0) * SHAPE.PAGE_SIZE)
        else:
            end = tl.minimum(end, num_pages - tl.minimum(page_start, num_pages))
        if not is_item:  # write the query rows after the last request's, which such items divide among them
            row = tl.load(qo_indptr + max_batch) + (num_items - 1 - item) * TILE_ROWS
            unused = (packed_row < TILE_ROWS * SHAPE.GROUP) & within(row + tile_row, rows)
            at = (row + tile_row).to(tl.int64) * NUM_HEADS + head
            no_keys = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            if sinks is not None:
                no_keys = tl.load(sinks + head, mask=unused, other=0.0) * LOG2E
            zeros = saturate(tl.zeros((BLOCK_M, BLOCK_VO), tl.float32), out.dtype.element_ty)
            store_packed_rows(out, lse, zeros, no_keys, at, unused, d_vo, SHAPE.DIM_VO, FEATURES.LSE)
            return
        row_in_request = row - tl.load(qo_indptr + request) + tile_row
        slot_rows, slot_row = TILE_ROWS, tile_row
    else:
        qo_len, request_keys, num_splits = rows // max_batch, num_pages // max_batch, tl.maximum(slots // max_batch, 1)
        splits = max_batch * num_splits
        tiles = num_items // splits
        if FEATURES.CAUSAL or FEATURES.RIGHT:  # the last tiles of all requests first: they see the most keys
            split, offset = item % splits, (tiles - 1 - item // splits) * TILE_ROWS
        else:
            split, offset = item // tiles, item % tiles * TILE_ROWS
        request = split // num_splits
        row, page_start, position = request * qo_len + offset, request * request_keys, request_keys - qo_len + offset
        begin, end, slot = 0, request_keys, -1
        if partial is not None:
            if FEATURES.WINDOW:
                begin = tl.maximum(request_keys - qo_len - window_left, 0)
            # As EqualRequests.split_keys: a parameter would be one too many.
            split_keys = tl.cdiv(request_keys - begin, num_splits * SPLIT_BLOCK) * SPLIT_BLOCK
            begin += split % num_splits * split_keys
            end, slot = begin + tl.minimum(end - begin, split_keys), tl.where(slots > 0, split, -1)
        count = tl.minimum(qo_len - offset, TILE_ROWS)
        row_in_request = offset + tile_row
        slot_rows, slot_row = qo_len, row_in_request
    exists = (tile_row < count) & within(row + tile_row, rows)
    first_row = first_packed_row // SHAPE.GROUP
    last_row = tl.minimum((first_packed_row + BLOCK_M - 1) // SHAPE.GROUP, count - 1)
    if first_row > last_row:
        return
    if FEATURES.CAUSAL:
        end = tl.minimum(end, tokens_before(position + last_row + 1, SHAPE))
    if FEATURES.RIGHT:
        end = end_of_window(end, position + last_row, window_right, SHAPE)
    if FEATURES.WINDOW:
        begin = tl.maximum(begin, tokens_before(position + first_row - window_left, SHAPE))
    row_position = position + tile_row

    # Load the query.
    rope = (log2_theta, inverse_rope_scale)
    d_a = tl.arange(0, TILE.BLOCK_A)
    q_row, q_head = (row + tile_row).to(tl.int64), head.to(tl.int64)
    q_at = q_row * stride_q_row + q_head * stride_q_head
    query_a = load_packed_rows(q, q_at, exists, d_a, SHAPE.DIM_A)
    d_b, query_b = d_a, query_a
    if SHAPE.DIM_B > 0:
        d_b = END_B - SHAPE.DIM_B + tl.arange(0, TILE.BLOCK_B)
        qb_at = q_row * stride_qb_row + q_head * stride_qb_head
        query_b = load_packed_rows(q_b, qb_at, exists, d_b, END_B)
    if FEATURES.ROPE:
        query_a = rotate_query(query_a, q, q_at, exists, row_position, d_a, rope, SHAPE.DIM_A, DIM)
        if SHAPE.DIM_B > 0:
            query_b = rotate_query(query_b, q, q_at, exists, row_position, d_b, rope, DIM, DIM)
    k += kv_head.to(tl.int64) * stride_k_head
    v += kv_head.to(tl.int64) * stride_v_head
    k_strides, v_strides = (stride_k_page, stride_k_token), (stride_v_page, stride_v_token)
    # Without bias or cap the scale is left out of the logits and multiplies their differences.
    FOLD_SCALE: tl.constexpr = not (FEATURES.CAP or FEATURES.ALIBI or kv_scale is not None)
    logit_scale = tl.cast(scale, tl.float32)
    value_scale = 1.0
    if kv_scale is not None:
        logit_scale *= tl.load(kv_scale)
        value_scale = tl.load(kv_scale + 1)
    factor = logit_scale * LOG2E if FOLD_SCALE else 1.0
    slope = alibi_slopes(head, SHAPE.LOG2_HEADS) if FEATURES.ALIBI else 0.0
    if MASK:
        # Without a plan the bits are those of [rows, request_keys].
        length = tl.load(kv_len + request) if PLANNED else request_keys
        bits_at = mask_offset(qo_indptr, kv_len, request, max_batch, 256) if PLANNED else 0
        mask_row = row_in_request if PLANNED else row + tile_row

    row_max, row_sum, acc = empty_state(BLOCK_M, BLOCK_VO)
    start = begin // TILE.RUN * TILE.RUN if FEATURES.PAGED else begin
    full, after_full, tiles = full_blocks(
        start, end, position + first_row, position + last_row, window_left, window_right,
        FEATURES.CAUSAL, FEATURES.WINDOW, FEATURES.RIGHT, BLOCK_N, SHAPE,
    )  # fmt: skip
    ONE_PHASE: tl.constexpr = MASK or FEATURES.SHARED  # two would not fit in the registers of large shared values
    if ONE_PHASE:
        full, after_full = 0, 0
    pages = load_pages(kv_indices, page_start, start, max_pages, num_pages, SHAPE, FEATURES.PAGED, TILE)
    for phase in tl.static_range(2 if ONE_PHASE else 0 if FEATURES.WINDOW else 1, 3):
        begin_tile = 0 if phase == 0 else full if phase == 1 else after_full
        end_tile = full if phase == 0 else after_full if phase == 1 else tiles
        for tile in range(begin_tile, end_tile):
            first = start + tile * BLOCK_N
            tokens, tile_tokens = first + n, end - first
            logits, key_a = qk_product(
                (query_a, query_b), (k, v), (d_a, d_b), (k_strides, v_strides), pages, page_start, first, tile_tokens,
                rope, phase != 1, SHAPE, FEATURES, TILE,
            )  # fmt: skip
            if not FOLD_SCALE:
                distance = token_position(tokens, SHAPE)[None, :] - row_in_request[:, None]
                logits = bias_and_cap(logits, logit_scale, cap, slope, distance, FEATURES.ALIBI, FEATURES.CAP)
            if phase != 1:
                visible = causal_or_window(
                    token_position(tokens, SHAPE), row_position, window_left, window_right,
                    FEATURES.CAUSAL, FEATURES.WINDOW, FEATURES.RIGHT,
                )  # fmt: skip
                visible = visible & (n < tile_tokens)[None, :]
                if MASK:
                    visible = visible & mask_bits(mask, bits_at, mask_row, length, tokens, mask_bytes)
                logits = tl.where(visible, logits, float("-inf"))
            row_max, row_sum, p, alpha = online_softmax_update(row_max, row_sum, logits, factor, phase != 1, FTZ=False)
            value = key_a
            if not FEATURES.SHARED:
                value = load_values(
                    v, v_strides, pages, page_start, first, tile_tokens, d_vo, phase != 1, SHAPE, FEATURES, TILE
                ).to(query_a.dtype)
            if phase != 1 and (MASK or FEATURES.WINDOW):  # a value that no row sees may be NaN, and 0 * NaN is NaN
                seen = tl.max((visible & exists[:, None]).to(tl.int32), 0) > 0
                value = tl.where(seen[:, None], value, 0.0)
            acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
            pages = load_pages(
                kv_indices, page_start, first + BLOCK_N, max_pages, num_pages, SHAPE, FEATURES.PAGED, TILE
            )

    if partial is not None:  # noqa: SIM102  compiled out if there is no slot
        if slot >= 0:
            at = (slot.to(tl.int64) * slot_rows + slot_row) * NUM_HEADS + head
            partial_lse = partial + tl.cast(slots, tl.int64) * slot_rows * (NUM_HEADS * SHAPE.DIM_VO)
            result, sums = acc * (inverse(row_sum) * value_scale)[:, None], log_sum_exp(row_max, row_sum)
            store_packed_rows(partial, partial_lse, result, sums, at, exists & (slot < slots), d_vo, SHAPE.DIM_VO, True)
            return
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists, other=0.0) * LOG2E
        row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink)
    at = q_row * NUM_HEADS + head
    result = saturate(acc * (inverse(row_sum) * value_scale)[:, None], out.dtype.element_ty)
    store_packed_rows(out, lse, result, log_sum_exp(row_max, row_sum), at, exists, d_vo, SHAPE.DIM_VO, FEATURES.LSE)


def launch_tiles(
    x: Operands,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    workspace: Tensor | None,
    o: AttentionOptions,
) -> None:
    """Launch the general kernel (:data:`.prefill_call.LaunchTiles`)."""
    num_heads, num_kv_heads, dim_a, dim_b, dim_vo = *x.heads, *x.dims
    tile_rows, num_items = work_items(batch, x.q.shape[0])
    group = num_heads // num_kv_heads
    plan = batch if isinstance(batch, PrefillPlan) else None
    problem = None if plan is None else PlanProblem.of(plan.problem)
    paged = plan is not None and bool(plan.kv_indices.shape[0] > 0)
    page_size = problem.page_size if problem is not None and paged else 0
    packed_rows = tile_rows * group
    tile = prefill_tile(x.q.device, x.q.dtype, dim_a + dim_b, dim_vo, x.shared, packed_rows)
    if o.pos_encoding == "NONE":
        dims = (dim_a + dim_b, dim_vo)
        tile = tuned(tile, "prefill", x.q.device, x.q.dtype, x.k.dtype, *dims, group, page_size, packed_rows)
    blocks = triton.cdiv(packed_rows, tile.rows)
    causal = o.causal and o.mask is None
    positional = causal or o.window_left >= 0 or o.window_right >= 0 or o.pos_encoding != "NONE"
    run = run_length(page_size, tile.kv) if paged else tile.kv
    if any(type(stride) is int and stride * run >= 1 << 31 for stride in (x.k_strides[1], x.v_strides[1])):
        run = 1  # within a run, offsets have 32 bits
    launch(
        prefill_kernel,
        (num_items * num_kv_heads * blocks,),
        tile.options,
        q=x.q,
        q_b=x.q_b,
        k=x.k,
        v=x.v,
        sinks=o.sinks,
        kv_scale=o.kv_scale,
        mask=o.mask,
        out=out,
        lse=lse,
        partial=workspace,
        kv_len=None if plan is None else plan.kv_len,
        **plan_arguments(batch),
        scale=softmax_scale(o.sm_scale, dim_a + dim_b),
        cap=o.logits_soft_cap,
        window_left=o.window_left,
        window_right=o.window_right,
        log2_theta=math.log2(o.rope_theta),
        inverse_rope_scale=1 / o.rope_scale,
        rows=x.q.shape[0],
        num_pages=x.k.shape[0] if paged else x.kv_rows,
        mask_bytes=0 if o.mask is None else o.mask.shape[0],
        stride_q_row=x.q.stride(0),
        stride_q_head=x.q.stride(1),
        stride_qb_row=x.q_b.stride(0),
        stride_qb_head=x.q_b.stride(1),
        stride_k_page=x.k_strides[0],
        stride_k_token=x.k_strides[1],
        stride_k_head=x.k_strides[2],
        stride_v_page=x.v_strides[0],
        stride_v_token=x.v_strides[1],
        stride_v_head=x.v_strides[2],
        SHAPE=Shape(
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            DIM_A=dim_a,
            DIM_B=dim_b,
            DIM_VO=dim_vo,
            PAGE_SIZE=1 if problem is None else problem.page_size,
            TILE_ROWS=tile_rows,
            LOG2_HEADS=num_heads.bit_length() - 1,
            **shard_of(problem, positional)._asdict(),
        ),
        FEATURES=Features(
            PAGED=paged,
            SHARED=x.shared,
            CAUSAL=causal,
            WINDOW=o.window_left >= 0,
            RIGHT=o.window_right >= 0 and not causal,
            CAP=o.logits_soft_cap > 0,
            ROPE=o.pos_encoding == "ROPE_LLAMA",
            ALIBI=o.pos_encoding == "ALIBI",
            LSE=lse.dim() > 1,
        ),
        TILE=Tile(
            BLOCK_M=tile.rows,
            BLOCK_N=tile.kv,
            RUN=run,
            BLOCK_A=pad(dim_a),
            BLOCK_B=pad(dim_b),
            BLOCK_VO=pad(dim_vo),
        ),
    )


batch_prefill, ragged_prefill, single_prefill, block_sparse_prefill = prefill_ops(launch_tiles)
