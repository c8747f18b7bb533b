"""Block maps as requests of a prefill plan: a block row is a request, and its selected block columns are its pages.

Positions of a causal matrix are aligned bottom-right: row ``i`` of ``M`` has the position ``i + N - M`` among ``N``
keys. A row sees its request's keys up to its position, so the positions of a request's rows must lie in one block
column. Block rows are therefore divided where the position of a row begins a block column (:func:`uniform_rows`,
:func:`divide_rows`).
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from attn_ops.errors import CapacityError, PageTableError, ShapeError, fail
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.plan.state import WORK_FIELDS, PrefillPlan

_ROW, _ROWS, _POSITION, _REQUEST = map(WORK_FIELDS.index, ("row", "rows", "position", "request"))


def uniform_rows(num_rows: int, num_keys: int, row_block: int, col_block: int, causal: bool) -> tuple[list[int], ...]:
    """``(offsets, block_rows)`` of the requests of a matrix with blocks of one size.

    offsets     the first row of each request, then the number of rows
    block_rows  the block row of each request
    """
    begins = set(range(0, num_rows, row_block))
    if causal:
        ahead = num_keys - num_rows
        begins |= set(range(-ahead if ahead < 0 else -ahead % col_block, num_rows, col_block))
    offsets = sorted(begins)
    return [*offsets, num_rows], [begin // row_block for begin in offsets]


def most_requests(block_rows: list[int]) -> int:
    """The largest number of requests that a block row is divided into, of sorted ``block_rows``; at least 1."""
    return max((bisect.bisect_right(block_rows, r) - i for i, r in enumerate(block_rows)), default=1)


def bsr_map(indptr: Tensor, indices: Tensor, block_rows: Tensor, num_cols: int) -> Tensor:
    """bool ``[1, requests, num_cols]``: the selected block columns of ``block_rows [requests]`` of a BSR matrix."""
    rows = indptr.shape[0] - 1
    entry = torch.arange(indices.shape[0], device=indices.device)
    # The conversion copies: Inductor's searchsorted loses the offset of a view, or does not lower it (PyTorch 2.11).
    row = torch.searchsorted(indptr.long(), entry, right=True) - 1
    used = (row >= 0) & (row < rows) & (indices >= 0) & (indices < num_cols)
    place = torch.where(used, row * num_cols + indices, rows * num_cols)  # unused entries go past the end
    selected = torch.zeros(rows * num_cols + 1, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(0, place, torch.ones_like(used))
    return selected[:-1].view(rows, num_cols)[block_rows][None]


def offsets_of(sizes: Tensor) -> Tensor:
    """int32 ``[maps, blocks + 1]`` of the ``sizes [maps, blocks]`` of blocks."""
    ends = sizes.long().cumsum(1)
    return torch.cat((torch.zeros_like(ends[:, :1]), ends), 1).int()


def divide_rows(block_mask: Tensor, row_indptr: Tensor, col_indptr: Tensor) -> tuple[Tensor, Tensor]:
    """``block_mask`` and ``row_indptr`` of the requests of causal maps: one per block row and column, some empty."""
    num_rows, ahead = row_indptr[:, -1:], col_indptr[:, -1:] - row_indptr[:, -1:]
    columns = torch.minimum((col_indptr[:, :-1] - ahead).clamp(min=0), num_rows)
    begins = torch.cat((row_indptr[:, :-1], columns), 1).sort(1).values
    row = torch.searchsorted(row_indptr.long(), begins.long(), right=True) - 1  # of a copy, as in bsr_map()
    mask = block_mask.gather(1, row.clamp(max=block_mask.shape[1] - 1)[..., None].expand(-1, -1, block_mask.shape[2]))
    return mask, torch.cat((begins, num_rows), 1)


def query_offsets(row_indptr: Tensor) -> Tensor:
    """``qo_indptr [maps * requests + 1]`` of the rows of all maps, one after another."""
    num_rows = row_indptr[:, -1:]
    ends = num_rows.cumsum(0)
    begins = (row_indptr[:, :-1] + ends - num_rows).flatten()
    return torch.cat((begins, ends[-1])).int()


def place_rows(plan: PrefillPlan, positions: Tensor) -> None:
    """Give the rows of request ``b`` positions from ``positions[b]`` on, int32 on the device of the plan.

    Work items that tensor operations write are not published (:mod:`attn_ops.kernels.triton.pdl`). Nor need they be:
    prefill kernels wait for the preceding kernel before they read a work item.
    """
    work = plan.work
    request = work[:, _REQUEST].long().clamp(0, positions.shape[0] - 1)
    position = positions[request] + work[:, _ROW] - plan.qo_indptr[request]
    work[:, _POSITION].copy_(torch.where(work[:, _ROWS] > 0, position, 0))


def check_bsr(where: str, indptr: Tensor, indices: Tensor, num_cols: int, max_blocks: int | None) -> None:
    """Check the contents of a BSR matrix, which are copied to the host. ``max_blocks`` None: any number of blocks."""
    check_indptr("indptr", indptr, where)
    used = int(indptr[-1])
    if used > indices.shape[0]:
        fail(
            PageTableError,
            where,
            f"indptr ends at {used} and indices has {indices.shape[0]} entries",
            "a block column for every block",
            "pass the block columns of all blocks",
        )
    if max_blocks is not None and used > max_blocks:
        fail(
            CapacityError,
            where,
            f"the matrix has {used} blocks and the plan capacity for {max_blocks}",
            f"max_blocks of at least {used}",
            "make the planner with that max_blocks",
        )
    if used:
        low, high = (int(x) for x in indices[:used].aminmax())
        if low < 0 or high >= num_cols:
            fail(
                PageTableError,
                where,
                f"indices has the block column {low if low < 0 else high}",
                f"0 to {num_cols - 1}",
                "pass block columns of this matrix",
            )
        _check_repeats(where, indptr.cpu().long(), indices[:used].cpu().long(), num_cols)


def _check_repeats(where: str, indptr: Tensor, indices: Tensor, num_cols: int) -> None:
    """Raise if a block row has a block column twice. ``indptr`` and ``indices``, int64 on the host, are in range."""
    rows = torch.arange(indptr.shape[0] - 1, device="cpu").repeat_interleave(indptr.diff())
    blocks = (rows * num_cols + indices).sort().values
    repeats = blocks[1:][blocks.diff() == 0]
    if repeats.shape[0]:
        row, column = divmod(int(repeats[0]), num_cols)
        fail(
            PageTableError,
            where,
            f"indices has the block column {column} more than once in block row {row}",
            "each block column at most once in a block row",
            "leave out the repeats",
        )


def check_sizes(where: str, name: str, sizes: Tensor, total: int | None, multiple: int = 1) -> int:
    """The sum of ``sizes [maps, blocks]``, which must be the same for every map. Sizes are copied to the host."""
    host = sizes.cpu().long()
    sums = host.sum(1)
    wanted = int(sums[0]) if total is None else total
    if bool((host < 0).any()) or bool((sums != wanted).any()):
        fail(
            ShapeError,
            where,
            f"the sums of {name} are {sums.tolist()}",
            f"sizes of 0 or more with the sum {wanted} in every KV head",
            "divide the same rows and keys in every head",
        )
    if bool((host % multiple).any()):
        fail(
            ShapeError,
            where,
            f"{name} has a size that is not a multiple of page_size {multiple}",
            f"multiples of {multiple}",
            "make the planner with a page_size that divides all sizes",
        )
    return wanted
