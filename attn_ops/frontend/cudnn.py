"""``cudnn_batch_*``: lengths per request, caches in layout HND, tensors that are packed without gaps.

Offsets of queries, outputs and ragged KV are accepted if they are the offsets of packed tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import ArgumentError, ArgumentTypeError, ShapeError, fail
from attn_ops.frontend.arguments import as_sinks, output_dtype, own_backend, positive, ranked, required
from attn_ops.frontend.block_tables import TableNames, block_table, lengths, query_row_offsets
from attn_ops.frontend.call_plans import expected_keys
from attn_ops.frontend.element_offsets import check_offsets
from attn_ops.frontend.one_shot import RAGGED_DIMS, block_table_call, ragged_call
from attn_ops.frontend.outputs import OutputSpec, PaddedLse
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops.options import FP8, AttentionOptions, bounded
from attn_ops.plan.page_table import cumulative, seen
from attn_ops.symbolic_sizes import holds
from attn_ops.typed import typed

NAMES = TableNames("block_tables", "actual_seq_lens_kv", None)


def _indptr(where: str, name: str, seq_lens: Tensor, rows_name: str, rows: Tensor) -> Tensor:
    """``qo_indptr`` or ``kv_indptr`` of lengths that are packed in ``rows``."""
    batch = seq_lens.numel()
    ends = lengths(where, name, seq_lens, batch, seq_lens.device).cumsum(0)
    return cumulative(where, name, torch.cat((ends.new_zeros(1), ends)), batch, rows_name, rows)


def _lengths(
    where: str, name: str, offsets_name: str, offsets: Tensor | None, units: str, rows_name: str, rows: Tensor
) -> Tensor:
    """The lengths ``name``, which the caller left out, as the differences of offsets in tokens of ``rows``."""
    if offsets is None or units != "tokens":
        fail(ArgumentTypeError, where, f"{name} is missing", f"it, or {offsets_name} in tokens", f"pass {name}")
    return cumulative(where, offsets_name, offsets.flatten(), offsets.numel() - 1, rows_name, rows).diff()


@typed
@functools.partial(prepared_function, no_effect=("max_sequence_kv",))
def cudnn_batch_decode_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor | None,
    *,
    max_sequence_kv: int,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    lse: Tensor | None = None,
    q_len_per_req: int = 1,
    window_left: int = -1,
    sinks: Tensor | None = None,
) -> Any:
    """Decode a batch by block tables.

    Args:
        q: ``[batch * q_len_per_req, num_qo_heads, head_dim]``; several rows of a request are causal.
        k_cache, v_cache: ``[pages, num_kv_heads, page_size, head_dim]``.
        scale: the softmax scale.
        actual_seq_lens_kv: int ``[batch]``, or with dimensions of size 1 after it.
        block_tables: int ``[batch, max_pages_per_request]``.
        batch_offsets_q, batch_offsets_o: int ``[batch]`` or ``[batch + 1]``, the first element of each request, refused
            unless packed without gaps. ``batch_offsets_k`` and ``batch_offsets_v`` have no effect: ``block_tables``
            says where pages are.

    Returns:
        ``out`` as q, with ``return_lse`` also float32 ``lse``, base 2.
    """
    where = "cudnn_batch_decode_with_kv_cache"
    ranked(where, "q", q, RAGGED_DIMS)
    check_has_dimensions(where, v_cache=v_cache)
    actual_seq_lens_kv, block_tables = required(where, actual_seq_lens_kv=actual_seq_lens_kv, block_tables=block_tables)
    positive(where, q_len_per_req=q_len_per_req)
    tables = block_table(where, "block_tables", block_tables, q.device)
    rows = query_row_offsets(where, q.shape[0], tables.shape[0], q_len_per_req, q.device)
    heads = q.shape[1]
    check_offsets(
        where,
        "elements",
        torch.arange(tables.shape[0] + 1, device="cpu") * q_len_per_req,
        {
            "batch_offsets_q": (batch_offsets_q, (heads * q.shape[2], q.stride(0))),
            "batch_offsets_o": (batch_offsets_o, (heads * v_cache.shape[-1],)),
        },
        without_end=True,
    )
    sinks = as_sinks(where, sinks, q.device)
    options = AttentionOptions(sm_scale=scale, window_left=window_left, sinks=sinks, causal=True)
    return block_table_call(
        where,
        (q, k_cache, v_cache),
        tables,
        actual_seq_lens_kv,
        rows,
        bounded(where, options, sm_scale="scale"),
        OutputSpec(out, lse, return_lse, _unnamed_dtype(q.dtype, out)),
        ScaleFactors(),
        kv_layout="HND",
        names=NAMES,
    )


def _unnamed_dtype(q_dtype: torch.dtype, out: Tensor | None) -> torch.dtype:
    """The dtype of an output that no argument names: that of an FP8 ``out``, else the query's."""
    return out.dtype if out is not None and out.dtype in FP8 else q_dtype


