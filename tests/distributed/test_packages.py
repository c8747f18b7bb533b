"""A package per rank, with the collective of a message of two dtypes inside, on two C++ processes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import cpp_runner
from helpers.context_batch import PAGE, Batch, Problem
from helpers.oracle import Expected
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import attn_ops
from attn_ops.distributed import ContextShard, merge_context

WORLD = 2
WINDOW = 40


class Step(nn.Module):
    """Decode on the keys of a rank, and the merge."""

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, workspace: Tensor) -> Any:
        call = (q, k_cache, v_cache, plan, workspace)
        return merge_context(*torch.ops.attn.batch_decode(*call, window_left=WINDOW, return_lse=True), plan=plan)


def _export(rank: int, folder: Path) -> tuple[list[str], Batch, Tensor]:
    """Export the package of ``rank``. Returns the arguments of its process, its batch and the query."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        batch = Batch(
            Problem((70, 0, 1, 130), heads=(4, 2), dim=16, dim_vo=16, dtype=torch.bfloat16),
            ContextShard(rank, WORLD, PAGE),
        )
        batch.append(batch.lens)
        planner = attn_ops.DecodePlanner(4, 20, **batch.sizes(), context=batch.shard, window_left=WINDOW)
        q, package = batch.queries(4), folder / f"{rank}.pt2"
        inputs = (q, *batch.cache(), planner.state, planner.workspace)
        attn_ops.export_package(Step(), planner, inputs, package)
        torch.save([*batch.table(), q, *batch.cache()], folder / f"{rank}-inputs.pt")
        assert dist.group.WORLD is not None
        words = [package, folder / "store", rank, WORLD, dist.group.WORLD.group_name]
        return [*map(str, (*words, folder / f"{rank}-inputs.pt", folder / f"{rank}-result.pt"))], batch, q
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_in_cpp(tmp_path: Path) -> None:
    exports = [_export(rank, tmp_path) for rank in range(WORLD)]
    program = cpp_runner.program("rank", *cpp_runner.sanitizer())
    pipes: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "env": cpp_runner.environment()}
    processes = [subprocess.Popen([*program, *words], **pipes) for words, _, _ in exports]
    try:
        messages = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD, messages
    _, batch, q = exports[0]
    expected = Expected.of(batch.requests(q, [1] * 4), window_left=WINDOW)
    for words, _, _ in exports:
        expected.check(*torch.load(words[-1]))
