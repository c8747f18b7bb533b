"""Decode through FlashInfer's names, against the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, Requests, sink_variant, workspace

import attn_ops as flashinfer
from attn_ops import DecodePlan, errors
from attn_ops.frontend.base import Wrapper
from attn_ops.plan.page_table import PageTable

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GQA: list[dict[str, Any]] = [{"heads": heads} for heads in ((2, 2), (4, 2), (5, 1), (8, 1), (6, 2))]
UNLIKE: dict[str, Any] = {"head_dims": (192, 128)}  # a decode plan has one head_dim
CACHES: list[dict[str, Any]] = [
    {"kv_layout": "NHD"},
    {"kv_layout": "HND"},
    {"page_size": 1},
    {"page_size": 3, "kv_layout": "HND"},
    UNLIKE,
    {"head_dims": (256, 256)},
    {"head_dims": (24, 24)},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float32},
    {"kv_lens": (0, 0)},
    {"kv_lens": (700, 3, 0, 5, 64, 16)},
]
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"sm_scale": 0.3}, {"sm_scale": 0.3}),
    ({"window_left": 0}, {"window_left": 0}),
    ({"window_left": 33}, {"window_left": 33}),
    ({"logits_soft_cap": 2.0}, {"logits_soft_cap": 2.0}),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, {"pos_encoding": "ROPE_LLAMA"}),
    (
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 1e3},
        {"pos_encoding": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 1e3},
    ),
    ({"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0}, {"pos_encoding": "ALIBI", "logits_soft_cap": 5.0}),
    ({"disable_split_kv": True}, {}),
    ({"fixed_split_size": 4}, {}),
]


def planned(r: Requests, **options: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(*r.table, *r.sizes, **{"q_data_type": r.dtype, "kv_data_type": r.kv_dtype, **options})
    return wrapper


def test_a_backend_that_is_named_never_falls_back() -> None:
    k = torch.zeros(3, 2, 16)
    with pytest.raises(errors.BackendError, match=r"triton: .*it runs on cuda, not cpu"):
        flashinfer.single_prefill_with_kv_cache(torch.zeros(2, 2, 16), k, k, backend="triton")
    assert flashinfer.single_prefill_with_kv_cache(torch.zeros(2, 2, 16), k, k, backend="reference").shape == (2, 2, 16)


@pytest.mark.parametrize("changes", [{}, *GQA, *(c for c in CACHES if c is not UNLIKE)], ids=str)
def test_batches(changes: dict[str, Any]) -> None:
    r = Requests(**changes)
    out, lse = planned(r).run(r.q, r.cache(), return_lse=True)
    r.expected().check(out, lse)


@pytest.mark.parametrize(("options", "meaning"), OPTIONS, ids=str)
def test_options_of_plan(options: dict[str, Any], meaning: dict[str, Any]) -> None:
    r = Requests()
    out, lse = planned(r, **options).run(r.q, r.cache(), return_lse=True)
    r.expected(**meaning).check(out, lse)


@pytest.mark.parametrize("form", ["pair", "list", "tensor"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_cache_forms(form: str, kv_layout: str) -> None:
    r = Requests(kv_layout=kv_layout)
    r.expected().check(planned(r).run(r.q, r.cache(form)))


@pytest.mark.parametrize("storage", ["pair", "fused"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_page_size_1_without_its_dimension(storage: str, kv_layout: str) -> None:
    r = Requests(kv_layout=kv_layout, storage=storage, page_size=1)
    r.expected().check(planned(r).run(r.q, r.cache("no page dimension")))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_fp8_cache(kv_dtype: torch.dtype, as_tensor: bool) -> None:
    r = Requests(kv_dtype=kv_dtype, dtype=torch.bfloat16)
    k_scale, v_scale = (torch.tensor(x, device=DEVICE) if as_tensor else x for x in (0.5, 3.0))
    out, lse = planned(r).run(r.q, r.cache(), k_scale=k_scale, v_scale=v_scale, return_lse=True)
    r.expected(k_scale=0.5, v_scale=3.0).check(out, lse)
    # An FP8 data_type names the dtype of the cache only.
    alone = planned(r, kv_data_type=None, data_type=kv_dtype)
    torch.testing.assert_close(alone.run(r.q, r.cache(), k_scale=k_scale, v_scale=v_scale), out)


@pytest.mark.parametrize("data_type", [torch.float8_e4m3fn, "float8_e5m2"])
def test_an_fp8_data_type_leaves_the_query_at_float16(data_type: Any) -> None:
    r = Requests(kv_dtype=getattr(torch, str(data_type).removeprefix("torch.")), dtype=torch.float16)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*r.table, *r.sizes, data_type=data_type)
    r.expected().check(wrapper.run(r.q, r.cache()))


def test_options_of_run() -> None:
    r = Requests()
    wrapper = planned(r, window_left=20)
    out = wrapper.run(r.q, r.cache(), window_left=5, sinks=r.sinks, q_scale=0.5)
    r.expected(window_left=5, sinks=True, sm_scale=0.5 / 8).check(out)
    # A window wider than the planned one sees keys that the plan left out.
    r.expected(window_left=64).check(wrapper.run(r.q, r.cache(), window_left=64))
    r.expected().check(wrapper.run(r.q, r.cache(), window_left=-1))
    r.expected(window_left=20).check(wrapper.run(r.q, r.cache()))


@pytest.mark.parametrize(("named", "resolved"), [("auto", "auto"), ("fa3", "auto"), ("reference", "reference")])
def test_resolved_backend(named: str, resolved: str) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=named)
    assert wrapper.resolved_backend == resolved


def test_sink_by_position() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=sink_variant())
    wrapper.plan(*r.table, *r.sizes)
    r.expected(sinks=True, sm_scale=0.2).check(wrapper.run(r.q, r.cache(), r.sinks, 0.2))
    r.expected(sinks=True).check(wrapper.run(r.q, r.cache(), sinks=r.sinks))
    other = [*sink_variant()[:11], "FlashSigmoid", "struct FlashSigmoid {};"]
    with pytest.raises(errors.UnsupportedError, match="jit_args is given, which is not supported: kernels are not"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), jit_args=other)


@pytest.mark.parametrize("rows", [1, 3])
def test_arguments_by_position_without_effect(rows: int) -> None:
    """FlashInfer passes them to kernels of ``jit_args``, and ignores them without."""
    r = Requests((37, 5, 130), (rows,) * 3, kv_dtype=torch.float8_e4m3fn)
    wrapper = planned(r, q_len_per_req=rows)
    for args in ((None, 0.125), (0.5, 2.0), (0.5, 1.5, 2.0), (r.sinks, 0.1), (torch.tensor(0.5),), range(5)):
        for _ in range(2):
            r.expected(causal=True).check(*wrapper.run(r.q, r.cache(), *args, return_lse=True))
    r.expected(causal=True, v_scale=0.5).check(wrapper.run(r.q, r.cache(), None, 0.125, v_scale=0.5))


def test_buffers_are_filled_and_returned() -> None:
    r = Requests()
    out, lse = torch.empty_like(r.q), torch.empty(r.q.shape[:2], device=DEVICE)
    got = planned(r).run(r.q, r.cache(), out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    r.expected().check(out, lse)


def test_output_dtype() -> None:
    r = Requests()
    assert planned(r, o_data_type=torch.bfloat16).run(r.q, r.cache()).dtype == torch.bfloat16
    assert planned(r, o_data_type="float32").run(r.q, r.cache()).dtype == torch.float32


@pytest.mark.parametrize("is_causal", [None, True, False, 0])
def test_several_query_rows_per_request(is_causal: bool | None) -> None:
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3, 3, 3))
    wrapper = planned(r, q_len_per_req=3, is_causal=is_causal)
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True, q_len_per_req=3)
    r.expected(causal=is_causal in (None, True)).check(out, lse)


ROWS_OF_RUN: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"window_left": 5}, {}, {"window_left": 5}),
    ({"window_left": 5}, {"window_left": 90}, {"window_left": 90}),
    ({"pos_encoding_mode": "ROPE_LLAMA"}, {"k_scale": 0.5}, {"pos_encoding": "ROPE_LLAMA", "k_scale": 0.5}),
    ({"disable_split_kv": True}, {}, {}),
    ({"fixed_split_size": 4}, {}, {}),
]


@pytest.mark.parametrize(("options", "changes", "meaning"), ROWS_OF_RUN, ids=str)
def test_run_may_name_the_query_rows_per_request(
    options: dict[str, Any], changes: dict[str, Any], meaning: dict[str, Any]
) -> None:
    """As FlashInfer's wrapper with trtllm-gen does, which plans lengths and pages alone."""
    r = Requests(kv_lens=(37, 3, 0, 130), qo_lens=(3,) * 4)
    wrapper = planned(r, **options)
    for _ in range(2):
        out, lse = wrapper.run(r.q, r.cache(), return_lse=True, q_len_per_req=3, **changes)
        r.expected(causal=True, **meaning).check(out, lse)
    out, lse = wrapper.run(r.q[2::3], r.cache(), return_lse=True, **changes)  # as planned: the last row sees all keys
    r.expected(causal=True, **meaning).rows(slice(2, None, 3)).check(out, lse)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_run_are_causal_as_plan_says(is_causal: bool) -> None:
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3,) * 3)
    out, lse = planned(r, is_causal=is_causal).run(r.q, r.cache(), return_lse=True, q_len_per_req=3)
    r.expected(causal=is_causal).check(out, lse)


