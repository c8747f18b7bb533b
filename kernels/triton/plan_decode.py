"""Decode plans with splits for load balance, in one launch.

Two programs make the work list in registers, the others copy page numbers. Each of the two computes the whole schedule
and writes a part of it. The integers are those of :mod:`attn_ops.kernels.reference.plan`. The KV blocks of all requests
follow one another in one sequence, which *boundaries* divide between the CTAs. A boundary inside a request is a split
point. Nothing is read back from memory: gathers find the boundaries of requests, and the requests of boundaries.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import publish
from attn_ops.kernels.triton.plan_steps import (
    COPY_PAGES,
    at_previous,
    blocks_of_decode,
    clear,
    copy_page_numbers,
    count_tokens,
    window_start,
)
from attn_ops.kernels.triton.work_item import WORK_STRIDE, store_work_item, store_work_items_wide
from attn_ops.plan.state import IMBALANCE_DENOM, KV_BLOCK, DecodePlan, PlanProblem

SCHEDULER_CTAS = tl.constexpr(2)
"""Programs that make the schedule: program 0 writes the first item of each request, program 1 all other items."""

REQUESTS_PER_WARP, MIN_WARPS, MAX_WARPS = 128, 4, 16

WIDE_STORE_REQUESTS = tl.constexpr(128)
"""Capacity in requests above which program 0 exchanges columns of work items between threads for wide stores."""


@triton.jit
def at_next(values, i, SIZE: tl.constexpr):
    """``values[i + 1]``, or the last value where i is the last index."""
    return tl.gather(values, tl.minimum(i + 1, SIZE - 1), 0)


@triton.jit
def first_even_boundary(x, total, num_ctas, INT64: tl.constexpr):
    """The least ``c`` with ``c * total // num_ctas >= x``: ``x * num_ctas / total``, rounded up.

    The float32 quotient may be one too small, which is corrected, twice. INT64: the products exceed int32.
    """
    c = (x.to(tl.float32) * (tl.cast(num_ctas, tl.float32) / tl.maximum(total, 1).to(tl.float32))).to(tl.int32)
    if INT64:
        x, total = x.to(tl.int64), total.to(tl.int64)
    scaled = x * num_ctas
    c += (c * total < scaled).to(tl.int32)
    c += (c * total < scaled).to(tl.int32)
    return tl.minimum(tl.maximum(c, 0), num_ctas)


@triton.jit
def place_boundaries(
    ends, begins, total, passed, num_ctas,
    IMBALANCE_DENOM: tl.constexpr, B: tl.constexpr, C: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """``(boundary [C], even, inside, begin, end)`` of the CTAs, of requests ``begins, ends [B]``.

    Even boundaries divide the sequence into equal parts. A boundary moves to the nearest end of a request if that is
    close, or if all of them can without too much imbalance.

    passed      ``[C]``: requests that end at or before each even boundary
    boundary    the end of the sequence from ``num_ctas`` on
    inside      whether this is a split point, and no earlier boundary is the same
    begin, end  of the request that holds the even boundary
    INT64       the products exceed int32
    """
    c = tl.arange(0, C)
    per_cta, remainder = total // num_ctas, total % num_ctas
    rest = c.to(tl.int64) * remainder if INT64 else c * remainder
    even = tl.where(c < num_ctas, c * per_cta + (rest // num_ctas).to(tl.int32), total)
    request = tl.minimum(passed, B - 1)
    begin, end = tl.gather(begins, request, 0), tl.gather(ends, request, 0)
    snapped = tl.where(even - begin < end - even, begin, end)
    longest = tl.max(at_next(snapped, c, C) - snapped, 0).to(tl.int64)
    balanced = longest * num_ctas * IMBALANCE_DENOM <= total.to(tl.int64) * (IMBALANCE_DENOM + 1)
    close = tl.abs(snapped - even).to(tl.int64) * num_ctas * IMBALANCE_DENOM * 2 <= total
    boundary = tl.where(balanced | close, snapped, even)
    inside = (boundary == even) & (boundary > begin) & (boundary < total) & (boundary > at_previous(boundary, c, -1))
    return boundary, even, inside, begin, end


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def both_sums(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def store_items(
    work, item, mask, request, begin, end, offset, start, kv_len, seq_len, page_start, slot,
    KV_BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write work items; ``begin`` and ``end`` are in the sequence, ``offset`` later in the request, in KV blocks.

    ``start`` is the first token inside the window, ``seq_len`` the length on all ranks. A decode row has the number of
    its request.
    """
    kv_begin, kv_end = tl.maximum((begin + offset) * KV_BLOCK, start), tl.minimum((end + offset) * KV_BLOCK, kv_len)
    position, rows = seq_len - 1, tl.zeros_like(request) + 1
    if WIDE:
        store_work_items_wide(work, item, request, rows, kv_begin, kv_end, position, page_start, slot, request, mask)
    else:
        store_work_item(work, item, request, rows, kv_begin, kv_end, position, page_start, slot, request, mask)


