"""Merge functions, cascades, shared prefixes, POD and ``BatchAttention``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from helpers.oracle import Expected, merge
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace

import attn_ops as flashinfer
from attn_ops import errors, planner

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def states(rows: int, count: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    v, s = torch.randn(rows, count, 3, 16).to(DEVICE, dtype), torch.randn(rows, count, 3, device=DEVICE) * 5
    s[0] = -torch.inf
    return v, s


def test_merge_functions() -> None:
    v, s = states(6, 2)
    out, lse = merge(v, s)
    for got in (flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), flashinfer.merge_states(v, s)):
        torch.testing.assert_close(got[0].double().cpu(), out, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got[1].double().cpu(), lse, rtol=1e-5, atol=1e-5)
    for parts in (s[:, 0].double(), s[:, 1]), (s[:, 0], s[:, 1].double()):
        doubled = flashinfer.merge_state(v[:, 0], parts[0], v[:, 1], parts[1])
        torch.testing.assert_close(doubled[1].double().cpu(), lse, rtol=1e-5, atol=1e-5)
    here, sums, mask = v[:, 0].clone(), s[:, 0].clone(), torch.arange(6, device=DEVICE) % 2 == 0
    flashinfer.merge_state_in_place(here, sums, v[:, 1], s[:, 1], mask)
    torch.testing.assert_close(here[mask].double().cpu(), out[mask.cpu()], rtol=2e-3, atol=2e-3)
    assert torch.equal(here[~mask], v[~mask, 0])
    for every in (torch.zeros(1, dtype=torch.bool, device=DEVICE).expand(6), mask.repeat_interleave(2)[::2]):
        strided, sums = v[:, 0].clone(), s[:, 0].clone()
        flashinfer.merge_state_in_place(strided, sums, v[:, 1], s[:, 1], every)
        assert torch.equal(strided, here if every.any() else v[:, 0])
    with pytest.raises(errors.DTypeError, match="s is float16; expected float32"):
        flashinfer.merge_state_in_place(here, sums.half(), v[:, 1], s[:, 1])
    varying = flashinfer.variable_length_merge_states(
        v.flatten(0, 1), s.flatten(0, 1), torch.arange(0, 13, 2, device=DEVICE)
    )
    torch.testing.assert_close(varying[0].double().cpu(), out, rtol=2e-3, atol=2e-3)


def whole(q: torch.Tensor, parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]], rows: Any, **o: Any) -> Expected:
    """The oracle on keys that are the concatenation of each request's parts."""
    requests = []
    for b, part in enumerate(q.split(rows)):
        k, v = (torch.cat([side[b] for side in sides]) for sides in zip(*parts, strict=True))
        requests.append((part, k, v, None))
    return Expected.of(requests, **o)


def test_a_workspace_that_a_level_refuses_is_used_by_none() -> None:
    r, wrapper, first = Requests(), flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace()), workspace()
    table = r.qo_indptr, *r.table
    wrapper.reset_workspace_buffer(first)
    wrapper.plan(*([t, t] for t in table), *r.sizes)
    wrapper._levels[1].plan(*table, *r.sizes, fixed_split_size=1)  # its partial results need memory
    with pytest.raises(errors.CapacityError, match=r"^MultiLevel\w+.reset_workspace_buffer: .* has 16"):
        wrapper.reset_workspace_buffer(workspace(16))
    assert [level._workspace is first for level in wrapper._levels] == [True, True]


def test_decode_with_a_shared_prefix() -> None:
    r, shared = Requests(), Requests(kv_lens=(50,), seed=1)
    k, v = shared.ragged()
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(*r.table, *r.sizes)
    out = wrapper.forward(r.q, k, v, r.cache())
    expected = whole(r.q, [([k.cpu()] * 4, [v.cpu()] * 4), (r.batch.keys, r.batch.values)], r.rows)
    expected.spread *= 2  # states are rounded before they are merged
    expected.check(out)
    wrapper.end_forward()


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_with_a_shared_prefix(causal: bool) -> None:
    # A row sees the whole prefix. Every row here also sees a key of its own.
    r, shared = Requests((70, 5, 9, 130), (1, 5, 0, 40), dtype=torch.bfloat16), Requests(kv_lens=(50,), seed=1)
    k, v = (t.bfloat16() for t in shared.ragged())
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(r.qo_indptr, *r.table, *r.sizes)
    out = wrapper.forward(r.q, k, v, r.cache(), causal=causal, sm_scale=0.2)
    parts = [([k.cpu()] * 4, [v.cpu()] * 4), (r.batch.keys, r.batch.values)]
    expected = whole(r.q, parts, r.rows, causal=causal, sm_scale=0.2)
    expected.spread *= 2
    expected.check(out)


