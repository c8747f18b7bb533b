"""Merging states ``(v, s)``: ``s`` is the base-2 LSE of the keys that ``v`` averages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...meta.outputs import merge_state as allocate_one
from ...meta.outputs import merge_states as allocate_many
from ...meta.outputs import merge_states_varlen as allocate_varlen
from ...plan import DecodePlan, num_slots
from .launch import Options, launch, starts_early
from .primitives import LOG2E, LOWEST, add_sink, exp2, finite, inverse, log_sum

PAIRS = 16
"""Pairs of a row and a head that a program does, other than of ``merge_pieces``."""

FEW, MANY = 2, 64
"""Pieces that ``merge_pieces`` reads at a time: of most rows, and of those with more pieces than ``FEW``."""

MERGE_PROGRAMS = 256
"""Programs of ``merge_pieces`` at most: mostly there is nothing to merge, and each takes time to find that out."""


@triton.jit
def absorb(m, total, acc, v, s):
    """The states ``(m, total, acc)`` of ``[P]`` pairs with one state more each, ``v [P, D]`` and ``s [P]``."""
    top = tl.maximum(m, s)
    decay, weight = tl.exp2(m - finite(top)), tl.exp2(s - finite(top))
    acc = acc * decay[:, None] + tl.where((s > float("-inf"))[:, None], v * weight[:, None], 0.0)
    return top, total * decay + weight, acc


@triton.jit
def store_merged(out, lse, m, total, acc, pair, mask, d, DIM: tl.constexpr):
    value = (acc * inverse(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * DIM + d, value, mask=mask[:, None] & (d < DIM))
    tl.store(lse + pair, log_sum(m, total), mask=mask)


@triton.jit
def load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM: tl.constexpr):
    """``v [P, D]`` in float32 and ``s [P]`` at ``row [P]`` and ``head [P]``."""
    at = row.to(tl.int64) * stride_v_row + head * stride_v_head
    value = tl.load(v + at[:, None] + d, mask=mask[:, None] & (d < DIM), other=0.0)
    return value.to(tl.float32), tl.load(s + row.to(tl.int64) * stride_s_row + head, mask=mask, other=float("-inf"))


@triton.jit(do_not_specialize=["pairs", "states"])
def merge_states_kernel(
    v,  # [rows, states, HEADS, DIM]
    s,  # [rows, states, HEADS]
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS]
    pairs,
    states,
    stride_v_row,
    stride_v_state,
    stride_v_head,
    stride_s_row,
    stride_s_state,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair, d = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_DIM)
    row, head, mask = pair // HEADS, pair % HEADS, pair < pairs
    m = tl.full((PAIRS,), float("-inf"), tl.float32)
    total = tl.zeros((PAIRS,), tl.float32)
    acc = tl.zeros((PAIRS, BLOCK_DIM), tl.float32)
    for _ in range(states):
        value, sums = load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM)
        m, total, acc = absorb(m, total, acc, value, sums)
        v += stride_v_state
        s += stride_s_state
    store_merged(out, lse, m, total, acc, pair, mask, d, DIM)


@triton.jit(do_not_specialize=["pairs"])
def merge_state_kernel(
    v_a,  # [rows, HEADS, DIM]
    s_a,  # [rows, HEADS]
    v_b,
    s_b,
    out,
    lse,
    pairs,
    stride_va_row,
    stride_va_head,
    stride_sa_row,
    stride_vb_row,
    stride_vb_head,
    stride_sb_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair, d = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_DIM)
    row, head, mask = pair // HEADS, pair % HEADS, pair < pairs
    value_a, sums_a = load_state(v_a, s_a, row, head, mask, stride_va_row, stride_va_head, stride_sa_row, d, DIM)
    value_b, sums_b = load_state(v_b, s_b, row, head, mask, stride_vb_row, stride_vb_head, stride_sb_row, d, DIM)
    m = tl.full((PAIRS,), float("-inf"), tl.float32)
    total = tl.zeros((PAIRS,), tl.float32)
    acc = tl.zeros((PAIRS, BLOCK_DIM), tl.float32)
    m, total, acc = absorb(m, total, acc, value_a, sums_a)
    m, total, acc = absorb(m, total, acc, value_b, sums_b)
    store_merged(out, lse, m, total, acc, pair, mask, d, DIM)


@triton.jit(do_not_specialize=["pairs"])
def merge_state_in_place_kernel(
    v,  # [rows, HEADS, DIM]
    s,  # [rows, HEADS]
    v_other,
    s_other,
    merged,  # [rows] of bool or None
    pairs,
    stride_v_row,
    stride_v_head,
    stride_s_row,
    stride_vo_row,
    stride_vo_head,
    stride_so_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    MASK: tl.constexpr,
):
    pair, d = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.arange(0, BLOCK_DIM)
    row, head, mask = pair // HEADS, pair % HEADS, pair < pairs
    if MASK:
        mask = mask & (tl.load(merged + row, mask=mask, other=0) != 0)
    value, sums = load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM)
    other, other_sums = load_state(
        v_other, s_other, row, head, mask, stride_vo_row, stride_vo_head, stride_so_row, d, DIM
    )
    m = tl.full((PAIRS,), float("-inf"), tl.float32)
    total = tl.zeros((PAIRS,), tl.float32)
    acc = tl.zeros((PAIRS, BLOCK_DIM), tl.float32)
    m, total, acc = absorb(m, total, acc, value, sums)
    m, total, acc = absorb(m, total, acc, other, other_sums)
    tl.debug_barrier()  # several threads have read each of s, and one of them writes it
    at = row.to(tl.int64)
    result = (acc * inverse(total)[:, None]).to(v.dtype.element_ty)
    tl.store(
        v + (at * stride_v_row + head * stride_v_head)[:, None] + d, result, mask=mask[:, None] & (d < DIM)[None, :]
    )
    tl.store(s + at * stride_s_row + head, log_sum(m, total), mask=mask)


@triton.jit(do_not_specialize=["states"])
def merge_states_varlen_kernel(
    v,  # [states, HEADS, DIM]
    s,  # [states, HEADS]
    indptr,  # [rows + 1]
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS]
    states,
    stride_v_state,
    stride_v_head,
    stride_s_state,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row, d = tl.program_id(0), tl.arange(0, BLOCK_DIM)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = head < HEADS
    m = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_DIM), tl.float32)
    begin, end = tl.maximum(tl.load(indptr + row), 0), tl.minimum(tl.load(indptr + row + 1), states)
    for state in range(begin, end):
        at = state + tl.zeros_like(head)
        value, sums = load_state(v, s, at, head, mask, stride_v_state, stride_v_head, stride_s_state, d, DIM)
        m, total, acc = absorb(m, total, acc, value, sums)
    store_merged(out, lse, m, total, acc, row * HEADS + head, mask, d, DIM)


@triton.jit
def add_pieces(
    m, total, acc, partial, slot, stop, head, num_slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The state of one row and head with the pieces in ``[slot, slot + SLOTS)``, as far as ``stop``, counted in."""
    d = tl.arange(0, BLOCK_DIM)
    slots = slot + tl.arange(0, SLOTS)
    at, mask = slots.to(tl.int64) * HEADS + head, slots < stop
    sums = partial + tl.cast(num_slots, tl.int64) * (HEADS * DIM)
    s = tl.load(sums + at, mask=mask, other=float("-inf"))
    v = tl.load(partial + at[:, None] * DIM + d, mask=mask[:, None] & (d < DIM), other=0.0)
    top = tl.maximum(m, tl.max(s, 0, keep_dims=True))
    decay, weight = exp2(m - top), exp2(s - top)
    acc = acc * decay[:, None] + tl.sum(weight[:, None] * v, 0, keep_dims=True)
    return top, total * decay + tl.sum(weight, 0, keep_dims=True), acc


