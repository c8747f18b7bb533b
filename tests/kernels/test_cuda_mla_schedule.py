"""Units of the CUDA MLA kernel, by its walk of a plan on the host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import cuda_host
from helpers.page_tables import indptr, page_table

import attn_ops
from attn_ops.plan.state import PlanProblem, num_partials

mla = pytest.importorskip("attn_ops.kernels.cuda.mla", exc_type=ImportError)

pytestmark = cuda_host.needs_a_compiler

MAIN = (
    cuda_host.READ_NUMBERS
    + """\
  Problem p = {.qo_indptr = array(), .work = array(), .unit_rows = kUnitRows, .cluster = CLUSTER * SPLITS,
               .splits = SPLITS};
  for (int* field : {&p.rows, &p.num_pages, &p.max_pages, &p.max_items, &p.max_batch, &p.heads, &p.page_size,
                     &p.tile_rows, &p.num_items, &p.num_units})
    *field = *at++;
  gridDim.x = *at++;
  p.causal = *at++;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    p.split = blockIdx.x % p.cluster / CLUSTER;
    Schedule schedule;
    Unit unit;
    while (schedule.next(p, unit))
      std::printf("%d %d %d %d %d %d %d %d %d %d\\n", blockIdx.x, unit.row, unit.count, unit.position, unit.start,
                  unit.end, unit.page_start, unit.slot, unit.first_packed_row, unit.tiles());
  }
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
    page_start: int
    slot: int
    first_packed_row: int
    tiles: int


@pytest.fixture(scope="module")
def programs() -> dict[tuple[Any, ...], Path]:
    """Programs that print the units of a plan, by kernel, packed rows of a unit, and CTAs that divide its KV tiles."""
    return {
        key[:3]: cuda_host.program(one, MAIN)
        for key, one in mla.SPECIALIZATIONS.items()
        if key[3:] == (torch.bfloat16, False, False)
    }


def _units(
    programs: dict[tuple[Any, ...], Path],
    plan: attn_ops.PrefillPlan,
    rows: int,
    clusters: int,
    causal: bool,
    splits: int = 1,
) -> list[Unit]:
    problem = PlanProblem.of(plan.problem)
    kernel, unit_rows, blocks = mla.units_of(problem.tile_rows * problem.num_qo_heads)
    cluster = mla.SPECIALIZATIONS[kernel, unit_rows, splits, torch.bfloat16, False, False].cluster[0]
    items = plan.kv_len.shape[0] + num_partials(plan) - (-rows // problem.tile_rows)
    numbers = [plan.qo_indptr.numel(), *plan.qo_indptr.tolist(), plan.work.numel(), *plan.work.flatten().tolist()]
    numbers += [rows, 1 << 20, plan.kv_indices.shape[0], plan.work.shape[0], plan.kv_len.shape[0]]
    numbers += [problem.num_qo_heads, problem.page_size, problem.tile_rows, items, items * blocks]
    numbers += [min(clusters, items * blocks) * cluster, int(causal)]
    return [Unit(*row) for row in cuda_host.rows_of(programs[kernel, unit_rows, splits], numbers)]


BATCHES = {
    "several": ((10, 3, 7, 0, 5, 30), (700, 9, 40, 2, 0, 300)),
    "more rows than keys beside a long request": ((64, 150, *(7,) * 8), (2048, 10, *(64,) * 8)),
    "splits": ((4, 3), (3000, 2000)),
    "one row each": ((1,) * 20, tuple(range(1, 2001, 100))),
}


DIVIDED = {16: 4, 4: 4, 64: 1, 192: 1}
"""By heads: query rows of a tile, so that two CTAs divide its KV tiles and do not share them."""


def _plan(
    name: str, heads: int, causal: bool, page_size: int, padding: int = 0, tile_rows: int | None = None
) -> attn_ops.PrefillPlan:
    qo_lens, kv_lens = BATCHES[name]
    tables = page_table(kv_lens, page_size)
    planner = attn_ops.PrefillPlanner(
        len(qo_lens) + 2,
        sum(qo_lens) + padding,
        tables[1].shape[0] + 3,
        page_size=page_size,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=576,
        head_dim_vo=512,
        max_kv_len=max(kv_lens),
        causal=causal,
        num_ctas=16,
        tile_rows=tile_rows,
    )
    return planner.plan(indptr(qo_lens), *tables)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "splits"), [(16, 1), (20, 1), (128, 1), (192, 1), (16, 2), (4, 2), (192, 2)])
