"""``attn::plan_prefill`` in one launch: program 0 makes the work list, the others copy page numbers.

The integers are those of :mod:`attn_ops.kernels.reference.plan`. Program 0 sorts the query tiles of all requests by
length with a stable counting sort, longest first, and divides the KV of some tiles into splits. In plans with capacity
for more than :data:`MAX_TILES` work items it goes over the tiles up to seven times, :data:`CHUNK_TILES` at a time.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attn_ops.kernels.reference.plan import plan_prefill as plan_in_closed_form
from attn_ops.kernels.triton.balance_prefill import balanced_splits
from attn_ops.kernels.triton.context import shard_of
from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import publish
from attn_ops.kernels.triton.plan_steps import COPY_PAGES, copy_page_numbers, count_tokens
from attn_ops.kernels.triton.query_tiles import (
    BUCKETS,
    NOT_SPLIT,
    Tiling,
    after_first,
    divide_tile,
    first_items,
    items_of_buckets,
    kv_blocks,
    length_bucket,
    locate_tiles,
    split_points,
)
from attn_ops.kernels.triton.work_item import SPLIT_TILE_STRIDE, WORK_STRIDE, store_split_tile, store_work_item
from attn_ops.plan.sizing import ctas_of_tile, planned_cluster_splits, tiles_per_wave
from attn_ops.plan.state import INT32_MAX, KV_BLOCK, PlanProblem, PrefillPlan, is_published
from attn_ops.symbolic_sizes import at_least, statically_known_true

MIN_TILES, MAX_TILES, CHUNK_TILES = 32, 512, 256
"""Query tiles that program 0 processes at a time: the capacity of the plan, rounded up to a power of 2 from MIN_TILES
to MAX_TILES; CHUNK_TILES if the capacity is larger."""

MIN_WARPS, MAX_WARPS = 4, 16
"""Bounds of the warps of a program: a thread for each query tile and each request within them."""

STORES = tl.constexpr(256)
"""Work items that are stored at a time. With more tiles than this at a time, one item per tile."""


@triton.jit
def store_zeros(records, begin, end, TILES: tl.constexpr, STRIDE: tl.constexpr):
    """Set records ``begin`` to ``end - 1`` of ``STRIDE`` int32 to 0."""
    for first in range(begin, end, TILES):
        i = first + tl.arange(0, TILES)
        at = i[:, None] * STRIDE + tl.arange(0, STRIDE)[None, :]
        tl.store(records + at, tl.zeros((TILES, STRIDE), tl.int32), mask=(i < end)[:, None])


@triton.jit
def fixed_splits(
    num_tiles, limit, lengths, max_splits, SPLIT_BLOCKS: tl.constexpr, TILING: tl.constexpr, SHARD: tl.constexpr
):
    """``(longest, first_bucket, split_blocks)`` of splits of SPLIT_BLOCKS KV blocks, if ``max_splits`` hold them."""
    total, longest = tl.full((), 0, tl.int64), 0
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        _, blocks = kv_blocks(begin, end, used)
        total += tl.sum(tl.where(blocks > SPLIT_BLOCKS, tl.cdiv(blocks, SPLIT_BLOCKS), 0).to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(tl.where(used, end - begin, 0), 0))
    first_bucket, split_blocks = BUCKETS, NOT_SPLIT
    if total <= max_splits:
        first_bucket, split_blocks = -1, SPLIT_BLOCKS
    return longest, first_bucket, split_blocks


@triton.jit(
    do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "max_items", "max_split_tiles", "wave"]
)
def plan_prefill_kernel(
    qo_indptr,  # [batch + 1]
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    seq_lens,  # [batch], or None for the lengths of the page table
    plan_qo_indptr,  # [max_batch + 1]; these and those below are written
    plan_kv_indptr,  # [max_batch + 1]
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_items, WORK_STRIDE]
    split_tiles,  # [max_split_tiles, SPLIT_TILE_STRIDE]
    queue,  # [2]
    batch,
    num_indices,
    max_batch,
    max_pages,
    max_items,
    max_split_tiles,
    wave,  # query tiles that the device computes at a time, 1 or more
    PAGE_SIZE: tl.constexpr,
    TILING: tl.constexpr,
    SHARD: tl.constexpr,
    CTAS: tl.constexpr,  # of a query tile
    CLUSTER_SPLITS: tl.constexpr,  # CTAs that divide its KV
    HAS_SPLITS: tl.constexpr,  # whether the plan may have capacity for splits
    SPLIT_BLOCKS: tl.constexpr,  # KV blocks of a split of fixed size, 0 for splits for load balance
    ONE_CHUNK: tl.constexpr,  # the tiles that are processed at a time are all tiles
    COPY_PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: 1 + one program for each COPY_PAGES page numbers.
    Owns: program 0 all fields of the plan but kv_indices, program ``i > 0`` page numbers ``(i - 1) * COPY_PAGES`` on.
    Loop invariant: in the last pass ``bucket_item`` is the next work item of each length bucket; ``num_slots`` and
    ``num_split_tiles`` count those of the tiles before these.
    Barriers: ``griddepcontrol.wait`` at the start; the plan is published with a release at the end.
    Bound by: latency of one program that sorts; it is one launch and needs no host copy.
    """
    if PDL:
        gdc_wait()
    if tl.program_id(0) > 0:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - 1, COPY_PAGES)
        return
    b = tl.arange(0, TILING.B)
    # Loaded here, not by a function: see work_item.py.
    first_page = tl.load(kv_indptr + tl.minimum(b, batch))
    end_page = tl.load(kv_indptr + tl.minimum(b + 1, batch))
    last_len = tl.load(last_page_len + b, mask=b < batch, other=1)
    kv_len = tl.where(b < batch, count_tokens(first_page, end_page, last_len, max_pages, PAGE_SIZE), 0)
    seq_len = kv_len
    if seq_lens is not None:
        seq_len = tl.load(seq_lens + b, mask=b < batch, other=0)
    # The number of rows that the tiles hold however they are divided into requests; attention writes zeros to the rest.
    max_rows = (max_items - max_batch - 2 * max_split_tiles) * TILING.ROWS
    first_row = tl.minimum(tl.maximum(tl.load(qo_indptr + tl.minimum(b, batch)), 0), max_rows)
    end_row = tl.minimum(tl.maximum(tl.load(qo_indptr + tl.minimum(b + 1, batch)), 0), max_rows)
    qo_len = tl.maximum(end_row - first_row, 0)
    tiles_end = tl.cumsum(tl.cdiv(qo_len, TILING.ROWS), 0)
    num_tiles = tl.minimum(tl.max(tiles_end, 0), max_items)

    lengths = (tiles_end, qo_len, kv_len, seq_len)

    # Which tiles are split, and how long their splits are.
    limit = TILING.TILES if ONE_CHUNK else num_tiles  # of the loops over tiles
    longest_tile, first_bucket, skip, split_blocks = 0, BUCKETS, 0, NOT_SPLIT
    if HAS_SPLITS:
        if SPLIT_BLOCKS:
            longest_tile, first_bucket, split_blocks = fixed_splits(
                num_tiles, limit, lengths, 2 * max_split_tiles, SPLIT_BLOCKS, TILING, SHARD
            )
        else:
            longest_tile, first_bucket, skip, split_blocks = balanced_splits(
                num_tiles, limit, lengths, 2 * max_split_tiles, wave, CTAS, CLUSTER_SPLITS, TILING, SHARD
            )
    # The longest split.
    longest, to_skip = 0, skip
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        divided, to_skip = after_first(begin, end, used, longest_tile, first_bucket, to_skip)
        _, _, _, length = divide_tile(begin, end, used, divided, split_blocks, SPLIT_BLOCKS > 0)
        longest = tl.maximum(longest, tl.max(length, 0))
    # The work items of each length bucket.
    count, to_skip = tl.zeros((BUCKETS,), tl.int32), skip
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        divided, to_skip = after_first(begin, end, used, longest_tile, first_bucket, to_skip)
        _, _, splits, length = divide_tile(begin, end, used, divided, split_blocks, SPLIT_BLOCKS > 0)
        count += items_of_buckets(length_bucket(length, longest, used), splits)
    # Write the work items in the order of buckets, and the split tiles.
    bucket_item = tl.cumsum(count, 0) - count
    num_items, num_slots, num_split_tiles = tl.sum(count, 0), 0, 0
    for first in range(0, limit, TILING.TILES):
        used, request, offset, rows, position, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        divided, skip = after_first(begin, end, used, longest_tile, first_bucket, skip)
        first_block, blocks, splits, length = divide_tile(begin, end, used, divided, split_blocks, SPLIT_BLOCKS > 0)
        bucket = length_bucket(length, longest, used)
        item = first_items(bucket, splits, bucket_item)
        is_split = splits > 1
        slots_up_to = tl.cumsum(tl.where(is_split, splits, 0), 0)
        split_tiles_up_to = tl.cumsum(is_split.to(tl.int32), 0)
        slot = tl.where(is_split, num_slots + slots_up_to - splits, -1)
        row, page = tl.gather(first_row, request, 0) + offset, tl.gather(first_page, request, 0)
        index = num_split_tiles + split_tiles_up_to - 1
        store_split_tile(split_tiles, index, row, rows, slot, splits, is_split & (index < max_split_tiles))

        SPLITS: tl.constexpr = max(1, STORES // TILING.TILES)  # of each tile that are stored at a time
        most = tl.max(splits, 0)
        item, row, rows, position, page = item[:, None], row[:, None], rows[:, None], position[:, None], page[:, None]
        request, begin, end, slot = request[:, None], begin[:, None], end[:, None], slot[:, None]
        of_tile = splits[:, None]
        for first_split in range(0, most, SPLITS):
            split = first_split + tl.arange(0, SPLITS)[None, :]
            at, mask = item + split, (split < of_tile) & (item + split < max_items)
            split_begin, split_end = split_points(first_block[:, None], blocks[:, None], split, of_tile, SPLIT_BLOCKS)
            kv_begin = tl.where(split > 0, split_begin, begin)
            kv_end = tl.where(split + 1 < of_tile, split_end, end)
            split_slot = tl.where(of_tile > 1, slot + split, -1)
            store_work_item(work, at, row, rows, kv_begin, kv_end, position, page, split_slot, request, mask)
        bucket_item += items_of_buckets(bucket, splits)
        num_slots += tl.max(slots_up_to, 0)
        num_split_tiles += tl.max(split_tiles_up_to, 0)
    store_zeros(work, num_items, max_items, TILING.TILES, WORK_STRIDE)
    store_zeros(split_tiles, num_split_tiles, max_split_tiles, TILING.TILES, SPLIT_TILE_STRIDE)
    tl.store(queue, 0)
    tl.store(queue + 1, tl.minimum(num_items, max_items))

    tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
    tl.store(plan_kv_indptr + b, first_page, mask=b == 0)
    tl.store(plan_kv_indptr + 1 + b, end_page, mask=b < max_batch)
    tl.store(plan_qo_indptr + b, first_row, mask=b == 0)
    tl.store(plan_qo_indptr + 1 + b, end_row, mask=b < max_batch)
    publish(plan_qo_indptr)


def tiles_at_a_time(max_items: int) -> int:
    """Query tiles at a time, of a plan with capacity for ``max_items``, which a graph may leave open."""
    tiles = MIN_TILES
    while tiles <= MAX_TILES:
        if statically_known_true(max_items <= tiles):
            return tiles
        tiles *= 2
    return CHUNK_TILES


def shared_arguments(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    seq_lens: Tensor | None,
    p: PrefillPlan,
) -> dict[str, Any]:
    """Arguments that the Triton and the CUDA kernel share: the batch, the plan and its capacities."""
    max_split_tiles = p.split_tiles.shape[0]
    return {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "last_page_len": kv_last_page_len,
        "seq_lens": seq_lens,
        "plan_qo_indptr": p.qo_indptr,
        "plan_kv_indptr": p.kv_indptr,
        "plan_kv_indices": p.kv_indices,
        "plan_kv_len": p.kv_len,
        "work": p.work,
        "split_tiles": p.split_tiles,
        "queue": p.queue,
        "batch": kv_indptr.shape[0] - 1,
        "num_indices": kv_indices.shape[0],
        "max_batch": p.kv_len.shape[0],
        "max_pages": p.kv_indices.shape[0] or INT32_MAX,
        "max_items": p.work.shape[0],
        "max_split_tiles": max_split_tiles,
        "wave": at_least(tiles_per_wave(PlanProblem.of(p.problem), 2 * max_split_tiles), 1),
    }


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: list[Tensor],
    *,
    seq_lens: Tensor | None = None,
) -> None:
    p = PrefillPlan(*plan)
    problem, max_batch, max_items = PlanProblem.of(p.problem), p.kv_len.shape[0], p.work.shape[0]
    if not is_published(max_batch):
        plan_in_closed_form(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    block_batch, tiles = triton.next_power_of_2(max_batch), tiles_at_a_time(max_items)
    pdl = supports_pdl(kv_indptr)
    launch(
        plan_prefill_kernel,
        (1 + triton.cdiv(kv_indices.shape[0], COPY_PAGES),),
        Options(min(MAX_WARPS, max(MIN_WARPS, tiles // 32, block_batch // 32)), launch_pdl=pdl),
        **shared_arguments(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, seq_lens, p),
        PAGE_SIZE=problem.page_size,
        TILING=Tiling(problem.tile_rows, problem.window, problem.ahead, block_batch, tiles),
        SHARD=shard_of(problem),
        CTAS=problem.num_kv_heads * ctas_of_tile(problem),
        CLUSTER_SPLITS=planned_cluster_splits(p),
        HAS_SPLITS=not statically_known_true(p.split_tiles.shape[0] == 0),
        SPLIT_BLOCKS=problem.split // KV_BLOCK,
        ONE_CHUNK=statically_known_true(max_items <= tiles),
        COPY_PAGES=COPY_PAGES,
        PDL=pdl,
    )
