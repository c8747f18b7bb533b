"""plan() like the last one, for tensors of the same shapes, only writes the plan, and plans what a new one would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors
from attn_ops.frontend import prepared_plan
from attn_ops.frontend.base import Wrapper
from attn_ops.plan.page_table import PageTable

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BATCHES = [Requests(kv_lens, num_pages=70, seed=i) for i, kv_lens in enumerate(((37, 0, 130, 1), (16, 33, 100, 7)))]
"""As many requests and pages, with other lengths and page numbers."""


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page tables are not read, as on a GPU."""
    if DEVICE == "cpu":
        monkeypatch.setattr(PageTable, "measured", lambda table, page_size: table.bounded())
        monkeypatch.setattr(prepared_plan, "seen", lambda t: False)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the wrapper for each plan that is not a repetition."""
    names: list[str] = []
    prepare = Wrapper._prepare

    def counted(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        names.append(type(self).__name__)
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(Wrapper, "_prepare", counted)
    return names


def _table(r: Requests) -> tuple[torch.Tensor, ...]:
    indptr, indices, last_page_len = r.table
    return indptr, indices[:13], last_page_len


def _plan(wrapper: Any, r: Requests, **options: Any) -> None:
    wrapper.plan(*_table(r), *r.sizes, **{"q_data_type": r.dtype, **options})


def _check(wrapper: Any, r: Requests, **options: Any) -> None:
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True)
    r.expected(**options).check(out, lse)


def _sizes(r: Requests) -> dict[str, Any]:
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
    return {**dict(zip(names, r.sizes, strict=True)), "q_data_type": r.dtype}


def _decode() -> Any:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())


def test_other_contents(prepared: list[str]) -> None:
    wrapper = _decode()
    for r in (*BATCHES, *BATCHES):
        _plan(wrapper, r)
        _check(wrapper, r)
    assert len(prepared) == 1


def test_fast_decode_plan(prepared: list[str]) -> None:
    wrapper = _decode()
    for r in (*BATCHES, *BATCHES):
        flashinfer.fast_decode_plan(wrapper, *_table(r), *r.sizes, q_data_type=r.dtype)
        _check(wrapper, r)
    assert len(prepared) == 1


def test_tables_by_name(prepared: list[str]) -> None:
    wrapper, names = _decode(), ("last_page_len", "indices", "indptr")
    for r in BATCHES:
        wrapper.plan(**dict(zip(names, _table(r)[::-1], strict=True)), **_sizes(r))
        _check(wrapper, r)
    assert len(prepared) == 1


def test_another_option_is_another_plan(prepared: list[str]) -> None:
    wrapper = _decode()
    for window_left in (-1, 5, -1):
        _plan(wrapper, BATCHES[0], window_left=window_left)
        _check(wrapper, BATCHES[0], window_left=window_left)
    _plan(wrapper, BATCHES[0], logits_soft_cap=2.0)
    _check(wrapper, BATCHES[0], logits_soft_cap=2.0)
    assert len(prepared) == 4


def test_another_size_between(prepared: list[str]) -> None:
    wrapper, large = _decode(), Requests((300, 500, 700, 20, 0, 900), seed=3)
    for r in (BATCHES[0], large, BATCHES[1]):
        wrapper.plan(*(r.table if r is large else _table(r)), *r.sizes, q_data_type=r.dtype)
        _check(wrapper, r)
    assert len(prepared) == 3


def _reset_workspace(wrapper: Any) -> None:
    old = wrapper._workspace
    wrapper.reset_workspace_buffer(workspace())
    old.fill_(0)


def _any_dtypes(wrapper: Any) -> None:
    wrapper.dtypes_follow_query()


@pytest.mark.parametrize("change", [_reset_workspace, _any_dtypes])
def test_a_change_between(change: Callable[[Any], None]) -> None:
    wrapper = _decode()
    _plan(wrapper, BATCHES[0])
    change(wrapper)
    _plan(wrapper, BATCHES[1])
    _check(wrapper, BATCHES[1])
    assert wrapper._planned.workspace.data_ptr() == wrapper._workspace.data_ptr()
    with pytest.raises(errors.DTypeError, match=r"q dtype is bfloat16; expected float16 as planned"):
        wrapper.run(BATCHES[1].q.bfloat16(), BATCHES[1].cache())


def test_cuda_graph_mode_copies_to_its_buffers() -> None:
    buffers = [torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (5, 40, 4)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    for r in BATCHES:
        _plan(wrapper, r)
        _check(wrapper, r)
        for buffer, t in zip(buffers, _table(r), strict=True):
            torch.testing.assert_close(buffer[: t.shape[0]], t.to(DEVICE), rtol=0, atol=0)


def test_a_wrong_table_is_refused_as_before() -> None:
    wrapper, (indptr, indices, last_page_len) = _decode(), _table(BATCHES[0])
    _plan(wrapper, BATCHES[0])
    with pytest.raises(errors.DTypeError, match=r"indptr is float32"):
        wrapper.plan(indptr.float(), indices, last_page_len, *BATCHES[0].sizes)
    with pytest.raises(errors.ShapeError, match=r"has length 3; expected 4 as indptr has"):
        wrapper.plan(indptr, indices, last_page_len[:3], *BATCHES[0].sizes)
    _check(wrapper, BATCHES[0])


def test_one_tensor_as_two_arguments() -> None:
    """Which of the two arguments a table of the next batch comes from is not known by that tensor."""
    wrapper, r = _decode(), Requests((16, 9, 1, 7), num_pages=70, seed=4)
    indptr, indices, last_page_len = r.table
    ones = torch.ones_like(last_page_len)
    wrapper.plan(indptr, ones, last_page_len=ones, **_sizes(r))
    wrapper.plan(indptr, indices[:4], last_page_len=last_page_len, **_sizes(r))
    _check(wrapper, r)


def test_subclasses_prepare_their_plans() -> None:
    class Windowed(flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def prepare_plan(self, *args: Any, **kwargs: Any) -> Any:
            return super().prepare_plan(*args, **{**kwargs, "window_left": 5})

    wrapper = Windowed(workspace())
    for r in BATCHES:
        _plan(wrapper, r)
        _check(wrapper, r, window_left=5)


def test_plans_in_and_outside_of_inference_mode(prepared: list[str]) -> None:
    wrapper = _decode()
    with torch.inference_mode():
        _plan(wrapper, BATCHES[0])
    _plan(wrapper, BATCHES[1])
    assert not wrapper._planned.rows.is_inference()
    _check(wrapper, BATCHES[1])
    assert len(prepared) == 2


def test_neither_the_last_table_nor_an_old_workspace_is_kept() -> None:
    old = workspace()
    freed, wrapper = weakref.ref(old), flashinfer.BatchDecodeWithPagedKVCacheWrapper(old)
    _plan(wrapper, BATCHES[0])
    assert not [x for x in wrapper._repeatable if isinstance(x, torch.Tensor)]
    wrapper.reset_workspace_buffer(workspace())
    del old
    assert freed() is None
