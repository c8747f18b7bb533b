"""Prefill plans: tiles cover every query row once, read every key a row may see, and come longest first."""

from __future__ import annotations

from itertools import pairwise

import torch
from helpers.oracle import GARBAGE
from helpers.page_tables import LENGTHS, PAGE_SIZES, Item, disjoint, indptr, items, page_table
from hypothesis import given
from hypothesis import strategies as st

from attn_ops import PrefillPlan, PrefillPlanner
from attn_ops.plan.state import KV_BLOCK, num_partials

CLASSES = 32
"""Work items may be out of order by ``1 / CLASSES`` of the longest."""

requests = st.tuples(st.one_of(st.just(0), st.just(1), st.integers(0, 300)), LENGTHS)
batches = st.fixed_dictionaries(
    {
        "requests": st.lists(requests, min_size=1, max_size=8),
        "page_size": PAGE_SIZES,
        "tile_rows": st.sampled_from([1, 2, 16, 33, 128]),
        "causal": st.booleans(),
        "window_left": st.sampled_from([-1, 0, 63, 100, 5000]),
        "window_right": st.sampled_from([-1, -1, 0, 1, 63, 100, 5000, (1 << 30) - 1]),
        "spare_batch": st.integers(0, 3),
        "spare_tokens": st.integers(0, 200),
        "ragged": st.booleans(),
        "num_ctas": st.sampled_from([0, 0, 2, 6, 64]),
    }
)


def _plan(
    requests: list[tuple[int, int]],
    page_size: int = 16,
    tile_rows: int = 16,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    spare_batch: int = 0,
    spare_tokens: int = 0,
    ragged: bool = False,
    num_ctas: int = 0,
) -> PrefillPlan:
    qo_lens, kv_lens = zip(*requests, strict=True)
    table = (indptr(kv_lens),) if ragged else page_table(kv_lens, page_size)
    planner = PrefillPlanner(
        len(requests) + spare_batch,
        max(1, sum(qo_lens) + spare_tokens),
        0 if ragged else table[1].shape[0] + 1,
        page_size=1 if ragged else page_size,
        num_qo_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_kv_len=max(1, *kv_lens, 1),
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        tile_rows=tile_rows,
        num_ctas=num_ctas,
    )
    for t in planner.state:
        t.fill_(GARBAGE)
    return planner.plan(indptr(qo_lens), *table)


def _items(plan: PrefillPlan) -> list[Item]:
    """The work items, of which nothing but zeros may follow the last, and whose number is in the queue."""
    work = items(plan)
    count = sum(item.rows > 0 for item in work)
    assert (plan.work[count:] == 0).all()
    assert plan.queue.tolist() == [0, count]
    return work[:count]


def _tiles(plan: PrefillPlan) -> list[Item]:
    """The query tiles, each put together from its splits."""
    splits: dict[int, list[Item]] = {}
    for item in _items(plan):
        splits.setdefault(item.row, []).append(item)
    return [
        parts[0]._replace(kv_begin=min(p.kv_begin for p in parts), kv_end=max(p.kv_end for p in parts), slot=-1)
        for parts in splits.values()
    ]


