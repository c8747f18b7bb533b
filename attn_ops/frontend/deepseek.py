"""DeepSeek's attention by the names of other libraries: MLA decoding by block tables, and ragged prefill."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions, integers
from attn_ops.eager.op_call import Executable, MappedCall
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import OptionError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import (
    as_sinks,
    check_dtypes,
    own_backend,
    ranked,
    refuse,
    refuse_with,
    required,
)
from attn_ops.frontend.block_tables import block_table, query_row_offsets, rank_keys
from attn_ops.frontend.call_plans import expected_keys
from attn_ops.frontend.context import context_shard
from attn_ops.frontend.head_tables import table_of_latents
from attn_ops.frontend.kv_cache import latent, pages_of_one, values_for
from attn_ops.frontend.one_shot import RAGGED_DIMS, latent_call, ragged_call
from attn_ops.frontend.outputs import LSE_BASE_NAMES, OutputSpec, dtype_without_scale
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.frontend.sparse_latent import SparseTokens
from attn_ops.ops.options import AttentionOptions, bounded
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import cumulative, uniform_indptr
from attn_ops.typed import typed


class _LatentDecode(NamedTuple):
    """A call that decodes over a latent cache by block tables, as the public functions describe it.

    dims     widths of the two parts of a latent
    output   without ``dtype`` and ``rows_shape``, which the query decides. ``lse`` may have the query's dimensions
    context  the shard, and the tokens of each request on all ranks, its query rows included
    sparse   the tokens that each query row sees, if not all
    """

    where: str
    query: Tensor
    kv_cache: Tensor
    dims: tuple[int, int]
    block_tables: Tensor
    seq_lens: Tensor | None
    output: OutputSpec
    scales: ScaleFactors
    sinks: Any
    cum_seq_lens_q: Tensor | None = None
    context: tuple[ContextShard | None, Tensor | None] = (None, None)
    sparse: SparseTokens | None = None

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The two parts of the query, ``[rows, heads, width]``, and of the cache."""
        where, query, dims = self.where, self.query, self.dims
        integers(where, kv_lora_rank=dims[0], qk_rope_head_dim=dims[1])
        uniform = self.cum_seq_lens_q is None
        rank, rows = (4, "batch, q_len") if uniform else (3, "rows")
        if query.dim() != rank or query.shape[-1] != sum(dims):
            expected = f"[{rows}, num_heads, {int(sum(dims))}]"
            fail(ShapeError, where, f"query is {shape_of(query)}", expected, "reshape it")
        check_dtypes(where, query, self.kv_cache)
        flat, (ckv, kpe) = query.flatten(end_dim=-3), latent(where, self.kv_cache, dims[0])
        if kpe.shape[-1] != dims[1]:
            expected = f"{int(sum(dims))} at the end"
            fail(ShapeError, where, f"kv_cache is {shape_of(self.kv_cache)}", expected, "correct the sizes")
        return flat[..., : dims[0]], flat[..., dims[0] :], ckv, kpe

    def _rows(self, batch: int) -> tuple[Tensor, bool]:
        """The offsets of the requests' query rows, and whether rows have positions of their own."""
        where, query = self.where, self.query
        if self.cum_seq_lens_q is not None:
            return cumulative(where, "cum_seq_lens_q", self.cum_seq_lens_q, batch, "query", query), True
        query_row_offsets(where, query.shape[0], batch, 1, query.device)
        return uniform_indptr(query.shape[0], query.shape[1], query.device), query.shape[1] > 1

    def attention(self) -> Executable:
        where, query, table, seq_lens = self.where, self.query, self.block_tables, self.seq_lens
        q_nope, q_pe, ckv, kpe = self._parts()
        if self.sparse is None:
            required(where, seq_lens=seq_lens)
            table = block_table(where, "block_tables", table, query.device)
            batch = table.shape[0]
        else:
            indptr = self.cum_seq_lens_q
            batch = query.shape[0] if indptr is None else max(0, indptr.numel() - 1)
        rows, positioned = self._rows(batch)
        keys = rank_keys(where, *self.context, 0, batch, query.device, positioned=positioned)
        if self.sparse is not None:
            table, seq_lens = self.sparse.chosen(where, table, seq_lens, rows, query.shape[:-2], query.device)
            reason = "as sparse_mla_top_k counts tokens through all of them"
            ckv, kpe = (pages_of_one(where, "kv_cache", t, reason, "pass a contiguous cache") for t in (ckv, kpe))
            rows = uniform_indptr(q_nope.shape[0], 1, query.device)
        assert seq_lens is not None
        dtype, lse = dtype_without_scale(query, self.output.out), self.output.lse
        nested = lse is not None and lse.dim() == 3 and lse.shape == query.shape[:-1] and lse.is_contiguous()
        call = latent_call(
            where,
            (q_nope, q_pe, ckv, kpe),
            table,
            seq_lens,
            rows,
            AttentionOptions(sm_scale=1.0, sinks=as_sinks(where, self.sinks, query.device), causal=True),
            self.output._replace(
                lse=lse.flatten(0, 1) if nested else lse,  # type: ignore[union-attr]
                dtype=dtype,
                rows_shape=tuple(query.shape[:-2]),
            ),
            self.scales,
            keys,
            sparse=self.sparse is not None,
        )
        if nested and self.output.return_lse:
            return MappedCall(call, lambda result: (result[0], lse), repeatable=False)
        return call


