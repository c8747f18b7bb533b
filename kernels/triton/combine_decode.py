"""Combine of decode: the output of a row from the partial results of its splits.

A partial result is the normalized output and the LSE of one split and query head, float32, in a slot of the workspace:
an online-softmax state with a row_sum of 1. Here are the functions that store and combine them, which
:mod:`.decode` calls too, and a kernel for traced graphs and captures, which also writes the rows of empty requests.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import acquire
from attn_ops.kernels.triton.softmax import LOG2E, LOWEST, add_sink, combine, exp2, inverse, log_sum_exp, saturate
from attn_ops.plan.state import DecodePlan, PlanProblem, num_slots

SPLITS_FAST_PATH = 2
"""Splits that most split rows have. Rows of more are combined in larger steps."""

MIN_SPLITS_PER_STEP, MAX_SPLITS_PER_STEP = 16, 128
"""Bounds of the splits combined in one step: the number of CTAs between which one request may be split."""

FIXED_SPLITS_PER_STEP = 64
"""Splits of one step with a fixed split size: a constant, so that additions have the same order in every batch."""

STEP_ELEMENTS_PER_WARP = 2048
"""Elements of partial results that a warp loads in one step, of at most 4 warps. With fewer splits a slice is wider."""

TARGET_PROGRAMS, MIN_SLICE_COLUMNS = 128, 32
"""Programs that few heads are divided between, about one per SM, and the columns of a head that each has at least."""

MAX_PROGRAMS = 512
"""Most programs of a launch. Each program takes time, also where no row is split."""

MAX_REQUESTS_OF_ONE_WARP, MAX_REQUESTS_OF_FOUR_WARPS = 512, 4096
"""Largest capacities for programs of one and of four warps. One warp counts the rows without barriers, which cost most
here."""


@triton.jit
def store_heads(out, lse, row_max, row_sum, acc, at, mask, d, DIM: tl.constexpr, LSE: tl.constexpr):
    """Normalize the states of heads, and store them at ``at [heads]`` of ``out [..., DIM]`` and lse."""
    value = saturate(acc * inverse(row_sum)[:, None], out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + d, value, mask=mask[:, None] & (d < DIM))
    if LSE:
        tl.store(lse + at, log_sum_exp(row_max, row_sum), mask=mask)


@triton.jit
def load_partials(
    partial, slots, first, stop, heads, mask, d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """``(lse [SPLITS, heads], value [SPLITS, heads, d])`` of the slots ``[first, stop)``; -inf and 0 from ``stop`` on.

    Another SM may have written them during this launch: they are loaded from L2.
    """
    slot = first + tl.arange(0, SPLITS)
    at, used = slot[:, None].to(tl.int64) * NUM_HEADS + heads, (slot < stop)[:, None] & mask
    partial_lse = partial + tl.cast(slots, tl.int64) * (NUM_HEADS * DIM)
    lse = tl.load(partial_lse + at, mask=used, other=float("-inf"), cache_modifier=".cg")
    at, used = at[:, :, None] * DIM + d, used[:, :, None] & (d < DIM)
    return lse, tl.load(partial + at, mask=used, other=0.0, cache_modifier=".cg")


@triton.jit
def combine_step(
    partial, slots, first, stop, heads, mask, d, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """``(row_max, row_sum, acc)`` of the first ``SPLITS`` of the slots ``[first, stop)``, for the heads of a row."""
    lse, value = load_partials(partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, SPLITS)
    row_max = tl.maximum(tl.max(lse, 0), LOWEST)
    split_alpha = exp2(lse - row_max)
    return row_max, tl.sum(split_alpha, 0), tl.sum(split_alpha[:, :, None] * value, 0)


@triton.jit
def combine_slots(
    row_max, row_sum, acc, partial, slots, first, stop, heads, mask, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """The state ``(row_max, row_sum, acc)`` of the heads of a row, combined with the slots ``[first, stop)``."""
    for i in range(first, stop, SPLITS_PER_STEP):
        step_max, step_sum, step_acc = combine_step(
            partial, slots, i, stop, heads, mask, d, NUM_HEADS, DIM, SPLITS_PER_STEP
        )
        row_max, row_sum, alpha, step_alpha = combine(row_max, row_sum, step_max, step_sum)
        acc = acc * alpha[:, None] + step_acc * step_alpha[:, None]
    return row_max, row_sum, acc


@triton.jit
def combine_row(
    partial, slots, first, stop, heads, mask, d,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS_FAST_PATH: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
):  # fmt: skip
    """``(row_max, row_sum, acc)`` of the slots ``[first, stop)``, for the heads of a row.

    Up to SPLITS_FAST_PATH slots take one small step, others steps of SPLITS_PER_STEP.
    """
    if stop - first <= SPLITS_FAST_PATH:
        row_max, row_sum, acc = combine_step(
            partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, SPLITS_FAST_PATH
        )
    else:
        row_max, row_sum, acc = combine_step(
            partial, slots, first, stop, heads, mask, d, NUM_HEADS, DIM, SPLITS_PER_STEP
        )
        row_max, row_sum, acc = combine_slots(
            row_max, row_sum, acc, partial, slots, first + SPLITS_PER_STEP, stop, heads, mask, d, NUM_HEADS, DIM,
            SPLITS_PER_STEP,
        )  # fmt: skip
    return row_max, row_sum, acc


@triton.jit
def find_row(pending, begin, end, rank, BLOCK_BATCH: tl.constexpr):
    """``(row, begin, end)`` of the pending row that has ``rank`` pending rows before it."""
    here = ((tl.cumsum(pending, 0) == rank + 1) & (pending > 0)).to(tl.int32)
    row = tl.sum(here * tl.arange(0, BLOCK_BATCH), 0)
    return row, tl.sum(here * begin, 0), tl.sum(here * end, 0)


@triton.jit
def combine_jobs(
    out, lse, partial, sinks, slots, pending, begin, end, row, slot, stop, job, jobs,
    HEADS: tl.constexpr, DIM: tl.constexpr, SLICE_COLUMNS: tl.constexpr, BLOCK_BATCH: tl.constexpr,
    SPLITS_FAST_PATH: tl.constexpr, SPLITS_PER_STEP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Jobs ``job``, ``job + num_programs`` and so on below ``jobs``, of SLICE_COLUMNS columns of one head each.

    ``row`` is the row of the first job, and ``[slot, stop)`` its slots.
    """
    SLICES: tl.constexpr = (DIM + SLICE_COLUMNS - 1) // SLICE_COLUMNS
    while job < jobs:
        column_slice = job % SLICES
        head, d = job // SLICES % HEADS + tl.arange(0, 1), column_slice * SLICE_COLUMNS + tl.arange(0, SLICE_COLUMNS)
        used = head < HEADS  # always: a mask of the heads' shape
        row_max, row_sum, acc = combine_row(
            partial, slots, slot, stop, head, used, d, HEADS, DIM, SPLITS_FAST_PATH, SPLITS_PER_STEP
        )
        if SINKS:
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, tl.load(sinks + head) * LOG2E)
        at = row.to(tl.int64) * HEADS + head
        store_heads(out, lse, row_max, row_sum, acc, at, used, d, DIM, False)
        if LSE:
            tl.store(lse + at, log_sum_exp(row_max, row_sum), mask=column_slice == 0)
        job += tl.num_programs(0)
        if job < jobs:
            row, slot, stop = find_row(pending, begin, end, job // (HEADS * SLICES), BLOCK_BATCH)


@triton.jit(do_not_specialize=["rows", "max_batch", "slots"])
def combine_decode_kernel(
    out,  # [rows, HEADS, DIM]
    lse,  # [rows, HEADS] or [0]
    partial,  # [slots, HEADS, DIM], then the LSE [slots, HEADS]
    sinks,  # [HEADS] or None
    kv_len,  # [max_batch]
    merge_indptr,  # [max_batch + 1]
    rows,
    max_batch,
    slots,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,  # power of 2, at least DIM
    SLICE_COLUMNS: tl.constexpr,  # power of 2
    BLOCK_BATCH: tl.constexpr,  # power of 2, at least max_batch
    SPLITS_FAST_PATH: tl.constexpr,
    SPLITS_PER_STEP: tl.constexpr,  # of a slice
    SPLITS_PER_HEAD_STEP: tl.constexpr,  # of a whole head; 0: only slices
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    LAUNCH_EARLY: tl.constexpr,  # the next kernel when all programs run, not after the wait of those with a job
):
    """Grid: a program for each job of the capacity, at most MAX_PROGRAMS.
    Owns: jobs ``program_id``, ``program_id + num_programs`` and so on. A job is SLICE_COLUMNS columns of one head of a
        pending row, which is split or empty; the whole head if that takes programs fewer steps over splits.
    Loop invariant: ``row`` is the row of ``job``, and ``[slot, stop)`` its slots.
    Barriers: none in a program of one warp; ``griddepcontrol.wait`` before the first partial result is loaded.
    Bound by: latency. The pending rows are counted before the wait, while decode finishes.
    """
    SLICES: tl.constexpr = (DIM + SLICE_COLUMNS - 1) // SLICE_COLUMNS
    if PDL:
        acquire()
    b = tl.arange(0, BLOCK_BATCH)
    planned = b < max_batch
    begin = tl.minimum(tl.maximum(tl.load(merge_indptr + b, mask=planned, other=0), 0), slots)
    end = tl.minimum(tl.load(merge_indptr + b + 1, mask=planned, other=0), slots)
    empty = tl.load(kv_len + b, mask=planned, other=0) <= 0
    pending = ((b < rows) & (empty | (end > begin))).to(tl.int32)
    pending_rows = tl.sum(pending, 0)
    jobs, job = pending_rows * HEADS, tl.program_id(0)
    slices = SLICES
    if SPLITS_PER_HEAD_STEP > 0:
        splits = tl.sum(tl.maximum(end - begin, 0) * pending, 0) // tl.maximum(pending_rows, 1)
        steps_of_heads = tl.cdiv(jobs, tl.num_programs(0)) * tl.cdiv(splits, SPLITS_PER_HEAD_STEP)
        steps_of_slices = tl.cdiv(jobs * SLICES, tl.num_programs(0)) * tl.cdiv(splits, SPLITS_PER_STEP)
        slices = tl.where(steps_of_heads < steps_of_slices, 1, SLICES)
    jobs *= slices
    row, slot, stop = find_row(pending, begin, end, job // (HEADS * slices), BLOCK_BATCH)
    if PDL:
        if LAUNCH_EARLY | (job >= jobs):
            gdc_launch_dependents()
        gdc_wait()
        gdc_launch_dependents()
    if SPLITS_PER_HEAD_STEP > 0:  # noqa: SIM102  of constants: without it the branch is not compiled
        if slices == 1:
            combine_jobs(
                out, lse, partial, sinks, slots, pending, begin, end, row, slot, stop, job, jobs,
                HEADS, DIM, BLOCK_DIM, BLOCK_BATCH, SPLITS_FAST_PATH, SPLITS_PER_HEAD_STEP, SINKS, LSE,
            )  # fmt: skip
            jobs = 0
    combine_jobs(
        out, lse, partial, sinks, slots, pending, begin, end, row, slot, stop, job, jobs,
        HEADS, DIM, SLICE_COLUMNS, BLOCK_BATCH, SPLITS_FAST_PATH, SPLITS_PER_STEP, SINKS, LSE,
    )  # fmt: skip


def combine_split_rows(
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    plan: DecodePlan,
    return_lse: bool,
    *,
    launch_early: bool = False,
) -> None:
    """Write the rows that the plan splits, and zeros to the rows of empty requests.

    ``launch_early``: whether the next kernel may start when all programs run. Its CTAs then wait for this kernel on
    SMs that decode has left.
    """
    rows, heads, dim = out.shape
    max_batch, pdl = plan.kv_len.shape[0], supports_pdl(out, image=True)
    fixed, num_ctas = PlanProblem.of(plan.problem).split > 0, plan.cta_indptr.shape[0] - 1
    if max_batch <= MAX_REQUESTS_OF_ONE_WARP and not fixed:
        warps = 1
    else:
        warps = 4 if max_batch <= MAX_REQUESTS_OF_FOUR_WARPS else 16
    splits = min(max(triton.next_power_of_2(num_ctas), MIN_SPLITS_PER_STEP), MAX_SPLITS_PER_STEP)
    if fixed:
        splits = FIXED_SPLITS_PER_STEP
    block_dim = triton.next_power_of_2(dim)
    columns = min(block_dim, STEP_ELEMENTS_PER_WARP * min(warps, 4) // splits)
    if not fixed and isinstance(max_batch, int):
        even = triton.next_power_of_2(max_batch * heads * block_dim // TARGET_PROGRAMS)
        columns = min(columns, max(MIN_SLICE_COLUMNS, even))
    of_head = 0 if fixed or columns >= block_dim else max(1, STEP_ELEMENTS_PER_WARP * min(warps, 4) // block_dim)
    launch(
        combine_decode_kernel,
        (min(max_batch * heads * triton.cdiv(dim, columns), MAX_PROGRAMS),),
        Options(warps, launch_pdl=pdl, writes=("out", "lse")),
        out=out,
        lse=lse,
        partial=workspace,
        sinks=sinks,
        kv_len=plan.kv_len,
        merge_indptr=plan.merge_indptr,
        rows=rows,
        max_batch=max_batch,
        slots=num_slots(plan),
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=block_dim,
        SLICE_COLUMNS=columns,
        BLOCK_BATCH=triton.next_power_of_2(max_batch),
        SPLITS_FAST_PATH=SPLITS_FAST_PATH,
        SPLITS_PER_STEP=splits,
        SPLITS_PER_HEAD_STEP=of_head,
        SINKS=sinks is not None,
        LSE=return_lse,
        PDL=pdl,
        LAUNCH_EARLY=launch_early,
    )
