"""Decode with PyTorch's SDPA, FlashInfer and FlashAttention 2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparison import NotMeasuredError, Prepare
from benchmarks.decode_problem import DecodeProblem
from benchmarks.peers import batch_attention, flash_attn, flashinfer_with, flashinfer_workspace, xqa_call
from benchmarks.timing import Call


def _refuse_rope(problem: DecodeProblem) -> None:
    if problem.row.rope:
        raise NotMeasuredError("it does not rotate queries and keys")


def _contiguous(problem: DecodeProblem) -> list[tuple[Tensor, Tensor]]:
    """Contiguous KV caches ``[batch, num_kv_heads, length, head_dim]``."""
    _refuse_rope(problem)
    if problem.row.equal_length is None:
        raise NotMeasuredError("a contiguous cache needs requests of one length")
    if problem.kv_dtype != problem.dtype:
        raise NotMeasuredError("it needs queries and keys of one dtype")
    return [problem.contiguous(i) for i in range(problem.copies)]


def sdpa(backend: SDPBackend) -> Prepare:
    """``scaled_dot_product_attention`` on a contiguous KV cache, with one query row per request."""

    def prepare(problem: DecodeProblem) -> Call:
        caches = _contiguous(problem)
        q = problem.q[:, :, None]

        def call(copy: int) -> Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, *caches[copy], enable_gqa=True)
            return out[:, :, 0]

        return call

    return prepare


def flashinfer_wrapper(use_tensor_cores: bool) -> Prepare:
    """``BatchDecodeWithPagedKVCacheWrapper``, on CUDA cores or tensor cores."""

    def prepare(problem: DecodeProblem) -> Call:
        row = problem.row
        fi = flashinfer_with(row.head_dim, row.head_dim)
        workspace = flashinfer_workspace(problem.device)
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, row.layout, use_tensor_cores=use_tensor_cores)
        wrapper.plan(
            *problem.table.arguments,
            row.num_qo_heads,
            row.num_kv_heads,
            row.head_dim,
            row.page_size,
            pos_encoding_mode="ROPE_LLAMA" if row.rope else "NONE",
            q_data_type=problem.dtype,
            kv_data_type=problem.kv_dtype,
            o_data_type=problem.dtype,
        )
        out = torch.empty_like(problem.q)
        return lambda copy: wrapper.run(problem.q, problem.caches(copy), out=out)

    return prepare


def flashinfer_persistent(problem: DecodeProblem) -> Call:
    """``BatchAttention``: prefill and decode in one persistent kernel."""
    _refuse_rope(problem)
    q, row = problem.q, problem.row
    flashinfer_with(row.head_dim, row.head_dim)
    qo_indptr = torch.arange(row.batch + 1, dtype=torch.int32, device=problem.device)
    sizes = (row.num_qo_heads, row.num_kv_heads, row.head_dim, row.head_dim, row.page_size)
    plan, run = batch_attention(
        q, torch.empty_like(q), qo_indptr, problem.table, sizes, problem.kv_dtype, kv_layout=row.layout
    )
    plan()
    return lambda copy: run(problem.caches(copy))


def flashinfer_xqa(problem: DecodeProblem) -> Call:
    """``xqa_batch_decode_with_kv_cache``, with block tables."""
    _refuse_rope(problem)
    flashinfer_with(problem.row.head_dim, problem.row.head_dim)
    call, out = xqa_call(problem.q, problem.table, problem.row.layout), torch.empty_like(problem.q)
    return lambda copy: call(problem.caches(copy), out=out)


def flash_attn_kvcache(problem: DecodeProblem) -> Call:
    """``flash_attn_with_kvcache`` on a contiguous KV cache: its pages are of 256 tokens and more."""
    function, q = flash_attn().flash_attn_with_kvcache, problem.q[:, None]
    caches = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in _contiguous(problem)]
    return lambda copy: function(q, *caches[copy], cache_seqlens=problem.table.kv_len, causal=True)[:, 0]


DECODE_PEERS: dict[str, Prepare] = {
    "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "flashinfer": flashinfer_wrapper(use_tensor_cores=False),
    "flashinfer tensor cores": flashinfer_wrapper(use_tensor_cores=True),
    "flashinfer persistent": flashinfer_persistent,
    "flashinfer xqa": flashinfer_xqa,
    "flash_attn": flash_attn_kvcache,
}
