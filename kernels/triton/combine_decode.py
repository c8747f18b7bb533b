"""The pieces of decode rows: states of some heads, which one program stores and another merges."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import acquire
from attn_ops.kernels.triton.softmax import LOG2E, LOWEST, add_sink, combine, exp2, inverse, log_sum_exp
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.plan.state import DecodePlan, PlanProblem, num_slots

FEW = 2
"""Pieces that most rows with pieces have: others are merged more at a time."""

MANY = 16, 128
"""The least and the most of that: as many as there are shares. A program of ``merge_rows`` reads ``READ`` elements for
each of its warps, so with few pieces it has more of a head."""
READ = 2048

SPREAD, LEAST = 128, 32
"""Programs that few heads are spread over, one for most multiprocessors, and the elements of a head that each has."""

FEW_REQUESTS = 512
"""Of so many, one warp keeps account: it needs no barriers, which take longer than all else that a program does."""

FIXED_MANY = 64
"""``MANY`` where pieces have a fixed size, and are added up alike in every batch: by several warps in any."""

MERGE_PROGRAMS = 512
"""Programs of ``merge_rows`` at most: mostly there is nothing to merge, and each takes time to find that out."""


@triton.jit
def store_heads(out, lse, m, norm, value, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """The states ``(m, norm, value)`` of the heads at ``at``."""
    result = (value * inverse(norm)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d, result, mask=mask[:, None] & (d < DIM))
    if LSE:
        tl.store(lse + at, log_sum_exp(m, norm), mask=mask)


@triton.jit
def load_pieces(
    partial, slots, first, stop, heads, mask, d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """``s [PIECES, heads]`` and ``v [PIECES, heads, d]`` of the slots ``[first, stop)``, empty states past them.

    They are read past this multiprocessor's cache: others wrote them.
    """
    slot = first + tl.arange(0, PIECES)
    at, here = slot[:, None].to(tl.int64) * NUM_HEADS + heads, (slot < stop)[:, None] & mask
    sums = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM)
    s = tl.load(sums + at, mask=here, other=float("-inf"), cache_modifier=".cg")
    at, here = at[:, :, None] * DIM + d, here[:, :, None] & (d < DIM)
    return s, tl.load(partial + at, mask=here, other=0.0, cache_modifier=".cg")


@triton.jit
def state_of(
    partial, slots, first, stop, heads, mask, d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """The state of the heads of a row that up to ``PIECES`` pieces make, in the slots ``[first, stop)``."""
    s, v = load_pieces(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, PIECES)
    m = tl.maximum(tl.max(s, 0), LOWEST)
    weight = exp2(s - m)
    return m, tl.sum(weight, 0), tl.sum(weight[:, :, None] * v, 0)


@triton.jit
def merge_pieces(
    partial, slots, first, stop, heads, mask, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The state of the heads of a row whose pieces are in the slots ``[first, stop)``, mostly few."""
    if stop - first <= FEW:
        m, total, acc = state_of(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, FEW)
    else:
        m, total, acc = state_of(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, MANY)
        for i in range(first + MANY, stop, MANY):
            more_m, more, more_acc = state_of(partial, slots, i, stop, heads, mask, d, NUM_HEADS, DIM, MANY)
            m, total, decay, weight = combine(m, total, more_m, more, MASKED=False)
            acc = acc * decay[:, None] + more_acc * weight[:, None]
    return m, total, acc


@triton.jit
def find_row(todo, begin, end, rank, BLOCK_BATCH: tl.constexpr):
    """``(row, begin, end)`` of the row with ``todo`` that has ``rank`` such rows before it."""
    here = ((tl.cumsum(todo, 0) == rank + 1) & (todo > 0)).to(tl.int32)
    row = tl.sum(here * tl.arange(0, BLOCK_BATCH), 0)
    return row, tl.sum(here * begin, 0), tl.sum(here * end, 0)


@triton.jit(do_not_specialize=["rows", "max_batch", "slots"])
def merge_rows_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS] or [0]
    partial,  # [slots, HEADS, DIM], then [slots, HEADS]
    sinks,  # [HEADS] or None
    kv_len,  # [max_batch]
    merge_indptr,  # [max_batch + 1]
    rows,
    max_batch,
    slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SLICE: tl.constexpr,  # elements of a head that a program does
    BLOCK_BATCH: tl.constexpr,  # power of 2, at least max_batch
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    SLICES: tl.constexpr = (DIM + SLICE - 1) // SLICE
    if PDL:
        acquire()
    # What is read of the plan was there before the pieces were.
    b = tl.arange(0, BLOCK_BATCH)
    planned = b < max_batch
    begin = tl.maximum(tl.load(merge_indptr + b, mask=planned, other=0), 0)
    end = tl.minimum(tl.load(merge_indptr + b + 1, mask=planned, other=0), slots)
    empty = tl.load(kv_len + b, mask=planned, other=0) <= 0
    todo = ((b < rows) & (empty | (end > begin))).to(tl.int32)
    jobs, job = tl.sum(todo, 0) * (HEADS * SLICES), tl.program_id(0)
    row, slot, stop = find_row(todo, begin, end, job // (HEADS * SLICES), BLOCK_BATCH)
    if PDL:
        if job >= jobs:
            gdc_launch_dependents()
        gdc_wait()
        gdc_launch_dependents()
    while job < jobs:
        part = job % SLICES
        head, d = job // SLICES % HEADS + tl.arange(0, 1), part * SLICE + tl.arange(0, SLICE)
        here = head < HEADS
        m, norm, value = merge_pieces(partial, slots, slot, stop, head, here, d, HEADS, DIM, FEW, MANY)
        if SINKS:
            m, norm, value = add_sink(m, norm, value, tl.load(sinks + head) * LOG2E)
        at = row.to(tl.int64) * HEADS + head
        store_heads(out, lse, m, norm, value, at, here, d, DIM, False)
        if LSE:
            tl.store(lse + at, log_sum_exp(m, norm), mask=part == 0)
        job += tl.num_programs(0)
        if job < jobs:
            row, slot, stop = find_row(todo, begin, end, job // (HEADS * SLICES), BLOCK_BATCH)


def merge_rows(
    out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: DecodePlan, return_lse: bool, run: bool
) -> None:
    """Write the rows of a decode that came in pieces, and zeros to those of empty requests; ``run`` as in ``launch``.

    The rows and heads that have something to do are dealt out to the programs, wherever they are.
    """
    rows, heads, dim = out.shape
    max_batch, pdl = plan.kv_len.shape[0], starts_early(out)
    fixed, shares = PlanProblem.of(plan.problem).split > 0, plan.cta_indptr.shape[0] - 1
    warps = 1 if max_batch <= FEW_REQUESTS and not fixed else 4 if max_batch <= 4096 else 16
    many = FIXED_MANY if fixed else min(max(triton.next_power_of_2(shares), MANY[0]), MANY[1])
    block = triton.next_power_of_2(dim)
    part = min(block, READ * min(warps, 4) // many)
    if not fixed and isinstance(max_batch, int):
        part = min(part, max(LEAST, triton.next_power_of_2(max_batch * heads * block // SPREAD)))
    launch(
        merge_rows_kernel,
        (min(max_batch * heads * triton.cdiv(dim, part), MERGE_PROGRAMS),),
        (out, lse, workspace, sinks, plan.kv_len, plan.merge_indptr),
        (rows, max_batch, num_slots(plan)),
        (),
        (heads, dim, part, triton.next_power_of_2(max_batch), FEW, many, sinks is not None, return_lse, pdl),
        Options(warps, launch_pdl=pdl),
        run,
    )
