"""The examples of FlashInfer's documentation, on the device at hand and with fewer layers.

Results are compared with the oracle on a few rows.

Two mistakes of the examples are corrected: a page table with pages that the cache does not have, and a list of outputs
that is never filled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, int32
from torch import Tensor

import attn_ops as flashinfer

LAYERS = 2


def half(*shape: int) -> Tensor:
    return torch.randn(*shape).half().to(DEVICE)


@pytest.fixture(scope="module")
def workspace_buffer() -> Tensor:
    return torch.zeros(128 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)


PAGE_INDPTR = [0, 17, 29, 44, 48, 66, 100, 128]
LAST_PAGE_LEN = [1, 7, 14, 4, 3, 1, 16]
QO_INDPTR = [0, 33, 44, 55, 66, 77, 88, 100]


def causal_masks(qo_len: list[int], kv_len: list[int]) -> Tensor:
    """Bottom-right triangles, flattened and concatenated."""
    masks = [
        torch.tril(torch.full((n, m), True, device=DEVICE), diagonal=m - n) for n, m in zip(qo_len, kv_len, strict=True)
    ]
    return torch.cat([mask.flatten() for mask in masks])


def tokens(cache: Tensor, pages: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values ``[length, heads, head_dim]`` in these pages of an NHD cache ``[pages, 2, ...]``."""
    k, v = (cache[pages, i].flatten(0, 1)[:length] for i in (0, 1))
    return k, v


def rotated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Expected:
    """With ROPE_LLAMA. Kernels round rotated queries and keys to the dtype of the query."""
    expected = Expected.of([(q, k, v)], pos_encoding="ROPE_LLAMA", **options)
    if DEVICE == "cuda":
        expected.reach *= 64
    return expected


def test_single_decode() -> None:
    k, v, q = half(2048, 32, 128), half(2048, 32, 128), half(32, 128)
    o = flashinfer.single_decode_with_kv_cache(q, k, v)
    Expected.of([(q[None], k, v)]).check(o[None])
    o_rope = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    rotated(q[None], k, v).check(o_rope[None])
    assert not torch.equal(o, o_rope)


def test_batch_decode(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, kv_layout="NHD")
    wrapper.plan(
        int32(*PAGE_INDPTR),
        torch.arange(128).int().to(DEVICE),
        int32(*LAST_PAGE_LEN),
        64,
        8,
        128,
        16,
        pos_encoding_mode="NONE",
        data_type=torch.float16,
    )
    for _ in range(LAYERS):
        q, cache = half(7, 64, 128), half(128, 2, 16, 8, 128)
        out = wrapper.run(q, cache)
        assert out.shape == (7, 64, 128)
        for b in (0, 6):
            first, end = PAGE_INDPTR[b : b + 2]
            length = 16 * (end - first - 1) + LAST_PAGE_LEN[b]
            Expected.of([(q[b, None], *tokens(cache, slice(first, end), length))]).check(out[b, None])


