"""The calls of prefill kernels: operands of the ops, the launch of a kernel on a plan's tiles, the combine of splits.

``batch_prefill``, ``ragged_prefill`` and ``single_prefill`` differ in where keys lie; ``block_sparse_prefill`` views
dense keys as pages. The general kernel and the Hopper kernel differ in how they are launched. :func:`prefill_ops` makes
the ops of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.launches import scratch
from attn_ops.kernels.reference.cache_views import block_pages
from attn_ops.kernels.triton.combine_prefill import combine_split_requests, combine_split_tiles
from attn_ops.kernels.triton.config_prefill import split_dim
from attn_ops.meta.outputs import attention as allocate
from attn_ops.ops.options import DENSE_DIMS, PAGED_DIMS, AttentionOptions, KVDims
from attn_ops.plan.equal_requests import EqualRequests, divide
from attn_ops.plan.state import PlanProblem, PrefillPlan, max_work_items, num_partials
from attn_ops.symbolic_sizes import statically_known_true


class Operands(NamedTuple):
    """Queries, keys and values of a call. Strides are in elements.

    q            ``[rows, num_qo_heads, dim]``
    q_b          part B of the queries if ``shared``, otherwise ``q``
    k, v         ``[pages, page_size, num_kv_heads, dim]`` or ``[tokens, num_kv_heads, dim]``, in any order of strides
    dims         columns of parts A and B of a key, and of a value
    heads        of the query, and of keys and values
    k_strides    of pages (0 without pages), tokens, heads; ``v_strides`` likewise
    kv_rows      tokens of ragged KV, 0 for paged KV
    shared       multi-head latent attention: ``k`` is part A of the keys and the values, ``v`` is part B of the keys
    """

    q: Tensor
    q_b: Tensor
    k: Tensor
    v: Tensor
    dims: tuple[int, int, int]
    heads: tuple[int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    kv_rows: int
    shared: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        """Columns of a key and of a value."""
        return sum(self.dims[:2]), self.dims[2]


Batch = PrefillPlan | EqualRequests
"""How the requests of a call are divided into work items: a plan, or requests of equal lengths."""

LaunchTiles = Callable[[Operands, Tensor, Tensor, Batch, Tensor | None, AttentionOptions], None]
"""``(operands, out, lse, batch, workspace, options)``: launches a kernel on the work items of a batch.

A tile that is one item goes to ``out`` and, unless it has no elements, ``lse``; the partial results of a tile that is
split go to ``workspace``.
"""


def work_items(batch: Batch, rows: int) -> tuple[int, int]:
    """The query rows of a tile, and the work items that a kernel has for ``rows`` query rows."""
    if isinstance(batch, EqualRequests):
        return batch.tile_rows, batch.num_tiles
    return PlanProblem.of(batch.problem).tile_rows, max_work_items(batch, rows)


def attend(
    launch_tiles: LaunchTiles,
    x: Operands,
    plan: PrefillPlan,
    workspace: Tensor,
    return_lse: bool,
    o: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel on the tiles of a plan, then combine the tiles that it splits. Returns ``(out, lse)``."""
    out, lse = allocate(x.q, x.k, x.k if x.shared else x.v, return_lse=return_lse, out_dtype=o.out_dtype)
    launch_tiles(x, out, lse, plan, workspace, o)
    if num_partials(plan):
        combine_split_tiles(out, lse, workspace, o.sinks, plan)
    return out, lse


