"""``cpu.plan``: plans and page tables of eager calls on the CPU equal those of the reference bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.page_tables import indptr, int32
from torch import Tensor

from attn_ops.kernels import reference
from attn_ops.kernels.cpu import plan as kernels
from attn_ops.ops import backends
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan, allocate_decode, allocate_prefill

CPU = torch.device("cpu")
OPS = ("plan_decode", "plan_prefill", "page_table", "batch_indices_positions")


def integers(draw: random.Random, count: int, low: int, high: int) -> Tensor:
    return int32([draw.randint(low, high) for _ in range(count)])


class Batch:
    """A page table of random lengths, some with numbers that mean nothing, and capacities that hold it."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.requests, self.page_size = draw.randint(0, 5), draw.choice([1, 4, 16])
        pages, rows = ([draw.randint(0, most) for _ in range(self.requests)] for most in (5, 40))
        self.kv_indptr, self.qo_indptr = indptr(pages), indptr(rows)
        self.last = integers(draw, self.requests, 1, self.page_size)
        self.kv_indices = integers(draw, sum(pages), 0, 50)
        if draw.random() < 0.3:
            self.kv_indptr = integers(draw, self.requests + 1, -3, 20)
            self.qo_indptr = integers(draw, self.requests + 1, -5, 60)
            self.last = integers(draw, self.requests, -3, 30)
        self.max_batch = max(1, self.requests + draw.randint(0, 2))
        self.max_pages, self.max_rows = sum(pages) + draw.randint(0, 4), max(1, sum(rows) + draw.randint(0, 5))
        options = {"window": draw.choice([0, 5, 70]), "ahead": draw.choice([0, 1, 3])}
        most = max(1, self.max_pages * self.page_size)
        self.problem = PlanProblem(self.page_size, 8, 2, 64, 64, most, draw.choice([1, 4, 16]), **options)


def assert_same(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


def copies(plan: Any) -> list[Any]:
    """Two plans of one size, whose fields hold 7."""
    return [type(plan)(plan.problem, *(torch.full_like(t, 7) for t in plan[1:])) for _ in range(2)]


def check_plans(seed: int) -> None:
    b = Batch(seed)
    ctas, splits, ragged = b.draw.choice([1, 1, 3]), b.draw.choice([0, 0, 4]), b.draw.random() < 0.3
    decode: DecodePlan = allocate_decode(b.problem._replace(tile_rows=1), b.max_batch, b.max_pages, ctas, CPU)
    pages = 0 if ragged else b.max_pages
    prefill: PrefillPlan = allocate_prefill(b.problem, b.max_batch, b.max_rows, pages, CPU, splits)
    table = b.kv_indptr, b.kv_indices, b.last
    plans = copies(decode)
    for module, plan in zip((kernels, reference), plans, strict=True):
        module.plan_decode(*table, list(plan))
    assert_same(*plans)
    if ragged:
        table = b.kv_indptr, b.kv_indices[:0], b.last
    plans = copies(prefill)
    for module, plan in zip((kernels, reference), plans, strict=True):
        module.plan_prefill(b.qo_indptr, *table, list(plan))
    assert_same(*plans)


def check_tables(seed: int) -> None:
    b = Batch(seed)
    table, lengths = torch.randint(0, 30, (b.requests, seed % 6)).int(), integers(b.draw, b.requests, -3, 100)
    assert_same(*(m.page_table(table, lengths, b.page_size) for m in (kernels, reference)))
    rising = b.qo_indptr.sort().values
    rows = max(0, int(rising[-1])) + seed % 4
    assert_same(*(m.batch_indices_positions(rising, lengths, rows) for m in (kernels, reference)))


@pytest.mark.parametrize("check", [check_plans, check_tables])
def test_results_are_those_of_the_reference(check: Callable[[int], None]) -> None:
    for seed in range(300):
        check(seed)


@pytest.mark.parametrize("check", [check_plans, check_tables])
def test_large_batches_are_for_the_reference(check: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MAX_NUMBERS", 0)
    for name in ("_copy_page_table", "bisect_right"):
        monkeypatch.delattr(kernels, name)
    for seed in range(1, 20):
        check(seed)


@pytest.mark.parametrize("op", OPS)
def test_eager_calls_on_the_cpu_select_it(op: str) -> None:
    problem = backends.Problem(op, CPU)
    assert backends.choose(problem).label(op) == "cpu.plan"
    assert backends.choose(problem, traced=True).name == "reference"
