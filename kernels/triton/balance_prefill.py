"""Splits of query tiles for load balance: which tiles are divided, and into how long splits.

The integers are those of :func:`attn_ops.kernels.reference.plan.split_lengths`, which says what they mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_ops.kernels.triton.query_tiles import (
    BUCKETS,
    NOT_SPLIT,
    after_first,
    items_of_buckets,
    kv_blocks,
    length_bucket,
    locate_tiles,
)
from attn_ops.plan import state

CANDIDATES = tl.constexpr(state.SPLIT_CANDIDATES)
MIN_SPLIT_BLOCKS = tl.constexpr(state.MIN_SPLIT_BLOCKS)
BLOCK_COST, ITEM_COST = tl.constexpr(state.BLOCK_COST), tl.constexpr(state.ITEM_COST)
COMBINE_COST, MAX_COST = tl.constexpr(state.COMBINE_COST), tl.constexpr(state.MAX_COST)
BALANCE_WAVES = tl.constexpr(state.BALANCE_WAVES)


@triton.jit
def tiles_to_divide(num_tiles, limit, lengths, wave, TILING: tl.constexpr, SHARD: tl.constexpr):
    """``(longest, first_bucket, skip)`` of :func:`after_first`: the tiles that may be split for load balance."""
    total, longest, longest_blocks = tl.full((), 0, tl.int64), 0, 0
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        _, blocks = kv_blocks(begin, end, used)
        total += tl.sum(blocks.to(tl.int64), 0)
        longest_blocks = tl.maximum(longest_blocks, tl.max(blocks, 0))
        longest = tl.maximum(longest, tl.max(tl.where(used, end - begin, 0), 0))
    first_bucket, skip = BUCKETS, 0
    if wave.to(tl.int64) * longest_blocks > total:
        first_bucket = -1
    elif num_tiles < wave * BALANCE_WAVES:
        count = tl.zeros((BUCKETS,), tl.int32)
        for first in range(0, limit, TILING.TILES):
            used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
            count += items_of_buckets(length_bucket(end - begin, longest, used), used.to(tl.int32))
        in_whole_waves = num_tiles // wave * wave
        first_bucket = tl.sum((tl.cumsum(count, 0) <= in_whole_waves).to(tl.int32), 0)
        skip = in_whole_waves - tl.sum(tl.where(tl.arange(0, BUCKETS) < first_bucket, count, 0), 0)
    return longest, first_bucket, skip


@triton.jit
def candidate_splits(blocks, candidates, inverse):
    """``blocks / candidates``, rounded up, at most 225. The float32 product may be two less, which is corrected."""
    splits = (blocks.to(tl.float32) * inverse).to(tl.int32)
    splits += (splits * candidates < blocks).to(tl.int32)
    return splits + (splits * candidates < blocks).to(tl.int32)


@triton.jit
def fastest_split(
    num_tiles, limit, lengths, longest, first_bucket, skip, max_splits, wave,
    CTAS: tl.constexpr, CLUSTER_SPLITS: tl.constexpr, TILING: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """KV blocks of the longest split of the tiles ``after_first(..., longest, first_bucket, skip)``.

    wave            tiles that the device computes at a time
    CTAS            of a tile
    CLUSTER_SPLITS  CTAs that divide its KV
    """
    j = tl.arange(0, CANDIDATES)
    longest_blocks, to_skip = 0, skip
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        divided, to_skip = after_first(begin, end, used, longest, first_bucket, to_skip)
        _, blocks = kv_blocks(begin, end, divided)
        longest_blocks = tl.maximum(longest_blocks, tl.max(blocks, 0))
    candidates = tl.maximum(tl.cdiv(longest_blocks, ((4 + j % 4) << j // 4) >> 2), MIN_SPLIT_BLOCKS)

    # A tile of b blocks in s splits has a longest one of ceil(b / s) blocks, which is more than x if b > s x.
    inverse = (1.0 / candidates.to(tl.float32))[None, :]
    half, three_quarters = (candidates // 2)[None, :], (candidates * 3 // 4)[None, :]
    total = tl.full((), 0, tl.int64)
    items, slots = tl.zeros((CANDIDATES,), tl.int64), tl.zeros((CANDIDATES,), tl.int64)
    over_half, over_three_quarters = tl.zeros((CANDIDATES,), tl.int64), tl.zeros((CANDIDATES,), tl.int64)
    for first in range(0, limit, TILING.TILES):
        used, _, _, _, _, begin, end = locate_tiles(first, num_tiles, lengths, TILING, SHARD)
        divided, skip = after_first(begin, end, used, longest, first_bucket, skip)
        _, blocks = kv_blocks(begin, end, divided)
        total += tl.sum(blocks.to(tl.int64), 0)
        some = blocks[:, None]
        splits = candidate_splits(some, candidates[None, :], inverse)
        splits = tl.where(divided[:, None], tl.maximum(splits, 1), 0)
        items += tl.sum(splits, 0)
        slots += tl.sum(tl.where(splits > 1, splits, 0), 0)
        over_half += tl.sum(tl.where(some > splits * half, splits, 0), 0)
        over_three_quarters += tl.sum(tl.where(some > splits * three_quarters, splits, 0), 0)
    time = (total * BLOCK_COST // CLUSTER_SPLITS + items * ITEM_COST) // wave
    of_longest = tl.cdiv(candidates, CLUSTER_SPLITS).to(tl.int64) * BLOCK_COST
    time = tl.maximum(time, tl.cdiv(over_three_quarters, wave) * (of_longest + ITEM_COST))
    time = tl.maximum(time, tl.cdiv(over_half, wave) * (of_longest * 3 // 4 + ITEM_COST))
    time += tl.where(slots > 0, slots * CTAS + COMBINE_COST, 0)
    time = tl.where(slots <= max_splits, time, MAX_COST)
    best = tl.min(time * CANDIDATES + j, 0) % CANDIDATES
    return tl.sum(tl.where(j == best, candidates, 0), 0)


@triton.jit
def balanced_splits(
    num_tiles, limit, lengths, max_splits, wave,
    CTAS: tl.constexpr, CLUSTER_SPLITS: tl.constexpr, TILING: tl.constexpr, SHARD: tl.constexpr,
):  # fmt: skip
    """``(longest, first_bucket, skip, split_blocks)``: the tiles to split, and KV blocks of their longest split."""
    longest, first_bucket, skip = tiles_to_divide(num_tiles, limit, lengths, wave, TILING, SHARD)
    split_blocks = NOT_SPLIT
    if first_bucket < BUCKETS:
        split_blocks = fastest_split(
            num_tiles, limit, lengths, longest, first_bucket, skip, max_splits, wave,
            CTAS, CLUSTER_SPLITS, TILING, SHARD,
        )  # fmt: skip
    return longest, first_bucket, skip, split_blocks
