"""Problems of the benchmarks: their tables and references, what their rows count, and steps drawn from traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.benchmark_rows import SMALL, STEP

from benchmarks import comparison, decode, prefill_problem, report, workload
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import ROWS
from benchmarks.prefill_rows import PREFILL_ROWS

pytestmark = pytest.mark.usefixtures("two_copies")


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


def test_requests_of_a_prefill_problem_are_what_its_tables_say() -> None:
    problem = prefill_problem.PrefillProblem(STEP, device="cpu")
    assert problem.dense(0) is None
    even = prefill_problem.PrefillProblem(replace(STEP, qo_lens=(8, 8), kv_lens=(24, 24)), device="cpu")
    q, k, _ = even.dense(1) or pytest.fail("the requests are of one size")
    assert torch.equal(q[1, 2], even.q[8:16, 2])
    assert torch.equal(k[1, 1], even.table.tokens(even.k_caches[1], 1, 24)[:, 1])


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
