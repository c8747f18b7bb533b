"""Fixtures of the tests of the benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import comparison


@pytest.fixture
def two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems have two copies of their tensors, not as many as a cache of the GPU does not hold."""
    for module in ("decode_problem", "prefill_problem", "small_ops", "sparse_problem"):
        monkeypatch.setattr(f"benchmarks.{module}.copies_for", lambda num_bytes: 2)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of implementations that are timed. Each takes as many microseconds as its name has letters."""
    names: list[str] = []

    def clock(calls: dict[str, Any], copies: int, expected: float, rounds: int) -> dict[str, list[float]]:
        names.extend(calls)
        return {name: [float(len(name))] * rounds for name in calls}

    monkeypatch.setattr(comparison, "device_rounds", clock)
    monkeypatch.setattr(comparison, "graph_of", lambda call, copies, launches: call(0))
    return names
