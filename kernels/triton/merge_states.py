"""Merge attention states ``(v, s)``: ``v`` is the output over a set of keys, ``s`` its base-2 LSE.

The output over the union of disjoint key sets is ``sum(2^s_i * v_i) / sum(2^s_i)``, computed as an online softmax over
the states: ``row_max`` is the largest ``s`` so far, ``row_sum`` the sum of ``2^(s - row_max)`` and ``acc`` the sum of
``2^(s - row_max) * v``.
A state of no keys has ``s = -inf`` and adds nothing. An ``s`` of NaN or infinity makes the result NaN.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.indexing import padded
from attn_ops.kernels.triton.launch import launch
from attn_ops.kernels.triton.softmax import empty_state, inverse, log_sum_exp, rescale_factor
from attn_ops.meta.outputs import merge_state as allocate_merge_state
from attn_ops.meta.outputs import merge_states as allocate_merge_states
from attn_ops.meta.outputs import merge_states_varlen as allocate_merge_states_varlen

PACKED_ROWS = 16
"""Packed rows (a row and a head) that a program merges."""


@triton.jit
def merge_update(row_max, row_sum, acc, v, s):
    """The online-softmax state ``(row_max [P], row_sum [P], acc [P, D])`` after one more state ``v [P, D], s [P]``."""
    new_max = tl.maximum(row_max, s)
    alpha, p = rescale_factor(row_max, new_max), rescale_factor(s, new_max)
    acc = acc * alpha[:, None] + tl.where((s == float("-inf"))[:, None], 0.0, v * p[:, None])
    return new_max, row_sum * alpha + p, acc


@triton.jit
def store_merged(out, lse, row_max, row_sum, acc, packed_row, mask, d, DIM: tl.constexpr):
    """The epilogue: normalize, and store ``out [packed rows, DIM]`` and ``lse [packed rows]``."""
    value = (acc * inverse(row_sum)[:, None]).to(out.dtype.element_ty)
    tl.store(out + packed_row.to(tl.int64)[:, None] * DIM + d, value, mask=mask[:, None] & (d < DIM))
    tl.store(lse + packed_row, log_sum_exp(row_max, row_sum), mask=mask)


@triton.jit
def load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM: tl.constexpr):
    """``v [P, D]`` in float32 and ``s [P]`` at ``row [P]`` and ``head [P]``; no keys where masked."""
    offset = row.to(tl.int64) * stride_v_row + head.to(tl.int64) * stride_v_head
    value = tl.load(v + offset[:, None] + d, mask=mask[:, None] & (d < DIM), other=0.0)
    return value.to(tl.float32), tl.load(s + row.to(tl.int64) * stride_s_row + head, mask=mask, other=float("-inf"))


@triton.jit(do_not_specialize=["packed_rows", "states"])
def merge_states_kernel(
    v,  # [rows, states, HEADS, DIM]
    s,  # [rows, states, HEADS]
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS]
    packed_rows,  # rows * HEADS
    states,
    stride_v_row,
    stride_v_state,
    stride_v_head,
    stride_s_row,
    stride_s_state,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
):
    """Grid: (blocks of PACKED_ROWS packed rows).

    A program owns PACKED_ROWS consecutive packed rows and merges all states of each.
    Loop invariant: ``(row_max, row_sum, acc)`` is the online-softmax state of the states so far, and ``v`` and ``s``
    point to the next.
    Bound by memory bandwidth; few rows by latency, since the states of a row are loaded one after the other.
    """
    packed_row, d = tl.program_id(0) * PACKED_ROWS + tl.arange(0, PACKED_ROWS), tl.arange(0, BLOCK_DIM)
    row, head, mask = packed_row // HEADS, packed_row % HEADS, packed_row < packed_rows
    row_max, row_sum, acc = empty_state(PACKED_ROWS, BLOCK_DIM)
    for _ in range(states):
        value, lse_in = load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM)
        row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value, lse_in)
        v += stride_v_state
        s += stride_s_state
    store_merged(out, lse, row_max, row_sum, acc, packed_row, mask, d, DIM)


@triton.jit(do_not_specialize=["packed_rows"])
def merge_state_kernel(
    v_a,  # [rows, HEADS, DIM]
    s_a,  # [rows, HEADS]
    v_b,
    s_b,
    out,
    lse,
    packed_rows,  # rows * HEADS
    stride_va_row,
    stride_va_head,
    stride_sa_row,
    stride_vb_row,
    stride_vb_head,
    stride_sb_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
):
    """Grid: (blocks of PACKED_ROWS packed rows).

    A program owns PACKED_ROWS consecutive packed rows and merges the states a and b of each.
    Bound by memory bandwidth; few rows by launch latency.
    """
    packed_row, d = tl.program_id(0) * PACKED_ROWS + tl.arange(0, PACKED_ROWS), tl.arange(0, BLOCK_DIM)
    row, head, mask = packed_row // HEADS, packed_row % HEADS, packed_row < packed_rows
    value_a, lse_a = load_state(v_a, s_a, row, head, mask, stride_va_row, stride_va_head, stride_sa_row, d, DIM)
    value_b, lse_b = load_state(v_b, s_b, row, head, mask, stride_vb_row, stride_vb_head, stride_sb_row, d, DIM)
    row_max, row_sum, acc = empty_state(PACKED_ROWS, BLOCK_DIM)
    row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value_a, lse_a)
    row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value_b, lse_b)
    store_merged(out, lse, row_max, row_sum, acc, packed_row, mask, d, DIM)


@triton.jit(do_not_specialize=["packed_rows"])
def merge_state_in_place_kernel(
    v,  # [rows, HEADS, DIM]
    s,  # [rows, HEADS]
    v_other,
    s_other,
    row_mask,  # [rows] of bool: rows to merge, or None for all
    packed_rows,  # rows * HEADS
    stride_v_row,
    stride_v_head,
    stride_s_row,
    stride_vo_row,
    stride_vo_head,
    stride_so_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
    MASK: tl.constexpr,
):
    """Grid: (blocks of PACKED_ROWS packed rows).

    A program owns PACKED_ROWS consecutive packed rows, merges the other state into each and stores it in place.
    Barrier: one, between the loads of ``s`` and its store, since several threads load the same element.
    Bound by memory bandwidth; few rows by launch latency.
    """
    packed_row, d = tl.program_id(0) * PACKED_ROWS + tl.arange(0, PACKED_ROWS), tl.arange(0, BLOCK_DIM)
    row, head, mask = packed_row // HEADS, packed_row % HEADS, packed_row < packed_rows
    if MASK:
        mask = mask & (tl.load(row_mask + row, mask=mask, other=0) != 0)
    value, lse_in = load_state(v, s, row, head, mask, stride_v_row, stride_v_head, stride_s_row, d, DIM)
    other, lse_other = load_state(
        v_other, s_other, row, head, mask, stride_vo_row, stride_vo_head, stride_so_row, d, DIM
    )
    row_max, row_sum, acc = empty_state(PACKED_ROWS, BLOCK_DIM)
    row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value, lse_in)
    row_max, row_sum, acc = merge_update(row_max, row_sum, acc, other, lse_other)
    tl.debug_barrier()  # all loads of s precede its store
    row_offset = row.to(tl.int64)
    result = (acc * inverse(row_sum)[:, None]).to(v.dtype.element_ty)
    target = v + (row_offset * stride_v_row + head.to(tl.int64) * stride_v_head)[:, None] + d
    tl.store(target, result, mask=mask[:, None] & (d < DIM)[None, :])
    tl.store(s + row_offset * stride_s_row + head, log_sum_exp(row_max, row_sum), mask=mask)


@triton.jit(do_not_specialize=["states"])
def merge_states_varlen_kernel(
    v,  # [states, HEADS, DIM]
    s,  # [states, HEADS]
    indptr,  # [rows + 1]: the states of each row
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
    """Grid: (rows, blocks of BLOCK_HEADS heads).

    A program owns one row and one block of heads, and merges the row's states.
    Loop invariant: ``(row_max, row_sum, acc)`` is the online-softmax state of the row's states before ``state``.
    Bound by memory bandwidth; few rows by latency, since the states of a row are loaded one after the other.
    """
    row, d = tl.program_id(0), tl.arange(0, BLOCK_DIM)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    mask = head < HEADS
    row_max, row_sum, acc = empty_state(BLOCK_HEADS, BLOCK_DIM)
    begin, end = tl.maximum(tl.load(indptr + row), 0), tl.minimum(tl.load(indptr + row + 1), states)
    for state in range(begin, end):
        index = state + tl.zeros_like(head)
        value, lse_in = load_state(v, s, index, head, mask, stride_v_state, stride_v_head, stride_s_state, d, DIM)
        row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value, lse_in)
    store_merged(out, lse, row_max, row_sum, acc, row * HEADS + head, mask, d, DIM)


def _sizes(v: Tensor) -> tuple[tuple[Any], dict[str, Any]]:
    """The grid, and the arguments that kernels over packed rows share, for ``v [rows, ..., heads, head_dim]``."""
    packed_rows, dim = v.shape[0] * v.shape[-2], v.shape[-1]
    sizes = {"HEADS": v.shape[-2], "DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim), "PACKED_ROWS": PACKED_ROWS}
    return (triton.cdiv(packed_rows, PACKED_ROWS),), {"packed_rows": packed_rows, **sizes}


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_merge_states(v, s)
    grid, sizes = _sizes(v)
    launch(
        merge_states_kernel,
        grid,
        v=v,
        s=s,
        out=out,
        lse=lse,
        states=v.shape[1],
        stride_v_row=v.stride(0),
        stride_v_state=v.stride(1),
        stride_v_head=v.stride(2),
        stride_s_row=s.stride(0),
        stride_s_state=s.stride(1),
        **sizes,
    )
    return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_merge_state(v_a, s_a)
    grid, sizes = _sizes(v_a)
    launch(
        merge_state_kernel,
        grid,
        v_a=v_a,
        s_a=s_a,
        v_b=v_b,
        s_b=s_b,
        out=out,
        lse=lse,
        stride_va_row=v_a.stride(0),
        stride_va_head=v_a.stride(1),
        stride_sa_row=s_a.stride(0),
        stride_vb_row=v_b.stride(0),
        stride_vb_head=v_b.stride(1),
        stride_sb_row=s_b.stride(0),
        **sizes,
    )
    return out, lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    grid, sizes = _sizes(v)
    launch(
        merge_state_in_place_kernel,
        grid,
        v=v,
        s=s,
        v_other=v_other,
        s_other=s_other,
        row_mask=mask,
        stride_v_row=v.stride(0),
        stride_v_head=v.stride(1),
        stride_s_row=s.stride(0),
        stride_vo_row=v_other.stride(0),
        stride_vo_head=v_other.stride(1),
        stride_so_row=s_other.stride(0),
        **sizes,
        MASK=mask is not None,
    )


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_merge_states_varlen(v, s, indptr)
    rows, heads, dim = out.shape
    block_heads = min(PACKED_ROWS, padded(heads))
    launch(
        merge_states_varlen_kernel,
        (rows, triton.cdiv(heads, block_heads)),
        v=v,
        s=s,
        indptr=indptr,
        out=out,
        lse=lse,
        states=v.shape[0],
        stride_v_state=v.stride(0),
        stride_v_head=v.stride(1),
        stride_s_state=s.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        BLOCK_HEADS=block_heads,
    )
    return out, lse
