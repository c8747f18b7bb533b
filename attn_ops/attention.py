"""One interface for batches that mix prefill and decoding, and attention with a sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.prepared_call import prepared
from attn_ops.errors import ArgumentError, fail
from attn_ops.frontend.arguments import DType, attention_options, refuse, required
from attn_ops.frontend.base import SINK_BY_POSITION
from attn_ops.frontend.kv_cache import PagedCache
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import PagedWrapper
from attn_ops.frontend.plan_spec import prefill_spec
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import Scale
from attn_ops.plan.page_table import PageTable, by_length, index
from attn_ops.prefill import BatchPrefillWithPagedKVCacheWrapper
from attn_ops.typed import typed

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]


class BatchAttention(PagedWrapper):
    """Any number of query rows per request over a paged cache, or over plain 3-D keys and values.

    The dtypes are those of the tensors of run(), whatever plan() names. ``device`` is the device of these tensors.
    """

    @typed
    def __init__(self, kv_layout: str = "NHD", device: str | torch.device | None = "cuda") -> None:
        super().__init__(None, kv_layout, device=device)
        self._by_token: PagedWrapper | None = None

    def prepare_plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        use_profiler: bool = False,
    ) -> PreparedPlan:
        """Plan a batch.

        Args:
            qo_indptr: int ``[batch + 1]``, cumulative query rows.
            kv_indptr, kv_indices: the page table; a request may hold more pages than its tokens need.
            kv_len_arr: int ``[batch]``, tokens of each request.

        If every request has one entry per token, the entries may also be token numbers: run() then takes 3-D keys
        and values too, whatever ``page_size`` (docs/flashinfer.md).
        """
        where = f"{self._name}.plan"
        refuse(where, use_profiler=use_profiler)
        spec = prefill_spec(where, num_qo_heads, num_kv_heads, None, head_dim_qk, head_dim_vo, page_size)
        spec = spec._replace(causal=causal)
        options = attention_options(where, logits_soft_cap=logits_soft_cap, sm_scale=sm_scale)._replace(causal=causal)
        required(where, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        pages = by_length(where, kv_indptr, kv_indices, kv_len_arr, page_size)
        pages = pages._replace(qo_indptr=index(where, "qo_indptr", qo_indptr))
        batch = Batch("batch_prefill", pages, spec, options)
        plan = self._prepare(where, batch)
        if page_size == 1 or not torch.equal(kv_indptr.cpu().long().diff(), kv_len_arr.cpu().long()):
            return plan.with_state(_by_token=None)
        tokens = PageTable.of(where, kv_indptr, kv_indices, torch.ones_like(kv_indptr[1:]), qo_indptr)
        by_token = PagedWrapper(None, self._kv_layout, device=self.device)
        by_token_plan = by_token._prepare(where, batch._replace(table=tokens, spec=spec._replace(page_size=1)))
        return plan.with_state(by_token_plan, _by_token=by_token)

    begin_forward = plan = committing(prepare_plan)

    @typed
    @prepared
    def run(
        self,
        q: Tensor,
        kv_cache: PagedCache,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """``(out, lse)`` of ``q [nnz_qo, num_qo_heads, head_dim_qk]``; the cache as for the prefill wrapper.

        ``logits_soft_cap`` 0 leaves the planned cap; another value replaces it for this call.
        """
        where = f"{self._name}.run"
        refuse(where, profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        wrapper: PagedWrapper = self
        if self._by_token is not None and not isinstance(kv_cache, Tensor) and kv_cache[0].dim() == 3:
            wrapper = self._by_token
        return wrapper._paged_call(
            where,
            q,
            kv_cache,
            OutputSpec(out, lse, return_lse=True),
            k_scale=k_scale,
            v_scale=v_scale,
            logits_soft_cap=logits_soft_cap or None,
        )

    @typed
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output of :meth:`run` over the pair ``(k, v)``, paged or 3-D."""
        return self.run(q, (k, v))[0]


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The paged prefill wrapper with a sink: run() takes ``sinks`` and ``sm_scale`` by position, after the cache.

    ``pos_encoding_mode``, ``window_left``, the dtypes and the head dimensions are the defaults of plan(). ``sinks`` is
    float32 ``[num_qo_heads]``: a natural-log logit in each row's denominator.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: DType = torch.bfloat16,
        kv_data_type: DType = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._defaults = {
            "pos_encoding_mode": pos_encoding_mode,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
            "head_dim_vo": head_dim_vo,
            "window_left": window_left,
        }
        self._head_dim_qk = head_dim_qk
        self._by_position = SINK_BY_POSITION

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
        *args: Any,
        **kwargs: Any,
    ) -> PreparedPlan:
        """Plan as the base class does, with the constructor's defaults for what is not given by name."""
        if args:
            fail(
                ArgumentError,
                f"{self._name}.plan",
                f"{len(args)} arguments follow page_size by position",
                "names for them",
                "pass them by name",
            )
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        defaults = dict(self._defaults)
        if head_dim_qk is None and "head_dim" not in kwargs:
            head_dim_qk = self._head_dim_qk
        elif kwargs.get("head_dim", head_dim_qk) != self._head_dim_qk:
            del defaults["head_dim_vo"]  # it belongs to the constructor's head_dim_qk
        if "data_type" in kwargs:
            del defaults["q_data_type"], defaults["kv_data_type"]
        return super().prepare_plan(
            *tables, num_qo_heads, num_kv_heads, head_dim_qk, page_size, **{**defaults, **kwargs}
        )

    begin_forward = plan = committing(prepare_plan)  # type: ignore[arg-type]
