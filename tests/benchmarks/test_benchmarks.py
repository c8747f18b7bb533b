"""Benchmarks apart from timing: problems, checks, skipped peers, sampled steps, tables and plots."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attn_ops.flash_attn
from benchmarks import (
    comparison,
    decode,
    decode_peers,
    mla,
    mla_peers,
    model,
    overheads,
    packages,
    peers,
    plot,
    prefill,
    prefill_peers,
    prefill_problem,
    report,
    small_ops,
    sparse,
    sparse_problem,
    timing,
    workload,
)
from benchmarks.comparison import Comparison, NotMeasured, NotMeasuredError
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import ROWS, DecodeRow
from benchmarks.model import MODULES, Kernel, gaps, kernel_parts, part_times
from benchmarks.prefill_rows import PREFILL_ROWS, MlaRow, PrefillRow
from benchmarks.timing import HostTime
from benchmarks.warm import KINDS, LOADED, generator, kind, modules

SMALL = DecodeRow("small", (40, 7, 16), 4, 2, 1.0, head_dim=16)
STEP = PrefillRow("step", (1, 1, 1, 9, 30), (20, 33, 5, 40, 30), None, True, 4, 2, 16, 16)


@pytest.fixture(autouse=True)
def two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
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
    compared = Comparison({"ours": _refuses}, {"peer": _refuses})
    problem = SimpleNamespace(copies=1)
    rows = compared.rows([SMALL], lambda row: {"row": row.name, **compared.times(row.name, problem, 10.0)})
    assert rows == [{"row": "small", "ours": 10.0, "peer": 10.0, comparison.SPREAD: pytest.approx(20.0)}]


@pytest.mark.parametrize("options", [{}, {"fp8": True}, {"rope": True}], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_decode_problem_detects_wrong_results(options: dict[str, Any], layout: str) -> None:
    problem = DecodeProblem(replace(SMALL, **options, layout=layout), device="cpu")
    assert problem.k_caches[0].shape[1 if layout == "NHD" else 2] == SMALL.page_size
    out = decode.ours(problem)(0)
    assert problem.error(out) < comparison.MAX_RELATIVE_ERROR
    assert problem.error(decode.ours(problem)(1)) > comparison.MAX_RELATIVE_ERROR  # another copy of the cache
    out[2] *= 1.05
    assert problem.error(out) > comparison.MAX_RELATIVE_ERROR


def test_the_block_tables_hold_each_request_s_pages() -> None:
    table = DecodeProblem(SMALL, device="cpu").table
    tables = table.block_tables()
    assert tables.shape == (3, 3)
    for b, (begin, end) in enumerate(zip(table.indptr, table.indptr[1:], strict=False)):
        assert torch.equal(tables[b, : end - begin], table.indices[begin:end])


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


def test_measurements_are_interleaved_in_random_order() -> None:
    ran: list[str] = []
    measurements = {name: lambda name=name: float(ran.append(name) or len(ran)) for name in "abc"}
    results = timing.interleaved(measurements, rounds=20)
    rounds = [ran[i : i + 3] for i in range(0, len(ran), 3)]
    assert all(sorted(names) == list("abc") for names in rounds)
    assert len({tuple(names) for names in rounds}) > 3
    assert {name: len(times) for name, times in results.items()} == dict.fromkeys("abc", 20)  # one more round ran
    assert min(time for times in results.values() for time in times) == 4


def _peer(call: Callable[[Any], Any]) -> comparison.Prepare:
    return lambda problem: lambda copy: call(problem)


def _refuses(problem: Any) -> Any:
    raise NotMeasuredError("it has no kernel")


def _fails(problem: Any) -> Any:
    raise RuntimeError("\nno such kernel\nand much more")


def test_peers_that_refuse_fail_or_are_wrong_are_listed_and_not_timed(timed: list[str]) -> None:
    peers = {
        "good": decode.ours,
        "wrong": _peer(lambda problem: torch.zeros_like(problem.q)),
        "refuses": _refuses,
        "fails": _peer(_fails),
    }
    found = Comparison({"ours": decode.ours}, peers)
    times = found.times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert timed == ["ours", "good"] == list(times)
    reasons = {entry.peer: entry.reason for entry in found.not_measured}
    assert reasons["refuses"] == "it has no kernel"
    assert reasons["fails"] == "RuntimeError: no such kernel"
    assert reasons["wrong"].startswith("AssertionError: wrong result: relative error 1.0")


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_left": 6}, {"logits_soft_cap": 2.0}])
def test_flash_attn_is_called_as_its_functions_are_defined(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This library has functions of the same names and arguments."""
    for module in (decode_peers, prefill_peers):
        monkeypatch.setattr(module, "flash_attn", lambda: attn_ops.flash_attn)
    step = prefill_problem.PrefillProblem(replace(STEP, **options), device="cpu")
    assert step.error(prefill_peers.flash_attn_varlen(step)(1), 1) < comparison.MAX_RELATIVE_ERROR
    for layout in ("NHD", "HND"):
        even = DecodeProblem(replace(SMALL, lengths=(40, 40), layout=layout), device="cpu")
        assert even.error(decode_peers.flash_attn_kvcache(even)(1), 1) < comparison.MAX_RELATIVE_ERROR
    with pytest.raises(NotMeasuredError, match="a contiguous cache needs requests of one length"):
        decode_peers.flash_attn_kvcache(DecodeProblem(SMALL, device="cpu"))


