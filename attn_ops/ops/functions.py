"""The ops of ``torch.ops.attn`` as Python functions. Generated: see ``docs/_ext/op_functions.py``; do not edit.

Each takes the arguments of its op by the same names, calls it, and traces to the same node. An argument of a wrong type
raises :class:`~attn_ops.errors.ArgumentTypeError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.typed import typed

Plan = list[Tensor] | tuple[Tensor, ...]
"""A :class:`~attn_ops.DecodePlan` or :class:`~attn_ops.PrefillPlan`, or their fields in order."""


@typed
def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Plan,
    *,
    seq_lens: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Fill a decode plan from a page table. Nothing is copied to the host, so planning can be captured in a CUDA graph.
    Contents out of range are clamped.

    Args:
        kv_indptr: ``[batch + 1]``; int32. The pages of request ``b`` are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: ``[pages]``; int32. Page numbers. Entries after those of the last request are not used.
        kv_last_page_len: ``[batch]``; int32. Tokens in the last page of each request, 1 to the page size. Ignored for a
            request without pages.
        plan: the fields of a ``DecodePlan``; int32. The plan to fill. Its shapes hold its capacity and the problem that
            it is for. Written.
        seq_lens: ``[batch]``; int32. Tokens of each request on all ranks, if the page table and the plan are those of
            one rank's keys.
        backend: ``auto``, or the name of the one backend to use.
    """
    return torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens, backend=backend)


