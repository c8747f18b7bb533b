"""Prefill plans that split few and long tiles: the splits cover their tiles, and combined they give the answer."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers.oracle import GARBAGE, attention, merge
from helpers.page_tables import Item, disjoint, indptr, items, page_table
from hypothesis import given
from hypothesis import strategies as st

from attn_ops import PrefillPlan, PrefillPlanner
from attn_ops.plan import sizing
from attn_ops.plan.state import KV_BLOCK, PlanProblem, allocate_prefill, workspace_size

HEADS, DIM = 2, 8

requests = st.tuples(st.integers(0, 60), st.one_of(st.integers(0, 300), st.integers(0, 20_000)))
batches = st.fixed_dictionaries(
    {
        "requests": st.lists(requests, min_size=1, max_size=5),
        "num_ctas": st.integers(0, 70),
        "tile_rows": st.sampled_from([1, 16, 33]),
        "causal": st.booleans(),
        "window_left": st.sampled_from([-1, 100, 5000]),
        "window_right": st.sampled_from([-1, 0, 100, 5000]),
    }
)


class SplitTile(NamedTuple):
    """A row of ``plan.split_tiles``."""

    row: int
    rows: int
    slot: int
    slots: int


def _plan(
    requests: list[tuple[int, int]],
    num_ctas: int,
    tile_rows: int = 16,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> PrefillPlan:
    qo_lens, kv_lens = zip(*requests, strict=True)
    table = page_table(kv_lens, 16)
    planner = PrefillPlanner(
        len(requests),
        max(1, sum(qo_lens)),
        table[1].shape[0] + 1,
        page_size=16,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        tile_rows=tile_rows,
        num_ctas=num_ctas,
    )
    assert planner.workspace.numel() == workspace_size(planner.state) <= num_ctas * tile_rows * HEADS * (DIM + 1)
    for t in planner.state:
        t.fill_(GARBAGE)
    return planner.plan(indptr(qo_lens), *table)


def _work(plan: PrefillPlan) -> list[Item]:
    work = items(plan)
    count = sum(item.rows > 0 for item in work)
    assert (plan.work[count:] == 0).all()
    return work[:count]


def _split_tiles(plan: PrefillPlan) -> list[SplitTile]:
    tiles = [SplitTile(*row) for row in plan.split_tiles.tolist()]
    count = sum(tile.slots > 0 for tile in tiles)
    assert (plan.split_tiles[count:] == 0).all()
    return tiles[:count]


def _kv_blocks(item: Item) -> int:
    return -(-item.kv_end // KV_BLOCK) - item.kv_begin // KV_BLOCK if item.kv_end > item.kv_begin else 0


@given(batches)
def test_splits_cover_their_tiles(batch: dict) -> None:
    """With the splits of each tile put together, the plan is the one that splits nothing."""
    work = _work(_plan(**batch))
    whole = _work(_plan(**batch | {"num_ctas": 0}))
    assert {item.row for item in work} == {tile.row for tile in whole}
    for tile in whole:
        splits = [item for item in work if item.row == tile.row]
        same = [item._replace(kv_begin=0, kv_end=0, slot=-1) for item in (tile, *splits)]
        assert all(item == same[0] for item in same)
        if len(splits) == 1:
            assert splits[0] == tile
        else:
            ranges = [(item.kv_begin, item.kv_end) for item in splits]
            assert disjoint(ranges, tile.kv_begin, tile.kv_end)
            assert all(begin % KV_BLOCK == 0 or begin == tile.kv_begin for begin, _ in ranges)


def test_splits_are_balanced_by_the_keys_in_a_window() -> None:
    """Four tiles of 64 rows, each of which sees 40 blocks before its own; the device has room for four of each."""
    request, window = (
        (4 * KV_BLOCK, 64 * KV_BLOCK),
        {"tile_rows": KV_BLOCK, "causal": True, "window_left": 40 * KV_BLOCK},
    )
    whole = _work(_plan([request], num_ctas=0, **window))
    assert sorted((item.kv_begin // KV_BLOCK, item.kv_end // KV_BLOCK) for item in whole) == [
        (20 + i, 61 + i) for i in range(4)
    ]
    work = _work(_plan([request], num_ctas=32, **window))
    assert sorted(map(_kv_blocks, work)) == [10] * 12 + [11] * 4


def test_one_long_tile_is_split_and_many_are_not() -> None:
    one = _work(_plan([(16, 32 * KV_BLOCK)], num_ctas=16))
    assert [_kv_blocks(item) for item in one] == [4] * 8
    many = _plan([(16, 4 * KV_BLOCK)] * 16, num_ctas=16)
    assert _split_tiles(many) == []


def test_the_last_wave_is_split_where_it_is_short_of_tiles() -> None:
    """Of ten equal tiles, eight fill the device. The other two would take as long again if they were not split."""
    work = _work(_plan([(160, 100 * KV_BLOCK)], num_ctas=16))
    assert sorted(map(_kv_blocks, work)) == [25] * 8 + [100] * 8
    assert _split_tiles(_plan([(128, 100 * KV_BLOCK)], num_ctas=16)) == []
    assert _split_tiles(_plan([(240, 100 * KV_BLOCK)], num_ctas=16)) == []
    # With 14 shorter tiles, which come after them, there are three whole waves.
    assert _split_tiles(_plan([(160, 100 * KV_BLOCK), (224, 50 * KV_BLOCK)], num_ctas=16)) == []


def test_the_longest_tile_bounds_the_splits_of_others() -> None:
    """One long request among many short ones: only it is split."""
    plan = _plan([(16, 400 * KV_BLOCK), *[(16, 10 * KV_BLOCK)] * 20], num_ctas=16)
    assert [tile.row for tile in _split_tiles(plan)] == [0]
    assert max(map(_kv_blocks, _work(plan))) <= 100


def test_waves_of_medium_splits_count() -> None:
    """Two tiles in three splits each would leave a second wave of shorter tiles: all are as long as these instead."""
    work = _work(_plan([(16, 400 * KV_BLOCK)] * 2 + [(16, 80 * KV_BLOCK)] * 5, num_ctas=16))
    assert list(map(_kv_blocks, work)) == [80] * 15


def test_splits_are_worth_their_cost() -> None:
    """Eight tiles fill the device. Five more take three splits each, in two waves of a third, if they are long."""
    for blocks, count in ((12, 0), (40, 5)):
        tiles = _split_tiles(_plan([(13 * 16, blocks * KV_BLOCK)], num_ctas=16))
        assert [tile.slots for tile in tiles] == [3] * count
    # The least that is split, in splits of two blocks.
    for blocks, splits in ((3, []), (4, [2]), (6, [3])):
        assert [tile.slots for tile in _split_tiles(_plan([(16, blocks * KV_BLOCK)], num_ctas=16))] == splits


def test_splits_may_take_all_slots() -> None:
    tiles = _split_tiles(_plan([(16, 20 * KV_BLOCK), (16, 40 * KV_BLOCK)], num_ctas=8))
    assert [tile.slots for tile in tiles] == [3, 5]


def test_work_items_of_other_tiles_cost_time() -> None:
    """Two splits of the long tile make the mean of two CTAs longer than the tile."""
    assert _split_tiles(_plan([(16, 5 * KV_BLOCK), (16, KV_BLOCK)], num_ctas=4)) == []


def test_partial_results_of_many_heads_cost_more() -> None:
    for heads, splits in ((2, [3]), (32, [])):
        planner = PrefillPlanner(
            1, 16, 24, page_size=16, num_qo_heads=heads, num_kv_heads=heads, head_dim=DIM, tile_rows=16, num_ctas=16
        )
        plan = planner.plan(indptr([16]), *page_table([6 * KV_BLOCK], 16))
        assert [tile.slots for tile in _split_tiles(plan)] == splits


@pytest.mark.parametrize(
    ("name", "heads", "dims", "rows", "major", "splits", "wave"),
    [
        ("256 packed rows, two CTAs", (32, 8), (128, 128), 64, 9, 16, 8),
        ("128 packed rows", (32, 8), (128, 128), 32, 9, 32, 16),
        ("64 packed rows on Hopper", (32, 8), (128, 128), 16, 9, 32, 16),
        ("64 packed rows elsewhere, two CTAs in an SM", (32, 8), (128, 128), 16, 8, 66, 33),
        ("wide heads", (32, 8), (256, 256), 64, 9, 12, 8),
        ("MLA", (128, 1), (576, 512), 1, 9, 98, 65),
        ("more heads than SMs", (256, 256), (128, 128), 128, 9, 2, 1),
        ("more wide heads than SMs", (256, 256), (256, 256), 128, 9, 2, 1),
    ],
)
def test_default_capacity_for_splits(
    name: str, heads: tuple[int, int], dims: tuple[int, int], rows: int, major: int, splits: int, wave: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpu = SimpleNamespace(multi_processor_count=132, major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    problem = PlanProblem(1, *heads, *dims, 1000, rows)
    assert sizing.splits_per_head(torch.device("cuda"), problem) == splits
    assert sizing.tiles_per_wave(problem, splits) == wave
    assert sizing.splits_per_head(torch.device("cpu"), problem) == 0


HOPPER = SimpleNamespace(multi_processor_count=132, major=9)

CLUSTERS = {
    "1 request, 16 heads": ((16, 1), (1, 1), 2, 65),
    "65 requests of 64 heads": ((64, 1), (65, 65), 2, 65),
    "66 requests of 64 heads": ((64, 1), (66, 66), 1, 132),
    "32 requests of 16 heads": ((16, 1), (32, 32), 2, 65),
    "33 requests of 16 heads": ((16, 1), (33, 33), 1, 132),
    "40 requests of 64 heads": ((64, 1), (40, 40), 1, 132),
    "24 requests of 32 heads": ((32, 1), (24, 24), 1, 132),
    "1 request, 128 heads": ((128, 1), (1, 1), 1, 65),
    "1 request of 2000 rows": ((16, 4), (1, 2000), 1, 132),
    "8 requests of 4 rows": ((16, 4), (8, 32), 2, 65),
    "192 heads": ((192, 1), (10, 10), 2, 21),
}
"""Heads and rows of a query tile, requests and query rows; then CTAs that divide KV, and tiles computed at a time."""


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_divide_the_kv_of_few_tiles(name: str, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (heads, tile_rows), (batch, rows), splits, wave = CLUSTERS[name]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HOPPER)
    problem = PlanProblem(page_size, heads, 1, 576, 512, 1000, tile_rows)
    max_splits = sizing.splits_per_head(torch.device("cuda"), problem, sizing.most_tiles(problem, batch, rows))
    assert sizing.tiles_per_wave(problem, max_splits) == wave
    assert (
        sizing.cluster_splits_of(132, allocate_prefill(problem, batch, rows, 9, torch.device("cpu"), max_splits))
        == splits
    )


@pytest.mark.parametrize("sms", [78, 114, 132, 144])
def test_kernels_have_the_clusters_that_a_plan_is_made_for(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=sms, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    heads_of = (1, 16, 20, 32, 64, 80, 128, 150, 192, 256)
    for heads, page_size, batch in itertools.product(heads_of, (1, 64), range(1, 80)):
        problem = PlanProblem(page_size, heads, 1, 576, 512, 1000, 1)
        for tiles, expected in ((batch, sizing.cluster_splits(sms, problem, batch)), (None, 1)):
            max_splits = sizing.splits_per_head(torch.device("cuda"), problem, tiles)
            plan = allocate_prefill(problem, batch, batch, 9, torch.device("meta"), max_splits)
            assert sizing.cluster_splits_of(sms, plan) == expected


UNDIVIDED: dict[str, dict[str, int]] = {
    "fixed split size": {"split": 128},
    "a window": {"window": 100},
    "other heads": {"head_dim_qk": 320, "head_dim_vo": 256},
}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_plans_for_other_kernels_have_no_clusters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: HOPPER)
    problem = PlanProblem(64, 64, 1, 576, 512, 1000, 1)._replace(**UNDIVIDED[name])
    device = torch.device("cuda")
    assert sizing.splits_per_head(device, problem, 1) == sizing.splits_per_head(device, problem)
    plan = allocate_prefill(problem, 1, 1, 9, torch.device("cpu"), 20)
    assert sizing.cluster_splits_of(132, plan) == 1


def test_a_plan_without_splits_has_no_clusters() -> None:
    problem = PlanProblem(64, 64, 1, 576, 512, 1000, 1)
    assert sizing.cluster_splits_of(132, allocate_prefill(problem, 1, 1, 9, torch.device("cpu"))) == 1


def test_other_gpus_have_no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, device = PlanProblem(64, 64, 1, 576, 512, 1000, 1), torch.device("cuda")
    for major, splits in ((9, 98), (10, 198)):
        gpu = SimpleNamespace(multi_processor_count=132, major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        assert sizing.splits_per_head(device, problem, 1) == splits


@pytest.mark.parametrize(("lengths", "slots"), [((4096,) * 64, 0), ((4096,) * 32, 64), ((8192,), 32)])
def test_kv_blocks_cost_less_where_clusters_divide_kv(
    lengths: tuple[int, ...], slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that fewer splits are worth theirs."""
    monkeypatch.setattr(sizing, "hopper_sms", lambda _: 132)
    batch, table = len(lengths), page_table(lengths, 64)
    planner = PrefillPlanner(
        batch, batch, len(table[1]), page_size=64, num_qo_heads=64, num_kv_heads=1, head_dim=576, head_dim_vo=512,
        tile_rows=1, num_ctas=98,
    )  # fmt: skip
    plan = planner.plan(indptr((1,) * batch), *table)
    assert sum(tile.slots for tile in _split_tiles(plan)) == slots


