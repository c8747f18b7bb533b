"""Planners: tensors that keep their addresses, page tables of any integer dtype, and bounds that hold for garbage."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.page_tables import int32, items, page_table
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_ops
from attn_ops import DecodePlan, DecodePlanner, PrefillPlanner
from attn_ops.errors import CapacityError, PlanError
from attn_ops.plan import sizing
from attn_ops.plan.plan_checks import check_plan
from attn_ops.plan.state import PlanProblem, num_slots

SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
PAGE = 16
QO_LENS, KV_LENS = (5, 1, 0, 40), (300, 0, 17, 64)


def _planners() -> dict[str, Any]:
    return {
        "decode": DecodePlanner(5, 40, page_size=PAGE, num_ctas=3, **SIZES),
        "prefill": PrefillPlanner(5, 80, 40, page_size=PAGE, **SIZES),
        "ragged": PrefillPlanner(5, 80, 0, max_kv_len=700, **SIZES),
    }


def _inputs(kind: str, qo_lens: tuple[int, ...] = QO_LENS, kv_lens: tuple[int, ...] = KV_LENS) -> list[Tensor]:
    qo_indptr, table = int32([0, *qo_lens]).cumsum(0).int(), page_table(kv_lens, PAGE)
    tokens = int32([0, *kv_lens]).cumsum(0).int()
    return {"decode": [*table], "prefill": [qo_indptr, *table], "ragged": [qo_indptr, tokens]}[kind]


each_kind = pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])


@each_kind
def test_buffers_keep_their_addresses(kind: str) -> None:
    planner = _planners()[kind]
    tensors = [*planner.state, planner.workspace]
    before = [(t.data_ptr(), t.shape, t.stride()) for t in tensors]
    for n in (4, 1, 0, 3):
        plan = planner.plan(*_inputs(kind, QO_LENS[:n], KV_LENS[:n]))
        assert plan is planner.state
        assert [(t.data_ptr(), t.shape, t.stride()) for t in [*plan, planner.workspace]] == before


@each_kind
def test_no_two_buffers_overlap(kind: str) -> None:
    planner = _planners()[kind]
    tensors = [t for t in [*planner.state, planner.workspace] if t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@each_kind
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_integer_types_are_converted(kind: str, dtype: torch.dtype) -> None:
    expected = [t.clone() for t in _planners()[kind].plan(*_inputs(kind))]
    planned = _planners()[kind].plan(*(t.to(dtype) for t in _inputs(kind)))
    assert all(map(torch.equal, planned, expected))


@each_kind
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_any_stride(kind: str, device: str) -> None:
    """Such as a column of an engine's metadata. Later batches are in the same memory."""
    with torch.device(device):
        strided, planned = _planners()[kind], _planners()[kind]
    memory = [torch.full((t.shape[0], 2), -7, dtype=torch.int32, device=device) for t in _inputs(kind)]
    for lens in (KV_LENS, KV_LENS[::-1], (1, 2, 3, 4), (9, 300)):
        inputs = [t.to(device) for t in _inputs(kind, QO_LENS[: len(lens)], lens)]
        columns = [column[: t.shape[0], 1].copy_(t) for column, t in zip(memory, inputs, strict=True)]
        assert all(map(torch.equal, strided.plan(*columns), planned.plan(*inputs)))


@each_kind
def test_inputs_are_only_read(kind: str) -> None:
    inputs = _inputs(kind)
    before = [t.clone() for t in inputs]
    _planners()[kind].plan(*inputs)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("validate", [None, True])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_unused_page_numbers_need_no_capacity_where_contents_are_checked(kind: str, validate: bool | None) -> None:
    *lengths, indices, last = _inputs(kind)
    expected = [t.clone() for t in _planners()[kind].plan(*lengths, indices, last)]
    longer = torch.cat((indices, int32([-1] * 100)))
    assert all(map(torch.equal, _planners()[kind].plan(*lengths, longer, last, validate=validate), expected))
    with pytest.raises(CapacityError, match=f"the batch has {len(longer)} pages and the plan capacity for 40"):
        _planners()[kind].plan(*lengths, longer, last, validate=False)
    with pytest.raises(CapacityError, match=f"the batch has {len(longer)} pages and the plan capacity for 40"):
        _planners()[kind].plan(*lengths[:-1], lengths[-1] + int32([0, 0, 0, 0, 100]), longer, last, validate=validate)