def attend_requests(
    launch_tiles: LaunchTiles, x: Operands, batch: EqualRequests, return_lse: bool, o: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, for requests of equal lengths without a plan."""
    out, lse = allocate(x.q, x.k, x.v, return_lse=return_lse, out_dtype=o.out_dtype)
    if statically_known_true(batch.splits == 1):
        launch_tiles(x, out, lse, batch, None, o)
        return out, lse
    elements = batch.num_slots * batch.rows * x.heads[0] * (x.head_dims[1] + 1)
    workspace = scratch(x.q.new_empty(elements, dtype=torch.float32))
    launch_tiles(x, out, lse, batch, workspace, o)
    combine_split_requests(out, lse, workspace, o.sinks, batch)
    return out, lse


def tiles_of_requests(x: Operands, batch_size: int, o: AttentionOptions) -> EqualRequests:
    """How a prefill kernel divides ``batch_size`` requests of equal lengths."""
    return divide(
        x.q.device,
        x.heads,
        x.head_dims,
        batch_size,
        x.q.shape[0] // batch_size,
        x.kv_rows // batch_size,
        causal=o.causal and o.mask is None,
        window_left=o.window_left,
        window_right=o.window_right,
    )


def _paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> Operands:
    return _operands(q, k_cache, v_cache, 0, PAGED_DIMS[kv_layout])


def dense_operands(q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> Operands:
    return _operands(q, k, v, None, DENSE_DIMS[kv_layout])


def _operands(q: Tensor, k: Tensor, v: Tensor, page: int | None, kv: KVDims) -> Operands:
    """``page``: the dimension of k and v that counts pages, None without pages.

    Head counts and head dims select kernels, so they become numbers, with a guard, also where a graph has symbols.
    """
    k_strides, v_strides = (
        (0 if page is None else t.stride(page), t.stride(kv.token), t.stride(kv.head)) for t in (k, v)
    )
    dims, heads = (*split_dim(int(q.shape[2])), int(v.shape[-1])), (int(q.shape[1]), int(k.shape[kv.head]))
    return Operands(q, q, k, v, dims, heads, k_strides, v_strides, k.shape[kv.token] if page is None else 0)


def plan_arguments(batch: Batch) -> dict[str, Any]:
    """Kernel arguments from the plan. Without a plan the tensors are None."""
    if isinstance(batch, EqualRequests):
        tensors: dict[str, Tensor | None] = dict.fromkeys(("qo_indptr", "kv_indices", "work"))
        return tensors | {"max_pages": 0, "max_items": 0, "max_batch": batch.batch_size, "slots": batch.num_slots}
    plan = batch
    return {
        "qo_indptr": plan.qo_indptr,
        "kv_indices": plan.kv_indices,
        "work": plan.work,
        "max_pages": plan.kv_indices.shape[0],
        "max_items": plan.work.shape[0],
        "max_batch": plan.kv_len.shape[0],
        "slots": num_partials(plan),
    }


def prefill_ops(launch_tiles: LaunchTiles) -> tuple[Callable[..., tuple[Tensor, Tensor]], ...]:
    """``batch_prefill``, ``ragged_prefill``, ``single_prefill`` and ``block_sparse_prefill`` on a kernel."""

    def batch_prefill(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: list[Tensor],
        workspace: Tensor,
        *,
        kv_layout: str = "NHD",
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        x = _paged(q, k_cache, v_cache, kv_layout)
        return attend(launch_tiles, x, PrefillPlan(*plan), workspace, return_lse, AttentionOptions(**options))

    def block_sparse_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: list[Tensor],
        workspace: Tensor,
        *,
        kv_layout: str = "NHD",
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        page_size = PlanProblem.of(plan[0]).page_size
        k_cache, v_cache = (block_pages(t, page_size, kv_layout) for t in (k, v))
        x = _paged(q, k_cache, v_cache, kv_layout)
        return attend(launch_tiles, x, PrefillPlan(*plan), workspace, return_lse, AttentionOptions(**options))

    def ragged_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: list[Tensor],
        workspace: Tensor,
        *,
        kv_layout: str = "NHD",
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        x = dense_operands(q, k, v, kv_layout)
        return attend(launch_tiles, x, PrefillPlan(*plan), workspace, return_lse, AttentionOptions(**options))

    def single_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_size: int = 1,
        *,
        kv_layout: str = "NHD",
        return_lse: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        x, o = dense_operands(q, k, v, kv_layout), AttentionOptions(**options)
        return attend_requests(launch_tiles, x, tiles_of_requests(x, batch_size, o), return_lse, o)

    return batch_prefill, ragged_prefill, single_prefill, block_sparse_prefill
