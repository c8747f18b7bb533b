"""DeepSeek's functions, MLA by block tables and ragged prefill, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.wrapper_requests import DEVICE, Requests, ln, workspace
from torch import Tensor

import attn_ops as flashinfer
from attn_ops.errors import ArgumentError, ShapeError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EVEN = ((2, 40), (2, 5), (2, 20))


def call(m: Latents, query: Tensor, cache: Tensor, **options: Any) -> Any:
    tables = (128, *m.dims, m.block_tables, m.table[2], 130)
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(query, cache, workspace(), *tables, **options)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("head", [None, 1, 2], ids=["3-D cache", "head before places", "head after places"])
def test_mla_of_several_rows(head: int | None, as_tensor: bool) -> None:
    m, sinks = Latents(EVEN), torch.randn(3, device=DEVICE)
    cache = m.cache if head is None else m.cache.unsqueeze(head)
    bmm1, bmm2 = (torch.tensor(x, device=DEVICE) if as_tensor else x for x in (0.1, 2.0))
    out = torch.empty(3, 2, 3, 64, dtype=torch.float16, device=DEVICE)
    query = m.q.view(3, 2, 3, 80)
    got, lse = call(m, query, cache, out=out, bmm1_scale=bmm1, bmm2_scale=bmm2, sinks=[sinks], return_lse=True)
    assert got is out
    m.expected(sm_scale=0.1, causal=True, sinks=sinks).check(out.flatten(0, 1) / 2, lse)


def test_mla_of_ragged_rows_and_natural_lse() -> None:
    m = Latents()
    lse = torch.empty(26, 3, device=DEVICE)
    options = {"cum_seq_lens_q": m.qo_indptr, "max_q_len": 20, "bmm1_scale": 0.1, "return_lse_base": "basee"}
    out, natural = call(m, m.q, m.cache, lse=lse, return_lse=True, **options)
    assert natural is lse
    m.expected(sm_scale=0.1, causal=True).check(out, ln(lse))


def test_buffers_of_the_dimensions_of_the_query() -> None:
    """An LSE of requests and rows, and of the other name an output without rows."""
    m, lse = Latents(EVEN), torch.empty(3, 2, 3, device=DEVICE)
    out, got = call(m, m.q.view(3, 2, 3, 80), m.cache, bmm1_scale=0.1, lse=lse, return_lse=True)
    assert got is lse
    m.expected(sm_scale=0.1, causal=True).check(out.flatten(0, 1), lse.flatten(0, 1))
    call(m, m.q.view(3, 2, 3, 80), m.cache, bmm1_scale=0.1, lse=lse.zero_())
    m.expected(sm_scale=0.1, causal=True).check(out.flatten(0, 1), lse.flatten(0, 1))
    with pytest.raises(ShapeError, match=r"lse is \[3, 1, 3\]; expected \[6, 3\]"):
        call(m, m.q.view(3, 2, 3, 80), m.cache, lse=lse[:, :1])

    m = Latents(((1, 40), (1, 0), (1, 20)))
    flat = torch.empty(3, 3, 64, dtype=m.q.dtype, device=DEVICE)
    tables = (128, *m.dims, m.block_tables, m.table[2], 130)
    for buffer in (flat, flat[:, None]):
        got = flashinfer.xqa_batch_decode_with_kv_cache_mla(
            m.q[:, None], m.cache, workspace(), *tables, bmm1_scale=0.1, out=buffer
        )
        assert got is buffer
        m.expected(sm_scale=0.1).check(flat)
    with pytest.raises(ShapeError, match=r"out is \[2, 3, 64\]; expected \[3, 1, 3, 64\]"):
        flashinfer.xqa_batch_decode_with_kv_cache_mla(m.q[:, None], m.cache, workspace(), *tables, out=flat[:2])


def test_mla_of_two_tables() -> None:
    """Of keys and of values, which are one latent."""
    m = Latents(EVEN)
    tables = m.block_tables[:, None].expand(-1, 2, -1)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        m.q.view(3, 2, 3, 80),
        m.cache,
        workspace(),
        *(128, *m.dims, tables, m.table[2], 130),
        bmm1_scale=0.1,
        uses_shared_paged_kv_idx=False,
    )
    m.expected(sm_scale=0.1, causal=True).check(out.flatten(0, 1))


def test_xqa_mla_by_its_other_name() -> None:
    m = Latents(((1, 40), (1, 0), (1, 20)), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    tables = (128, *m.dims, m.block_tables, m.table[2], 130)
    out = flashinfer.xqa_batch_decode_with_kv_cache_mla(m.q[:, None], m.cache, workspace(), *tables, bmm1_scale=0.1)
    m.expected(sm_scale=0.1).check(out[:, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_ragged_prefill(causal: bool) -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), head_dims=(192, 128), dtype=torch.bfloat16)
    out = torch.empty(46, 4, 128, dtype=torch.bfloat16, device=DEVICE)
    tensors = (r.q, *r.ragged(), workspace(), r.seq_lens, 40, 130)
    got, lse = flashinfer.trtllm_ragged_attention_deepseek(
        *tensors, 0.1, 2.0, -1, 4, 50, r.qo_indptr, r.kv_indptr, False, causal, True, r.sinks, out=out
    )
    assert got is out
    r.expected(causal=causal, sm_scale=0.1, v_scale=2.0, window_left=50, sinks=True).check(out, lse)


def test_ragged_prefill_with_fp8_values_of_other_keys() -> None:
    r = Requests((70, 3, 130), (5, 3, 40), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    k, v = r.ragged()
    out = flashinfer.trtllm_ragged_attention_deepseek(
        *(r.q, k.bfloat16(), v, workspace(), r.seq_lens, 40, 130, 0.1, 2.0, None, 3, -1, r.qo_indptr, r.kv_indptr),
        *(None, True, False),
    )
    assert out.dtype == torch.bfloat16
    r.expected(sm_scale=0.1, v_scale=2.0, causal=True).check(out)


def test_bad_input() -> None:
    m = Latents(EVEN)
    query = m.q.view(3, 2, 3, 80)
    name = "trtllm_batch_decode_with_kv_cache_mla"
    with pytest.raises(
        ShapeError, match=rf"^{name}: query is \[6, 3, 80\]; expected \[batch, q_len, num_heads, 80\]; "
    ):
        call(m, m.q, m.cache)
    with pytest.raises(ShapeError, match=rf"^{name}: kv_cache is .*; expected 80 at the end; \w"):
        call(m, query, torch.cat((m.cache, m.cache), -1))
    with pytest.raises(ShapeError, match=rf"^{name}: out is \[3, 2, 3, 80\]; expected \[3, 2, 3, 64\]; \w"):
        call(m, query, m.cache, out=torch.empty_like(query))
    tables = (128, *m.dims, m.block_tables, None, 130)
    expected = r"expected \[batch, 2, max_pages_per_request\], of keys and of values; stack the two tables"
    with pytest.raises(ShapeError, match=rf"block_tables is \[3, 3\]; {expected}"):
        call(m, query, m.cache, uses_shared_paged_kv_idx=False)
    with pytest.raises(ArgumentError, match="seq_lens is missing"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(query, m.cache, workspace(), *tables)


def test_fp8_values_of_other_keys_in_a_wrapper() -> None:
    r = Requests((70, 3, 130), (5, 3, 40), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    k, v = r.ragged()
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], causal=True, q_data_type=torch.bfloat16)
    r.expected(v_scale=2.0, causal=True).check(wrapper.run(r.q, k.bfloat16(), v, v_scale=2.0))
