"""Query tiles of prefill while they are planned: their ranges, their splits and their order.

A planner goes over the tiles of a batch several times, ``TILES`` at a time, and computes their ranges and splits again
each time: registers do not hold them for all tiles. If ``TILES`` hold all of them, the loops have one constant
iteration. The compiler then has one basic block, in which it computes ranges and splits once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attn_ops.kernels.triton.context import tokens_before
from attn_ops.kernels.triton.launch import constexpr_table
from attn_ops.kernels.triton.plan_steps import at_previous
from attn_ops.plan.state import KV_BLOCK, LENGTH_BUCKETS

BLOCK = tl.constexpr(KV_BLOCK)
"""KV tokens of a KV block."""

BUCKETS = tl.constexpr(LENGTH_BUCKETS)
"""Length buckets."""

NOT_SPLIT = tl.constexpr(1 << 30)
"""KV blocks of the longest split of a tile that is not split."""


@constexpr_table
class Tiling(NamedTuple):
    """How requests are divided into query tiles, and what a tile sees."""

    ROWS: int  # query rows of a tile
    WINDOW: int
    AHEAD: int
    B: int  # power of 2, at least the requests of a plan
    TILES: int  # power of 2: query tiles that are processed at a time


@triton.jit
def requests_of_tiles(first, tiles_end, TILING: tl.constexpr):
    """``[TILES]``: how many of the ascending ``tiles_end [B]`` are at most each of ``first`` to ``first + TILES - 1``.

    A sum over the places where they are. Those that are more than all of these are put at the last one, which an
    exclusive sum leaves out; so are those of at most ``first``, which are added to all.
    """
    before = tiles_end <= first
    place = tl.where(before, TILING.TILES - 1, tl.minimum(tiles_end - 1 - first, TILING.TILES - 1))
    count = tl.histogram(place, TILING.TILES)
    return tl.sum(before.to(tl.int32), 0) + tl.cumsum(count, 0) - count


@triton.jit
def locate_tiles(first, num_tiles, lengths, TILING: tl.constexpr, SHARD: tl.constexpr):
    """``(used, request, offset, rows, position, kv_begin, kv_end)`` of query tiles ``first`` to ``first + TILES - 1``.

    Tiles are numbered in the order of requests.

    lengths   ``[B]`` each, of requests: inclusive sums of their tiles; query rows, KV tokens, and tokens on all ranks
    used      whether it is one of the ``num_tiles``
    offset    first query row of the tile within its request
    position  of that row in the request's KV sequence
    """
    tiles_end, qo_len, kv_len, seq_len = lengths
    tile = first + tl.arange(0, TILING.TILES)
    request = tl.minimum(requests_of_tiles(first, tiles_end, TILING), TILING.B - 1)
    qo, kv = tl.gather(qo_len, request, 0), tl.gather(kv_len, request, 0)
    offset = (tile - at_previous(tiles_end, request, 0)) * TILING.ROWS
    rows = tl.minimum(qo - offset, TILING.ROWS)
    whole = kv
    if SHARD.WORLD > 1:
        whole = tl.gather(seq_len, request, 0)
    position = whole - qo + offset
    # Keys after those that the tile's last row sees; a sum of a position and a window would exceed int32.
    hidden = tl.maximum(qo - offset - (TILING.ROWS + TILING.AHEAD - 1), 0)
    end = tl.maximum(tokens_before(whole - hidden, SHARD), 0) if TILING.AHEAD else kv
    if SHARD.WORLD > 1:
        end = tl.minimum(end, kv)
    if TILING.WINDOW:
        begin = tl.minimum(tl.maximum(tokens_before(position + 1 - TILING.WINDOW, SHARD), 0), end)
    else:
        begin = tl.zeros_like(end)
    return tile < num_tiles, request, offset, rows, position, begin, end


@triton.jit
def kv_blocks(begin, end, used):
    """``(first KV block, number of KV blocks)`` of query tiles; the number is 0 where not ``used``."""
    first_block = begin // BLOCK
    return first_block, tl.where(used & (end > begin), tl.cdiv(end, BLOCK) - first_block, 0)


@triton.jit
def length_bucket(length, longest, used):
    """The bucket of each query tile's length in tokens, 0 for the longest; ``BUCKETS`` for an unused tile."""
    return tl.where(used, BUCKETS - 1 - (length.to(tl.int64) * BUCKETS // (longest + 1)).to(tl.int32), BUCKETS)


@triton.jit
def after_first(begin, end, used, longest, first_bucket, skip):
    """``(divided, skip)``: which query tiles come after the first ones of the whole list, longest first.

    longest       tokens of the longest tile
    first_bucket  bucket of the first of them
    skip          tiles of that bucket that come before it. The returned number is for the tiles after these
    """
    bucket = length_bucket(end - begin, longest, used)
    of_first = (used & (bucket == first_bucket)).to(tl.int32)
    divided = used & ((bucket > first_bucket) | ((bucket == first_bucket) & (tl.cumsum(of_first, 0) > skip)))
    return divided, skip - tl.sum(of_first, 0)


@triton.jit
def count_splits(blocks, used, split_blocks):
    """Splits of query tiles with that many KV blocks in the longest split: 1 if not split, 0 if not ``used``."""
    return tl.where(used, tl.maximum(tl.cdiv(blocks, split_blocks), 1), 0)


@triton.jit
def divide_tile(begin, end, used, divided, split_blocks, FIXED: tl.constexpr):
    """``(first_block, blocks, splits, length)`` of query tiles: their KV blocks, and how they are split.

    divided       whether a tile may be split
    split_blocks  KV blocks of the longest split; with FIXED of every split but the last
    splits        1 for a tile that is not split, 0 for an unused one
    length        tokens of the longest split
    """
    first_block, blocks = kv_blocks(begin, end, used)
    splits = count_splits(blocks, used, tl.where(divided, split_blocks, NOT_SPLIT))
    length = split_blocks if FIXED else tl.cdiv(blocks, tl.maximum(splits, 1))
    return first_block, blocks, splits, tl.where(used, tl.where(splits > 1, length * BLOCK, end - begin), 0)


@triton.jit
def split_points(first_block, blocks, split, splits, SPLIT_BLOCKS: tl.constexpr):
    """``(begin, end)`` of split number ``split`` of each query tile, in tokens, multiples of a KV block."""
    if SPLIT_BLOCKS:
        return (first_block + split * SPLIT_BLOCKS) * BLOCK, (first_block + (split + 1) * SPLIT_BLOCKS) * BLOCK
    else:  # noqa: RET505  what follows a return is compiled too
        # blocks * split // splits: the product may exceed int32, the one with the remainder does not.
        splits = tl.maximum(splits, 1)
        whole = blocks // splits
        rest = blocks - whole * splits
        begin = first_block + whole * split + rest * split // splits
        end = first_block + whole * (split + 1) + rest * (split + 1) // splits
        return begin * BLOCK, end * BLOCK


@triton.jit
def items_of_buckets(bucket, splits):
    """``[BUCKETS]``: the work items of each length bucket."""
    of_bucket = bucket[:, None] == tl.arange(0, BUCKETS)[None, :]
    return tl.sum(tl.where(of_bucket, splits[:, None], 0), 0)


@triton.jit
def first_items(bucket, splits, bucket_item):
    """The first work item of each query tile; ``bucket_item [BUCKETS]`` is that of the first tile of each bucket."""
    of_bucket = bucket[None, :] == tl.arange(0, BUCKETS)[:, None]
    count = tl.where(of_bucket, splits[None, :], 0)
    return tl.sum(tl.where(of_bucket, bucket_item[:, None] + tl.cumsum(count, 1) - count, 0), 0)
