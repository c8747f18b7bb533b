"""Attention over parts of the KV, merged: levels of a shared prefix tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import check_real, flags
from attn_ops.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_ops.errors import DTypeError, OptionError, ShapeError, UnsupportedError, dtype_name, fail
from attn_ops.frontend.arguments import DType, as_dtype
from attn_ops.frontend.autocast import joined
from attn_ops.frontend.base import WrapperGroup, reset_workspaces
from attn_ops.frontend.kv_cache import PagedCache
from attn_ops.frontend.prepared_plan import refuse_tracing
from attn_ops.ops.options import FP8
from attn_ops.plan.page_table import index, seen
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.prefill import BatchPrefillWithPagedKVCacheWrapper, single_prefill_with_kv_cache
from attn_ops.typed import page_table_called, typed

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "variable_length_merge_states",
]


@typed
def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state over the union of two sets of keys: ``v [rows, heads, head_dim]``, ``s [rows, heads]``, base 2.

    Two empty states, LSE -inf, give 0 and -inf.
    """
    return torch.ops.attn.merge_state(v_a, _lse("merge_state", "s_a", s_a), v_b, _lse("merge_state", "s_b", s_b))


@typed
def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """:func:`merge_state` into ``v`` and float32 ``s``.

    ``mask [rows]``, bool or uint8 of any stride: rows where it is False keep their state.
    """
    if s.dtype != torch.float32:
        fail(
            DTypeError,
            "merge_state_in_place",
            f"s is {dtype_name(s.dtype)}",
            "float32, since it is written",
            "convert it first",
        )
    s_other = _lse("merge_state_in_place", "s_other", s_other)
    torch.ops.attn.merge_state_in_place(v, s, v_other, s_other, None if mask is None else mask.contiguous())


@typed
def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge along the second dimension: ``v [rows, states, heads, head_dim]``, ``s [rows, states, heads]``."""
    return torch.ops.attn.merge_states(v, _lse("merge_states", "s", s))


@typed
def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Row r of the result merges states ``indptr[r]`` to ``indptr[r + 1]`` of ``v [states, heads, head_dim]``."""
    where = "variable_length_merge_states"
    offsets = index(where, "indptr", indptr)
    if seen(offsets) and offsets.numel() and v.dim():
        check_indptr("indptr", offsets, where, later=True)
        states, end = v.shape[0], int(offsets[-1])
        if end > states:
            expected = f"{end} or more, where indptr ends"
            fail(ShapeError, where, f"v has {states} states", expected, "pass the states of all rows")
    return torch.ops.attn.merge_states_varlen(v, _lse(where, "s", s), offsets.to(v.device))


def _lse(where: str, name: str, s: Tensor) -> Tensor:
    """LSEs of any real dtype as float32."""
    check_real(where, name, s)
    return s.float()


MAX_LEVELS = 1024
"""Largest number of levels. Each level has a plan of its own."""