def test_run_may_name_the_rows_of_an_empty_batch() -> None:
    r, wrapper = Requests(), flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    wrapper.plan(none.new_zeros(1), none, none, *r.sizes)
    assert wrapper.run(r.q[:0], r.cache(), q_len_per_req=3).shape == (0, 4, 64)


def test_rows_of_run_follow_the_plan_in_graph_mode() -> None:
    buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (4, 20, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    for lens in ((37, 3, 130), (9, 64, 2), (0, 0, 0)):
        r = Requests(kv_lens=lens, qo_lens=(2,) * 3)
        wrapper.plan(*r.table, *r.sizes, q_data_type=r.dtype)
        r.expected(causal=True).check(*wrapper.run(r.q, r.cache(), return_lse=True, q_len_per_req=2))


def test_begin_forward_and_forward() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(*r.table, *r.sizes, data_type="float16")
    r.expected().check(wrapper.forward(r.q, r.cache()))
    out, lse = wrapper.forward_return_lse(r.q, r.cache(), "ROPE_LLAMA", window_left=9, logits_soft_cap=3.0)
    r.expected(pos_encoding="ROPE_LLAMA", window_left=9, logits_soft_cap=3.0).check(out, lse)
    r.expected().check(*wrapper.run_return_lse(r.q, r.cache()))
    for of_pair in (wrapper.run_return_lse, wrapper.forward_return_lse):
        r.expected().check(*of_pair(r.q, r.cache(), return_lse=False))  # which the name overrules
    wrapper.begin_forward(*r.table, *r.sizes, data_type="float16", logits_soft_cap=2.0)
    r.expected(logits_soft_cap=2.0).check(wrapper.forward(r.q, r.cache()))
    r.expected().check(wrapper.forward(r.q, r.cache(), logits_soft_cap=0.0))
    wrapper.end_forward()


def test_positional_options_of_plan() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*r.table, *r.sizes, "NONE", 9, 3.0, "float16")
    r.expected(window_left=9, logits_soft_cap=3.0).check(wrapper.run(r.q, r.cache()))