PAGES = 2000
"""So many that the reference plans them, not the loops for small batches."""


@pytest.mark.parametrize("pages", [45, PAGES])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_page_numbers_may_be_any_part_of_the_plan(kind: str, pages: int) -> None:
    """Of the later requests of the last batch, or the whole field, as a buffer that an engine fills."""
    storage = torch.arange(PAGES + 10, dtype=torch.int32)
    sizes: dict[str, Any] = {"page_size": 1, "storage": {"kv_indices": storage[5 : 5 + PAGES]}, **SIZES}
    planner = DecodePlanner(2, PAGES, **sizes) if kind == "decode" else PrefillPlanner(2, 8, PAGES, **sizes)
    rows = [] if kind == "decode" else [int32([0, 1])]
    for view in (storage[5:], storage[25:], storage[:-10], storage[5::2]):
        storage.copy_(torch.arange(PAGES + 10))
        given = view[: min(pages, len(view), PAGES)]
        want = given.clone()
        planned = planner.plan(*rows, int32([0, len(given)]), given, int32([1]))
        assert torch.equal(planned.kv_indices[: len(given)], want)


@each_kind
def test_validation_does_not_change_the_plan(kind: str) -> None:
    checked = [t.clone() for t in _planners()[kind].plan(*_inputs(kind), validate=True)]
    assert all(map(torch.equal, _planners()[kind].plan(*_inputs(kind), validate=False), checked))


@each_kind
def test_filling_the_capacity_exactly(kind: str) -> None:
    """A batch of exactly the capacity in requests, rows, pages and tokens is planned."""
    qo_indptr, (kv_indptr, kv_indices, last) = int32([0, 3, 4]), page_table((32, 48), PAGE)
    sizes = {**SIZES, "max_kv_len": 48}
    if kind == "decode":
        plan = DecodePlanner(2, 5, page_size=PAGE, **sizes).plan(kv_indptr, kv_indices, last)
    elif kind == "prefill":
        plan = PrefillPlanner(2, 4, 5, page_size=PAGE, **sizes).plan(qo_indptr, kv_indptr, kv_indices, last)
    else:
        plan = PrefillPlanner(2, 4, 0, **sizes).plan(qo_indptr, int32([0, 32, 80]))
    assert plan.kv_len.tolist() == [32, 48]


def test_an_empty_request_may_have_any_last_page_len() -> None:
    planner = DecodePlanner(3, 4, page_size=PAGE, **SIZES)
    plan = planner.plan(int32([0, 0, 2, 2]), int32([3, 1]), int32([99, 4, -7]))
    assert plan.kv_len.tolist() == [0, PAGE + 4, 0]


def test_planners_are_on_the_default_device() -> None:
    with torch.device("meta"):
        assert all(t.is_meta for planner in _planners().values() for t in [*planner.state, planner.workspace])


GARBAGE = st.one_of(st.integers(-100, 100), st.sampled_from([-(2**31), -(2**30), 2**30, 2**31 - 1]))


def _garbage(length: int) -> st.SearchStrategy[Tensor]:
    return st.lists(GARBAGE, min_size=length, max_size=length).map(int32)


@given(_garbage(6), _garbage(40), _garbage(5))
def test_unchecked_garbage_stays_in_bounds_decode(kv_indptr: Tensor, kv_indices: Tensor, last: Tensor) -> None:
    """What a kernel does with a plan made of nonsense means nothing, but it stays inside its buffers."""
    planner = _planners()["decode"]
    plan: DecodePlan = planner.plan(kv_indptr, kv_indices, last, validate=False)
    bounds = plan.cta_indptr.tolist()
    assert bounds == sorted(bounds)
    assert 0 <= bounds[0] <= bounds[-1] <= plan.work.shape[0]
    assert all(0 <= n <= 40 * PAGE for n in plan.kv_len.tolist())
    for item in items(plan):
        assert 0 <= item.request < 5
        assert item.row == item.request
        assert 0 <= item.kv_begin <= item.kv_end <= plan.kv_len[item.request]
        assert -1 <= item.slot < num_slots(plan)
    merges = plan.merge_indptr.tolist()
    assert merges == sorted(merges)
    assert 0 <= merges[0] <= merges[-1] <= num_slots(plan)
    q, cache = torch.zeros(5, 4, 16), torch.zeros(7, PAGE, 2, 16)
    torch.ops.attn.batch_decode(q, cache, cache, plan, planner.workspace)


