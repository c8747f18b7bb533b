"""Filling a plan, in closed form: cumulative sums, searches and scatters, no loop over requests.

Decode. The KV units of all requests lie on one line, and ``num_ctas`` equal shares are cut from it, for
every KV head alike. Where cutting only between requests is nearly as balanced, that is done instead,
and so is any single cut that falls close to the end of a request: a piece costs a partial result and a
place in the merge. Every nonempty request starts one work item and every cut inside one starts another.
With ``problem.split`` every request is cut at multiples of so many tokens from where its work begins, whatever
else is in the batch, and a share has the pieces that begin in it.

Prefill. Every request's query rows make tiles, which are ordered by the KV they read, longest first. Tiles
much longer than an equal share of all KV, as there are when tiles are few, are split into equal pieces; with
``problem.split`` all tiles are, into pieces of that size, if there is room for so many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.plan.sizing import fixed_split_counts, query_tiles
from attn_ops.plan.state import (
    IMBALANCE_DENOM,
    KV_BLOCK,
    LENGTH_BUCKETS,
    MIN_SPLIT_BLOCKS,
    DecodePlan,
    PlanProblem,
    PrefillPlan,
)


def _lengths(kv_indptr: Tensor, last: Tensor, page_size: int, max_pages: int) -> Tensor:
    """Tokens of each request; inconsistent entries are brought into range, as on the device."""
    pages = kv_indptr.clamp(0, max_pages).diff().clamp(min=0)
    return torch.where(pages > 0, (pages - 1) * page_size + last.clamp(1, page_size), 0)


def _pad(x: Tensor, length: int, value: int | Tensor) -> Tensor:
    out = x.new_zeros(length) + value
    out[: x.shape[0]] = x
    return out.int()


def _copy_requests(plan: DecodePlan | PrefillPlan, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor) -> None:
    plan.kv_indptr.copy_(_pad(kv_indptr, plan.kv_indptr.shape[0], kv_indptr[-1:]))
    plan.kv_len.copy_(_pad(kv_len, plan.kv_len.shape[0], 0))
    plan.kv_indices[: kv_indices.shape[0]] = kv_indices


def cut_line(ends: Tensor, num_ctas: int) -> Tensor:
    """Where to cut a line of tiles with the given inclusive ``ends``: ``[num_ctas + 1]``, from 0 to its end."""
    total = ends[-1]
    even = torch.arange(num_ctas + 1, device=ends.device) * total // num_ctas
    tile = torch.searchsorted(ends, even, right=True).clamp(max=ends.shape[0] - 1)
    after = ends[tile]
    before = torch.where(tile > 0, ends[tile - 1], 0)
    snapped = torch.where(even - before < after - even, before, after)
    whole = (snapped.diff().amax() * num_ctas * IMBALANCE_DENOM) <= total * (IMBALANCE_DENOM + 1)
    near = (snapped - even).abs() * num_ctas * IMBALANCE_DENOM * 2 <= total
    return torch.where(whole | near, snapped, even)


def _complete(plan: DecodePlan | PrefillPlan) -> None:
    """One launch more on a GPU, where attention may read what was written last before that is visible."""
    if plan.kv_len.is_cuda:
        plan.kv_len.add_(0)


def plan_decode(kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]) -> None:
    p = DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    kv_len = _lengths(kv_indptr, kv_last_page_len, problem.page_size, p.kv_indices.shape[0])
    _copy_requests(p, kv_indptr, kv_indices, kv_len)
    p.split_counters.zero_()
    if problem.split:
        _plan_pieces(p, problem)
    else:
        _plan_shares(p, problem)
    _complete(p)


def _line(p: DecodePlan, problem: PlanProblem) -> tuple[Tensor, Tensor, Tensor]:
    """``(first token, first unit, units)`` of the work of each request."""
    kv_len = p.kv_len.long()
    start = (kv_len - problem.window).clamp(min=0) if problem.window else torch.zeros_like(kv_len)
    first_unit = start // KV_BLOCK
    return start, first_unit, (kv_len + KV_BLOCK - 1) // KV_BLOCK - first_unit


def _plan_shares(p: DecodePlan, problem: PlanProblem) -> None:
    kv_len, num_ctas, capacity = p.kv_len.long(), p.cta_indptr.shape[0] - 1, p.work.shape[0]
    start, first_unit, units = _line(p, problem)
    ends = units.cumsum(0)
    begins = ends - units
    nonempty = (units > 0).long()
    rank = nonempty.cumsum(0) - nonempty

    cut = cut_line(ends, num_ctas)
    tile = torch.searchsorted(ends, cut, right=True)
    tiles_before = torch.cat((rank, rank[-1:] + nonempty[-1:]))[tile]
    tile = tile.clamp(max=ends.shape[0] - 1)
    inside = (cut > begins[tile]) & (cut < ends[-1])
    inside = inside & torch.cat((inside[:1], cut[1:] > cut[:-1]))
    cuts_before = inside.long().cumsum(0)
    p.cta_indptr.copy_(tiles_before + cuts_before)

    # Items: one where each nonempty request begins, one at each cut inside a request.
    at_begin = torch.searchsorted(cut, begins, right=True) - 1
    base = rank + cuts_before[at_begin]
    cuts_inside = torch.zeros_like(kv_len).scatter_add_(0, tile, inside.long())
    spare = capacity
    index = torch.cat((torch.where(nonempty > 0, base, spare), torch.where(inside, tiles_before + cuts_before, spare)))
    item_begin = ends.new_full((capacity + 1,), 0).scatter_(0, index, torch.cat((begins, cut)))[:-1]
    request = torch.cat((torch.arange(kv_len.shape[0], device=kv_len.device), tile))
    item_request = ends.new_full((capacity + 1,), 0).scatter_(0, index, request)[:-1]
    item = torch.arange(capacity, device=kv_len.device)
    used = item < nonempty.sum() + cuts_before[-1]
    r = item_request
    item_end = torch.minimum(torch.cat((item_begin[1:], item_begin[-1:])), ends[r])
    last_of_request = item - base[r] == cuts_inside[r]
    item_end = torch.where(last_of_request, ends[r], item_end)

    pieces = torch.where(cuts_inside > 0, cuts_inside + 1, 0)
    merge_end = pieces.cumsum(0)
    p.merge_indptr.copy_(torch.cat((merge_end.new_zeros(1), merge_end)))
    offset = first_unit[r] - begins[r]
    fields = (
        r,
        torch.ones_like(r),
        torch.maximum((item_begin + offset) * KV_BLOCK, start[r]),
        torch.minimum((item_end + offset) * KV_BLOCK, kv_len[r]),
        kv_len[r] - 1,
        p.kv_indptr[r].long(),
        torch.where(pieces[r] > 0, merge_end[r] - pieces[r] + item - base[r], -1),
        r,
    )
    p.work.copy_(torch.where(used[:, None], torch.stack(fields, 1), 0))


def _plan_pieces(p: DecodePlan, problem: PlanProblem) -> None:
    kv_len, num_ctas, capacity = p.kv_len.long(), p.cta_indptr.shape[0] - 1, p.work.shape[0]
    start, first_unit, units = _line(p, problem)
    size = problem.split // KV_BLOCK
    pieces = torch.where(units > 0, fixed_split_counts(problem, units), 0)
    piece_end, slots = pieces.cumsum(0), torch.where(pieces > 1, pieces, 0)
    first_piece, merge_end = piece_end - pieces, slots.cumsum(0)
    p.merge_indptr.copy_(torch.cat((merge_end.new_zeros(1), merge_end)))

    item = torch.arange(capacity, device=kv_len.device)
    r = torch.searchsorted(piece_end, item, right=True).clamp(max=kv_len.shape[0] - 1)
    piece = item - first_piece[r]
    begin = (first_unit[r] + piece * size) * KV_BLOCK
    fields = (
        r,
        torch.ones_like(r),
        torch.maximum(begin, start[r]),
        torch.minimum(begin + problem.split, kv_len[r]),
        kv_len[r] - 1,
        p.kv_indptr[r].long(),
        torch.where(slots[r] > 0, merge_end[r] - slots[r] + piece, -1),
        r,
    )
    p.work.copy_(torch.where((item < piece_end[-1])[:, None], torch.stack(fields, 1), 0))

    ends = units.cumsum(0)
    cut = torch.arange(num_ctas + 1, device=kv_len.device) * ends[-1] // num_ctas
    passed = torch.searchsorted(ends, cut, right=True)
    r = passed.clamp(max=kv_len.shape[0] - 1)
    begun = first_piece[r] + (cut - (ends - units)[r] + size - 1) // size
    begun = torch.where(passed < kv_len.shape[0], begun, piece_end[-1])
    p.cta_indptr.copy_(begun.clamp(max=capacity))


def plan_prefill(
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]
) -> None:
    p = PrefillPlan(*plan)
    problem = PlanProblem.of(p.problem)
    paged = p.kv_indices.shape[0] > 0
    kv_len = _lengths(
        kv_indptr,
        kv_last_page_len,
        problem.page_size,
        p.kv_indices.shape[0] if paged else torch.iinfo(torch.int32).max,
    )
    _copy_requests(p, kv_indptr, kv_indices, kv_len)
    qo_indptr = qo_indptr.clamp(min=0)
    p.qo_indptr.copy_(_pad(qo_indptr, p.qo_indptr.shape[0], qo_indptr[-1:]))

    capacity = p.work.shape[0]
    kv_len, qo_begin = p.kv_len.long(), p.qo_indptr[:-1].long()
    qo_len = p.qo_indptr.long().diff().clamp(min=0)
    tiles = query_tiles(problem, qo_len, kv_len, capacity)
    used, r, rows, position = tiles.used, tiles.request, tiles.rows, tiles.position
    kv_begin, kv_end = tiles.begin, tiles.end
    first_row = qo_begin[r] + tiles.offset

    extent = torch.where(used, kv_end - kv_begin, 0)
    first_unit, units = tiles.kv_blocks()
    pieces, size = torch.where(used, 1, 0), 0
    max_splits = p.split_tiles.shape[0]
    if max_splits and problem.split:
        size = problem.split // KV_BLOCK
        fixed = pieces * fixed_split_counts(problem, units)
        fits = torch.where(fixed > 1, fixed, 0).sum() <= 2 * max_splits
        pieces = torch.where(fits, fixed, pieces)
    elif max_splits:
        share = ((units.sum() + 2 * max_splits - 1) // (2 * max_splits)).clamp(min=MIN_SPLIT_BLOCKS)
        pieces = pieces * (units // share).clamp(min=1)
    split = pieces > 1
    slot_end = torch.where(split, pieces, 0).cumsum(0)
    slot = torch.where(split, slot_end - pieces, -1)

    # Longest first, by classes of the piece's extent; the order within a class is the order of the batch.
    extent = torch.where(split, (size or (units + pieces - 1) // pieces.clamp(min=1)) * KV_BLOCK, extent)
    bucket = torch.where(used, LENGTH_BUCKETS - 1 - extent * LENGTH_BUCKETS // (extent.amax() + 1), LENGTH_BUCKETS)
    order = torch.argsort(bucket, stable=True)
    ends = pieces[order].cumsum(0)
    tile = torch.arange(capacity, device=kv_len.device)
    place = torch.searchsorted(ends, tile, right=True).clamp(max=capacity - 1)
    t = order[place]
    piece = tile - (ends[place] - pieces[t])
    cuts = [at * size if size else units[t] * at // pieces[t].clamp(min=1) for at in (piece, piece + 1)]
    begin, end = ((first_unit[t] + cut) * KV_BLOCK for cut in cuts)
    begin = torch.where(piece > 0, begin, kv_begin[t])
    end = torch.where(piece + 1 < pieces[t], end, kv_end[t])
    item_slot = torch.where(split[t], slot[t] + piece, -1)
    columns = (first_row[t], rows[t], begin, end, position[t], p.kv_indptr[r[t]].long(), item_slot, r[t])
    p.work.copy_(torch.where((tile < ends[-1])[:, None], torch.stack(columns, 1), 0))

    if max_splits:
        at = torch.where(split, split.long().cumsum(0) - 1, max_splits).clamp(max=max_splits)
        merges = torch.stack((first_row, rows, slot, pieces), 1)
        spare = merges.new_zeros(max_splits + 1, merges.shape[1])
        p.split_tiles.copy_(spare.scatter_(0, at[:, None].expand_as(merges), merges)[:-1])
    _complete(p)
