"""Merging states ``(v, s)``: ``s`` is the base-2 LSE of the keys that ``v`` averages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...meta.outputs import merge_state as allocate_one
from ...meta.outputs import merge_states as allocate_many
from ...plan import DecodePlan, num_slots
from .launch import Options, launch
from .primitives import LOG2E, LOWEST, add_sink, exp2, finite, inverse, log_sum

PAIRS = 16
"""Pairs of a row and a head that a program of ``merge_states`` does."""

SLOTS = 64
"""Pieces that ``merge_pieces`` reads at a time."""

MERGE_WARPS = 4

MERGE_PROGRAMS = 512
"""Programs of ``merge_pieces``, about: each does as many rows as it takes, most of which have nothing to merge."""


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


@triton.jit
def merge_row(
    out, lse, partial, sinks, row, begin, end, head, num_slots,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, SLOTS: tl.constexpr, SINKS: tl.constexpr,
    LSE: tl.constexpr,
):  # fmt: skip
    """Merge the pieces in ``[begin, end)`` into one row and head of the outputs; none make it empty."""
    d = tl.arange(0, BLOCK_DIM)
    sums = partial + tl.cast(num_slots, tl.int64) * (HEADS * DIM)
    m = tl.full((1,), LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_DIM), tl.float32)
    for slot in range(begin, end, SLOTS):
        slots = slot + tl.arange(0, SLOTS)
        at, mask = slots.to(tl.int64) * HEADS + head, slots < end
        s = tl.load(sums + at, mask=mask, other=float("-inf"))
        v = tl.load(partial + at[:, None] * DIM + d, mask=mask[:, None] & (d < DIM), other=0.0)
        top = tl.maximum(m, tl.max(s, 0, keep_dims=True))
        decay, weight = exp2(m - top), exp2(s - top)
        m, total = top, total * decay + tl.sum(weight, 0, keep_dims=True)
        acc = acc * decay[:, None] + tl.sum(weight[:, None] * v, 0, keep_dims=True)
    if SINKS:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + head) * LOG2E)
    at = tl.cast(row, tl.int64) * HEADS + head + tl.zeros((1,), tl.int64)
    value = (acc * inverse(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d, value, mask=d[None, :] < DIM)
    if LSE:
        tl.store(lse + at, log_sum(m, total))


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
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    head, first = tl.program_id(1), tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    planned = row < max_batch
    begin = tl.load(merge_indptr + row, mask=planned, other=0)
    end = tl.load(merge_indptr + row + 1, mask=planned, other=0)
    empty = tl.load(kv_len + row, mask=planned, other=0) <= 0
    todo = ((row < rows) & (empty | (end > begin))).to(tl.int32)
    if PDL:
        gdc_wait()
    if tl.sum(todo, 0) > 0:
        for i in range(ROWS):
            here = (row == first + i).to(tl.int32)
            if tl.sum(todo * here, 0) > 0:
                slot = tl.maximum(tl.sum(begin * here, 0), 0)
                stop = tl.minimum(tl.sum(end * here, 0), num_slots)
                merge_row(
                    out, lse, partial, sinks, first + i, slot, stop, head, num_slots,
                    HEADS, DIM, BLOCK_DIM, SLOTS, SINKS, LSE,
                )  # fmt: skip


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


def merge_pieces(
    out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: DecodePlan, return_lse: bool, pdl: int
) -> None:
    """Write the rows of a decode that came in pieces, and zeros to those of empty requests."""
    rows, heads, dim = out.shape
    max_batch = plan.kv_len.shape[0]
    block = triton.next_power_of_2(triton.cdiv(max_batch, max(1, MERGE_PROGRAMS // heads)))
    launch(
        merge_pieces_kernel,
        (triton.cdiv(rows, block), heads),
        (out, lse, workspace, sinks, plan.kv_len, plan.merge_indptr),
        (rows, max_batch, num_slots(plan)),
        (),
        (heads, dim, triton.next_power_of_2(dim), block, SLOTS, sinks is not None, return_lse, pdl > 0),
        Options(MERGE_WARPS, launch_pdl=pdl > 0),
    )