@triton.jit
def find_row(todo, begin, end, rank, BLOCK_BATCH: tl.constexpr):
    """``(row, begin, end)`` of the row with ``todo`` that has ``rank`` such rows before it."""
    here = ((tl.cumsum(todo, 0) == rank + 1) & (todo > 0)).to(tl.int32)
    row = tl.sum(here * tl.arange(0, BLOCK_BATCH), 0)
    return row, tl.sum(here * begin, 0), tl.sum(here * end, 0)


@triton.jit(do_not_specialize=["rows", "max_batch", "num_slots"])
def merge_pieces_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS] or [0]
    partial,  # [num_slots, HEADS, DIM], then [num_slots, HEADS]
    sinks,  # [HEADS] or None
    kv_len,  # [max_batch]
    merge_indptr,  # [max_batch + 1]
    rows,
    max_batch,
    num_slots,
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
    end = tl.minimum(tl.load(merge_indptr + b + 1, mask=planned, other=0), num_slots)
    empty = tl.load(kv_len + b, mask=planned, other=0) <= 0
    todo = ((b < rows) & (empty | (end > begin))).to(tl.int32)
    jobs, job, d = tl.sum(todo, 0) * HEADS, tl.program_id(0), tl.arange(0, BLOCK_DIM)
    row, slot, stop = find_row(todo, begin, end, job // HEADS, BLOCK_BATCH)
    if PDL:
        gdc_wait()
    while job < jobs:
        head = job % HEADS
        m = tl.full((1,), LOWEST, tl.float32)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, BLOCK_DIM), tl.float32)
        if stop - slot <= FEW:
            m, total, acc = add_pieces(m, total, acc, partial, slot, stop, head, num_slots, HEADS, DIM, BLOCK_DIM, FEW)
        else:
            for i in range(slot, stop, MANY):
                m, total, acc = add_pieces(
                    m, total, acc, partial, i, stop, head, num_slots, HEADS, DIM, BLOCK_DIM, MANY
                )
        if SINKS:
            m, total, acc = add_sink(m, total, acc, tl.load(sinks + head) * LOG2E)
        at = row.to(tl.int64) * HEADS + head + tl.zeros((1,), tl.int64)
        value = (acc * inverse(total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + d, value, mask=d[None, :] < DIM)
        if LSE:
            tl.store(lse + at, log_sum(m, total))
        job += tl.num_programs(0)
        row, slot, stop = find_row(todo, begin, end, job // HEADS, BLOCK_BATCH)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_many(v, s)
    rows, states, heads, dim = v.shape
    launch(
        merge_states_kernel,
        (triton.cdiv(rows * heads, PAIRS),),
        (v, s, out, lse),
        (rows * heads, states),
        (*v.stride()[:3], *s.stride()[:2]),
        (heads, dim, triton.next_power_of_2(dim), PAIRS),
        Options(),
    )
    return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_one(v_a, s_a)
    rows, heads, dim = v_a.shape
    launch(
        merge_state_kernel,
        (triton.cdiv(rows * heads, PAIRS),),
        (v_a, s_a, v_b, s_b, out, lse),
        (rows * heads,),
        (*v_a.stride()[:2], s_a.stride(0), *v_b.stride()[:2], s_b.stride(0)),
        (heads, dim, triton.next_power_of_2(dim), PAIRS),
        Options(),
    )
    return out, lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    rows, heads, dim = v.shape
    launch(
        merge_state_in_place_kernel,
        (triton.cdiv(rows * heads, PAIRS),),
        (v, s, v_other, s_other, mask),
        (rows * heads,),
        (*v.stride()[:2], s.stride(0), *v_other.stride()[:2], s_other.stride(0)),
        (heads, dim, triton.next_power_of_2(dim), PAIRS, mask is not None),
        Options(),
    )


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_varlen(v, s, indptr)
    rows, heads, dim = out.shape
    block_heads = min(PAIRS, triton.next_power_of_2(heads))
    launch(
        merge_states_varlen_kernel,
        (rows, triton.cdiv(heads, block_heads)),
        (v, s, indptr, out, lse),
        (v.shape[0],),
        (*v.stride()[:2], s.stride(0)),
        (heads, dim, triton.next_power_of_2(dim), block_heads),
        Options(),
    )
    return out, lse


def merge_pieces(
    out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: DecodePlan, return_lse: bool
) -> None:
    """Write the rows of a decode that came in pieces, and zeros to those of empty requests.

    The rows and heads that have something to do are dealt out to the programs, wherever they are.
    """
    rows, heads, dim = out.shape
    max_batch, pdl = plan.kv_len.shape[0], starts_early(out)
    launch(
        merge_pieces_kernel,
        (min(max_batch * heads, MERGE_PROGRAMS),),
        (out, lse, workspace, sinks, plan.kv_len, plan.merge_indptr),
        (rows, max_batch, num_slots(plan)),
        (),
        (
            *(heads, dim, triton.next_power_of_2(dim), triton.next_power_of_2(max_batch)),
            *(FEW, MANY if dim <= 128 else 16, sinks is not None, return_lse, pdl),
        ),
        Options(4 if max_batch <= 4096 else 16, launch_pdl=pdl),
    )
