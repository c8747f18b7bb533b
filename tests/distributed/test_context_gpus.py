"""Context parallelism on several GPUs, over NCCL and through symmetric memory; the kernel of the latter on one GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from helpers import oracle
from helpers.rank_processes import run_ranks

from attn_ops.distributed.merge_one_shot import CTAS, bytes_of_states

GPUS = torch.cuda.device_count()
MINUTE = 60_000

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("module", "world"),
    [("helpers.context_ranks", 2), ("helpers.one_shot_ranks", 2), ("helpers.one_shot_ranks", 4)],
)
def test_ranks(module: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    monkeypatch.setenv("RANKS_ON", "cuda")
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"))
    results = run_ranks(module, world, tmp_path, timeout_s=300)
    failed = {f"{case}, rank {rank}": text for case, ranks in results.items() for rank, text in ranks.items() if text}
    assert len(results) >= 5
    assert all(len(ranks) == world for ranks in results.values())
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())


def _memory(world: int, half_bytes: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The buffers of ranks on one GPU, their addresses, and the error of their host."""
    from attn_ops.kernels.triton.merge_context import buffer_bytes

    size = buffer_bytes(CTAS, world, half_bytes)
    memory = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(world)]
    error = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return memory, torch.tensor([*(t.data_ptr() for t in memory), error.data_ptr()], device="cuda"), error


def test_a_rank_that_does_not_arrive() -> None:
    """The kernel ends after the time-out, with NaN, and tells the host. The next ones do not wait."""
    half = bytes_of_states(20 * 6, 40, torch.bfloat16)
    _, buffers, error = _memory(2, half)
    epochs = [torch.zeros(CTAS, dtype=torch.int32, device="cuda") for _ in range(2)]
    v, s = torch.ones(20, 6, 40, dtype=torch.bfloat16, device="cuda"), torch.zeros(20, 6, device="cuda")
    for rank, timeout_ms in ((0, 300), (1, MINUTE), (0, MINUTE)):
        begin = time.monotonic()
        merged = torch.ops.attn.merge_context(v, s, buffers, epochs[rank], rank, half, timeout_ms)
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 50
        assert all(t.isnan().all() for t in merged)
        assert int(error) == 2


@pytest.mark.parametrize("scatter", [False, True])
def test_two_ranks_on_one_gpu(scatter: bool) -> None:
    """The kernels of both ranks wait for each other on two streams."""
    most, heads, dim, world = 20, 6, 40, 2
    half = bytes_of_states(most * heads, dim, torch.bfloat16)
    flags = CTAS * world * 4
    memory, buffers, error = _memory(world, half)
    epochs = [torch.zeros(CTAS, dtype=torch.int32, device="cuda") for _ in range(world)]
    streams = [torch.cuda.Stream() for _ in range(world)]
    generator = torch.Generator("cuda").manual_seed(0)
    sinks = torch.linspace(-2, 2, heads, device="cuda")

    def merge(rank: int, v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.attn.merge_context(v, s, buffers, epochs[rank], rank, half, MINUTE, scatter, sinks)

    states_of_ranks = [
        (
            torch.randn(world, rows, heads, dim, generator=generator, device="cuda").bfloat16(),
            torch.randn(world, rows, heads, generator=generator, device="cuda"),
        )
        for rows in (1, most, 3, 7, most)
    ]
    # Each launch once by itself, with flags that it does not wait for: a module that is loaded, or memory that is
    # allocated, while the kernel of the other rank waits may wait for that kernel.
    for v, s in states_of_ranks:
        for rank, stream in enumerate(streams):
            for t in memory:
                t[:flags].view(torch.int32).fill_(1 << 20)
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                merge(rank, v[rank], s[rank])
            torch.cuda.synchronize()
    for t in (*memory, *epochs):
        t.zero_()
    torch.cuda.synchronize()
    for v, s in states_of_ranks:
        results = []
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results.append(merge(rank, v[rank], s[rank]))
        torch.cuda.synchronize()
        states = torch.cat((v, torch.zeros_like(v[:1]))), torch.cat((s, (sinks * 1.4426950408889634).expand_as(s[:1])))
        out, lse = oracle.merge(*(t.transpose(0, 1) for t in states))
        for rank, merged in enumerate(results):
            kept = slice(rank * heads // 2, (rank + 1) * heads // 2) if scatter else slice(None)
            torch.testing.assert_close(merged[0].cpu().double(), out[:, kept], atol=2**-7, rtol=2**-7)
            torch.testing.assert_close(merged[1].cpu().double(), lse[:, kept], atol=1e-5, rtol=1e-5)
    assert int(error) == 0