class MultiLevelCascadeAttentionWrapper(WrapperGroup):
    """Several page tables over one cache, from the most shared to the least; each query row sees one entry of each.

    Args:
        num_levels: number of page tables. Level i groups the query rows by ``qo_indptr_arr[i]``.
        float_workspace_buffer, kv_layout: as for the prefill wrapper.
        use_cuda_graph: CUDA-graph mode, for which each ``*_buf_arr`` list has one buffer per level.
    """

    @typed
    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[Tensor] | None = None,
        paged_kv_indices_buf_arr: list[Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[Tensor] | None = None,
    ) -> None:
        where = type(self).__name__
        self._use_cuda_graph = use_cuda_graph
        buffers = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        if num_levels < 1:
            fail(OptionError, where, f"num_levels is {num_levels}", "at least 1", "change it")
        if num_levels > MAX_LEVELS:
            fail(OptionError, where, f"num_levels is {num_levels}", f"at most {MAX_LEVELS}", "change it")
        if use_cuda_graph:
            _check_levels(where, num_levels, {f"{name}_arr": arr or [] for name, arr in buffers.items()})
        self._levels = []
        for i in range(num_levels):
            own: dict[str, Any] = {name: arr[i] for name, arr in buffers.items() if use_cuda_graph and arr}
            level = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, **own)
            self._levels.append(level)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    @typed
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffers: Any = None) -> None:
        where = f"{type(self).__name__}.reset_workspace_buffer"
        reset_workspaces(where, float_workspace_buffer, *self._levels)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Nothing to do: one kernel reads caches of any strides."""

    @typed
    def plan(
        self,
        qo_indptr_arr: list[Tensor],
        paged_kv_indptr_arr: list[Tensor],
        paged_kv_indices_arr: list[Tensor],
        paged_kv_last_page_len: list[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plan every level. Each list has a tensor per level, as for the prefill wrapper; ``causal`` is of the last.

        A window and the positions of RoPE and ALiBi count the tokens of each level from its first one.
        """
        where = f"{type(self).__name__}.plan"
        arrays = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        refuse_tracing(where, arrays)
        flags(where, causal=causal)
        _check_levels(where, len(self._levels), arrays)
        if as_dtype(where, "q_data_type", q_data_type) in FP8:
            fail(
                UnsupportedError,
                where,
                f"q_data_type is {str(q_data_type).removeprefix('torch.')}",
                "float16, bfloat16 or float32",
                "convert the query, times its scale: the states of the levels are merged in its dtype",
            )
        plans = []
        for i, (level, *table) in enumerate(zip(self._levels, *arrays.values(), strict=True)):
            with page_table_called(*(f"{name}[{i}]" for name in arrays)):
                plan = level.prepare_plan(
                    *table,
                    num_qo_heads,
                    num_kv_heads,
                    head_dim,
                    page_size,
                    causal=causal and i == len(self._levels) - 1,
                    pos_encoding_mode=pos_encoding_mode,
                    sm_scale=sm_scale,
                    window_left=window_left,
                    logits_soft_cap=logits_soft_cap,
                    rope_scale=rope_scale,
                    rope_theta=rope_theta,
                    q_data_type=q_data_type,
                    kv_data_type=kv_data_type,
                )
            plans.append(plan)
        rows = [plan.rows for plan in plans]
        if len(set(rows)) > 1:
            fail(
                ShapeError,
                where,
                f"the levels have {', '.join(map(str, rows))} query rows",
                "the same number in each level",
                "correct qo_indptr_arr",
            )
        for plan in plans:
            plan.commit()

    begin_forward = plan

    @typed
    def run(self, q: Tensor, paged_kv_cache: PagedCache) -> Tensor:
        """``q [nnz_qo, num_qo_heads, head_dim]``, the cache as for the prefill wrapper; the output as q."""
        states = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        if len(states) == 1:
            return states[0][0]
        v, s = (joined(torch.stack, parts, 1) for parts in zip(*states, strict=True))
        return merge_states(v, s)[0]

    forward = run


def _check_levels(where: str, num_levels: int, arrays: dict[str, list[Tensor]]) -> None:
    for name, array in arrays.items():
        if len(array) != num_levels:
            fail(ShapeError, where, f"{name} has {len(array)} tensors", f"{num_levels}, one per level", "correct it")


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WrapperGroup):
    """Decoding for requests that share a prefix. The prefix is in dense tensors, all other tokens are in pages."""

    @typed
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    @typed
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None) -> None:
        self._unique.reset_workspace_buffer(float_workspace_buffer)

    @typed
    def begin_forward(
        self,
        unique_kv_indptr: Tensor,
        unique_kv_indices: Tensor,
        unique_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DType = "float16",
    ) -> None:
        """Plan the pages of the requests, without the prefix; arguments as for the decode wrapper."""
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            data_type=data_type,
        )

    plan = begin_forward

    @typed
    def forward(self, q: Tensor, k_shared: Tensor, v_shared: Tensor, unique_kv_cache: PagedCache) -> Tensor:
        """``q [batch, num_qo_heads, head_dim]``; ``k_shared, v_shared [prefix, num_kv_heads, head_dim]`` by layout."""
        shared = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True)
        return merge_state(*shared, *self._unique.run(q, unique_kv_cache, return_lse=True))[0]

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WrapperGroup):
    """Prefill or append for requests that share a prefix, which is in dense tensors. dtypes follow the query."""

    @typed
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._unique = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    @typed
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None) -> None:
        self._unique.reset_workspace_buffer(float_workspace_buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Nothing to do: one kernel reads caches of any strides."""

    @typed
    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Plan the pages of the requests, without the prefix; arguments as for the prefill wrapper."""
        self._unique.plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
        )
        self._unique.dtypes_follow_query()

    plan = begin_forward

    @typed
    def forward(
        self,
        q: Tensor,
        k_shared: Tensor,
        v_shared: Tensor,
        unique_kv_cache: PagedCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """``q [nnz_qo, num_qo_heads, head_dim]`` sees the whole prefix, and its own pages by ``causal``.

        No positional encoding is applied, so ``rope_scale`` and ``rope_theta`` have no effect.
        """
        flags(f"{type(self).__name__}.forward", causal=causal)
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True
        )
        unique = self._unique.forward(q, unique_kv_cache, causal=causal, sm_scale=sm_scale, return_lse=True)
        return merge_state(*shared, *unique)[0]

    run = forward
