"""Decode plans: the work list covers every token once, evenly over the CTAs, with few and well-numbered splits."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from helpers.oracle import GARBAGE, attention, merge
from helpers.page_tables import LENGTHS, PAGE_SIZES, Item, disjoint, items, page_table
from hypothesis import given
from hypothesis import strategies as st

from attn_ops import DecodePlan, DecodePlanner
from attn_ops.plan.state import KV_BLOCK, num_slots, workspace_size

HEADS, DIM = 2, 8

batches = st.fixed_dictionaries(
    {
        "lengths": st.lists(LENGTHS, min_size=1, max_size=12),
        "page_size": PAGE_SIZES,
        "num_ctas": st.one_of(st.integers(1, 6), st.integers(1, 300)),
        "window_left": st.sampled_from([-1, 0, 63, 64, 100, 5000]),
        "spare_batch": st.integers(0, 3),
    }
)


def _plan(lengths: list[int], page_size: int, num_ctas: int, window_left: int = -1, spare_batch: int = 0) -> DecodePlan:
    table = page_table(lengths, page_size)
    planner = DecodePlanner(
        len(lengths) + spare_batch,
        table[1].shape[0] + 1,
        page_size=page_size,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        window_left=window_left,
        num_ctas=num_ctas,
    )
    for t in planner.state:
        t.fill_(GARBAGE)
    return planner.plan(*table)


def _work_per_cta(plan: DecodePlan) -> list[list[Item]]:
    """The work items of every CTA."""
    work = items(plan)
    return [work[a:b] for a, b in pairwise(plan.cta_indptr.tolist())]


def _kv_blocks(item: Item) -> int:
    return -(-item.kv_end // KV_BLOCK) - item.kv_begin // KV_BLOCK


@given(batches)
def test_page_table_is_kept(batch: dict) -> None:
    plan = _plan(**batch)
    lengths, spare = batch["lengths"], batch["spare_batch"]
    kv_indptr, kv_indices, _ = page_table(lengths, batch["page_size"])
    assert plan.kv_len.tolist() == lengths + [0] * spare
    assert plan.kv_indptr.tolist() == kv_indptr.tolist() + [int(kv_indptr[-1])] * spare
    assert torch.equal(plan.kv_indices[: len(kv_indices)], kv_indices)


@given(batches)
def test_every_token_is_covered_once(batch: dict) -> None:
    plan = _plan(**batch)
    work = [item for cta in _work_per_cta(plan) for item in cta]
    for b, length in enumerate(batch["lengths"]):
        window = batch["window_left"] + 1
        start = max(0, length - window) if window else 0
        mine = [item for item in work if item.request == b]
        assert disjoint([(i.kv_begin, i.kv_end) for i in mine], start, length)
        for i in mine:
            assert i.kv_begin == start or i.kv_begin % KV_BLOCK == 0
            assert i.kv_end == length or i.kv_end % KV_BLOCK == 0
            assert (i.row, i.rows, i.position) == (b, 1, length - 1)
            assert i.page_start == plan.kv_indptr[b]
    assert {i.request for i in work} == {b for b, n in enumerate(batch["lengths"]) if n}


@given(batches)
def test_cta_indptr_lists_the_items_and_nothing_else(batch: dict) -> None:
    plan = _plan(**batch)
    bounds = plan.cta_indptr.tolist()
    assert len(bounds) == batch["num_ctas"] + 1
    assert bounds[0] == 0
    assert all(a <= b for a, b in pairwise(bounds))
    assert bounds[-1] <= plan.work.shape[0]
    assert all(item.rows == 1 for item in items(plan)[: bounds[-1]])
    assert (plan.work[bounds[-1] :] == 0).all()


def _assert_even(plan: DecodePlan) -> None:
    """No CTA reads more than the mean and a sixteenth, and a KV block for rounding."""
    kv_blocks = [sum(map(_kv_blocks, work)) for work in _work_per_cta(plan)]
    mean = sum(kv_blocks) / len(kv_blocks)
    assert max(kv_blocks) <= mean * (1 + 1 / 16) + 1


@given(batches)
def test_ctas_have_even_work(batch: dict) -> None:
    _assert_even(_plan(**batch))


@pytest.mark.parametrize("seed", range(100))
def test_ctas_have_even_work_in_large_batches(seed: int) -> None:
    """Batches where splitting no request is tempting, and uneven by about an eighth."""
    draw = random.Random(seed)
    longest = draw.choice([300, 4_000, 40_000])
    lengths = [draw.randint(1, longest) for _ in range(draw.randint(4, 60))]
    _assert_even(_plan(lengths, 16, draw.randint(2, len(lengths))))


@given(batches)
def test_slots_are_numbered_by_request(batch: dict) -> None:
    plan = _plan(**batch)
    work = [item for cta in _work_per_cta(plan) for item in cta]
    bounds = plan.merge_indptr.tolist()
    assert bounds[0] == 0
    assert bounds[-1] <= num_slots(plan)
    assert workspace_size(plan) == num_slots(plan) * HEADS * (DIM + 1)
    for b, (begin, end) in enumerate(pairwise(bounds)):
        mine = sorted((i for i in work if i.request == b), key=lambda i: i.kv_begin)
        if len(mine) > 1:
            assert [i.slot for i in mine] == list(range(begin, end))
        else:
            assert begin == end
            assert all(i.slot == -1 for i in mine)


@pytest.mark.parametrize("num_ctas", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 64, 1000, 4096])
def test_nothing_is_split_without_need(num_ctas: int, length: int) -> None:
    plan = _plan([length] * 16, 16, num_ctas)
    assert num_slots(plan) == 2 * (num_ctas - 1)
    assert int(plan.merge_indptr[-1]) == 0
    assert [len(work) for work in _work_per_cta(plan)] == [16 // num_ctas] * num_ctas


@pytest.mark.parametrize(("kv_blocks", "split"), [((26, 24), False), ((24, 26), False), ((28, 24), True)])
def test_a_cta_may_have_a_sixteenth_more_if_that_avoids_a_split(kv_blocks: tuple[int, int], split: bool) -> None:
    plan = _plan([n * KV_BLOCK for n in kv_blocks], 16, 2)
    assert int(plan.merge_indptr[-1]) == (2 if split else 0)


def test_one_long_request_is_spread_over_all_ctas() -> None:
    ctas = _work_per_cta(_plan([32 * KV_BLOCK, 0], 16, 8))
    assert [[_kv_blocks(i) for i in work] for work in ctas] == [[4]] * 8


def test_zero_plan_has_no_work() -> None:
    plan = DecodePlan(*(torch.zeros_like(t) for t in _plan([500, 7], 16, 4)))
    assert _work_per_cta(plan) == [[]] * 4


@given(
    lengths=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 700)), min_size=1, max_size=4),
    num_ctas=st.integers(1, 9),
    planned=st.sampled_from([-1, 40, 200]),
    seed=st.integers(0, 2**32),
)
def test_the_work_list_computes_attention(lengths: list[int], num_ctas: int, planned: int, seed: int) -> None:
    """Each CTA runs its items, in float64; partial results are combined by ``merge_indptr``."""
    plan = _plan(lengths, 16, num_ctas, planned)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths), HEADS, DIM, generator=generator)
    keys, values = ([torch.randn(n, HEADS, DIM, generator=generator) for n in lengths] for _ in range(2))
    window = planned if planned < 0 else planned // 2
    slots_v = torch.full((num_slots(plan), HEADS, DIM), torch.nan, dtype=torch.float64)
    slots_s = torch.full((num_slots(plan), HEADS), torch.nan, dtype=torch.float64)
    out = torch.zeros(len(lengths), HEADS, DIM, dtype=torch.float64)
    for i in (item for cta in _work_per_cta(plan) for item in cta):
        part = slice(i.kv_begin, i.kv_end)
        j = torch.arange(i.kv_begin, i.kv_end)
        visible = (j + window >= i.position) if window >= 0 else (j >= 0)
        v, s = attention(q[i.row, None], keys[i.request][part], values[i.request][part], mask=visible[None])
        if i.slot < 0:
            out[i.row] = v[0]
        else:
            slots_v[i.slot], slots_s[i.slot] = v[0], s[0]
    for b, (begin, end) in enumerate(pairwise(plan.merge_indptr.tolist())):
        if begin < end:
            out[b] = merge(slots_v[None, begin:end], slots_s[None, begin:end])[0]
    for b in range(len(lengths)):
        whole, _ = attention(q[b, None], keys[b], values[b], window_left=window)
        torch.testing.assert_close(out[b], whole[0])
