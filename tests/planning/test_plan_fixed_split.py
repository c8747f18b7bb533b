"""Plans with a fixed split size: a request has the same splits in every batch, and all its tokens are read once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.oracle import GARBAGE, attention, merge
from helpers.page_tables import LENGTHS, PAGE_SIZES, Item, disjoint, indptr, items, page_table
from hypothesis import example, given
from hypothesis import strategies as st

from attn_ops import DecodePlan, DecodePlanner, PrefillPlan, PrefillPlanner
from attn_ops.errors import CapacityError, OptionError, PageTableError, ShapeError
from attn_ops.plan import planner_base
from attn_ops.plan.query_tiles import count_splits
from attn_ops.plan.sizing import max_splits_for
from attn_ops.plan.state import KV_BLOCK, PlanProblem, num_partials, num_slots, workspace_size

HEADS, DIM = 2, 8
SIZES: dict[str, Any] = {"num_qo_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}

options = st.fixed_dictionaries(
    {
        "page_size": PAGE_SIZES,
        "fixed_split_size": st.sampled_from([1, 3, 20, 500]),
        "window_left": st.sampled_from([-1, 0, 63, 500]),
    }
)
batches = st.lists(LENGTHS, min_size=1, max_size=10)
requests = st.lists(st.tuples(st.integers(0, 70), LENGTHS), min_size=1, max_size=5)


def size_of(page_size: int, fixed_split_size: int) -> int:
    """Tokens in a split: those of its pages, rounded up to KV blocks."""
    return -(-page_size * fixed_split_size // KV_BLOCK) * KV_BLOCK


def decode_plan(lengths: list[int], page_size: int = 16, num_ctas: int = 5, **more: Any) -> DecodePlan:
    table = page_table(lengths, page_size)
    planner = DecodePlanner(
        len(lengths), max(1, len(table[1])), page_size=page_size, num_ctas=num_ctas, **SIZES, **more
    )
    for t in planner.state:
        t.fill_(GARBAGE)
    return planner.plan(*table)


def prefill_plan(lengths: list[tuple[int, int]], page_size: int = 16, **more: Any) -> PrefillPlan:
    qo_lens, kv_lens = zip(*lengths, strict=True)
    table = page_table(kv_lens, page_size)
    planner = PrefillPlanner(
        len(lengths), max(1, sum(qo_lens)), len(table[1]) + 1, page_size=page_size, **SIZES, **{"tile_rows": 16, **more}
    )
    for t in planner.state:
        t.fill_(GARBAGE)
    return planner.plan(indptr(qo_lens), *table)


def splits_of(plan: DecodePlan | PrefillPlan, request: int) -> list[Item]:
    """The work items of a request, without what depends on its place in the batch."""
    mine = sorted((i for i in items(plan) if i.rows and i.request == request), key=lambda i: (i.row, i.kv_begin))
    row, slot = min((i.row for i in mine), default=0), min((i.slot for i in mine if i.slot >= 0), default=0)
    return [
        i._replace(row=i.row - row, slot=i.slot - slot if i.slot >= 0 else -1, page_start=0, request=0) for i in mine
    ]


@given(batches, options)
def test_decode_reads_every_token_once_in_splits_of_the_size(lengths: list[int], more: dict) -> None:
    plan = decode_plan(lengths, **more)
    size, window, slots = size_of(more["page_size"], more["fixed_split_size"]), more["window_left"] + 1, []
    work_per_cta = [items(plan)[a:b] for a, b in pairwise(plan.cta_indptr.tolist())]
    work = [item for cta in work_per_cta for item in cta]
    assert (plan.work[len(work) :] == 0).all()
    for b, length in enumerate(lengths):
        mine = [item for item in work if item.request == b]
        start = max(0, length - window) if window else 0
        assert disjoint([(i.kv_begin, i.kv_end) for i in mine], start, length)
        first = start // KV_BLOCK * KV_BLOCK
        assert [i.kv_begin for i in mine[1:]] == [first + size * n for n in range(1, len(mine))]
        assert all((i.row, i.rows, i.position, i.page_start) == (b, 1, length - 1, plan.kv_indptr[b]) for i in mine)
        bounds = plan.merge_indptr[b : b + 2].tolist()
        assert [i.slot for i in mine] == ([-1] * len(mine) if len(mine) < 2 else list(range(*bounds)))
        slots += range(*bounds)
    assert slots == list(range(len(slots)))
    assert len(slots) <= num_slots(plan)
    assert workspace_size(plan) == num_slots(plan) * HEADS * (DIM + 1)


@given(batches, options, st.integers(1, 40))
def test_no_cta_has_more_than_the_mean_and_a_split(lengths: list[int], more: dict, num_ctas: int) -> None:
    plan = decode_plan(lengths, num_ctas=num_ctas, **more)
    bounds, work = plan.cta_indptr.tolist(), items(plan)
    tokens = [sum(i.kv_end - i.kv_begin for i in work[a:b]) for a, b in pairwise(bounds)]
    size = size_of(more["page_size"], more["fixed_split_size"])
    assert bounds[0] == 0
    assert max(tokens) <= sum(tokens) / len(tokens) + size + len(lengths) * KV_BLOCK


@given(batches, options)
def test_decode_splits_a_request_the_same_in_every_batch(lengths: list[int], more: dict) -> None:
    plan = decode_plan(lengths, **more)
    for b, length in enumerate(lengths):
        assert splits_of(plan, b) == splits_of(decode_plan([length], num_ctas=2, **more), 0)


@given(requests, options, st.booleans())
def test_prefill_splits_a_request_the_same_in_every_batch(
    lengths: list[tuple[int, int]], more: dict, causal: bool
) -> None:
    plan = prefill_plan(lengths, causal=causal, **more)
    size, slots = size_of(more["page_size"], more["fixed_split_size"]), []
    for b, request in enumerate(lengths):
        alone = prefill_plan([request], causal=causal, **more)
        assert splits_of(plan, b) == splits_of(alone, 0)
        whole = prefill_plan([request], causal=causal, **{**more, "fixed_split_size": None, "num_ctas": 0})
        for tile in splits_of(whole, 0):
            mine = [i for i in splits_of(plan, b) if i.row == tile.row]
            first = tile.kv_begin // KV_BLOCK * KV_BLOCK
            assert [i.kv_begin for i in mine] == [tile.kv_begin, *(first + size * n for n in range(1, len(mine)))]
            assert [i.kv_end for i in mine] == [*(i.kv_begin for i in mine[1:]), tile.kv_end]
            assert tile.kv_end - mine[-1].kv_begin <= size
    for first, count in plan.split_tiles[:, 2:].tolist():
        slots += range(first, first + count)
    assert sorted(slots) == sorted(i.slot for i in items(plan) if i.rows and i.slot >= 0)
    assert len(slots) == len(set(slots)) <= num_partials(plan)


@pytest.mark.parametrize("lengths", [[700, 3, 0, 64, 65], [5000]])
def test_the_splits_compute_attention(lengths: list[int]) -> None:
    plan, generator = decode_plan(lengths, fixed_split_size=8), torch.Generator().manual_seed(0)
    q = torch.randn(len(lengths), HEADS, DIM, generator=generator)
    kvs = [torch.randn(2, n, HEADS, DIM, generator=generator) for n in lengths]
    v = torch.full((num_slots(plan), HEADS, DIM), torch.nan, dtype=torch.float64)
    s = torch.full(v.shape[:2], torch.nan, dtype=torch.float64)
    done = {}
    for i in (item for item in items(plan) if item.rows):
        state = attention(q[i.row, None], *kvs[i.request][:, i.kv_begin : i.kv_end])
        if i.slot < 0:
            done[i.row] = state[0]
        else:
            v[i.slot], s[i.slot] = state[0][0], state[1][0]
    for row, (a, b) in enumerate(pairwise(plan.merge_indptr.tolist())):
        if b > a:
            done[row] = merge(v[None, a:b], s[None, a:b])[0]
    for row, n in enumerate(lengths):
        if n:
            torch.testing.assert_close(done[row], attention(q[row, None], *kvs[row])[0])


def test_one_long_request_is_spread_over_all_ctas() -> None:
    cta_indptr = decode_plan([4096], fixed_split_size=16, num_ctas=16).cta_indptr
    assert cta_indptr.diff().tolist() == [1] * 16


@pytest.mark.parametrize("value", [0, -2])
def test_a_size_is_positive(value: int) -> None:
    for make in (decode_plan, lambda lengths, **more: prefill_plan([(1, n) for n in lengths], **more)):
        with pytest.raises(OptionError, match=rf"^planner: fixed_split_size is {value}; expected at least 1; \w"):
            make([5], fixed_split_size=value)


def test_splits_are_counted_by_tokens_and_not_by_pages() -> None:
    """Two pages of 100 would be two splits of 128 tokens; the request has 101, and is not split."""
    plan = prefill_plan([(1, 101), (1, 300)], page_size=100, fixed_split_size=1, num_ctas=4)
    assert [(i.kv_begin, i.kv_end) for i in items(plan) if i.request == 0 and i.rows] == [(0, 101)]
    assert sum(i.rows > 0 for i in items(plan)) == 4


def test_splits_that_fill_the_plan_are_made() -> None:
    plan = prefill_plan([(16, 1000), (16, 384)], fixed_split_size=4, num_ctas=22)
    assert sorted(i.slot for i in items(plan) if i.rows) == list(range(22))


def test_tiles_of_a_fixed_split_size_do_not_depend_on_the_capacity() -> None:
    """256 packed rows are 64 query rows of 4 query heads per KV head."""
    sizes = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "head_dim": DIM,
        "page_size": 16,
        "fixed_split_size": 4,
        "device": "meta",
    }
    for capacity in ((1, 1, 1), (1, 3000, 70), (500, 600, 9000)):
        assert PrefillPlanner(*capacity, **sizes).problem.tile_rows == 64


def test_too_many_splits_are_refused_on_the_host_and_not_made_from_device_lengths() -> None:
    lengths = [(16, 1000), (16, 300), (16, 64)]
    with pytest.raises(
        CapacityError, match=r"makes 22 splits of 64 tokens and .* for 20; expected num_ctas of at least 22"
    ):
        prefill_plan(lengths, fixed_split_size=4, num_ctas=20)
    assert sum(i.rows > 0 for i in items(prefill_plan(lengths, fixed_split_size=4, num_ctas=22))) == 22
    planner = PrefillPlanner(3, 48, 90, page_size=16, tile_rows=16, fixed_split_size=4, num_ctas=20, **SIZES)
    table = page_table([n for _, n in lengths], 16)
    plan = planner.plan(indptr([16, 16, 16]), *table, validate=False)
    assert [i.slot for i in items(plan) if i.rows] == [-1] * 3


@pytest.mark.parametrize(
    ("kv_indptr", "last", "message"),
    [
        ([0, 2, 3], [3, 4, 5], r"kv_last_page_len is \[3\]; expected \[2\]"),
        ([0, 2, 1 << 30], [3, 4], "kv_indptr ends at 1073741824 and kv_indices has 5 entries"),
        ([0, 2, 3], [3, 1 << 30], r"kv_last_page_len\[1\] is 1073741824; expected 1 to page_size 16"),
    ],
)
def test_the_splits_of_a_page_table_are_counted_once_it_is_checked(
    kv_indptr: list[int], last: list[int], message: str
) -> None:
    planner = PrefillPlanner(2, 8, 8, page_size=16, fixed_split_size=4, **SIZES)
    table = [torch.tensor(t) for t in ([0, 4, 8], kv_indptr, [0, 1, 2, 3, 4], last)]
    for call in (planner.plan, planner.check):
        with pytest.raises((PageTableError, ShapeError), match=message):
            call(*table)


@pytest.mark.parametrize(
    "lengths", [([0, 4, 8], [0, 2, 3], [3, 4, 5]), ([0, 4, 8], [0, 2], [3]), ([0, 8], [2, 1], [3])]
)
def test_lengths_on_the_host_are_checked_before_splits_are_counted(
    lengths: tuple[list[int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page numbers on a device are not read."""
    qo_indptr, kv_indptr, last = map(torch.tensor, lengths)
    kv_indices = torch.arange(5)
    monkeypatch.setattr(planner_base, "seen", lambda t: t is not kv_indices)
    planner = PrefillPlanner(2, 8, 8, page_size=16, fixed_split_size=4, **SIZES)
    with pytest.raises((PageTableError, ShapeError), match=r"for the . requests of kv_indptr|kv_indptr starts at 2"):
        planner.plan(qo_indptr, kv_indptr, kv_indices, last)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 900)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([64, 128]),
    st.sampled_from([(0, 0), (0, 1), (100, 1)]),
)
@example([(1, 900)] * 6, 16, 64, (0, 0))
def test_the_capacity_for_splits_suffices(
    requests: list[tuple[int, int]], tile_rows: int, split: int, sees: tuple[int, int]
) -> None:
    """Of every batch with so many requests, query rows and tokens of the longest request."""
    window, ahead = sees
    qo_len, kv_len = torch.tensor(requests).unbind(1)
    problem = PlanProblem(16, 4, 2, 64, 64, 1024, tile_rows, window, ahead, split)
    capacity = max_splits_for(problem, len(requests), int(qo_len.sum()), int(kv_len.max()))
    assert count_splits(problem, qo_len, kv_len) <= capacity
