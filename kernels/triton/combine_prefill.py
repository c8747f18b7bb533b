"""Combine of prefill: the output of split query tiles, or of split requests, from the partial results of their splits.

An output row is one query row and one head; a split tile has ``TILE_ROWS * HEADS`` of them. Programs take output rows
in turn, or slices of their columns if no program then has more than one. Without a plan all requests are split alike.

Partial results are float32 ``[slots, TILE_ROWS, HEADS, DIM]``, then the LSE ``[slots, TILE_ROWS, HEADS]``. *Scaled*
ones are float16 and fill half of the memory of the former. The other half begins with float32 scales ``[slots,
TILE_ROWS, HEADS, DIM / SCALE_COLUMNS]``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import acquire
from attn_ops.kernels.triton.softmax import LOG2E, add_sink, combine_splits, inverse, log_sum_exp, saturate
from attn_ops.kernels.triton.work_item import (
    SPLIT_TILE_ROW,
    SPLIT_TILE_ROWS,
    SPLIT_TILE_SLOT,
    SPLIT_TILE_SLOTS,
    SPLIT_TILE_STRIDE,
)
from attn_ops.plan.equal_requests import EqualRequests
from attn_ops.plan.state import PlanProblem, PrefillPlan, num_partials

SLICE_COLUMNS = 64
"""Columns of a slice."""

SLICE_SPLITS = 32
"""Partial results of a slice that a program loads in one step."""

STEP_ELEMENTS = 1024
"""Elements of partial results that a program loads in one step of whole rows."""

MAX_PROGRAMS, MAX_SCALED_PROGRAMS = 1024, 2048
"""Upper bounds on the programs of a launch, the second for scaled partial results. Programs without work take time."""

SCALE_COLUMNS = 128
"""Columns of a row of scaled partial results that share a scale."""

MAX_SPLIT_TILES_OF_ONE_WARP = 1024
"""Largest capacity of split tiles for programs of one warp, which count the tiles without barriers."""


@triton.jit
def combine_row(
    out, lse, partial, sinks, row, count, first_slot, num_splits, rows, slots, output_row, first_d,
    tile_rows, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Write ``BLOCK_DIM`` columns from ``first_d`` on of ``output_row`` of a split tile.

    The tile has ``count`` query rows from ``row`` on, and ``num_splits`` partial results, each of ``tile_rows`` query
    rows, from ``first_slot`` on.
    """
    output_rows = tile_rows * HEADS
    SCALES: tl.constexpr = max(BLOCK_DIM // SCALE_COLUMNS, 1) if SCALE_COLUMNS else 1
    COLUMNS: tl.constexpr = BLOCK_DIM // SCALES
    first_slot, head, scale = tl.maximum(first_slot, 0), output_row % HEADS, tl.arange(0, SCALES)
    d = first_d + scale[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    exists = (output_row < tl.minimum(count, tile_rows) * HEADS) & within(row + output_row // HEADS, rows)
    # No partial results are loaded for rows beyond the count of the tile: one of decode may have one row of several.
    end_slot = tl.where(exists, tl.minimum(first_slot + num_splits, slots), first_slot)
    values = tl.cast(slots, tl.int64) * (output_rows * DIM)
    partial_lse, scales = partial + values, partial + values // 2
    partial_out = partial.to(tl.pointer_type(tl.float16), bitcast=True) if SCALE_COLUMNS else partial
    row_max = tl.full((1,), float("-inf"), tl.float32)
    row_sum = tl.zeros((1,), tl.float32)
    acc = tl.zeros((SCALES, COLUMNS), tl.float32)
    for step_slot in range(first_slot, end_slot, BLOCK_SPLITS):
        slot = step_slot + tl.arange(0, BLOCK_SPLITS)
        at, mask = slot.to(tl.int64) * output_rows + output_row, slot < end_slot
        # A partial result is a state with a row_sum of 1. Its LSE and output were written by another SM: not from L1.
        split_lse = tl.load(partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        split_out = tl.load(
            partial_out + at[:, None, None] * DIM + d, mask=mask[:, None, None] & (d < DIM), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        row_max, row_sum, alpha, split_alpha = combine_splits(row_max, row_sum, split_lse)
        factor = split_alpha[:, None]
        if SCALE_COLUMNS:
            scale_at = at[:, None] * (DIM // SCALE_COLUMNS) + first_d // SCALE_COLUMNS + scale
            factor *= tl.load(scales + scale_at, mask=mask[:, None], other=0.0, cache_modifier=".cg")
        acc = acc * alpha[:, None] + tl.sum(factor[:, :, None] * split_out, 0)
    if SINKS:
        row_max, row_sum, acc = add_sink(row_max, row_sum, acc, tl.load(sinks + head) * LOG2E)
    if exists:
        at = row.to(tl.int64) * HEADS + output_row + tl.zeros((1,), tl.int64)
        value = saturate(acc * inverse(row_sum)[:, None], out.dtype.element_ty)
        tl.store(out + at[:, None] * DIM + d, value, mask=d < DIM)
        if LSE:
            tl.store(lse + at, log_sum_exp(row_max, row_sum))


@triton.jit(do_not_specialize=["rows", "slots", "max_split_tiles"])
def combine_prefill_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # float32 [rows, HEADS] or [0]
    partial,  # the workspace with partial results of [slots, TILE_ROWS, HEADS, DIM]
    sinks,  # [HEADS] or None
    split_tiles,  # [max_split_tiles, SPLIT_TILE_STRIDE]
    rows,  # of out
    slots,  # of the workspace
    max_split_tiles,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # power of 2, at least DIM
    BLOCK_SPLITS: tl.constexpr,  # partial results loaded in a step of whole rows
    SLICE_COLUMNS: tl.constexpr,  # power of 2
    SLICE_SPLITS: tl.constexpr,  # partial results loaded in a step of a slice
    BLOCK_SPLIT_TILES: tl.constexpr,  # power of 2, at least max_split_tiles
    SCALE_COLUMNS: tl.constexpr,  # power of 2, or 0 without scales
    FIXED: tl.constexpr,  # always slices, so that the order of additions does not depend on the batch
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_EARLY: tl.constexpr,  # the next kernel when all programs run, not after the wait of those with a job
):
    """Grid: a program for each job of the capacity, up to a limit. A job is an output row or a slice of one.
    Owns: jobs ``program_id``, ``program_id + num_programs`` and so on.
    Loop invariant: ``row`` to ``num_splits`` are the record of the split tile of ``job``.
    Barriers: none in a program of one warp; ``griddepcontrol.wait`` before the first partial result is loaded.
    Bound by: latency of loads; the plan is read before the wait so that it overlaps the attention kernel.
    """
    SLICES: tl.constexpr = (DIM + SLICE_COLUMNS - 1) // SLICE_COLUMNS
    OUTPUT_ROWS: tl.constexpr = TILE_ROWS * HEADS
    if PDL:
        acquire()
    # The plan was complete before the attention kernel began.
    index = tl.arange(0, BLOCK_SPLIT_TILES)
    num_slots = tl.load(
        split_tiles + index * SPLIT_TILE_STRIDE + SPLIT_TILE_SLOTS, mask=index < max_split_tiles, other=0
    )
    output_rows = tl.sum((num_slots > 0).to(tl.int32), 0) * OUTPUT_ROWS
    sliced = FIXED or output_rows * SLICES <= tl.num_programs(0)
    slices = SLICES if sliced else 1
    job, jobs = tl.program_id(0), output_rows * slices
    # Loaded here, not by a function: see work_item.py.
    record = split_tiles + tl.minimum(job // slices // OUTPUT_ROWS, max_split_tiles - 1) * SPLIT_TILE_STRIDE
    row, count = tl.load(record + SPLIT_TILE_ROW), tl.load(record + SPLIT_TILE_ROWS)
    first_slot, num_splits = tl.load(record + SPLIT_TILE_SLOT), tl.load(record + SPLIT_TILE_SLOTS)
    if PDL:
        if LAUNCH_EARLY | (job >= jobs):
            gdc_launch_dependents()
        # Program 0 waits in any case: later kernels wait only for this grid, which must not end before attention.
        if (job < jobs) | (job == 0):
            gdc_wait()
            gdc_launch_dependents()
    while job < jobs:
        output_row = job // slices % OUTPUT_ROWS
        if sliced:
            combine_row(
                out, lse, partial, sinks, row, count, first_slot, num_splits, rows, slots, output_row,
                job % SLICES * SLICE_COLUMNS, TILE_ROWS, HEADS, DIM, SLICE_COLUMNS, SLICE_SPLITS, SCALE_COLUMNS,
                SINKS, LSE,
            )  # fmt: skip
        else:
            combine_row(
                out, lse, partial, sinks, row, count, first_slot, num_splits, rows, slots, output_row,
                0, TILE_ROWS, HEADS, DIM, BLOCK_DIM, BLOCK_SPLITS, SCALE_COLUMNS, SINKS, LSE,
            )  # fmt: skip
        job += tl.num_programs(0)
        if job < jobs:
            record = split_tiles + job // slices // OUTPUT_ROWS * SPLIT_TILE_STRIDE
            row, count = tl.load(record + SPLIT_TILE_ROW), tl.load(record + SPLIT_TILE_ROWS)
            first_slot, num_splits = tl.load(record + SPLIT_TILE_SLOT), tl.load(record + SPLIT_TILE_SLOTS)


@triton.jit(do_not_specialize=["request_rows", "num_splits", "rows", "slots"])
def combine_requests_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # float32 [rows, HEADS] or [0]
    partial,  # float32 [slots, request_rows, HEADS, DIM], then the LSE without DIM
    sinks,  # [HEADS] or None
    request_rows,  # query rows of each request
    num_splits,  # of each request
    rows,  # of out
    slots,  # requests * num_splits, or 0 if the requests are not split
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # these and those below are as in combine_prefill_kernel
    BLOCK_SPLITS: tl.constexpr,
    SLICE_COLUMNS: tl.constexpr,
    SLICE_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: as of :func:`combine_prefill_kernel`.
    Owns: jobs ``program_id``, ``program_id + num_programs`` and so on.
    Loop invariant: the jobs of this program before ``job`` are done.
    Barriers: ``griddepcontrol.wait`` before the first partial result is loaded.
    Bound by: latency of loads.
    """
    SLICES: tl.constexpr = (DIM + SLICE_COLUMNS - 1) // SLICE_COLUMNS
    if PDL:
        acquire()
        gdc_wait()
        gdc_launch_dependents()
    if slots == 0:
        return
    output_rows = request_rows * HEADS
    sliced = rows * HEADS * SLICES <= tl.num_programs(0)
    slices = SLICES if sliced else 1
    job, jobs = tl.program_id(0), rows * HEADS * slices
    while job < jobs:
        request, output_row = job // slices // output_rows, job // slices % output_rows
        if sliced:
            combine_row(
                out, lse, partial, sinks, request * request_rows, request_rows, request * num_splits, num_splits, rows,
                slots, output_row, job % SLICES * SLICE_COLUMNS, request_rows, HEADS, DIM, SLICE_COLUMNS, SLICE_SPLITS,
                0, SINKS, LSE,
            )  # fmt: skip
        else:
            combine_row(
                out, lse, partial, sinks, request * request_rows, request_rows, request * num_splits, num_splits, rows,
                slots, output_row, 0, request_rows, HEADS, DIM, BLOCK_DIM, BLOCK_SPLITS, 0, SINKS, LSE,
            )  # fmt: skip
        job += tl.num_programs(0)


def combine_split_requests(
    out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, requests: EqualRequests
) -> None:
    """Write ``out [rows, heads, dim]`` and ``lse`` from the partial results in ``workspace``, if keys are split.

    ``lse`` and ``sinks`` are as in :func:`combine_split_tiles`.
    """
    rows, heads, dim = out.shape
    pdl = supports_pdl(out, image=True)
    block = triton.next_power_of_2(dim)
    columns = min(SLICE_COLUMNS, block)
    launch(
        combine_requests_kernel,
        (torch.sym_min(rows * heads * triton.cdiv(dim, columns), MAX_PROGRAMS),),
        Options(1, launch_pdl=pdl, writes=("out", "lse")),
        out=out,
        lse=lse,
        partial=workspace,
        sinks=sinks,
        request_rows=requests.rows,
        num_splits=requests.splits,
        rows=rows,
        slots=requests.num_slots,
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=block,
        BLOCK_SPLITS=max(1, STEP_ELEMENTS // block),
        SLICE_COLUMNS=columns,
        SLICE_SPLITS=SLICE_SPLITS,
        SINKS=sinks is not None,
        LSE=lse.dim() > 1,
        PDL=pdl,
    )


def combine_split_tiles(
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    plan: PrefillPlan,
    *,
    scaled: bool = False,
    launch_early: bool = False,
) -> None:
    """Write the rows of ``out`` and ``lse`` whose query tiles the plan splits, from the partial results.

    out           ``[rows, heads, dim]``
    lse           float32 ``[rows, heads]``, or ``[0]`` if it is not wanted
    workspace     of the plan's planner, with the partial results of this call
    sinks         float32 ``[heads]`` or None; each is added once to a row
    scaled        whether partial results are float16 with a scale for each SCALE_COLUMNS of a row
    launch_early  whether the next kernel may start when all programs run. Its CTAs then wait for this kernel on SMs
                  that the attention kernel has left
    """
    rows, heads, dim = out.shape
    problem, max_split_tiles = PlanProblem.of(plan.problem), plan.split_tiles.shape[0]
    pdl = supports_pdl(out, image=True)
    fixed = problem.split > 0
    block = triton.next_power_of_2(dim)
    columns = min(SLICE_COLUMNS, block)
    most_split = torch.sym_min(max_split_tiles, plan.work.shape[0] - num_partials(plan))
    jobs = most_split * problem.tile_rows * heads * triton.cdiv(dim, columns)
    one_warp = max_split_tiles <= MAX_SPLIT_TILES_OF_ONE_WARP and not fixed
    launch(
        combine_prefill_kernel,
        (torch.sym_min(jobs, MAX_SCALED_PROGRAMS if scaled else MAX_PROGRAMS),),
        Options(1 if one_warp else 4, launch_pdl=pdl, writes=("out", "lse")),
        out=out,
        lse=lse,
        partial=workspace,
        sinks=sinks,
        split_tiles=plan.split_tiles,
        rows=rows,
        slots=num_partials(plan),
        max_split_tiles=max_split_tiles,
        HEADS=heads,
        DIM=dim,
        TILE_ROWS=problem.tile_rows,
        BLOCK_DIM=block,
        BLOCK_SPLITS=max(1, STEP_ELEMENTS // block),
        SLICE_COLUMNS=columns,
        SLICE_SPLITS=SLICE_SPLITS,
        BLOCK_SPLIT_TILES=triton.next_power_of_2(max_split_tiles),
        SCALE_COLUMNS=SCALE_COLUMNS if scaled else 0,
        FIXED=fixed,
        SINKS=sinks is not None,
        LSE=lse.dim() > 1,
        PDL=pdl,
        LAUNCH_EARLY=launch_early,
    )
