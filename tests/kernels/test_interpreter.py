"""Triton kernels in Triton's interpreter on the CPU, against the oracle and the reference.

The interpreter is chosen when the kernels are imported, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attn_ops.kernels import reference
from helpers.cases import DECODE, DECODE_OPTIONS, DECODE_SPECIAL, Case
from helpers.harness import Setup

import attn_ops

triton = pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL_OPS = str(Path(__file__).parents[1] / "helpers" / "interpreted_small_ops.py")


def _few(cases: list[Case]) -> list[Case]:
    """All that depart in one axis, and six of the sampled ones."""
    sampled = [c for c in cases if c.name.startswith("sample")]
    return [c for c in cases if c not in sampled] + sampled[:6]


CASES = [*_few(DECODE), *_few(DECODE_SPECIAL), *DECODE_OPTIONS[::5]]
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the interpreter")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, SMALL_OPS]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@inside
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_matches_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a merge of its own, as in a graph, and merged by the programs that come last, as in eager calls."""
    from attn_ops.kernels.triton import batch_decode

    if case.dtype == torch.bfloat16 and case.kv_dtype is None:  # NumPy multiplies none
        case = replace(case, dtype=torch.float16)
    setup = Setup("decode", case)
    for eager in (False, True):
        monkeypatch.setattr("attn_ops.kernels.triton.decode.runs_now", lambda q, eager=eager: eager)
        setup.check(*batch_decode(**setup.arguments), **case.tolerance)
        assert not setup.planner.state.split_counters.any()


@inside
@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_under_a_bfloat16_query_of_any_size(exponent: int) -> None:
    from attn_ops.kernels.triton import batch_decode

    case = Case("wide", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, sm_scale=0.1 * 2.0**-exponent)
    setup = Setup("decode", case)
    setup.q.mul_(2.0**exponent)
    setup.check(*batch_decode(**setup.arguments))


