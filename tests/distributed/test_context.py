"""Context parallelism on two processes, against the float64 oracle on all keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.context_ranks import CASES
from helpers.rank_processes import run_ranks

WORLD = 2


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks("helpers.context_ranks", WORLD, folder)


@pytest.mark.parametrize("case", CASES)
def test_context(case: str, failures: dict[str, dict[str, str]]) -> None:
    ranks = failures[case]
    assert len(ranks) == WORLD
    failed = {rank: text for rank, text in ranks.items() if text}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