def test_flashinfer_is_called_as_its_functions_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """This library has functions and wrappers of the same names and arguments."""
    for module in (peers, decode_peers, mla_peers, prefill_peers, small_ops):
        monkeypatch.setattr(
            module, "flashinfer", lambda name="": importlib.import_module(f"attn_ops.{name}" if name else "attn_ops")
        )
    wrapper = decode_peers.flashinfer_wrapper(use_tensor_cores=True)
    for layout in ("NHD", "HND"):
        p = DecodeProblem(replace(SMALL, layout=layout), device="cpu")
        for peer in (wrapper, decode_peers.flashinfer_xqa, decode_peers.flashinfer_persistent):
            assert p.error(peer(p)(1), 1) < comparison.MAX_RELATIVE_ERROR
    rotated = DecodeProblem(replace(SMALL, rope=True), device="cpu")
    assert rotated.error(wrapper(rotated)(1), 1) < comparison.MAX_RELATIVE_ERROR
    for peer in (decode_peers.flashinfer_xqa, decode_peers.flashinfer_persistent):
        with pytest.raises(NotMeasuredError, match="it does not rotate queries and keys"):
            peer(rotated)
    few = replace(STEP, qo_lens=(4, 4), kv_lens=(33, 12))
    for peer, row in (
        (prefill_peers.flashinfer_xqa, few),
        (prefill_peers.flashinfer_xqa, replace(few, qo_lens=(1, 1))),
        (prefill_peers.flashinfer_persistent, STEP),
    ):
        problem = prefill_problem.PrefillProblem(row, device="cpu")
        assert problem.error(peer(problem)(1), 1) < comparison.MAX_RELATIVE_ERROR
    mixed = workload.StepProblem(STEP, device="cpu")
    persistent = workload.flashinfer_persistent(mixed)
    persistent.plan()
    assert mixed.error(persistent.layer(1), 1) < comparison.MAX_RELATIVE_ERROR
    for name, of in small_ops.KINDS.items():
        small = of.problem(small_ops.SmallRow("small", name, 2, 3, states=2, context=20, batch=2), "cpu")
        assert small.error(small_ops._flashinfer(small)(1), 1) < comparison.MAX_RELATIVE_ERROR
    with pytest.raises(NotMeasuredError, match="equally many query rows"):
        prefill_peers.flashinfer_xqa(prefill_problem.PrefillProblem(STEP, device="cpu"))
    for fp8 in (False, True):
        latents = prefill_problem.MlaProblem(MlaRow("small", (70, 3), 2.0, num_heads=4, fp8=fp8), device="cpu")
        assert latents.error(mla_peers.flashinfer_mla("fa3")(latents)(1), 1) < comparison.MAX_RELATIVE_ERROR
    cache = prefill_problem.PrefillProblem(replace(STEP, fp8=True), device="cpu")
    for prepare in (prefill_peers.flashinfer_paged, prefill_peers.flashinfer_ragged):
        with pytest.raises(NotMeasuredError, match="of another dtype"):
            prepare("fa3")(cache)


