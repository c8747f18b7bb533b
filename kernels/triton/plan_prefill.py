"""``attn::plan_prefill`` in one launch: program 0 orders the tiles, the others copy page numbers.

The integers are those of :mod:`attn_ops.kernels.reference.plan`: a stable counting sort of the tiles by
classes of the KV they read, longest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attn_ops.kernels.reference.plan import plan_prefill as plan_in_closed_form
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import MAX_PUBLISHED_REQUESTS, publish
from attn_ops.kernels.triton.plan_decode import COPY, at_previous, copy_page_numbers, count_tokens
from attn_ops.kernels.triton.search import count_at_most
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attn_ops.plan.state import KV_BLOCK, LENGTH_BUCKETS, MIN_SPLIT_BLOCKS, PlanProblem, PrefillPlan

TILES = 256
"""Tiles ordered at a time."""


@triton.jit
def tile_extent(
    tile, tiles_end, qo_len, kv_len, ROWS: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    B: tl.constexpr, LOG_B: tl.constexpr,
):  # fmt: skip
    """``(request, offset, rows, position, kv_begin, kv_end)`` of each tile; its first row is at ``offset``."""
    request = tl.minimum(count_at_most(tiles_end, tile, B, LOG_B), B - 1)
    qo, kv = tl.gather(qo_len, request, 0), tl.gather(kv_len, request, 0)
    offset = (tile - at_previous(tiles_end, request, 0)) * ROWS
    rows = tl.minimum(qo - offset, ROWS)
    position = kv - qo + offset
    end = tl.minimum(kv, tl.maximum(position + rows, 0)) if CAUSAL else kv
    begin = tl.minimum(tl.maximum(position + 1 - WINDOW, 0), end) if WINDOW else tl.zeros_like(end)
    return request, offset, rows, position, begin, end


@triton.jit
def length_bucket(extent, longest, used, BUCKETS: tl.constexpr):
    """The class of each tile's extent, 0 for the longest; ``BUCKETS`` for an unused tile."""
    return tl.where(used, BUCKETS - 1 - (extent.to(tl.int64) * BUCKETS // (longest + 1)).to(tl.int32), BUCKETS)


@triton.jit
def store_zeros(records, begin, end, TILES: tl.constexpr, FIELDS: tl.constexpr):
    for first in range(begin, end, TILES):
        i = first + tl.arange(0, TILES)
        at = i[:, None] * FIELDS + tl.arange(0, FIELDS)[None, :]
        tl.store(records + at, tl.zeros((TILES, FIELDS), tl.int32), mask=(i < end)[:, None])


@triton.jit
def count_pieces(begin, end, used, share, UNIT: tl.constexpr, FIXED: tl.constexpr):
    """``(first unit, units, pieces, extent of a piece)`` of tiles of which none is split below ``share`` units.

    ``FIXED`` splits at every ``share`` units, instead of into equal pieces.
    """
    first_unit = begin // UNIT
    units = tl.where(used & (end > begin), tl.cdiv(end, UNIT) - first_unit, 0)
    pieces = tl.where(used, tl.maximum(tl.cdiv(units, share) if FIXED else units // share, 1), 0)
    length = share if FIXED else tl.cdiv(units, tl.maximum(pieces, 1))
    extent = tl.where(pieces > 1, length * UNIT, end - begin)
    return first_unit, units, pieces, tl.where(used, extent, 0)


@triton.jit(do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "max_items", "max_splits"])
def plan_prefill_kernel(
    qo_indptr,  # [batch + 1]
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    plan_qo_indptr,  # [max_batch + 1]
    plan_kv_indptr,  # [max_batch + 1]
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_items, 8]
    merges,  # [max_splits, 4]
    batch,
    num_indices,
    max_batch,
    max_pages,
    max_items,
    max_splits,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BUCKETS: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SIZE: tl.constexpr,  # units in a piece of fixed size, 0 for equal ones
    B: tl.constexpr,  # power of 2, at least max_batch
    LOG_B: tl.constexpr,
    TILES: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    if tl.program_id(0) > 0:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - 1, COPY)
        return
    b = tl.arange(0, B)
    # Loaded here, not by a helper, as in plan_decode.
    first_page = tl.load(kv_indptr + tl.minimum(b, batch))
    end_page = tl.load(kv_indptr + tl.minimum(b + 1, batch))
    last_len = tl.load(last_page_len + b, mask=b < batch, other=1)
    kv_len = tl.where(b < batch, count_tokens(first_page, end_page, last_len, max_pages, PAGE_SIZE), 0)
    first_row = tl.maximum(tl.load(qo_indptr + tl.minimum(b, batch)), 0)
    end_row = tl.maximum(tl.load(qo_indptr + tl.minimum(b + 1, batch)), 0)
    qo_len = tl.maximum(end_row - first_row, 0)
    tiles_end = tl.cumsum(tl.cdiv(qo_len, ROWS), 0)
    num_tiles = tl.minimum(tl.max(tiles_end, 0), max_items)

    t, bucket_id = tl.arange(0, TILES), tl.arange(0, BUCKETS)
    share = 1 << 30
    if max_splits > 0:
        total = tl.full((), 0, tl.int64)
        for first in range(0, num_tiles, TILES):
            tile = first + t
            _, _, _, _, begin, end = tile_extent(tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B)
            _, units, _, _ = count_pieces(begin, end, tile < num_tiles, share, UNIT, False)
            if SIZE:
                units = tl.where(units > SIZE, tl.cdiv(units, SIZE), 0)
            total += tl.sum(units.to(tl.int64), 0)
        if SIZE:
            share = tl.where(total <= 2 * max_splits, SIZE, share)
        else:
            share = tl.maximum(tl.cdiv(total, 2 * max_splits), MIN_UNITS).to(tl.int32)
    longest = 0
    for first in range(0, num_tiles, TILES):
        tile = first + t
        _, _, _, _, begin, end = tile_extent(tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B)
        _, _, _, extent = count_pieces(begin, end, tile < num_tiles, share, UNIT, SIZE > 0)
        longest = tl.maximum(longest, tl.max(extent, 0))
    count = tl.zeros((BUCKETS,), tl.int32)
    for first in range(0, num_tiles, TILES):
        tile = first + t
        _, _, _, _, begin, end = tile_extent(tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B)
        _, _, pieces, extent = count_pieces(begin, end, tile < num_tiles, share, UNIT, SIZE > 0)
        bucket = length_bucket(extent, longest, tile < num_tiles, BUCKETS)
        count += tl.sum(tl.where(bucket[:, None] == bucket_id[None, :], pieces[:, None], 0), 0)
    place = tl.cumsum(count, 0) - count
    num_items, slots, splits = tl.sum(count, 0), 0, 0
    for first in range(0, num_tiles, TILES):
        tile = first + t
        used = tile < num_tiles
        request, offset, rows, position, begin, end = tile_extent(
            tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B
        )
        first_unit, units, pieces, extent = count_pieces(begin, end, used, share, UNIT, SIZE > 0)
        bucket = length_bucket(extent, longest, used, BUCKETS)
        member = tl.where(bucket[:, None] == bucket_id[None, :], pieces[:, None], 0)
        until = tl.cumsum(member, 0)
        at = tl.sum(tl.where(member > 0, place[None, :] + until - member, 0), 1)
        is_split = pieces > 1
        slots_until = tl.cumsum(tl.where(is_split, pieces, 0), 0)
        splits_until = tl.cumsum(is_split.to(tl.int32), 0)
        slot = tl.where(is_split, slots + slots_until - pieces, -1)
        row, page = tl.gather(first_row, request, 0) + offset, tl.gather(first_page, request, 0)
        for piece in range(tl.max(pieces, 0)):
            mask = used & (piece < pieces) & (at + piece < max_items)
            divisor = tl.maximum(pieces, 1)
            cut = (first_unit + (units.to(tl.int64) * piece // divisor).to(tl.int32)) * UNIT
            next_cut = (first_unit + (units.to(tl.int64) * (piece + 1) // divisor).to(tl.int32)) * UNIT
            if SIZE:
                cut, next_cut = (first_unit + piece * SIZE) * UNIT, (first_unit + (piece + 1) * SIZE) * UNIT
            record = work + (at + piece) * 8
            tl.store(record + 0, row, mask=mask)
            tl.store(record + 1, rows, mask=mask)
            tl.store(record + 2, tl.where(piece > 0, cut, begin), mask=mask)
            tl.store(record + 3, tl.where(piece + 1 < pieces, next_cut, end), mask=mask)
            tl.store(record + 4, position, mask=mask)
            tl.store(record + 5, page, mask=mask)
            tl.store(record + 6, tl.where(is_split, slot + piece, -1), mask=mask)
            tl.store(record + 7, request, mask=mask)
        split = splits + splits_until - 1
        record, mask = merges + split * 4, is_split & (split < max_splits)
        tl.store(record + 0, row, mask=mask)
        tl.store(record + 1, rows, mask=mask)
        tl.store(record + 2, slot, mask=mask)
        tl.store(record + 3, pieces, mask=mask)
        place += tl.sum(member, 0)
        slots += tl.max(slots_until, 0)
        splits += tl.max(splits_until, 0)
    store_zeros(work, num_items, max_items, TILES, 8)
    store_zeros(merges, splits, max_splits, TILES, 4)

    tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
    tl.store(plan_kv_indptr + b, first_page, mask=b == 0)
    tl.store(plan_kv_indptr + 1 + b, end_page, mask=b < max_batch)
    tl.store(plan_qo_indptr + b, first_row, mask=b == 0)
    tl.store(plan_qo_indptr + 1 + b, end_row, mask=b < max_batch)
    publish(plan_qo_indptr)


def plan_prefill(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]
) -> None:
    p = PrefillPlan(*plan)
    problem = PlanProblem.of(p.problem)
    max_batch, max_pages = p.kv_len.shape[0], p.kv_indices.shape[0]
    if max_batch > MAX_PUBLISHED_REQUESTS:
        plan_in_closed_form(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan)
        return
    block_batch = triton.next_power_of_2(max_batch)
    num_indices, pdl = kv_indices.shape[0], starts_early(kv_indptr)
    launch(
        plan_prefill_kernel,
        (1 + triton.cdiv(num_indices, COPY),),
        (
            *(qo_indptr, kv_indptr, kv_indices, kv_last_page_len),
            *(p.qo_indptr, p.kv_indptr, p.kv_indices, p.kv_len, p.work, p.split_tiles),
        ),
        (
            *(kv_indptr.shape[0] - 1, num_indices, max_batch),
            *(max_pages or torch.iinfo(torch.int32).max, p.work.shape[0], p.split_tiles.shape[0]),
        ),
        (),
        (
            *(problem.page_size, problem.tile_rows, problem.window, problem.causal),
            *(LENGTH_BUCKETS, KV_BLOCK, MIN_SPLIT_BLOCKS, problem.split // KV_BLOCK),
            *(block_batch, block_batch.bit_length() - 1, TILES, COPY, pdl),
        ),
        Options(num_warps=8, launch_pdl=pdl),
    )
