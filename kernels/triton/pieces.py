"""The pieces of decode rows: states of some heads, which one program stores and another merges."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...plan import DecodePlan, num_slots
from .launch import Options, launch, starts_early
from .primitives import LOG2E, LOWEST, add_sink, exp2, inverse, log_sum

FEW, MANY = 2, 64
"""Pieces that a program of ``merge_rows`` reads at a time: of most rows, and of those with more pieces than ``FEW``."""

MERGE_PROGRAMS = 256
"""Programs of ``merge_rows`` at most: mostly there is nothing to merge, and each takes time to find that out."""


@triton.jit
def store_heads(out, lse, m, norm, value, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """The states ``(m, norm, value)`` of the heads at ``at``."""
    result = (value * inverse(norm)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d, result, mask=mask[:, None] & (d < DIM))
    if LSE:
        tl.store(lse + at, log_sum(m, norm), mask=mask)


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
def absorb(m, total, acc, s, v):
    """The state of each head with those of more pieces."""
    top = tl.maximum(m, tl.max(s, 0))
    decay, weight = exp2(m - top), exp2(s - top)
    return top, total * decay + tl.sum(weight, 0), acc * decay[:, None] + tl.sum(weight[:, :, None] * v, 0)


@triton.jit
def merge_pieces(
    partial, slots, first, stop, heads, mask, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, FEW: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The state of the heads of a row whose pieces are in the slots ``[first, stop)``, mostly few."""
    m = tl.full((heads.shape[0],), LOWEST, tl.float32)
    total = tl.zeros((heads.shape[0],), tl.float32)
    acc = tl.zeros((heads.shape[0], d.shape[0]), tl.float32)
    few_s, few_v = load_pieces(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, FEW)
    for i in range(first + FEW, stop, MANY):
        s, v = load_pieces(partial, slots, i, stop, heads, mask, d, NUM_HEADS, DIM, MANY)
        m, total, acc = absorb(m, total, acc, s, v)
    return absorb(m, total, acc, few_s, few_v)


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
    BLOCK_DIM: tl.constexpr,
    BLOCK_BATCH: tl.constexpr,
    FEW: tl.constexpr,
    MANY: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    # What is read of the plan was there before the pieces were.
    b = tl.arange(0, BLOCK_BATCH)
    planned = b < max_batch
    begin = tl.maximum(tl.load(merge_indptr + b, mask=planned, other=0), 0)
    end = tl.minimum(tl.load(merge_indptr + b + 1, mask=planned, other=0), slots)
    empty = tl.load(kv_len + b, mask=planned, other=0) <= 0
    todo = ((b < rows) & (empty | (end > begin))).to(tl.int32)
    jobs, job, d = tl.sum(todo, 0) * HEADS, tl.program_id(0), tl.arange(0, BLOCK_DIM)
    row, slot, stop = find_row(todo, begin, end, job // HEADS, BLOCK_BATCH)
    if PDL:
        gdc_wait()
    while job < jobs:
        head = job % HEADS + tl.arange(0, 1)
        m, norm, value = merge_pieces(partial, slots, slot, stop, head, head < HEADS, d, HEADS, DIM, FEW, MANY)
        if SINKS:
            m, norm, value = add_sink(m, norm, value, tl.load(sinks + head) * LOG2E)
        store_heads(out, lse, m, norm, value, row.to(tl.int64) * HEADS + head, head < HEADS, d, DIM, LSE)
        job += tl.num_programs(0)
        row, slot, stop = find_row(todo, begin, end, job // HEADS, BLOCK_BATCH)


def merge_rows(
    out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: DecodePlan, return_lse: bool, run: bool
) -> None:
    """Write the rows of a decode that came in pieces, and zeros to those of empty requests; ``run`` as in ``launch``.

    The rows and heads that have something to do are dealt out to the programs, wherever they are.
    """
    rows, heads, dim = out.shape
    max_batch, pdl = plan.kv_len.shape[0], starts_early(out)
    launch(
        merge_rows_kernel,
        (min(max_batch * heads, MERGE_PROGRAMS),),
        (out, lse, workspace, sinks, plan.kv_len, plan.merge_indptr),
        (rows, max_batch, num_slots(plan)),
        (),
        (
            *(heads, dim, triton.next_power_of_2(dim), triton.next_power_of_2(max_batch)),
            *(FEW, MANY if dim <= 128 else 16, sinks is not None, return_lse, pdl),
        ),
        Options(4 if max_batch <= 4096 else 16, launch_pdl=pdl),
        run,
    )
