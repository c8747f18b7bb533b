"""Fill a plan in closed form: cumulative sums, binary searches and scatters, no loop over requests.

Decode. The KV blocks of all requests, in order, form one sequence of block indices. ``num_ctas - 1`` boundaries divide
it into one range per CTA, for every KV head alike: the work per CTA. A boundary inside a request is a split point. Even
ranges split many requests, and each split costs a partial result and work in the combine. So boundaries move to the
nearest end of a request, all of them if the ranges stay nearly even, and otherwise those that are close to one
(:func:`place_boundaries`). Every nonempty request begins one work item, and every split point begins another.
With a fixed split size (``problem.split``) every request is split at multiples of it from where its work begins,
whatever else is in the batch, and a CTA runs the splits that begin in its range.

Prefill. The query rows of every request form tiles, and work items are ordered by the length of the KV that they read,
longest first, in which order CTAs take them. The last wave may have fewer tiles than the device runs at a time: its
tiles are then divided into even splits. If a tile is longer than an even share of all KV blocks, all long tiles are
(:func:`split_lengths`).
With a fixed split size all tiles are divided into splits of that size, if the plan has capacity for all of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attn_ops.plan.page_table import kv_lengths
from attn_ops.plan.query_tiles import fixed_split_counts, query_tiles, tokens_before
from attn_ops.plan.sizing import ctas_of_tile, planned_cluster_splits, tiles_per_wave
from attn_ops.plan.state import (
    BALANCE_WAVES,
    BLOCK_COST,
    COMBINE_COST,
    IMBALANCE_DENOM,
    INT32_MAX,
    ITEM_COST,
    KV_BLOCK,
    LENGTH_BUCKETS,
    MAX_COST,
    MIN_SPLIT_BLOCKS,
    SPLIT_CANDIDATES,
    DecodePlan,
    PlanProblem,
    PrefillPlan,
)


def _kv_lengths(kv_indptr: Tensor, last: Tensor, page_size: int, max_pages: int) -> Tensor:
    """KV tokens of each request; inconsistent entries are clamped, as the kernels do."""
    return kv_lengths(kv_indptr.clamp(0, max_pages).diff().clamp(min=0), last, page_size)


def _pad(x: Tensor, length: int, value: int | Tensor) -> Tensor:
    out = x.new_zeros(length) + value
    out[: x.shape[0]] = x
    return out.int()


def _copy_page_table(plan: DecodePlan | PrefillPlan, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor) -> None:
    plan.kv_indptr.copy_(_pad(kv_indptr, plan.kv_indptr.shape[0], kv_indptr[-1:]))
    plan.kv_len.copy_(_pad(kv_len, plan.kv_len.shape[0], 0))
    plan.kv_indices[: kv_indices.shape[0]] = kv_indices


def place_boundaries(request_end: Tensor, num_ctas: int) -> Tensor:
    """The boundaries of all CTAs: block indices ``[num_ctas + 1]``, from 0 to the number of KV blocks.

    ``request_end [batch]`` is the block index after each request's last. A boundary is the even one, or the begin or
    end of a request nearest to it: the latter for all if no range then exceeds the mean by more than
    1 / ``IMBALANCE_DENOM``, else for those at most half of that away.
    """
    total = request_end[-1]
    even = torch.arange(num_ctas + 1, device=request_end.device) * total // num_ctas
    request = torch.searchsorted(request_end, even, right=True).clamp(max=request_end.shape[0] - 1)
    after = request_end[request]
    before = torch.where(request > 0, request_end[request - 1], 0)
    snapped = torch.where(even - before < after - even, before, after)
    balanced = (snapped.diff().amax() * num_ctas * IMBALANCE_DENOM) <= total * (IMBALANCE_DENOM + 1)
    near = (snapped - even).abs() * num_ctas * IMBALANCE_DENOM * 2 <= total
    return torch.where(balanced | near, snapped, even)


def _read_early(t: Tensor) -> bool:
    """Whether a kernel on ``t`` may read a plan before the preceding kernel has ended."""
    return t.is_cuda


def _publish(plan: DecodePlan | PrefillPlan) -> None:
    """Launch a kernel after those that write the plan: one with PDL may read a plan before the preceding one has ended.

    Inductor would leave out an addition of 0, or make it part of a kernel that writes the plan.
    """
    if not _read_early(plan.kv_len):
        return
    if isinstance(plan.kv_len, FakeTensor):
        from attn_ops.kernels.triton.pdl import publish_plan

        publish_plan(plan[1:])
    else:
        plan.kv_len.add_(0)


class _Requests(NamedTuple):
    """What each request's query row reads, int64 ``[max_batch]`` each.

    kv_len       KV tokens
    position     of the row in the request's KV sequence
    first_token  in the window
    """

    kv_len: Tensor
    position: Tensor
    first_token: Tensor

    def kv_blocks(self) -> tuple[Tensor, Tensor]:
        """``(first KV block, number of KV blocks)``."""
        first_block = self.first_token // KV_BLOCK
        return first_block, (self.kv_len + KV_BLOCK - 1) // KV_BLOCK - first_block


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
    kv_len = _kv_lengths(kv_indptr, kv_last_page_len, problem.page_size, p.kv_indices.shape[0])
    length = kv_len if seq_lens is None else seq_lens
    first_token = tokens_before(problem, length - problem.window) if problem.window else torch.zeros_like(kv_len)
    if seq_lens is not None:  # whose last token another rank may hold
        kv_len = torch.where(first_token < kv_len, kv_len, 0)
        first_token = torch.minimum(first_token, kv_len)
    _copy_page_table(p, kv_indptr, kv_indices, kv_len)
    p.split_counters.zero_()
    requests = _Requests(*(_pad(t, p.kv_len.shape[0], 0).long() for t in (kv_len, length - 1, first_token)))
    if problem.split:
        _plan_fixed_splits(p, problem, requests)
    else:
        _plan_balanced_splits(p, requests)
    _publish(p)


def _plan_balanced_splits(p: DecodePlan, requests: _Requests) -> None:
    kv_len, num_ctas, capacity = requests.kv_len, p.cta_indptr.shape[0] - 1, p.work.shape[0]
    first_token, (first_block, kv_blocks) = requests.first_token, requests.kv_blocks()
    request_end = kv_blocks.cumsum(0)
    request_begin = request_end - kv_blocks
    nonempty = (kv_blocks > 0).long()
    rank = nonempty.cumsum(0) - nonempty

    # Each boundary: its request, and whether it begins an item, being inside the request and the first at its block.
    boundary = place_boundaries(request_end, num_ctas)
    boundary_request = torch.searchsorted(request_end, boundary, right=True)
    requests_before = torch.cat((rank, rank[-1:] + nonempty[-1:]))[boundary_request]
    boundary_request = boundary_request.clamp(max=request_end.shape[0] - 1)
    inside = (boundary > request_begin[boundary_request]) & (boundary < request_end[-1])
    inside = inside & torch.cat((inside[:1], boundary[1:] > boundary[:-1]))
    splits_before = inside.long().cumsum(0)
    p.cta_indptr.copy_(requests_before + splits_before)

    # Scatter the begin and the request of each item: one where a nonempty request begins, one at each split point.
    # Those that begin no item go to one entry past the capacity, which is dropped.
    boundary_before = torch.searchsorted(boundary, request_begin, right=True) - 1
    first_item = rank + splits_before[boundary_before]
    split_points = torch.zeros_like(kv_len).scatter_add_(0, boundary_request, inside.long())
    index = torch.cat(
        (
            torch.where(nonempty > 0, first_item, capacity),
            torch.where(inside, requests_before + splits_before, capacity),
        )
    )
    item_begin = request_end.new_full((capacity + 1,), 0).scatter_(0, index, torch.cat((request_begin, boundary)))[:-1]
    request = torch.cat((torch.arange(kv_len.shape[0], device=kv_len.device), boundary_request))
    r = request_end.new_full((capacity + 1,), 0).scatter_(0, index, request)[:-1]

    # An item ends where the next begins, or with its request.
    item = torch.arange(capacity, device=kv_len.device)
    used = item < nonempty.sum() + splits_before[-1]
    item_end = torch.minimum(torch.cat((item_begin[1:], item_begin[-1:])), request_end[r])
    last_of_request = item - first_item[r] == split_points[r]
    item_end = torch.where(last_of_request, request_end[r], item_end)

    splits = torch.where(split_points > 0, split_points + 1, 0)
    slot_end = splits.cumsum(0)
    p.merge_indptr.copy_(torch.cat((slot_end.new_zeros(1), slot_end)))
    offset = first_block[r] - request_begin[r]
    fields = (
        r,
        torch.ones_like(r),
        torch.maximum((item_begin + offset) * KV_BLOCK, first_token[r]),
        torch.minimum((item_end + offset) * KV_BLOCK, kv_len[r]),
        requests.position[r],
        p.kv_indptr[r].long(),
        torch.where(splits[r] > 0, slot_end[r] - splits[r] + item - first_item[r], -1),
        r,
    )
    p.work.copy_(torch.where(used[:, None], torch.stack(fields, 1), 0))


def _plan_fixed_splits(p: DecodePlan, problem: PlanProblem, requests: _Requests) -> None:
    kv_len, num_ctas, capacity = requests.kv_len, p.cta_indptr.shape[0] - 1, p.work.shape[0]
    first_token, (first_block, kv_blocks) = requests.first_token, requests.kv_blocks()
    split_blocks = problem.split // KV_BLOCK
    splits = torch.where(kv_blocks > 0, fixed_split_counts(problem, kv_blocks), 0)
    item_end, slots = splits.cumsum(0), torch.where(splits > 1, splits, 0)
    first_item, slot_end = item_end - splits, slots.cumsum(0)
    p.merge_indptr.copy_(torch.cat((slot_end.new_zeros(1), slot_end)))

    item = torch.arange(capacity, device=kv_len.device)
    r = torch.searchsorted(item_end, item, right=True).clamp(max=kv_len.shape[0] - 1)
    split = item - first_item[r]
    begin = (first_block[r] + split * split_blocks) * KV_BLOCK
    fields = (
        r,
        torch.ones_like(r),
        torch.maximum(begin, first_token[r]),
        torch.minimum(begin + problem.split, kv_len[r]),
        requests.position[r],
        p.kv_indptr[r].long(),
        torch.where(slots[r] > 0, slot_end[r] - slots[r] + split, -1),
        r,
    )
    p.work.copy_(torch.where((item < item_end[-1])[:, None], torch.stack(fields, 1), 0))

    # The first item of a CTA is the first split that begins at or after its even boundary.
    request_end = kv_blocks.cumsum(0)
    boundary = torch.arange(num_ctas + 1, device=kv_len.device) * request_end[-1] // num_ctas
    passed = torch.searchsorted(request_end, boundary, right=True)
    r = passed.clamp(max=kv_len.shape[0] - 1)
    first = first_item[r] + (boundary - (request_end - kv_blocks)[r] + split_blocks - 1) // split_blocks
    first = torch.where(passed < kv_len.shape[0], first, item_end[-1])
    p.cta_indptr.copy_(first.clamp(max=capacity))


def ceil_div(x: Tensor, y: int | Tensor) -> Tensor:
    return -(-x // y)


def length_buckets(used: Tensor, kv_length: Tensor) -> Tensor:
    """The class of each query tile by its length of KV, 0 for the longest; ``LENGTH_BUCKETS`` where not ``used``."""
    kv_length = torch.where(used, kv_length, 0)
    bucket = LENGTH_BUCKETS - 1 - kv_length * LENGTH_BUCKETS // (kv_length.amax() + 1)
    return torch.where(used, bucket, LENGTH_BUCKETS)


def split_lengths(
    problem: PlanProblem, used: Tensor, kv_blocks: Tensor, bucket: Tensor, max_splits: int, cluster_splits: int
) -> Tensor:
    """KV blocks of the longest split of each query tile: the number with the least estimated time.

    Every candidate divides the longest tile into a number of splits, and tiles are divided that are longer than these.
    The estimate is the mean of all CTAs, or the time of those waves that have splits of more than 3/4, or 1/2, of the
    longest. ``cluster_splits`` CTAs divide the KV of each.
    """
    tiles, wave = used.sum(), tiles_per_wave(problem, max_splits)
    uneven = kv_blocks.amax() * wave > kv_blocks.sum()
    place = torch.argsort(torch.argsort(bucket, stable=True))  # in the order of work items
    divided = used & (uneven | ((place >= tiles // wave * wave) & (tiles < BALANCE_WAVES * wave)))

    blocks = torch.where(divided, kv_blocks, 0)
    j = torch.arange(SPLIT_CANDIDATES, device=used.device)
    candidates = ceil_div(blocks.amax(), ((4 + j % 4) << j // 4) >> 2).clamp(min=MIN_SPLIT_BLOCKS)
    splits = torch.where(divided[:, None], ceil_div(blocks[:, None], candidates).clamp(min=1), 0)
    length = ceil_div(blocks[:, None], splits.clamp(min=1))
    slots = torch.where(splits > 1, splits, 0).sum(0)
    time = (BLOCK_COST * blocks.sum() // cluster_splits + ITEM_COST * splits.sum(0)) // wave
    for quarter in (3, 2):  # of the longest
        count = torch.where(4 * length > quarter * candidates, splits, 0).sum(0)
        of_wave = BLOCK_COST * (quarter + 1) // 4 * ceil_div(candidates, cluster_splits) + ITEM_COST
        time = torch.maximum(time, ceil_div(count, wave) * of_wave)
    ctas = problem.num_kv_heads * ctas_of_tile(problem)
    time = time + torch.where(slots > 0, COMBINE_COST + ctas * slots, 0)
    time = torch.where(slots <= max_splits, time, MAX_COST) * SPLIT_CANDIDATES + j
    best = candidates.gather(0, time.amin(0, keepdim=True) % SPLIT_CANDIDATES)  # an index would be copied to the host
    return torch.where(divided, best, INT32_MAX)


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
    paged = p.kv_indices.shape[0] > 0
    kv_len = _kv_lengths(
        kv_indptr,
        kv_last_page_len,
        problem.page_size,
        p.kv_indices.shape[0] if paged else INT32_MAX,
    )
    _copy_page_table(p, kv_indptr, kv_indices, kv_len)
    # The number of rows that the tiles hold however they are divided into requests; attention writes zeros to the rest.
    max_rows = (p.work.shape[0] - p.kv_len.shape[0] - 2 * p.split_tiles.shape[0]) * problem.tile_rows
    # By a sum: Inductor of PyTorch 2.13 fails on the clamp of an arange, which the caller's offsets may be.
    qo_indptr = torch.cat((qo_indptr[:1], qo_indptr.diff())).cumsum(0, dtype=qo_indptr.dtype).clamp(0, max_rows)
    p.qo_indptr.copy_(_pad(qo_indptr, p.qo_indptr.shape[0], qo_indptr[-1:]))

    capacity = p.work.shape[0]
    kv_len, qo_begin = p.kv_len.long(), p.qo_indptr[:-1].long()
    qo_len = p.qo_indptr.long().diff().clamp(min=0)
    lengths = None if seq_lens is None else _pad(seq_lens, p.kv_len.shape[0], 0).long()
    tiles = query_tiles(problem, qo_len, kv_len, capacity, lengths)
    used, r, rows, position = tiles.used, tiles.request, tiles.rows, tiles.position
    kv_begin, kv_end = tiles.begin, tiles.end
    first_row = qo_begin[r] + tiles.offset

    # Number of splits of each tile, 0 where the tile is not used.
    first_block, kv_blocks = tiles.kv_blocks()
    splits, split_blocks = torch.where(used, 1, 0), 0
    max_splits = p.split_tiles.shape[0]
    if max_splits and problem.split:
        split_blocks = problem.split // KV_BLOCK
        fixed = splits * fixed_split_counts(problem, kv_blocks)
        fits = torch.where(fixed > 1, fixed, 0).sum() <= 2 * max_splits
        splits = torch.where(fits, fixed, splits)
    elif max_splits:
        bucket = length_buckets(used, kv_end - kv_begin)
        splits = splits * ceil_div(
            kv_blocks, split_lengths(problem, used, kv_blocks, bucket, 2 * max_splits, planned_cluster_splits(p))
        ).clamp(min=1)
    is_split = splits > 1
    slot_end = torch.where(is_split, splits, 0).cumsum(0)
    slot = torch.where(is_split, slot_end - splits, -1)

    # Order the tiles by classes of the KV length of an item, longest first; within a class in the order of the batch.
    kv_length = torch.where(used, kv_end - kv_begin, 0)
    item_blocks = split_blocks or (kv_blocks + splits - 1) // splits.clamp(min=1)
    kv_length = torch.where(is_split, item_blocks * KV_BLOCK, kv_length)
    order = torch.argsort(length_buckets(used, kv_length), stable=True)

    # Work items: the splits of each tile in that order.
    item_end = splits[order].cumsum(0)
    item = torch.arange(capacity, device=kv_len.device)
    place = torch.searchsorted(item_end, item, right=True).clamp(max=capacity - 1)
    t = order[place]
    split = item - (item_end[place] - splits[t])
    split_points = [
        i * split_blocks if split_blocks else kv_blocks[t] * i // splits[t].clamp(min=1) for i in (split, split + 1)
    ]
    begin, end = ((first_block[t] + point) * KV_BLOCK for point in split_points)
    begin = torch.where(split > 0, begin, kv_begin[t])
    end = torch.where(split + 1 < splits[t], end, kv_end[t])
    item_slot = torch.where(is_split[t], slot[t] + split, -1)
    fields = (first_row[t], rows[t], begin, end, position[t], p.kv_indptr[r[t]].long(), item_slot, r[t])
    p.work.copy_(torch.where((item < item_end[-1])[:, None], torch.stack(fields, 1), 0))

    num_items = item_end[-1:].clamp(max=capacity)
    p.queue.copy_(torch.cat((torch.zeros_like(num_items), num_items)))

    if max_splits:
        index = torch.where(is_split, is_split.long().cumsum(0) - 1, max_splits).clamp(max=max_splits)
        split_tiles = torch.stack((first_row, rows, slot, splits), 1)
        padded = split_tiles.new_zeros(max_splits + 1, split_tiles.shape[1])
        p.split_tiles.copy_(padded.scatter_(0, index[:, None].expand_as(split_tiles), split_tiles)[:-1])
    _publish(p)