def test_private_attributes_that_engines_read() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with pytest.raises(AttributeError, match="no plan that says sm_scale"):
        _ = wrapper._sm_scale
    with pytest.raises(AttributeError, match="no buffer for kv_indices; they are those of CUDA-graph mode"):
        _ = wrapper._paged_kv_indices_buf
    with pytest.raises(AttributeError, match=r"no compiled module behind a wrapper; call plan\(\) in place"):
        _ = wrapper._cached_module
    with pytest.raises(AttributeError, match=r"that of the last plan, and cannot be set; give it to plan\(\)"):
        wrapper._sm_scale = 0.5
    with pytest.raises(AttributeError, match="the buffer for kv_indices is the constructor's, and cannot be set; make"):
        wrapper._paged_kv_indices_buf = r.table[1]
    assert wrapper._fixed_batch_size == 0
    wrapper.plan(*r.table, *r.sizes, "NONE", 9, 3.0, "float16", sm_scale=0.25)
    options = wrapper._causal, wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap
    assert options == (False, 0.25, 9, 3.0)
    wrapper.plan(*r.table, *r.sizes, q_data_type=r.q.dtype)
    assert (wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap) == (None, -1, 0.0)


def test_workspaces_that_engines_share_between_wrappers() -> None:
    r, memory = Requests(), workspace()
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(prefill._float_workspace_buffer)
    assert wrapper._float_workspace_buffer is memory
    wrapper._int_workspace_buffer = prefill._int_workspace_buffer
    wrapper.plan(*r.table, *r.sizes)
    wrapper.reset_workspace_buffer(workspace(), wrapper._int_workspace_buffer)
    assert wrapper._float_workspace_buffer is not memory
    r.expected().check(wrapper.run(r.q, r.cache()))


def test_a_backend_of_flashinfer_that_engines_set() -> None:
    r = Requests()
    indptr, last = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in (5, 4))
    indices = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), indptr, indices, last)
    wrapper._backend = "fa2"
    assert wrapper.resolved_backend == "auto"
    wrapper.plan(*r.table, *r.sizes)
    r.expected().check(wrapper.run(r.q, r.cache()))
    wrapper._backend = "reference"  # one of this library
    assert wrapper.resolved_backend == "reference"
    r.expected().check(wrapper.run(r.q, r.cache()))


