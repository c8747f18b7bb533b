"""``fixed_split_size`` and ``disable_split_kv``: the splits of a request do not depend on the rest of the batch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.page_tables import items
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops.errors import ArgumentError, CapacityError, OptionError
from attn_ops.frontend import call_plans
from attn_ops.plan.state import DecodePlan, PlanProblem, allocate_decode

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPLITS: list[tuple[dict[str, Any], int]] = [
    ({"fixed_split_size": 4}, 64),
    ({"fixed_split_size": 5}, 128),
    ({"fixed_split_size": 4, "disable_split_kv": True}, 0),
    ({"disable_split_kv": True}, 0),
    ({"fixed_split_size": -1, "disable_split_kv": True}, 0),
]
"""Arguments of plan(), and the tokens of a split with pages of 16, 0 without splits."""

SCRATCH = 1 << 24
KINDS = ("decode", "rows", "prefill", "ragged")


def planned(kind: str, r: Requests, **options: Any) -> Any:
    if kind == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(SCRATCH))
        wrapper.plan(*r.table, *r.sizes, **options)
    elif kind == "rows":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(SCRATCH))
        wrapper.plan(*r.table, *r.sizes, q_len_per_req=2, **options)
    elif kind == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(SCRATCH))
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(SCRATCH))
        wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], causal=True, **options)
    return wrapper


def batch(kind: str, kv_lens: tuple[int, ...]) -> Requests:
    return Requests(kv_lens, () if kind == "decode" else (2,) * len(kv_lens))


def extents(wrapper: Any, request: int) -> list[tuple[int, int]]:
    """The KV ranges of a request's work items."""
    work = items(wrapper._planned.plan)
    return sorted((i.kv_begin, i.kv_end) for i in work if i.rows and i.request == request)


@pytest.mark.parametrize(("options", "size"), SPLITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_split_points_are_multiples_of_the_size(kind: str, options: dict[str, Any], size: int) -> None:
    if kind == "ragged" and options.get("fixed_split_size") == 5:
        size = 64  # pages of one token
    wrappers = [planned(kind, batch(kind, lens), **options) for lens in ((700, 3, 90), (5, 64, 9, 700, 2000), (700,))]
    begins = range(0, 700, size) if size else [0]
    for wrapper, place in zip(wrappers, (0, 3, 0), strict=True):
        assert [begin for begin, _ in extents(wrapper, place)] == list(begins)


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_is_split_where_a_device_has_many_ctas(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ctas_per_head", "splits_per_head"):
        monkeypatch.setattr(f"attn_ops.planner.{name}", lambda *_: 8)
    r = batch(kind, (700, 3))
    assert len(extents(planned(kind, r), 0)) > 1
    assert [begin for begin, _ in extents(planned(kind, r, disable_split_kv=True), 0)] == [0]


@pytest.mark.parametrize("options", [options for options, _ in SPLITS], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_successive_plans(kind: str, options: dict[str, Any]) -> None:
    wrapper = None
    for lens in ((700, 3, 90), (5, 64, 9, 700, 2000)):
        r = batch(kind, lens)
        wrapper = planned(kind, r, **options)
        kv = r.ragged() if kind == "ragged" else (r.cache("tensor"),)
        out, lse = wrapper.run(r.q, *kv, return_lse=True)
        r.expected(causal=True).check(out, lse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_split_size_of_0_pages_is_refused(kind: str) -> None:
    with pytest.raises(OptionError, match=r"\.plan: fixed_split_size is 0; expected 1 page or more, or None; change"):
        planned(kind, batch(kind, (70, 3)), fixed_split_size=0)


def test_workspace_size_counts_partial_results() -> None:
    r = batch("prefill", (700, 3, 90))
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(SCRATCH))
    few, many = (decode.workspace_size(*r.table, *r.sizes, fixed_split_size=n)[0] for n in (16, 4))
    assert few < many
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(0, dtype=torch.uint8))
    size, _ = prefill.workspace_size(r.qo_indptr, *r.table, *r.sizes, causal=True, fixed_split_size=4)
    with pytest.raises(CapacityError, match=f"the float workspace has 0 bytes; expected at least {size} bytes"):
        prefill.plan(r.qo_indptr, *r.table, *r.sizes, causal=True, fixed_split_size=4)
    assert prefill.workspace_size(r.qo_indptr, *r.table, *r.sizes, disable_split_kv=True)[0] == 0
    short = batch("prefill", (64, 3, 9))
    assert prefill.workspace_size(short.qo_indptr, *short.table, *short.sizes, fixed_split_size=4)[0] == 0


def test_workspace_size_of_rows_that_are_causal_or_not() -> None:
    r = Requests((704, 704), (704, 704))
    arguments, decode = (*r.table, *r.sizes), flashinfer.BatchDecodeWithPagedKVCacheWrapper
    options: dict[str, Any] = {"fixed_split_size": 4, "q_len_per_req": 704}
    size = decode(workspace(SCRATCH)).workspace_size
    causal, every_key = (size(*arguments, **options, is_causal=flag)[0] for flag in (True, False))
    assert size(*arguments, **options)[0] == causal < every_key
    wrapper = decode(workspace(causal))
    wrapper.plan(*arguments, **options)
    with pytest.raises(CapacityError, match=f"has {causal} bytes; expected at least {every_key} bytes"):
        wrapper.plan(*arguments, **options, is_causal=False)


def test_workspace_size_of_decode_takes_the_arguments_of_plan() -> None:
    """By position they come in FlashInfer's order, which has no ``non_blocking`` here."""
    r, wrapper = Requests((700, 3)), flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(SCRATCH))
    size = wrapper.workspace_size
    dtypes = "float16", None, None, None
    by_position = size(*r.table, *r.sizes, "NONE", -1, None, *dtypes, *[None] * 5, 4, False, 1)
    assert by_position == size(*r.table, *r.sizes, fixed_split_size=4) != size(*r.table, *r.sizes)
    plan, own = (list(inspect.signature(method).parameters) for method in (wrapper.plan, size))
    assert own == [name for name in plan if name != "non_blocking"]
    with pytest.raises(ArgumentError, match=r"\.workspace_size: window_left is 'x', of type str; expected an integer"):
        size(*r.table, *r.sizes, window_left="x")
    with pytest.raises(OptionError, match=r"\.workspace_size: window_right is 3, which is not supported"):
        size(*r.table, *r.sizes, window_right=3)
    with pytest.raises(TypeError, match="casual"):
        size(*r.table, *r.sizes, casual=True)


def test_workspace_size_in_cuda_graph_mode_counts_the_capacity() -> None:
    r = Requests((70, 3), (1, 1))

    def wrapper(float_workspace: torch.Tensor) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
        buffers = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in (3, 1024, 2)]
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(float_workspace, "NHD", True, False, *buffers)

    size, _ = wrapper(workspace(SCRATCH)).workspace_size(*r.table, *r.sizes, fixed_split_size=1)
    planned_one = wrapper(workspace(size))
    planned_one.plan(*r.table, *r.sizes, fixed_split_size=1)
    r.expected().check(planned_one.run(r.q, r.cache("tensor")))