@given(_garbage(6), _garbage(6), _garbage(40), _garbage(5))
def test_unchecked_garbage_stays_in_bounds_prefill(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last: Tensor
) -> None:
    planner = _planners()["prefill"]
    plan = planner.plan(qo_indptr, kv_indptr, kv_indices, last, validate=False)
    for item in items(plan):
        assert 0 <= item.request < 5
        assert 0 <= item.rows <= planner.problem.tile_rows
        assert 0 <= item.kv_begin <= item.kv_end <= max(0, int(plan.kv_len[item.request])) <= 40 * PAGE
    q, cache = torch.zeros(45, 4, 16), torch.zeros(7, PAGE, 2, 16)
    torch.ops.attn.batch_prefill(q, cache, cache, plan, planner.workspace)


@each_kind
@pytest.mark.parametrize("fake", [False, True])
def test_tables_without_contents_are_not_read(fake: bool, kind: str) -> None:
    with FakeTensorMode() if fake else torch.device("meta"):
        planner = _planners()[kind]
        lengths = {"decode": (4, 9, 3), "prefill": (4, 4, 9, 3), "ragged": (4, 4)}[kind]
        tables = (torch.empty(n, dtype=torch.int32) for n in lengths)
        assert planner.plan(*tables) is planner.state


def test_a_table_that_is_partly_on_the_host_is_not_read() -> None:
    with torch.device("meta"):
        planner = DecodePlanner(5, 40, page_size=PAGE, **SIZES)
    kv_indptr, kv_indices, last = page_table((32, 48), PAGE)
    assert planner.plan(kv_indptr, kv_indices.to("meta"), last.to("meta")) is planner.state


@each_kind
def test_plans_made_in_inference_mode_are_written_outside_of_it(kind: str) -> None:
    with torch.inference_mode():
        planner = _planners()[kind]
    assert not any(t.is_inference() for t in [*planner.state, planner.workspace])
    assert all(map(torch.equal, planner.plan(*_inputs(kind)), _planners()[kind].plan(*_inputs(kind))))


@each_kind
def test_shapes_of_a_plan_are_those_it_is_checked_by(kind: str) -> None:
    planner = _planners()[kind]
    check_plan("op", planner.state)
    with pytest.raises(PlanError, match=r"^op: plan\.kv_indptr is \[5\]; expected \[6\] for max_batch 5"):
        check_plan("op", planner.state._replace(kv_indptr=planner.state.kv_indptr[:-1]))
    for more in ({"num_ctas": 7}, {"fixed_split_size": 3}, {"fixed_split_size": 3, "num_ctas": 9}):
        planner = DecodePlanner(5, 40, page_size=PAGE, **more, **SIZES)
        check_plan("op", planner.state)
        check_plan("op", PrefillPlanner(5, 80, 40, page_size=PAGE, **more, **SIZES).state)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", ["kv_indptr", "kv_indices", "kv_len", "work", "merge_indptr", "split_counters"])
def test_a_field_that_is_cut_is_named_with_a_fixed_split_size(name: str, change: int) -> None:
    """The table of bad calls (``tests/ops/test_errors.py``) has the plans without one."""
    planner = DecodePlanner(5, 40, page_size=64, fixed_split_size=1, **SIZES)
    plan, field = planner.state, getattr(planner.state, name)
    cut = torch.cat((field, field))[: field.shape[0] + change]
    shape, expected = re.escape(str(list(cut.shape))), re.escape(str(list(field.shape)))
    # The pages decide how many splits there are, so a page table that is cut does not go with the work list.
    named = (
        rf"{name} is {shape}; expected {expected}" if name != "kv_indices" else r"work is \[45, 8\]; expected \[4., 8\]"
    )
    with pytest.raises(PlanError, match=rf"plan\.{named} for max_batch 5, max_pages \d+, num_ctas 1; pass the plan"):
        check_plan("op", plan._replace(**{name: cut}))