@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_cascade(use_cuda_graph: bool) -> None:
    """Four requests share a prefix on pages 4 to 6. Each then has one page of its own, 0 to 3."""
    cache = torch.randn(7, 2, 16, 2, 64).half().to(DEVICE)
    q = torch.randn(4, 4, 64).half().to(DEVICE)

    tables = (
        [int32(0, 4), int32(0, 1, 2, 3, 4)],
        [int32(0, 3), int32(0, 1, 2, 3, 4)],
        [int32(4, 5, 6), int32(0, 1, 2, 3)],
        [int32(16), int32(16, 2, 7, 1)],
    )
    buffers = [[torch.zeros_like(t) for t in level] for level in tables] if use_cuda_graph else []
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD", use_cuda_graph, *buffers)
    wrapper.plan(*tables, 4, 2, 64, 16, causal=True, q_data_type=torch.float16)
    out = wrapper.run(q, cache)
    tokens = cache[4:].transpose(1, 2).flatten(0, 1).cpu()  # [48, 2, 2, 64]
    own = [cache[b].transpose(0, 1)[:n].cpu() for b, n in enumerate((16, 2, 7, 1))]
    parts = [([t[:, 0] for t in both], [t[:, 1] for t in both]) for both in ([tokens] * 4, own)]
    expected = whole(q, parts, [1] * 4)
    expected.spread *= 2
    expected.check(out)


def test_every_level_of_a_cascade_uses_a_new_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "splits_per_head", lambda *_: 8)
    r = Requests((700, 300), (2, 2))
    arrays = [[t] * 2 for t in (r.qo_indptr, *r.table)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(16))
    with pytest.raises(errors.CapacityError, match="the float workspace has 16 bytes"):
        wrapper.plan(*arrays, *r.sizes)
    wrapper.reset_workspace_buffer(workspace(1 << 24))
    wrapper.plan(*arrays, *r.sizes)
    r.expected().check(wrapper.run(r.q, r.cache()))


FALLING, NEGATIVE, LONG = "falls from 9 to 0", r"indices\w*(\[1\])?\[9\] is -5", r"last_page_len\w*(\[1\])?\[3\] is 17"


def wrong(r: Requests, words: str) -> tuple[torch.Tensor, ...]:
    """The page table of ``r`` with a mistake in the last request, on the host, where plan() reads it."""
    indptr, indices, last = (t.cpu().clone() for t in r.table)
    if words == FALLING:
        indptr[-1] = 0
    elif words == NEGATIVE:
        indices[indptr[-1] - 1] = -5
    else:
        last[-1] = 17
    return indptr, indices, last


@pytest.mark.parametrize("words", [FALLING, NEGATIVE, LONG])
def test_a_failed_plan_keeps_the_earlier_one(words: str) -> None:
    r, other = Requests((37, 9, 70, 1)), Requests((2, 3, 4, 5), seed=1)
    bad = wrong(r, words)
    pod = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    pod.plan(r.qo_indptr, *r.table, r.qo_indptr, *r.table, *r.sizes)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    cascade.plan(*([a, a] for a in (r.qo_indptr, *r.table)), *r.sizes)
    before = *pod.run(r.q, r.cache(), r.q, r.cache()), cascade.run(r.q, r.cache())
    with pytest.raises(errors.PageTableError, match=words):
        pod.plan(other.qo_indptr, *other.table, r.qo_indptr.cpu(), *bad, *r.sizes)
    levels = zip((other.qo_indptr, *other.table), (r.qo_indptr.cpu(), *bad), strict=True)
    with pytest.raises(errors.PageTableError, match=words):
        cascade.plan(*(list(level) for level in levels), *r.sizes)
    after = *pod.run(r.q, r.cache(), r.q, r.cache()), cascade.run(r.q, r.cache())
    assert all(map(torch.equal, before, after))
    pod.plan(other.qo_indptr, *other.table, r.qo_indptr, *r.table, *r.sizes)
    other.expected().check(pod.run(other.q, other.cache(), r.q, r.cache())[0])


@pytest.mark.parametrize("return_lse", [False, True])
def test_pod(return_lse: bool) -> None:
    p, d = Requests(kv_lens=(50,), qo_lens=(12,)), Requests(seed=1)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*d.table, *d.sizes, sm_scale=0.2)
    first, second = wrapper.run(
        p.q,
        *p.ragged(),
        d.q,
        d.cache(),
        causal_p=True,
        window_left_d=9,
        k_scale=0.5,
        v_scale=2.0,
        return_lse_p=return_lse,
        return_lse_d=return_lse,
    )
    first, second = (first, second) if return_lse else ((first,), (second,))
    p.expected(causal=True).check(*first)
    d.expected(sm_scale=0.2, window_left=9, k_scale=0.5, v_scale=2.0).check(*second)


