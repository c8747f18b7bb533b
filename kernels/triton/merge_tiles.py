"""Merging the pieces of prefill tiles whose KV was split over several work items."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...plan import PlanProblem, PrefillPlan, num_pieces
from .launch import Options, launch
from .primitives import LOG2E, add_sink, finite, inverse, log_sum, within

SLOTS = 16
"""Pieces that a program reads at a time."""

MERGE_PROGRAMS = 128
"""Programs that share the pairs of a row and a head of one split tile."""


@triton.jit(do_not_specialize=["rows", "slots"])
def merge_tiles_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS] or [0]
    partial,  # [slots, TILE_ROWS, HEADS, DIM], then [slots, TILE_ROWS, HEADS]
    sinks,  # [HEADS] or None
    merges,  # [max_splits, 4]
    rows,
    slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
):
    record = merges + tl.program_id(0) * 4
    row, count, first, pieces = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    first = tl.maximum(first, 0)
    stop = tl.minimum(first + pieces, slots)
    d = tl.arange(0, BLOCK_DIM)
    sums = partial + tl.cast(slots, tl.int64) * (TILE_ROWS * HEADS * DIM)
    pairs = tl.where(stop > first, tl.minimum(count, TILE_ROWS) * HEADS, 0)
    for pair in range(tl.program_id(1), pairs, tl.num_programs(1)):
        head = pair % HEADS
        m = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, BLOCK_DIM), tl.float32)
        for slot in range(first, stop, SLOTS):
            index = slot + tl.arange(0, SLOTS)
            at, mask = index.to(tl.int64) * (TILE_ROWS * HEADS) + pair, index < stop
            s = tl.load(sums + at, mask=mask, other=float("-inf"))
            v = tl.load(partial + at[:, None] * DIM + d[None, :], mask=mask[:, None] & (d < DIM)[None, :], other=0.0)
            top = tl.maximum(m, tl.max(s, 0, keep_dims=True))
            decay, weight = tl.exp2(m - finite(top)), tl.exp2(s - finite(top))
            m, total = top, total * decay + tl.sum(weight, 0, keep_dims=True)
            acc = acc * decay[:, None] + tl.sum(weight[:, None] * v, 0, keep_dims=True)
        if SINKS:
            m, total, acc = add_sink(m, total, acc, tl.load(sinks + head) * LOG2E)
        if within(row + pair // HEADS, rows):
            at = row.to(tl.int64) * HEADS + pair + tl.zeros((1,), tl.int64)
            value = (acc * inverse(total)[:, None]).to(out.dtype.element_ty)
            tl.store(out + at[:, None] * DIM + d[None, :], value, mask=(d < DIM)[None, :])
            if LSE:
                tl.store(lse + at, log_sum(m, total))


def merge_tiles(out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: PrefillPlan) -> None:
    """Write the rows of the tiles that the plan splits; ``lse`` has no elements where none is asked for."""
    rows, heads, dim = out.shape
    tile_rows = PlanProblem.of(plan.problem).tile_rows
    launch(
        merge_tiles_kernel,
        (plan.merges.shape[0], min(tile_rows * heads, MERGE_PROGRAMS)),
        (out, lse, workspace, sinks, plan.merges),
        (rows, num_pieces(plan)),
        (),
        (heads, dim, triton.next_power_of_2(dim), tile_rows, SLOTS, sinks is not None, lse.dim() > 1),
        Options(),
    )
