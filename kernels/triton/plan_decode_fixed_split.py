"""``attn::plan_decode`` in one launch where pieces have a fixed size: every request is cut alike in every batch.

The integers are those of :mod:`attn_ops.kernels.reference.plan`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import MAX_PUBLISHED_REQUESTS, publish
from attn_ops.kernels.triton.plan_decode import COPY, clear, copy_page_numbers, count_tokens
from attn_ops.kernels.triton.plan_decode import plan_decode as plan_shares
from attn_ops.kernels.triton.search import count_at_most
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attn_ops.plan.state import KV_BLOCK, DecodePlan, PlanProblem

ITEMS = 256
"""Work items made at a time."""


@triton.jit(
    do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "num_ctas", "max_items", "num_split_counters"]
)
def plan_pieces_kernel(
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    plan_kv_indptr,  # [max_batch + 1]
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_items, 8]
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
    SIZE: tl.constexpr,  # units in a piece
    KV_BLOCK: tl.constexpr,
    B: tl.constexpr,  # power of 2, at least max_batch
    LOG_B: tl.constexpr,
    C: tl.constexpr,  # power of 2, more than num_ctas
    ITEMS: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    clear(split_counters, num_split_counters, COPY)
    if tl.program_id(0) > 0:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - 1, COPY)
        return
    b, c = tl.arange(0, B), tl.arange(0, C)
    first_page = tl.load(kv_indptr + tl.minimum(b, batch))
    end_page = tl.load(kv_indptr + tl.minimum(b + 1, batch))
    last_len = tl.load(last_page_len + b, mask=b < batch, other=1)
    kv_len = tl.where(b < batch, count_tokens(first_page, end_page, last_len, max_pages, PAGE_SIZE), 0)
    start = tl.maximum(kv_len - WINDOW, 0) if WINDOW else tl.zeros_like(kv_len)
    first_unit = start // KV_BLOCK
    units = tl.cdiv(kv_len, KV_BLOCK) - first_unit
    pieces = tl.cdiv(units, SIZE)
    piece_end = tl.cumsum(pieces, 0)
    first_piece, total = piece_end - pieces, tl.max(piece_end, 0)
    merge_end = tl.cumsum(tl.where(pieces > 1, pieces, 0), 0)
    first_slot = tl.where(pieces > 1, merge_end - pieces, -1)

    for i in range(0, max_items, ITEMS):
        item = i + tl.arange(0, ITEMS)
        request = tl.minimum(count_at_most(piece_end, item, B, LOG_B), B - 1)
        piece, used, here = item - tl.gather(first_piece, request, 0), item < total, item < max_items
        length, slot = tl.gather(kv_len, request, 0), tl.gather(first_slot, request, 0)
        begin = (tl.gather(first_unit, request, 0) + piece * SIZE) * KV_BLOCK
        record = work + item * 8
        tl.store(record + 0, tl.where(used, request, 0), mask=here)
        tl.store(record + 1, used.to(tl.int32), mask=here)
        tl.store(record + 2, tl.where(used, tl.maximum(begin, tl.gather(start, request, 0)), 0), mask=here)
        tl.store(record + 3, tl.where(used, tl.minimum(begin + SIZE * KV_BLOCK, length), 0), mask=here)
        tl.store(record + 4, tl.where(used, length - 1, 0), mask=here)
        tl.store(record + 5, tl.where(used, tl.gather(first_page, request, 0), 0), mask=here)
        tl.store(record + 6, tl.where(used, tl.where(slot < 0, -1, slot + piece), 0), mask=here)
        tl.store(record + 7, tl.where(used, request, 0), mask=here)

    # Each share has the pieces that begin in it.
    ends = tl.cumsum(units, 0)
    cut = (tl.minimum(c, num_ctas).to(tl.int64) * tl.max(ends, 0) // num_ctas).to(tl.int32)
    passed = count_at_most(ends, cut, B, LOG_B)
    request = tl.minimum(passed, B - 1)
    begun = tl.gather(first_piece, request, 0) + tl.cdiv(cut - tl.gather(ends - units, request, 0), SIZE)
    begun = tl.minimum(tl.where(passed < B, begun, total), max_items)
    tl.store(cta_indptr + c, begun, mask=c <= num_ctas)
    tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
    tl.store(plan_kv_indptr + b, first_page, mask=b == 0)
    tl.store(plan_kv_indptr + 1 + b, end_page, mask=b < max_batch)
    tl.store(merge_indptr + b, tl.zeros_like(b), mask=b == 0)
    tl.store(merge_indptr + 1 + b, merge_end, mask=b < max_batch)
    publish(merge_indptr)


def plan_decode(kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]) -> None:
    """Pieces of the size that the plan names, even shares where it names none."""
    p = DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    max_batch, num_ctas = p.kv_len.shape[0], p.cta_indptr.shape[0] - 1
    if not problem.split or max_batch > MAX_PUBLISHED_REQUESTS:
        plan_shares(kv_indptr, kv_indices, kv_last_page_len, plan)
        return
    block_batch, num_indices = triton.next_power_of_2(max_batch), kv_indices.shape[0]
    pdl = starts_early(kv_indptr)
    launch(
        plan_pieces_kernel,
        (1 + triton.cdiv(num_indices, COPY),),
        (
            *(kv_indptr, kv_indices, kv_last_page_len),
            *(p.kv_indptr, p.kv_indices, p.kv_len, p.work, p.cta_indptr, p.merge_indptr, p.split_counters),
        ),
        (
            kv_indptr.shape[0] - 1,
            num_indices,
            max_batch,
            p.kv_indices.shape[0],
            num_ctas,
            p.work.shape[0],
            p.split_counters.numel(),
        ),
        (),
        (
            *(problem.page_size, problem.window, problem.split // KV_BLOCK, KV_BLOCK),
            *(block_batch, block_batch.bit_length() - 1, triton.next_power_of_2(num_ctas + 1), ITEMS, COPY, pdl),
        ),
        Options(num_warps=4 if block_batch <= 512 else 8, launch_pdl=pdl),
    )
