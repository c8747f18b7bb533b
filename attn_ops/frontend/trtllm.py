"""``trtllm_*`` and ``xqa_batch_decode``: block tables, layout HND by default, one scale for each product.

``bmm1_scale`` replaces ``sm_scale`` and all scales of query and keys, ``bmm2_scale`` multiplies the
output; each is a number or a 0-d tensor. They run on this library's kernels whatever their name.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions, check_real, integers
from attn_ops.eager.interposition import check_no_grad
from attn_ops.eager.op_call import Executable, MappedCall
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import ShapeError, fail, shape_of
from attn_ops.frontend.arguments import (
    DType,
    as_sinks,
    check_dtypes,
    given_tensor,
    layout,
    output_dtype,
    own_backend,
    positive,
    ranked,
    refuse,
    refuse_with,
    required,
)
from attn_ops.frontend.block_tables import block_table, check_host_pages, query_row_offsets, rank_keys
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.call_plans import expected_keys
from attn_ops.frontend.context import context_shard
from attn_ops.frontend.head_tables import HeadTables, with_one_table
from attn_ops.frontend.kv_cache import PagedCache, paged, paged_sizes
from attn_ops.frontend.masks import check_tree_mask, most_rows
from attn_ops.frontend.one_shot import QUERY_DIMS, block_table_call
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops.options import AttentionOptions, bounded
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import cumulative, seen
from attn_ops.symbolic_sizes import agree, holds
from attn_ops.typed import typed


def _output_dtype(where: str, out: Tensor | None, out_dtype: DType | None) -> torch.dtype | None:
    if out_dtype is not None:
        return output_dtype(where, "out_dtype", out_dtype)
    return None if out is None else output_dtype(where, "out", out.dtype)


def _options(where: str, query: Tensor, window_left: int, sinks: Any, causal: bool = True) -> AttentionOptions:
    """The options of a call. The softmax scale is 1: ``bmm1_scale`` takes its place."""
    sinks = as_sinks(where, sinks, query.device)
    return bounded(where, AttentionOptions(sm_scale=1.0, window_left=window_left, sinks=sinks, causal=causal))


def _caches_and_table(
    where: str,
    kv_cache: PagedCache,
    block_tables: Tensor,
    device: torch.device,
    kv_layout: str,
    shared_pages: bool,
    seq_lens: Tensor | None,
    window_left: int,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Keys, values and their page table. Unless ``shared_pages``, keys and values are copies of the pages they have.

    ``seq_lens`` None: page numbers are not checked before they are copied.
    """
    caches = paged(where, kv_cache, layout(where, kv_layout), may_be_shared=True)
    if shared_pages:
        return caches, block_table(where, "block_tables", block_tables, device)
    copies, table = with_one_table(where, caches, block_tables, device)
    page_size, _ = paged_sizes(where, caches[0], kv_layout)
    for i, cache in enumerate(caches):
        tables = f"block_tables[:, {i}]", block_tables[:, i]
        check_host_pages(where, *tables, seq_lens, page_size, cache.shape[0], window_left)
    return copies, table


