"""The tiles of a prefill batch, and how many pieces of a fixed size their KV makes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.plan.state import KV_BLOCK, PlanProblem


class QueryTiles(NamedTuple):
    """Query rows of one request each and the KV they read, int64 ``[capacity]``; meaningless where not ``used``.

    request     index in the batch
    offset      of the first row among the request's
    rows        how many
    position    of the first row in the request's KV sequence
    begin, end  half-open range of KV tokens
    """

    used: Tensor
    request: Tensor
    offset: Tensor
    rows: Tensor
    position: Tensor
    begin: Tensor
    end: Tensor

    def kv_blocks(self) -> tuple[Tensor, Tensor]:
        """The first unit of KV that each tile reads, and how many; none where a tile is not used."""
        first = self.begin // KV_BLOCK
        some = self.used & (self.end > self.begin)
        return first, torch.where(some, (self.end + KV_BLOCK - 1) // KV_BLOCK - first, 0)


def query_tiles(problem: PlanProblem, qo_len: Tensor, kv_len: Tensor, capacity: int) -> QueryTiles:
    """Of requests with int64 lengths ``[batch]``, ``capacity`` tiles at most."""
    ends = ((qo_len + problem.tile_rows - 1) // problem.tile_rows).cumsum(0)
    tile = torch.arange(capacity, device=kv_len.device)
    r = torch.searchsorted(ends, tile, right=True).clamp(max=kv_len.shape[0] - 1)
    offset = (tile - torch.where(r > 0, ends[r - 1], 0)) * problem.tile_rows
    rows = (qo_len[r] - offset).clamp(max=problem.tile_rows)
    position = kv_len[r] - qo_len[r] + offset
    end = torch.minimum(kv_len[r], (position + rows).clamp(min=0)) if problem.causal else kv_len[r]
    begin = (position + 1 - problem.window).clamp(min=0) if problem.window else torch.zeros_like(end)
    return QueryTiles(tile < ends[-1], r, offset, rows, position, torch.minimum(begin, end), end)


def fixed_split_counts(problem: PlanProblem, units: Tensor) -> Tensor:
    """Pieces of ``problem.split`` tokens in so many units, at least one."""
    size = problem.split // KV_BLOCK
    return ((units + size - 1) // size).clamp(min=1)


def count_splits(problem: PlanProblem, qo_len: Tensor, kv_len: Tensor) -> int:
    """Splits of all tiles that have more than one, an even number; int64 lengths ``[batch]`` on the host."""
    if not qo_len.numel():
        return 0
    capacity = int(((qo_len + problem.tile_rows - 1) // problem.tile_rows).sum())
    _, units = query_tiles(problem, qo_len, kv_len, capacity).kv_blocks()
    pieces = fixed_split_counts(problem, units)
    count = int(pieces[pieces > 1].sum())
    return count + count % 2


def max_splits_for(problem: PlanProblem, max_batch: int, max_tokens: int) -> int:
    """The most that :func:`count_splits` gives for batches of these capacities."""
    tiles = (max_tokens + problem.tile_rows - 1) // problem.tile_rows + max_batch
    longest = -(-problem.max_kv_len // problem.split)
    return tiles * (longest + longest % 2) if longest > 1 else 0
