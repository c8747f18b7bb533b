"""Timed packages: their inputs, and the process that replays them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.benchmark_rows import SMALL

from benchmarks import packages
from benchmarks.decode_problem import DecodeProblem

pytestmark = pytest.mark.usefixtures("two_copies")


def test_copies_for_packages_share_what_eager_launches_share() -> None:
    p = DecodeProblem(SMALL, device="cpu")
    planner = p.planner()
    plan = planner.plan(*p.table.arguments)
    copies = [(p.q, *p.caches(i)) for i in range(p.copies)]
    tensors, places = packages.Problem("batch_decode", {}, copies, plan, planner.workspace).on_host()
    for copy, at in zip(copies, places, strict=True):
        assert all(torch.equal(tensors[i], t) for i, t in zip(at, (*copy, *plan, planner.workspace), strict=True))
    shared = [i == j for i, j in zip(*places, strict=True)]
    assert shared == [True, False, False] + [True] * (len(plan) + 1)  # all but the caches
    assert len(tensors) == len(shared) + 2


def _executable(path: Path, source: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{source}")
    path.chmod(0o700)
    return path


def test_a_package_replays_on_request(tmp_path: Path) -> None:
    program = _executable(
        tmp_path / "runner",
        "import sys\n"
        "for i, _ in enumerate(sys.stdin):\n    print(float(sys.argv[3]) + i, flush=True)\n"
        "print(2, 9.5, flush=True)",
    )
    with packages.Runner(program, tmp_path / "a.pt2", tmp_path / "inputs.pt", 10) as runner:
        assert [runner.replay_microseconds() for _ in range(3)] == [10, 11, 12]
        assert runner.end() == (2, 9.5)


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "input()\nraise SystemExit(3)"])
def test_a_package_that_fails_is_no_result(tmp_path: Path, source: str) -> None:
    program = _executable(tmp_path / "runner", source)
    with packages.Runner(program, tmp_path / "a.pt2", tmp_path / "inputs.pt", 10) as runner:
        with pytest.raises(RuntimeError, match="ended with status 3 before it printed a result"):
            runner.replay_microseconds()
        with pytest.raises(RuntimeError, match="ended with status 3 before it printed a result"):
            runner.end()
