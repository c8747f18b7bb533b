"""``attn::plan_prefill`` in one launch: program 0 orders the tiles, the others copy page numbers.

The integers are those of :mod:`attn_ops.kernels.reference.plan`: a stable counting sort of the tiles by
classes of the KV they read, longest first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...plan import PlanProblem, PrefillPlan
from ..reference.plan import LENGTH_BUCKETS
from ..reference.plan import plan_prefill as plan_in_closed_form
from .launch import Options, launch
from .plan_decode import COPY, MAX_REQUESTS, at_previous, copy_page_numbers, request_lengths
from .primitives import count_at_most

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


@triton.jit(do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "max_tiles"])
def plan_prefill_kernel(
    qo_indptr,  # [batch + 1]
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    plan_qo_indptr,  # [max_batch + 1]
    plan_kv_indptr,  # [max_batch + 1]
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_tiles, 8]
    batch,
    num_indices,
    max_batch,
    max_pages,
    max_tiles,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    BUCKETS: tl.constexpr,
    B: tl.constexpr,  # power of 2, at least max_batch
    LOG_B: tl.constexpr,
    TILES: tl.constexpr,
    COPY: tl.constexpr,
):
    if tl.program_id(0) > 0:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - 1, COPY)
        return
    b = tl.arange(0, B)
    first_page, end_page, kv_len = request_lengths(kv_indptr, last_page_len, batch, max_pages, PAGE_SIZE, B)
    first_row = tl.load(qo_indptr + tl.minimum(b, batch))
    end_row = tl.load(qo_indptr + tl.minimum(b + 1, batch))
    qo_len = tl.maximum(end_row - first_row, 0)
    tiles_end = tl.cumsum(tl.cdiv(qo_len, ROWS), 0)
    num_tiles = tl.minimum(tl.max(tiles_end, 0), max_tiles)

    t, bucket_id = tl.arange(0, TILES), tl.arange(0, BUCKETS)
    longest = 0
    for first in range(0, num_tiles, TILES):
        tile = first + t
        _, _, _, _, begin, end = tile_extent(tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B)
        longest = tl.maximum(longest, tl.max(tl.where(tile < num_tiles, end - begin, 0), 0))
    count = tl.zeros((BUCKETS,), tl.int32)
    for first in range(0, num_tiles, TILES):
        tile = first + t
        _, _, _, _, begin, end = tile_extent(tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B)
        bucket = length_bucket(end - begin, longest, tile < num_tiles, BUCKETS)
        count += tl.sum((bucket[:, None] == bucket_id[None, :]).to(tl.int32), 0)
    place = tl.cumsum(count, 0) - count
    for first in range(0, num_tiles, TILES):
        tile = first + t
        used = tile < num_tiles
        request, offset, rows, position, begin, end = tile_extent(
            tile, tiles_end, qo_len, kv_len, ROWS, WINDOW, CAUSAL, B, LOG_B
        )
        bucket = length_bucket(end - begin, longest, used, BUCKETS)
        member = (bucket[:, None] == bucket_id[None, :]).to(tl.int32)
        at = tl.sum(member * (place[None, :] + tl.cumsum(member, 0) - 1), 1)
        record = work + at * 8
        tl.store(record + 0, tl.gather(first_row, request, 0) + offset, mask=used)
        tl.store(record + 1, rows, mask=used)
        tl.store(record + 2, begin, mask=used)
        tl.store(record + 3, end, mask=used)
        tl.store(record + 4, position, mask=used)
        tl.store(record + 5, tl.gather(first_page, request, 0), mask=used)
        tl.store(record + 6, -1, mask=used)
        tl.store(record + 7, request, mask=used)
        place += tl.sum(member, 0)
    for first in range(num_tiles, max_tiles, TILES):
        rest = first + t
        blank = (rest < max_tiles)[:, None]
        tl.store(work + rest[:, None] * 8 + tl.arange(0, 8), tl.zeros((TILES, 8), tl.int32), mask=blank)

    tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
    tl.store(plan_kv_indptr + b, first_page, mask=b == 0)
    tl.store(plan_kv_indptr + 1 + b, end_page, mask=b < max_batch)
    tl.store(plan_qo_indptr + b, first_row, mask=b == 0)
    tl.store(plan_qo_indptr + 1 + b, end_row, mask=b < max_batch)


def plan_prefill(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]
) -> None:
    p = PrefillPlan(*plan)
    problem = PlanProblem.of(p.problem)
    max_batch, max_pages = p.kv_len.shape[0], p.kv_indices.shape[0]
    if max_batch > MAX_REQUESTS:
        plan_in_closed_form(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan)
        return
    block_batch = triton.next_power_of_2(max_batch)
    num_indices = kv_indices.shape[0]
    launch(
        plan_prefill_kernel,
        (1 + triton.cdiv(num_indices, COPY),),
        (
            *(qo_indptr, kv_indptr, kv_indices, kv_last_page_len),
            *(p.qo_indptr, p.kv_indptr, p.kv_indices, p.kv_len, p.work),
        ),
        (
            *(kv_indptr.shape[0] - 1, num_indices, max_batch),
            *(max_pages or torch.iinfo(torch.int32).max, p.work.shape[0]),
        ),
        (),
        (
            *(problem.page_size, problem.tile_rows, problem.window, problem.causal, LENGTH_BUCKETS),
            *(block_batch, block_batch.bit_length() - 1, TILES, COPY),
        ),
        Options(num_warps=8),
    )