@triton.jit(do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "num_ctas", "num_split_counters"])
def plan_decode_kernel(
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    seq_lens,  # [batch], or None for the lengths of the page table
    plan_kv_indptr,  # [max_batch + 1]; this and those below are written
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_batch + num_ctas, WORK_STRIDE]
    cta_indptr,  # [num_ctas + 1]
    merge_indptr,  # [max_batch + 1]
    split_counters,  # [num_split_counters]
    batch,
    num_indices,
    max_batch,
    max_pages,
    num_ctas,
    num_split_counters,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    IMBALANCE_DENOM: tl.constexpr,
    B: tl.constexpr,  # power of 2, at least max_batch
    C: tl.constexpr,  # power of 2, more than num_ctas
    COPY_PAGES: tl.constexpr,
    INT64: tl.constexpr,  # the sequence's length times num_ctas exceeds int32
    PDL: tl.constexpr,
):
    """Grid: SCHEDULER_CTAS, then one program for each COPY_PAGES page numbers.
    Owns: program 0 the first work item of each request; program 1 all other items, the indptrs and kv_len; the others
        COPY_PAGES page numbers each; all programs a part of split_counters.
    Loop invariant: the work items before ``i`` are written.
    Barriers: ``griddepcontrol.wait`` at the start; every program publishes its stores with a release at its end.
    Bound by: latency of the scans and gathers of one program; there is no host copy and one launch.
    """
    if PDL:
        gdc_wait()
    clear(split_counters, num_split_counters, COPY_PAGES)
    if tl.program_id(0) >= SCHEDULER_CTAS:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - SCHEDULER_CTAS, COPY_PAGES)
        return
    b, c = tl.arange(0, B), tl.arange(0, C)
    # Loaded here, not by a function (see work_item.py).
    first_page = tl.load(kv_indptr + tl.minimum(b, batch))
    end_page = tl.load(kv_indptr + tl.minimum(b + 1, batch))
    last_len = tl.load(last_page_len + b, mask=b < batch, other=1)
    kv_len = tl.where(b < batch, count_tokens(first_page, end_page, last_len, max_pages, PAGE_SIZE), 0)
    seq_len = kv_len
    if seq_lens is not None:
        seq_len = tl.load(seq_lens + b, mask=b < batch, other=0)
    kv_len, start, first_block, blocks = blocks_of_decode(
        kv_len, seq_len, seq_lens is not None, WINDOW, SHARD, KV_BLOCK
    )
    nonempty = (blocks > 0).to(tl.int32)
    ends, requests_until = tl.associative_scan((blocks, nonempty), 0, both_sums)
    begins, total = ends - blocks, tl.sum(blocks, 0)
    if tl.program_id(0) == 1:
        tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
        tl.store(plan_kv_indptr + b, first_page, mask=b < max_batch)
        tl.store(plan_kv_indptr + max_batch, tl.load(kv_indptr + batch))

    # [C]: the boundaries of the CTAs, the split points among them, and the work items that begin before each.
    first_c = first_even_boundary(begins, total, num_ctas, INT64)
    end_c = first_even_boundary(ends, total, num_ctas, INT64)
    passed = tl.cumsum(tl.histogram(end_c, C), 0)
    boundary, even, inside, request_begin, request_end = place_boundaries(
        ends, begins, total, passed, num_ctas, IMBALANCE_DENOM, B, C, INT64
    )
    split_points_until = tl.cumsum(inside.to(tl.int32), 0)
    boundary_item = at_previous(requests_until, passed, 0) + (boundary > even) + split_points_until

    # [B]: the first work item of each request, its split points, and the slots of its splits.
    split_points_before = at_previous(split_points_until, first_c, 0)
    item = requests_until - nonempty + split_points_before
    split_points = at_previous(split_points_until, end_c, 0) - split_points_before
    splits = tl.where(split_points > 0, split_points + 1, 0)
    merge_end = tl.cumsum(splits, 0)
    first_slot = merge_end - splits
    slot = tl.where(splits > 0, first_slot, -1)
    offset = first_block - begins
    if tl.program_id(0) == 0:
        next_split_point = tl.associative_scan(tl.where(inside, boundary, total), 0, smaller, reverse=True)
        end = tl.minimum(ends, tl.gather(next_split_point, first_c, 0))
        store_items(
            work, item, nonempty > 0, b, begins, end, offset, start, kv_len, seq_len, first_page, slot,
            KV_BLOCK, B > WIDE_STORE_REQUESTS,
        )  # fmt: skip
        publish(work)
        return

    # [C]: the work items that begin at a split point. Each ends at the next different boundary, or with its request.
    request = tl.minimum(passed, B - 1)
    end = tl.minimum(request_end, tl.maximum(at_next(boundary, c, C), boundary + 1))
    length, page = tl.gather(kv_len, request, 0), tl.gather(first_page, request, 0)
    whole = length
    if seq_lens is not None:
        whole = tl.gather(seq_len, request, 0)
    start = window_start(whole, WINDOW, SHARD)
    offset = start // KV_BLOCK - request_begin
    slot = tl.gather(first_slot - item, request, 0) + boundary_item
    # The sums of page tables that overlap may exceed int32; there is no item behind the last in any case.
    max_items = max_batch + num_ctas
    inside = inside & (boundary_item < max_items)
    store_items(
        work, boundary_item, inside, request, boundary, end, offset, start, length, whole, page, slot, KV_BLOCK, False
    )

    CLEAR_ITEMS: tl.constexpr = max(B, C)
    column = tl.arange(0, WORK_STRIDE)
    for i in range(tl.max(boundary_item, 0), max_items, CLEAR_ITEMS):
        unused = (i + tl.arange(0, CLEAR_ITEMS))[:, None]
        zeros = tl.zeros((CLEAR_ITEMS, WORK_STRIDE), tl.int32)
        tl.store(work + unused * WORK_STRIDE + column, zeros, mask=unused < max_items)

    tl.store(cta_indptr + c, boundary_item, mask=c <= num_ctas)
    tl.store(merge_indptr + b, first_slot, mask=b < max_batch)
    tl.store(merge_indptr + max_batch, tl.max(merge_end, 0))
    publish(merge_indptr + max_batch)


def plan_for_load_balance(p: DecodePlan, num_indices: int, arguments: dict[str, Any]) -> None:
    """Fill the plan with splits for load balance; ``arguments`` are those that the kernels share."""
    problem = PlanProblem.of(p.problem)
    max_batch, num_ctas = p.kv_len.shape[0], p.cta_indptr.shape[0] - 1
    block_batch, pdl = triton.next_power_of_2(max_batch), supports_pdl(p.kv_len)
    max_product = num_ctas * (p.kv_indices.shape[0] * problem.page_size // KV_BLOCK + max_batch)
    launch(
        plan_decode_kernel,
        (SCHEDULER_CTAS.value + triton.cdiv(num_indices, COPY_PAGES),),
        Options(min(MAX_WARPS, max(MIN_WARPS, block_batch // REQUESTS_PER_WARP)), launch_pdl=pdl),
        **arguments,
        IMBALANCE_DENOM=IMBALANCE_DENOM,
        INT64=not isinstance(max_product, int) or max_product >= 1 << 31,
        PDL=pdl,
    )
