"""Decode plans with a fixed split size, in one launch: a request has the same splits in every batch.

The integers are those of :mod:`attn_ops.kernels.reference.plan`. Program 0 makes the work list, the others copy page
numbers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import publish
from attn_ops.kernels.triton.plan_steps import COPY_PAGES, blocks_of_decode, clear, copy_page_numbers, count_tokens
from attn_ops.kernels.triton.search import count_at_most
from attn_ops.kernels.triton.work_item import store_work_item
from attn_ops.plan.state import KV_BLOCK, DecodePlan, PlanProblem

STEP_ITEMS = 256
"""Work items written in one step."""

MAX_REQUESTS_OF_FOUR_WARPS = 512
"""Larger capacities take 8 warps."""


@triton.jit(
    do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "num_ctas", "max_items", "num_split_counters"]
)
def plan_decode_fixed_split_kernel(
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    seq_lens,  # [batch], or None for the lengths of the page table
    plan_kv_indptr,  # [max_batch + 1]; this and those below are written
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_items, WORK_STRIDE]
    cta_indptr,  # [num_ctas + 1]
    merge_indptr,  # [max_batch + 1]
    split_counters,  # [num_split_counters]
    batch,
    num_indices,
    max_batch,
    max_pages,
    num_ctas,
    max_items,
    num_split_counters,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARD: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,  # KV blocks of every split but a request's last
    KV_BLOCK: tl.constexpr,
    B: tl.constexpr,  # power of 2, at least max_batch
    LOG_B: tl.constexpr,
    C: tl.constexpr,  # power of 2, more than num_ctas
    STEP_ITEMS: tl.constexpr,
    COPY_PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: 1 + one program for each COPY_PAGES page numbers.
    Owns: program 0 all fields of the plan but kv_indices, program ``i > 0`` page numbers ``(i - 1) * COPY_PAGES`` on;
        all programs a part of split_counters.
    Loop invariant: the work items before ``i`` are written.
    Barriers: ``griddepcontrol.wait`` at the start; every program publishes its stores with a release at its end.
    Bound by: latency of one program, which writes all items of the capacity.
    """
    if PDL:
        gdc_wait()
    clear(split_counters, num_split_counters, COPY_PAGES)
    if tl.program_id(0) > 0:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - 1, COPY_PAGES)
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
    splits = tl.cdiv(blocks, SPLIT_BLOCKS)
    item_end = tl.cumsum(splits, 0)
    first_item, num_items = item_end - splits, tl.max(item_end, 0)
    merge_end = tl.cumsum(tl.where(splits > 1, splits, 0), 0)
    first_slot = tl.where(splits > 1, merge_end - splits, -1)

    for i in range(0, max_items, STEP_ITEMS):
        item = i + tl.arange(0, STEP_ITEMS)
        request = tl.minimum(count_at_most(item_end, item, B, LOG_B), B - 1)
        split, used = item - tl.gather(first_item, request, 0), item < num_items
        in_work = item < max_items
        length, slot = tl.gather(kv_len, request, 0), tl.gather(first_slot, request, 0)
        begin = (tl.gather(first_block, request, 0) + split * SPLIT_BLOCKS) * KV_BLOCK
        row = tl.where(used, request, 0)
        store_work_item(
            work,
            item,
            row,
            used.to(tl.int32),
            tl.where(used, tl.maximum(begin, tl.gather(start, request, 0)), 0),
            tl.where(used, tl.minimum(begin + SPLIT_BLOCKS * KV_BLOCK, length), 0),
            tl.where(used, tl.gather(seq_len, request, 0) - 1, 0),
            tl.where(used, tl.gather(first_page, request, 0), 0),
            tl.where(used, tl.where(slot < 0, -1, slot + split), 0),
            row,
            in_work,
        )

    # A CTA has the items that begin in its equal part of all KV blocks.
    ends = tl.cumsum(blocks, 0)
    boundary = (tl.minimum(c, num_ctas).to(tl.int64) * tl.max(ends, 0) // num_ctas).to(tl.int32)
    passed = count_at_most(ends, boundary, B, LOG_B)
    request = tl.minimum(passed, B - 1)
    in_request = boundary - tl.gather(ends - blocks, request, 0)
    cta_item = tl.gather(first_item, request, 0) + tl.cdiv(in_request, SPLIT_BLOCKS)
    cta_item = tl.minimum(tl.where(passed < B, cta_item, num_items), max_items)
    tl.store(cta_indptr + c, cta_item, mask=c <= num_ctas)
    tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
    tl.store(plan_kv_indptr + b, first_page, mask=b == 0)
    tl.store(plan_kv_indptr + 1 + b, end_page, mask=b < max_batch)
    tl.store(merge_indptr + b, tl.zeros_like(b), mask=b == 0)
    tl.store(merge_indptr + 1 + b, merge_end, mask=b < max_batch)
    publish(merge_indptr)


def plan_fixed_split(p: DecodePlan, num_indices: int, arguments: dict[str, Any]) -> None:
    """Fill the plan with splits of the size in its problem; ``arguments`` are those that the kernels share."""
    block_batch, pdl = triton.next_power_of_2(p.kv_len.shape[0]), supports_pdl(p.kv_len)
    launch(
        plan_decode_fixed_split_kernel,
        (1 + triton.cdiv(num_indices, COPY_PAGES),),
        Options(num_warps=4 if block_batch <= MAX_REQUESTS_OF_FOUR_WARPS else 8, launch_pdl=pdl),
        **arguments,
        max_items=p.work.shape[0],
        SPLIT_BLOCKS=PlanProblem.of(p.problem).split // KV_BLOCK,
        LOG_B=block_batch.bit_length() - 1,
        STEP_ITEMS=STEP_ITEMS,
        PDL=pdl,
    )