def test_a_captured_prefill_has_capacity_for_the_splits_of_its_first_plan() -> None:
    def buffer(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=DEVICE)

    buffers = [buffer(3), buffer(3), buffer(90), buffer(2)]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(SCRATCH), "NHD", True, *buffers)
    for lens in ((700, 300), (300, 650)):
        r = Requests(lens, (2, 2))
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, fixed_split_size=4)
        r.expected().check(wrapper.run(r.q, r.cache("tensor")))
    r = Requests((700, 600), (2, 2))
    with pytest.raises(
        CapacityError, match=r"has 22 splits of KV and the first plan capacity for 16; expected capacity for"
    ):
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, fixed_split_size=4)


@pytest.mark.parametrize(
    ("options", "general"),
    [
        ({}, False),
        ({"q_data_type": torch.float16, "window_left": 9, "logits_soft_cap": 3.0}, False),
        ({"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}, False),
        ({"pos_encoding_mode": "ALIBI"}, True),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, False),
        ({"pos_encoding_mode": "ROPE_LLAMA", "kv_data_type": torch.float8_e5m2}, True),
        ({"q_data_type": torch.float32}, True),
    ],
    ids=str,
)
def test_decode_by_the_general_kernel_has_its_ctas(
    options: dict[str, Any], general: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_ops.plan.resizable.general_ctas_per_head", lambda *_: 6)
    monkeypatch.setattr("attn_ops.planner.ctas_per_head", lambda *_: 3)
    wrapper = planned("decode", batch("decode", (700, 3)), **options)
    assert wrapper._planned.plan.cta_indptr.shape[0] == 1 + (6 if general else 3)


@pytest.mark.parametrize(("dtype", "general"), [(torch.float16, False), (torch.float32, True)], ids=str)
def test_block_tables_of_the_general_kernel_have_its_ctas(
    dtype: torch.dtype, general: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctas: list[int] = []

    def allocate(problem: PlanProblem, batch: int, pages: int, num_ctas: int, *args: Any) -> DecodePlan:
        ctas.append(num_ctas)
        return allocate_decode(problem, batch, pages, num_ctas, *args)

    monkeypatch.setattr(call_plans, "allocate_decode", allocate)
    monkeypatch.setattr(call_plans, "general_ctas_per_head", lambda *_: 6)
    monkeypatch.setattr(call_plans, "ctas_per_head", lambda *_: 3)
    r = Requests((700, 3), kv_layout="HND", dtype=dtype)
    call = flashinfer.trtllm_batch_decode_with_kv_cache
    out = call(r.q, r.cache(), workspace(SCRATCH), r.block_tables(), r.seq_lens, 700, 0.125)
    assert ctas == [6 if general else 3]
    r.expected(sm_scale=0.125).check(out)