def _no_offsets(where: str, **offsets: Tensor | None) -> None:
    for name, value in offsets.items():
        if value is not None:
            fail(
                ArgumentError,
                where,
                f"{name} is given with a paged cache",
                "offsets of ragged KV only",
                "leave it out; block_tables says where pages are",
            )


def _check_longest(where: str, seq_lens: Tensor, most: int) -> None:
    """Raise if lengths that can be read exceed ``most``, the rows per request of a padded LSE."""
    longest = int(seq_lens.long().max()) if seen(seq_lens) and seq_lens.numel() else 0
    if longest > most:
        fail(
            ShapeError,
            where,
            f"a request has {longest} query rows and max_token_per_sequence is {most}",
            f"at least {longest}, for the padded lse",
            "correct it, and pass such a buffer",
        )


@typed
def cudnn_batch_prefill_with_kv_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    workspace_buffer: Tensor | None,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: Tensor | None = None,
    actual_seq_lens_kv: Tensor | None = None,
    block_tables: Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_offsets_q: Tensor | None = None,
    batch_offsets_o: Tensor | None = None,
    batch_offsets_k: Tensor | None = None,
    batch_offsets_v: Tensor | None = None,
    batch_offsets_stats: Tensor | None = None,
    batch_offsets_units: str = "elements",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
    lse_base: str = "log2",
) -> tuple[Tensor, Tensor | None]:
    """Prefill or append a batch, over a paged cache by ``block_tables``, or over ragged KV without them.

    Args:
        q: ``[nnz_qo, num_qo_heads, head_dim]``, packed by ``actual_seq_lens_q``.
        k_cache, v_cache: ``[pages, num_kv_heads, page_size, head_dim]``, or ragged ``[nnz_kv, num_kv_heads, head_dim]``
            packed by ``actual_seq_lens_kv``.
        actual_seq_lens_q, actual_seq_lens_kv: int ``[batch]``, or with dimensions of size 1 after it; unless given, the
            differences of ``batch_offsets_q`` and ``batch_offsets_k [batch + 1]``, which are then in tokens.
        scale: the softmax scale; ``q_scale``, ``k_scale`` multiply it, ``v_scale`` the output: one value each, or one
            per head with an FP8 query.
        max_sequence_kv: no result depends on it beyond rounding. A small number lets a kernel for few keys run, in
            eager calls on Hopper.
        o_data_type: dtype of the output; default that of ``q``, or of an FP8 ``out``.
        batch_offsets_*: int ``[batch + 1]``, or with dimensions of size 1 after it, in ``batch_offsets_units`` elements
            or tokens; refused unless packed without gaps.
        lse: a buffer ``[nnz_qo, num_qo_heads]``, or padded ``[batch, max_token_per_sequence, num_qo_heads]``.

    Returns:
        ``(out, lse)``; ``lse`` is None unless ``return_lse``, and ``[nnz_qo, num_qo_heads]`` without a buffer.
    """
    where = "cudnn_batch_prefill_with_kv_cache"
    ranked(where, "q", q, RAGGED_DIMS)
    check_has_dimensions(where, v_cache=v_cache)
    units = batch_offsets_units
    if actual_seq_lens_q is None:
        names = "actual_seq_lens_q", "batch_offsets_q"
        actual_seq_lens_q = _lengths(where, *names, batch_offsets_q, units, "q", q)
    if actual_seq_lens_kv is None:
        names = "actual_seq_lens_kv", "batch_offsets_k"
        actual_seq_lens_kv = _lengths(where, *names, batch_offsets_k, units, "k_cache", k_cache)
    qo_indptr = _indptr(where, "actual_seq_lens_q", actual_seq_lens_q, "q", q)
    heads = q.shape[1]
    check_offsets(
        where,
        units,
        qo_indptr,
        {
            "batch_offsets_q": (batch_offsets_q, (heads * q.shape[2], q.stride(0))),
            "batch_offsets_o": (batch_offsets_o, (heads * v_cache.shape[-1],)),
            "batch_offsets_stats": (batch_offsets_stats, (heads,)),
        },
    )
    dtype = _unnamed_dtype(q.dtype, out) if o_data_type is None else output_dtype(where, "o_data_type", o_data_type)
    padded = PaddedLse(qo_indptr, max_token_per_sequence)
    output = OutputSpec(out, lse, return_lse, dtype, lse_base, padded=padded)
    if output.padding is not None:
        _check_longest(where, actual_seq_lens_q, max_token_per_sequence)
    options = bounded(where, AttentionOptions(sm_scale=scale, causal=causal), sm_scale="scale")
    scales = ScaleFactors.of_tensors(q_scale, k_scale, v_scale)
    tensors, backend = (q, k_cache, v_cache), own_backend(backend or "auto")
    expected = expected_keys(max_sequence_kv)
    if block_tables is None:
        kv_indptr = _ragged_indptr(where, tensors, actual_seq_lens_kv, units, batch_offsets_k, batch_offsets_v)
        indptr = qo_indptr, kv_indptr
        call = ragged_call(where, tensors, *indptr, options, output, scales, backend=backend, expected=expected)
    else:
        _no_offsets(where, batch_offsets_k=batch_offsets_k, batch_offsets_v=batch_offsets_v)
        tables = block_table(where, "block_tables", block_tables, q.device)
        if not holds(actual_seq_lens_q.numel() == tables.shape[0]):
            shown = f"actual_seq_lens_q has {int(actual_seq_lens_q.numel())} lengths"
            fail(ShapeError, where, shown, f"{int(tables.shape[0])}, the rows of block_tables", "correct it")
        batch = tables, actual_seq_lens_kv, qo_indptr
        call = block_table_call(
            where,
            tensors,
            *batch,
            options,
            output,
            scales,
            kv_layout="HND",
            backend=backend,
            names=NAMES,
            expected=expected,
        )
    result = call.execute()
    return result if return_lse else (result, None)


def _ragged_indptr(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    seq_lens: Tensor,
    units: str,
    offsets_k: Tensor | None,
    offsets_v: Tensor | None,
) -> Tensor:
    """``kv_indptr`` of ragged keys and values, whose offsets are checked if they are given."""
    q, k, v = tensors
    for name, t in (("k_cache", k), ("v_cache", v)):
        ranked(where, name, t, RAGGED_DIMS)
    kv_indptr, kv_heads = _indptr(where, "actual_seq_lens_kv", seq_lens, "k_cache", k), k.shape[1]
    offsets = {
        "batch_offsets_k": (offsets_k, (kv_heads * q.shape[2], k.stride(0))),
        "batch_offsets_v": (offsets_v, (kv_heads * v.shape[-1], v.stride(0))),
    }
    check_offsets(where, units, kv_indptr, offsets)
    return kv_indptr
