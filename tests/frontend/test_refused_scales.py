"""Complex scales, and those that require grad, are refused in the same words, eager and traced.

A conversion to float32 would drop a part of complex ones, and the op would name another argument, or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors, flash_attn

R = Requests((37, 5, 130, 1), kv_layout="HND")
FP8 = Requests((37, 5, 130, 1), kv_layout="HND", kv_dtype=torch.float8_e4m3fn)


def decode() -> Callable[..., Any]:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND")
    wrapper.plan(*R.table, *R.sizes, q_data_type=R.dtype)
    return lambda **scales: wrapper.run(R.q, R.cache(), **scales)


def ragged() -> Callable[..., Any]:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(R.kv_indptr, R.kv_indptr, *R.sizes[:3], o_data_type=torch.float8_e4m3fn)
    k, v = R.ragged()
    q = torch.zeros(k.shape[0], 4, 64, dtype=R.dtype, device=DEVICE)
    return lambda **scales: wrapper.run(q, k, v, **scales)


def block_tables() -> Callable[..., Any]:
    tables = R.block_tables(), R.seq_lens, 130
    call, scratch = flashinfer.trtllm_batch_decode_with_kv_cache, workspace()
    return lambda **scales: call(R.q, R.cache(), scratch, *tables, **{"bmm1_scale": 0.125, **scales})


def flash() -> Callable[..., Any]:
    k, v = (t.transpose(1, 2) for t in FP8.cache())
    tables = {"cache_seqlens": FP8.seq_lens, "block_table": FP8.block_tables(0).clamp(min=0)}
    return lambda **scales: flash_attn.flash_attn_with_kvcache(FP8.q[:, None], k, v, **tables, **scales)


CASES = {
    ("BatchDecodeWithPagedKVCacheWrapper.run", "q_scale"): decode,
    ("BatchDecodeWithPagedKVCacheWrapper.run", "v_scale"): decode,
    ("BatchPrefillWithRaggedKVCacheWrapper.run", "o_scale"): ragged,
    ("trtllm_batch_decode_with_kv_cache", "bmm1_scale"): block_tables,
    ("trtllm_batch_decode_with_kv_cache", "bmm1_scale_log2"): block_tables,
    ("flash_attn_with_kvcache", "k_descale"): flash,
}


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize(("function", "name"), CASES)
def test_complex_scales_are_refused(function: str, name: str, traced: bool) -> None:
    call = CASES[function, name]()
    call(**{name: torch.ones((), device=DEVICE)})
    if traced:
        call = torch.compile(call, fullgraph=True, backend="eager")
    message = f"{function}: {name} is complex64; expected a tensor of real numbers; convert {name}"
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        call(**{name: torch.ones((), dtype=torch.complex64, device=DEVICE)})
    assert traced or raised.type is errors.DTypeError


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize(("function", "name"), CASES)
def test_scales_that_require_grad_are_refused(function: str, name: str, traced: bool) -> None:
    call, scale = CASES[function, name](), torch.ones((), device=DEVICE, requires_grad=True)
    with torch.no_grad():
        call(**{name: scale})
    if traced:
        call = torch.compile(call, fullgraph=True, backend="eager")
    fix = "call under torch.no_grad()"
    message = f"{function}: {name} requires grad; expected inference, these ops have no backward; {fix}"
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        call(**{name: scale})
    assert traced or raised.type is errors.GradientError


def test_scales_of_an_fp8_query_that_require_grad() -> None:
    """Those of the values multiply the output, which the op does not see."""
    q, k, scale = (t.to(DEVICE) for t in (torch.ones(3, 4, 64), torch.ones(9, 2, 64), torch.ones(2)))
    q, k, scale = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), scale.requires_grad_()
    for name in ("scale_k", "scale_v"):
        with pytest.raises(errors.GradientError, match=f"single_prefill_with_kv_cache: {name} requires grad"):
            flashinfer.single_prefill_with_kv_cache(q, k, k, o_dtype=torch.float16, **{name: scale})
    dense = q[None], k[None], k[None]
    for name in ("k_descale", "v_descale"):
        with pytest.raises(errors.GradientError, match=f"flash_attn_func: {name} requires grad"):
            flash_attn.flash_attn_func(*dense, **{name: scale[None]})


def test_sinks_that_require_grad() -> None:
    sinks, one = torch.ones(4, device=DEVICE, requires_grad=True), torch.ones(1, 3, 4, 64, device=DEVICE)
    with pytest.raises(errors.GradientError, match="flash_attn_func: s_aux requires grad"):
        flash_attn.flash_attn_func(one, one, one, s_aux=sinks)