@typed
@functools.partial(prepared_function, no_effect=("max_seq_len", "max_q_len"))
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> Any:
    """Decode a batch over a latent cache by block tables.

    Args:
        query: ``[batch, q_len, num_heads, kv_lora_rank + qk_rope_head_dim]``; several rows of a request are its last
            tokens, causal among themselves. With ``cum_seq_lens_q [batch + 1]``: ``[rows, num_heads, ...]``.
        kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]``, or with a dimension of one head.
        block_tables: int ``[batch, max_pages_per_request]``. ``seq_lens``: int ``[batch]``.
        uses_shared_paged_kv_idx: if False, ``block_tables`` is ``[batch, 2, max_pages_per_request]``, the same pages
            twice: a latent is a key and a value at once. The first ones are read.
        sparse_mla_top_k: if not 0, ``block_tables`` is ``[batch, q_len, sparse_mla_top_k]`` or, with
            ``cum_seq_lens_q``, ``[rows, sparse_mla_top_k]``: the tokens of each query row,
            ``page * page_size + offset``, each once and in any order; negative entries do not count.
            ``seq_lens [batch]``: a row counts at most the number of tokens that its request has up to that row.
            ``[batch, q_len]``: the number of tokens of each row. None: all tokens count.
        sparse_mla_top_k_lens: int ``[rows]``, tokens of each query row, which precede its negative entries. Without
            these lengths every call moves negative entries to the end.
        bmm1_scale: multiplies the logits, in place of ``sm_scale``. ``bmm2_scale``: multiplies the output.
        enable_dcp, cp_world, cp_rank: this rank holds tokens ``cp_rank``, ``cp_rank + cp_world`` and so on of each
            request, and ``block_tables`` and ``seq_lens`` are those of these tokens. The result is attention over these
            tokens: merge it with the results of the other ranks. ``sinks`` are refused with several ranks.
        causal_seqlens_kv_global: int ``[batch]``, tokens of each request on all ranks, its query rows included. Needed
            for several rows per request.
        return_lse_base: ``"base2"``, also meant by None, or ``"basee"``.

    Returns:
        ``out [..., num_heads, kv_lora_rank]`` in the dtype of the query, bfloat16 if that is FP8; with
        ``return_lse`` also float32 ``lse [rows, num_heads]``, or the buffer ``lse [batch, q_len, num_heads]``.
    """
    where = "trtllm_batch_decode_with_kv_cache_mla"
    refuse(
        where,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_scale_format=kv_scale_format,
    )
    sparse = SparseTokens.of(where, sparse_mla_top_k, sparse_mla_top_k_lens)
    shard = context_shard(
        where,
        {"sinks": sinks},
        enable_dcp=enable_dcp,
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    if sparse is not None:
        refuse_with(
            where,
            "sparse_mla_top_k",
            "query rows are requests of their own",
            enable_dcp=None if shard is None else enable_dcp,
            uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else False,
        )
    if not uses_shared_paged_kv_idx:
        block_tables = table_of_latents(where, block_tables, query.device)
    if return_lse_base not in (None, *LSE_BASE_NAMES):
        fail(OptionError, where, f"return_lse_base is {return_lse_base!r}", "base2 or basee", "pass one of the two")
    lse_base = "log2" if return_lse_base is None else LSE_BASE_NAMES[return_lse_base]
    return _LatentDecode(
        where,
        query,
        kv_cache,
        (kv_lora_rank, qk_rope_head_dim),
        block_tables,
        seq_lens,
        output=OutputSpec(out, lse, return_lse, lse_base=lse_base),
        scales=ScaleFactors.of_products(bmm1_scale, bmm2_scale),
        sinks=sinks,
        cum_seq_lens_q=cum_seq_lens_q,
        context=(shard, causal_seqlens_kv_global),
        sparse=sparse,
    ).attention()


@typed
@functools.partial(prepared_function, no_effect=("max_seq_len",))
def xqa_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: Any = None,
    enable_pdl: bool | None = None,
) -> Any:
    """:func:`trtllm_batch_decode_with_kv_cache_mla` under its other name.

    ``out`` may be ``[batch, num_heads, kv_lora_rank]`` for a query of one row per request.
    """
    where, dims = "xqa_batch_decode_with_kv_cache_mla", (kv_lora_rank, qk_rope_head_dim)
    check_has_dimensions(where, query=query)
    scales = ScaleFactors.of_products(bmm1_scale, bmm2_scale)
    flat = (query.shape[0], *query.shape[2:-1], kv_lora_rank)
    without_rows = out is not None and query.dim() == 4 and query.shape[1] == 1 and tuple(out.shape) == flat
    output = OutputSpec(out.unsqueeze(1) if without_rows else out)  # type: ignore[union-attr]
    call = _LatentDecode(where, query, kv_cache, dims, block_tables, seq_lens, output, scales, sinks)
    return call.attention() if out is None else MappedCall(call.attention(), lambda _: out, repeatable=False)


