"""Sizes of plans: query tiles, CTAs and splits.

The first part decides the sizes of a plan on the host, from the device and the problem. The second part computes the
query tiles of a batch and their splits of fixed size, on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import CTAS_PER_SM, KV_BLOCK, PlanProblem, full_tiles
from attn_ops.symbolic_sizes import decide

CTA_MULTIPLE = 8
"""The number of CTAs per KV head is a multiple of this if it is large enough: 2^n requests then often need no split."""

MIN_PACKED_ROWS, MAX_PACKED_ROWS = 64, 256
"""Packed rows (query rows times query heads per KV head) of a prefill tile by default."""

MLA_PACKED_ROWS = 16
"""The fewest packed rows of a tile for heads above :data:`LARGE_HEAD_DIM`: of a unit of ``cuda.mla`` for few heads."""

CTA_PACKED_ROWS = 128
"""Packed rows that a CTA of a prefill kernel holds."""

HOPPER = 9
"""Major compute capability of the GPUs whose prefill kernel has one CTA per SM, also for few packed rows."""

LARGE_HEAD_DIM = 256
"""Head dim above which a CTA of a prefill kernel holds only ``MIN_PACKED_ROWS``."""

SMALL_HEAD_DIM = 128
"""Head dim of values up to which a prefill plan has room for two splits of each query tile of a wave."""


def power_of_two_from(size: int) -> int:
    """The first power of two that is not less than ``size``, an integer of Python or NumPy, 1 or more."""
    return 1 << (int(size) - 1).bit_length()


def rows_per_tile(
    num_qo_heads: int, num_kv_heads: int, rows: int = MAX_PACKED_ROWS, least: int = MIN_PACKED_ROWS
) -> int:
    """Default ``tile_rows`` of a prefill plan, in query rows.

    ``rows`` is the number of query rows of a request, ``least`` the smallest number of packed rows.
    """
    group = max(1, num_qo_heads // max(1, num_kv_heads))  # the head counts are checked later, with a message
    packed_rows = least
    while packed_rows < MAX_PACKED_ROWS and not decide(rows * group <= packed_rows):
        packed_rows *= 2
    return max(1, packed_rows // group)


def has_large_head_dim(problem: PlanProblem) -> bool:
    return max(problem.head_dim_qk, problem.head_dim_vo) > LARGE_HEAD_DIM


def packed_rows_of_tile(problem: PlanProblem) -> int:
    return problem.tile_rows * problem.num_qo_heads // problem.num_kv_heads


def ctas_of_tile(problem: PlanProblem) -> int:
    """CTAs that compute a query tile for one KV head, each a part of its packed rows."""
    return -(-packed_rows_of_tile(problem) // (MIN_PACKED_ROWS if has_large_head_dim(problem) else CTA_PACKED_ROWS))


def splits_per_head(device: torch.device, problem: PlanProblem) -> int:
    """Default ``max_splits`` of a prefill plan: two for each query tile that the device computes at a time.

    It is 0 on the CPU, and three for two tiles where a slot is larger: the workspace then has at most 28 MB on a GPU of
    132 SMs, in FlashInfer's usual buffers of 32 MB and more.
    """
    if device.type != "cuda":
        return 0
    gpu = torch.cuda.get_device_properties(device)
    small = packed_rows_of_tile(problem) <= MIN_PACKED_ROWS and not has_large_head_dim(problem) and gpu.major != HOPPER
    resident_ctas = gpu.multi_processor_count * (CTAS_PER_SM if small else 1)
    tiles = max(1, resident_ctas // (problem.num_kv_heads * ctas_of_tile(problem)))
    return 2 * tiles if problem.head_dim_vo <= SMALL_HEAD_DIM else max(2, 3 * tiles // 4 * 2)


def tiles_per_wave(problem: PlanProblem, max_splits: int) -> int:
    """Query tiles that a device computes at a time if ``max_splits``, 2 or more, is its default."""
    return max_splits // 2 if problem.head_dim_vo <= SMALL_HEAD_DIM else (2 * max_splits + 1) // 3


def ctas_per_head(device: torch.device, num_kv_heads: int) -> int:
    """Default ``num_ctas`` of a decode plan: CTAs that divide the work of one KV head, 1 on the CPU."""
    if device.type != "cuda":
        return 1
    ctas = torch.cuda.get_device_properties(device).multi_processor_count * CTAS_PER_SM // num_kv_heads
    return max(1, ctas // CTA_MULTIPLE * CTA_MULTIPLE or ctas)


class QueryTiles(NamedTuple):
    """The query tiles of a batch, int64 ``[capacity]`` each. Entries where ``used`` is false mean nothing.

    used        bool: whether this is a tile of the batch
    request     index of the request in the batch
    offset      first query row of the tile, counted from the request's first
    rows        number of query rows
    position    position of the first row in the request's KV sequence
    begin, end  half-open range of the KV tokens that the tile reads
    """

    used: Tensor
    request: Tensor
    offset: Tensor
    rows: Tensor
    position: Tensor
    begin: Tensor
    end: Tensor

    def kv_blocks(self) -> tuple[Tensor, Tensor]:
        """``(first KV block, number of KV blocks)`` that each tile reads; the number is 0 where not ``used``."""
        first = self.begin // KV_BLOCK
        reads = self.used & (self.end > self.begin)
        return first, torch.where(reads, (self.end + KV_BLOCK - 1) // KV_BLOCK - first, 0)


def tokens_before(problem: PlanProblem, positions: Tensor) -> Tensor:
    """How many of the tokens that a plan is for are before each of ``positions`` in the request; 0 before the first."""
    shard, positions = ContextShard.of_problem(problem), positions.clamp(min=0)
    return positions if shard is None else shard.owned_tokens(positions)


def query_tiles(
    problem: PlanProblem, qo_len: Tensor, kv_len: Tensor, capacity: int, seq_lens: Tensor | None = None
) -> QueryTiles:
    """The first ``capacity`` tiles of requests with ``qo_len`` rows and ``kv_len`` KV tokens, int64 ``[batch]``.

    ``seq_lens`` are the tokens of the requests on all ranks, if the KV tokens are those of one.
    """
    ends = ((qo_len + problem.tile_rows - 1) // problem.tile_rows).cumsum(0)
    tile = torch.arange(capacity, device=kv_len.device)
    r = torch.searchsorted(ends, tile, right=True).clamp(max=kv_len.shape[0] - 1)
    offset = (tile - torch.where(r > 0, ends[r - 1], 0)) * problem.tile_rows
    rows = (qo_len[r] - offset).clamp(max=problem.tile_rows)
    position = (kv_len if seq_lens is None else seq_lens)[r] - qo_len[r] + offset
    end = kv_len[r]
    if problem.ahead:
        end = torch.minimum(end, tokens_before(problem, position + rows + problem.ahead - 1))
    begin = tokens_before(problem, position + 1 - problem.window) if problem.window else torch.zeros_like(end)
    return QueryTiles(tile < ends[-1], r, offset, rows, position, torch.minimum(begin, end), end)


def fixed_split_counts(problem: PlanProblem, kv_blocks: Tensor) -> Tensor:
    """Splits of ``problem.split`` tokens that ``kv_blocks`` KV blocks make, at least 1; elementwise."""
    split_blocks = problem.split // KV_BLOCK
    return ((kv_blocks + split_blocks - 1) // split_blocks).clamp(min=1)


def count_splits(problem: PlanProblem, qo_len: Tensor, kv_len: Tensor, seq_lens: Tensor | None = None) -> int:
    """Splits of all tiles that have more than one, rounded up to even; int64 lengths ``[batch]`` on the host."""
    if not qo_len.numel():
        return 0
    capacity = int(((qo_len + problem.tile_rows - 1) // problem.tile_rows).sum())
    _, kv_blocks = query_tiles(problem, qo_len, kv_len, capacity, seq_lens).kv_blocks()
    splits = fixed_split_counts(problem, kv_blocks)
    count = int(splits[splits > 1].sum())
    return count + count % 2


def max_splits_for(problem: PlanProblem, max_batch: int, max_tokens: int, max_kv_len: int) -> int:
    """The largest result of :func:`count_splits` for batches of at most this size."""
    tiles = full_tiles(problem, max_tokens) + max_batch
    longest = -(-max_kv_len // problem.split)
    return tiles * (longest + longest % 2) if longest > 1 else 0
