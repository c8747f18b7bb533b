"""Decoding: one query row per request (or a few, ``q_len_per_req``) over a KV cache.

FlashInfer's names and arguments; shapes and meaning as in the user guide (docs/guide/). LSE is base 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import optional_flags
from attn_ops.eager.op_call import MappedCall
from attn_ops.eager.prepared_call import prepared, prepared_function
from attn_ops.errors import PlanError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import DType, DTypes, attention_options, layout, positive, refuse, required
from attn_ops.frontend.base import graph_buffers
from attn_ops.frontend.cudnn import cudnn_batch_decode_with_kv_cache
from attn_ops.frontend.deepseek import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
from attn_ops.frontend.kv_cache import PagedCache
from attn_ops.frontend.one_shot import check_dense, dense_call
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import PagedWrapper, forward_changes
from attn_ops.frontend.plan_spec import paged_spec, splitting
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan, committing, plan_batch
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.frontend.trtllm import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from attn_ops.frontend.with_lse import ForwardWithLse
from attn_ops.page import get_seq_lens
from attn_ops.plan.page_table import PageTable
from attn_ops.typed import typed

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "get_seq_lens",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]


def _without_rows(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The result of a call with one query row, with the LSE ``[num_qo_heads]``, without a dimension of rows."""
    out, lse = result
    return out, lse[0]


