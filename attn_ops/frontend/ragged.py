"""Prefill over ragged keys and values: those of all requests in one tensor, by cumulative lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.eager.prepared_call import prepared
from attn_ops.frontend.arguments import DType, DTypes, check_fp16_reduction, refuse, renamed, required
from attn_ops.frontend.base import Wrapper, graph_buffers
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.element_offsets import check_repeated, token_offsets
from attn_ops.frontend.engine_attributes import buffer
from attn_ops.frontend.kv_cache import values_for
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import forward_changes
from attn_ops.frontend.plan_spec import prefill_spec, splitting
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import Scale, ScaleFactors, reciprocal
from attn_ops.frontend.with_lse import ForwardWithLse
from attn_ops.ops.options import FP8
from attn_ops.plan.page_table import PageTable
from attn_ops.typed import typed


class BatchPrefillWithRaggedKVCacheWrapper(ForwardWithLse, Wrapper):
    """Prefill or append for a batch over ragged keys and values: plan() once for a batch, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        kv_layout: ``"NHD"`` for ``[nnz_kv, num_kv_heads, head_dim]``, ``"HND"`` for heads first.
        use_cuda_graph: ``qo_indptr_buf [batch + 1]`` and ``kv_indptr_buf [batch + 1]``, int32, become the plan's
            memory; masks are copied to ``custom_mask_buf``, uint8. The batch size is fixed, and no later plan may have
            more query rows or a longer request than the first. Without it the buffers have no effect.
        mask_indptr_buf (``qk_indptr_buf`` in 0.2), backend, jit_kwargs, variant_owns_mask: no effect on results
            (:mod:`attn_ops.policy`).
        jit_args: as for decoding.

    run() traces: under ``torch.compile(fullgraph=True)`` it is one ``attn.ragged_prefill`` node.
    """

    _kv_indptr_buf = buffer("kv_indptr")

    @typed
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        *,
        qk_indptr_buf: Tensor | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            backend=backend,
            jit_args=jit_args,
            buffers=graph_buffers(
                use_cuda_graph,
                qo_indptr=("qo_indptr_buf", qo_indptr_buf),
                kv_indptr=("kv_indptr_buf", kv_indptr_buf),
                mask=("custom_mask_buf", custom_mask_buf),
            ),
        )
        renamed(self._name, "qk_indptr_buf", qk_indptr_buf, "mask_indptr_buf", mask_indptr_buf)
        self._element_offsets = backend == "cudnn"

    def prepare_plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
        uniform_q_len: int | None = None,
        *,
        data_type: DType | None = None,
        head_dim: int | None = None,
        allow_fp16_qk_reduction: bool | None = None,
        window_right: int = -1,
    ) -> PreparedPlan:
        """Plan a batch. Eager, never inside a graph.

        ``qo_indptr`` and ``kv_indptr``, int ``[batch + 1]``, are the cumulative query rows and keys. With
        ``backend="cudnn"``, ``seq_lens`` and ``seq_lens_q`` they may count elements, as in FlashInfer. ``v_indptr``
        repeats ``kv_indptr``, and ``o_indptr`` repeats ``qo_indptr``, in tokens or elements. The other arguments and
        errors are those of the paged wrapper's plan().
        """
        where = f"{self._name}.plan"
        check_fp16_reduction(where, allow_fp16_qk_reduction, use_fp16_qk_reduction)
        dims = head_dim, head_dim_qk, head_dim_vo
        spec = prefill_spec(where, num_qo_heads, num_kv_heads, *dims, before_mask="head_dim_qk")
        split = splitting(where, fixed_split_size, disable_split_kv)
        spec = spec._replace(paged=False, causal=causal, window_left=window_left, window_right=window_right, **split)
        required(where, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        qo_heads, kv_heads = spec.num_qo_heads, spec.num_kv_heads
        if self._element_offsets:
            rows_of = seq_lens if seq_lens_q is None else seq_lens_q
            qo_indptr = token_offsets(qo_indptr, rows_of, qo_heads * spec.head_dim_qk)
            kv_indptr = token_offsets(kv_indptr, seq_lens, kv_heads * spec.head_dim_qk)
        check_repeated(where, "v_indptr", v_indptr, "kv_indptr", kv_indptr, kv_heads * spec.head_dim_vo)
        check_repeated(where, "o_indptr", o_indptr, "qo_indptr", qo_indptr, qo_heads * spec.head_dim_vo)
        table = PageTable.of(where, kv_indptr, qo_indptr=qo_indptr)
        dtypes = DTypes.of(where, q_data_type, kv_data_type, o_data_type, data_type)
        return self._prepare_prefill(
            where,
            Batch("ragged_prefill", table, spec, dtypes=dtypes),
            (custom_mask, packed_custom_mask),
            (prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            window_right=window_right,
        )

    begin_forward = plan = committing(prepare_plan)

    def _ragged_call(
        self,
        where: str,
        tensors: tuple[Tensor, Tensor, Tensor],
        output: OutputSpec,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        **changes: Any,
    ) -> AttentionCall:
        per_output = {"v_scale": v_scale, "o_scale": reciprocal(where, "o_scale", o_scale)}
        scales = ScaleFactors({"q_scale": q_scale, "k_scale": k_scale}, per_output)
        q, k, v = tensors
        return self._call(where, (q, k, values_for(k, v)), output, scales, **changes)

    def _scales_by_position(self, q: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of ``args`` that are scales: here also one or two of them."""
        return args if q.dtype in FP8 else ()

    @typed
    @prepared
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        sinks: Tensor | None = None,
        window_left: int | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend as planned.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``.
            k, v: ``[kv_indptr[-1], num_kv_heads, head_dim]`` or more rows, or heads first with layout HND. If
                ``k`` is not FP8, FP8 values are converted to its dtype, in a copy.
            args: of an FP8 query ``q_scale, k_scale, v_scale`` by position, or the first of them; ``sinks, sm_scale``
                with the variant AttentionSink; otherwise without effect.
            o_scale: the output is divided by it, before it is rounded.

        The other arguments are those of the paged wrapper's run().

        Returns:
            ``out [rows, num_qo_heads, head_dim_vo]``, with ``return_lse`` also float32 ``lse``.
        """
        where = f"{self._name}.run"
        refuse(where, kv_cache_sf=kv_cache_sf)
        given: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
        if args:
            given = self._run_positional(where, args, q, **given)
        output = OutputSpec(out, lse, return_lse, lse_base=lse_base, lse_layout=lse_layout)
        return self._ragged_call(where, (q, k, v), output, o_scale=o_scale, window_left=window_left, **given)

    @typed
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Any:
        """:meth:`run` of the 0.1 interface: an option that is not at its default replaces the planned one."""
        where = f"{self._name}.forward"
        changes = forward_changes(
            where,
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self._ragged_call(where, (q, k, v), OutputSpec(return_lse=return_lse), **changes).execute()
