"""The functions of ``attn_ops.flash_attn`` without a cache, against the oracle under FlashAttention's definitions."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from helpers.flash_requests import check_dense, check_varlen, dense, expected
from helpers.fp8_products import tolerance_of_fp8_queries
from helpers.wrapper_requests import DEVICE, Requests

from attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)

OPTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, -1)},
    "window of one": {"window_size": (0, 0)},
    "right side of 0": {"window_size": (-1, 0)},
    "causal window": {"causal": True, "window_size": (5, -1)},
    "causal limits the right side": {"causal": True, "window_size": (5, 7)},
    "right window": {"window_size": (-1, 4)},
    "both windows": {"window_size": (3, 6)},
    "windows as a tensor": {"window_size": torch.tensor([3, 6])},
    "unlimited as None": {"window_size": (None, None)},
    "scale": {"softmax_scale": 0.3},
    "softcap": {"softcap": 2.0, "causal": True},
    "sinks": {"s_aux": SINKS, "causal": True},
}


@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (1, 30), (20, 33), (12, 5)], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str, batch: int, q_len: int, kv_len: int) -> None:
    q, k, v = dense(batch, q_len, kv_len)
    want = expected(list(zip(q, k, v, strict=True)), **OPTIONS[name])
    out, lse = flash_attn_func(q, k, v, **OPTIONS[name], return_softmax_lse=True)
    assert out.shape == q.shape
    assert lse.dtype == torch.float32
    check_dense(want, out, lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("more", [{"transposed": True}, {"head_dims": (192, 128)}, {"heads": (6, 2)}], ids=str)
def test_dense_tensors(more: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = dense(2, 7, 19, dtype=dtype, **more)
    out = flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    check_dense(expected(list(zip(q, k, v, strict=True)), causal=True), out)


def test_positional_arguments_are_those_of_flash_attention_2() -> None:
    q, k, v = dense(2, 6, 6)
    want = expected(list(zip(q, k, v, strict=True)), softmax_scale=0.2, causal=True, window_size=(3, 0), softcap=4.0)
    check_dense(want, flash_attn_func(q, k, v, 0.0, 0.2, True, (3, 0), 4.0, None, False))


def test_rows_without_keys() -> None:
    q, k, v = dense(2, 6, 2)
    out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    assert not out[:, :4].any()
    assert (lse[..., :4] == -math.inf).all()
    out, lse = flash_attn_func(q, k, v, causal=True, s_aux=SINKS, return_softmax_lse=True)
    assert not out[:, :4].any()
    torch.testing.assert_close(lse[..., :4], SINKS[None, :, None].expand(2, 4, 4))


@pytest.mark.parametrize("empty", [(2, 0, 5), (2, 5, 0), (0, 5, 5)], ids=["no rows", "no keys", "no batch"])
def test_empty_tensors(empty: tuple[int, int, int]) -> None:
    q, k, v = dense(*empty)
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert not out.any()
    assert (lse == -math.inf).all()


def test_out_is_filled() -> None:
    q, k, v = dense(2, 6, 9)
    buffer = torch.empty_like(q)
    assert flash_attn_func(q, k, v, out=buffer).data_ptr() == buffer.data_ptr()
    check_dense(expected(list(zip(q, k, v, strict=True))), buffer)


def test_return_attn_probs_gives_the_lse_as_flash_attention_2_does() -> None:
    q, k, v = dense(2, 6, 9)
    want = expected(list(zip(q, k, v, strict=True)), causal=True, softcap=2.0)
    for _ in range(3):  # the first call, and repetitions
        out, lse, probabilities = flash_attn_func(q, k, v, 0.0, None, True, (-1, -1), 2.0, None, False, True)
        assert probabilities is None
        check_dense(want, out, lse)
    compiled = torch.compile(
        functools.partial(flash_attn_func, causal=True, softcap=2.0), fullgraph=True, backend="eager"
    )
    check_dense(want, *compiled(q, k, v, return_attn_probs=True)[:2])
    check_dense(
        want, *flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True, return_softmax_lse=True)[:2]
    )


@pytest.mark.parametrize("form", ["ragged", "pages", "used rows", "packed"])
def test_return_attn_probs_of_cumulative_lengths(form: str) -> None:
    r = Requests((9, 3, 21), (4, 1, 7))
    want = expected(list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True)), causal=True)
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    if form == "packed":
        kv = torch.stack(r.ragged(), 1)
        result = flash_attn_varlen_kvpacked_func(r.q, kv, r.qo_indptr, r.kv_indptr, 7, 21, **options)
    else:
        tensors = r.cache() if form == "pages" else r.ragged()
        if form == "pages":
            options["block_table"] = r.block_tables()
        if form == "used rows":
            options["seqused_q"] = r.qo_indptr.diff()
        result = flash_attn_varlen_func(r.q, *tensors, r.qo_indptr, r.kv_indptr, 7, 21, **options)
    out, lse, probabilities = result
    assert probabilities is None
    check_varlen(want, out, lse)


def test_sinks_of_other_dtypes_and_names() -> None:
    q, k, v = dense(2, 6, 9)
    want = expected(list(zip(q, k, v, strict=True)), s_aux=SINKS)
    check_dense(want, flash_attn_func(q, k, v, learnable_sink=SINKS.bfloat16()))


def test_fp8_with_one_scale() -> None:
    q, k, v = dense(2, 6, 9)
    keys, values = (t.to(torch.float8_e4m3fn) for t in (k, v))
    want = expected([(a, b.double() * 0.5, c.double() * 2.0) for a, b, c in zip(q, keys, values, strict=True)])
    scale = torch.tensor(0.5, device=DEVICE).expand(2, 2)
    check_dense(want, flash_attn_func(q, keys, values, k_descale=scale, v_descale=2.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_an_fp8_query_gives_bfloat16(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in dense(2, 6, 9)]
    want = expected([tuple(t.double() for t in request) for request in zip(*tensors, strict=True)], causal=True)
    tolerance = tolerance_of_fp8_queries() if dtype == torch.float8_e4m3fn else {}
    out, lse = flash_attn_func(*tensors, causal=True, return_softmax_lse=True)
    assert out.dtype == torch.bfloat16
    check_dense(want, out, lse, **tolerance)
    assert flash_attn_func(*(t[:1] for t in tensors), causal=True).dtype == torch.bfloat16
    q, k, v = (t.flatten(0, 1) for t in tensors)
    q_lens, kv_lens = torch.tensor([0, 6, 12], device=DEVICE), torch.tensor([0, 9, 18], device=DEVICE)
    varlen = flash_attn_varlen_func(q, k, v, q_lens, kv_lens, 6, 9, causal=True)
    assert varlen.dtype == torch.bfloat16
    check_varlen(want, varlen, **tolerance)
    cached = flash_attn_with_kvcache(*tensors, causal=True)
    assert cached.dtype == torch.bfloat16
    check_dense(want, cached, **tolerance)
    buffer = torch.empty(2, 6, 4, 64, device=DEVICE, dtype=torch.float16)
    assert flash_attn_func(*tensors, causal=True, out=buffer).data_ptr() == buffer.data_ptr()
    check_dense(want, buffer, **tolerance)


def test_packed() -> None:
    q, k, v = dense(2, 9, 9, heads=(4, 4))
    want = expected(list(zip(q, k, v, strict=True)), causal=True)
    check_dense(want, flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), causal=True))
    check_dense(want, flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, None, True))
    q, k, v = (t[0] for t in (q, k, v))
    lens = torch.tensor([0, 4, 9], device=DEVICE)
    want = expected([(q[:4], k[:4], v[:4]), (q[4:], k[4:], v[4:])], causal=True)
    check_varlen(want, flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), lens, 5, causal=True))
    kv = torch.stack((k, v), 1)
    check_varlen(want, flash_attn_varlen_kvpacked_func(q, kv, lens, lens, 5, 5, 0.0, None, True))


def test_packed_by_heads() -> None:
    """Query heads, then fewer heads of keys and of values, in one dimension."""
    q, k, v = dense(2, 9, 9, heads=(6, 2))
    want = expected(list(zip(q, k, v, strict=True)), causal=True)
    check_dense(want, flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), causal=True, num_heads_q=6))
    stacked = torch.stack((q[:, :, :2], k, v), 2)
    want = expected(list(zip(q[:, :, :2], k, v, strict=True)))
    check_dense(want, flash_attn_qkvpacked_func(stacked, num_heads_q=2))


RAGGED = (33, 3, 9, 0, 70), (4, 5, 0, 2, 40)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_varlen(name: str, index: torch.dtype) -> None:
    r = Requests(*RAGGED)
    requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
    cumulative = r.qo_indptr.to(index), r.kv_indptr.to(index)
    out, lse = flash_attn_varlen_func(r.q, *r.ragged(), *cumulative, 40, 70, **OPTIONS[name], return_softmax_lse=True)
    check_varlen(expected(requests, **OPTIONS[name]), out, lse)


@pytest.mark.parametrize("name", OPTIONS)
def test_varlen_over_pages(name: str) -> None:
    r = Requests(*RAGGED)
    requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
    want = expected(requests, **OPTIONS[name])
    given = {"block_table": r.block_tables(), "return_softmax_lse": True, **OPTIONS[name]}
    out, lse = flash_attn_varlen_func(r.q, *r.cache(), r.qo_indptr, r.kv_indptr, 40, 70, **given)
    check_varlen(want, out, lse)
    out, lse = flash_attn_varlen_func(r.q, *r.cache(), r.qo_indptr, None, 40, 70, seqused_k=r.seq_lens, **given)
    check_varlen(want, out, lse)


def test_rows_beyond_the_last_sequence_give_zeros() -> None:
    r = Requests((33, 9), (4, 3))
    requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
    q = torch.cat((r.q, torch.ones_like(r.q[:3])))
    out, lse = flash_attn_varlen_func(q, *r.ragged(), r.qo_indptr, r.kv_indptr, 4, 33, return_softmax_lse=True)
    check_varlen(expected(requests, padding=3), out, lse)
