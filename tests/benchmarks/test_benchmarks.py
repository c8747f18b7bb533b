"""What the driver does before and after the clock: problems, checks, refusals, draws, tables and pictures."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contest, decode, model, plot, prefill_problem, report, workload
from benchmarks.contest import Contest, NotMeasuredError
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import ROWS, DecodeRow
from benchmarks.model import Kernel, gaps, parts
from benchmarks.prefill_rows import PREFILL_ROWS, PrefillRow
from benchmarks.warm import KINDS, families, kind

SMALL = DecodeRow("small", (40, 7, 16), 4, 2, 1.0, head_dim=16)
STEP = PrefillRow("step", (1, 1, 1, 9, 30), (20, 33, 5, 40, 30), None, True, 4, 2, 16, 16)


@pytest.fixture(autouse=True)
def two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("decode_problem", "prefill_problem"):
        monkeypatch.setattr(f"benchmarks.{module}.copies_for", lambda num_bytes: 2)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of contenders that came to be timed, each said to take as long as its name has letters."""
    names: list[str] = []

    def clock(calls: dict[str, Any], copies: int, expected: float, rounds: int) -> dict[str, float]:
        names.extend(calls)
        return {name: float(len(name)) for name in calls}

    monkeypatch.setattr(contest, "device_microseconds", clock)
    monkeypatch.setattr(contest, "graph_of", lambda call, copies, launches: call(0))
    return names


@pytest.mark.parametrize("fp8", [False, True])
def test_a_decode_problem_tells_right_from_wrong(fp8: bool) -> None:
    problem = DecodeProblem(replace(SMALL, fp8=fp8), device="cpu")
    out = decode.ours(problem)(0)
    assert problem.error(out) < contest.WORST_ERROR
    assert problem.error(decode.ours(problem)(1)) > contest.WORST_ERROR  # another copy of the cache
    out[2] *= 1.05
    assert problem.error(out) > contest.WORST_ERROR


def test_the_block_tables_hold_each_request_s_pages() -> None:
    problem = DecodeProblem(SMALL, device="cpu")
    tables = problem.block_tables()
    assert tables.shape == (3, 3)
    for b, (begin, end) in enumerate(zip(problem.kv_indptr, problem.kv_indptr[1:], strict=False)):
        assert torch.equal(tables[b, : end - begin], problem.kv_indices[begin:end])


def _peer(call: Callable[[Any], Any]) -> contest.Prepare:
    return lambda problem: lambda copy: call(problem)


def _refuses(problem: Any) -> Any:
    raise NotMeasuredError("it does not want to")


def _fails(problem: Any) -> Any:
    raise RuntimeError("\nno such kernel\nand much more")


def test_peers_that_refuse_fail_or_err_are_named_and_not_timed(timed: list[str]) -> None:
    peers = {
        "good": decode.ours,
        "wrong": _peer(lambda problem: torch.zeros_like(problem.q)),
        "refuses": _refuses,
        "fails": _peer(_fails),
    }
    found = Contest({"ours": decode.ours}, peers)
    times = found.times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert timed == ["ours", "good"] == list(times)
    reasons = {refusal.peer: refusal.reason for refusal in found.refusals}
    assert reasons["refuses"] == "it does not want to"
    assert reasons["fails"] == "RuntimeError: no such kernel"
    assert reasons["wrong"].startswith("AssertionError: wrong: error 1.0")


def test_a_wrong_result_of_ours_ends_the_run(timed: list[str]) -> None:
    wrong = _peer(lambda problem: torch.full_like(problem.q, torch.nan))
    with pytest.raises(AssertionError, match="wrong: error nan"):
        Contest({"ours": wrong}, {}).times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert not timed


def test_a_peer_that_fails_slowly_is_tried_once(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "SLOW_SECONDS", 0.0)
    found = Contest({"ours": decode.ours}, {"fails": _peer(_fails)})
    for row in ("first", "second"):
        found.times(row, DecodeProblem(SMALL, device="cpu"), 1.0)
    assert [refusal.row for refusal in found.refusals] == ["first"]


def test_a_report_names_what_was_not_measured() -> None:
    rows = [{"row": "a", "us": 1.234, "peer": None}, {"row": "b", "us": 56.78, "peer": 9.0}]
    refusals = [contest.Refusal("x", "a", "why"), contest.Refusal("x", "b", "why"), contest.Refusal("peer", "a", "no")]
    text = report.markdown("Title", "A note.", {"torch": "2"}, rows, refusals)
    assert "| a | 1.23 | - |\n| b | 56.8 | 9.00 |\n" in text
    assert text.endswith("Not measured:\n\n* x: why (every row)\n* peer: no (a)\n")