def _page_table(draw: random.Random, batch: int, page_size: int) -> list[torch.Tensor]:
    longest = draw.choice([1, 30, 300, 3000])
    lengths = [0 if draw.random() < 0.2 else draw.randint(1, longest) for _ in range(batch)]
    if draw.random() < 0.3:
        lengths = [longest] * batch
    pages = [-(-length // page_size) for length in lengths]
    indptr = torch.tensor([0, *pages]).cumsum(0)
    if draw.random() < 0.2:
        indptr = indptr + torch.randint(-3, 4, indptr.shape)
    last = torch.tensor([(length - 1) % page_size + 1 if length else -3 for length in lengths])
    return [t.int() for t in (indptr, torch.arange(sum(pages) + 2), last)]


@inside
@pytest.mark.parametrize("seed", range(40))
def test_decode_plans_are_those_of_the_reference(seed: int) -> None:
    from attn_ops.kernels.triton import plan_decode

    draw = random.Random(seed)
    max_batch, page_size = draw.choice([1, 2, 5, 17, 64]), draw.choice([1, 3, 16, 64])
    table = _page_table(draw, draw.randint(0, max_batch), page_size)
    options = {
        "window_left": draw.choice([-1, 0, 63, 500]),
        "num_ctas": draw.choice([1, 2, 7, 33, 66]),
        "fixed_split_size": draw.choice([None, None, 1, 4, 50]),
    }
    plans = []
    for function in (reference.plan_decode, plan_decode):
        planner = attn_ops.DecodePlanner(
            max_batch,
            table[1].shape[0] + 3,
            page_size=page_size,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=16,
            device="cpu",
            **options,
        )
        for field in planner.state:
            field.fill_(7)
        function(*table, list(planner.state))
        plans.append(planner.state)
    for name, expected, actual in zip(plans[0]._fields, *plans, strict=True):
        assert torch.equal(expected, actual), name


@inside
@pytest.mark.parametrize("seed", range(20))
def test_prefill_plans_are_those_of_the_reference(seed: int) -> None:
    from attn_ops.kernels.triton import plan_prefill

    draw = random.Random(seed)
    max_batch, page_size = draw.choice([1, 2, 5, 17]), draw.choice([3, 16, 64])
    table = _page_table(draw, draw.randint(1, max_batch), page_size)
    rows = torch.tensor([draw.choice([0, 1, 7, 100]) for _ in table[2]])
    qo_indptr = torch.cat((torch.zeros(1), rows.cumsum(0))).int()
    options = {
        "window_left": draw.choice([-1, 0, 63, 500]),
        "causal": draw.random() < 0.5,
        "tile_rows": draw.choice([7, 32]),
        "num_ctas": draw.choice([0, 6, 66, 1000]),
        "fixed_split_size": draw.choice([None, 1, 4, 50]),
    }
    plans = []
    for function in (reference.plan_prefill, plan_prefill):
        planner = attn_ops.PrefillPlanner(
            max_batch,
            int(rows.sum()) + 1,
            table[1].shape[0] + 3,
            page_size=page_size,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim=16,
            device="cpu",
            **options,
        )
        for field in planner.state:
            field.fill_(7)
        function(qo_indptr, *table, list(planner.state))
        plans.append(planner.state)
    for name, expected, actual in zip(plans[0]._fields, *plans, strict=True):
        assert torch.equal(expected, actual), name


@inside
@pytest.mark.parametrize("planned", ["shares", "pieces", "tiles", "ragged"])
def test_numbers_that_overflow_are_planned_as_by_the_reference(planned: str) -> None:
    from attn_ops.kernels import triton

    lowest = -(1 << 31)
    indptr = torch.tensor([0, 1_900_000_000, -700_000_000, 5, 3, lowest, 1 << 30]).int()
    qo_indptr, last = torch.tensor([-5, 2, 4, 4, lowest, 7, 9]).int(), torch.tensor([1, -7, 1 << 30, 1, 16, 0]).int()
    pages = torch.arange(0 if planned == "ragged" else 9).int()
    sizes = {"page_size": 1 if planned == "ragged" else 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    plans = []
    for backend in (reference, triton):
        if planned in ("tiles", "ragged"):
            tiles = attn_ops.PrefillPlanner(6, 12, pages.shape[0], max_kv_len=64, device="cpu", **sizes)
            backend.plan_prefill(qo_indptr, indptr, pages, last, [*tiles.state])
            plans.append(tiles.state)
        else:
            split = 2 if planned == "pieces" else None
            shares = attn_ops.DecodePlanner(6, 9, device="cpu", fixed_split_size=split, **sizes)
            backend.plan_decode(indptr, pages, last, [*shares.state])
            plans.append(shares.state)
    for name, expected, actual in zip(plans[0]._fields, *plans, strict=True):
        assert torch.equal(expected, actual), name


@inside
@pytest.mark.parametrize("options", [{"num_ctas": 16}, {"num_ctas": 300, "fixed_split_size": 4}], ids=["even", "fixed"])
def test_a_batch_beyond_the_capacity_is_planned_within_the_plan(options: dict[str, int]) -> None:
    """One long request, and one of far more rows than there is room for, which the host cannot see."""
    from attn_ops.kernels.triton import plan_prefill

    planner = attn_ops.PrefillPlanner(
        2, 32, 2000, page_size=64, num_qo_heads=2, num_kv_heads=1, head_dim=16, tile_rows=16, device="cpu", **options
    )
    guarded = {
        name: torch.full((getattr(planner.state, name).numel() + 4096,), -7).int() for name in ("work", "split_tiles")
    }
    fields = {name: t[:-4096].view_as(getattr(planner.state, name)) for name, t in guarded.items()}
    qo_indptr, kv_indptr, last = (torch.tensor(t).int() for t in ([0, 1, 3201], [0, 1000, 1001], [64, 1]))
    plan_prefill(qo_indptr, kv_indptr, torch.arange(1001).int(), last, list(planner.state._replace(**fields)))
    for name, t in guarded.items():
        assert (t[-4096:] == -7).all(), name


@inside
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pieces_of_a_fixed_size_give_the_same_bits_in_every_batch() -> None:
    from attn_ops.kernels.triton import batch_decode, plan_decode

    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn(4, 4, 32, generator=generator), torch.randn(2, 80, 16, 2, 32, generator=generator)
    tables = [(0, 30, 31, 31, 50), (0, 2, 32), (0, 30)]  # the first request's pages alone, among others, and last
    places = [(0, range(50)), (1, (60, 61, *range(30))), (0, range(30))]
    results = []
    for indptr, (row, pages), ctas in zip(tables, places, (2, 7, 1), strict=True):
        batch = len(indptr) - 1
        planner = attn_ops.DecodePlanner(
            batch, 64, page_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=32, num_ctas=ctas, fixed_split_size=8
        )
        last = torch.tensor([9] * batch).int()
        plan_decode(torch.tensor(indptr).int(), torch.tensor(pages).int(), last, list(planner.state))
        rows = q[:1].expand(batch, -1, -1).contiguous()
        out, lse = batch_decode(rows, *cache, list(planner.state), planner.workspace, return_lse=True)
        results.append((out[row], lse[row]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
