"""FlashInfer's wrapper for blocks of any sizes, selected for each KV head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import optional_flags
from attn_ops.errors import DTypeError, OptionError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import DType, DTypes, attention_options, positive, ranked
from attn_ops.frontend.outputs import OutputSpec, check_buffer
from attn_ops.frontend.paged import forward_changes
from attn_ops.frontend.plan_spec import prefill_spec
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.frontend.sparse_base import SparseWrapper, check_encoding, fitted_table
from attn_ops.plan.block_sparse import check_sizes, divide_rows, offsets_of, query_offsets
from attn_ops.plan.page_table import as_int32
from attn_ops.plan.page_table_checks import INTEGERS
from attn_ops.plan.state import INT32_MAX
from attn_ops.sparse_planner import fold_heads, unfold_heads
from attn_ops.typed import typed

MAX_PAGE = 64
"""Largest page size of variable blocks, a power of 2. A kernel is compiled for each page size."""


class VariableBlockSparseAttentionWrapper(SparseWrapper):
    """Attention over the blocks of a map of each KV head, with blocks of any sizes: plan() once, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        backend: no effect on results (:mod:`attn_ops.policy`).

    run() traces, as one ``attn.block_sparse_prefill`` node between views and copies.
    """

    _rows: int
    _heads: tuple[int, int]

    def prepare_plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
    ) -> PreparedPlan:
        """Plan block maps. Eager, never inside a graph; reads the sizes of blocks on the host.

        Args:
            block_mask_map: bool ``[num_kv_heads, MB, NB]``, the selected blocks of each KV head.
            block_row_sz: int ``[num_kv_heads, MB]``, the rows of block rows, with one sum for all heads.
            block_col_sz: int ``[num_kv_heads, NB]``, the keys of block columns, with one sum for all heads. Sizes
                that are all multiples of 8 or more are faster.
            causal, pos_encoding_mode, q_data_type, kv_data_type: as for :class:`BlockSparseAttentionWrapper`.

        Raises:
            ShapeError, OptionError, DTypeError: shapes, sizes, options or dtypes are wrong.
            PageTableError: a size does not fit int32.
        """
        where = f"{self._name}.plan"
        ranked(where, "block_mask_map", block_mask_map, "[num_kv_heads, block rows, block columns]")
        heads, rows, cols = block_mask_map.shape
        for name, t, blocks in (("block_row_sz", block_row_sz, rows), ("block_col_sz", block_col_sz, cols)):
            if tuple(t.shape) != (heads, blocks):
                expected = f"[{heads}, {blocks}] as in block_mask_map"
                fail(ShapeError, where, f"{name} is {shape_of(t)}", expected, "make the two agree")
            if t.dtype not in INTEGERS:
                fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "an integer dtype", "convert it")
        positive(where, num_kv_heads=num_kv_heads, num_qo_heads=num_qo_heads)
        if heads != num_kv_heads or num_qo_heads % num_kv_heads:
            what = f"num_qo_heads is {num_qo_heads}, num_kv_heads {num_kv_heads} and the maps are of {heads} heads"
            fail(ShapeError, where, what, "a map for each KV head, and a multiple of it in query heads", "correct them")
        num_rows = _sum(where, "block_row_sz", block_row_sz)
        num_keys = _sum(where, "block_col_sz", block_col_sz)
        if not (num_rows and num_keys):
            what = f"the blocks have {num_rows} rows and {num_keys} keys"
            fail(ShapeError, where, what, "at least 1 of both", "pass the sizes of all blocks")
        options = attention_options(
            where,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        check_encoding(where, options)
        divisor = math.gcd(MAX_PAGE, *block_col_sz.flatten().tolist())
        spec = prefill_spec(where, num_qo_heads // num_kv_heads, 1, None, head_dim, page_size=divisor)
        device = block_mask_map.device
        row_indptr, col_indptr = offsets_of(block_row_sz.to(device)), offsets_of(block_col_sz.to(device))
        block_mask = block_mask_map.bool()
        if causal:
            block_mask, row_indptr = divide_rows(block_mask, row_indptr, col_indptr)
        table, positions = fitted_table(block_mask, row_indptr, col_indptr, divisor, causal=causal)
        prepared_plan = self._prepare_table(
            where,
            (query_offsets(row_indptr), *table),
            positions if causal else None,
            num_keys,
            spec,
            options._replace(causal=causal),
            DTypes.of(where, q_data_type, kv_data_type),
        )
        state = {**prepared_plan.state, "_rows": num_rows, "_heads": (num_qo_heads, num_kv_heads)}
        return prepared_plan.with_state(**state)

    begin_forward = plan = committing(prepare_plan)

    @typed
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attend as planned.

        Args:
            q: ``[num_qo_heads, rows, head_dim]``.
            k, v: ``[num_kv_heads, keys, head_dim]``. No key outside of the selected blocks is read.
            out, lse: buffers of the result, in the shapes that are returned; also ``[num_kv_heads * rows, group, ...]``
                as FlashInfer takes them.

        Returns:
            ``out [num_qo_heads, rows, head_dim]``, with ``return_lse`` also float32 ``lse [num_qo_heads, rows]``.
        """
        return self._folded(f"{self._name}.run", q, k, v, out, lse, return_lse)

    @typed
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """:meth:`run` of the 0.1 interface: an option that is not at its default replaces the planned one."""
        where = f"{self._name}.forward"
        changes = forward_changes(
            where,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return self._folded(where, q, k, v, None, None, False, **changes)

    def _folded(
        self,
        where: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        **changes: Any,
    ) -> Any:
        """Attend with KV heads as requests. Returns the results by head."""
        ranked(where, "q", q, "[num_qo_heads, rows, head_dim]")
        self._check_kv(where, k, v, "HND")
        if self._planned is not None:
            (heads, kv_heads), (dim_qk, dim_vo) = self._heads, self._planned.head_dims
            for name, t, wanted in (
                ("q", q, (heads, self._rows, dim_qk)),
                ("k", k, (kv_heads, k.shape[1], dim_qk)),
                ("v", v, (kv_heads, v.shape[1], dim_vo)),
            ):
                if tuple(t.shape) != tuple(wanted):
                    fix = "call plan() for these sizes first"
                    fail(ShapeError, where, f"{name} is {shape_of(t)}", f"{shape_of(wanted)} as planned", fix)
        q, k = self._rotated(where, q, k, changes, "HND")
        optional_flags(where, return_lse=return_lse)
        output = OutputSpec(return_lse=return_lse or lse is not None)
        call = self._call(where, fold_heads(q, k, v), output, ScaleFactors(), **changes)
        kv_heads, dtype = k.shape[0], call.output.dtype_for(q.dtype)
        buffers = (
            None if out is None else _by_head(where, "out", out, (*q.shape[:2], v.shape[2]), dtype, kv_heads, q),
            None if lse is None else _by_head(where, "lse", lse, tuple(q.shape[:2]), torch.float32, kv_heads, q),
        )
        results = call.execute()
        by_head = []
        for x, buffer in zip(results if isinstance(results, tuple) else (results,), buffers, strict=False):
            unfolded = unfold_heads(x, kv_heads)
            by_head.append((unfolded if buffer is None else buffer.copy_(unfolded)).flatten(0, 1))
        return tuple(by_head) if return_lse else by_head[0]


def _sum(where: str, name: str, sizes: Tensor) -> int:
    """The sum of ``sizes [maps, blocks]``, which must be the same for every map, and an int32 as plans have."""
    host = as_int32(where, name, sizes.cpu())
    total = check_sizes(where, name, host, None)
    if total > INT32_MAX:
        fail(OptionError, where, f"the sum of {name} is {total}", f"at most {INT32_MAX}, an int32", "change it")
    return total


def _by_head(
    where: str, name: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, num_kv_heads: int, q: Tensor
) -> Tensor:
    """A view ``[num_kv_heads, group, rows, ...]`` of a checked buffer, in ``shape`` or in FlashInfer's shape."""
    heads, rows, *dims = shape
    group = heads // num_kv_heads
    if tuple(buffer.shape) == (num_kv_heads * rows, group, *dims) != shape:
        check_buffer(where, name, buffer, tuple(buffer.shape), dtype, q.device)
        return unfold_heads(buffer, num_kv_heads)
    check_buffer(where, name, buffer, shape, dtype, q.device)
    return torch.unflatten(buffer, 0, (num_kv_heads, group))
