"""FlashInfer's block-sparse wrappers: block rows become the requests of a prefill plan, over dense keys as pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ops.call import AttentionCall
from attn_ops.eager.prepared_call import prepared
from attn_ops.errors import DTypeError, OptionError, PageTableError, ShapeError, UnsupportedError, fail
from attn_ops.frontend.arguments import DType, DTypes, attention_options, positive, ranked, refuse, required
from attn_ops.frontend.base import Wrapper
from attn_ops.frontend.outputs import OutputSpec, check_buffer
from attn_ops.frontend.paged import forward_changes
from attn_ops.frontend.plan_spec import prefill_spec
from attn_ops.frontend.prepared_plan import PreparedPlan, committing
from attn_ops.frontend.scales import Scale, ScaleFactors
from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.plan.block_sparse import (
    bsr_map,
    check_bsr,
    check_sizes,
    divide_rows,
    offsets_of,
    place_rows,
    query_offsets,
    uniform_rows,
)
from attn_ops.plan.page_table import INTEGERS, PageTable, index
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.plan.resizable import SizedPlanner
from attn_ops.planner import PrefillPlanner
from attn_ops.sparse_planner import fold_heads, unfold_heads
from attn_ops.typed import typed

_OP = "block_sparse_prefill"

MAX_PAGE = 64
"""Keys of the largest page of variable blocks, a power of 2. A kernel is compiled for each size of pages."""


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
        fail(DTypeError, where, f"mask is {mask.dtype}", "torch.bool", "convert it")
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
    return torch.empty_like(mask).view(-1).scatter_(0, place.flatten(), mask.flatten())


@dataclass(eq=False)
class Positions:
    """The positions of the first rows of the requests of a causal plan, ``[requests]``. Equal to itself alone."""

    tensor: Tensor


class _SparseWrapper(Wrapper):
    """A wrapper whose requests are block rows. Its plan is for one number of keys, ``_keys``."""

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
        self, where: str, table: tuple[Tensor, ...], positions: Tensor | None, keys: int, *args: Any, **kwargs: Any
    ) -> PreparedPlan:
        """``table`` is ``qo_indptr, kv_indptr, kv_indices, kv_last_page_len`` of the requests."""
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len = table
        pages = PageTable.of(where, kv_indptr, kv_indices, kv_last_page_len, qo_indptr)
        prepared = self._prepare(where, _OP, pages, *args, **kwargs)
        return prepared.with_state(_positions=None if positions is None else Positions(positions), _keys=keys)

    def _check_kv(self, where: str, k: Tensor, v: Tensor, dims: str) -> None:
        for name, t in (("k", k), ("v", v)):
            ranked(where, name, t, dims)
            keys = t.shape[0 if dims.startswith("[keys") else 1]
            if self._planned is not None and keys != self._keys:
                fix = "call plan() for this matrix first"
                fail(ShapeError, where, f"{name} has {keys} keys", f"{self._keys} as planned", fix)

    def _rotated(
        self, where: str, q: Tensor, k: Tensor, changes: Mapping[str, Any], kv_layout: str = "NHD"
    ) -> tuple[Tensor, Tensor]:
        """Query and keys, rotated by their positions in the matrix if the mode is ROPE_LLAMA."""
        if self._planned is None:
            return q, k  # the call says so
        options = self._planned.options._replace(**changes)
        _check_encoding(where, options, q, k)
        if options.pos_encoding != "ROPE_LLAMA":
            return q, k
        from attn_ops.kernels.reference.rope_alibi import rotate_half

        rope = float(options.rope_scale), float(options.rope_theta)

        def rotate(x: Tensor, first: int) -> Tensor:
            tokens = x if kv_layout == "NHD" else x.transpose(0, 1)
            position = torch.arange(tokens.shape[0], device=x.device) + first
            rotated = rotate_half(tokens.float(), position, *rope).to(x.dtype)
            return rotated if kv_layout == "NHD" else rotated.transpose(0, 1)

        token = 0 if kv_layout == "NHD" else 1
        return rotate(q, k.shape[token] - q.shape[token]), rotate(k, 0)


def _check_encoding(where: str, options: AttentionOptions, *tensors: Tensor) -> None:
    if options.pos_encoding == "ALIBI":
        raise UnsupportedError(
            f"{where}: pos_encoding_mode is 'ALIBI', which is not supported: its bias needs the positions of keys in "
            "the matrix; use NONE or ROPE_LLAMA, or a prefill wrapper with a custom_mask"
        )
    if options.pos_encoding == "ROPE_LLAMA":
        for name, t in zip(("q", "k"), tensors, strict=False):
            if t.dtype in FP8:
                what = f"{name} is {str(t.dtype).removeprefix('torch.')} with ROPE_LLAMA"
                fail(UnsupportedError, where, what, "a dtype that holds what is rotated", "rotate it before")
            if t.shape[-1] % 2:
                fail(ShapeError, where, f"{name} has head_dim {t.shape[-1]}", "an even one for ROPE_LLAMA", "pad it")


class BlockSparseAttentionWrapper(_SparseWrapper):
    """Attention over the blocks of a BSR matrix, the same for all heads: plan() once, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        backend: no effect on results (:mod:`attn_ops.frontend.policy`).

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
                raise UnsupportedError(
                    f"{where}: {name} is given, which is not supported: scales are per tensor or head; "
                    "pass scale_q, scale_k and scale_v to run()"
                )
        required(where, indptr=indptr, indices=indices)
        assert indptr is not None
        assert indices is not None
        positive(where, M=M, N=N, R=R, C=C)
        if N % C:
            fail(OptionError, where, f"N is {N}", f"a multiple of C, which is {C}", "pad the keys to whole blocks")
        indptr, indices = index(where, "indptr", indptr), index(where, "indices", indices)
        if indptr.shape[0] != -(-M // R) + 1:
            expected = f"[{-(-M // R) + 1}], one more than the block rows of M {M} and R {R}"
            fail(ShapeError, where, f"indptr is {list(indptr.shape)}", expected, "make them agree")
        check_bsr(where, indptr, indices, N // C, None)
        options = attention_options(
            where,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        _check_encoding(where, options)
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
            DTypes(where, q_data_type, kv_data_type, o_data_type),
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

    def run_return_lse(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        """:meth:`run` with ``return_lse``."""
        return self.run(q, k, v, *args, **{**kwargs, "return_lse": True})

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
        self._check_kv(where, k, v, "[keys, num_kv_heads, head_dim]")
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
        fail(ShapeError, where, f"mask is {list(mask.shape)}", expected, "pass the masks of all blocks")
    missing = -rows % row_block * int(steps[-1]) * col_block
    return convert_bsr_mask_layout(mask, indptr)[: mask.numel() - missing]


def fitted_table(
    block_mask: Tensor, row_indptr: Tensor, col_indptr: Tensor, page_size: int, *, causal: bool
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The page table of a block map and the positions of its block rows, with as many pages as there are."""

    def table(max_pages: int) -> tuple[Tensor, ...]:
        op = torch.ops.attn.block_sparse_table
        return op(block_mask, row_indptr, col_indptr, page_size, max_pages, causal=causal)

    *pages, positions = table(int(table(0)[0][-1]))
    return tuple(pages), positions


class VariableBlockSparseAttentionWrapper(_SparseWrapper):
    """Attention over the blocks of a map of each KV head, with blocks of any sizes: plan() once, run() in every layer.

    Args:
        float_workspace_buffer: scratch memory on the device of the query, any dtype.
        backend: no effect on results (:mod:`attn_ops.frontend.policy`).

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
        """
        where = f"{self._name}.plan"
        ranked(where, "block_mask_map", block_mask_map, "[num_kv_heads, block rows, block columns]")
        heads, rows, cols = block_mask_map.shape
        for name, t, blocks in (("block_row_sz", block_row_sz, rows), ("block_col_sz", block_col_sz, cols)):
            if tuple(t.shape) != (heads, blocks):
                expected = f"[{heads}, {blocks}] as in block_mask_map"
                fail(ShapeError, where, f"{name} is {list(t.shape)}", expected, "make the two agree")
            if t.dtype not in INTEGERS:
                what = f"{name} is {str(t.dtype).removeprefix('torch.')}"
                fail(DTypeError, where, what, "an integer dtype", "convert it")
        positive(where, num_kv_heads=num_kv_heads, num_qo_heads=num_qo_heads)
        if heads != num_kv_heads or num_qo_heads % num_kv_heads:
            what = f"num_qo_heads is {num_qo_heads}, num_kv_heads {num_kv_heads} and the maps are of {heads} heads"
            fail(ShapeError, where, what, "a map for each KV head, and a multiple of it in query heads", "correct them")
        num_rows = check_sizes(where, "block_row_sz", block_row_sz, None)
        num_keys = check_sizes(where, "block_col_sz", block_col_sz, None)
        if not (num_rows and num_keys):
            what = f"the blocks have {num_rows} rows and {num_keys} keys"
            fail(ShapeError, where, what, "1 or more of both", "pass the sizes of all blocks")
        options = attention_options(
            where,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        _check_encoding(where, options)
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
            DTypes(where, q_data_type, kv_data_type),
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

    def run_return_lse(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        """:meth:`run` with ``return_lse``."""
        return self.run(q, k, v, *args, **{**kwargs, "return_lse": True})

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
        """The call over all heads as requests, with its result by heads."""
        ranked(where, "q", q, "[num_qo_heads, rows, head_dim]")
        self._check_kv(where, k, v, "[num_kv_heads, keys, head_dim]")
        if self._planned is not None:
            heads, kv_heads = self._heads
            for name, t, wanted in (
                ("q", q, (heads, self._rows, q.shape[2])),
                ("k", k, (kv_heads, *k.shape[1:])),
                ("v", v, (kv_heads, *v.shape[1:])),
            ):
                if tuple(t.shape) != tuple(wanted):
                    fix = "call plan() for these sizes first"
                    fail(ShapeError, where, f"{name} is {list(t.shape)}", f"{list(wanted)} as planned", fix)
        q, k = self._rotated(where, q, k, changes, "HND")
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


def _by_head(
    where: str, name: str, buffer: Tensor, shape: tuple[int, ...], dtype: torch.dtype, num_kv_heads: int, q: Tensor
) -> Tensor:
    """A buffer ``[num_qo_heads, rows, ...]``, or as FlashInfer takes it, as ``[num_kv_heads, group, rows, ...]``."""
    heads, rows, *dims = shape
    group = heads // num_kv_heads
    if tuple(buffer.shape) == (num_kv_heads * rows, group, *dims) != shape:
        check_buffer(where, name, buffer, tuple(buffer.shape), dtype, q.device)
        return unfold_heads(buffer, num_kv_heads)
    check_buffer(where, name, buffer, shape, dtype, q.device)
    return buffer.unflatten(0, (num_kv_heads, group))
