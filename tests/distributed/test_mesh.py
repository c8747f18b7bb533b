"""Tensor and context parallelism together: a mesh of 2 x 2 processes, against the float64 oracle on all keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.rank_processes import run_ranks

WORLD = 4


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mesh(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs")
    monkeypatch.setenv("RANKS_ON", device)
    results = run_ranks("helpers.mesh_ranks", WORLD, tmp_path)
    assert results.keys() == {"decode", "prefill", "compiled_steps"}
    failed = {f"{case}, rank {rank}": text for case, ranks in results.items() for rank, text in ranks.items() if text}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())
