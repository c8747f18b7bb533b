"""Cases of the one-shot merge on several GPUs, run by every rank (see ``rank_processes``)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from attn_ops.distributed import ContextExchange, merge_context
from attn_ops.errors import CapacityError, RankError
from helpers import oracle
from helpers.context_ranks import _raises

Group = dist.ProcessGroup
HEADS, DIM = 8, 64
EPS = {torch.float32: 2**-18, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def _states(seed: int, world: int, rows: int, dtype: torch.dtype, heads: int = HEADS) -> tuple[Tensor, Tensor]:
    """``v [rows, world, heads, DIM]`` and ``s`` of all ranks. Some ranks have no keys of a row."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, world, heads, DIM, generator=generator).to(dtype)
    s = torch.randn(rows, world, heads, generator=generator) * 5
    s[torch.rand(s.shape, generator=generator) < 0.2] = -torch.inf
    v[s == -torch.inf] = 0
    return v, s


def _check(merged: tuple[Tensor, Tensor], v: Tensor, s: Tensor, sinks: Tensor | None, heads: slice) -> None:
    if sinks is not None:
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
        s = torch.cat((s, (sinks * 1.4426950408889634).expand(s.shape[0], 1, -1)), 1)
    out, lse = oracle.merge(v, s)
    torch.testing.assert_close(merged[0].cpu().double(), out[:, heads], atol=EPS[v.dtype], rtol=EPS[v.dtype])
    torch.testing.assert_close(merged[1].cpu().double(), lse[:, heads], atol=1e-5, rtol=1e-5)


def _share(group: Group, scatter: bool) -> slice:
    share = HEADS // dist.get_world_size(group)
    rank = dist.get_rank(group)
    return slice(rank * share, (rank + 1) * share) if scatter else slice(None)


def eager(group: Group) -> None:
    """Calls of different sizes and dtypes in a row, so that halves and flags are used again and again."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    exchange = ContextExchange(40, HEADS, DIM, torch.float32, group=group, required=True)
    seed = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (1, 40, 3, 40, 40, 0, 2):
            for scatter in (False, True):
                for sinks in (None, torch.linspace(-2, 2, HEADS)):
                    v, s = _states(seed := seed + 1, world, rows, dtype)
                    merged = merge_context(
                        v[:, rank].cuda(),
                        s[:, rank].cuda(),
                        group,
                        scatter_heads=scatter,
                        sinks=None if sinks is None else sinks.cuda(),
                        exchange=exchange,
                    )
                    _check(merged, v, s, sinks, _share(group, scatter))


def captured(group: Group) -> None:
    """An odd number of merges in a CUDA graph, replayed with new states."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)
    v, s = _states(0, world, 16, torch.bfloat16)
    own_v, own_s = v[:, rank].cuda().contiguous(), s[:, rank].cuda().contiguous()
    merge_context(own_v, own_s, exchange=exchange)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            merged = merge_context(own_v, own_s, exchange=exchange)
    for seed in range(1, 30):
        v, s = _states(seed, world, 16, torch.bfloat16)
        own_v.copy_(v[:, rank])
        own_s.copy_(s[:, rank])
        graph.replay()
        _check(merged, v, s, None, slice(None))


def compiled(group: Group) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)

    def step(own_v: Tensor, own_s: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = merge_context(own_v * 2, own_s, group, exchange=exchange)
        return out + 0, lse

    torch._dynamo.reset()
    function = torch.compile(step, fullgraph=True)
    for seed in range(4):
        v, s = _states(seed, world, 16, torch.bfloat16)
        merged = function(v[:, rank].cuda(), s[:, rank].cuda())
        _check(merged, v * 2, s, None, slice(None))


def the_same_bits_on_all_ranks(group: Group) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)
    v, s = _states(3, world, 16, torch.bfloat16)
    out, _ = merge_context(v[:, rank].cuda(), s[:, rank].cuda(), exchange=exchange)
    all_out = out.new_empty(world, *out.shape)
    dist.all_gather_into_tensor(all_out, out[None], group=group)
    assert all(torch.equal(all_out[0], other) for other in all_out)


def a_batch_beyond_the_capacity(group: Group) -> None:
    """Every rank raises before it publishes anything, and the exchange goes on."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)
    v, s = (t.cuda() for t in _states(3, world, 40, torch.bfloat16))
    own = v[:, rank].contiguous(), s[:, rank].contiguous()
    _raises(CapacityError, "max_rows of at least 40", lambda: merge_context(*own, exchange=exchange))
    _check(merge_context(own[0][:5], own[1][:5], exchange=exchange), v[:5].cpu(), s[:5].cpu(), None, slice(None))


def a_rank_that_does_not_arrive(group: Group) -> None:
    """All ranks get NaN and a RankError, from then on; a new exchange works."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    v, s = _states(3, world, 16, torch.bfloat16)
    own = v[:, rank].cuda().contiguous(), s[:, rank].cuda().contiguous()
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)
    merge_context(*own, exchange=exchange)  # compiles, with time enough
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True, timeout_s=1)
    if rank == world - 1:
        time.sleep(3)
    merged = merge_context(*own, exchange=exchange)
    torch.cuda.synchronize()
    assert all(t.isnan().all() for t in merged)
    for _ in range(2):
        _raises(RankError, f"waited more than 1 s for rank {world - 1}", exchange.check)
        _raises(RankError, f"for rank {world - 1}", lambda: merge_context(*own, exchange=exchange))
    dist.barrier(group)
    exchange = ContextExchange(16, HEADS, DIM, group=group, required=True)
    _check(merge_context(*own, exchange=exchange), v, s, None, slice(None))


CASES: dict[str, Callable[[Group], None]] = {
    case.__name__: case
    for case in (
        eager,
        captured,
        compiled,
        the_same_bits_on_all_ranks,
        a_batch_beyond_the_capacity,
        a_rank_that_does_not_arrive,
    )
}
