"""Merging states ``(v, s)``: ``s`` is the base-2 LSE of the keys that ``v`` averages."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.indexing import padded
from attn_ops.kernels.triton.launch import Options, launch
from attn_ops.kernels.triton.softmax import finite, inverse, log_sum_exp
from attn_ops.meta.outputs import merge_state as allocate_one
from attn_ops.meta.outputs import merge_states as allocate_many
from attn_ops.meta.outputs import merge_states_varlen as allocate_varlen
from torch import Tensor

PAIRS = 16
"""Pairs of a row and a head that a program does."""


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
    tl.store(lse + pair, log_sum_exp(m, total), mask=mask)


@triton.jit
def load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM: tl.constexpr):
    """``v [P, D]`` in float32 and ``s [P]`` at ``row [P]`` and ``head [P]``."""
    at = row.to(tl.int64) * stride_v_row + head.to(tl.int64) * stride_v_head
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
    to = v + (at * stride_v_row + head.to(tl.int64) * stride_v_head)[:, None] + d
    tl.store(to, result, mask=mask[:, None] & (d < DIM)[None, :])
    tl.store(s + at * stride_s_row + head, log_sum_exp(m, total), mask=mask)


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
    block_heads = min(PAIRS, padded(heads))
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