def test_int64_tables_and_lengths_of_the_next_batch() -> None:
    r, s = Requests(), Requests(kv_lens=(1, 600, 2, 0, 77), seed=1)
    wrapper = planned(r)
    for batch in (s, r, s):
        wrapper.plan(*(t.long() for t in batch.table), *batch.sizes)
        batch.expected().check(*wrapper.run(batch.q, batch.cache(), return_lse=True))


def test_capacity_from_shapes_where_lengths_are_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan on a GPU does not wait for the lengths: it bounds them by the shapes of the page table."""
    monkeypatch.setattr(PageTable, "measured", lambda tables, page_size: tables.bounded())
    for r in (Requests(), Requests(kv_lens=(1, 600, 2, 0, 77))):
        r.expected().check(*planned(r).run(r.q, r.cache(), return_lse=True))


@pytest.mark.parametrize(("batch", "capacity"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
def test_plans_have_capacity_for_a_power_of_two(batch: int, capacity: int) -> None:
    plan = planned(Requests(kv_lens=(1,) * batch))._plan_info
    assert DecodePlan(*plan).kv_len.shape == (capacity,)


@pytest.mark.parametrize("length", [256, 257, 512, 513])
def test_lengths_about_the_capacity_of_a_plan(length: int) -> None:
    r = Requests(kv_lens=(3, length))
    r.expected().check(*planned(r).run(r.q, r.cache(), return_lse=True))


def test_a_wider_window_than_planned_sees_full_last_pages() -> None:
    r = Requests(kv_lens=(48, 16, 37, 160))
    out, lse = planned(r, window_left=20).run(r.q, r.cache(), window_left=100, return_lse=True)
    r.expected(window_left=100).check(out, lse)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_later_requests_of_a_batch(device: str) -> None:
    """Their page table is the end of a larger one: ``indptr`` does not start at 0."""
    r = Requests((37, 5, 130, 1))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    indptr, indices, last = (t.to(device) for t in r.table)
    wrapper.plan(indptr[1:], indices, last[1:], *r.sizes)
    later = zip(r.q.split(1)[1:], r.batch.keys[1:], r.batch.values[1:], strict=True)
    Expected.of([(*part, None) for part in later]).check(wrapper.run(r.q[1:], r.cache()))


def test_later_requests_of_a_table_in_the_buffer_of_a_graph() -> None:
    """The plan moves page numbers within the buffer that it reads them from."""
    r = Requests((37, 130, 5))
    indptr, last = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in (3, 2))
    indices = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), indptr, indices, last)
    given = r.table[1]
    indices[: len(given)] = given
    wrapper.plan(r.table[0][1:], indices, r.table[2][1:], *r.sizes)
    later = zip(r.q.split(1)[1:], r.batch.keys[1:], r.batch.values[1:], strict=True)
    Expected.of([(*part, None) for part in later]).check(wrapper.run(r.q[1:], r.cache()))


def test_cuda_graph_mode_fills_the_callers_buffers() -> None:
    r = Requests()
    indptr, last = (torch.empty(n, dtype=torch.int32, device=DEVICE) for n in (5, 4))
    indices = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), indptr, indices, last)
    assert wrapper.is_cuda_graph_enabled
    assert wrapper._fixed_batch_size == 4
    assert wrapper._paged_kv_indptr_buf is indptr
    assert wrapper._paged_kv_indices_buf is indices
    assert wrapper._paged_kv_last_page_len_buf is last
    for batch in (r, Requests(kv_lens=(2, 3, 0, 300), seed=1)):
        wrapper.plan(*batch.table, *batch.sizes)
        assert wrapper._planned is not None
        assert wrapper._planned.plan.kv_indptr is indptr
        used = int(batch.table[0][-1])
        assert torch.equal(indptr, batch.table[0])
        assert torch.equal(indices[:used], batch.table[1][:used])
        assert torch.equal(last, batch.table[2])
        batch.expected().check(wrapper.run(batch.q, batch.cache()))


def test_workspace_size_and_reset() -> None:
    r = Requests()
    wrapper = planned(r)
    size, integers = wrapper.workspace_size(*r.table, *r.sizes)
    assert 0 <= size < 16 << 20
    assert 0 < integers < 16 << 20
    wrapper.reset_workspace_buffer(workspace(max(size, 1)), workspace(1))
    r.expected().check(wrapper.run(r.q, r.cache()))


@pytest.mark.parametrize("by_shapes", [False, True])
def test_plan_fits_in_a_workspace_of_the_size_for_it(by_shapes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page numbers that no request uses count where lengths are not read, as on a GPU."""
    if by_shapes:
        monkeypatch.setattr(Wrapper, "_sized_by_shapes", lambda *_: True)
    r = Requests()
    kv_indptr, kv_indices, last = r.table
    table = kv_indptr, torch.cat((kv_indices, kv_indices.new_zeros(1000))), last
    size, integers = planned(r).workspace_size(*table, *r.sizes, fixed_split_size=4)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(size))
    wrapper.plan(*table, *r.sizes, fixed_split_size=4)
    assert wrapper._plan_info is not None
    assert integers == 4 * sum(t.numel() for t in wrapper._plan_info)
    r.expected().check(wrapper.run(r.q, r.cache()))


