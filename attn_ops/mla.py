"""Multi-head latent attention over a paged cache: one latent vector a token, shared by all heads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import integers, optional_flags
from attn_ops.eager.prepared_call import prepared
from attn_ops.errors import ArgumentError, OptionError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import (
    DType,
    DTypes,
    as_sinks,
    input_dtype,
    positive,
    refuse,
    renamed,
    required,
)
from attn_ops.frontend.arguments import output_dtype as checked_output_dtype
from attn_ops.frontend.base import Wrapper, graph_buffers
from attn_ops.frontend.block_tables import TableNames, block_table, check_host_pages, lengths
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.call_plans import with_pages
from attn_ops.frontend.deepseek import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from attn_ops.frontend.engine_attributes import buffer
from attn_ops.frontend.kv_cache import PagedCache, latent
from attn_ops.frontend.latent_scales import GroupScales, check_scales, scaled_query
from attn_ops.frontend.one_shot import latent_call
from attn_ops.frontend.outputs import LSE_BASE_NAMES, OutputSpec
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import Scale, ScaleFactors, reciprocal
from attn_ops.frontend.with_lse import RunWithLse
from attn_ops.gpu import is_capturing
from attn_ops.ops.options import FP8, MLA_DIMS, AttentionOptions, bounded, mla_scale
from attn_ops.plan.page_table import PageTable, by_length, index, real, uniform_indptr
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import PrefillPlan
from attn_ops.symbolic_sizes import holds
from attn_ops.tracing import is_compiling
from attn_ops.typed import typed

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]

Latent = Tensor | tuple[Tensor, Tensor] | list[Tensor]
LSE_MODES = {"none": None, **LSE_BASE_NAMES}
"""``lse_mode`` -> ``lse_base``; None for no LSE."""
OUTPUT_SCALES = ("none", "per-tensor")
NAMES_IN_RUN, NAMES_IN_FORWARD = TableNames("page_table", "kv_len"), TableNames("page_table", "seq_lens")


def default_scale(where: str, head_dim_ckv: int, head_dim_kpe: int) -> float:
    """``sm_scale`` of latents of 512 + 64: keys are 128 + 64 wide before absorption. Other sizes have no default."""
    if (head_dim_ckv, head_dim_kpe) != MLA_DIMS:
        fail(
            OptionError,
            where,
            f"sm_scale is missing for head dimensions {head_dim_ckv} + {head_dim_kpe}",
            "a number",
            "pass sm_scale, 1 / sqrt of the key's width before absorption",
        )
    return mla_scale(None)


class BatchMLAPagedAttentionWrapper(RunWithLse, Wrapper):
    """MLA for a batch: plan() once for a batch, run() in every layer; or forward() with a page table and no plan.

    Args:
        float_workspace_buffer: scratch memory on the device of the query.
        use_cuda_graph: ``qo_indptr [batch + 1]`` and ``kv_len_arr [batch]``, int32, become the plan's memory;
            ``kv_indptr [batch + 1]`` and ``kv_indices [max_pages]`` decide its capacity, and may hold the page
            table for plan(), which does not write them. The batch size is fixed. Without ``use_cuda_graph`` these
            tensors have no effect.
        kv_layout: ``"NHD"`` or ``"HND"``, which are the same for a cache without heads.
        backend: no effect on results (:mod:`attn_ops.policy`).
    """

    _kv_indptr_buf, _kv_indices_buf, _kv_len_arr_buf = buffer("kv_indptr"), buffer("kv_indices"), buffer("kv_len")

    @typed
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
        *,
        kv_layout: str = "NHD",
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            backend=backend,
            buffers=graph_buffers(
                use_cuda_graph,
                qo_indptr=("qo_indptr", qo_indptr),
                kv_indptr=("kv_indptr", kv_indptr),
                kv_indices=("kv_indices", kv_indices),
                kv_len=("kv_len_arr", kv_len_arr),
            ),
        )
        self._page_numbers: Tensor | None = None
        self._lse_base: str | None = None
        self._output_dtype: torch.dtype | None = None

    def prepare_plan(
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: DType | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> PreparedPlan:
        """Plan a batch.

        Args:
            qo_indptr: int ``[batch + 1]``, cumulative query rows (``cum_seq_lens_q`` is another name).
            kv_indptr, kv_indices, kv_len_arr: the page table, and the tokens of each request; or ``block_tables
                [batch, max_pages_per_request]`` and ``seq_lens [batch]``.
            head_dim_ckv, head_dim_kpe: 512 and 64 unless given.
            sm_scale: default ``1 / sqrt(128 + 64)`` for 512 + 64; other sizes have none.
            lse_mode: ``"basee"`` makes natural LSEs the default of run(); ``output_dtype``: of its output.
        """
        where = f"{self._name}.plan"
        refuse(where, use_profiler=use_profiler, metadata=metadata, skip_softmax=skip_softmax)
        if output_scale not in OUTPUT_SCALES:
            fail(OptionError, where, f"output_scale is {output_scale!r}", ", ".join(OUTPUT_SCALES), "pass one of these")
        if lse_mode not in LSE_MODES:
            fail(OptionError, where, f"lse_mode is {lse_mode!r}", ", ".join(LSE_MODES), "pass one of these")
        (rows,) = required(where, qo_indptr=renamed(where, "qo_indptr", qo_indptr, "cum_seq_lens_q", cum_seq_lens_q))
        num_heads, page_size = required(where, num_heads=num_heads, page_size=page_size)
        positive(where, num_heads=num_heads, page_size=page_size)
        table = self._table(where, page_size, (kv_indptr, kv_indices, kv_len_arr), block_tables, seq_lens)
        ckv = MLA_DIMS[0] if head_dim_ckv is None else head_dim_ckv
        kpe = MLA_DIMS[1] if head_dim_kpe is None else head_dim_kpe
        positive(where, head_dim_ckv=ckv)
        integers(where, head_dim_kpe=kpe)
        optional_flags(where, causal=causal)
        spec = PlanSpec(
            decode=False,
            paged=True,
            page_size=page_size,
            num_qo_heads=num_heads,
            num_kv_heads=1,
            head_dim_qk=ckv + kpe,
            head_dim_vo=ckv,
            causal=causal or False,
        )
        scale = default_scale(where, ckv, kpe) if sm_scale is None else sm_scale
        out = None if output_dtype is None else checked_output_dtype(where, "output_dtype", output_dtype)
        dtypes = None
        if q_data_type is not None:
            dtypes = DTypes.of(where, q_data_type, kv_data_type, out)
        elif kv_data_type is not None:
            input_dtype(where, "kv_data_type", kv_data_type)  # refuses other dtypes
        options = bounded(where, AttentionOptions(sm_scale=scale, causal=spec.causal))
        table = table._replace(qo_indptr=index(where, "qo_indptr", rows))
        plan = self._prepare(where, Batch("batch_mla", table, spec, options, dtypes))
        return plan.with_state(_lse_base=LSE_MODES[lse_mode], _output_dtype=out)

    begin_forward = plan = committing(prepare_plan)

    def _table(
        self,
        where: str,
        page_size: int,
        listed: tuple[Tensor | None, Tensor | None, Tensor | None],
        block_tables: Tensor | None,
        seq_lens: Tensor | None,
    ) -> PageTable:
        named = dict(zip(("kv_indptr", "kv_indices", "kv_len_arr"), listed, strict=True))
        if block_tables is None:
            kv_indptr, kv_indices, kv_len_arr = required(where, **named)
            return by_length(where, kv_indptr, kv_indices, kv_len_arr, page_size)
        given = ", ".join(name for name, t in named.items() if t is not None)
        if given:
            fail(ArgumentError, where, f"{given} and block_tables are both given", "one page table", "drop one")
        pages = block_table(where, "block_tables", block_tables, block_tables.device)
        capacity = pages.shape[1] * page_size
        tokens = lengths(where, "seq_lens", seq_lens, pages.shape[0], pages.device, capacity)
        return PageTable.of(where, *torch.ops.attn.page_table(pages, tokens, page_size))

    @typed
    @prepared
    def run(
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: Scale = None,
        *,
        query: Latent | None = None,
        kv_cache: Latent | None = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: Scale = None,
        bmm2_scale: Scale = None,
    ) -> Any:
        """Attend as planned, or, with ``page_table`` and ``kv_len``, over that table without a plan.

        Args:
            q_nope, q_pe: ``[rows, num_heads, ckv]`` and ``[rows, num_heads, kpe]``; or ``query``, the pair, or both
                packed in one tensor of width ``ckv + kpe``.
            ckv_cache, kpe_cache: ``[pages, page_size, ckv]`` and ``[pages, page_size, kpe]``; or ``kv_cache``.
            page_table: int ``[batch, max_pages_per_request]``, ``kv_len``: int ``[batch]``; the query has the same
                number of rows for every request.
            return_lse_base_on_e: natural LSE in place of base 2.
            ckv_scale, kpe_scale: scales of an FP8 cache; the output is multiplied by ``ckv_scale`` too. If they differ,
                one part of the query is multiplied by their ratio and rounded to its dtype. Both are required for an
                FP8 cache, unless ``bmm1_scale`` or ``page_table`` is given.
            ckv_scale_arr: float32 ``[pages, page_size, ckv / 128]``, in place of ``ckv_scale``: a scale for every
                token and group of 128 columns. Each call copies the batch's pages in the dtype of the query.
            bmm1_scale: replaces ``sm_scale``. ``bmm2_scale`` multiplies the output, and ``o_scale`` divides
                an FP8 output.

        Returns:
            ``out [rows, num_heads, ckv]``, with ``return_lse`` also float32 ``lse [rows, num_heads]``.
        """
        where = f"{self._name}.run"
        refuse(
            where,
            profiler_buffer=profiler_buffer,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        nope, pe = self._query(where, q_nope, q_pe, query)
        if page_table is None and self._planned is not None:
            self._planned.check_query_dtypes(where, q_nope=nope, q_pe=pe)
        ckv, kpe = self._cache(where, ckv_cache, kpe_cache, kv_cache, nope.shape[-1])
        requires_scales = ckv.dtype in FP8 and page_table is None and bmm1_scale is None
        check_scales(where, ckv_scale, ckv_scale_arr, kpe_scale, requires_scales)
        dtype = self._dtype_of_output(nope, out)
        groups: GroupScales | None = None
        of_cache: dict[str, float | None] = {}
        if ckv_scale_arr is not None:
            groups = GroupScales.of(where, ckv_scale_arr, ckv, kpe_scale)
        else:
            nope, pe, of_cache = scaled_query(nope, pe, ckv.dtype, ckv_scale, kpe_scale)
        if o_scale is not None and dtype not in FP8:
            shown = f"o_scale is given and the output is {dtype_name(dtype)}"
            fail(OptionError, where, shown, "an FP8 output", "pass an FP8 buffer out, or plan an FP8 output_dtype")
        scales = ScaleFactors(
            {"bmm1_scale": bmm1_scale, **of_cache},
            {"bmm2_scale": bmm2_scale, "ckv_scale": ckv_scale, "o_scale": reciprocal(where, "o_scale", o_scale)},
        )
        optional_flags(where, return_lse_base_on_e=return_lse_base_on_e)
        output = OutputSpec(out, lse, return_lse, dtype, "ln" if return_lse_base_on_e else self._lse_base or "log2")
        sm_scale = None if bmm1_scale is None else 1.0  # bmm1_scale takes its place
        tensors = nope, pe, ckv, kpe
        if page_table is not None:
            return self._unplanned_call(where, tensors, page_table, kv_len, output, scales, sinks, sm_scale, groups)
        if kv_len is not None:
            required(where, page_table=page_table)
        call = self._call(where, tensors, output, scales, sinks=sinks, sm_scale=sm_scale)
        return call if groups is None else self._over_dequantized_pages(call, groups)

    def _unplanned_call(
        self,
        where: str,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        page_table: Tensor,
        kv_len: Tensor | None,
        output: OutputSpec,
        scales: ScaleFactors,
        sinks: Tensor | None = None,
        sm_scale: float | None = None,
        groups: GroupScales | None = None,
        names: TableNames = NAMES_IN_RUN,
    ) -> AttentionCall:
        """The call of ``(q_nope, q_pe, ckv_cache, kpe_cache)`` over a page table. The default scale is the plan's."""
        q_nope, q_pe, *_ = tensors
        options = AttentionOptions(
            sm_scale=self._scale(where, q_nope, q_pe) if sm_scale is None else sm_scale,
            sinks=as_sinks(where, sinks, q_nope.device),
            causal=True,
        )
        tables, lens, rows = self._block_tables(where, names, q_nope, page_table, kv_len)
        if groups is not None:
            check_host_pages(where, names.table, tables, lens, tensors[2].shape[1], tensors[2].shape[0])
            tensors = groups.dequantize(tensors, tables.flatten().to(q_nope.device))
            tables = torch.arange(tables.numel(), dtype=torch.int32, device=q_nope.device).view(tables.shape)
        return latent_call(where, tensors, tables, lens, rows, options, output, scales, names=names)

    def _over_dequantized_pages(self, call: AttentionCall, groups: GroupScales) -> AttentionCall:
        """A planned ``call`` over copies of the batch's pages, which are dequantized, in the order of the plan."""
        p = self._planned
        assert p is not None
        assert isinstance(p.plan, PrefillPlan)
        p.check(call)
        pages = p.plan.kv_indices
        # Made before dequantize's kernels: attention may read a plan before the preceding kernel has ended.
        dequantized = self._dequantized_pages(pages)
        q_nope, q_pe, ckv, kpe = call.tensors
        tensors = groups.dequantize((q_nope, q_pe, ckv, kpe), pages)
        if is_compiling():  # the compiler may order this write last: a planning op publishes it
            plan = with_pages(p.plan, dequantized)
        else:
            plan = p.plan._replace(kv_indices=dequantized)
        return call._replace(tensors=tensors, plan=replace(p, plan=plan, dtypes=None))

    @typed
    @prepared
    def forward(self, q: Latent, kv_cache: Latent, page_table: Tensor, seq_lens: Tensor) -> Any:
        """Decode without a plan: ``q [batch, num_heads, ckv + kpe]`` or a pair, by ``page_table`` and ``seq_lens``.

        Several rows of a request are causal. ``sm_scale`` and the split of a packed query are those of the plan if
        there is one, else those of 512 + 64.
        """
        where = f"{self._name}.forward"
        required(where, q=q, kv_cache=kv_cache, page_table=page_table, seq_lens=seq_lens)
        q_nope, q_pe = self._query(where, None, None, q)
        tensors = q_nope, q_pe, *self._cache(where, None, None, kv_cache, q_nope.shape[-1])
        output = OutputSpec(dtype=self._dtype_of_output(q_nope, None))
        return self._unplanned_call(
            where, tensors, page_table, seq_lens, output, ScaleFactors(), names=NAMES_IN_FORWARD
        )

    def _dequantized_pages(self, pages: Tensor) -> Tensor:
        """The page numbers of dequantized pages: 0, 1 and so on.

        Eager calls keep this tensor: prepared calls are evicted when it is freed.
        """
        numbers = self._page_numbers
        if numbers is None or numbers.shape != pages.shape:
            with nullcontext() if is_compiling() else torch.inference_mode(False):
                numbers = torch.arange(pages.shape[0], dtype=torch.int32, device=pages.device)
            # In a capture its values are written at replay.
            if real(numbers) and not (pages.is_cuda and is_capturing()):
                self._page_numbers = numbers
        return numbers

    def _dtype_of_output(self, q: Tensor, out: Tensor | None) -> torch.dtype:
        """The planned dtype, or that of an FP8 buffer, or the query's: bfloat16 if that is FP8."""
        if self._output_dtype is not None:
            return self._output_dtype
        if out is not None and (out.dtype in FP8 or q.dtype in FP8):
            return out.dtype
        return torch.bfloat16 if q.dtype in FP8 else q.dtype

    def _query(
        self, where: str, q_nope: Tensor | None, q_pe: Tensor | None, query: Latent | None
    ) -> tuple[Tensor, Tensor]:
        if query is None:
            q_nope, q_pe = required(where, q_nope=q_nope, q_pe=q_pe)
            return q_nope, q_pe
        if q_nope is not None or q_pe is not None:
            fail(ArgumentError, where, "query and q_nope, q_pe are both given", "one form", "drop one")
        if not isinstance(query, Tensor):
            if len(query) != 2:
                fail(ShapeError, where, f"the query has {len(query)} parts", "2, q_nope and q_pe", "pass a pair")
            return query[0], query[1]
        if query.dim() == 4 and query.shape[1] == 1:
            query = query.squeeze(1)
        ckv = MLA_DIMS[0] if self._planned is None else self._planned.spec.head_dim_vo
        if query.dim() != 3 or query.shape[2] < ckv:
            fail(
                ShapeError,
                where,
                f"the packed query is {shape_of(query)}",
                f"[rows, num_heads, {ckv} + head_dim_kpe]",
                "pass such a tensor, or the pair (q_nope, q_pe)",
            )
        return query[..., :ckv], query[..., ckv:]

    def _cache(
        self, where: str, ckv_cache: Tensor | None, kpe_cache: Tensor | None, kv_cache: PagedCache | None, ckv: int
    ) -> tuple[Tensor, Tensor]:
        if kv_cache is not None:
            if ckv_cache is not None or kpe_cache is not None:
                fail(ArgumentError, where, "kv_cache and ckv_cache, kpe_cache are both given", "one form", "drop one")
            return latent(where, kv_cache, ckv)
        (ckv_cache,) = required(where, ckv_cache=ckv_cache)
        return latent(where, ckv_cache, ckv) if kpe_cache is None else (ckv_cache, kpe_cache)

    def _scale(self, where: str, q_nope: Tensor, q_pe: Tensor) -> float:
        if self._planned is not None:
            assert self._planned.options.sm_scale is not None
            return self._planned.options.sm_scale
        return default_scale(where, q_nope.shape[-1], q_pe.shape[-1])

    def _block_tables(
        self, where: str, names: TableNames, q: Tensor, page_table: Tensor, kv_len: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, lengths and ``qo_indptr`` of a query with the same number of rows for every request."""
        (kv_len,) = required(where, **{names.lengths: kv_len})
        table = block_table(where, names.table, page_table, q.device)
        batch = table.shape[0]
        q_len = q.shape[0] // max(1, batch)
        if not holds(q.shape[0] == batch * q_len):
            fail(
                ShapeError,
                where,
                f"the query has {q.shape[0]} rows for the {batch} requests of page_table",
                "the same number of rows for every request",
                "plan() with qo_indptr for ragged rows",
            )
        return table, kv_len, uniform_indptr(batch, q_len, q.device)
