"""Planners of block-sparse attention: block maps become the page tables of prefill plans, on the device of the map."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from attn_ops.errors import CapacityError, DTypeError, OptionError, ShapeError, dtype_name, fail, shape_of
from attn_ops.ops.inductor import mark_static
from attn_ops.plan.block_sparse import (
    bsr_map,
    check_bsr,
    check_sizes,
    divide_rows,
    most_requests,
    offsets_of,
    place_rows,
    query_offsets,
    uniform_rows,
)
from attn_ops.plan.page_table_checks import INTEGERS
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.planner_base import in_range, validates
from attn_ops.plan.sizing import default_tile_rows
from attn_ops.plan.state import PlanProblem, PrefillPlan
from attn_ops.planner import PrefillPlanner
from attn_ops.typed import typed


class _MatrixPlanner(PrefillPlanner):
    """A prefill planner whose plan problem has ``matrix_keys`` and ``placed``, which the op compares with its call."""

    def __init__(self, *capacity: int, matrix_keys: int, placed: bool, **arguments: Any) -> None:
        self._matrix = {"matrix_keys": int(matrix_keys), "placed": int(placed)}
        super().__init__(*capacity, **arguments)

    def _problem(self, **arguments: Any) -> PlanProblem:
        return super()._problem(**arguments)._replace(**self._matrix)


class _SparsePlanner:
    """A prefill planner whose requests are block rows."""

    def __init__(self, planner: PrefillPlanner) -> None:
        self._planner = planner

    def __copy__(self) -> _SparsePlanner:
        """A planner with a plan and a workspace of its own."""
        return copy.deepcopy(self)

    @property
    def problem(self) -> PlanProblem:
        return self._planner.problem

    @property
    def state(self) -> PrefillPlan:
        return self._planner.state

    @property
    def workspace(self) -> Tensor:
        return self._planner.workspace

    @property
    def device(self) -> torch.device:
        return self._planner.device

    @property
    def _max_pages(self) -> int:
        return self.state.kv_indices.shape[0]

    def _constant(self, values: list[int]) -> Tensor:
        """int32 on the device of the plan; a compiled graph reads it at this address."""
        with torch.inference_mode(False):
            t = torch.tensor(values, dtype=torch.int32, device=self.device)
        mark_static(t)
        return t

    def _fill(self, qo_indptr: Tensor, table: tuple[Tensor, ...], positions: Tensor | None) -> PrefillPlan:
        plan = self._planner.plan(qo_indptr, *table, validate=False)
        if positions is not None:
            place_rows(plan, positions)
        return plan


def _check(name: str, t: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
    if t.dtype not in dtypes:
        expected = "bool" if torch.bool in dtypes else "an integer dtype"
        fail(DTypeError, "plan", f"{name} is {dtype_name(t.dtype)}", expected, "convert it")
    if t.dim() != len(shape):
        fail(ShapeError, "plan", f"{name} is {shape_of(t)}", f"{shape_of(shape)}", f"reshape {name}")
    if tuple(t.shape) != shape:
        fail(ShapeError, "plan", f"{name} is {shape_of(t)}", f"{shape_of(shape)}", "make the planner for these blocks")


def _tile_rows(
    device: str | torch.device | None, heads: tuple[int, int], head_dim: int, head_dim_vo: int | None, rows: int
) -> int:
    """Query rows of a query tile by default, for blocks of ``rows`` rows."""
    dims = head_dim, head_dim if head_dim_vo is None else head_dim_vo
    return default_tile_rows(torch.empty(0, device=device).device, *heads, dims, rows, unsplit=True)


class BlockSparsePlanner(_SparsePlanner):
    """Plans for ``torch.ops.attn.block_sparse_prefill`` from a BSR matrix, the same for all heads.

    Args:
        num_rows, num_keys: rows and columns of the matrix: query rows and keys.
        row_block, col_block: rows and columns of a block. ``num_keys`` is a multiple of ``col_block``; the last block
            row may be shorter.
        max_blocks: capacity for blocks, the entries of ``indices``.
        causal: plan for ``causal=True``. Row ``i`` has the position ``i + num_keys - num_rows``, and sees the keys of
            its blocks up to there. The work of the op is least if ``row_block`` is at most ``col_block``: rows whose
            positions lie in different block columns are different requests of the plan.
        tile_rows: query rows of a query tile; default by ``row_block``.
        num_qo_heads, num_kv_heads, head_dim, head_dim_vo, num_ctas, device: as for
            :class:`~attn_ops.PrefillPlanner`.

    Attributes:
        state: the :class:`~attn_ops.PrefillPlan`, with pages of ``col_block`` keys.
        workspace: float32 scratch memory, the op's next argument.

    The op takes all keys of the matrix, and ``causal`` as planned; anything else is an error.

    Raises:
        OptionError, ShapeError: a size is out of range, or sizes do not agree.
    """

    @typed
    def __init__(
        self,
        num_rows: int,
        num_keys: int,
        row_block: int,
        col_block: int,
        max_blocks: int,
        *,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        tile_rows: int | None = None,
        num_ctas: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        in_range("num_rows", num_rows)
        in_range("num_keys", num_keys)
        in_range("row_block", row_block)
        in_range("col_block", col_block)
        in_range("max_blocks", max_blocks)
        if num_keys % col_block:
            fail(
                OptionError,
                "planner",
                f"num_keys is {num_keys}",
                f"a multiple of col_block {col_block}",
                "pad the keys",
            )
        offsets, block_rows = uniform_rows(num_rows, num_keys, row_block, col_block, causal)
        if tile_rows is None:
            tile_rows = _tile_rows(device, (num_qo_heads, num_kv_heads), head_dim, head_dim_vo, row_block)
        planner = _MatrixPlanner(
            len(block_rows),
            num_rows,
            max_blocks * most_requests(block_rows),
            matrix_keys=num_keys,
            placed=causal,
            page_size=col_block,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_vo=head_dim_vo,
            max_kv_len=num_keys,
            tile_rows=tile_rows,
            num_ctas=num_ctas,
            device=device,
        )
        super().__init__(planner)
        self.causal, self.max_blocks = causal, max_blocks
        self._rows, self._cols, self._col_block = -(-num_rows // row_block), num_keys // col_block, col_block
        self._qo_indptr = self._constant(offsets)
        self._last = self._constant([col_block] * len(block_rows))
        self._block_rows = self._constant(block_rows)
        self._col_indptr = self._constant(list(range(0, num_keys + 1, col_block)))

    @typed
    def plan(self, indptr: Tensor, indices: Tensor, *, validate: bool | None = None) -> PrefillPlan:
        """Fill the plan for a BSR matrix and return it: always the same tensors, with new contents.

        Args:
            indptr: int ``[block rows + 1]``; the block columns of block row i are ``indices[indptr[i]:indptr[i + 1]]``.
            indices: int ``[blocks]``, block columns in any order, each at most once in a block row.
            validate: check the contents too. Default: if both are on the host. On CUDA tensors this synchronizes;
                without it block columns out of range are clamped on the device, and blocks beyond the capacity are
                left out.

        Raises:
            CapacityError: there are more blocks than the capacity.
            PageTableError: the contents are inconsistent; only if they are checked.
            DTypeError, ShapeError, OptionError: as for :meth:`~attn_ops.PrefillPlanner.plan`.
        """
        _check("indptr", indptr, (self._rows + 1,))
        _check("indices", indices, (indices.shape[0],) if indices.dim() else (0,))
        if validates(validate, indptr, indices):
            check_bsr("plan", indptr, indices, self._cols, self.max_blocks)
            indices = indices[: int(indptr[-1])]
        if indices.shape[0] > self.max_blocks:
            fail(
                CapacityError,
                "plan",
                f"indices has {indices.shape[0]} blocks and the plan capacity for {self.max_blocks}",
                f"max_blocks of at least {indices.shape[0]}",
                "make the planner with that max_blocks",
            )
        indptr, indices = (t.to(self.device, torch.int32, non_blocking=True) for t in (indptr, indices))
        if not self.causal:
            return self._fill(self._qo_indptr, (indptr, indices, self._last), None)
        *table, positions = torch.ops.attn.block_sparse_table(
            bsr_map(indptr, indices, self._block_rows, self._cols),
            self._qo_indptr[None],
            self._col_indptr[None],
            self._col_block,
            self._max_pages,
            causal=True,
        )
        return self._fill(self._qo_indptr, tuple(table), positions)


class VariableBlockSparsePlanner(_SparsePlanner):
    """Plans for ``torch.ops.attn.block_sparse_prefill`` from a block map of each KV head, with blocks of any sizes.

    KV heads are different requests of the plan, over the keys of all heads one after another. The op therefore takes
    ``q [num_kv_heads * num_rows, group, head_dim]`` and ``k, v [num_kv_heads * num_keys, 1, head_dim]``, as
    :func:`fold_heads` makes them.

    Args:
        num_rows, num_keys: query rows and keys of every head.
        num_block_rows, num_block_cols: blocks of the map.
        max_pages: capacity for pages of ``page_size`` keys, over the selected blocks of all block rows and KV heads.
        page_size: divides every block column's size. Pages of several keys are faster.

    The other arguments and attributes are those of :class:`BlockSparsePlanner`.
    """

    @typed
    def __init__(
        self,
        num_rows: int,
        num_keys: int,
        num_block_rows: int,
        num_block_cols: int,
        max_pages: int,
        *,
        page_size: int = 1,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        tile_rows: int | None = None,
        num_ctas: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        in_range("num_rows", num_rows)
        in_range("num_keys", num_keys)
        in_range("num_block_rows", num_block_rows)
        in_range("num_block_cols", num_block_cols)
        in_range("max_pages", max_pages)
        in_range("num_kv_heads", num_kv_heads)
        check_groups("planner", num_qo_heads, num_kv_heads)
        group, rows = num_qo_heads // num_kv_heads, -(-num_rows // num_block_rows)
        if tile_rows is None:
            tile_rows = _tile_rows(device, (group, 1), head_dim, head_dim_vo, rows)
        planner = _MatrixPlanner(
            num_kv_heads * (num_block_rows + (num_block_cols if causal else 0)),
            num_kv_heads * num_rows,
            max_pages,
            matrix_keys=num_kv_heads * num_keys,
            placed=causal,
            page_size=page_size,
            num_qo_heads=group,
            num_kv_heads=1,
            head_dim=head_dim,
            head_dim_vo=head_dim_vo,
            max_kv_len=num_keys,
            tile_rows=tile_rows,
            num_ctas=num_ctas,
            device=device,
        )
        super().__init__(planner)
        self.causal, self.num_rows, self.num_keys = causal, num_rows, num_keys
        self._shape = num_kv_heads, num_block_rows, num_block_cols

    @typed
    def plan(
        self, block_mask_map: Tensor, block_row_sz: Tensor, block_col_sz: Tensor, *, validate: bool | None = None
    ) -> PrefillPlan:
        """Fill the plan for block maps and return it: always the same tensors, with new contents.

        Args:
            block_mask_map: bool ``[num_kv_heads, num_block_rows, num_block_cols]``, the selected blocks.
            block_row_sz: int ``[num_kv_heads, num_block_rows]``, with the sum ``num_rows`` in every head.
            block_col_sz: int ``[num_kv_heads, num_block_cols]``, multiples of ``page_size`` with the sum ``num_keys``.
            validate: as for :meth:`BlockSparsePlanner.plan`; without it pages beyond the capacity are left out.

        Raises:
            CapacityError: the selected blocks have more pages than the capacity; only if they are checked.
            DTypeError, ShapeError, OptionError: as for :meth:`BlockSparsePlanner.plan`.
        """
        heads, rows, cols = self._shape
        _check("block_mask_map", block_mask_map, self._shape, (torch.bool,))
        _check("block_row_sz", block_row_sz, (heads, rows))
        _check("block_col_sz", block_col_sz, (heads, cols))
        checked = validates(validate, block_mask_map, block_row_sz, block_col_sz)
        if checked:
            check_sizes("plan", "block_row_sz", block_row_sz, self.num_rows)
            check_sizes("plan", "block_col_sz", block_col_sz, self.num_keys, self.problem.page_size)
        mask, row_sz, col_sz = (
            t.to(self.device, non_blocking=True) for t in (block_mask_map, block_row_sz, block_col_sz)
        )
        qo_indptr, *table, positions = variable_table(
            mask, row_sz, col_sz, self.problem.page_size, self._max_pages, self.causal
        )
        if checked:
            self._check_capacity(int(table[0][-1]))
        return self._fill(qo_indptr, tuple(table), positions if self.causal else None)

    def _check_capacity(self, pages: int) -> None:
        capacity = self._max_pages
        if pages > capacity:
            fail(
                CapacityError,
                "plan",
                f"the selected blocks have {pages} pages and the plan capacity for {capacity}",
                f"max_pages of at least {pages}",
                "make the planner with that max_pages",
            )


def variable_table(
    block_mask: Tensor, row_sz: Tensor, col_sz: Tensor, page_size: int, max_pages: int, causal: bool
) -> tuple[Tensor, ...]:
    """``(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, positions)`` of the requests of block maps."""
    row_indptr, col_indptr = offsets_of(row_sz), offsets_of(col_sz)
    if causal:
        block_mask, row_indptr = divide_rows(block_mask, row_indptr, col_indptr)
    table = torch.ops.attn.block_sparse_table(block_mask, row_indptr, col_indptr, page_size, max_pages, causal=causal)
    return query_offsets(row_indptr), *table


def fold_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Head-major ``q [num_qo_heads, rows, dim]``, ``k, v [num_kv_heads, keys, dim]`` as the op takes them.

    The query is copied if several query heads share a KV head.
    """
    heads, (num_qo_heads, rows, dim) = k.shape[0], q.shape
    folded = q.view(heads, num_qo_heads // heads, rows, dim).transpose(1, 2).reshape(heads * rows, -1, dim)
    return folded, *(t.reshape(heads * t.shape[1], 1, t.shape[2]) for t in (k, v))


def unfold_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """``x [num_kv_heads * rows, group, ...]``, an output or an LSE, as a view ``[num_kv_heads, group, rows, ...]``."""
    return torch.unflatten(x, 0, (num_kv_heads, x.shape[0] // num_kv_heads)).transpose(1, 2)
