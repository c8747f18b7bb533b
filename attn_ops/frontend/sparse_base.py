"""The base of both block-sparse wrappers: block rows are requests of a prefill plan, and blocks of dense keys pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ops.errors import ShapeError, UnsupportedError, dtype_name, fail, unsupported
from attn_ops.frontend.arguments import DTypes, ranked
from attn_ops.frontend.base import Wrapper
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.prepared_plan import PreparedPlan
from attn_ops.frontend.with_lse import RunWithLse
from attn_ops.ops.options import DENSE_DIMS, FP8, AttentionOptions
from attn_ops.plan.block_sparse import place_rows
from attn_ops.plan.page_table import PageTable
from attn_ops.plan.resizable import SizedPlanner
from attn_ops.plan.spec import PlanSpec
from attn_ops.planner import PrefillPlanner
from attn_ops.typed import typed

_OP = "block_sparse_prefill"

_KV_DIMS = {"NHD": "[keys, num_kv_heads, head_dim]", "HND": "[num_kv_heads, keys, head_dim]"}


@dataclass(eq=False)
class Positions:
    """The positions ``[requests]`` of the first row of each request of a causal plan. Compared by identity."""

    tensor: Tensor


class SparseWrapper(RunWithLse, Wrapper):
    """A wrapper whose requests are block rows. Its plan is for ``_keys`` keys."""

    _keys: int

    @typed
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend=backend)

    def _write(self, sized: SizedPlanner, table: PageTable, state: Mapping[str, Any]) -> None:
        super()._write(sized, table, state)
        if state["_positions"] is not None:
            assert isinstance(sized.planner, PrefillPlanner)
            place_rows(sized.planner.state, state["_positions"].tensor)

    def _prepare_table(
        self,
        where: str,
        table: tuple[Tensor, ...],
        positions: Tensor | None,
        keys: int,
        spec: PlanSpec,
        options: AttentionOptions,
        dtypes: DTypes,
        **custom_masks: Tensor | None,
    ) -> PreparedPlan:
        """:meth:`_prepare` of ``table``, ``(qo_indptr, kv_indptr, kv_indices, kv_last_page_len)`` of the block rows.

        ``positions`` are those of a causal plan, ``custom_masks`` the keyword arguments of :meth:`_prepare`.
        """
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len = table
        pages = PageTable.of(where, kv_indptr, kv_indices, kv_last_page_len, qo_indptr)
        prepared = self._prepare(where, Batch(_OP, pages, spec, options, dtypes), **custom_masks)
        if positions is not None:
            positions = positions.to(self.device)
        return prepared.with_state(_positions=None if positions is None else Positions(positions), _keys=keys)

    def _check_kv(self, where: str, k: Tensor, v: Tensor, kv_layout: str = "NHD") -> None:
        for name, t in (("k", k), ("v", v)):
            ranked(where, name, t, _KV_DIMS[kv_layout])
            keys = t.shape[DENSE_DIMS[kv_layout].token]
            if self._planned is not None and keys != self._keys:
                fix = "call plan() for this matrix first"
                fail(ShapeError, where, f"{name} has {keys} keys", f"{self._keys} as planned", fix)

    def _rotated(
        self, where: str, q: Tensor, k: Tensor, changes: Mapping[str, Any], kv_layout: str = "NHD"
    ) -> tuple[Tensor, Tensor]:
        """Query and keys, rotated by their positions in the matrix if the mode is ROPE_LLAMA."""
        if self._planned is None:
            return q, k  # the call raises
        options = self._planned.options._replace(**changes)
        check_encoding(where, options, q, k)
        if options.pos_encoding != "ROPE_LLAMA":
            return q, k
        from attn_ops.kernels.reference.rope_alibi import rotate_half

        rope = float(options.rope_scale), float(options.rope_theta)

        def rotate(x: Tensor, first: int) -> Tensor:
            tokens = x if kv_layout == "NHD" else x.transpose(0, 1)
            position = torch.arange(tokens.shape[0], device=x.device) + first
            rotated = rotate_half(tokens.float(), position, *rope).to(x.dtype)
            return rotated if kv_layout == "NHD" else rotated.transpose(0, 1)

        token = DENSE_DIMS[kv_layout].token
        return rotate(q, k.shape[token] - q.shape[token]), rotate(k, 0)


def check_encoding(where: str, options: AttentionOptions, *tensors: Tensor) -> None:
    """Raise for ALiBi, and for a query or keys in ``tensors`` that RoPE cannot rotate."""
    if options.pos_encoding == "ALIBI":
        unsupported(
            where,
            "pos_encoding_mode is 'ALIBI'",
            "its bias needs the positions of keys in the matrix; use NONE or ROPE_LLAMA, or a prefill wrapper with a "
            "custom_mask",
        )
    if options.pos_encoding == "ROPE_LLAMA":
        for name, t in zip(("q", "k"), tensors, strict=False):
            if t.dtype in FP8:
                what = f"{name} is {dtype_name(t.dtype)} with ROPE_LLAMA"
                fail(UnsupportedError, where, what, "float16, bfloat16 or float32", "convert it, or rotate it before")
            if t.shape[-1] % 2:
                fail(ShapeError, where, f"{name} has head_dim {t.shape[-1]}", "an even one for ROPE_LLAMA", "pad it")


def fitted_table(
    block_mask: Tensor, row_indptr: Tensor, col_indptr: Tensor, page_size: int, *, causal: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The page table of a block map and the positions of its block rows. Copies the number of pages to the host."""

    def table(max_pages: int) -> tuple[Tensor, ...]:
        op = torch.ops.attn.block_sparse_table
        return op(block_mask, row_indptr, col_indptr, page_size, max_pages, causal=causal)

    *pages, positions = table(int(table(0)[0][-1]))
    return tuple(pages), positions
