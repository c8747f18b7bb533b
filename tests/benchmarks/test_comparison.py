"""Comparisons of implementations: rounds, checks, peers that are not measured, and runs that end early."""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.benchmark_rows import SMALL, fails, on_cpu, peer_of, refuses

from benchmarks import comparison, decode, report, timing
from benchmarks.comparison import Comparison, NotMeasured
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import DecodeRow

pytestmark = pytest.mark.usefixtures("two_copies")


def test_rounds_have_all_calls_in_changing_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []
    monkeypatch.setattr(timing, "graph_of", lambda call, copies, launches: call(launches))
    monkeypatch.setattr(timing, "replay_microseconds", lambda graph: order.append(graph[0]) or graph[1] * graph[2])
    calls = {name: lambda launches, i=i, name=name: (name, launches, 2.0 + i) for i, name in enumerate("abc")}
    times = timing.device_rounds(calls, copies=2, expected=50.0, rounds=9)
    assert times == {"a": [2.0] * 9, "b": [3.0] * 9, "c": [4.0] * 9}
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 10
    assert all(set(found) == set("abc") for found in rounds)
    assert len(set(rounds)) > 3


def test_a_row_has_the_largest_spread_of_its_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing.spread([10.0, 10.0, 10.0]) == 0
    assert timing.spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    found = {"ours": [10.0, 10.0, 10.0, 10.0, 10.0], "peer": [8.0, 9.0, 10.0, 11.0, 12.0]}
    monkeypatch.setattr(comparison, "device_rounds", lambda *_: found)
    monkeypatch.setattr(comparison, "_checked", lambda *_: lambda copy: None)
    monkeypatch.setattr(comparison, "graph_of", lambda *_: None)
    compared = Comparison({"ours": refuses}, {"peer": refuses})
    problem = SimpleNamespace(copies=1)
    rows = compared.rows([SMALL], lambda row: {"row": row.name, **compared.times(row.name, problem, 10.0)})
    assert rows == [{"row": "small", "ours": 10.0, "peer": 10.0, comparison.SPREAD: pytest.approx(20.0)}]


def test_measurements_are_interleaved_in_random_order() -> None:
    ran: list[str] = []
    measurements = {name: lambda name=name: float(ran.append(name) or len(ran)) for name in "abc"}
    results = timing.interleaved(measurements, rounds=20)
    rounds = [ran[i : i + 3] for i in range(0, len(ran), 3)]
    assert all(sorted(names) == list("abc") for names in rounds)
    assert len({tuple(names) for names in rounds}) > 3
    assert {name: len(times) for name, times in results.items()} == dict.fromkeys("abc", 20)  # one more round ran
    assert min(time for times in results.values() for time in times) == 4


def test_peers_that_refuse_fail_or_are_wrong_are_listed_and_not_timed(timed: list[str]) -> None:
    peers = {
        "good": decode.ours,
        "wrong": peer_of(lambda problem: torch.zeros_like(problem.q)),
        "refuses": refuses,
        "fails": peer_of(fails),
    }
    found = Comparison({"ours": decode.ours}, peers)
    times = found.times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert timed == ["ours", "good"] == list(times)
    reasons = {entry.peer: entry.reason for entry in found.not_measured}
    assert reasons["refuses"] == "it has no kernel"
    assert reasons["fails"] == "RuntimeError: no such kernel"
    assert reasons["wrong"].startswith("AssertionError: wrong result: relative error 1.0")


def test_a_wrong_result_of_ours_ends_the_run(timed: list[str]) -> None:
    wrong = peer_of(lambda problem: torch.full_like(problem.q, torch.nan))
    with pytest.raises(AssertionError, match="wrong result: relative error nan"):
        Comparison({"ours": wrong}, {}).times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert not timed


def test_a_peer_that_fails_slowly_is_tried_once(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_FAILURE_SECONDS", 0.0)
    found = Comparison({"ours": decode.ours}, {"fails": peer_of(fails)})
    for row in ("first", "second"):
        found.times(row, DecodeProblem(SMALL, device="cpu"), 1.0)
    first, second = found.not_measured
    assert (first.row, second.row) == ("first", "second")
    assert second.reason == "it took more than 0 s to fail in first"


def test_peers_left_out_are_listed(timed: list[str]) -> None:
    found = Comparison({"ours": decode.ours}, {"good": decode.ours}, ("good", "other"))
    found.times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert found.not_measured == [NotMeasured("other", "small", "left out with --peers")]


class _EndsWithItsFinalizer:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("finalizer", [False, True])
def test_a_benchmark_that_is_ended_keeps_its_rows(finalizer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``timeout`` ends it, also while a finalizer runs, in which Python ignores exceptions."""
    monkeypatch.setattr(comparison, "_ended", [])
    found = Comparison({}, {})
    rows = [replace(SMALL, name=name) for name in ("first", "second", "third", "fourth")]

    def measure(row: DecodeRow) -> dict[str, Any]:
        if row.name == "second":
            _EndsWithItsFinalizer() if finalizer else os.kill(os.getpid(), signal.SIGTERM)
        return {"row": row.name}

    before = signal.signal(signal.SIGTERM, comparison.end)
    try:
        results = found.rows(rows, measure)
    finally:
        signal.signal(signal.SIGTERM, before)
    kept = 1 + finalizer
    assert [result["row"] for result in results] == [row.name for row in rows[:kept]]
    late = "; ".join(row.name for row in rows[kept:])
    assert found.not_measured == [NotMeasured("all", late, "the process was ended before")]


def test_a_benchmark_saves_the_selected_rows_and_peers(
    timed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, decode, "DecodeProblem")
    monkeypatch.setattr(decode, "ROWS", [replace(SMALL, name="first"), SMALL])
    monkeypatch.setattr(decode, "DECODE_PEERS", {"good": decode.ours, "other": decode.ours})
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    decode.run(parser.parse_args(["--rows", "1", "--peers", "go", "--output", str(tmp_path)]))
    data = json.loads((tmp_path / "decode.json").read_text(encoding="utf-8"))
    assert data["title"] == "Decode"
    assert [(row["row"], row[report.FASTEST]) for row in data["rows"]] == [("small (cpu.sdpa)", "good")]
    assert data["not measured"] == [NotMeasured("other", "small", "left out with --peers")._asdict()]
    assert "flash_attn" in data["environment"]


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_the_logit_gap_is_that_of_the_worst_token(shape: tuple[int, ...]) -> None:
    logits = torch.randn(*shape, 11)
    greatest = logits.argmax(-1)
    assert comparison.logit_gap(logits, greatest) == 0
    logits[1, ..., 4] = logits[1].amax() - 2
    tokens = torch.cat((greatest[:1], torch.full_like(greatest[1:], 4)))
    gaps = (logits[1].amax(-1) - logits[1, ..., 4]) / logits[1].std(-1)
    assert comparison.logit_gap(logits, tokens) == pytest.approx(float(gaps.max()))
