"""Prefill and decoding in one call (POD): two plans, two ops, in the order that a caller gives them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.argument_checks import flags, optional_flags
from attn_ops.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import PlanError, UnsupportedError, fail
from attn_ops.frontend.arguments import DType, attention_options, layout, refuse
from attn_ops.frontend.base import WrapperGroup
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.kv_cache import PagedCache
from attn_ops.frontend.masks import packed_mask_by_plan
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import forward_changes
from attn_ops.frontend.prepared_plan import refuse_tracing
from attn_ops.frontend.scales import Scale, ScaleFactors
from attn_ops.plan.state import PrefillPlan
from attn_ops.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_call
from attn_ops.typed import page_table_called, typed

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]


@prepared_function
def _prefill(q: Tensor, k: Tensor, v: Tensor, where: str, return_lse: bool, **options: Any) -> AttentionCall:
    """The prefill of one request. ``options`` are the other arguments of :func:`single_prefill_call`."""
    return single_prefill_call(q, k, v, where, OutputSpec(return_lse=return_lse), ScaleFactors(), **options)


class PODWithPagedKVCacheWrapper(WrapperGroup):
    """One request's prefill over dense keys and values, together with a batch's decoding over a paged cache.

    Arguments of the constructor and of plan() are those of the decode wrapper; plan() is for the decoding.
    """

    @typed
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse(type(self).__name__, jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._decode.is_cuda_graph_enabled

    @typed
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None) -> None:
        self._decode.reset_workspace_buffer(float_workspace_buffer)

    @typed
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan the decoding of a batch, as the decode wrapper does."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    begin_forward = plan

    @typed
    def run(
        self,
        q_p: Tensor,
        k_p: Tensor,
        v_p: Tensor,
        q_d: Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: Tensor | None = None,
        packed_custom_mask_d: Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[Any, Any]:
        """Both parts: names with ``_p`` are :func:`~attn_ops.prefill.single_prefill_with_kv_cache`'s arguments.

        Names with ``_d`` are for the decoding: an option that is not at its default replaces the planned one. Masks of
        decode rows are refused; one row sees every key, whether causal or not. ``q_scale``, ``k_scale`` and
        ``v_scale`` are those of the decoding. ``args`` have no effect.

        Returns:
            ``(prefill, decode)``, each an output, or ``(out, lse)`` with its ``return_lse``.
        """
        where = f"{type(self).__name__}.run"
        for name, mask in (("custom_mask_d", custom_mask_d), ("packed_custom_mask_d", packed_custom_mask_d)):
            if mask is not None:
                expected, fix = "no mask of decode rows", "use a prefill wrapper for them"
                fail(UnsupportedError, where, f"{name} is given", expected, fix)
        flags(where, causal_d=causal_d)
        optional_flags(where, return_lse_p=return_lse_p, return_lse_d=return_lse_d)
        attention_options(  # checked here for errors with this function's names
            where,
            suffix="_p",
            pos_encoding_mode=pos_encoding_mode_p,
            window_left=window_left_p,
            sm_scale=sm_scale_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
            causal=causal_p,
        )
        changes = forward_changes(
            where,
            suffix="_d",
            pos_encoding_mode=pos_encoding_mode_d,
            window_left=window_left_d,
            sm_scale=sm_scale_d,
            rope_scale=rope_scale_d,
            rope_theta=rope_theta_d,
        )
        scales: dict[str, Scale] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        prefill = _prefill(
            q_p,
            k_p,
            v_p,
            f"{where} (_p)",
            return_lse_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        output = OutputSpec(return_lse=return_lse_d)
        kv_layout = None if kv_layout_d == "NHD" else layout(where, kv_layout_d)
        decode = self._decode._paged_call(
            f"{where} (_d)", q_d, paged_kv_cache_d, output, **scales, kv_layout=kv_layout, **changes
        )
        return prefill, decode.execute()


class BatchPODWithPagedKVCacheWrapper(WrapperGroup):
    """A batch of prefills together with a batch of decodes, both over paged caches."""

    @typed
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(2)
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return False

    @typed
    def plan(
        self,
        qo_indptr_p: Tensor,
        kv_indptr_p: Tensor,
        kv_indices_p: Tensor,
        last_page_len_p: Tensor,
        qo_indptr_d: Tensor,
        kv_indptr_d: Tensor,
        kv_indices_d: Tensor,
        last_page_len_d: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan both batches, as the prefill wrapper does. Rows of the decode batch are not causal."""
        batches = (
            (self._prefill, (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p), "p"),
            (self._decode, (qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d), "d"),
        )
        refuse_tracing(f"{type(self).__name__}.plan", [table for _, table, _ in batches])
        prepared = []
        for wrapper, table, suffix in batches:
            names = (f"{name}_{suffix}" for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"))
            with page_table_called(*names):
                plan = wrapper.prepare_plan(
                    *table,
                    num_qo_heads,
                    num_kv_heads,
                    head_dim,
                    page_size,
                    pos_encoding_mode=pos_encoding_mode,
                    window_left=window_left,
                    q_data_type="float16" if q_data_type is None else q_data_type,
                    kv_data_type=kv_data_type,
                    data_type=data_type,
                    sm_scale=sm_scale,
                    rope_scale=rope_scale,
                    rope_theta=rope_theta,
                )
            prepared.append(plan)
        for plan in prepared:
            plan.commit()

    begin_forward = plan

    @typed
    def run(
        self,
        q_p: Tensor,
        paged_kv_cache_p: PagedCache,
        q_d: Tensor,
        paged_kv_cache_d: PagedCache,
        custom_mask_p: Tensor | None = None,
        packed_custom_mask_p: Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """``(prefill, decode)``, each an output, or ``(out, lse)`` with ``return_lse``; scales are the decoding's."""
        where = f"{type(self).__name__}.run"
        flags(where, causal_p=causal_p)
        optional_flags(where, return_lse=return_lse)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        output = OutputSpec(return_lse=return_lse)
        mask = None
        if custom_mask_p is not None or packed_custom_mask_p is not None:
            planned = self._prefill._planned
            if planned is None:
                fail(PlanError, where, "there is no plan", "plan() before run()", "call plan() for this batch")
            assert isinstance(planned.plan, PrefillPlan)
            mask = packed_mask_by_plan(f"{where} (_p)", custom_mask_p, packed_custom_mask_p, planned.plan, q_p.device)
        causal: dict[str, Any] = {"causal": True} if causal_p else {}
        calls = (
            self._prefill._paged_call(f"{where} (_p)", q_p, paged_kv_cache_p, output, mask=mask, **causal),
            self._decode._paged_call(f"{where} (_d)", q_d, paged_kv_cache_d, output, **scales),
        )
        return calls[0].execute(), calls[1].execute()