class _Decode(NamedTuple):
    """A call that decodes by block tables, as the public functions describe it.

    cu_rows       the name and the tensor of the cumulative query rows, in place of ``q_len_per_req``
    mask          the tree mask of draft tokens
    shared_pages  keys and values have one table
    context       the shard, and the tokens of each request on all ranks before its query rows
    """

    where: str
    query: Tensor
    kv_cache: PagedCache
    block_tables: Tensor
    seq_lens: Tensor
    options: AttentionOptions
    output: OutputSpec
    scales: ScaleFactors
    kv_layout: str
    q_len_per_req: int | None
    cu_rows: tuple[str, Tensor | None] = ("cum_seq_lens_q", None)
    mask: Tensor | None = None
    backend: str = "auto"
    shared_pages: bool = True
    context: tuple[ContextShard | None, Tensor | None] = (None, None)

    def attention(self) -> AttentionCall:
        where, query, device = self.where, self.query, self.query.device
        shard, _ = self.context
        given = self.kv_cache, self.block_tables, device, self.kv_layout, self.shared_pages
        lens = self.seq_lens if shard is None else None
        caches, table = _caches_and_table(where, *given, lens, self.options.window_left)
        check_dtypes(where, query, *caches)
        name, indptr = self.cu_rows
        if indptr is None:
            check_has_dimensions(where, query=query)
            q_len = 1 if self.q_len_per_req is None else self.q_len_per_req
            positive(where, q_len_per_req=q_len)
            rows = query_row_offsets(where, query.shape[0], table.shape[0], q_len, device)
            added: int | Tensor = q_len
        else:
            ranked(where, "query", query, QUERY_DIMS)
            rows = cumulative(where, name, indptr, table.shape[0], "the query", query)
            q_len, added = 1 if self.mask is None else most_rows(indptr), rows
        if self.mask is not None:
            check_tree_mask(where, self.mask, query.shape[0], q_len)
        positioned = rows is not None or self.options.window_left >= 0
        return block_table_call(
            where,
            (query, *caches),
            table,
            self.seq_lens,
            rows,
            self.options,
            self.output,
            self.scales,
            kv_layout=self.kv_layout,
            backend=own_backend(self.backend),
            tree_mask=self.mask,
            keys=rank_keys(where, *self.context, added, table.shape[0], device, positioned=positioned),
        )

    def attention_by_head(self) -> Executable:
        """The call with a table and lengths per KV head: KV heads become requests."""
        where, query, output = self.where, self.query, self.output
        ranked(where, "query", query, QUERY_DIMS)
        caches = paged(where, self.kv_cache, layout(where, self.kv_layout), may_be_shared=True)
        tables = HeadTables.of(where, caches, self.block_tables, self.kv_layout, query.device)
        if query.shape[1] % tables.num_kv_heads:
            expected = f"a multiple of the {int(tables.num_kv_heads)} KV heads"
            fail(ShapeError, where, f"query has {int(query.shape[1])} heads", expected, "correct it")
        by_head = self.block_tables.shape[:2]
        if not agree(given_tensor(where, "seq_lens", self.seq_lens, query.device).shape, by_head):
            shown, expected = f"seq_lens is {shape_of(self.seq_lens)}", f"{shape_of(by_head)}, as block_tables"
            fail(ShapeError, where, shown, expected, "pass lengths of each KV head")
        if seen(self.block_tables):
            page_size, _ = paged_sizes(where, caches[0], self.kv_layout)
            for h, table in enumerate(self.block_tables):
                name = f"block_tables[{h}]"
                check_host_pages(where, name, table, self.seq_lens[h], page_size, caches[0].shape[0])
        output.check(where, query, tables.caches[1].shape[-1])
        needs_lse = output.needs_lse
        call = self._replace(
            query=tables.split(query),
            kv_cache=tables.caches,
            block_tables=tables.table,
            seq_lens=self.seq_lens.reshape(-1),
            output=OutputSpec(return_lse=needs_lse, dtype=output.dtype),
        )

        def join(result: Any) -> Any:
            out, lse = map(tables.join, result) if needs_lse else (tables.join(result), None)
            return output.finalize(out, lse, out.dtype)

        return MappedCall(call.attention(), join, repeatable=False)


@typed
@functools.partial(prepared_function, no_effect=("max_seq_len", "max_q_len"))
def trtllm_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: Tensor | None = None,
    request_order_plan: Any = None,
) -> Any:
    """Decode a batch by block tables.

    Args:
        query: ``[batch * q_len_per_req, num_qo_heads, head_dim]``, or by ``cum_seq_lens_q [batch + 1]``. Several rows
            of a request are its last tokens, causal among themselves unless there is a ``mask``.
        kv_cache: ``[pages, 2, num_kv_heads, page_size, head_dim]`` (NHD: tokens before heads), or a pair; ``[pages, 1,
            ...]`` if the keys are the values.
        block_tables: int ``[batch, max_pages_per_request]``. ``seq_lens``: int ``[batch]``.
        uses_shared_paged_kv_idx: if False, ``block_tables`` is ``[batch, 2, max_pages_per_request]``: pages of keys and
            of values, which are copied in every call.
        enable_block_sparse_attention: ``block_tables [num_kv_heads, batch, max_pages_per_request]`` and ``seq_lens
            [num_kv_heads, batch]``: the pages of each KV head, in order, and their tokens.
        bmm1_scale_log2: ``bmm1_scale`` times log2(e), in its place.
        out_dtype: dtype of the output; default that of ``out``, or of the query. FP8 is saturated.
        bmm2_scale: multiplies the output. ``o_scale`` has no effect: callers divide ``bmm2_scale`` by it.
        sinks: float32 ``[num_qo_heads]``, or a list of that one tensor.
        cp_world, cp_rank: this rank holds tokens ``cp_rank``, ``cp_rank + cp_world`` and so on of each request, and
            ``block_tables`` and ``seq_lens`` are those of these tokens. The result is attention over these tokens:
            merge it with the results of the other ranks. ``sinks`` and ``mask`` are refused with several ranks.
        causal_seqlens_kv_global: int ``[batch]``, tokens of each request on all ranks before its query rows. Needed
            for several rows per request, and for windows.
        mask: uint16 or uint32 ``[batch, q_len_per_req, words]``, or ``[rows, words]``: bit j of a row's words, the
            lowest first, says whether the row sees the token of the request's query row j. Every row sees all tokens
            before those of the query rows.

    Returns:
        ``out`` as the query, in ``out_dtype``; with ``return_lse`` also float32 ``lse``, base 2.
    """
    where = "trtllm_batch_decode_with_kv_cache"
    refuse(
        where,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        kv_cache_sf=kv_cache_sf,
    )
    if enable_block_sparse_attention:
        refuse_with(
            where,
            "enable_block_sparse_attention",
            "KV heads are requests of their own",
            window_left=None if window_left < 0 else window_left,
            sinks=sinks,
            mask=mask,
            cum_seq_lens_q=cum_seq_lens_q,
            uses_shared_paged_kv_idx=None if uses_shared_paged_kv_idx else False,
            cp_world=None if cp_world == 1 else cp_world,
            causal_seqlens_kv_global=causal_seqlens_kv_global,
        )
    shard = context_shard(
        where,
        {"sinks": sinks, "mask": mask},
        cp_world=cp_world,
        cp_rank=cp_rank,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
    )
    if bmm1_scale_log2 is not None:
        check_real(where, "bmm1_scale_log2", bmm1_scale_log2)
        check_no_grad(where, bmm1_scale_log2=bmm1_scale_log2)
        bmm1_scale = bmm1_scale_log2.float() * math.log(2)
    call = _Decode(
        where,
        query,
        kv_cache,
        block_tables,
        seq_lens,
        options=_options(where, query, window_left, sinks),
        output=OutputSpec(out, lse, return_lse, _output_dtype(where, out, out_dtype)),
        scales=ScaleFactors.of_products(bmm1_scale, bmm2_scale),
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
        cu_rows=("cum_seq_lens_q", cum_seq_lens_q),
        mask=mask,
        backend=backend,
        shared_pages=uses_shared_paged_kv_idx,
        context=(shard, causal_seqlens_kv_global),
    )
    return call.attention_by_head() if enable_block_sparse_attention else call.attention()


