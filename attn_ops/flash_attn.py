"""FlashAttention's functions, under its names: the arguments of FlashAttention 2 by position, those of 3 by name.

They run this library's ops, for inference, on any device, and trace. Semantics are FlashAttention's: ``causal`` is
aligned bottom-right, windows are inclusive on both sides, the log-sum-exp is natural. A row that sees no key gives 0
and -inf. What has no effect, what is refused, and when calls share a plan: docs/flash_attn.md.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import check_real, optional_flags
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import ArgumentError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import output_dtype, positive, ranked, required
from attn_ops.frontend.call_plans import expected_keys
from attn_ops.frontend.flash import arguments
from attn_ops.frontend.flash.arguments import WindowSize
from attn_ops.frontend.flash.cache import CacheBatch, CacheLengths
from attn_ops.frontend.flash.cache_calls import (
    CacheArguments,
    CacheTensors,
    as_token_pages,
    has_symbolic_pages,
    paged_varlen_attention,
)
from attn_ops.frontend.flash.cache_checks import check_latent, check_requests, check_tables, new_tokens, one_of
from attn_ops.frontend.flash.calls import (
    DENSE,
    DENSE_CACHE,
    PAGED_CACHE,
    VARLEN,
    check_heads,
    dense_attention,
    output_spec,
    requests_of,
    unpack,
    unpack_qkv,
    varlen_attention,
    with_probabilities,
)
from attn_ops.frontend.flash.metadata import SchedulerMetadata
from attn_ops.frontend.flash.padded import Used
from attn_ops.frontend.flash.plan_spec import cache_spec, runs_decode
from attn_ops.frontend.flash.rotary import Rotary, rotate
from attn_ops.frontend.flash.scheduler import get_scheduler_metadata
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale
from attn_ops.frontend.shared_plans import SharedPlans
from attn_ops.symbolic_sizes import agree
from attn_ops.typed import typed

__all__ = [
    "SchedulerMetadata",
    "SharedPlans",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@typed
@prepared_function
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Attention of a batch of equal lengths.

    Args:
        q: ``[batch, seqlen_q, num_heads, head_dim]``, float16, bfloat16, float32 or FP8.
        k, v: ``[batch, seqlen_k, num_kv_heads, head_dim]``, of the dtype of ``q`` or FP8. The head dim of ``v`` may
            differ. ``num_heads`` is a multiple of ``num_kv_heads``.
        softmax_scale: default ``1 / sqrt(head_dim)``.
        causal: row i sees keys up to ``i + seqlen_k - seqlen_q``.
        window_size: ``(left, right)``: row i sees keys from ``i + seqlen_k - seqlen_q - left`` to the same ``+ right``,
            both included; -1 or None for no limit. ``causal`` limits the right side to 0.
        softcap: ``softcap * tanh(logits / softcap)``; 0 is off.
        qv: ``[batch, seqlen_q, num_heads, head_dim of v]``: logits are ``q k + qv v``, as in MLA with absorbed
            weights. The default scale is ``1 / sqrt(head_dim + head_dim of v)``.
        attention_chunk: row i sees only the keys of its chunk: the keys j with the same ``j // attention_chunk`` as its
            own position ``i + seqlen_k - seqlen_q``; 0 is off.
        q_descale, k_descale, v_descale: scales of FP8 tensors: a number, a tensor of one element, which may be
            expanded, or ``[batch, num_kv_heads]``, positive. Those of other tensors are ignored.
        s_aux: ``[num_heads]``, attention sinks: a natural-log logit per head that joins the denominator, with value 0.
            ``learnable_sink`` is another name of it.
        return_softmax_lse: return ``(out, lse)``.
        return_attn_probs: return ``(out, lse, None)``, as FlashAttention 2 does without dropout: probabilities are
            never stored.
        out: buffer of the result, filled and returned.
        deterministic, num_splits, pack_gqa, sm_margin: without effect.
        dropout_p, alibi_slopes: refused unless they change nothing.

    Returns:
        ``out [batch, seqlen_q, num_heads, head_dim]`` in the dtype of ``q``, bfloat16 for an FP8 query; float32 ``lse
        [batch, num_heads, seqlen_q]``, natural, -inf in rows without keys.

    Raises:
        UnsupportedError: an argument asks for what is not supported; the message names the alternative.
        GradientError: a tensor requires grad. There is no backward.
    """
    where = "flash_attn_func"
    optional_flags(where, return_softmax_lse=return_softmax_lse, return_attn_probs=return_attn_probs)
    arguments.refuse(where, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    return_lse = return_softmax_lse or return_attn_probs
    options = arguments.options(
        where,
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
    )
    descales = arguments.Descales(q_descale, k_descale, v_descale)
    chunk = arguments.chunk_of(where, attention_chunk)
    call = dense_attention(where, q, k, v, options, descales, return_lse, out, qv=qv, chunk=chunk)
    return with_probabilities(call) if return_attn_probs else call


@typed
@prepared_function
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    qv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    attention_chunk: int = 0,
    scheduler_metadata: SchedulerMetadata | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
) -> Any:
    """Attention of a batch of different lengths, packed without padding, or over a paged cache.

    Args:
        q: ``[total_q, num_heads, head_dim]``. Rows beyond the last sequence give 0.
        k, v: ``[total_k, num_kv_heads, head_dim]``; with ``block_table`` ``[pages, page_size, num_kv_heads,
            head_dim]``.
        cu_seqlens_q: int ``[batch + 1]``: the rows of sequence b are ``q[cu_seqlens_q[b]:cu_seqlens_q[b + 1]]``.
        cu_seqlens_k: int ``[batch + 1]``, the same for ``k`` and ``v``. With ``block_table`` its differences are the
            lengths in the cache, unless ``seqused_k``, int ``[batch]``, gives them.
        max_seqlen_q, max_seqlen_k: no result depends on them beyond rounding, since the lengths are known. A small
            integer ``max_seqlen_k`` lets a kernel for few keys run. When traced with ``block_table`` it has no effect.
        block_table: int ``[batch, max_pages_per_sequence]``, page numbers.
        scheduler_metadata: of :func:`get_scheduler_metadata` for this batch; only with ``block_table``.
        seqused_q, seqused_k: int ``[batch]``: the tokens of each sequence that count, its first ones; other rows give 0
            and -inf. Without ``block_table`` the tokens that count are copied.

    The other arguments and errors are those of :func:`flash_attn_func`.

    Returns:
        ``out [total_q, num_heads, head_dim]``; with ``return_softmax_lse`` also float32 ``lse [num_heads, total_q]``.
    """
    where = "flash_attn_varlen_func"
    optional_flags(where, return_softmax_lse=return_softmax_lse, return_attn_probs=return_attn_probs)
    arguments.refuse(where, dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    return_lse = return_softmax_lse or return_attn_probs
    options = arguments.options(
        where,
        q,
        qv=None if block_table is None else qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
    )
    descales = arguments.Descales(q_descale, k_descale, v_descale)
    chunk = arguments.chunk_of(where, attention_chunk)
    check_tables(where, "block_table", block_table)
    ranked(where, "q", q, VARLEN)
    rows = None
    if seqused_q is not None:
        rows = Used.of(where, "q", cu_seqlens_q, seqused_q, q)
        q, qv = rows.take(where, q=q, qv=qv)
        cu_seqlens_q = rows.cu_seqlens
    if block_table is None:
        (cu_seqlens_k,) = required(where, cu_seqlens_k=cu_seqlens_k)
        if scheduler_metadata is not None:
            fail(
                ArgumentError,
                where,
                "scheduler_metadata is given without block_table",
                "a paged cache",
                "drop it: calls that pass the same cu_seqlens share a plan in attn_ops.flash_attn.SharedPlans",
            )
        for name, t in (("k", k), ("v", v)):
            ranked(where, name, t, VARLEN)
        if seqused_k is not None:
            keys = Used.of(where, "k", cu_seqlens_k, seqused_k, k)
            k, v = keys.take(where, k=k, v=v)
            cu_seqlens_k = keys.cu_seqlens
        call = varlen_attention(
            where,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            options,
            descales,
            return_lse,
            out,
            qv=qv,
            chunk=chunk,
            expected=None if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        )
    else:
        call = paged_varlen_attention(
            where,
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            block_table,
            options,
            descales,
            return_lse,
            out,
            scheduler_metadata,
            qv=qv,
            chunk=chunk,
            expected=expected_keys(max_seqlen_k),
        )
    result = call if rows is None else rows.spread_call(call)
    return with_probabilities(result) if return_attn_probs else result


@typed
@prepared_function
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    attention_chunk: int = 0,
    scheduler_metadata: SchedulerMetadata | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    """Attention over a KV cache, to which new tokens are appended first.

    Args:
        q: ``[batch, seqlen_q, num_heads, head_dim]``, or ``[total_q, num_heads, head_dim]`` with ``cu_seqlens_q``, int
            ``[batch + 1]``. The rows are the last tokens of their sequences.
        k_cache, v_cache: ``[batch_cache, seqlen_cache, num_kv_heads, head_dim]``, or with ``block_table``
            ``[pages, page_size, num_kv_heads, head_dim]``. Only the last dimension must be contiguous.
        k, v: tokens to append in place: ``[batch, seqlen_new, num_kv_heads, head_dim]``, or ``[total_new, num_kv_heads,
            head_dim]`` with ``cu_seqlens_k_new``, int ``[batch + 1]``.
        rotary_cos, rotary_sin: ``[max_position, rotary_dim / 2]``: rotate ``k`` at its positions, from
            ``cache_seqlens`` on, and ``q`` from the same position, row by row if the call is causal or has a window
            or chunks. ``rotary_interleaved`` pairs dimensions 2i and 2i + 1, otherwise the halves of ``rotary_dim``.
            ``rotary_seqlens``, int ``[batch]``, replaces ``cache_seqlens`` in positions.
        cache_seqlens: tokens in the cache before the append: int ``[batch]``, or one number; None for a full cache.
        cache_batch_idx: int ``[batch]``: the row of the dense cache, or of ``block_table``, of each sequence; default
            in order.
        cache_leftpad: int ``[batch]``: the index in the cache of the first token of each sequence; default 0.
            ``rotary_cos`` is read at these indices, so positions include the padding.
        block_table: int ``[batch, max_pages_per_sequence]``. ``page_table`` is another name of it.
        qv: ``[..., num_heads, head_dim_v]`` as ``q``: the latent query of absorbed MLA. ``v_cache`` has the latents of
            one KV head, and ``k_cache`` its rotary keys. The default scale is ``1 / sqrt(head_dim + head_dim_v)``.
        scheduler_metadata: of :func:`get_scheduler_metadata` for this batch. Lengths and ``block_table`` are then read
            from it, unless it was made without one of the tables of this call.

    The other arguments and errors are those of :func:`flash_attn_func`.

    Returns:
        ``out`` as ``q``, with the head dim of ``v_cache``; with ``return_softmax_lse`` also float32 ``lse [batch,
        num_heads, seqlen_q]``, or ``[num_heads, total_q]`` with ``cu_seqlens_q``.
    """
    where = "flash_attn_with_kvcache"
    optional_flags(where, return_softmax_lse=return_softmax_lse)
    arguments.refuse(where, alibi_slopes=alibi_slopes)
    options = arguments.options(
        where,
        q,
        qv=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
    )
    descales = arguments.Descales(q_descale, k_descale, v_descale)
    chunk = arguments.chunk_of(where, attention_chunk)
    table_name, table = one_of(where, block_table=block_table, page_table=page_table)
    check_tables(where, table_name, table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    ranked(where, "q", q, DENSE if cu_seqlens_q is None else VARLEN)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        ranked(where, name, t, DENSE_CACHE if table is None else PAGED_CACHE)
    check_heads(where, q, k_cache, v_cache, qv)
    check_latent(where, q, qv, (k_cache, v_cache), options)
    shape = None if cu_seqlens_q is not None else (q.shape[0], q.shape[1])
    requests = q.shape[0] if cu_seqlens_q is None else requests_of(where, "cu_seqlens_q", cu_seqlens_q)
    planned = scheduler_metadata is not None
    check_requests(where, requests, k_cache, table_name, table, cache_batch_idx, planned=planned)
    if table is None and not planned and has_symbolic_pages(k_cache, v_cache):
        k_cache, v_cache, table = as_token_pages(where, k_cache, v_cache, requests, cache_batch_idx)
        cache_batch_idx = None
    rows = q if shape is None else q.flatten(0, 1)
    latents = qv if qv is None or shape is None else qv.flatten(0, 1)
    cached = CacheLengths.of(where, "cache_seqlens", cache_seqlens)
    new = new_tokens(where, k, v, cache_seqlens, cu_seqlens_k_new, requests)
    decode = runs_decode(None if shape is None else shape[1], qv is not None, chunk)
    batch = CacheBatch(
        spec=cache_spec(q, k_cache, v_cache, qv, options, decode=decode),
        table=table,
        requests=requests,
        lengths=cached,
        rows=rows.shape[0],
        device=q.device,
        cu_seqlens_q=cu_seqlens_q,
        appended=0 if new is None else new[0].shape[0],
        cu_new=cu_seqlens_k_new,
        cache_pages=k_cache.shape[0],
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        chunk=chunk,
        table_name=None if table is None else table_name,
    )
    rotary = Rotary.of(where, rotary_cos, rotary_sin, rotary_interleaved, q.shape[-1], q.device)
    found = batch.metadata(where, scheduler_metadata)
    if rotary is not None:
        starts = cached if rotary_seqlens is None else CacheLengths.of(where, "rotary_seqlens", rotary_seqlens)
        rows, new = rotate(where, rotary, rows, new, k_cache, batch, starts, options)
    tensors = CacheTensors.of(rows, latents, (k_cache, v_cache), new, decode).for_plan(
        where, found.value, k_cache.shape[1]
    )
    scales = descales.of_rows(where, rows, k_cache, requests, cu_seqlens_q)
    output = output_spec(tensors.queries[0], shape, return_softmax_lse, out)
    return tensors.attend(where, found, options, output, scales, CacheArguments(q, qv, k_cache, v_cache, k, v))


@typed
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of several sets of keys, from the output and LSE over each set.

    Args:
        out_partial: ``[sets, batch, seqlen, num_heads, head_dim]`` or ``[sets, tokens, num_heads, head_dim]``.
        lse_partial: ``[sets, batch, seqlen, num_heads]`` or ``[sets, tokens, num_heads]``, natural; -inf for no key.
        out: buffer of the result, filled and returned. ``out_dtype``: default that of ``out_partial``.

    Returns:
        ``out [batch, seqlen, num_heads, head_dim]`` or ``[tokens, num_heads, head_dim]``, and float32 ``lse``, natural,
        of the same shape without ``head_dim``.
    """
    where = "flash_attn_combine"
    positive(where, sets=out_partial.shape[0] if out_partial.dim() else 1)
    if out_partial.dim() != 4:
        ranked(where, "out_partial", out_partial, "[sets, batch, seqlen, num_heads, head_dim]")
    if not agree(lse_partial.shape, out_partial.shape[:-1]):
        expected = f"{shape_of(out_partial.shape[:-1])}, as out_partial"
        fail(ShapeError, where, f"lse_partial is {shape_of(lse_partial)}", expected, "correct it")
    check_real(where, "lse_partial", lse_partial)
    rows_shape = tuple(out_partial.shape[1:-2])
    v, s = out_partial.movedim(0, -3).flatten(0, -4), lse_partial.movedim(0, -2).flatten(0, -3)
    dtype = out_dtype if out_dtype is not None else out_partial.dtype if out is None else out.dtype
    dtype = output_dtype(where, "out_dtype", dtype)
    spec = OutputSpec(out, return_lse=True, dtype=dtype, lse_base="ln", rows_shape=rows_shape)
    spec.check(where, v[:, 0], out_partial.shape[-1])
    merged, lse = torch.ops.attn.merge_states(v.contiguous(), s.float().contiguous() / math.log(2))
    result, lse = spec.finalize(merged, lse, dtype)
    return result, lse.view(lse_partial.shape[1:])


# ------------------------------------------------------------------------------------------------------- packed tensors


@typed
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, num_heads_q: int | None = None, **kwargs: Any) -> Any:
    """:func:`flash_attn_func` of ``qkv [batch, seqlen, 3, num_heads, head_dim]``, and its arguments from
    ``dropout_p``.

    ``qkv`` may be ``[batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]``: query heads, then heads of keys, then
    heads of values. ``num_heads_q`` is required for that, and has no effect otherwise.
    """
    q, k, v = unpack_qkv("flash_attn_qkvpacked_func", qkv, num_heads_q)
    return flash_attn_func(q, k, v, *args, **kwargs)


@typed
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """:func:`flash_attn_func` of ``kv [batch, seqlen, 2, num_kv_heads, head_dim]``, and its arguments from
    ``dropout_p``.
    """
    dims = "[batch, seqlen, 2, num_kv_heads, head_dim]"
    k, v = unpack("flash_attn_kvpacked_func", "kv", kv, 2, dims)
    return flash_attn_func(q, k, v, *args, **kwargs)


@typed
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """:func:`flash_attn_varlen_func` of ``qkv [total, 3, num_heads, head_dim]``, and its arguments from
    ``dropout_p``.
    """
    q, k, v = unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, "[total, 3, num_heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


@typed
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """:func:`flash_attn_varlen_func` of ``kv [total_k, 2, num_kv_heads, head_dim]``, and its arguments from
    ``dropout_p``.
    """
    k, v = unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 2, "[total_k, 2, num_kv_heads, head_dim]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs)