@given(batches)
def test_batch_is_kept(batch: dict) -> None:
    plan = _plan(**batch)
    qo_lens, kv_lens = zip(*batch["requests"], strict=True)
    spare = [0] * batch["spare_batch"]
    pages = list(kv_lens) if batch["ragged"] else [-(-n // batch["page_size"]) for n in kv_lens]
    assert plan.kv_len.tolist() == [*kv_lens, *spare]
    assert plan.qo_indptr.tolist() == indptr([*qo_lens, *spare]).tolist()
    assert plan.kv_indptr.tolist() == indptr([*pages, *spare]).tolist()


@given(batches)
def test_every_row_is_in_one_tile(batch: dict) -> None:
    plan = _plan(**batch)
    tiles = _tiles(plan)
    begins = plan.qo_indptr.tolist()
    for b, (qo_len, kv_len) in enumerate(batch["requests"]):
        mine = [tile for tile in tiles if tile.request == b]
        assert disjoint([(t.row, t.row + t.rows) for t in mine], begins[b], begins[b] + qo_len)
        for t in mine:
            assert t.rows <= batch["tile_rows"]
            assert t.position == kv_len - qo_len + t.row - begins[b]
            assert t.page_start == plan.kv_indptr[b]
    assert sum(t.rows for t in tiles) == begins[-1]


@given(batches)
def test_tiles_read_what_their_rows_see_and_little_more(batch: dict) -> None:
    """The range of a tile is from the first to the last key that one of its rows sees."""
    window, ahead = batch["window_left"], 0 if batch["causal"] else batch["window_right"]
    for t in _tiles(_plan(**batch)):
        kv_len = batch["requests"][t.request][1]
        positions = range(t.position, t.position + t.rows)
        first = [max(0, p - window) if window >= 0 else 0 for p in positions]
        end = [min(kv_len, max(0, p + 1 + ahead)) if ahead >= 0 else kv_len for p in positions]
        seen = [(a, b) for a, b in zip(first, end, strict=True) if a < b]
        assert 0 <= t.kv_begin <= t.kv_end <= kv_len
        if seen:
            assert (t.kv_begin, t.kv_end) == (min(a for a, _ in seen), max(b for _, b in seen))
        else:
            assert t.kv_begin == t.kv_end


@given(batches)
def test_split_tiles_lists_the_splits(batch: dict) -> None:
    """A tile's splits cover its KV, end at KV blocks, are about equal and have their own slots in order."""
    plan = _plan(**batch)
    work = _items(plan)
    whole = [item for item in work if item.slot < 0]
    assert len({item.row for item in whole}) == len(whole)
    split_tiles = [record for record in plan.split_tiles.tolist() if any(record)]
    assert (plan.split_tiles[len(split_tiles) :] == 0).all()
    slots: list[int] = []
    for row, rows, first, count in split_tiles:
        splits = sorted((item for item in work if item.row == row), key=lambda item: item.slot)
        assert count > 1
        assert [item.slot for item in splits] == list(range(first, first + count))
        assert {item.rows for item in splits} == {rows}
        for a, b in pairwise(splits):
            assert a.kv_end == b.kv_begin
            assert a.kv_end % KV_BLOCK == 0
        lengths = [-(-p.kv_end // KV_BLOCK) - p.kv_begin // KV_BLOCK for p in splits]
        assert max(lengths) - min(lengths) <= 1
        slots += range(first, first + count)
    assert slots == list(range(len(slots)))
    assert len(slots) + len(whole) == len(work)
    assert len(slots) <= num_partials(plan)


@given(st.integers(1, 4), st.integers(20, 60))
def test_few_long_tiles_are_split_evenly(count: int, kv_blocks: int) -> None:
    """No work item is longer than one and a half times an even share of eight tiles, for which the device has room."""
    plan = _plan([(1, kv_blocks * KV_BLOCK * 8)] * count, num_ctas=16)
    lengths = [item.kv_end - item.kv_begin for item in _items(plan)]
    assert max(lengths) <= 1.5 * sum(lengths) / 8 + KV_BLOCK


@given(batches)
def test_longest_first(batch: dict) -> None:
    """No later item is longer than an earlier one by more than a length class, or a KV block if tiles are split."""
    plan = _plan(**batch)
    extents = [t.kv_end - t.kv_begin for t in _items(plan)]
    rounding = KV_BLOCK if plan.split_tiles.any() else 0
    longest_after = 0
    for extent in reversed(extents):
        longest_after = max(longest_after, extent)
        assert longest_after - extent <= (max(extents) + rounding) // CLASSES + 1 + 2 * rounding


@given(
    st.lists(st.tuples(st.integers(0, 60), LENGTHS), min_size=1, max_size=5),
    st.integers(1, 100),
    st.sampled_from([1, 16, 33]),
    st.sampled_from([0, 4]),
)
def test_rows_beyond_the_capacity_are_left_out_of_the_plan(
    requests: list[tuple[int, int]], max_tokens: int, tile_rows: int, num_ctas: int
) -> None:
    """From lengths that are not checked. Attention writes zeros to the rows that no request of the plan has."""
    qo_lens, kv_lens = zip(*requests, strict=True)
    pages = page_table(kv_lens, 16)
    sizes = {"page_size": 16, "num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 8, "tile_rows": tile_rows}
    planner = PrefillPlanner(len(requests), max_tokens, len(pages[1]) + 1, num_ctas=num_ctas, **sizes)
    plan = planner.plan(indptr(qo_lens), *pages, validate=False)
    rows = min(sum(qo_lens), -(-max_tokens // tile_rows) * tile_rows)
    assert int(plan.qo_indptr[-1]) == rows
    assert disjoint([(t.row, t.row + t.rows) for t in _tiles(plan)], 0, rows)


def test_zero_plan_has_no_work() -> None:
    plan = PrefillPlan(*(torch.zeros_like(t) for t in _plan([(5, 70), (3, 3)])))
    assert _tiles(plan) == []
