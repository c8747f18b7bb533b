"""Wrappers and planners on a GPU whose methods replay the launches of an earlier call, on other tensors and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_ops
from attn_ops.eager.extension import is_available, unavailable_reason
from attn_ops.frontend.call import AttentionCall

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

HEADS, PAGE, PAGES, BATCH = (8, 2, 64), 16, 40, 4
LENGTHS = ((33, 1, 160, 7), (5, 90, 16, 48), (150, 150, 20, 2))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _table(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.tensor(lengths)
    pages = (tokens + PAGE - 1) // PAGE
    indptr = torch.cat((torch.zeros(1, dtype=torch.long), pages.cumsum(0)))
    indices, last = torch.randperm(PAGES)[: int(pages.sum())], (tokens - 1) % PAGE + 1
    return tuple(t.int().cuda() for t in (indptr, indices, last))  # type: ignore[return-value]


def _workspace() -> Tensor:
    return torch.empty(64 << 20, dtype=torch.uint8, device="cuda")


def _decode() -> tuple[Any, Callable[..., Any], Callable[[], Any]]:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(_workspace())

    def plan(lengths: tuple[int, ...]) -> None:
        wrapper.plan(*_table(lengths), *HEADS, PAGE, q_data_type=torch.bfloat16)

    return wrapper, plan, lambda: (_random(BATCH, 8, 64), _random(PAGES, 2, PAGE, 2, 64))


def _prefill() -> tuple[Any, Callable[..., Any], Callable[[], Any]]:
    wrapper = attn_ops.BatchPrefillWithPagedKVCacheWrapper(_workspace())

    def plan(lengths: tuple[int, ...]) -> None:
        qo_indptr = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda") * 3
        wrapper.plan(qo_indptr, *_table(lengths), *HEADS, PAGE, q_data_type=torch.bfloat16)

    caches = (PAGES, PAGE, 2, 64)
    return wrapper, plan, lambda: (_random(3 * BATCH, 8, 64), (_random(*caches), _random(*caches)))


def _ragged() -> tuple[Any, Callable[..., Any], Callable[[], Any]]:
    wrapper = attn_ops.BatchPrefillWithRaggedKVCacheWrapper(_workspace())
    indptr = torch.tensor([0, 40, 41, 100, 128], dtype=torch.int32, device="cuda")

    def plan(_: tuple[int, ...]) -> None:
        wrapper.plan(indptr, indptr, *HEADS, causal=True, q_data_type=torch.bfloat16)

    return wrapper, plan, lambda: (_random(128, 8, 64), _random(128, 2, 64), _random(128, 2, 64))


def _mla() -> tuple[Any, Callable[..., Any], Callable[[], Any]]:
    wrapper = attn_ops.mla.BatchMLAPagedAttentionWrapper(_workspace())

    def plan(lengths: tuple[int, ...]) -> None:
        indptr, indices, _ = _table(lengths)
        qo_indptr = torch.arange(BATCH + 1, dtype=torch.int32, device="cuda")
        tokens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        dtypes = (torch.bfloat16, torch.bfloat16)
        wrapper.plan(qo_indptr, indptr, indices, tokens, 16, 512, 64, PAGE, False, 0.1, *dtypes)

    def tensors() -> Any:
        return _random(BATCH, 16, 512), _random(BATCH, 16, 64), _random(PAGES, PAGE, 512), _random(PAGES, PAGE, 64)

    return wrapper, plan, tensors


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each run that was no replay."""
    assert is_available(), unavailable_reason
    executed: list[str] = []
    resolve = AttentionCall._resolve

    def counted(self: AttentionCall) -> Any:
        executed.append(self.where)
        return resolve(self)

    monkeypatch.setattr(AttentionCall, "_resolve", counted)
    return executed


@pytest.mark.parametrize("make", [_decode, _prefill, _ragged, _mla])
@pytest.mark.parametrize("return_lse", [False, True])
def test_runs_are_replayed_on_other_tensors_and_batches(
    make: Callable[[], Any], return_lse: bool, run: list[str]
) -> None:
    wrapper, plan, tensors = make()
    plan(LENGTHS[0])
    for _ in range(2):
        wrapper.run(*tensors(), return_lse=return_lse)
    for lengths in LENGTHS[:1] if make is _ragged else LENGTHS:
        plan(lengths)
        args = tensors()
        before = len(run)
        repeated = wrapper.run(*args, return_lse=return_lse)
        assert len(run) == before
        with torch.profiler.profile():
            made = wrapper.run(*args, return_lse=return_lse)
        assert len(run) == before + 1
        for a, b in zip(repeated, made, strict=True) if return_lse else [(repeated, made)]:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("make", [_decode, _prefill, _ragged, _mla])
def test_buffers_are_filled(make: Callable[[], Any], run: list[str]) -> None:
    wrapper, plan, tensors = make()
    plan(LENGTHS[0])
    for i in range(3):
        args = tensors()
        expected, expected_lse = wrapper.run(*args, return_lse=True)
        out, lse = torch.full_like(expected, torch.nan), torch.full_like(expected_lse, torch.nan)
        before = len(run)
        results = wrapper.run(*args, out=out, lse=lse, return_lse=True)
        assert results[0] is out
        assert results[1] is lse
        assert len(run) == before + (i == 0)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)


def test_a_query_is_its_own_buffer() -> None:
    wrapper, plan, tensors = _decode()
    plan(LENGTHS[0])
    for _ in range(3):
        q, cache = tensors()
        expected = wrapper.run(q, cache)
        assert wrapper.run(q, cache, out=q) is q
        torch.testing.assert_close(q, expected, rtol=0, atol=0)


def test_a_plan_with_other_options_is_not_replayed(run: list[str]) -> None:
    wrapper, _, tensors = _decode()
    args, results = tensors(), []
    table = _table(LENGTHS[0])
    for sm_scale in (0.1, 0.5, 0.1):
        wrapper.plan(*table, *HEADS, PAGE, q_data_type=torch.bfloat16, sm_scale=sm_scale)
        results.append([wrapper.run(*args) for _ in range(3)])
    assert len(run) == 3
    for first, *others in results:
        for other in others:
            assert torch.equal(first, other)
    assert torch.equal(results[0][0], results[2][0])
    assert not torch.equal(results[0][0], results[1][0])


def test_a_replayed_run_is_captured_in_a_graph() -> None:
    wrapper, plan, tensors = _decode()
    plan(LENGTHS[0])
    args = tensors()
    wrapper.run(*args)
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append(wrapper.run(*args))
    plan(LENGTHS[1])
    expected = wrapper.run(*args)
    for graph, out in zip(graphs, outs, strict=True):
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_plans_are_replayed(dtype: torch.dtype) -> None:
    planner, other = (
        attn_ops.DecodePlanner(BATCH, PAGES, page_size=PAGE, num_qo_heads=8, num_kv_heads=2, head_dim=64, device="cuda")
        for _ in range(2)
    )
    for lengths in LENGTHS * 2:
        table = [t.to(dtype) for t in _table(lengths)]
        plan = planner.plan(*table)
        with torch.profiler.profile():
            expected = other.plan(*table)
        for name, a, b in zip(plan._fields, plan, expected, strict=True):
            if name != "split_counters":
                assert torch.equal(a, b), name
