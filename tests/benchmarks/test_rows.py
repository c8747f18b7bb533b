"""Measured rows of each benchmark have the columns of its report."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.benchmark_rows import SMALL, STEP, fails, on_cpu, peer_of, refuses

from benchmarks import (
    decode,
    mla,
    prefill,
    prefill_peers,
    prefill_problem,
    report,
    small_ops,
    sparse,
    sparse_problem,
    workload,
)
from benchmarks.comparison import Comparison, NotMeasured
from benchmarks.prefill_rows import PREFILL_DENSE_ROWS, PREFILL_ROWS, MlaRow
from benchmarks.timing import HostTime

pytestmark = pytest.mark.usefixtures("two_copies")


def test_decode_rows_have_the_columns_of_the_report(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, decode, "DecodeProblem")
    found = Comparison({decode.OURS: decode.ours}, {"good": decode.ours, "fails": peer_of(fails)})
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

    on_cpu(monkeypatch, prefill, "PrefillProblem")
    found = Comparison(dict.fromkeys(prefill.OURS, attend), {"flex": refuses})
    row = prefill._measure(replace(STEP, goal=1e-6), found)
    assert row["paged"] == pytest.approx(STEP.flops() / 5 / 1e6)
    assert row["of goal"] == pytest.approx(row["paged"] / 1e-6)
    assert row["share"] == pytest.approx(STEP.flops() / 5 / report.PEAK_FLOPS_PER_US)
    assert row["flex"] is None


def test_rows_about_a_page_size_compare_paged_implementations(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch, prefill, "PrefillProblem")
    peers = {name: peer_of(fails) for name in ("flashinfer fa3 paged", "sdpa cudnn")}
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
    on_cpu(monkeypatch, prefill, "PrefillProblem")
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


@pytest.mark.parametrize(("rows", "causal"), [(1, False), (9, True)])
def test_dense_rows_need_no_plan(rows: int, causal: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, prefill, "PrefillProblem")
    small = replace(STEP, qo_lens=(rows,) * 2, kv_lens=(30,) * 2, causal=causal)
    row = prefill._measure(small, Comparison(prefill.OURS_DENSE, {"single": prefill_peers.flashinfer_single}))
    assert timed == ["flash_attn_func"]
    assert (row["flash_attn_func"] > 0, row["single"]) == (True, None)
    assert all(row.equal_lengths for row in PREFILL_DENSE_ROWS)


@pytest.mark.parametrize("variable", [False, True])
def test_sparse_rows_have_the_columns_of_the_report(
    variable: bool, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = sparse_problem.SparseRow("small", 96, 6, 0.4, variable, 8 if variable else 1, 4, 2, 16)
    problem = sparse_problem.SparseProblem(small, device="cpu")
    assert (problem.col_sz.sum(1) == 96).all()
    on_cpu(monkeypatch, sparse, "SparseProblem")
    found = Comparison(sparse.OURS, {"wrong": lambda p: lambda i: sparse.ours(p)(1 - i), "flex": refuses})
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

    on_cpu(monkeypatch, mla, "MlaProblem")
    row = mla._measure(MlaRow("small", (70, 3), 2.0, num_heads=4, fp8=fp8), Comparison({mla.OURS: attend}, {}))
    assert (row["attn_ops"], row["of goal"]) == (8.0, 4.0)


def test_serving_steps_have_the_columns_of_the_report(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, workload, "StepProblem")
    monkeypatch.setattr(workload, "LAYERS", 2)
    monkeypatch.setattr(workload, "host_microseconds", lambda calls, **_: {name: HostTime(5.0, 5.0) for name in calls})
    monkeypatch.setattr(workload.Workload, "PEERS", {"peer": workload.ours, "other": workload.ours})
    found = workload.Workload(argparse.Namespace(peers=["p"]))
    row = found.measure(STEP)
    assert (row["attn_ops"], row["one launch"], row["peer"], row["FlashInfer plan"]) == (8.0, 10.0, 4.0 + 5.0, 5.0)
    assert found.comparison.not_measured == [NotMeasured("other", "step", "left out with --peers")]