def test_pod_with_more_arguments_by_position() -> None:
    """FlashInfer ignores what follows ``enable_pdl``."""
    p, d = Requests(kv_lens=(50,), qo_lens=(12,)), Requests(seed=1)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*d.table, *d.sizes)
    defaults = [x.default for x in inspect.signature(wrapper.run).parameters.values() if x.kind != x.VAR_POSITIONAL]
    first, second = wrapper.run(p.q, *p.ragged(), d.q, d.cache(), *defaults[5:], None, 0.125)
    p.expected().check(first)
    d.expected().check(second)


def test_pod_without_page_dimension() -> None:
    p, d = Requests(kv_lens=(50,), qo_lens=(12,)), Requests(seed=1, page_size=1)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*d.table, *d.sizes)
    cache = tuple(t.squeeze(1) for t in d.cache())
    for kv_layout in ("NHD", "HND"):
        d.expected().check(wrapper.run(p.q, *p.ragged(), d.q, cache, kv_layout_d=kv_layout)[1])


@pytest.mark.parametrize("masked", [False, True])
def test_batch_pod(masked: bool) -> None:
    p, d = Requests((70, 3, 9, 130), (1, 5, 0, 40)), Requests(seed=1)
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(p.qo_indptr, *p.table, d.qo_indptr, *d.table, *d.sizes)
    options = {"custom_mask_p": p.mask} if masked else {"causal_p": True}
    scales = {"q_scale": 0.5, "v_scale": 2.0}
    first, second = wrapper.run(p.q, p.cache(), d.q, d.cache(), **options, **scales, return_lse=True)
    p.expected(causal=not masked, masked=masked).check(*first)
    d.expected(sm_scale=0.5 / 8, v_scale=2.0).check(*second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_attention(dtype: torch.dtype) -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), head_dims=(192, 128), kv_layout="HND", dtype=dtype)
    wrapper = flashinfer.BatchAttention("HND", DEVICE)
    wrapper.plan(r.qo_indptr, *r.table[:2], r.seq_lens, *r.heads, 192, 128, 16, causal=True, logits_soft_cap=3.0)
    expected = r.expected(causal=True, logits_soft_cap=3.0)
    out, lse = (torch.empty(*r.q.shape[:2], 128, dtype=dtype, device=DEVICE), torch.empty(r.q.shape[:2], device=DEVICE))
    got = wrapper.run(r.q, r.cache(), out, lse)
    assert got[0] is out
    expected.check(*got)
    scales = [torch.tensor(x, device=DEVICE) for x in (0.5, 2.0)]
    capped = r.expected(causal=True, logits_soft_cap=1.0, k_scale=0.5, v_scale=2.0)
    capped.check(*wrapper.run(r.q, r.cache(), None, None, *scales, logits_soft_cap=1.0))


def test_attention_with_a_sink() -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), head_dims=(128, 128), dtype=torch.bfloat16)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), window_left=20)
    wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True)
    expected = r.expected(causal=True, window_left=20, sinks=True, sm_scale=0.2)
    expected.check(*wrapper.run(r.q, r.cache(), r.sinks, 0.2, return_lse=True))
    expected.check(*wrapper.run_return_lse(r.q, r.cache(), r.sinks, 0.2))
    r.expected(causal=True, window_left=20, sinks=True).check(wrapper.run(r.q, r.cache(), sinks=r.sinks))


@pytest.mark.parametrize("name", ["head_dim_qk", "head_dim"])
def test_values_of_attention_with_a_sink_are_as_wide_as_the_keys_of_plan(name: str) -> None:
    """The constructor's head dimension of values is that of its own head dimension of keys."""
    r = Requests((70, 3), (1, 3), head_dims=(64, 64))
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(), q_data_type=r.dtype, kv_data_type=r.dtype)
    wrapper.plan(r.qo_indptr, *r.table, *r.heads, page_size=16, causal=True, **{name: 64})
    r.expected(causal=True, sinks=True, sm_scale=0.2).check(wrapper.run(r.q, r.cache(), r.sinks, 0.2))
    r = Requests((70, 3), (1, 3), head_dims=(192, 128))
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace(), q_data_type=r.dtype, kv_data_type=r.dtype, head_dim_qk=192
    )
    wrapper.plan(r.qo_indptr, *r.table, *r.heads, page_size=16, causal=True, **{name: 192})
    r.expected(causal=True, sinks=True, sm_scale=0.2).check(wrapper.run(r.q, r.cache(), r.sinks, 0.2))