def test_workspaces_of_any_dtype_and_offset() -> None:
    r = Requests()
    for memory in (workspace()[3:], workspace().view(torch.float32), workspace().view(torch.int16)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory)
        wrapper.plan(*r.table, *r.sizes)
        r.expected().check(wrapper.run(r.q, r.cache()))


def test_fast_decode_plan() -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    nonsense = torch.zeros_like(r.table[0])
    flashinfer.fast_decode_plan(wrapper, nonsense, *r.table[1:], *r.sizes, global_override_indptr_cpu=r.table[0].cpu())
    r.expected().check(wrapper.run(r.q, r.cache()))


def test_fast_decode_plan_keeps_the_dtype_of_the_output() -> None:
    r = Requests(dtype=torch.float8_e4m3fn)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*r.table, *r.sizes, q_data_type=r.dtype, o_data_type=torch.bfloat16)
    expected = wrapper.run(r.q, r.cache())
    assert expected.dtype == torch.bfloat16
    flashinfer.fast_decode_plan(wrapper, *r.table, *r.sizes, q_data_type=r.dtype)
    out = torch.empty_like(expected)
    assert torch.equal(wrapper.run(r.q, r.cache(), out=out), expected)
    wrapper = planned(r, o_data_type=None)  # an output whose dtype follows the query
    half = Requests()
    flashinfer.fast_decode_plan(wrapper, *half.table, *half.sizes, q_data_type=half.dtype)
    assert wrapper.run(half.q, half.cache()).dtype == half.dtype


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["NONE", "ROPE_LLAMA", "ALIBI"])
def test_single(kv_layout: str, mode: str) -> None:
    r = Requests(kv_lens=(77,))
    k, v = r.ragged(kv_layout)
    options: dict[str, Any] = {"window_left": 30, "logits_soft_cap": 4.0}
    out, lse = flashinfer.single_decode_with_kv_cache(
        r.q[0], k, v, kv_layout, mode, q_scale=2.0, k_scale=0.5, v_scale=3.0, return_lse=True, **options
    )
    assert out.shape == (4, 64)
    r.expected(v_scale=3.0, pos_encoding=mode, **options).check(out[None], lse[None])


def test_lse_of_a_request_without_keys() -> None:
    r = Requests(kv_lens=(0, 5))
    out, lse = planned(r).run(r.q, r.cache(), return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()


def test_plan_info_is_there_after_a_plan() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    assert wrapper._plan_info is None
    r = Requests()
    wrapper.plan(*r.table, *r.sizes)
    assert wrapper._plan_info
    assert all(isinstance(t, torch.Tensor) for t in wrapper._plan_info)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_a_workspace_at_any_address(offset: int) -> None:
    r = Requests()
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()[offset:])
    wrapper.plan(*r.table, *r.sizes)
    r.expected().check(wrapper.run(r.q, r.cache()))
    wrapper.reset_workspace_buffer(workspace()[offset + 1 :])
    r.expected().check(wrapper.run(r.q, r.cache()))


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_workspace_at_any_address_is_large_enough(offset: int) -> None:
    """Bytes before the first multiple of 4 do not count."""
    r = Requests()
    size, _ = planned(r).workspace_size(*r.table, *r.sizes, fixed_split_size=4)
    assert size > 0
    memory, skipped = workspace(size + 8)[offset:], -offset % 4
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory[: size + skipped])
    wrapper.plan(*r.table, *r.sizes, fixed_split_size=4)
    r.expected().check(wrapper.run(r.q, r.cache()))
    small = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory[: size + skipped - 1])
    with pytest.raises(
        errors.CapacityError, match=f"has {size + skipped - 1} bytes; expected at least {size + skipped}"
    ):
        small.plan(*r.table, *r.sizes, fixed_split_size=4)