@typed
@functools.partial(prepared_function, no_effect=("max_q_len",))
def trtllm_ragged_attention_deepseek(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor | None,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    o_sf_scale: float | None,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sage_attn_sfs: tuple[Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, ...] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Tensor | None = None,
    kv_seq_lens_cpu: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> Any:
    """Prefill a batch over ragged keys and values, whose head dimensions may differ, such as 192 and 128.

    Args:
        query: ``[nnz_qo, num_qo_heads, head_dim_qk]``, of request b the rows ``cum_seq_lens_q[b]`` to ``[b + 1]``.
        key, value: ``[nnz_kv, num_kv_heads, head_dim]``, packed by ``cum_seq_lens_kv``. FP8 values with keys of another
            dtype are copied in that dtype, which is exact.
        bmm1_scale: multiplies the logits, in place of ``sm_scale``. ``bmm2_scale``: multiplies the output.
        batch_size: requests of ``cum_seq_lens_q``.
        max_kv_len: no result depends on it beyond rounding. A small number lets a kernel for few keys run, in eager
            calls on Hopper.
        is_causal: aligned bottom-right. ``attention_sinks``: float32 ``[num_qo_heads]``.

    Returns:
        ``out [nnz_qo, num_qo_heads, head_dim_vo]`` in the dtype of the query, bfloat16 if that is FP8; with
        ``return_lse`` also float32 ``lse``, base 2.
    """
    where = "trtllm_ragged_attention_deepseek"
    refuse(
        where,
        o_sf_scale=o_sf_scale,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        sage_attn_sfs=sage_attn_sfs,
        num_elts_per_sage_attn_blk=num_elts_per_sage_attn_blk,
        uses_spcompress=uses_spcompress,
    )
    required(where, cum_seq_lens_q=cum_seq_lens_q, cum_seq_lens_kv=cum_seq_lens_kv)
    integers(where, batch_size=batch_size)
    for name, t in (("query", query), ("key", key), ("value", value)):
        ranked(where, name, t, RAGGED_DIMS)
    qo_indptr = cumulative(where, "cum_seq_lens_q", cum_seq_lens_q, batch_size, "query", query)
    kv_indptr = cumulative(where, "cum_seq_lens_kv", cum_seq_lens_kv, batch_size, "key", key)
    sinks = as_sinks(where, attention_sinks, query.device, "attention_sinks")
    return ragged_call(
        where,
        (query, key, values_for(key, value)),
        qo_indptr,
        kv_indptr,
        bounded(
            where,
            AttentionOptions(sm_scale=1.0, window_left=window_left, sinks=sinks, causal=is_causal),
            causal="is_causal",
        ),
        OutputSpec(out, lse, return_lse, dtype_without_scale(query, out)),
        ScaleFactors.of_products(bmm1_scale, bmm2_scale),
        backend=own_backend(backend),
        expected=expected_keys(max_kv_len),
    )
