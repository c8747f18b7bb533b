"""Sizes of plans by device and batch: query tiles, splits, and the prefill kernels that plans are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.page_tables import indptr
from torch import Tensor

from attn_ops import PrefillPlanner
from attn_ops.frontend.call_plans import BlockTables, RaggedLengths
from attn_ops.plan import sizing
from attn_ops.plan.page_table import BatchSize, PageTable
from attn_ops.plan.resizable import ResizablePlan
from attn_ops.plan.sizing import (
    ctas_of_tile,
    fills_three_consumers,
    packed_rows_of_tiles,
    rows_per_tile,
    unsplit_packed_rows,
)
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import PlanProblem


@pytest.mark.parametrize(
    ("heads", "rows", "tile_rows"),
    [
        ((8, 2), 16, 16),  # exactly 64 packed rows
        ((8, 2), 17, 32),
        ((8, 2), 1000, 64),
        ((24, 1), 2, 2),
        ((24, 1), 1000, 10),
        ((512, 1), 1, 1),
        ((512, 1), 1000, 1),
    ],
)
def test_default_rows_of_a_query_tile(heads: tuple[int, int], rows: int, tile_rows: int) -> None:
    assert rows_per_tile(*heads, rows) == tile_rows


@pytest.mark.parametrize(
    ("heads", "rows", "tile_rows"),
    [((8, 2), 16, 16), ((8, 2), 17, 32), ((8, 2), 33, 48), ((8, 2), 49, 96), ((7, 1), 1000, 54)],
)
def test_query_tiles_of_heads_up_to_96_fill_three_consumers_on_hopper(
    heads: tuple[int, int], rows: int, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "max_kv_len": 5000}
    default = rows_per_tile(*heads, rows)
    three = [(9, dims, tile_rows) for dims in ((64, 64), (72, 72), (96, 96), (96, 64))]
    two = [(9, (64, 32), default), (9, (104, 104), default), (9, (64, 128), default), (8, (64, 64), default)]
    for major, dims, expected in (*three, *two):
        gpu = SimpleNamespace(multi_processor_count=132, major=major)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        packed_rows = packed_rows_of_tiles(*dims, torch.device("cuda"))
        assert rows_per_tile(*heads, rows, packed_rows) == expected
    on_cpu = PrefillPlanner(3, 3 * rows, 0, head_dim=64, **sizes)
    assert on_cpu.problem.tile_rows == default


@pytest.mark.parametrize(
    ("batch", "rows", "changes", "expected"),
    [
        (1, 6336, {}, 192),  # 8 units of 192 packed rows for each of 132 SMs
        (1, 6335, {}, 64),
        (24, 24 * 264, {}, 192),
        (25, 25 * 255, {}, 64),  # 1020 packed rows of a request
        (1, 6336, {"head_dim": 112}, 64),
        (1, 6336, {"fixed_split_size": 64}, 64),
        (1, 6336, {"num_qo_heads": 132, "num_kv_heads": 33}, 192),
        (1, 6336, {"num_qo_heads": 136, "num_kv_heads": 34}, 64),  # the workspace would be larger
        (1, 6336, {"head_shards": 2}, 64),
    ],
)
def test_query_tiles_of_large_batches_fill_three_consumers_on_hopper(
    batch: int, rows: int, changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    sizes: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_kv_len": 10000} | changes
    assert PrefillPlanner(batch, rows, 0, num_ctas=0, **sizes).problem.tile_rows == expected


@pytest.mark.parametrize(
    ("batch", "rows", "changes", "expected"),
    [
        (1, 100, {"max_kv_len": 256}, 1),
        (1, 100, {"max_kv_len": 257}, 0),
        (100, 25600, {"max_kv_len": 256}, 0),  # a large batch
        (1, 100, {"max_kv_len": 512, "head_dim": 64}, 1),
        (100, 51200, {"max_kv_len": 512, "head_dim": 64}, 1),
        (1, 100, {"max_kv_len": 513, "head_dim": 64}, 0),
        (1, 100, {"max_kv_len": 100, "head_dim": 80}, 0),
        (1, 100, {"max_kv_len": 100, "head_dim": 128, "head_dim_vo": 64}, 0),
        (2, 2048, {"max_kv_len": 1024}, 1),  # 512 units of 128 packed rows, on 132 SMs
        (2, 2048, {"max_kv_len": 1024, "causal": False}, 0),
        (2, 2048, {"max_kv_len": 1025}, 0),
        (2, 2116, {"max_kv_len": 1024}, 0),
        (1, 527, {"max_kv_len": 1024}, 0),
        (1, 528, {"max_kv_len": 1024}, 1),
        (2, 2048, {"max_kv_len": 1024, "head_shards": 4}, 0),
        (1, 791, {"max_kv_len": 1024, "head_dim": 64}, 0),
        (1, 792, {"max_kv_len": 1024, "head_dim": 64}, 1),
        (1, 100, {"max_kv_len": 256, "num_ctas": 0}, 0),
        (1, 100, {"max_kv_len": 256, "fixed_split_size": 64}, 0),
        (1, 100, {"max_kv_len": 256, "short_kv": False}, 0),
        (1, 100, {"max_kv_len": 5000, "short_kv": True}, 1),
    ],
)
def test_plans_for_short_kv_on_hopper(
    batch: int, rows: int, changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "causal": True} | changes
    assert PrefillPlanner(batch, rows, 0, **sizes | {"short_kv": None}).problem.short_kv == 0
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    assert PrefillPlanner(batch, rows, 0, **sizes).problem.short_kv == expected


def test_plans_for_short_kv_have_no_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    problem = PlanProblem(1, 32, 8, 128, 128, 256, 64)
    assert sizing.splits_per_head(torch.device("cuda"), problem) > 0
    assert sizing.splits_per_head(torch.device("cuda"), problem._replace(short_kv=1)) == 0


def test_a_resizable_plan_is_for_short_kv_until_a_batch_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    spec, resizable = PlanSpec(False, False, 1, 8, 8, 64, 64), ResizablePlan(torch.device("cpu"))

    def planner_of(length: int, **changes: Any) -> PrefillPlanner:
        of_request = indptr((length,))
        table, size = PageTable(of_request, None, None, of_request), BatchSize(1, length, 0, length)
        sized = resizable.prepare(spec._replace(**changes), size, table)
        resizable.commit(sized, table)
        assert isinstance(sized.planner, PrefillPlanner)
        return sized.planner

    short = planner_of(200)
    assert planner_of(256) is short
    more = planner_of(300)
    assert (short.problem.short_kv, more.problem.short_kv) == (1, 1)
    longer = planner_of(600)
    assert longer.problem.short_kv == 0
    assert planner_of(700) is planner_of(100) is longer, "graphs that were captured have its addresses"
    for changes in ({"unsplit": True}, {"fixed_split_size": 64}, {"plain": False}):
        sized = resizable.fit(spec._replace(**changes), BatchSize(1, 300, 0, 300, splits=8))
        assert sized.planner.problem.short_kv == 0


def test_tiles_of_a_resizable_plan_depend_on_the_batch_and_not_on_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch after a large one has tiles for small batches, and both planners are kept."""
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    spec = PlanSpec(False, False, 1, 32, 8, 128, 128, causal=True)
    resizable = ResizablePlan(torch.device("cpu"))

    def planner_of(*rows: int) -> PrefillPlanner:
        table = PageTable(indptr(rows), None, None, indptr(rows))
        sized = resizable.prepare(spec, BatchSize(len(rows), sum(rows), 0, max(rows)), table)
        resizable.commit(sized, table)
        planner = sized.planner
        assert isinstance(planner, PrefillPlanner)
        expected = sum(-(-n // planner.problem.tile_rows) for n in rows)
        assert planner.state.queue.tolist() == [0, expected]
        return planner

    large, small = planner_of(6336), planner_of(600)
    assert (large.problem.tile_rows, small.problem.tile_rows) == (192, 64)
    assert planner_of(8192) is large
    assert planner_of(300, 300) is small
    # After many short requests the capacity has few rows for each request, and long ones are still a large batch.
    many = planner_of(*[100] * 64)
    assert many.problem.tile_rows == 64
    assert planner_of(*[2048] * 8).problem.tile_rows == 192
    assert planner_of(*[10] * 64) is many


def test_fixed_capacity_decides_on_the_tiles_of_a_resizable_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    spec, small = PlanSpec(False, False, 1, 32, 8, 128, 128), BatchSize(1, 600, 0, 600)
    for changes, tile_rows in (({}, 192), ({"unsplit": True}, 64), ({"fixed_split_size": 64}, 64)):
        sized = ResizablePlan(torch.device("cpu")).fit(spec._replace(**changes), small, BatchSize(1, 6336, 0, 6336))
        assert sized.planner.problem.tile_rows == tile_rows


@pytest.mark.parametrize("paged", [False, True])
def test_plans_of_one_shot_calls_have_the_tiles_of_their_batch(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    spec = PlanSpec(False, paged, 64 if paged else 1, 32, 8, 128, 128, causal=True)

    def planned(offsets: Tensor, rows: int) -> Tensor:
        batch = offsets.shape[0] - 1
        of_batch: BlockTables | RaggedLengths = RaggedLengths(spec, offsets, offsets, rows, rows)
        if paged:
            tables = torch.zeros(batch, 100, dtype=torch.int32)
            of_batch = BlockTables(spec, tables, offsets.diff(), offsets, rows)
        return of_batch.plan().problem

    for lengths, expected in (((6336,), 192), ((600,), 64), ((3200, 3200), 192), ((100,) * 64, 64)):
        problem = PlanProblem.of(planned(indptr(lengths), sum(lengths)))
        assert problem.tile_rows == expected
        assert problem.short_kv == (lengths == (600,) and not paged)  # a block table is for 6400 tokens

    def step(q: Tensor, offsets: Tensor) -> Tensor:
        return planned(offsets, q.shape[0])

    # A graph for any number of rows has the largest tiles of other batches.
    compiled = torch.compile(step, backend="eager", dynamic=True, fullgraph=True)
    for rows in (7000, 600):
        with torch.compiler.set_stance("default" if rows == 7000 else "fail_on_recompile"):
            assert PlanProblem.of(compiled(torch.empty(rows), indptr((rows,)))).tile_rows == 64


def test_compiled_mla_calls_of_any_batch_have_the_splits_of_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters that divide KV, in small batches, have a graph of their own."""
    gpu = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(sizing, "properties", lambda device: gpu)
    problem = PlanProblem(64, 16, 1, 576, 512, 4096, tile_rows=1, ahead=1)

    def step(q: Tensor) -> Tensor:
        batch = q.shape[0]
        tiles = sizing.most_tiles(problem, batch, batch)
        return q.new_zeros(sizing.splits_per_head(torch.device("cuda"), problem, tiles))

    compiled = torch.compile(step, backend="eager", dynamic=True, fullgraph=True)
    for batch, splits in ((2, 98), (128, 198), (65, 98), (67, 198)):
        with torch.compiler.set_stance("default" if batch in (2, 128) else "fail_on_recompile"):
            assert step(torch.empty(batch)).shape == compiled(torch.empty(batch)).shape == (splits,)


def test_large_batches_take_no_more_workspace_than_others_may(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    for num_kv_heads in range(1, 34):
        problem = PlanProblem(1, num_kv_heads, num_kv_heads, 128, 128, 1000, sizing.LARGE_BATCH_PACKED_ROWS)
        slots = sizing.splits_per_head(torch.device("cuda"), problem)
        assert slots * num_kv_heads * sizing.LARGE_BATCH_PACKED_ROWS * 129 * 4 <= 28 << 20


def test_a_cta_holds_the_packed_rows_of_its_consumers() -> None:
    problems = [PlanProblem(1, 8, 2, 128, 128, 1000, rows) for rows in (48, 64, 95, 96, 192)]
    assert list(map(ctas_of_tile, problems)) == [1, 2, 2, 2, 4]
    assert [rows for rows in (64, 128, 192, 250, 256, 321, 768) if fills_three_consumers(rows)] == [192, 321, 768]


def test_tiles_of_plans_without_splits_have_64_packed_rows_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsplit_packed_rows(576, 512, torch.device("cpu")) == (64, 128, 256)
    gpu = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    spec = PlanSpec(False, True, 16, 8, 2, 64, 64, fixed_split_size=2)
    assert spec.tile_rows(torch.device("cuda"), 1) == 96
    assert spec.tile_rows(torch.device("cpu"), 1) == 64


def test_tiles_of_heads_of_64_take_as_many_ctas_of_128_rows_as_of_192() -> None:
    for rows in (16, 32, 64):
        of_64, of_128 = (PlanProblem(1, 8, 2, dim, dim, 1000, rows) for dim in (64, 128))
        assert ctas_of_tile(of_64) == ctas_of_tile(of_128)
    assert [ctas_of_tile(PlanProblem(1, 8, 2, 64, 64, 1000, rows)) for rows in (48, 96)] == [1, 2]


@pytest.mark.parametrize(
    ("heads", "rows", "tile_rows"),
    [(16, 1, 1), (16, 2, 2), (16, 4, 4), (32, 1, 1), (64, 1, 1), (5, 1, 3), (16, 300, 16)],
)
def test_default_rows_of_a_query_tile_of_mla(heads: int, rows: int, tile_rows: int) -> None:
    """Packed rows from 16 on, but with splits of fixed size those that do not depend on the capacities."""
    sizes: dict[str, Any] = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = PrefillPlanner(3, 3 * rows, 5, page_size=64, **sizes)
    assert planner.problem.tile_rows == tile_rows
    fixed = PrefillPlanner(3, 3 * rows, 5, page_size=64, **sizes, fixed_split_size=1)
    assert fixed.problem.tile_rows == rows_per_tile(heads, 1)