def _makespan(work: list[Item], ctas: int) -> float:
    """KV blocks until the last CTA ends, of CTAs that take the work items in order. An item takes 1.7 blocks more."""
    ends = [0.0] * ctas
    for item in work:
        heapq.heapreplace(ends, ends[0] + _kv_blocks(item) + 1.7)
    return max(ends)


@pytest.mark.parametrize("wave", [8, 16, 66])
def test_splits_shorten_the_schedule(wave: int) -> None:
    """Of 100 random batches: on average by a fifth, and hardly ever is it longer for them."""
    draw, gains = random.Random(wave), []
    for _ in range(100):
        lengths = [int(2 ** draw.uniform(4, 9)) for _ in range(draw.choice([1, 1, 2, 4]))]
        batch = [(rows, rows + draw.choice([0, int(2 ** draw.uniform(6, 15))])) for rows in lengths]
        whole, split = (_work(_plan(batch, ctas, causal=True)) for ctas in (0, 2 * wave))
        gains.append(_makespan(whole, wave) / _makespan(split, wave))
    assert min(gains) > 0.85
    assert statistics.mean(gains) > 1.2


@pytest.mark.parametrize("seed", range(20))
def test_the_work_list_computes_attention(seed: int) -> None:
    """Every work item in float64; partial results go to the workspace and are combined row by row."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [(draw.randint(0, 20), draw.choice([3, 200, 900])) for _ in range(draw.randint(1, 3))]
    causal = draw.random() < 0.5
    plan = _plan(sizes, draw.choice([4, 9, 32]), draw.choice([4, 16]), causal)
    qs = [torch.randn(n, HEADS, DIM, generator=generator) for n, _ in sizes]
    kvs = [torch.randn(2, m, HEADS, DIM, generator=generator) for _, m in sizes]
    q, tile_rows = torch.cat(qs), plan.problem.shape[7]
    slots_v = torch.full((2 * plan.split_tiles.shape[0], tile_rows, HEADS, DIM), torch.nan, dtype=torch.float64)
    slots_s = torch.full(slots_v.shape[:-1], torch.nan, dtype=torch.float64)
    out = torch.full(q.shape, torch.nan, dtype=torch.float64)
    for i in _work(plan):
        position = torch.arange(i.position, i.position + i.rows)[:, None]
        j = torch.arange(i.kv_begin, i.kv_end)
        visible = (j <= position) if causal else (j >= 0).expand(i.rows, -1)
        keys, values = kvs[i.request][:, i.kv_begin : i.kv_end]
        v, s = attention(q[i.row : i.row + i.rows], keys, values, mask=visible)
        if i.slot < 0:
            out[i.row : i.row + i.rows] = v
        else:
            slots_v[i.slot, : i.rows], slots_s[i.slot, : i.rows] = v, s
    for m in _split_tiles(plan):
        part = slice(m.slot, m.slot + m.slots)
        states = slots_v[part, : m.rows].transpose(0, 1), slots_s[part, : m.rows].transpose(0, 1)
        out[m.row : m.row + m.rows] = merge(*states)[0]
    bounds = plan.qo_indptr.tolist()
    for (begin, end), rows, (keys, values) in zip(pairwise(bounds), qs, kvs, strict=True):
        torch.testing.assert_close(out[begin:end], attention(rows, keys, values, causal=causal)[0])