@typed
def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Plan,
    *,
    seq_lens: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Fill a prefill plan from a page table, or from the lengths of ragged keys if the plan was made with ``max_pages``
    0.

    Args:
        qo_indptr: ``[batch + 1]``; int32. The query rows of request ``b`` are ``q[qo_indptr[b]:qo_indptr[b + 1]]``.
        kv_indptr: ``[batch + 1]``; int32. As in ``plan_decode``. For ragged keys, ``k[kv_indptr[b]:kv_indptr[b + 1]]``
            belong to request ``b``.
        kv_indices: ``[pages]``; int32. Page numbers; ``[0]`` for ragged keys.
        kv_last_page_len: ``[batch]``; int32. As in ``plan_decode``; not used for ragged keys.
        plan: the fields of a ``PrefillPlan``; int32. The plan to fill. Written.
        seq_lens: ``[batch]``; int32. As in ``plan_decode``.
        backend: ``auto``, or the name of the one backend to use.
    """
    return torch.ops.attn.plan_prefill(
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        plan,
        seq_lens=seq_lens,
        backend=backend,
    )


@typed
def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One query row per request over a paged KV cache. The row has the position of the request's last key.

    Args:
        q: ``[batch, num_qo_heads, head_dim]``; float16, bfloat16, float32. One row per request. It may have fewer rows
            than the capacity of the plan.
        k_cache: NHD ``[pages, page_size, num_kv_heads, head_dim]``, HND ``[pages, num_kv_heads, page_size, head_dim]``;
            as ``q``, or float8_e4m3fn, float8_e5m2. Paged keys. Only the last dimension must be contiguous, so a view
            of a cache with keys and values works.
        v_cache: as ``k_cache``, with a head_dim of its own; as ``k_cache``. Paged values. Strides may differ from those
            of ``k_cache``.
        plan: the fields of a ``DecodePlan``; int32. The result of ``DecodePlanner.plan()``, made for these head counts,
            head dims and page size.
        workspace: ``[elements]``; float32. Scratch memory: the planner's ``workspace``. Its contents mean nothing
            between calls. Written.
        sm_scale: Factor on ``q·k``; None is ``1/sqrt(head_dim)`` of the keys.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        window_left: A query row sees at most this many keys before its own position; -1 is no window.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        pos_encoding: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``, applied inside attention.
        rope_scale: Divides the frequencies of ``ROPE_LLAMA``.
        rope_theta: Base of the frequencies of ``ROPE_LLAMA``.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        kv_layout: ``NHD`` or ``HND``: the order of tokens (N) and heads (H) in a page or in a ragged tensor.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[batch, num_qo_heads, head_dim_vo]``, as ``q``. Attention output. 0 for a request that sees no key.
        lse: float32 ``[batch, num_qo_heads]``, or ``[0]``. Base-2 log-sum-exp, -inf where there is no key; no elements
            without ``return_lse``.
    """
    return torch.ops.attn.batch_decode(
        q,
        k_cache,
        v_cache,
        plan,
        workspace,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sinks=sinks,
        kv_scale=kv_scale,
        pos_encoding=pos_encoding,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        out_dtype=out_dtype,
        kv_layout=kv_layout,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Plan,
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    window_right: int = -1,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Any number of query rows per request over a paged KV cache, which already contains the keys of these rows.

    Args:
        q: ``[nnz_qo, num_qo_heads, head_dim]``; float16, bfloat16, float32, float8_e4m3fn. Query rows of all requests,
            concatenated. With FP8 queries, probabilities may be rounded to FP8 (docs/guide/fp8.md).
        k_cache: NHD ``[pages, page_size, num_kv_heads, head_dim]``, HND ``[pages, num_kv_heads, page_size, head_dim]``;
            as ``q``, or float8_e4m3fn, float8_e5m2. Paged keys. Only the last dimension must be contiguous, so a view
            of a cache with keys and values works.
        v_cache: as ``k_cache``, with a head_dim of its own; as ``k_cache``. Paged values. Strides may differ from those
            of ``k_cache``.
        plan: the fields of a ``PrefillPlan``; int32. The result of ``PrefillPlanner.plan()``, made for these head
            counts, head dims and page size.
        workspace: ``[elements]``; float32. Scratch memory: the planner's ``workspace``. Its contents mean nothing
            between calls. Written.
        sm_scale: Factor on ``q·k``; None is ``1/sqrt(head_dim)`` of the keys.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        window_left: A query row sees at most this many keys before its own position; -1 is no window.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        pos_encoding: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``, applied inside attention.
        rope_scale: Divides the frequencies of ``ROPE_LLAMA``.
        rope_theta: Base of the frequencies of ``ROPE_LLAMA``.
        causal: Hide later keys. The last query row has the position of the last key, whatever the two lengths.
        window_right: A query row sees at most this many keys after its own position; -1 is no window. Without effect
            where ``causal`` hides those keys.
        mask: ``[bytes]``; uint8. Packed custom mask, which replaces ``causal``: for each request its ``qo_len·kv_len``
            bits in row-major order, little-endian, padded to a whole byte. A set bit keeps the key; keys beyond the end
            of the mask are hidden.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        kv_layout: ``NHD`` or ``HND``: the order of tokens (N) and heads (H) in a page or in a ragged tensor.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[nnz_qo, num_qo_heads, head_dim_vo]``, as ``q``. Attention output. 0 in rows that see no key.
        lse: float32 ``[nnz_qo, num_qo_heads]``, or ``[0]``. Base-2 log-sum-exp, -inf in rows that see no key; no
            elements without ``return_lse``.
    """
    return torch.ops.attn.batch_prefill(
        q,
        k_cache,
        v_cache,
        plan,
        workspace,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sinks=sinks,
        kv_scale=kv_scale,
        pos_encoding=pos_encoding,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        causal=causal,
        window_right=window_right,
        mask=mask,
        out_dtype=out_dtype,
        kv_layout=kv_layout,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    window_right: int = -1,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The same as ``batch_prefill`` over ragged keys and values: those of all requests concatenated, without pages.

    Args:
        q: ``[nnz_qo, num_qo_heads, head_dim]``; float16, bfloat16, float32, float8_e4m3fn. Query rows of all requests,
            concatenated. With FP8 queries, probabilities may be rounded to FP8 (docs/guide/fp8.md).
        k: NHD ``[nnz_kv, num_kv_heads, head_dim]``, HND ``[num_kv_heads, nnz_kv, head_dim]``; as ``q``, or
            float8_e4m3fn, float8_e5m2. Keys of all requests, concatenated.
        v: as ``k``, with a head_dim of its own; as ``k``. Values, in the order of the keys.
        plan: the fields of a ``PrefillPlan``; int32. A plan of a planner that was made with ``max_pages`` 0.
        workspace: ``[elements]``; float32. Scratch memory: the planner's ``workspace``. Its contents mean nothing
            between calls. Written.
        sm_scale: Factor on ``q·k``; None is ``1/sqrt(head_dim)`` of the keys.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        window_left: A query row sees at most this many keys before its own position; -1 is no window.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        pos_encoding: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``, applied inside attention.
        rope_scale: Divides the frequencies of ``ROPE_LLAMA``.
        rope_theta: Base of the frequencies of ``ROPE_LLAMA``.
        causal: Hide later keys. The last query row has the position of the last key, whatever the two lengths.
        window_right: A query row sees at most this many keys after its own position; -1 is no window. Without effect
            where ``causal`` hides those keys.
        mask: ``[bytes]``; uint8. Packed custom mask, which replaces ``causal``: for each request its ``qo_len·kv_len``
            bits in row-major order, little-endian, padded to a whole byte. A set bit keeps the key; keys beyond the end
            of the mask are hidden.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        kv_layout: ``NHD`` or ``HND``: the order of tokens (N) and heads (H) in a page or in a ragged tensor.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[nnz_qo, num_qo_heads, head_dim_vo]``, as ``q``. Attention output. 0 in rows that see no key.
        lse: float32 ``[nnz_qo, num_qo_heads]``, or ``[0]``. Base-2 log-sum-exp, -inf in rows that see no key; no
            elements without ``return_lse``.
    """
    return torch.ops.attn.ragged_prefill(
        q,
        k,
        v,
        plan,
        workspace,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sinks=sinks,
        kv_scale=kv_scale,
        pos_encoding=pos_encoding,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        causal=causal,
        window_right=window_right,
        mask=mask,
        out_dtype=out_dtype,
        kv_layout=kv_layout,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    window_right: int = -1,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Query rows of one request, or of several requests of equal lengths, over their keys and values, without a plan.
    One query row is a decode step. If there are fewer query tiles than the GPU computes at a time, keys are split
    (docs/guide/plans.md).

    Args:
        q: ``[nnz_qo, num_qo_heads, head_dim]``; float16, bfloat16, float32, float8_e4m3fn. Query rows of all requests,
            in order. With FP8 queries, probabilities may be rounded to FP8 (docs/guide/fp8.md).
        k: NHD ``[nnz_kv, num_kv_heads, head_dim]``, HND ``[num_kv_heads, nnz_kv, head_dim]``; as ``q``, or
            float8_e4m3fn, float8_e5m2. Keys of all requests, in order.
        v: as ``k``, with a head_dim of its own; as ``k``. Values.
        batch_size: The number of requests. Each has ``nnz_qo / batch_size`` query rows and ``kv_len = nnz_kv /
            batch_size`` keys.
        sm_scale: Factor on ``q·k``; None is ``1/sqrt(head_dim)`` of the keys.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        window_left: A query row sees at most this many keys before its own position; -1 is no window.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        pos_encoding: ``NONE``, ``ROPE_LLAMA`` or ``ALIBI``, applied inside attention.
        rope_scale: Divides the frequencies of ``ROPE_LLAMA``.
        rope_theta: Base of the frequencies of ``ROPE_LLAMA``.
        causal: Hide later keys. The last query row has the position of the last key, whatever the two lengths.
        window_right: A query row sees at most this many keys after its own position; -1 is no window. Without effect
            where ``causal`` hides those keys.
        mask: ``[ceil(nnz_qo·kv_len / 8)]``; uint8. Packed custom mask, which replaces ``causal``: row-major bits of
            ``[nnz_qo, kv_len]``, little-endian. A set bit keeps the key.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        kv_layout: ``NHD`` or ``HND``: the order of tokens (N) and heads (H) in a page or in a ragged tensor.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[nnz_qo, num_qo_heads, head_dim_vo]``, as ``q``. Attention output. 0 in rows that see no key.
        lse: float32 ``[nnz_qo, num_qo_heads]``, or ``[0]``. Base-2 log-sum-exp, -inf in rows that see no key; no
            elements without ``return_lse``.
    """
    return torch.ops.attn.single_prefill(
        q,
        k,
        v,
        batch_size,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sinks=sinks,
        kv_scale=kv_scale,
        pos_encoding=pos_encoding,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        causal=causal,
        window_right=window_right,
        mask=mask,
        out_dtype=out_dtype,
        kv_layout=kv_layout,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def block_sparse_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the blocks of dense keys and values that a block map selects. A block row is a request of the plan
    and the keys are a cache of pages, so the work follows the selected blocks, and no other key is read.

    Args:
        q: ``[rows, num_qo_heads, head_dim]``; float16, bfloat16, float32, float8_e4m3fn. Query rows of the matrix, in
            order. With FP8 queries, probabilities may be rounded to FP8 (docs/guide/fp8.md).
        k: NHD ``[keys, num_kv_heads, head_dim]``, HND ``[num_kv_heads, keys, head_dim]``; as ``q``, or float8_e4m3fn,
            float8_e5m2. Keys of the matrix, in order: whole pages of the plan.
        v: as ``k``, with a head_dim of its own; as ``k``. Values, in the order of the keys.
        plan: the fields of a ``PrefillPlan``; int32. The result of ``BlockSparsePlanner.plan()`` or
            ``VariableBlockSparsePlanner.plan()``.
        workspace: ``[elements]``; float32. Scratch memory: the planner's ``workspace``. Its contents mean nothing
            between calls. Written.
        sm_scale: Factor on ``q·k``; None is ``1/sqrt(head_dim)`` of the keys.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        causal: Hide keys after a row's position in the matrix. The plan must have been made with ``causal`` too.
        mask: ``[bytes]``; uint8. Packed mask of the elements inside the blocks, which replaces ``causal``: for each
            block row its rows by its selected keys, in row-major order, little-endian, padded to a whole byte.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        kv_layout: ``NHD`` or ``HND``: the order of tokens (N) and heads (H) in a page or in a ragged tensor.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[nnz_qo, num_qo_heads, head_dim_vo]``, as ``q``. Attention output. 0 in rows that see no key.
        lse: float32 ``[nnz_qo, num_qo_heads]``, or ``[0]``. Base-2 log-sum-exp, -inf in rows that see no key; no
            elements without ``return_lse``.
    """
    return torch.ops.attn.block_sparse_prefill(
        q,
        k,
        v,
        plan,
        workspace,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        kv_scale=kv_scale,
        causal=causal,
        mask=mask,
        out_dtype=out_dtype,
        kv_layout=kv_layout,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: Plan,
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Multi-head latent attention over a paged cache of compressed KV: every query head reads one key ``[ckv, kpe]``,
    whose value is ``ckv``.

    Args:
        q_nope: ``[nnz_qo, num_heads, head_dim_ckv]``; float16, bfloat16, float32. Query part without position, with the
            key up-projection absorbed.
        q_pe: ``[nnz_qo, num_heads, head_dim_kpe]``; as ``q_nope``. Query part with rotary position.
        ckv_cache: ``[pages, page_size, head_dim_ckv]``; as ``q_nope``, or float8_e4m3fn, float8_e5m2. Compressed KV:
            the values, and the first part of the keys.
        kpe_cache: ``[pages, page_size, head_dim_kpe]``; as ``ckv_cache``. The rotary part of the keys, already rotated.
        plan: the fields of a ``PrefillPlan``; int32. A plan for one KV head, ``head_dim`` head_dim_ckv + head_dim_kpe
            and ``head_dim_vo`` head_dim_ckv.
        workspace: ``[elements]``; float32. Scratch memory: the planner's ``workspace``. Its contents mean nothing
            between calls. Written.
        sm_scale: Factor on the logits. None is ``1/sqrt(128 + 64)``, only for 512 + 64; other sizes must give it.
        logits_soft_cap: ``c > 0`` replaces each scaled logit ``x`` by ``c·tanh(x/c)``; 0 is off.
        window_left: A query row sees at most this many keys before its own position; -1 is no window.
        sinks: ``[num_qo_heads]``; float32. One natural-log logit per head that joins the softmax denominator, with
            value 0. It is neither scaled nor capped.
        kv_scale: ``[2]``; float32. Scales of an FP8 cache: the first multiplies the logits, the second the output.
        causal: Hide later keys. The last query row has the position of the last key, whatever the two lengths.
        out_dtype: The dtype of the output: any of ``q``'s dtypes, float8_e4m3fn or float8_e5m2; None is that of ``q``.
            A result beyond the range of an FP8 dtype becomes its largest number.
        return_lse: Compute the log-sum-exp.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        out: ``[nnz_qo, num_heads, head_dim_ckv]``, as ``q_nope``. Attention output, before the value up-projection.
        lse: float32 ``[nnz_qo, num_heads]``, or ``[0]``. Base-2 log-sum-exp; no elements without ``return_lse``.
    """
    return torch.ops.attn.batch_mla(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        plan,
        workspace,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        window_left=window_left,
        sinks=sinks,
        kv_scale=kv_scale,
        causal=causal,
        out_dtype=out_dtype,
        return_lse=return_lse,
        backend=backend,
    )


@typed
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> None:
    """Write new tokens into a paged cache, in place. A view of a cache works too.

    Args:
        k: ``[nnz, num_kv_heads, head_dim]``; as ``k_cache``. New keys, NHD whatever the layout of the cache.
        v: ``[nnz, num_kv_heads, head_dim_vo]``; as ``v_cache``. New values.
        k_cache: NHD ``[pages, page_size, num_kv_heads, head_dim]``, HND ``[pages, num_kv_heads, page_size, head_dim]``;
            float16, bfloat16, float32, float8_e4m3fn, float8_e5m2. Paged keys, written.
        v_cache: as ``k_cache``, with a head_dim of its own; as ``k_cache``. Paged values, written.
        batch_indices: ``[nnz]``; int32. Request of each new token. A token with -1, or without a page in the page
            table, is skipped.
        positions: ``[nnz]``; int32. Position of each new token in its request's sequence.
        kv_indices: ``[pages]``; int32. Page numbers. Entries after those of the last request are not used.
        kv_indptr: ``[batch + 1]``; int32. The pages of request ``b`` are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_layout: ``NHD`` or ``HND``, the layout of the cache.
        backend: ``auto``, or the name of the one backend to use.
    """
    return torch.ops.attn.append_kv(
        k,
        v,
        k_cache,
        v_cache,
        batch_indices,
        positions,
        kv_indices,
        kv_indptr,
        kv_layout=kv_layout,
        backend=backend,
    )


@typed
def append_mla_kv(
    ckv: Tensor,
    kpe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write new tokens into the paged cache of ``batch_mla``, in place.

    Args:
        ckv: ``[nnz, head_dim_ckv]``; as ``ckv_cache``. New compressed KV.
        kpe: ``[nnz, head_dim_kpe]``; as ``ckv_cache``. New rotated keys.
        ckv_cache: ``[pages, page_size, head_dim_ckv]``; float16, bfloat16, float32, float8_e4m3fn, float8_e5m2.
            Compressed KV, written.
        kpe_cache: ``[pages, page_size, head_dim_kpe]``; as ``ckv_cache``. Rotated keys, written.
        batch_indices: ``[nnz]``; int32. Request of each new token. A token with -1, or without a page in the page
            table, is skipped.
        positions: ``[nnz]``; int32. Position of each new token in its request's sequence.
        kv_indices: ``[pages]``; int32. Page numbers. Entries after those of the last request are not used.
        kv_indptr: ``[batch + 1]``; int32. The pages of request ``b`` are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        backend: ``auto``, or the name of the one backend to use.
    """
    return torch.ops.attn.append_mla_kv(
        ckv,
        kpe,
        ckv_cache,
        kpe_cache,
        batch_indices,
        positions,
        kv_indices,
        kv_indptr,
        backend=backend,
    )


@typed
def batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Request and position of every token that is appended, as ``append_kv`` takes them.

    Args:
        append_indptr: ``[batch + 1]``; int32. The new tokens of request ``b`` are rows ``append_indptr[b]`` to
            ``append_indptr[b + 1]``.
        seq_lens: ``[batch]``; int32. Tokens of each request, including those that are appended.
        nnz: Rows of the result: the tokens that are appended, or more.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        batch_indices: int32 ``[nnz]``. Request of each row; -1 in rows of no request.
        positions: int32 ``[nnz]``. Position of each row in its request; -1 in rows of no request.
    """
    return torch.ops.attn.batch_indices_positions(append_indptr, seq_lens, nnz, backend=backend)


@typed
def seq_lens(
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """Tokens of each request, from its page table.

    Args:
        kv_indptr: ``[batch + 1]``; int32. The pages of request ``b`` are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_last_page_len: ``[batch]``; int32. Tokens in the last page of each request, 1 to the page size. Ignored for a
            request without pages.
        page_size: Tokens in a page, at least 1.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        seq_lens: int32 ``[batch]``. 0 for a request without pages.
    """
    return torch.ops.attn.seq_lens(kv_indptr, kv_last_page_len, page_size, backend=backend)


@typed
def page_table(
    block_tables: Tensor,
    seq_lens: Tensor,
    page_size: int,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a block table to the compressed page table that the plan ops take.

    Args:
        block_tables: ``[batch, max_pages_per_request]``; int32. Page numbers, a row per request, of which the first
            ``ceil(seq_len / page_size)`` are used. A request that is longer than its row is cut to the tokens that fit
            in the row's pages.
        seq_lens: ``[batch]``; int32. Tokens of each request.
        page_size: Tokens in a page, at least 1.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        kv_indptr: int32 ``[batch + 1]``. Cumulative pages.
        kv_indices: int32 ``[batch·max_pages_per_request]``. Page numbers without gaps, then zeros.
        kv_last_page_len: int32 ``[batch]``. Tokens in each request's last page; 0 for a request without tokens.
    """
    return torch.ops.attn.page_table(block_tables, seq_lens, page_size, backend=backend)


@typed
def block_sparse_table(
    block_mask: Tensor,
    row_indptr: Tensor,
    col_indptr: Tensor,
    page_size: int,
    max_pages: int,
    *,
    causal: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The page table of a block map, for a prefill plan whose requests are the block rows. Each request has the pages
    of its selected block columns, in ascending order.

    Args:
        block_mask: ``[num_maps, block_rows, block_cols]``; bool. The selected blocks.
        row_indptr: ``[num_maps, block_rows + 1]``; int32. Offsets of the query rows of each block row.
        col_indptr: ``[num_maps, block_cols + 1]``; int32. Offsets of the keys of each block column, multiples of
            ``page_size``.
        page_size: Tokens in a page, at least 1.
        max_pages: Entries of ``kv_indices``. Pages beyond them are left out.
        causal: Leave out keys after the last row of a block row, by their positions in the matrix: the last query row
            has the position of the last key. The positions of a block row lie in one block column.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        kv_indptr: int32 ``[num_maps·block_rows + 1]``. Offsets of the pages of each block row, of one map after
            another.
        kv_indices: int32 ``[max_pages]``. Page numbers; the keys of map ``h`` follow those of map ``h - 1``. Entries
            after the last block row's are 0.
        kv_last_page_len: int32 ``[num_maps·block_rows]``. Tokens in the last page of each block row, 0 without pages.
        positions: int32 ``[num_maps·block_rows]``. Position of the first row of each block row among its selected keys,
            for a causal plan.
    """
    return torch.ops.attn.block_sparse_table(
        block_mask,
        row_indptr,
        col_indptr,
        page_size,
        max_pages,
        causal=causal,
        backend=backend,
    )


@typed
def shard_page_table(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    rank: int,
    world: int,
    interleave: int,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a page table that one rank holds, where the tokens of every request are dealt to several ranks,
    ``interleave`` at a time. Nothing is copied to the host.

    Args:
        kv_indptr: ``[batch + 1]``; int32. The pages of request ``b`` are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
        kv_indices: ``[pages]``; int32. Page numbers. Entries after those of the last request are not used.
        kv_last_page_len: ``[batch]``; int32. Tokens in the last page of each request, 1 to the page size. Ignored for a
            request without pages.
        page_size: Tokens in a page, at least 1.
        rank: The rank, 0 to ``world - 1``.
        world: Ranks that hold the keys.
        interleave: Tokens that a rank holds in a row, a multiple of ``page_size``: token ``t`` is on rank ``t //
            interleave % world``.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        kv_indptr: int32 ``[batch + 1]``. Cumulative pages of the rank.
        kv_indices: int32 ``[pages]``. Page numbers of the rank without gaps, then zeros.
        kv_last_page_len: int32 ``[batch]``. Tokens in the rank's last page of each request; 0 for a request without
            pages there.
    """
    return torch.ops.attn.shard_page_table(
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        page_size,
        rank,
        world,
        interleave,
        backend=backend,
    )


@typed
def merge_state(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys, from attention over each.

    Args:
        v_a: ``[rows, heads, head_dim]``; float16, bfloat16, float32. Attention output over some of the keys.
        s_a: ``[rows, heads]``; float32. Base-2 log-sum-exp of ``v_a``.
        v_b: ``[rows, heads, head_dim]``; as ``v_a``. Attention output over other keys.
        s_b: ``[rows, heads]``; float32. Base-2 log-sum-exp of ``v_b``.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        v: as ``v_a``. The merged output; 0 where both states are empty.
        s: float32 ``[rows, heads]``. The merged base-2 log-sum-exp; -inf where both states are empty.
    """
    return torch.ops.attn.merge_state(v_a, s_a, v_b, s_b, backend=backend)


@typed
def merge_states(
    v: Tensor,
    s: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The same for any number of states per row.

    Args:
        v: ``[rows, states, heads, head_dim]``; float16, bfloat16, float32. Attention outputs.
        s: as ``v`` without head_dim; float32. Base-2 log-sum-exp of ``v``.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        v: ``[rows, heads, head_dim]``, as ``v``. The merged output.
        s: float32 ``[rows, heads]``. The merged base-2 log-sum-exp.
    """
    return torch.ops.attn.merge_states(v, s, backend=backend)


@typed
def merge_state_in_place(
    v: Tensor,
    s: Tensor,
    v_other: Tensor,
    s_other: Tensor,
    mask: Tensor | None = None,
    *,
    backend: str = "auto",
) -> None:
    """Merge another state into ``v`` and ``s``.

    Args:
        v: ``[rows, heads, head_dim]``; float16, bfloat16, float32. Attention output, written.
        s: ``[rows, heads]``; float32. Base-2 log-sum-exp of ``v``, written.
        v_other: ``[rows, heads, head_dim]``; as ``v``. The state to merge into ``v``.
        s_other: ``[rows, heads]``; float32. Base-2 log-sum-exp of ``v_other``.
        mask: ``[rows]``; bool, uint8. Rows to merge; the others stay as they are. None merges all.
        backend: ``auto``, or the name of the one backend to use.
    """
    return torch.ops.attn.merge_state_in_place(v, s, v_other, s_other, mask, backend=backend)


@typed
def merge_states_varlen(
    v: Tensor,
    s: Tensor,
    indptr: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge a number of states that differs from row to row.

    Args:
        v: ``[states, heads, head_dim]``; float16, bfloat16, float32. Attention outputs, grouped by row.
        s: as ``v`` without head_dim; float32. Base-2 log-sum-exp of ``v``.
        indptr: ``[rows + 1]``; int32. The states of row ``r`` are ``indptr[r]`` to ``indptr[r + 1]``.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        v: ``[rows, heads, head_dim]``, as ``v``. The merged output; 0 in rows without a state.
        s: float32 ``[rows, heads]``. The merged base-2 log-sum-exp; -inf in rows without a state.
    """
    return torch.ops.attn.merge_states_varlen(v, s, indptr, backend=backend)


@typed
def packbits(
    x: Tensor,
    *,
    bitorder: str = "big",
    backend: str = "auto",
) -> Tensor:
    """Pack eight bits into a byte; the last byte is padded with zeros.

    Args:
        x: ``[bits]``; bool, uint8. The bits; any value but 0 is a set bit.
        bitorder: ``big``: the first bit is the highest of a byte; ``little``: the lowest.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        packed: uint8 ``[ceil(bits / 8)]``. The bytes.
    """
    return torch.ops.attn.packbits(x, bitorder=bitorder, backend=backend)


@typed
def segment_packbits(
    x: Tensor,
    indptr: Tensor,
    num_bytes: int,
    *,
    bitorder: str = "big",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Pack segments of bits, each padded to a whole byte, as the masks of a batch.

    Args:
        x: ``[bits]``; bool, uint8. The bits; any value but 0 is a set bit.
        indptr: ``[segments + 1]``; int32. Segment ``i`` is ``x[indptr[i]:indptr[i + 1]]``.
        num_bytes: Bytes of the packed result: the sum of ``ceil(length / 8)`` over the segments. It is an argument
            because a traced op cannot read it from ``indptr``.
        bitorder: ``big``: the first bit is the highest of a byte; ``little``: the lowest.
        backend: ``auto``, or the name of the one backend to use.

    Returns:
        packed: uint8 ``[num_bytes]``. The bytes.
        byte_indptr: int32 ``[segments + 1]``. Where the bytes of each segment begin.
    """
    return torch.ops.attn.segment_packbits(x, indptr, num_bytes, bitorder=bitorder, backend=backend)