def test_xqa() -> None:
    batch_size, page_size, max_seq_len = 32, 16, 2048
    q, cache = half(batch_size, 32, 128), half(128, 2, page_size, 8, 128)
    page_table = torch.randint(0, 128, (batch_size, max_seq_len // page_size + 1)).int().to(DEVICE)
    seq_lens = torch.randint(100, max_seq_len, (batch_size,)).int().to(DEVICE)
    output = flashinfer.xqa(q, cache, cache.clone(), page_table, seq_lens, head_dim=128, page_size=page_size)
    assert output.shape == q.shape
    for b in (0, 31):
        Expected.of([(q[b, None], *tokens(cache, page_table[b].long(), int(seq_lens[b])))]).check(output[b, None])


def test_single_prefill() -> None:
    k, v, q = half(2048, 32, 128), half(2048, 32, 128), half(256, 32, 128)
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=False)
    assert o.shape == q.shape
    Expected.of([(q[:2], k, v)]).check(o[:2])
    append = half(128, 32, 128)
    o = flashinfer.single_prefill_with_kv_cache(append, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA")
    assert o.shape == append.shape
    rotated(append[-2:], k, v, causal=True).check(o[-2:])
    o, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert o.shape == q.shape
    assert lse.shape == (256, 32)
    Expected.of([(q[-2:], k, v)], causal=True).check(o[-2:], lse[-2:])


def test_batch_prefill(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, kv_layout="NHD")
    wrapper.plan(
        torch.arange(0, 513, 64).int().to(DEVICE),
        torch.arange(0, 257, 32).int().to(DEVICE),
        torch.arange(256).int().to(DEVICE),
        int32(*[16] * 8),
        32,
        8,
        128,
        16,
        causal=True,
        data_type=torch.float16,
    )
    q, cache = half(512, 32, 128), half(256, 2, 16, 8, 128)
    out = wrapper.run(q, cache)
    assert out.shape == (512, 32, 128)
    for b in (0, 7):
        last = slice(64 * b + 62, 64 * b + 64)
        Expected.of([(q[last], *tokens(cache, slice(32 * b, 32 * b + 32), 512))], causal=True).check(out[last])


def test_batch_attention() -> None:
    wrapper = flashinfer.BatchAttention(kv_layout="NHD", device=DEVICE)
    wrapper.plan(
        int32(0, 64, 128, 192),
        int32(0, 100, 200, 300),
        torch.arange(300).int().to(DEVICE),
        int32(100, 100, 100),
        32,
        8,
        128,
        128,
        16,
        causal=True,
    )
    q, k, v = half(192, 32, 128), half(300, 8, 128), half(300, 8, 128)
    o = wrapper.forward(q, k, v)
    for b in range(3):
        rows, keys = slice(64 * b, 64 * b + 64), slice(100 * b, 100 * b + 100)
        one = flashinfer.single_prefill_with_kv_cache(q[rows], k[keys], v[keys], causal=True)
        torch.testing.assert_close(o[rows], one, rtol=1e-3, atol=1e-3)


def test_mla(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace_buffer, kv_layout="NHD")
    q, kv_cache = half(8, 32, 576), half(256, 16, 576)
    page_table, seq_lens = torch.arange(256).int().view(8, 32).to(DEVICE), int32(*range(50, 450, 50))
    out = wrapper.forward(q, kv_cache, page_table, seq_lens)
    assert out.shape == (8, 32, 512)
    for b in (0, 7):
        latents = kv_cache[32 * b : 32 * b + 32].flatten(0, 1)[: int(seq_lens[b]), None]
        Expected.of([(q[b, None], latents, latents[..., :512])], sm_scale=192**-0.5).check(out[b, None])


def test_paged_prefill_equals_its_causal_mask(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    qo_indptr, indptr, last = int32(*QO_INDPTR), int32(*PAGE_INDPTR), int32(*LAST_PAGE_LEN)
    indices = torch.arange(128).int().to(DEVICE)
    q, kv_cache = half(LAYERS, 100, 64, 128), half(LAYERS, 128, 2, 16, 16, 128)
    wrapper.plan(qo_indptr, indptr, indices, last, 64, 16, 128, 16, causal=True)
    outputs = [wrapper.run(q[i], kv_cache[i]) for i in range(LAYERS)]
    assert outputs[0].shape == (100, 64, 128)

    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (16 * (indptr[1:] - indptr[:-1] - 1) + last).cpu().tolist()
    mask = causal_masks(qo_len, kv_len)
    wrapper.plan(qo_indptr, indptr, indices, last, 64, 16, 128, 16, custom_mask=mask)
    for i in range(LAYERS):
        torch.testing.assert_close(wrapper.run(q[i], kv_cache[i]), outputs[i], rtol=1e-3, atol=1e-3)


def test_ragged_prefill_equals_its_causal_mask(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    qo_indptr = int32(*QO_INDPTR)
    kv_indptr = qo_indptr.clone()
    q, k, v = half(LAYERS, 100, 64, 128), half(LAYERS, 100, 16, 128), half(LAYERS, 100, 16, 128)
    wrapper.plan(qo_indptr, kv_indptr, 64, 16, 128, causal=True)
    outputs = [wrapper.run(q[i], k[i], v[i]) for i in range(LAYERS)]
    assert outputs[0].shape == (100, 64, 128)

    lengths = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    wrapper.plan(qo_indptr, kv_indptr, 64, 16, 128, custom_mask=causal_masks(lengths, lengths))
    for i in range(LAYERS):
        torch.testing.assert_close(wrapper.run(q[i], k[i], v[i]), outputs[i], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("return_lse", [False, True])
def test_complete_batch_attention(workspace_buffer: Tensor, return_lse: bool) -> None:
    seq_lens, page_size = [10, 15], 16
    kv_cache, q = half(2, 2, 8, page_size, 128), half(25, 32, 128)
    q_indptr, kv_indptr = int32(0, 10, 25), int32(0, 1, 2)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, kv_layout="HND")
    wrapper.plan(
        q_indptr,
        kv_indptr,
        int32(0, 1),
        int32(*seq_lens),
        32,
        8,
        128,
        page_size,
        causal=True,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
    )
    result = wrapper.run(q, kv_cache, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    keys, values = ([kv_cache[b, i].transpose(0, 1)[:n] for b, n in enumerate(seq_lens)] for i in (0, 1))
    Expected.of(list(zip(q.split(seq_lens), keys, values, strict=True)), causal=True).check(out, lse)


def test_get_batch_indices_positions() -> None:
    from attn_ops.page import get_batch_indices_positions

    batch_indices, positions = get_batch_indices_positions(int32(0, 5, 8, 15), int32(5, 10, 7), 15)
    assert batch_indices.tolist() == [0] * 5 + [1] * 3 + [2] * 7
    assert positions.tolist() == [*range(5), 7, 8, 9, *range(7)]


def test_decode_on_tensor_cores(workspace_buffer: Tensor) -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, kv_layout="NHD", use_tensor_cores=True)
    assert wrapper.use_tensor_cores
    wrapper.plan(int32(0, 1, 3), int32(2, 0, 1), int32(5, 16), 8, 2, 64, 16)
    q, cache = half(2, 8, 64), half(3, 2, 16, 2, 64)
    requests = [(q[:1], *tokens(cache, int32(2), 5)), (q[1:], *tokens(cache, int32(0, 1), 32))]
    Expected.of(requests).check(wrapper.run(q, cache))