@typed
@functools.partial(prepared_function, no_effect=("max_seq_len",))
def xqa_batch_decode_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    window_left: int = -1,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Tensor | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Tensor | None = None,
) -> Any:
    """:func:`trtllm_batch_decode_with_kv_cache` under its other name, layout NHD; ``q_cu_seq_lens`` for ragged rows."""
    where = "xqa_batch_decode_with_kv_cache"
    refuse(where, kv_cache_sf=kv_cache_sf)
    call = _Decode(
        where,
        query,
        kv_cache,
        block_tables,
        seq_lens,
        options=_options(where, query, window_left, sinks),
        output=OutputSpec(out, dtype=_output_dtype(where, out, None)),
        scales=ScaleFactors.of_products(bmm1_scale, bmm2_scale),
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
        cu_rows=("q_cu_seq_lens", q_cu_seq_lens),
        mask=mask,
    )
    return call.attention()


@typed
@functools.partial(prepared_function, no_effect=("max_q_len",))
def trtllm_batch_context_with_kv_cache(
    query: Tensor,
    kv_cache: PagedCache,
    workspace_buffer: Tensor | None,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | Tensor,
    bmm2_scale: float | Tensor,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int = -1,
    out: Tensor | None = None,
    out_dtype: DType | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    backend: str = "trtllm-gen",
) -> Any:
    """Prefill or append a batch by block tables.

    Args:
        query: ``[nnz_qo, num_qo_heads, head_dim]``, of request b the rows ``cum_seq_lens_q[b]`` to ``[b + 1]``.
        kv_cache, block_tables, seq_lens, scales: as for :func:`trtllm_batch_decode_with_kv_cache`.
        batch_size: rows of ``block_tables``.
        max_kv_len: no result depends on it beyond rounding. A small number lets a kernel for few keys run, in eager
            calls on Hopper.
        causal: aligned bottom-right.

    Returns:
        ``out`` as the query, in ``out_dtype``; with ``return_lse`` also float32 ``lse``, base 2.
    """
    where = "trtllm_batch_context_with_kv_cache"
    refuse(
        where,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        uses_spcompress=uses_spcompress,
    )
    required(where, cum_seq_lens_q=cum_seq_lens_q)
    ranked(where, "query", query, QUERY_DIMS)
    given = kv_cache, block_tables, query.device, kv_layout, uses_shared_paged_kv_idx
    caches, tables = _caches_and_table(where, *given, seq_lens, window_left)
    check_dtypes(where, query, *caches)
    integers(where, batch_size=batch_size)
    if not holds(tables.shape[0] == batch_size):
        fail(
            ShapeError,
            where,
            f"batch_size is {int(batch_size)}",
            f"{int(tables.shape[0])}, the rows of block_tables",
            "correct it",
        )
    return block_table_call(
        where,
        (query, *caches),
        tables,
        seq_lens,
        cumulative(where, "cum_seq_lens_q", cum_seq_lens_q, batch_size, "the query", query),
        _options(where, query, window_left, sinks, causal),
        OutputSpec(out, lse, return_lse, _output_dtype(where, out, out_dtype)),
        ScaleFactors.of_products(bmm1_scale, bmm2_scale),
        kv_layout=kv_layout,
        backend=own_backend(backend),
        expected=expected_keys(max_kv_len),
    )
