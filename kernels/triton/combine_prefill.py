"""Merging the pieces of prefill tiles whose KV was split over several work items."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import Options, launch, starts_early
from attn_ops.kernels.triton.pdl import acquire
from attn_ops.kernels.triton.softmax import LOG2E, add_sink, finite, inverse, log_sum_exp
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.plan.state import PlanProblem, PrefillPlan, num_partials

SLICE, SLICE_PIECES = 64, 64
"""Elements of a row, and pieces, that a program reads at a time where there are fewer rows than programs."""

READ = 2048
"""Elements that it reads at a time, of whole rows, where there are more."""

MERGE_PROGRAMS = 1024
"""Programs at most: where nothing was split each takes time to find that out."""

FEW_SPLITS = 1024
"""Of so many, one warp keeps account: it needs no barriers, which take longer than all else that a program does."""


@triton.jit
def merge_job(
    out, lse, partial, sinks, row, count, first, pieces, rows, slots, pair, first_d,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write ``BLOCK_DIM`` elements from ``first_d`` on of one pair of a row and a head of a split tile."""
    PAIRS: tl.constexpr = TILE_ROWS * HEADS
    first, head, d = tl.maximum(first, 0), pair % HEADS, first_d + tl.arange(0, BLOCK_DIM)
    stop = tl.minimum(first + pieces, slots)
    sums = partial + tl.cast(slots, tl.int64) * (PAIRS * DIM)
    m = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_DIM), tl.float32)
    for slot in range(first, stop, BLOCK_SLOTS):
        index = slot + tl.arange(0, BLOCK_SLOTS)
        at, mask = index.to(tl.int64) * PAIRS + pair, index < stop
        s = tl.load(sums + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        at, mask = at[:, None] * DIM + d, mask[:, None] & (d < DIM)
        v = tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg")
        top = tl.maximum(m, tl.max(s, 0, keep_dims=True))
        decay, weight = tl.exp2(m - finite(top)), tl.exp2(s - finite(top))
        m, total = top, total * decay + tl.sum(weight, 0, keep_dims=True)
        acc = acc * decay[:, None] + tl.sum(weight[:, None] * v, 0, keep_dims=True)
    if SINKS:
        m, total, acc = add_sink(m, total, acc, tl.load(sinks + head) * LOG2E)
    if (pair < tl.minimum(count, TILE_ROWS) * HEADS) & within(row + pair // HEADS, rows):
        at = row.to(tl.int64) * HEADS + pair + tl.zeros((1,), tl.int64)
        value = (acc * inverse(total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + d[None, :], value, mask=(d < DIM)[None, :])
        if LSE:
            tl.store(lse + at, log_sum_exp(m, total))


@triton.jit(do_not_specialize=["rows", "slots", "max_splits"])
def merge_tiles_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS] or [0]
    partial,  # [slots, TILE_ROWS, HEADS, DIM], then [slots, TILE_ROWS, HEADS]
    sinks,  # [HEADS] or None
    merges,  # [max_splits, 4]
    rows,
    slots,
    max_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # power of 2, at least DIM
    BLOCK_SLOTS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICE_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # power of 2, at least max_splits
    FIXED: tl.constexpr,  # a row is merged alike in every batch
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    SLICES: tl.constexpr = (DIM + SLICE - 1) // SLICE
    PAIRS: tl.constexpr = TILE_ROWS * HEADS
    if PDL:
        acquire()
    # What is read of the plan was there before the pieces were.
    split = tl.arange(0, BLOCK_SPLITS)
    is_split = tl.load(merges + split * 4 + 3, mask=split < max_splits, other=0) > 0
    pairs = tl.sum(is_split.to(tl.int32), 0) * PAIRS
    sliced = FIXED or 2 * pairs < tl.num_programs(0)
    slices = SLICES if sliced else 1
    job, jobs = tl.program_id(0), pairs * slices
    # Loaded here, not by a helper: what a call returns, Inductor's analysis of writes takes for an alias of
    # the pointers it was given.
    record = merges + tl.minimum(job // slices // PAIRS, max_splits - 1) * 4
    row, count, first, pieces = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    if PDL:
        if job >= jobs:
            gdc_launch_dependents()
        gdc_wait()
        gdc_launch_dependents()
    while job < jobs:
        pair = job // slices % PAIRS
        if sliced:
            merge_job(
                out, lse, partial, sinks, row, count, first, pieces, rows, slots, pair, job % SLICES * SLICE,
                HEADS, DIM, TILE_ROWS, SLICE, SLICE_SLOTS, SINKS, LSE,
            )  # fmt: skip
        else:
            merge_job(
                out, lse, partial, sinks, row, count, first, pieces, rows, slots, pair, 0,
                HEADS, DIM, TILE_ROWS, BLOCK_DIM, BLOCK_SLOTS, SINKS, LSE,
            )  # fmt: skip
        job += tl.num_programs(0)
        if job < jobs:
            record = merges + job // slices // PAIRS * 4
            row, count, first, pieces = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)


def merge_tiles(out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: PrefillPlan) -> None:
    """Write the rows of the tiles that the plan splits; ``lse`` has no elements where none is asked for.

    Their pairs of a row and a head are dealt out to the programs, in slices if they are few.
    """
    rows, heads, dim = out.shape
    problem, max_splits, pdl = PlanProblem.of(plan.problem), plan.split_tiles.shape[0], starts_early(out)
    fixed = problem.split > 0
    block = triton.next_power_of_2(dim)
    part = min(SLICE, block)
    launch(
        merge_tiles_kernel,
        (min(max_splits * problem.tile_rows * heads * triton.cdiv(dim, part), MERGE_PROGRAMS),),
        (out, lse, workspace, sinks, plan.split_tiles),
        (rows, num_partials(plan), max_splits),
        (),
        (
            *(heads, dim, problem.tile_rows, block, max(1, READ // block), part, SLICE_PIECES),
            *(triton.next_power_of_2(max_splits), fixed, sinks is not None, lse.dim() > 1, pdl),
        ),
        Options(1 if max_splits <= FEW_SPLITS and not fixed else 4, launch_pdl=pdl),
    )
