"""The query tiles of a batch, and their splits of fixed size, computed with tensors on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import KV_BLOCK, PlanProblem


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
    """The number of KV tokens of the plan, which one rank may hold, before each of ``positions`` in the request."""
    shard, positions = ContextShard.of_problem(problem), positions.clamp(min=0)
    return positions if shard is None else shard.owned_tokens(positions)


def query_tiles(
    problem: PlanProblem, qo_len: Tensor, kv_len: Tensor, capacity: int, seq_lens: Tensor | None = None
) -> QueryTiles:
    """The first ``capacity`` tiles of requests with ``qo_len`` rows and ``kv_len`` KV tokens, int64 ``[batch]``.

    ``seq_lens`` are the tokens of the requests on all ranks, if the KV tokens are those of one rank.
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
    """The number of splits of ``problem.split`` tokens for ``kv_blocks`` KV blocks, at least 1; elementwise."""
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