@pytest.mark.parametrize("name", BATCHES)
def test_units_are_the_work_of_the_plan(
    name: str, heads: int, splits: int, causal: bool, programs: dict[tuple[Any, ...], Path]
) -> None:
    """Every pair of a query row and a head is in one unit for every key that it sees, and units have no other keys."""
    padding = 70
    plan = _plan(name, heads, causal, 192 if causal else 64, padding, DIVIDED[heads] if splits > 1 else None)
    (qo_lens, kv_lens), starts = BATCHES[name], indptr(BATCHES[name][0]).tolist()
    total = sum(qo_lens)
    units = _units(programs, plan, total + padding, 7, causal, splits)
    kernel, unit_rows, _ = mla.units_of(PlanProblem.of(plan.problem).tile_rows * heads)
    one = mla.SPECIALIZATIONS[kernel, unit_rows, splits, torch.bfloat16, False, False]
    ctas = one.cluster[0] // splits  # with the same KV tiles
    seen: Counter[tuple[int, int]] = Counter()  # (row, head) -> keys
    visits: Counter[tuple[int, int]] = Counter()
    for u in units:
        assert 0 <= u.start <= u.end
        assert u.start % mla.TILE == 0
        assert u.tiles == -(-(u.end - u.start) // mla.TILE)
        if u.cta % ctas:
            continue
        for packed in range(u.first_packed_row, min(u.first_packed_row + unit_rows, u.count * heads)):
            row, head = u.row + packed // heads, packed % heads
            high = min(u.end, u.position + packed // heads + 1) if causal else u.end
            visits[row, head] += u.cta % (ctas * splits) == 0
            seen[row, head] += max(high - u.start, 0)
    for b, (rows, tokens) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        for i in range(rows):
            keys = max(min(tokens, tokens - rows + i + 1), 0) if causal else tokens
            assert {seen[starts[b] + i, head] for head in range(heads)} == {keys}, (b, i)
    assert len(visits) == (total + padding) * heads, "rows after the last request's are cleared"
    assert {visits[row, head] for row in range(total, total + padding) for head in range(heads)} == {1}


@pytest.mark.parametrize("name", BATCHES)
def test_ctas_of_a_cluster_have_the_same_tiles(name: str, programs: dict[tuple[Any, ...], Path]) -> None:
    """Each multicasts its part of a tile to both, so one that took other tiles would corrupt the other's."""
    units = _units(programs, _plan(name, 128, True, 64), sum(BATCHES[name][0]), 5, True)
    walks = {cta: [u[1:] for u in units if u.cta == cta] for cta in range(10)}
    assert sum(map(len, walks.values())) == len(units) > 0
    for cta in range(0, 10, 2):
        assert walks[cta] == walks[cta + 1]


@pytest.mark.parametrize("garbage", [-(2**31), -1, 0, 1, 1000, 2**31 - 1])
@pytest.mark.parametrize(("heads", "splits"), [(16, 1), (128, 1), (16, 2), (64, 2)])
def test_a_plan_of_garbage_gives_units_within_the_page_table(
    garbage: int, heads: int, splits: int, programs: dict[tuple[Any, ...], Path]
) -> None:
    """The sanitizer of the program finds overflows and reads out of bounds; pages are within the page table."""
    plan = _plan("several", heads, True, 64, tile_rows=DIVIDED[heads] if splits > 1 else None)
    for column in range(plan.work.shape[1]):
        work = plan.work.clone()
        work[:, column] = garbage
        for u in _units(programs, plan._replace(work=work), sum(BATCHES["several"][0]), 7, True, splits):
            assert 0 <= u.start <= u.end
            if u.tiles:
                assert u.page_start + (u.end - 1) // 64 < plan.kv_indices.shape[0]