def test_a_wrong_result_of_ours_ends_the_run(timed: list[str]) -> None:
    wrong = _peer(lambda problem: torch.full_like(problem.q, torch.nan))
    with pytest.raises(AssertionError, match="wrong result: relative error nan"):
        Comparison({"ours": wrong}, {}).times("small", DecodeProblem(SMALL, device="cpu"), 1.0)
    assert not timed


def test_a_peer_that_fails_slowly_is_tried_once(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MAX_FAILURE_SECONDS", 0.0)
    found = Comparison({"ours": decode.ours}, {"fails": _peer(_fails)})
    for row in ("first", "second"):
        found.times(row, DecodeProblem(SMALL, device="cpu"), 1.0)
    first, second = found.not_measured
    assert (first.row, second.row) == ("first", "second")
    assert second.reason == "it took more than 0 s to fail in first"


def test_a_report_names_what_was_not_measured() -> None:
    entries = [NotMeasured("x", "a", "why"), NotMeasured("x", "b", "why"), NotMeasured("peer", "a", "no")]
    data = {
        "title": "Title",
        "headline": "A headline.",
        "note": "A note.",
        "environment": {"torch": "2"},
        "rows": [{"row": "a", "us": 1.234, "peer": None}, {"row": "b", "us": 56.78, "peer": 9.0}],
        "not measured": [entry._asdict() for entry in entries],
    }
    text = report.markdown(data)
    assert text.startswith("# Title\n\n**A headline.**\n\nA note.\n\ntorch 2\n\n| row |")
    assert "| a | 1.23 | - |\n| b | 56.8 | 9.00 |\n" in text
    assert text.endswith("Not measured:\n\n* x: why (every row)\n* peer: no (a)\n")


def test_rows_count_bytes_and_operations() -> None:
    row = next(row for row in ROWS if row.name == "32 x 4k, 32/8")
    assert row.bytes() == 2 * 32 * 4096 * 8 * 128 * 2 + 2 * 32 * 32 * 128 * 2
    assert replace(row, fp8=True).kv_bytes() * 2 == row.kv_bytes()
    causal = next(row for row in PREFILL_ROWS if row.name == "8 x (512 new on 8k)")
    pairs = sum(8192 - 512 + i + 1 for i in range(512))
    assert causal.flops() == 8 * pairs * 32 * 4 * 128
    assert report.of_roofline(2 * report.PEAK_FLOPS_PER_US, report.PEAK_BYTES_PER_US, 4.0) == 0.5


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
    readme = (workload.LENGTHS.parent / "README.md").read_text(encoding="utf-8")
    assert {entry["license"] for entry in entries} == {"CC-BY-4.0", "Apache-2.0"}
    assert all(entry["source"].split("@")[0] in readme and entry["name"] in readme for entry in entries)


@pytest.mark.parametrize("make", list(workload.Workload.OURS.values()), ids=list(workload.Workload.OURS))
def test_a_serving_step_attends_for_every_request(
    make: Callable[[workload.StepProblem], workload.StepImplementation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "LAYERS", 3)
    for row in (STEP, replace(STEP, qo_lens=(1,) * 5)):
        problem = workload.StepProblem(row, device="cpu")
        assert problem.decoding == row.qo_lens.count(1)
        step = workload._step(make(problem), problem, plan_in_graph=True)
        for copy in (0, 1):
            assert problem.error(step(copy), copy) < comparison.MAX_RELATIVE_ERROR


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


def test_kernels_are_distinguished_by_name() -> None:
    names = ("plan_decode_kernel", "append_kernel_0", "decode_kernel", "combine_kernel_3", "nvjet_tst_64x8", "decode")
    part_of = {"decode": "attention", "decode_kernel": "attention", "combine_kernel": "attention"}
    part_of |= {"plan_decode_kernel": "planning", "append_kernel": "append"}
    found = part_times([Kernel(name, i, i + 2**-i) for i, name in enumerate(names)], part_of)
    expected = {"planning": 1.0, "append": 0.5, "attention": 0.25 + 0.125 + 0.03125, "rest": 0.0625}
    assert {name: found[name] for name in expected} == expected


def test_every_module_has_kernels_that_a_profile_counts() -> None:
    pytest.importorskip("triton")
    found = kernel_parts()
    cuda = {"decode", "prefill", "mla", "mla_swap_ab"}
    cuda |= {"merge_states_kernel", "merge_state_kernel", "merge_state_in_place_kernel"}
    assert {"decode_kernel", "append_kernel", "plan_decode_kernel"} | cuda < set(found)
    assert len(found) >= len(MODULES) + len(cuda)
    assert set(found.values()) == {"attention", "append", "planning"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("decode", "attention"),
        ("mla_swap_ab", "attention"),
        ("merge_states_kernel", "attention"),
        ("decode_kernel_0", "attention"),
        ("combine_decode_kernel_1", "attention"),
        ("append_kernel_2", "append"),
        ("plan_decode_kernel", "planning"),
        ("plan_decode_kernel_3", "planning"),
        ("triton_poi_fused_add_mul_0", "rest"),
    ],
)
def test_kernels_are_booked_under_their_part_of_a_step(name: str, part: str) -> None:
    pytest.importorskip("triton")
    found = part_times([Kernel(name, 0, 2)], kernel_parts())
    assert {key for key, microseconds in found.items() if microseconds == 2} == {part}


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
def test_the_logit_gap_is_that_of_the_worst_token(shape: tuple[int, ...]) -> None:
    logits = torch.randn(*shape, 11)
    greatest = logits.argmax(-1)
    assert comparison.logit_gap(logits, greatest) == 0
    logits[1, ..., 4] = logits[1].amax() - 2
    tokens = torch.cat((greatest[:1], torch.full_like(greatest[1:], 4)))
    gaps = (logits[1].amax(-1) - logits[1, ..., 4]) / logits[1].std(-1)
    assert comparison.logit_gap(logits, tokens) == pytest.approx(float(gaps.max()))


def test_every_module_to_build_is_of_some_kind() -> None:
    found = set(modules())
    assert {kind(module) for module in found} == set(KINDS)
    assert len(found) <= 45


def test_modules_of_fp8_queries_and_of_several_rows_are_built() -> None:
    found = set(modules())
    fp8 = torch.float8_e4m3fn
    assert any(options[:3] == ("fa3", fp8, fp8) for _, options in found)
    assert {options[-1] for name, options in found if "xqa" in name} == {1, 4, 16}


def test_the_module_that_a_wrapper_loads_is_built() -> None:
    names = {name: name for pair in LOADED.items() for name in pair}
    new, old = SimpleNamespace(**names), SimpleNamespace(**{name: name for name in LOADED})
    for name, loaded in LOADED.items():
        assert generator(new, (name, ("fa2",))) == loaded
        assert generator(new, (name, ("fa3",))) == name
        assert generator(old, (name, ("fa2",))) == name


TIMES = report.Columns(("attn_ops", "one launch"), ("flashinfer", "sdpa cudnn", "flex"))
RATES = report.Columns(("paged", "ragged"), ("flex", "flashinfer fa3 ragged"), higher_is_better=True)


def test_speedups_are_above_one_where_ours_is_faster() -> None:
    times = {"row": "r", "attn_ops": 2.0, "one launch": 4.0, "flashinfer": 3.0, "sdpa cudnn": None, "goal": 1.0}
    assert report.speedups(times, TIMES) == {"flashinfer": 1.5}
    rates = {"row": "r", "paged": 300.0, "ragged": 400.0, "flex": 200.0, "flashinfer fa3 ragged": 500.0}
    assert report.speedups(rates, RATES) == {"flex": 2.0, "flashinfer fa3 ragged": 0.8}
    assert report.fastest_peer(rates, RATES) == ("flashinfer fa3 ragged", 0.8)


def test_the_headline_names_the_fastest_peer_of_each_row() -> None:
    rows: list[report.Row] = [
        {"row": "a", "attn_ops": 2.0, "flashinfer": 8.0, "sdpa cudnn": 4.0},
        {"row": "b", "attn_ops": 2.0, "flashinfer": 1.0, "sdpa cudnn": None},
        {"row": "c", "attn_ops": 2.0, "flashinfer": None, "sdpa cudnn": 8.0},
        {"row": "d", "attn_ops": 2.0, "flashinfer": None, "sdpa cudnn": None},
    ]
    absent = [NotMeasured(peer, "d", "why") for peer in ("flex", "flashinfer")]
    assert report.headline(rows, TIMES, absent) == (
        "Speed relative to the fastest peer of each row: 1.59x (geometric mean), 0.50x to 4.00x; faster in 2 of 3 "
        "rows. Fastest peers, by number of rows: sdpa cudnn (2), flashinfer (1). In no row measured: flex."
    )
    assert report.headline(rows[3:], TIMES) == "No peer was measured."
    assert list(report.with_fastest_peer(rows[0], TIMES).items())[:3] == [
        ("row", "a"), ("fastest peer", "sdpa cudnn"), ("vs fastest peer", 2.0)
    ]  # fmt: skip


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
    _on_cpu(monkeypatch, decode, "DecodeProblem")
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


def test_saved_results_have_a_headline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"gpu": "Some GPU"})
    rows = [{"row": "a", "attn_ops": 2.0, "flashinfer": 3.0}]
    report.save("decode", "Decode", "A note.", rows, tmp_path, TIMES)
    text = (tmp_path / "decode.md").read_text()
    assert "**Speed relative to the fastest peer of each row: 1.50x" in text
    assert "| a | flashinfer | 1.50 | 2.00 | 3.00 |" in text
    report.save("other", "Other", "A note.", rows, tmp_path, "No peer here.")
    assert "**No peer here.**" in (tmp_path / "other.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(report.RESULTS.rglob("*.json")), ids=lambda path: f"{path.parent.stem}/{path.stem}"
)
def test_stored_results_name_the_fastest_peers(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.markdown(data)
    if "columns" in data:
        columns = report.Columns(**data["columns"])
        entries = [NotMeasured(**entry) for entry in data["not measured"]]
        assert data["headline"] == report.headline(data["rows"], columns, entries)
        for row in data["rows"]:
            assert (row[report.FASTEST], row[report.SPEEDUP]) == (report.fastest_peer(row, columns) or (None, None))


def test_plots_are_made_of_the_stored_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stored = sorted(report.RESULTS.glob("*.json"))
    for source in stored:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    plot.run(type("Arguments", (), {"results": tmp_path}))
    plots = {path.stem for path in tmp_path.glob("*.png")}
    assert plots == {path.stem for path in report.RESULTS.glob("*.png")}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))