def test_rows_count_bytes_and_operations() -> None:
    row = next(row for row in ROWS if row.name == "32 x 4k, 32/8")
    assert row.bytes() == 2 * 32 * 4096 * 8 * 128 * 2 + 2 * 32 * 32 * 128 * 2
    assert replace(row, fp8=True).kv_bytes() * 2 == row.kv_bytes()
    causal = next(row for row in PREFILL_ROWS if row.name == "8 x (512 new on 8k)")
    pairs = sum(8192 - 512 + i + 1 for i in range(512))
    assert causal.flops() == 8 * pairs * 32 * 4 * 128
    assert report.of_roofline(2 * report.MATRIX_RATE, report.READ_RATE, 4.0) == 0.5


@pytest.mark.parametrize("trace", workload.traces(), ids=lambda trace: trace.name)
def test_steps_are_drawn_from_a_trace(trace: workload.Trace) -> None:
    longest = max(prompt + out for prompt, out in trace.requests)
    for tokens in (0, 300):
        row = workload.draw(trace, 16, tokens)
        assert row == workload.draw(trace, 16, tokens) != workload.draw(trace, 16, tokens, seed=1)
        assert row.qo_lens[:16] == (1,) * 16
        assert sum(row.qo_lens[16:]) == tokens
        assert all(0 < new <= context <= longest for new, context in zip(row.qo_lens, row.kv_lens, strict=True))


def test_the_traces_keep_source_and_licence() -> None:
    entries = json.loads(workload.LENGTHS.read_text(encoding="utf-8"))
    told = (workload.LENGTHS.parent / "README.md").read_text(encoding="utf-8")
    assert {entry["license"] for entry in entries} == {"CC-BY-4.0", "Apache-2.0"}
    assert all(entry["source"].split("@")[0] in told and entry["name"] in told for entry in entries)


@pytest.mark.parametrize("make", list(workload.Workload.OURS.values()), ids=list(workload.Workload.OURS))
def test_a_serving_step_attends_for_every_request(
    make: Callable[[workload.StepProblem], workload.Contender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LAYERS", 3)
    for row in (STEP, replace(STEP, qo_lens=(1,) * 5)):
        problem = workload.StepProblem(row, device="cpu")
        assert problem.decoding == row.qo_lens.count(1)
        step = workload._step(make(problem), problem, planned_inside=True)
        for copy in (0, 1):
            assert problem.error(step(copy), copy) < contest.WORST_ERROR


def test_requests_of_a_prefill_problem_are_what_its_tables_say() -> None:
    problem = prefill_problem.PrefillProblem(STEP, device="cpu")
    assert problem.dense(0) is None
    even = prefill_problem.PrefillProblem(replace(STEP, qo_lens=(8, 8), kv_lens=(24, 24)), device="cpu")
    q, k, _ = even.dense(1) or pytest.fail("the requests are of one size")
    assert torch.equal(q[1, 2], even.q[8:16, 2])
    assert torch.equal(k[1, 1], even.table.tokens(even.k_caches[1], 1, 24)[:, 1])


def test_gaps_are_where_no_kernel_runs() -> None:
    kernels = [Kernel("a", 0, 2), Kernel("b", 1, 3), Kernel("c", 5, 6), Kernel("d", 5.5, 5.75), Kernel("e", 6, 7)]
    assert gaps(kernels) == 2


def test_kernels_are_told_apart_by_name() -> None:
    names = ("plan_decode_kernel", "append_kernel_0", "decode_kernel", "merge_rows_kernel_3", "nvjet_tst_64x8")
    found = parts([Kernel(name, i, i + 2**-i) for i, name in enumerate(names)])
    expected = {"planning": 1.0, "append": 0.5, "attention": 0.25 + 0.125, "rest": 0.0625}
    assert {name: found[name] for name in expected} == expected


def test_the_kernels_have_these_names() -> None:
    """Or a profile counts them as the rest of the step."""
    pytest.importorskip("triton")
    places = {model.ATTENTION: "decode", model.MERGE: "pieces", model.APPEND: "page", model.PLAN: "plan_decode"}
    for name, module in places.items():
        assert hasattr(importlib.import_module(f"attn_ops.kernels.triton.{module}"), name)


def test_every_family_to_build_is_of_some_kind() -> None:
    found = set(families())
    assert {kind(family) for family in found} == set(KINDS)
    assert len(found) < 30


def test_ratios_are_above_one_where_ours_is_faster() -> None:
    times = {"row": "r", "attn_ops": 2.0, "flashinfer": 3.0, "sdpa cudnn": None, "goal": 1.0, "flashinfer plan": 9.0}
    assert plot.ratios(times, plot.CHARTS["decode"]) == {"flashinfer": 1.5}
    rates = {"row": "r", "paged": 300.0, "ragged": 400.0, "flex": 200.0, "flashinfer fa3 ragged": 500.0}
    assert plot.ratios(rates, plot.CHARTS["prefill"]) == {"flex": 2.0, "flashinfer fa3 ragged": 0.8}


def test_pictures_are_made_of_the_stored_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stored = sorted(report.RESULTS.glob("*.json"))
    for source in stored:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    plot.run(type("Arguments", (), {"results": tmp_path}))
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == {path.stem for path in report.RESULTS.glob("*.png")}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))