@pytest.mark.parametrize(("max_pages", "tokens"), [(0, 16), (1, 16), (33, 1024), (64, 1024), (65, 2048)])
def test_default_max_kv_len_is_a_power_of_two(max_pages: int, tokens: int) -> None:
    assert DecodePlanner(5, max_pages, page_size=PAGE, **SIZES).problem.max_kv_len == tokens
    assert PrefillPlanner(5, 8, max(1, max_pages), page_size=PAGE, **SIZES).problem.max_kv_len == tokens


def test_plans_are_pytrees_of_their_fields() -> None:
    """One object to the user, its fields in order to a compiled package."""
    for planner in _planners().values():
        leaves, spec = torch.utils._pytree.tree_flatten(planner.state)
        assert all(leaf is t for leaf, t in zip(leaves, planner.state, strict=True))
        assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is type(planner.state)
        assert isinstance(planner.state, attn_ops.DecodePlan | attn_ops.PrefillPlan)


def test_sizes_of_any_magnitude_travel_with_the_plan() -> None:
    """Their product is more than int64 holds, and so would strides be."""
    problem = PlanProblem(64, 128, 8, 576, 512, 1 << 21, 64, 1 << 17, 1, 1 << 21)
    shape_tensor = problem.as_shape_tensor(torch.device("cpu"))
    for t in (shape_tensor, shape_tensor.clone(), torch.zeros_like(shape_tensor), shape_tensor.to(torch.int32)):
        assert t.numel() == 0
        assert PlanProblem.of(t) == problem


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "hopper", "expected", "fp8"),
    [
        ((32, 8), 128, 16, True, 16, 32),
        ((32, 8), 64, 48, True, 32, 32),
        ((21, 7), 64, 48, True, 16, 16),
        ((21, 7), 128, 48, True, 16, 16),
        ((48, 4), 128, 16, True, 32, 64),
        ((32, 32), 128, 16, True, 4, 8),
        ((256, 256), 128, 16, True, 1, 1),
        ((32, 8), 128, 16, False, 32, 32),
        ((32, 8), 128, 1, True, 32, 32),
        ((32, 8), 128, 8, True, 32, 32),
        ((32, 8), 256, 16, True, 32, 32),
        ((17, 1), 128, 16, True, 264, 264),
    ],
)
def test_decode_plans_have_one_cta_per_sm_for_the_cuda_kernel(
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    hopper: bool,
    expected: int,
    fp8: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(sizing, "is_hopper", lambda device: hopper)
    problem = PlanProblem(page_size, *heads, dim, dim, 1000, 1)
    assert [sizing.ctas_per_head(torch.device("cuda"), problem, cache) for cache in (False, True)] == [expected, fp8]
    assert sizing.ctas_per_head(torch.device("cpu"), problem, False) == 1


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_head_shards_size_ctas_and_workspace_for_one_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is for the heads of all ranks; what is sized by default is for those of one."""
    sized: list[int] = []
    monkeypatch.setattr(
        "attn_ops.planner.ctas_per_head", lambda _device, problem, _fp8: sized.append(problem.num_kv_heads) or 3
    )
    monkeypatch.setattr(
        "attn_ops.planner.splits_per_head", lambda _device, problem, _tiles: sized.append(problem.num_kv_heads) or 4
    )
    planner_type, sizes = (DecodePlanner, (5, 40)) if kind == "decode" else (PrefillPlanner, (5, 80, 40))
    one, half = (planner_type(*sizes, page_size=PAGE, **SIZES, head_shards=shards) for shards in (1, 2))
    assert sized == [2, 1]
    assert one.problem == half.problem
    assert half.workspace.numel() * 2 == one.workspace.numel() > 0
    for a, b in zip(one.plan(*_inputs(kind)), half.state, strict=True):
        assert a.shape == b.shape


def test_head_shards_of_multi_query_attention_widen_the_tiles() -> None:
    """Each rank has the one KV head and fewer query heads, so that a tile holds more query rows."""
    planners = (
        PrefillPlanner(2, 600, 40, page_size=PAGE, num_qo_heads=16, num_kv_heads=1, head_dim=16, head_shards=shards)
        for shards in (1, 4)
    )
    assert [planner.problem.tile_rows for planner in planners] == [16, 64]


@pytest.mark.parametrize(("shards", "message"), [(0, "head_shards is 0; expected at least 1"), (3, "has 4 heads")])
def test_head_shards_divide_the_heads(shards: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodePlanner(1, 1, page_size=PAGE, **SIZES, head_shards=shards)