def _on_cpu(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    monkeypatch.setattr(module, name, functools.partial(getattr(module, name), device="cpu"))


def test_decode_rows_have_the_columns_of_the_report(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch, decode, "DecodeProblem")
    found = Comparison({decode.OURS: decode.ours}, {"good": decode.ours, "fails": _peer(_fails)})
    row = decode._measure(SMALL, found)
    assert (row["row"], row["attn_ops"], row["good"], row["fails"]) == ("small (cpu.sdpa)", 8.0, 4.0, None)
    assert row["of goal"] == 8.0
    assert row["share"] == pytest.approx(SMALL.bytes() / 8 / report.PEAK_BYTES_PER_US)
    assert report.fastest_peer(row, report.Columns((decode.OURS,), tuple(found.peers))) == ("good", 0.5)


def test_prefill_rows_have_the_columns_of_the_report(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(problem: prefill_problem.PrefillProblem) -> Callable[[int], Any]:
        planner = problem.planner(paged=True)
        return lambda i: torch.ops.attn.batch_prefill(
            problem.q, problem.k_caches[i], problem.v_caches[i], planner.state, planner.workspace, causal=True
        )[0]

    _on_cpu(monkeypatch, prefill, "PrefillProblem")
    found = Comparison(dict.fromkeys(prefill.OURS, attend), {"flex": _refuses})
    row = prefill._measure(replace(STEP, goal=1e-6), found)
    assert row["paged"] == pytest.approx(STEP.flops() / 5 / 1e6)
    assert row["of goal"] == pytest.approx(row["paged"] / 1e-6)
    assert row["share"] == pytest.approx(STEP.flops() / 5 / report.PEAK_FLOPS_PER_US)
    assert row["flex"] is None


def test_rows_about_a_page_size_compare_paged_implementations(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_cpu(monkeypatch, prefill, "PrefillProblem")
    peers = {name: _peer(_fails) for name in ("flashinfer fa3 paged", "sdpa cudnn")}
    peers["sdpa cudnn"] = prefill_peers.contiguous(peers["sdpa cudnn"])
    found = Comparison(prefill.OURS, peers)
    columns = prefill._measure(replace(STEP, paged_only=True), found)
    assert timed == ["paged"]
    assert columns["paged"]
    assert columns["ragged"] is None
    reasons = {entry.peer: entry.reason for entry in found.not_measured}
    assert reasons.keys() == {"ragged", *peers}
    assert reasons["ragged"] == reasons["sdpa cudnn"] == "the row compares implementations over paged KV"
    assert {row.page_size for row in PREFILL_ROWS if row.paged_only} == {1}
    assert all(row.page_size == 16 for row in PREFILL_ROWS if not row.paged_only)


@pytest.mark.parametrize("query", [False, True])
def test_fp8_rows_compare_backends(query: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch, prefill, "PrefillProblem")
    assert list(prefill.OURS_BY_BACKEND) == ["triton paged", "triton ragged", "cuda paged", "cuda ragged"]
    ours = {name: functools.partial(prepare, backend="reference") for name, prepare in prefill.OURS_BY_BACKEND.items()}
    small = replace(STEP, fp8=True, fp8_query=query)
    row = prefill._measure(small, Comparison(ours, {}))
    assert all(row[name] for name in prefill.OURS_BY_BACKEND)
    assert small.kv_bytes() * 2 == STEP.kv_bytes()
    problem = prefill_problem.PrefillProblem(small, device="cpu")
    assert (problem.q.dtype == torch.float8_e4m3fn) == query
    assert problem.k_caches[0].dtype == problem.values[0].dtype == torch.float8_e4m3fn
    assert problem.empty_out().dtype == torch.bfloat16


@pytest.mark.parametrize("variable", [False, True])
def test_sparse_rows_have_the_columns_of_the_report(
    variable: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sparse_problem.SparseRow("small", 96, 6, 0.4, variable, 8 if variable else 1, 4, 2, 16)
    problem = sparse_problem.SparseProblem(small, device="cpu")
    assert (problem.col_sz.sum(1) == 96).all()
    _on_cpu(monkeypatch, sparse, "SparseProblem")
    found = Comparison(sparse.OURS, {"wrong": lambda p: lambda i: sparse.ours(p)(1 - i), "flex": _refuses})
    row = sparse._measure(small, found)
    assert row["attn_ops"] == pytest.approx(problem.flops() / 8 / 1e6)
    assert row["share"] == pytest.approx(problem.flops() / 8 / report.PEAK_FLOPS_PER_US)
    assert (row["wrong"], row["flex"]) == (None, None)


@pytest.mark.parametrize("kind", small_ops.KINDS)
def test_small_ops_are_checked_and_have_the_columns_of_the_report(
    kind: str, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_ops, "device_microseconds", lambda calls, *_: dict.fromkeys(calls, 1.0))
    kinds = {
        name: of._replace(problem=functools.partial(of.problem, device="cpu")) for name, of in small_ops.KINDS.items()
    }
    monkeypatch.setattr(small_ops, "KINDS", kinds)
    small = small_ops.SmallRow("small", kind, 2, 3, states=2, context=20, batch=2)
    ours, wrong = small_ops._ours, lambda p: lambda i: small_ops._ours(p)(1 - i)
    row = small_ops._measure(small, Comparison({small_ops.OURS: ours}, {"wrong": wrong, "good": ours}))
    assert (row["attn_ops"], row["copy"], row["wrong"], row["good"]) == (8.0, 1.0, None, 4.0)
    assert row["TB/s"] == pytest.approx(kinds[kind].problem(small).bytes() / 8 / 1e6)


@pytest.mark.parametrize("fp8", [False, True])
def test_mla_rows_have_the_columns_of_the_report(fp8: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(problem: prefill_problem.MlaProblem) -> Callable[[int], Any]:
        planner = problem.planner()
        return lambda i: torch.ops.attn.batch_mla(
            problem.q_nope, problem.q_pe, problem.ckv[i], problem.kpe[i], planner.state, planner.workspace
        )[0]

    _on_cpu(monkeypatch, mla, "MlaProblem")
    row = mla._measure(MlaRow("small", (70, 3), 2.0, num_heads=4, fp8=fp8), Comparison({mla.OURS: attend}, {}))
    assert (row["attn_ops"], row["of goal"]) == (8.0, 4.0)


def test_serving_steps_have_the_columns_of_the_report(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _on_cpu(monkeypatch, workload, "StepProblem")
    monkeypatch.setattr(workload, "LAYERS", 2)
    monkeypatch.setattr(workload, "host_microseconds", lambda calls, **_: {name: HostTime(5.0, 5.0) for name in calls})
    monkeypatch.setattr(workload.Workload, "PEERS", {"peer": workload.ours, "other": workload.ours})
    found = workload.Workload(argparse.Namespace(peers=["p"]))
    row = found.measure(STEP)
    assert (row["attn_ops"], row["one launch"], row["peer"], row["FlashInfer plan"]) == (8.0, 10.0, 4.0 + 5.0, 5.0)
    assert found.comparison.not_measured == [NotMeasured("other", "step", "left out with --peers")]


def test_the_first_call_is_the_sum_of_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "_in_new_process", lambda program: [0.25, 0.5, 1.0])
    found = [(row["what"], row["measured"]) for row in overheads._first_call()]
    assert found[0] == ("first plan and decode, empty caches", 1.75)
    assert found[1:] == [
        (f"of it, {name}", x) for name, x in zip(overheads.FIRST_CALL_PARTS, (0.25, 0.5, 1.0), strict=True)
    ]


def test_headlines_of_tables_without_peer_columns() -> None:
    times = {"wrapper.run": 7.0, "wrapper.plan": 48.0, f"{overheads.PEER}.run": 21.0}
    rows: list[report.Row] = [{"what": f"{name}, host", "measured": time} for name, time in times.items()]
    assert overheads.headline(rows) == (
        "Host time: wrapper.run takes 7.0 us, FlashInfer's 21.0 us; wrapper.plan takes 48.0 us, no peer."
    )
    text = model.headline([{"batch": 1, "step": 5.0, "attention": 0.25}])
    assert text.startswith("batch 1: 5.00 ms, 5% attention. No peer")
