"""Units of the CUDA prefill kernel, by its walk of a plan on the host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import cuda_host, hostile_plans
from helpers.page_tables import indptr, page_table

import attn_ops
from attn_ops.ops.cuda_kernels import PrefillKey
from attn_ops.plan.sizing import packed_rows_of_tile
from attn_ops.plan.state import PlanProblem, num_partials

prefill = pytest.importorskip("attn_ops.kernels.cuda.prefill", exc_type=ImportError)

pytestmark = cuda_host.needs_a_compiler

HEADS, NO_WINDOW, TILE = 2, 1 << 30, 128

MAIN = (
    cuda_host.READ_NUMBERS
    + """\
  Problem p = {.qo_indptr = array(), .work = array()};
  int* const queue = p.queue = const_cast<int*>(array());
  for (int* field : {&p.window_left, &p.window_right, &p.rows, &p.kv_rows, &p.num_pages, &p.max_pages, &p.max_items,
                     &p.max_batch, &p.num_kv_heads, &p.group, &p.page_size, &p.box, &p.tile_rows, &p.num_items})
    *field = *at++;
  p.unit_rows = equal_unit_rows(p.tile_rows * p.group);
  gridDim.x = *at++;
  std::vector<Schedule> running(gridDim.x, Schedule(p));
  std::vector<bool> ended(gridDim.x);
  for (bool any = true; any;) {
    any = false;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      Unit unit;
      if (ended[blockIdx.x] || (ended[blockIdx.x] = !running[blockIdx.x].next(p, unit))) continue;
      any = true;
      std::printf("%d %d %d %d %d %d %d %d %d %d %d\\n", blockIdx.x, unit.row, unit.count, unit.position, unit.start,
                  unit.end, unit.hidden, unit.page_start, unit.slot, unit.first_packed_row, unit.kv_head);
    }
  }
  return queue[kNextUnit];
}
"""
)


class Unit(NamedTuple):
    cta: int
    row: int
    count: int
    position: int
    start: int
    end: int
    hidden: int
    page_start: int
    slot: int
    first_packed_row: int
    kv_head: int


Programs = dict[PrefillKey, Path]


def _key(dim: int, paged: bool, special: str = "") -> PrefillKey:
    return PrefillKey(dim, dim, "pages" if paged else "ragged", torch.bfloat16, False, special)


def _key_of(problem: PlanProblem, paged: bool) -> PrefillKey:
    key = _key(problem.head_dim_qk, paged)
    return prefill.key_of_plan(key, packed_rows_of_tile(problem), bool(problem.short_kv))


@pytest.fixture(scope="module")
def programs() -> Programs:
    """Programs that print the units of a plan."""
    kinds = (64, ""), (128, ""), (128, "large batch"), (64, "short KV"), (128, "short KV")
    keys = [_key(dim, paged, special) for dim, special in kinds for paged in (False, True)]
    return {key: cuda_host.program(prefill.SPECIALIZATIONS[key], MAIN) for key in keys}


def _unit_rows(plan: attn_ops.PrefillPlan) -> int:
    problem = PlanProblem.of(plan.problem)
    rows: int = prefill.TILE_OF[_key_of(problem, True)].unit_rows(packed_rows_of_tile(problem))
    return rows


def _units(program: Path, plan: attn_ops.PrefillPlan, rows: int, box: int, ctas: int, **p: int) -> list[Unit]:
    problem = PlanProblem.of(plan.problem)
    group, tile_rows = problem.num_qo_heads // HEADS, problem.tile_rows
    items = plan.kv_len.shape[0] + num_partials(plan) - (-rows // tile_rows)
    unit_rows = _unit_rows(plan)
    units = items * HEADS * -(-tile_rows * group // unit_rows)
    numbers = [plan.qo_indptr.numel(), *plan.qo_indptr.tolist(), plan.work.numel(), *plan.work.flatten().tolist()]
    numbers += [plan.queue.numel(), *plan.queue.tolist()]
    numbers += [p.get("left", NO_WINDOW), p.get("right", NO_WINDOW), rows, p.get("kv_rows", 0), p.get("pages", 0)]
    numbers += [plan.kv_indices.shape[0], plan.work.shape[0], plan.kv_len.shape[0], HEADS, group, problem.page_size]
    numbers += [box, tile_rows, items, min(ctas, units)]
    return [Unit(*row) for row in cuda_host.rows_of(program, numbers)]


THREE_CONSUMERS = [*((64, 7, packed) for packed in (64, 128, 192, 256, 384)), (128, 7, 192), (128, 4, 768)]
"""Head dim, group and packed rows of a query tile, 0 for the default: units of 64, 128 and 192 packed rows."""

BATCHES = {
    "several": ((100, 3, 7, 0, 5, 300), (700, 9, 40, 2, 0, 300)),
    "more rows than keys beside a long request": ((64, 1500, *(64,) * 8), (2048, 10, *(64,) * 8)),
    "splits": ((40, 33), (3000, 2000)),
    "one row each": ((1,) * 20, tuple(range(1, 2001, 100))),
}


@pytest.mark.parametrize("page_size", [0, 8, 16, 48, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "group", "packed", "short_kv"),
    [
        *((*sizes, False) for sizes in ((128, 1, 0), (128, 4, 0), (128, 7, 0), *THREE_CONSUMERS)),
        *((*sizes, True) for sizes in ((128, 4, 0), (64, 7, 384), (64, 1, 0))),
    ],
)
@pytest.mark.parametrize("name", BATCHES)
def test_units_are_the_work_of_the_plan(
    name: str, dim: int, group: int, packed: int, short_kv: bool, causal: bool, page_size: int, programs: Programs
) -> None:
    """Every pair of a query row and a head is in one unit for every key that it sees, and units have no other keys."""
    qo_lens, kv_lens = BATCHES[name]
    paged, padding = page_size > 0, 70
    total, tables = sum(qo_lens), page_table(kv_lens, page_size or 1)
    planner = attn_ops.PrefillPlanner(
        len(qo_lens) + 2,
        total + padding,
        (tables[1].shape[0] + 3) if paged else 0,
        page_size=page_size or 1,
        num_qo_heads=group * HEADS,
        num_kv_heads=HEADS,
        head_dim=dim,
        max_kv_len=max(kv_lens),
        causal=causal,
        tile_rows=packed // group or None,
        num_ctas=16,
        short_kv=short_kv,
    )
    plan = planner.plan(indptr(qo_lens), *(tables if paged else (indptr(kv_lens),)))
    box = prefill.TILES[dim, dim].box
    box = prefill.box_of_pages(page_size, box) if paged else box
    sizes = {"pages": 1 << 20} if paged else {"kv_rows": sum(kv_lens)}
    right = {"right": 0} if causal else {}
    units = _units(programs[_key_of(planner.problem, paged)], plan, total + padding, box, 13, **sizes, **right)

    unit_rows = _unit_rows(plan)
    starts = indptr(qo_lens).tolist()
    seen: Counter[tuple[int, int]] = Counter()  # (row, head) -> keys
    visits: Counter[tuple[int, int]] = Counter()
    for u in units:
        assert 0 <= u.start <= u.end
        assert 0 <= u.hidden < box
        assert u.hidden == 0 or u.slot < 0, "a split begins inside of a box"
        for packed in range(u.first_packed_row, min(u.first_packed_row + unit_rows, u.count * group)):
            row, head = u.row + packed // group, u.kv_head * group + packed % group
            high = min(u.end, u.position + packed // group + 1) if causal else u.end
            visits[row, head] += 1
            seen[row, head] += max(high - u.start - u.hidden, 0)
    for b, (rows, tokens) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        for i in range(rows):
            keys = max(min(tokens, tokens - rows + i + 1), 0) if causal else tokens
            assert {seen[starts[b] + i, head] for head in range(group * HEADS)} == {keys}, (b, i)
    assert len(visits) == (total + padding) * group * HEADS, "rows after the last request's are cleared"
    assert {visits[row, head] for row in range(total, total + padding) for head in range(group * HEADS)} == {1}


@pytest.mark.parametrize("listed", [hostile_plans.LEAST, -1, 0, 3, 300, hostile_plans.MOST])
def test_a_wrong_number_of_items_repeats_no_unit(listed: int, programs: Programs) -> None:
    """Memory safety: the number in the plan decides how many units run, none twice, all of them of its work items."""
    qo_lens, kv_lens = BATCHES["several"]
    sizes = {"page_size": 1, "num_qo_heads": 4 * HEADS, "num_kv_heads": HEADS, "head_dim": 128, "max_kv_len": 700}
    planner = attn_ops.PrefillPlanner(8, 500, 0, **sizes)
    plan = planner.plan(indptr(qo_lens), indptr(kv_lens))
    program = programs[_key(128, False)]
    usual = _units(program, plan, 470, TILE, 13, kv_rows=sum(kv_lens))
    plan.queue[1] = listed
    units = [u._replace(cta=0) for u in _units(program, plan, 470, TILE, 13, kv_rows=sum(kv_lens))]
    assert len(set(units)) == len(units)
    assert set(units) <= {u._replace(cta=0) for u in usual}


DIVISIONS = """
#include <cstdio>
using namespace attn_ops;

