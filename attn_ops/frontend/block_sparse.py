"""FlashInfer's wrapper for a BSR matrix of blocks of one size, and its mask layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.prepared_call import prepared
from attn_ops.errors import DTypeError, OptionError, PageTableError, ShapeError, dtype_name, fail, shape_of, unsupported
from attn_ops.frontend.arguments import DType, DTypes, attention_options, positive, ranked, refuse, required
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.paged import forward_changes
from attn_ops.frontend.plan_spec import prefill_spec
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import Scale, ScaleFactors
from attn_ops.frontend.sparse_base import SparseWrapper, check_encoding, fitted_table
from attn_ops.plan.block_sparse import bsr_map, check_bsr, uniform_rows
from attn_ops.plan.page_table import index
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.typed import typed


@typed
def convert_bsr_mask_layout(mask: Tensor, indptr: Tensor) -> Tensor:
    """The masks of blocks as the flat custom mask of the block rows.

    Args:
        mask: bool ``[blocks, R, C]``, a mask for each selected block.
        indptr: int ``[block rows + 1]``, offsets of each block row's blocks.

    Returns:
        bool ``[blocks * R * C]``: for each block row its ``[R, blocks of the row * C]``, row by row.

    Raises:
        PageTableError: ``indptr`` does not go from 0 to ``blocks``, or decreases. Its contents are copied to the host.
        ShapeError, DTypeError: a shape or a dtype is wrong.
    """
    where = "convert_bsr_mask_layout"
    ranked(where, "mask", mask, "[blocks, R, C]")
    if mask.dtype != torch.bool:
        fail(DTypeError, where, f"mask is {dtype_name(mask.dtype)}", "bool", "convert it")
    indptr = index(where, "indptr", indptr)
    check_indptr("indptr", indptr, where)
    if int(indptr[-1]) != mask.shape[0]:
        what = f"indptr ends at {int(indptr[-1])} and mask has {mask.shape[0]} blocks"
        fail(PageTableError, where, what, "a mask for each block of the block rows", "make the two agree")
    indptr = indptr.to(mask.device).long()
    (blocks, rows, cols), steps = mask.shape, indptr.diff()
    entry = torch.arange(blocks, device=mask.device)
    block_row = (torch.searchsorted(indptr, entry, right=True) - 1).clamp(0, max(0, steps.shape[0] - 1))
    first, count = indptr[block_row], steps[block_row]
    row = torch.arange(rows, device=mask.device)[:, None]
    begin = first * rows * cols + (entry - first) * cols
    place = begin[:, None, None] + row * (count * cols)[:, None, None] + torch.arange(cols, device=mask.device)
    return mask.new_empty(mask.numel()).scatter_(0, place.flatten(), mask.flatten())


class BlockSparseAttentionWrapper(SparseWrapper):
    """Attention over the blocks of a BSR matrix, the same for all heads: plan() once, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        backend: no effect on results (:mod:`attn_ops.policy`).

    run() traces: under ``torch.compile(fullgraph=True)`` it is one ``attn.block_sparse_prefill`` node.
    """

    def prepare_plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: DType = "float16",
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None,
        q2k_num: Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> PreparedPlan:
        """Plan a matrix. Eager, never inside a graph; reads the contents of the matrix on the host.

        Args:
            indptr: int ``[ceil(M / R) + 1]``; block row i has the block columns ``indices[indptr[i]:indptr[i + 1]]``.
            indices: int ``[blocks]``, in any order, each at most once in a block row.
            M, N: rows and columns of the matrix: query rows and keys. N is a multiple of C; the last block row may be
                shorter than R.
            R, C: rows and columns of a block.
            mask: bool ``[blocks, R, C]``, the elements of each block; True keeps. Overrides ``causal``.
                ``packed_mask``: uint8, what :func:`convert_bsr_mask_layout` makes of it as little-endian bits, every
                block row padded to whole bytes.
            causal: a row sees no key after its position in the matrix, ``i + N - M``.
            pos_encoding_mode: NONE or ROPE_LLAMA, by positions in the matrix.
            q_data_type, kv_data_type, o_data_type: as for decoding; the output has the dtype of the query by default.
            block_mask, kv_block_lens, q2k_indices, q2k_num, q_scale, k_scale, v_scale: refused.

        Raises:
            PageTableError: ``indptr`` or ``indices`` is inconsistent.
            ShapeError, OptionError, DTypeError: sizes, options or dtypes are wrong.
        """
        where = f"{self._name}.plan"
        refuse(where, block_mask=block_mask, kv_block_lens=kv_block_lens, q2k_indices=q2k_indices, q2k_num=q2k_num)
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                reason = "scales are per tensor or head; pass scale_q, scale_k and scale_v to run()"
                unsupported(where, f"{name} is given", reason)
        indptr, indices = required(where, indptr=indptr, indices=indices)
        positive(where, M=M, N=N, R=R, C=C)
        if N % C:
            fail(OptionError, where, f"N is {N}", f"a multiple of C, which is {C}", "pad the keys to whole blocks")
        indptr, indices = index(where, "indptr", indptr), index(where, "indices", indices)
        if indptr.shape[0] != -(-M // R) + 1:
            expected = f"[{-(-M // R) + 1}], one more than the block rows of M {M} and R {R}"
            fail(ShapeError, where, f"indptr is {shape_of(indptr)}", expected, "make them agree")
        check_bsr(where, indptr, indices, N // C, None)
        options = attention_options(
            where,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        check_encoding(where, options)
        spec = prefill_spec(where, num_qo_heads, num_kv_heads, None, head_dim, page_size=C)
        divided = causal and mask is None and packed_mask is None
        offsets, block_rows = uniform_rows(M, N, R, C, divided)
        qo_indptr = torch.tensor(offsets, dtype=torch.int32, device=indptr.device)
        table: tuple[Tensor, ...] = indptr, indices, torch.full_like(indptr[1:], C)
        positions = None
        if divided:
            rows = torch.tensor(block_rows, device=indptr.device)
            columns = torch.arange(0, N + 1, C, dtype=torch.int32, device=indptr.device)[None]
            table, positions = fitted_table(
                bsr_map(indptr, indices.to(indptr.device), rows, N // C), qo_indptr[None], columns, C, causal=True
            )
        return self._prepare_table(
            where,
            (qo_indptr, *table),
            positions,
            N,
            spec,
            options._replace(causal=causal),
            DTypes.of(where, q_data_type, kv_data_type, o_data_type),
            custom_mask=_flat_mask(where, mask, indptr, (M, R, C)) if packed_mask is None else None,
            packed_custom_mask=packed_mask,
        )

    begin_forward = plan = committing(prepare_plan)

    @typed
    @prepared
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attend as planned.

        Args:
            q: ``[M, num_qo_heads, head_dim]``.
            k, v: ``[N, num_kv_heads, head_dim]``. No key outside of the selected blocks is read.
            scale_q, scale_k, scale_v: per tensor, or per head with an FP8 query (docs/guide/fp8.md).
            out, lse: buffers of the result.

        Returns:
            ``out [M, num_qo_heads, head_dim]``, with ``return_lse`` also float32 ``lse [M, num_qo_heads]``.
        """
        output = OutputSpec(out, lse, return_lse)
        return self._dense_call(f"{self._name}.run", q, k, v, (scale_q, scale_k, scale_v), output)

    def _dense_call(
        self,
        where: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: tuple[Scale, Scale, Scale],
        output: OutputSpec,
        **changes: Any,
    ) -> AttentionCall:
        self._check_kv(where, k, v)
        q, k = self._rotated(where, q, k, changes)
        scale_q, scale_k, scale_v = scales
        factors = ScaleFactors({"scale_q": scale_q, "scale_k": scale_k}, {"scale_v": scale_v})
        return self._call(where, (q, k, v), output, factors, **changes)

    @typed
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
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
        return self._dense_call(where, q, k, v, (scale_q, scale_k, scale_v), OutputSpec(), **changes).execute()


def _flat_mask(where: str, mask: Tensor | None, indptr: Tensor, sizes: tuple[int, int, int]) -> Tensor | None:
    """The element mask of blocks as the custom mask of the block rows, of which the last may be shorter."""
    if mask is None:
        return None
    rows, row_block, col_block = sizes
    steps = indptr.cpu().long().diff()
    blocks = int(steps.sum())
    if mask.shape != (blocks, row_block, col_block):
        expected = f"[{blocks}, {row_block}, {col_block}], a mask for each block"
        fail(ShapeError, where, f"mask is {shape_of(mask)}", expected, "pass the masks of all blocks")
    missing = -rows % row_block * int(steps[-1]) * col_block
    return convert_bsr_mask_layout(mask, indptr)[: mask.numel() - missing]
