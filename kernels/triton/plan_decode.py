"""``attn::plan_decode`` in one launch: two programs make the schedule in registers, the others copy page numbers.

Each of the two makes all of it, and they share out what is to be written. The integers are those of
:mod:`attn_ops.kernels.reference.plan`, which says what they mean. Nothing is read back from memory: requests ask for
what they need of cuts, and cuts of requests, by gathers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.reference.plan import plan_decode as plan_in_closed_form
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import MAX_PUBLISHED_REQUESTS, publish
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from attn_ops.plan.state import IMBALANCE_DENOM, KV_BLOCK, DecodePlan, PlanProblem

COPY = 4096
"""Page numbers that a program copies."""

SCHEDULER_CTAS = tl.constexpr(2)
"""Programs that make the schedule: one writes the items of whole requests, the other what is left."""

REQUESTS_PER_WARP, MOST_WARPS = 128, 16


@triton.jit
def count_tokens(first_page, end_page, last_page_len, max_pages, PAGE_SIZE: tl.constexpr):
    """Tokens of requests whose pages and last page may be inconsistent."""
    pages = tl.maximum(tl.minimum(end_page, max_pages), 0) - tl.maximum(first_page, 0)
    tokens = (pages - 1) * PAGE_SIZE + tl.minimum(tl.maximum(last_page_len, 1), PAGE_SIZE)
    return tl.where(pages > 0, tokens, 0)


@triton.jit
def copy_page_numbers(source, target, count, chunk, COPY: tl.constexpr):
    i = chunk * COPY + tl.arange(0, COPY)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)
    publish(target + chunk * COPY)


@triton.jit
def clear(target, count, COPY: tl.constexpr):
    for i in range(tl.program_id(0) * COPY, count, tl.num_programs(0) * COPY):
        at = i + tl.arange(0, COPY)
        tl.store(target + at, tl.zeros((COPY,), tl.int32), mask=at < count)


@triton.jit
def at_previous(values, i, first):
    """``values[i - 1]``, and ``first`` before the first."""
    return tl.where(i > 0, tl.gather(values, tl.maximum(i - 1, 0), 0), first)


@triton.jit
def at_next(values, i, SIZE: tl.constexpr):
    """``values[i + 1]``, the last one after itself."""
    return tl.gather(values, tl.minimum(i + 1, SIZE - 1), 0)


@triton.jit
def first_even_cut(x, total, num_ctas, WIDE: tl.constexpr):
    """The first even cut ``c * total // num_ctas`` that is not before ``x``: ``c = x * num_ctas / total``, rounded up.

    Float32 is off by less than one; where it gives less, that is put right. No length gives what is no cut. ``WIDE``
    where the products need 64 bits.
    """
    cut = (x.to(tl.float32) * (tl.cast(num_ctas, tl.float32) / tl.maximum(total, 1).to(tl.float32))).to(tl.int32)
    if WIDE:
        x, total = x.to(tl.int64), total.to(tl.int64)
    scaled = x * num_ctas
    cut += (cut * total < scaled).to(tl.int32)
    cut += (cut * total < scaled).to(tl.int32)
    return tl.minimum(tl.maximum(cut, 0), num_ctas)


@triton.jit
def cut_line(ends, begins, total, passed, num_ctas, IMBALANCE_DENOM: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Cuts ``[C]`` of a line of requests ``begins, ends [B]``; those after the last are at the line's end.

    ``passed`` requests end before each even cut. Returns ``(cut, even, inside, begin, end)``: whether a cut is the
    first at its place and inside of a request, and what the request of the even cut is.
    """
    c = tl.arange(0, C)
    share, rest = total // num_ctas, total % num_ctas
    even = tl.where(c < num_ctas, c * share + c * rest // num_ctas, total)
    request = tl.minimum(passed, B - 1)
    begin, end = tl.gather(begins, request, 0), tl.gather(ends, request, 0)
    snapped = tl.where(even - begin < end - even, begin, end)
    longest = tl.max(at_next(snapped, c, C) - snapped, 0).to(tl.int64)
    whole = longest * num_ctas * IMBALANCE_DENOM <= total.to(tl.int64) * (IMBALANCE_DENOM + 1)
    near = tl.abs(snapped - even).to(tl.int64) * num_ctas * IMBALANCE_DENOM * 2 <= total
    cut = tl.where(whole | near, snapped, even)
    inside = (cut == even) & (cut > begin) & (cut < total) & (cut > at_previous(cut, c, -1))
    return cut, even, inside, begin, end


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def both_sums(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def store_items(
    work, item, mask, row, begin, end, offset, start, kv_len, page_start, slot,
    KV_BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One record of ``WORK_FIELDS`` for each ``item``; ``begin`` and ``end`` are on the line, in units.

    ``WHOLE`` exchanges the fields between threads and stores records in one piece: for many items.
    """
    kv_begin, kv_end = tl.maximum((begin + offset) * KV_BLOCK, start), tl.minimum((end + offset) * KV_BLOCK, kv_len)
    position, rows = kv_len - 1, tl.zeros_like(row) + 1
    if WHOLE:
        even = tl.join(tl.join(row, position), tl.join(kv_begin, slot))
        odd = tl.join(tl.join(rows, page_start), tl.join(kv_end, row))
        record = tl.reshape(tl.join(even, odd), (item.shape[0], 8))
        tl.store(work + item[:, None] * 8 + tl.arange(0, 8), record, mask=mask[:, None])
    else:
        record = work + item * 8
        tl.store(record + 0, row, mask=mask)
        tl.store(record + 1, rows, mask=mask)
        tl.store(record + 2, kv_begin, mask=mask)
        tl.store(record + 3, kv_end, mask=mask)
        tl.store(record + 4, position, mask=mask)
        tl.store(record + 5, page_start, mask=mask)
        tl.store(record + 6, slot, mask=mask)
        tl.store(record + 7, row, mask=mask)


@triton.jit(do_not_specialize=["batch", "num_indices", "max_batch", "max_pages", "num_ctas", "num_split_counters"])
def plan_decode_kernel(
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    last_page_len,  # [batch]
    plan_kv_indptr,  # [max_batch + 1]
    plan_kv_indices,  # [max_pages]
    plan_kv_len,  # [max_batch]
    work,  # [max_batch + num_ctas, 8]
    cta_indptr,  # [num_ctas + 1]
    merge_indptr,  # [max_batch + 1]
    split_counters,  # [num_split_counters]
    batch,
    num_indices,
    max_batch,
    max_pages,
    num_ctas,
    num_split_counters,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    IMBALANCE_DENOM: tl.constexpr,
    B: tl.constexpr,  # power of 2, at least max_batch
    C: tl.constexpr,  # power of 2, more than num_ctas
    COPY: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
    clear(split_counters, num_split_counters, COPY)
    if tl.program_id(0) >= SCHEDULER_CTAS:
        copy_page_numbers(kv_indices, plan_kv_indices, num_indices, tl.program_id(0) - SCHEDULER_CTAS, COPY)
        return
    b, c = tl.arange(0, B), tl.arange(0, C)
    # Loaded here, not by a helper: what a call returns, Inductor's analysis of writes takes for an alias of
    # the pointers it was given.
    first_page = tl.load(kv_indptr + tl.minimum(b, batch))
    end_page = tl.load(kv_indptr + tl.minimum(b + 1, batch))
    last_len = tl.load(last_page_len + b, mask=b < batch, other=1)
    kv_len = tl.where(b < batch, count_tokens(first_page, end_page, last_len, max_pages, PAGE_SIZE), 0)
    start = tl.maximum(kv_len - WINDOW, 0) if WINDOW else tl.zeros_like(kv_len)
    first_unit = start // KV_BLOCK
    units = tl.cdiv(kv_len, KV_BLOCK) - first_unit
    nonempty = (units > 0).to(tl.int32)
    ends, requests_until = tl.associative_scan((units, nonempty), 0, both_sums)
    begins, total = ends - units, tl.sum(units, 0)
    if tl.program_id(0) == 1:
        tl.store(plan_kv_len + b, kv_len, mask=b < max_batch)
        tl.store(plan_kv_indptr + b, first_page, mask=b < max_batch)
        tl.store(plan_kv_indptr + max_batch, tl.load(kv_indptr + batch))

    # The cuts, those inside a request among them, and the items that begin before each.
    first_cut, cuts_end = first_even_cut(begins, total, num_ctas, WIDE), first_even_cut(ends, total, num_ctas, WIDE)
    passed = tl.cumsum(tl.histogram(cuts_end, C), 0)
    cut, even, inside, request_begin, request_end = cut_line(
        ends, begins, total, passed, num_ctas, IMBALANCE_DENOM, B, C
    )
    cuts_until = tl.cumsum(inside.to(tl.int32), 0)
    cut_item = at_previous(requests_until, passed, 0) + (cut > even) + cuts_until

    # The requests: their first item, how many cuts are inside, and the slots of their pieces.
    cuts_before = at_previous(cuts_until, first_cut, 0)
    item = requests_until - nonempty + cuts_before
    cuts_inside = at_previous(cuts_until, cuts_end, 0) - cuts_before
    pieces = tl.where(cuts_inside > 0, cuts_inside + 1, 0)
    merge_end = tl.cumsum(pieces, 0)
    first_slot = merge_end - pieces
    slot = tl.where(pieces > 0, first_slot, -1)
    offset = first_unit - begins
    if tl.program_id(0) == 0:
        next_inside = tl.associative_scan(tl.where(inside, cut, total), 0, smaller, reverse=True)
        end = tl.minimum(ends, tl.gather(next_inside, first_cut, 0))
        store_items(
            work, item, nonempty > 0, b, begins, end, offset, start, kv_len, first_page, slot, KV_BLOCK, B > 128
        )
        publish(work)
        return

    # A piece ends at the next cut that is another place, or with its request.
    request = tl.minimum(passed, B - 1)
    end = tl.minimum(request_end, tl.maximum(at_next(cut, c, C), cut + 1))
    length, page = tl.gather(kv_len, request, 0), tl.gather(first_page, request, 0)
    start = tl.maximum(length - WINDOW, 0) if WINDOW else tl.zeros_like(length)
    offset = start // KV_BLOCK - request_begin
    slot = tl.gather(first_slot - item, request, 0) + cut_item
    store_items(work, cut_item, inside, request, cut, end, offset, start, length, page, slot, KV_BLOCK, False)

    ROWS: tl.constexpr = max(B, C)
    max_items, field = max_batch + num_ctas, tl.arange(0, 8)
    for i in range(tl.max(cut_item, 0), max_items, ROWS):
        rest = (i + tl.arange(0, ROWS))[:, None]
        tl.store(work + rest * 8 + field, tl.zeros((ROWS, 8), tl.int32), mask=rest < max_items)

    tl.store(cta_indptr + c, cut_item, mask=c <= num_ctas)
    tl.store(merge_indptr + b, first_slot, mask=b < max_batch)
    tl.store(merge_indptr + max_batch, tl.max(merge_end, 0))
    publish(merge_indptr + max_batch)


def plan_decode(kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: list[Tensor]) -> None:
    p = DecodePlan(*plan)
    problem = PlanProblem.of(p.problem)
    max_batch, num_ctas = p.kv_len.shape[0], p.cta_indptr.shape[0] - 1
    if max_batch > MAX_PUBLISHED_REQUESTS:
        plan_in_closed_form(kv_indptr, kv_indices, kv_last_page_len, plan)
        return
    block_batch, block_cuts = triton.next_power_of_2(max_batch), triton.next_power_of_2(num_ctas + 1)
    num_indices, pdl = kv_indices.shape[0], starts_early(kv_indptr)
    most = num_ctas * (p.kv_indices.shape[0] * problem.page_size // KV_BLOCK + max_batch)
    launch(
        plan_decode_kernel,
        (SCHEDULER_CTAS.value + triton.cdiv(num_indices, COPY),),
        (
            *(kv_indptr, kv_indices, kv_last_page_len),
            *(p.kv_indptr, p.kv_indices, p.kv_len, p.work, p.cta_indptr, p.merge_indptr, p.split_counters),
        ),
        (kv_indptr.shape[0] - 1, num_indices, max_batch, p.kv_indices.shape[0], num_ctas, p.split_counters.numel()),
        (),
        (
            *(problem.page_size, problem.window, KV_BLOCK, IMBALANCE_DENOM),
            *(block_batch, block_cuts, COPY, not isinstance(most, int) or most >= 1 << 31, pdl),
        ),
        Options(min(MOST_WARPS, max(4, block_batch // REQUESTS_PER_WARP)), launch_pdl=pdl),
    )
