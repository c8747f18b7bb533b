"""The kernel of the one-shot merge in Triton's interpreter, one rank after the other."""

from __future__ import annotations

import pytest
import torch
from helpers import oracle

pytest.importorskip("triton")

from attn_ops.kernels.triton.merge_context import merge_context

CTAS, DIM = 3, 24


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("world", "heads", "rows", "scatter", "sinks"),
    [
        (2, 4, 5, False, False),
        (2, 6, 9, True, True),
        (3, 3, 1, True, False),
        (4, 8, 0, False, True),
        (1, 2, 7, False, True),
    ],
)
def test_the_states_of_all_ranks_are_merged(world: int, heads: int, rows: int, scatter: bool, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(world, rows, heads, DIM, generator=generator)
    s = torch.randn(world, rows, heads, generator=generator)
    s[torch.rand(s.shape, generator=generator) < 0.3] = -torch.inf
    half = -(-max(rows, 1) * heads // 16) * 16 * (DIM * 4 + 4)
    memory = [torch.full((CTAS * world * 4 + 2 * half,), 255, dtype=torch.uint8) for _ in range(world)]
    for t in memory:  # flags that no launch waits for; the rest is NaN
        t[: CTAS * world * 4].view(torch.int32).fill_(1 << 20)
    buffers = torch.tensor([t.data_ptr() for t in memory])
    sink = torch.linspace(-1, 2, heads) if sinks else None
    kept = heads // world if scatter else heads
    states = v.transpose(0, 1), s.transpose(0, 1)
    if sink is not None:
        states = (
            torch.cat((states[0], torch.zeros(rows, 1, heads, DIM)), 1),
            torch.cat((states[1], (sink * 1.4426950408889634).expand(rows, 1, heads)), 1),
        )
    out, lse = oracle.merge(*states)
    for launch in range(3):
        for published in (False, True):  # what a rank reads before all have published means nothing
            for rank in range(world):
                epochs = torch.full((CTAS,), launch, dtype=torch.int32)
                merged = torch.full((rows, kept, DIM), torch.nan), torch.full((rows, kept), torch.nan)
                merge_context(v[rank], s[rank], buffers, epochs, rank, half, *merged, sink)
                assert epochs.tolist() == [launch + 1] * CTAS
                for t in memory:
                    flags = t[: CTAS * world * 4].view(torch.int32).view(CTAS, world)
                    assert (flags[:, rank] == launch + 1).all()
                    flags.fill_(1 << 20)
                if published:
                    share = slice(rank * kept, (rank + 1) * kept) if scatter else slice(None)
                    torch.testing.assert_close(merged[0].double(), out[:, share], atol=1e-6, rtol=1e-6)
                    torch.testing.assert_close(merged[1].double(), lse[:, share], atol=1e-6, rtol=1e-6)
