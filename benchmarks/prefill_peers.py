"""Prefill with PyTorch's SDPA, FlexAttention and varlen attention, with FlashInfer and with FlashAttention 2."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparison import NotMeasuredError, Prepare
from benchmarks.peers import batch_attention, flash_attn, flashinfer_with, flashinfer_workspace, xqa_call
from benchmarks.prefill_problem import PrefillProblem
from benchmarks.prefill_rows import PrefillRow
from benchmarks.timing import Call


def dense(problem: PrefillProblem) -> list[tuple[Tensor, Tensor, Tensor]]:
    copies = [problem.dense(i) for i in range(problem.copies)]
    if copies[0] is None:
        raise NotMeasuredError("a dense batch needs requests of one length")
    return copies  # type: ignore[return-value]


def _refuse_options(row: PrefillRow) -> None:
    _refuse_mask_and_positions(row)
    if row.window_left >= 0 or row.logits_soft_cap:
        raise NotMeasuredError("it is measured without windows and soft caps")


def _refuse_mask_and_positions(row: PrefillRow) -> None:
    if row.mask:
        raise NotMeasuredError("it is measured without custom masks")
    if row.pos_encoding != "NONE":
        raise NotMeasuredError("it has neither RoPE nor ALiBi")


def contiguous(prepare: Callable[..., Call]) -> Callable[..., Call]:
    """An implementation over contiguous KV, which is not measured in rows about a page size."""

    @functools.wraps(prepare)
    def prepare_row(problem: PrefillProblem, **options: Any) -> Call:
        if problem.row.paged_only:
            raise NotMeasuredError("the row compares implementations over paged KV")
        return prepare(problem, **options)

    return prepare_row


def sdpa(backend: SDPBackend) -> Prepare:
    """``scaled_dot_product_attention`` on a dense batch. Its causal mask needs as many query rows as keys."""

    def prepare(problem: PrefillProblem) -> Call:
        copies, row = dense(problem), problem.row
        _refuse_options(row)
        if row.causal and row.qo_lens != row.kv_lens:
            raise NotMeasuredError("its causal mask needs as many query rows as keys")

        def call(copy: int) -> Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *copies[copy], is_causal=row.causal, enable_gqa=True
                )
            return out.transpose(1, 2).flatten(0, 1)

        return call

    return prepare


def flex(problem: PrefillProblem) -> Call:
    """FlexAttention on a dense batch, compiled for its shape, with a block mask made in advance."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    copies = dense(problem)
    _refuse_options(problem.row)
    rows, keys = problem.row.equal_lengths or (0, 0)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (keys - rows)

    mask = create_block_mask(visible, None, None, rows, keys, device=problem.device) if problem.row.causal else None
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(copy: int) -> Tensor:
        out = compiled(*copies[copy], block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def varlen(problem: PrefillProblem) -> Call:
    """``torch.nn.attention.varlen`` on ragged KV."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotMeasuredError("this torch has no torch.nn.attention.varlen") from error
    _refuse_options(problem.row)
    options: dict[str, Any] = {"window_size": (-1, 0) if problem.row.causal else (-1, -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    longest = max(problem.row.qo_lens), max(problem.row.kv_lens)

    def call(copy: int) -> Tensor:
        keys, values = problem.keys[copy], problem.values[copy]
        out = varlen_attn(problem.q, keys, values, problem.qo_indptr, problem.kv_indptr, *longest, **options)
        return out if isinstance(out, Tensor) else out[0]

    return call


def flash_attn_varlen(problem: PrefillProblem) -> Call:
    """``flash_attn_varlen_func`` on ragged KV: its pages are of 256 tokens and more."""
    function, row = flash_attn().flash_attn_varlen_func, problem.row
    _refuse_mask_and_positions(row)
    longest = max(row.qo_lens), max(row.kv_lens)
    options = {"causal": row.causal, "window_size": (row.window_left, -1), "softcap": row.logits_soft_cap}

    def call(copy: int) -> Tensor:
        keys, values = problem.keys[copy], problem.values[copy]
        return function(problem.q, keys, values, problem.qo_indptr, problem.kv_indptr, *longest, **options)

    return call


def _options(problem: PrefillProblem) -> dict[str, Any]:
    """Keyword arguments of ``plan()`` of FlashInfer's prefill wrappers."""
    row = problem.row
    dtypes: dict[str, Any] = {"q_data_type": problem.dtype}
    if row.fp8:
        dtypes = {"q_data_type": problem.q.dtype, "kv_data_type": problem.kv_dtype, "o_data_type": problem.dtype}
    return dtypes | {
        "head_dim_vo": row.head_dim_vo,
        "causal": row.causal,
        "window_left": row.window_left,
        "logits_soft_cap": row.logits_soft_cap,
        "custom_mask": problem.mask,
        "pos_encoding_mode": row.pos_encoding,
    }


def _scales(problem: PrefillProblem) -> list[Tensor]:
    """Scales of queries, keys and values, per head: FlashInfer takes them by position with an FP8 query."""
    heads = (problem.row.num_qo_heads, problem.row.num_kv_heads, problem.row.num_kv_heads)
    return [torch.ones(n, device=problem.device) for n in heads] if problem.row.fp8_query else []


def _refuse_by_backend(backend: str, row: PrefillRow) -> None:
    """Refuse at once what fa3 does not take or fails to compile: a peer that fails slowly is skipped in later rows."""
    if backend == "fa3" and row.fp8 != row.fp8_query:
        raise NotMeasuredError("fa3 does not compile for keys of another dtype than the query's")
    if backend == "fa3" and row.mask:
        raise NotMeasuredError("fa3 takes no custom masks")
    if backend == "fa3" and row.pos_encoding != "NONE":
        raise NotMeasuredError("fa3 has neither RoPE nor ALiBi")


def flashinfer_paged(backend: str) -> Prepare:
    """``BatchPrefillWithPagedKVCacheWrapper`` with one of its backends."""

    def prepare(problem: PrefillProblem) -> Call:
        row = problem.row
        fi = flashinfer_with(row.head_dim, row.head_dim_vo)
        _refuse_by_backend(backend, row)
        workspace = flashinfer_workspace(problem.device)
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(
            problem.qo_indptr,
            *problem.table.arguments,
            row.num_qo_heads,
            row.num_kv_heads,
            row.head_dim,
            row.page_size,
            **_options(problem),
        )
        out = problem.empty_out()
        caches = list(zip(problem.k_caches, problem.v_caches, strict=True))
        scales = _scales(problem)
        return lambda copy: wrapper.run(problem.q, caches[copy], *scales, out=out)

    return prepare


def flashinfer_ragged(backend: str) -> Prepare:
    """``BatchPrefillWithRaggedKVCacheWrapper`` with one of its backends."""

    def prepare(problem: PrefillProblem) -> Call:
        row = problem.row
        fi = flashinfer_with(row.head_dim, row.head_dim_vo)
        _refuse_by_backend(backend, row)
        workspace = flashinfer_workspace(problem.device)
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
        wrapper.plan(
            problem.qo_indptr,
            problem.kv_indptr,
            row.num_qo_heads,
            row.num_kv_heads,
            row.head_dim,
            **_options(problem),
        )
        out = problem.empty_out()
        scales = _scales(problem)
        return lambda copy: wrapper.run(problem.q, problem.keys[copy], problem.values[copy], *scales, out=out)

    return prepare


def flashinfer_persistent(problem: PrefillProblem) -> Call:
    """``BatchAttention``: chunks and single rows in one persistent kernel, paged."""
    row = problem.row
    flashinfer_with(row.head_dim, row.head_dim_vo)  # the first reason of all rows, if it is not installed
    _refuse_options(row)
    if row.fp8_query:
        raise NotMeasuredError("it is measured with 16-bit queries")
    sizes = (row.num_qo_heads, row.num_kv_heads, row.head_dim, row.head_dim_vo, row.page_size)
    plan, run = batch_attention(
        problem.q, problem.empty_out(), problem.qo_indptr, problem.table, sizes, problem.kv_dtype, causal=row.causal
    )
    plan()
    return lambda copy: run((problem.k_caches[copy], problem.v_caches[copy]))


MAX_XQA_ROWS = 32
"""Query rows of a request, as its mask is made here in one word."""


def flashinfer_xqa(problem: PrefillProblem) -> Call:
    """``xqa_batch_decode_with_kv_cache`` with a few query rows per request, causal among themselves."""
    row, rows = problem.row, problem.row.qo_lens[0]
    flashinfer_with(row.head_dim, row.head_dim_vo)
    _refuse_mask_and_positions(row)
    if len(set(row.qo_lens)) > 1 or rows > MAX_XQA_ROWS or not row.causal or row.fp8_query:
        raise NotMeasuredError(f"it takes requests of equally many query rows, at most {MAX_XQA_ROWS}, causal")
    words = torch.tensor([[(2 << i) - 1] for i in range(rows)], device=problem.device)
    mask = words.int().view(torch.uint16).expand(row.batch, -1, -1).contiguous()
    call = xqa_call(problem.q, problem.table, window_left=row.window_left, q_len_per_req=rows, mask=mask)
    return lambda copy: call((problem.k_caches[copy], problem.v_caches[copy])).view(problem.q.shape)


def flashinfer_single(problem: PrefillProblem) -> Call:
    """``single_decode_with_kv_cache`` or ``single_prefill_with_kv_cache``, which need no plan."""
    row, q = problem.row, problem.q
    fi = flashinfer_with(row.head_dim, row.head_dim_vo)
    _refuse_options(row)
    if row.batch > 1:
        raise NotMeasuredError("it takes one request")
    keys, values = problem.keys, problem.values
    if row.qo_lens == (1,):
        return lambda copy: fi.single_decode_with_kv_cache(q[0], keys[copy], values[copy])[None]
    return lambda copy: fi.single_prefill_with_kv_cache(q, keys[copy], values[copy], causal=row.causal)


PREFILL_PEERS: dict[str, Prepare] = {
    "flashinfer fa3 paged": flashinfer_paged("fa3"),
    "flashinfer fa3 ragged": contiguous(flashinfer_ragged("fa3")),
    "flashinfer fa2 paged": flashinfer_paged("fa2"),
    "flashinfer fa2 ragged": contiguous(flashinfer_ragged("fa2")),
    "flashinfer persistent": flashinfer_persistent,
    "flashinfer xqa": flashinfer_xqa,
    "sdpa cudnn": contiguous(sdpa(SDPBackend.CUDNN_ATTENTION)),
    "sdpa flash": contiguous(sdpa(SDPBackend.FLASH_ATTENTION)),
    "flex": contiguous(flex),
    "varlen": contiguous(varlen),
    "flash_attn": contiguous(flash_attn_varlen),
}

DENSE_PEERS: dict[str, Prepare] = {
    "flashinfer single": flashinfer_single,
    **{name: PREFILL_PEERS[name] for name in ("flashinfer fa3 ragged", "flashinfer fa2 ragged")},
    **{name: PREFILL_PEERS[name] for name in ("sdpa cudnn", "sdpa flash", "varlen", "flash_attn")},
}
"""FlashInfer's wrappers have a plan, whose time is not counted."""