@typed
@prepared_function
def single_decode_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One query row of one request over all its keys.

    Args:
        q: ``[num_qo_heads, head_dim]``.
        k, v: ``[kv_len, num_kv_heads, head_dim]``, or ``[num_kv_heads, kv_len, head_dim]`` with layout HND.

    Returns:
        ``out [num_qo_heads, head_dim]``, with ``return_lse`` also float32 ``lse [num_qo_heads]``.
    """
    where = "single_decode_with_kv_cache"
    if q.dim() != 2:
        fail(ShapeError, where, f"q is {shape_of(q)}", "[num_qo_heads, head_dim]", "pass one query row")
    options = attention_options(
        where,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    q = q[None]
    check_dense(where, q, k, v)
    scales = ScaleFactors.of_tensors(q_scale, k_scale, v_scale)
    output = OutputSpec(return_lse=return_lse, rows_shape=())
    call = dense_call(where, (q, k, v), options, output, scales, kv_layout=layout(where, kv_layout))
    return MappedCall(call, _without_rows) if return_lse else call


class BatchDecodeWithPagedKVCacheWrapper(ForwardWithLse, PagedWrapper):
    """Decoding for a batch over a paged KV cache: plan() once for a batch, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype; 16 MB are enough for one query row
            per request, 32 MB for several.
        kv_layout: ``"NHD"`` or ``"HND"``.
        use_cuda_graph: the three buffers, int32, become the plan's memory. The batch size is then fixed, by
            ``paged_kv_indptr_buffer [batch + 1]`` and ``paged_kv_last_page_len_buffer [batch]``, and
            ``paged_kv_indices_buffer`` bounds the pages. Without it the buffers have no effect.
        use_tensor_cores, backend: no effect on results (:mod:`attn_ops.policy`).
        jit_args: of FlashInfer's variant AttentionSink, with which run() takes ``sinks, sm_scale`` by position.

    run() traces: under ``torch.compile(fullgraph=True)`` it is one ``attn.batch_decode`` node. The plan's tensors keep
    their sizes while batches fit, and grow by powers of two when one does not, which compiles once more.
    """

    @typed
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            backend=backend,
            jit_args=jit_args,
            buffers=graph_buffers(
                use_cuda_graph,
                kv_indptr=("paged_kv_indptr_buffer", paged_kv_indptr_buffer),
                kv_indices=("paged_kv_indices_buffer", paged_kv_indices_buffer),
                kv_last_page_len=("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer),
            ),
        )
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req = 1

    @property
    def use_tensor_cores(self) -> bool:
        """As given to the constructor; which units compute is the backend's choice."""
        return self._use_tensor_cores

    def prepare_plan(
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
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> PreparedPlan:
        """Plan a batch. Eager, never inside a graph.

        Args:
            indptr: int ``[batch + 1]``: the pages of request b are ``indices[indptr[b]:indptr[b + 1]]``.
            indices: int ``[pages]``, page numbers.
            last_page_len: int ``[batch]``, tokens in each request's last page, 1 to ``page_size``.
            q_data_type, kv_data_type, o_data_type, data_type: dtypes or their names; ``data_type`` is both of the
                query and the KV; only of the KV if it is FP8 or ``q_data_type`` is given.
            q_len_per_req: query rows of each request, in CUDA-graph mode always those of the first plan. With more
                than 1 they are the last tokens of the request, causal among themselves unless ``is_causal`` is False.
            fixed_split_size: split every request each this many pages, rounded up to whole KV blocks of 64 tokens;
                None or -1 splits for load balance. ``disable_split_kv`` splits none. With either the result of a
                request is batch-invariant, bit for bit, on the ``triton`` backend, and with one row per request on
                ``cuda``; on ``reference`` results agree to rounding (docs/guide/plans.md).

        Raises:
            PageTableError: the table is inconsistent; CapacityError: it exceeds the buffers of CUDA-graph mode.
        """
        where = f"{self._name}.plan"
        refuse(where, window_right=window_right)
        batch = _decode_batch(
            where,
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_len_per_req, is_causal),
            (q_data_type, kv_data_type, o_data_type, data_type),
            (fixed_split_size, disable_split_kv),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        if self._graph is not None and self._planned is not None and q_len_per_req != self._q_len_per_req:
            fail(
                PlanError,
                where,
                f"q_len_per_req is {q_len_per_req}",
                f"{self._q_len_per_req} as in the first plan, in CUDA-graph mode",
                "make a wrapper for each number of rows",
            )
        causal = is_causal is None or bool(is_causal)
        return self._prepare(where, batch).with_state(_q_len_per_req=q_len_per_req, _causal_rows=causal)

    begin_forward = plan = committing(prepare_plan)

    @typed
    def workspace_size(
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
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> tuple[int, int]:
        """Bytes that plan() with these arguments needs of the float workspace, and bytes of integers it holds."""
        where = f"{self._name}.workspace_size"
        refuse(where, window_right=window_right)
        batch = _decode_batch(
            where,
            (indptr, indices, last_page_len),
            (num_qo_heads, num_kv_heads, head_dim, page_size),
            (q_len_per_req, is_causal),
            (q_data_type, kv_data_type, o_data_type, data_type),
            (fixed_split_size, disable_split_kv),
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self._workspace_size(where, batch)

    @typed
    @prepared
    def run(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attend as planned.

        Args:
            q: ``[batch, num_qo_heads, head_dim]``; ``[batch * q_len_per_req, ...]`` with more rows per request.
            paged_kv_cache: one tensor ``[pages, 2, page_size, num_kv_heads, head_dim]`` (HND: heads before tokens), or
                a pair of caches; without the dimension of tokens the page size is 1.
            args: of an FP8 query ``q_scale, k_scale, v_scale`` by position; ``sinks, sm_scale`` with the variant
                AttentionSink; otherwise without effect.
            out, lse: buffers to fill and return. ``window_left``, ``sinks``: for this call.
            q_len_per_req: query rows of each request where plan() did not name it. They are its last tokens, causal
                among themselves as plan() says. Every such call plans anew: name it in plan() if more than one call
                has it.

        Returns:
            ``out`` as q, with ``return_lse`` also float32 ``lse [batch, num_qo_heads]``.
        """
        where = f"{self._name}.run"
        refuse(where, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf)
        given: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "sinks": sinks}
        if args:
            given = self._run_positional(where, args, q, **given)
        output = OutputSpec(out, lse, return_lse)
        given.update(window_left=window_left, q_len_per_req=self._rows_of_call(where, q_len_per_req))
        return self._paged_call(where, q, paged_kv_cache, output, **given)

    def _rows_of_call(self, where: str, q_len_per_req: int | None) -> int | None:
        """``q_len_per_req`` of run(), None if it is as planned."""
        planned = self._q_len_per_req
        if q_len_per_req is None:
            return None
        positive(where, q_len_per_req=q_len_per_req)
        if planned not in (1, q_len_per_req):
            fail(
                ShapeError,
                where,
                f"q_len_per_req is {q_len_per_req}",
                f"{planned} as planned",
                "call plan() without it, and name it in run()",
            )
        return None if q_len_per_req == planned else q_len_per_req

    @typed
    def forward(
        self,
        q: Tensor,
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        output = OutputSpec(return_lse=return_lse)
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._paged_call(where, q, paged_kv_cache, output, **scales, **changes).execute()


def _decode_batch(
    where: str,
    table: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[int, int, int, int],
    rows: tuple[int, bool | None],
    data_types: tuple[DType | None, DType | None, DType | None, DType | None],
    splits: tuple[int | None, bool],
    **softmax: Any,
) -> Batch:
    """The batch of plan()'s arguments.

    Args:
        table: ``indptr, indices, last_page_len``.
        sizes: ``num_qo_heads, num_kv_heads, head_dim, page_size``.
        rows: ``q_len_per_req, is_causal``.
        data_types: ``q_data_type, kv_data_type, o_data_type, data_type``.
        splits: ``fixed_split_size, disable_split_kv``.
        softmax: the arguments of :func:`attention_options`.
    """
    dtypes, options = DTypes.of(where, *data_types), attention_options(where, **softmax)
    split, (q_len_per_req, is_causal) = splitting(where, *splits), rows
    indptr, indices, last_page_len = table
    num_qo_heads, num_kv_heads, head_dim, page_size = sizes
    required(where, indptr=indptr, indices=indices, last_page_len=last_page_len)
    positive(where, q_len_per_req=q_len_per_req)
    optional_flags(where, is_causal=is_causal)
    decode, qo_indptr = q_len_per_req == 1, None
    if not decode:
        qo_indptr = torch.arange(indptr.shape[0], device=indptr.device) * q_len_per_req
    options = options._replace(causal=not decode and (is_causal is None or bool(is_causal)))
    heads, head_dims = (num_qo_heads, num_kv_heads), (head_dim, head_dim)
    spec = paged_spec(page_size, heads, head_dims, (dtypes.q, dtypes.kv), options, decode=decode)
    pages = PageTable.of(where, *table, qo_indptr)
    spec = spec._replace(rows=q_len_per_req, **split)
    return Batch("batch_decode" if decode else "batch_prefill", pages, spec, options, dtypes)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """:class:`BatchDecodeWithPagedKVCacheWrapper` in CUDA-graph mode: one wrapper per captured batch size.

    ``indptr_buffer [batch + 1]``, ``indices_buffer [max_pages]`` and ``last_page_len_buffer [batch]`` are int32 on the
    device of ``workspace_buffer``. plan() writes them in place, and a captured run() replays with the new batch.
    """

    @typed
    def __init__(
        self,
        workspace_buffer: Tensor,
        indptr_buffer: Tensor,
        indices_buffer: Tensor,
        last_page_len_buffer: Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


@typed
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: DType | None = None,
    kv_data_type: DType | None = None,
    data_type: DType | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """``self.plan(...)``, with ``global_override_indptr_cpu`` in the place of ``indptr`` where it is given.

    The ``o_data_type`` of the wrapper's earlier plan stays, as in FlashInfer. Engines bind this function as a method:
    ``wrapper.plan = functools.partial(fast_decode_plan, wrapper)``.
    """
    table = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu, indices, last_page_len
    sizes = num_qo_heads, num_kv_heads, head_dim, page_size
    options = {
        "pos_encoding_mode": pos_encoding_mode,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "q_data_type": q_data_type,
        "kv_data_type": kv_data_type,
        "o_data_type": _planned_output_dtype(self),
        "data_type": data_type,
        "sm_scale": sm_scale,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
        "fixed_split_size": fixed_split_size,
        "disable_split_kv": disable_split_kv,
        "q_len_per_req": q_len_per_req,
    }
    plan_batch(self, (*table, *sizes), options)


def _planned_output_dtype(wrapper: BatchDecodeWithPagedKVCacheWrapper) -> torch.dtype | None:
    """The planned dtype of the output, None if it is that of the query."""
    dtypes = None if wrapper._planned is None else wrapper._planned.dtypes
    return None if dtypes is None or dtypes.o == dtypes.q else dtypes.o
