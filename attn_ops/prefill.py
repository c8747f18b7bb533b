"""Prefill and append: any number of query rows per request, over paged, ragged or dense keys and values.

FlashInfer's names and arguments; shapes and meaning as in the user guide (docs/guide/). LSE is base 2 unless
``lse_base="ln"``. A causal mask is aligned bottom-right: the last query row sees every key.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import flags
from attn_ops.eager.prepared_call import prepared, prepared_function
from attn_ops.errors import ShapeError, fail, shape_of
from attn_ops.frontend.arguments import (
    DType,
    DTypes,
    attention_options,
    check_fp16_reduction,
    layout,
    output_dtype,
    own_backend,
    refuse,
    renamed,
    required,
)
from attn_ops.frontend.base import graph_buffers
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.cudnn import cudnn_batch_prefill_with_kv_cache
from attn_ops.frontend.deepseek import trtllm_ragged_attention_deepseek
from attn_ops.frontend.element_offsets import token_offsets
from attn_ops.frontend.kv_cache import PagedCache
from attn_ops.frontend.masks import packed_single_mask
from attn_ops.frontend.one_shot import check_dense, dense_call
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import PagedWrapper, forward_changes
from attn_ops.frontend.plan_spec import prefill_spec, splitting
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.ragged import BatchPrefillWithRaggedKVCacheWrapper
from attn_ops.frontend.scales import Scale, ScaleFactors
from attn_ops.frontend.trtllm import trtllm_batch_context_with_kv_cache
from attn_ops.frontend.with_lse import ForwardWithLse
from attn_ops.ops.options import DENSE_DIMS, AttentionOptions
from attn_ops.plan.page_table import PageTable
from attn_ops.plan.spec import PlanSpec
from attn_ops.symbolic_sizes import agree
from attn_ops.typed import typed

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
]


@typed
@prepared_function
def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    allow_fp16_qk_reduction: bool | None = None,
    window_right: int = -1,
) -> Any:
    """The query rows of one request over all its keys.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]``.
        k, v: ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with layout HND; the
            values may have a head dimension of their own.
        scale_q, scale_k, scale_v, k_scale, v_scale: per tensor, or per head with an FP8 query (docs/guide/fp8.md).
            Scales of query and keys multiply ``sm_scale``, scales of the values the output.
        o_dtype: dtype of the output; default that of ``q``. FP8 is saturated.
        custom_mask: bool ``[qo_len, kv_len]`` or flat, True keeps; overrides ``causal``. ``packed_custom_mask``: its
            bits, little-endian in uint8; it takes precedence over ``custom_mask``.
        window_left, window_right: keys before and after the query's position that it sees, -1 for all.

    Returns:
        ``out [qo_len, num_qo_heads, head_dim_vo]``, with ``return_lse`` also float32 ``lse [qo_len, num_qo_heads]``.
    """
    where = "single_prefill_with_kv_cache"
    refuse(where, kv_cache_sf=kv_cache_sf)
    check_fp16_reduction(where, allow_fp16_qk_reduction, use_fp16_qk_reduction)
    return single_prefill_call(
        q,
        k,
        v,
        where,
        OutputSpec(return_lse=return_lse, dtype=None if o_dtype is None else output_dtype(where, "o_dtype", o_dtype)),
        ScaleFactors(
            {"scale_q": scale_q, "scale_k": scale_k, "k_scale": k_scale}, {"scale_v": scale_v, "v_scale": v_scale}
        ),
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        kv_layout=kv_layout,
        backend=backend,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        causal=causal,
        window_right=window_right,
    )


def single_prefill_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: str,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    kv_layout: str,
    backend: str = "auto",
    **options: Any,
) -> AttentionCall:
    """The call of one request. ``options`` are the arguments of :func:`attention_options`."""
    given = attention_options(where, **options)
    token = DENSE_DIMS[layout(where, kv_layout)].token
    check_dense(where, q, k, v)
    _check_mask_shape(where, custom_mask, q.shape[0], k.shape[token])
    mask = packed_single_mask(where, custom_mask, packed_custom_mask, q.shape[0], k.shape[token], q.device)
    given = given._replace(mask=mask)
    return dense_call(where, (q, k, v), given, output, scales, kv_layout=kv_layout, backend=own_backend(backend))


def _check_mask_shape(where: str, mask: Tensor | None, qo_len: int, kv_len: int) -> None:
    """Raise unless ``mask`` is flat or ``[qo_len, kv_len]``."""
    if mask is not None and mask.dim() != 1 and not agree(mask.shape, (qo_len, kv_len)):
        fail(ShapeError, where, f"custom_mask is {shape_of(mask)}", f"[{qo_len}, {kv_len}], or flat", "reshape it")


def single_prefill_with_kv_cache_return_lse(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """:func:`single_prefill_with_kv_cache` with ``return_lse``."""
    return single_prefill_with_kv_cache(q, k, v, *args, **{**kwargs, "return_lse": True})


class BatchPrefillWithPagedKVCacheWrapper(ForwardWithLse, PagedWrapper):
    """Prefill or append for a batch over a paged KV cache: plan() once for a batch, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        use_cuda_graph: the buffers, int32, become the plan's memory: ``qo_indptr_buf [batch + 1]``,
            ``paged_kv_indptr_buf [batch + 1]``, ``paged_kv_indices_buf [max_pages]``,
            ``paged_kv_last_page_len_buf [batch]``; masks are copied to ``custom_mask_buf``, uint8. The batch size is
            fixed, and no later plan may have more query rows than the first. Without it the buffers have no effect.
        backend: ``"cudnn"`` takes caches ``[pages, num_kv_heads, page_size, head_dim]`` whatever ``kv_layout`` says, as
            FlashInfer's does. Otherwise it has no effect on results (:mod:`attn_ops.policy`).
        mask_indptr_buf (``qk_indptr_buf`` in 0.2), jit_kwargs, variant_owns_mask: no effect on results.
        jit_args: as for decoding.

    run() traces: under ``torch.compile(fullgraph=True)`` it is one ``attn.batch_prefill`` node.
    """

    @typed
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
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
                kv_indptr=("paged_kv_indptr_buf", paged_kv_indptr_buf),
                kv_indices=("paged_kv_indices_buf", paged_kv_indices_buf),
                kv_last_page_len=("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf),
                mask=("custom_mask_buf", custom_mask_buf),
            ),
        )
        renamed(self._name, "qk_indptr_buf", qk_indptr_buf, "mask_indptr_buf", mask_indptr_buf)
        self._element_offsets = backend == "cudnn"
        if self._element_offsets:
            self._kv_layout = "HND"

    def prepare_plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int | None = None,
        page_size: int | None = None,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        *,
        data_type: DType | None = None,
        head_dim: int | None = None,
        allow_fp16_qk_reduction: bool | None = None,
        window_right: int = -1,
    ) -> PreparedPlan:
        """Plan a batch. Eager, never inside a graph.

        Args:
            qo_indptr: int ``[batch + 1]``: the query rows of request b are ``qo_indptr[b]`` to ``qo_indptr[b + 1]``.
                With ``backend="cudnn"`` and ``seq_lens_q`` or ``seq_lens`` it may count elements, as in FlashInfer.
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len: the page table, as for decoding.
            head_dim_qk: alias ``head_dim``; ``head_dim_vo`` is the same unless given.
            custom_mask: bool, for every request ``[qo_len * kv_len]`` row by row, concatenated; True keeps. Overrides
                ``causal``. ``packed_custom_mask``: uint8, its bits little-endian, every request padded to whole bytes.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len: multi-item scoring
                (:func:`attn_ops.frontend.masks.multi_item_mask`), always causal.
            q_data_type, kv_data_type, o_data_type, data_type: as for decoding.
            fixed_split_size, disable_split_kv: as for decoding.
            window_left, window_right: keys before and after a query row's position that it sees, -1 for all.

        Raises:
            ShapeError: a mask does not have the length that the lengths of the batch give. Other errors are as for
                decoding.
        """
        where = f"{self._name}.plan"
        check_fp16_reduction(where, allow_fp16_qk_reduction, use_fp16_qk_reduction)
        spec = prefill_spec(where, num_qo_heads, num_kv_heads, head_dim, head_dim_qk, head_dim_vo, page_size)
        required(
            where,
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_indices=paged_kv_indices,
            paged_kv_last_page_len=paged_kv_last_page_len,
        )
        qo_indptr = self._rows(qo_indptr, seq_lens if seq_lens_q is None else seq_lens_q, spec)
        table = PageTable.of(where, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr)
        split = splitting(where, fixed_split_size, disable_split_kv)
        spec = spec._replace(causal=causal, window_left=window_left, window_right=window_right, **split)
        dtypes = DTypes.of(where, q_data_type, kv_data_type, o_data_type, data_type)
        return self._prepare_prefill(
            where,
            Batch("batch_prefill", table, spec, dtypes=dtypes),
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

    # Only FlashInfer's plan() has non_blocking: in workspace_size() the arguments after it come one place earlier.
    _size_signature = inspect.Signature(
        [p for name, p in inspect.signature(prepare_plan).parameters.items() if name not in ("self", "non_blocking")]
    )

    def _rows(self, qo_indptr: Tensor, qo_lens: Tensor | None, spec: PlanSpec) -> Tensor:
        """``qo_indptr`` in query rows. With ``backend="cudnn"`` it counts elements where ``qo_lens`` say so."""
        if not self._element_offsets:
            return qo_indptr
        return token_offsets(qo_indptr, qo_lens, spec.num_qo_heads * spec.head_dim_qk)

    @typed
    def workspace_size(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int | None = None,
        page_size: int | None = None,
        head_dim_vo: int | None = None,
        *args: Any,
        head_dim: int | None = None,
        **kwargs: Any,
    ) -> tuple[int, int]:
        """Bytes of float workspace that plan() with these arguments needs, and bytes of integers it holds.

        ``args`` and ``kwargs`` are the further arguments of plan(). Of these splits, masks, windows and lengths count.
        """
        where = f"{self._name}.workspace_size"
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        sized = num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo
        kwargs.pop("non_blocking", None)
        given = self._size_signature.bind(*tables, *sized, *args, head_dim=head_dim, **kwargs).arguments
        flags(where, causal=given.get("causal", False))
        spec = prefill_spec(where, num_qo_heads, num_kv_heads, head_dim, head_dim_qk, head_dim_vo, page_size)
        masked = any(given.get(mask) is not None for mask in ("custom_mask", "packed_custom_mask", "prefix_len_ptr"))
        spec = spec._replace(
            causal=given.get("causal", False) and not masked,
            window_left=given.get("window_left", -1),
            window_right=given.get("window_right", -1),
            **splitting(where, given.get("fixed_split_size"), given.get("disable_split_kv", False)),
        )
        qo_lens = given.get("seq_lens") if given.get("seq_lens_q") is None else given["seq_lens_q"]
        table = PageTable.of(where, *tables[1:], self._rows(qo_indptr, qo_lens, spec))
        return self._workspace_size(where, Batch("batch_prefill", table, spec, AttentionOptions(causal=spec.causal)))

    @typed
    @prepared
    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attend as planned.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``; in CUDA-graph mode rows of padding may follow.
            paged_kv_cache, args: as for decoding.
            q_scale, k_scale, v_scale: per tensor, or with an FP8 query per head: ``[num_qo_heads]``,
                ``[num_kv_heads]``, ``[num_kv_heads]``.
            lse_base: ``"log2"`` or ``"ln"``. ``lse_layout``: ``"NH"`` ``[rows, heads]`` or ``"HN"`` ``[heads, rows]``.
            out, lse: buffers to fill and return. ``window_left``, ``sinks``: for this call.

        Returns:
            ``out [rows, num_qo_heads, head_dim_vo]``, with ``return_lse`` also float32 ``lse``.
        """
        where = f"{self._name}.run"
        refuse(
            where,
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            uses_spcompress=uses_spcompress,
        )
        given: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
        if args:
            given = self._run_positional(where, args, q, **given)
        output = OutputSpec(out, lse, return_lse, lse_base=lse_base, lse_layout=lse_layout)
        return self._paged_call(where, q, paged_kv_cache, output, window_left=window_left, **given)

    @typed
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
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
        output = OutputSpec(return_lse=return_lse)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        return self._paged_call(where, q, paged_kv_cache, output, **scales, **changes).execute()
