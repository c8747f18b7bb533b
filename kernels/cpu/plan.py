"""Plans and page tables of small batches, for eager calls on the CPU: loops over numbers instead of ops over tensors.

By default a plan on the CPU has one CTA and no splits: every request of a decode plan, and every query tile of a
prefill plan, is one work item. The reference makes all other plans, and plans of more numbers than
:data:`MAX_NUMBERS`. The results are those of the reference.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from attn_ops.kernels import reference
from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import INT32_MAX, LENGTH_BUCKETS, DecodePlan, PlanProblem, PrefillPlan

MAX_NUMBERS = 1024
"""Most entries of a table, or work items of a plan, that are read and written one by one."""


def _int32(numbers: list[int]) -> Tensor:
    """An int32 tensor of ``numbers``. Numbers beyond int32 wrap around, as in the reference."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").int()


def _fill(t: Tensor, numbers: Sequence[object]) -> None:
    """Write ``numbers`` to the first rows of ``t``, and 0 to all other rows."""
    if len(numbers) < t.shape[0]:
        t.zero_()
        t = t[: len(numbers)]
    if numbers:
        t.copy_(torch.tensor(numbers, device="cpu"))


def _copy_page_table(
    plan: DecodePlan | PrefillPlan, kv_indptr: Tensor, kv_indices: Tensor, last: Tensor, page_size: int, most_pages: int
) -> tuple[list[int], list[int]]:
    """Write the page table of the plan. Returns the first entry of each request, and its tokens."""
    starts, last_page, max_batch = kv_indptr.tolist(), last.tolist(), plan.kv_len.shape[0]
    bounds = [min(max(start, 0), most_pages) for start in starts]
    lengths = [0] * max_batch
    for b, tokens in enumerate(last_page):
        pages = bounds[b + 1] - bounds[b]
        if pages > 0:
            lengths[b] = (pages - 1) * page_size + min(max(tokens, 1), page_size)
    starts += starts[-1:] * (max_batch + 1 - len(starts))
    _fill(plan.kv_indptr, starts)
    _fill(plan.kv_len, lengths)
    plan.kv_indices[: kv_indices.shape[0]] = kv_indices
    return starts, lengths


def _is_for_the_reference(plan: DecodePlan | PrefillPlan, problem: PlanProblem, seq_lens: Tensor | None) -> bool:
    """Whether the reference makes the plan: it is large, may have splits, or is for the keys of one rank."""
    one = plan.cta_indptr.shape[0] == 2 if isinstance(plan, DecodePlan) else plan.split_tiles.shape[0] == 0
    may_split = not one or problem.split > 0
    of_rank = seq_lens is not None or ContextShard.of_problem(problem) is not None
    return plan.work.shape[0] > MAX_NUMBERS or may_split or of_rank


def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: list[Tensor],
    *,
    seq_lens: Tensor | None = None,
) -> None:
    p = DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    if _is_for_the_reference(p, problem, seq_lens):
        reference.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    pages = p.kv_indices.shape[0]
    starts, lengths = _copy_page_table(p, kv_indptr, kv_indices, kv_last_page_len, problem.page_size, pages)
    work = []
    for b, length in enumerate(lengths):
        if length:
            first = max(0, length - problem.window) if problem.window else 0
            work.append((b, 1, first, length, length - 1, starts[b], -1, b))
    _fill(p.work, work)
    _fill(p.cta_indptr, (0, len(work)))
    p.merge_indptr.zero_()
    p.split_counters.zero_()


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: list[Tensor],
    *,
    seq_lens: Tensor | None = None,
) -> None:
    p = PrefillPlan(*plan)
    problem = PlanProblem.of(p.problem)
    if _is_for_the_reference(p, problem, seq_lens):
        reference.plan_prefill(qo_indptr, kv_indptr, kv_indices, kv_last_page_len, plan, seq_lens=seq_lens)
        return
    pages = p.kv_indices.shape[0] or INT32_MAX
    starts, lengths = _copy_page_table(p, kv_indptr, kv_indices, kv_last_page_len, problem.page_size, pages)
    capacity, max_batch, tile_rows = p.work.shape[0], len(lengths), problem.tile_rows
    max_rows = (capacity - max_batch) * tile_rows
    rows = [min(max(row, 0), max_rows) for row in qo_indptr.tolist()]
    rows += rows[-1:] * (max_batch + 1 - len(rows))
    _fill(p.qo_indptr, rows)
    tiles = []
    for b, length in enumerate(lengths):
        count = rows[b + 1] - rows[b]
        for offset in range(0, count, tile_rows):
            of_tile, position, end = min(count - offset, tile_rows), length - count + offset, length
            if problem.ahead:
                end = min(end, max(0, position + of_tile + problem.ahead - 1))
            begin = min(max(0, position + 1 - problem.window), end) if problem.window else 0
            tiles.append((rows[b] + offset, of_tile, begin, end, position, starts[b], -1, b))
    del tiles[capacity:]
    # Longest first, by classes of the KV length; within a class in the order of the batch.
    longest = max((end - begin for _, _, begin, end, *_ in tiles), default=0) + 1
    tiles.sort(key=lambda tile: -((tile[3] - tile[2]) * LENGTH_BUCKETS // longest))
    _fill(p.work, tiles)
    _fill(p.queue, (0, len(tiles)))


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, max_pages = block_tables.shape
    if block_tables.numel() > MAX_NUMBERS or batch > MAX_NUMBERS:
        return reference.page_table(block_tables, seq_lens, page_size)
    starts, last, used = [0], [], []
    for row, length in zip(block_tables.tolist(), seq_lens.tolist(), strict=True):
        pages = min((max(length, 0) - 1) // page_size + 1, max_pages)
        starts.append(starts[-1] + pages)
        last.append(min(length - (pages - 1) * page_size, page_size) if pages > 0 else 0)
        used += row[:pages]
    used += [0] * (batch * max_pages - len(used))
    indptr, indices, last_page = (_int32(x) for x in (starts, used, last))
    return indptr, indices, last_page


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    if nnz > MAX_NUMBERS or seq_lens.shape[0] == 0:
        return reference.batch_indices_positions(append_indptr, seq_lens, nnz)
    starts, lengths = append_indptr.tolist(), seq_lens.tolist()
    requests, positions = [-1] * nnz, [-1] * nnz
    for row in range(nnz):
        request = bisect_right(starts, row) - 1
        if 0 <= request < len(lengths):
            requests[row], positions[row] = request, row - starts[request + 1] + lengths[request]
    return _int32(requests), _int32(positions)
