"""The kernel of the one-shot merge in Triton's interpreter, one rank after the other."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import oracle

pytest.importorskip("triton")

from attn_ops.kernels.triton.merge_context import buffer_bytes, merge_context

CTAS, DIM, MINUTE = 3, 24, 60_000


class Memory:
    """The buffers of all ranks, NaN but for the flags and the error, and the errors of their hosts."""

    def __init__(self, world: int, half_bytes: int, flags: int) -> None:
        size, header = buffer_bytes(CTAS, world, half_bytes), CTAS * world * 4 + 4
        self.memory = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(world)]
        words = [t[:header].view(torch.int32) for t in self.memory]
        self.flags, self.errors = [t[:-1].view(CTAS, world) for t in words], [t[-1:] for t in words]
        self.host_errors = torch.zeros(world, dtype=torch.int32)
        for t, error in zip(self.flags, self.errors, strict=True):
            t.fill_(flags)
            error.zero_()

    def addresses(self, rank: int) -> torch.Tensor:
        """What the kernel of a rank takes as ``buffers``."""
        return torch.tensor([t.data_ptr() for t in (*self.memory, self.host_errors[rank:])])


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
    memory = Memory(world, half, flags=1 << 20)  # which no launch waits for
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
                merge_context(v[rank], s[rank], memory.addresses(rank), epochs, rank, half, MINUTE, *merged, sink)
                assert epochs.tolist() == [launch + 1] * CTAS
                for flags in memory.flags:
                    assert (flags[:, rank] == launch + 1).all()
                    flags.fill_(1 << 20)
                if published:
                    share = slice(rank * kept, (rank + 1) * kept) if scatter else slice(None)
                    torch.testing.assert_close(merged[0].double(), out[:, share], atol=1e-6, rtol=1e-6)
                    torch.testing.assert_close(merged[1].double(), lse[:, share], atol=1e-6, rtol=1e-6)
    assert not memory.host_errors.any()
    assert not any(memory.errors)


@pytest.mark.interpreter
def test_a_rank_that_does_not_arrive() -> None:
    """The rank that waits fails after its time-out, and the late rank and every later launch fail at once."""
    world, heads, rows, half, late = 3, 2, 4, 1 << 12, 2
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(world, rows, heads, DIM, generator=generator)
    s = torch.randn(world, rows, heads, generator=generator)
    memory = Memory(world, half, flags=0)

    def seconds_of_merge(rank: int, launch: int, timeout_ms: int) -> float:
        """Of a launch that fails."""
        epochs = torch.full((CTAS,), launch, dtype=torch.int32)
        out, lse = torch.zeros(rows, heads, DIM), torch.zeros(rows, heads)
        begin = time.monotonic()
        merge_context(v[rank], s[rank], memory.addresses(rank), epochs, rank, half, timeout_ms, out, lse)
        assert out.isnan().all()
        assert lse.isnan().all()
        assert epochs.tolist() == [launch + 1] * CTAS
        return time.monotonic() - begin

    memory.flags[0][:, 1] = 1  # rank 1 is there
    assert seconds_of_merge(0, 0, 200) > 0.2
    assert [int(error) for error in memory.errors] == [1 + late] * world
    assert memory.host_errors.tolist() == [1 + late, 0, 0]
    for rank, launch in ((2, 0), (1, 0), (0, 1)):
        assert seconds_of_merge(rank, launch, MINUTE) < 30
    assert memory.host_errors.tolist() == [1 + late] * world


@pytest.mark.interpreter
def test_a_count_that_wraps_around() -> None:
    """Flags are behind or ahead by their difference, also where it wraps around."""
    half, last = 1 << 12, (1 << 31) - 1
    v, s = torch.ones(2, 1, 1, DIM), torch.zeros(2, 1, 1)
    for launch, flag, fails in ((last, -(1 << 31), False), (last, last, True), (last - 1, -(1 << 31), False)):
        memory, epochs = Memory(2, half, flags=flag), torch.full((CTAS,), launch, dtype=torch.int32)
        out, lse = torch.zeros(1, 1, DIM), torch.zeros(1, 1)
        for t in memory.memory:
            t[-2 * half :].zero_()
        merge_context(v[0], s[0], memory.addresses(0), epochs, 0, half, 1, out, lse)
        assert bool(out.isnan().any()) == fails
        assert memory.host_errors.tolist() == [2 if fails else 0, 0]