int main() {
  long long differences = 0, compared = 0;
  for (int group = 1; group <= kMaxGroup; ++group) {
    const DivideByGroup divide(group);
    const int end = group + 2 * kPackedRows;
    for (int i = group <= 512 ? 0 : group - 2; i < end; ++i) ++compared, differences += divide(i) != i / group;
    differences += divide(0) != 0;
  }
  std::printf("%lld %lld\\n", compared, differences);
  compared = differences = 0;
  const auto compare = [&](uint32 n, const FastDivide& by) {
    ++compared, differences += by.quotient(n) != n / by.divisor || by.remainder(n) != n % by.divisor;
  };
  for (uint64 divisor = 1; divisor < 1ull << 32; divisor += divisor < 4096 ? 1 : divisor / 97) {
    const FastDivide by{uint32(divisor)};
    for (int k = 0; k < 200; ++k) {  // around multiples of the divisor, evenly up to 2^32
      const uint64 multiple = (0xffffffff / divisor) * k / 199 * divisor;
      for (int d = -1; d < 2; ++d) compare(uint32(multiple + d), by);
      compare(~uint32(k), by);
    }
  }
  std::printf("%lld %lld\\n", compared, differences);
}
"""


def test_divisions_by_multiplication_are_exact() -> None:
    """Of packed rows for every group, and of any number around multiples of divisors of all sizes.

    For groups above 512 from group - 2 on: before that the quotient is 0, since it is monotonic.
    """
    one = prefill.SPECIALIZATIONS[PrefillKey(128, 128, "ragged", torch.bfloat16, False)]
    of_groups, of_any = cuda_host.rows_of(cuda_host.program(one, DIVISIONS), ())
    for compared, differences in (of_groups, of_any):
        assert compared > 3_000_000
        assert differences == 0
