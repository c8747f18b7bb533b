"""Merge the attention states of several GPUs in one launch, through memory that each of them maps of the others.

Every GPU has a buffer of the same layout: int32 flags ``[CTAS, WORLD]``, an int32 error in :data:`ERROR_BYTES`, then
two halves, each with the values ``[packed rows, DIM]`` and the LSE ``[packed rows]`` of this GPU's states. A launch
writes its states to one half, signals the other GPUs, waits for their signals, and reads their halves.

Which half, and the value of the flags, follow from ``epochs [CTAS]``, a count of launches that every GPU keeps for
itself. All GPUs make the same launches in the same order. A half is written again two launches later. A CTA that has
seen the flags of the launch between the two knows that every GPU has begun it, and so has ended the launch before it,
which read the half. So one signal for each launch is enough. The grid is the same in all launches, and each CTA
signals in every launch, with or without rows to merge.

A GPU that waits for too long sets the errors of all GPUs, and that of its host, to 1 + the GPU that it waits for. A
launch that sees an error, or runs out of time, ends with NaN. So do all launches after it: the counts of the GPUs may
differ, and the buffers cannot be used again.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.kernels.triton.indexing import padded
from attn_ops.kernels.triton.launch import DEFAULT_OPTIONS, Options, launch, supports_pdl
from attn_ops.kernels.triton.merge_states import merge_update, store_merged
from attn_ops.kernels.triton.softmax import LOG2E, add_sink, empty_state

PACKED_ROWS = 4
"""Packed rows that a CTA merges at a time. Few, since the time of a launch is that of its messages."""

ERROR_BYTES = 16
"""Between the flags and the halves of a buffer: the error, and padding to the alignment of the halves."""

LANES = tl.constexpr(32 * DEFAULT_OPTIONS.num_warps)
"""Threads of a CTA. Each reads one word, and their maximum is one value, so that the CTA leaves its loop as one.

With fewer lanes, two threads would read the same word, and could see different values of it.
"""


def buffer_bytes(ctas: int, world: int, half_bytes: int) -> int:
    """The size of a GPU's buffer."""
    return ctas * world * 4 + ERROR_BYTES + 2 * half_bytes


if triton.knobs.runtime.interpret:

    @triton.jit
    def load_acquire(pointers):
        return tl.load(pointers)

    @triton.jit
    def nanoseconds(lane):
        return tl.zeros_like(lane).to(tl.int64) + time.monotonic_ns()

else:

    @triton.jit
    def load_acquire(pointers):
        """The int32 at each of ``pointers``, as other GPUs have released it."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def nanoseconds(lane):
        """int64 for each ``lane``: a clock of the GPU."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit
def wait_for_gpus(flags, error, epoch, timeout_ms, WORLD: tl.constexpr):
    """Wait for the flags of all GPUs to reach ``epoch``. Returns 0, or the error: 1 + a GPU that did not arrive.

    A lane sees 0 if its GPU has arrived, 1 if it is to be waited for, and 1 + the error. The CTA sees the maximum.
    """
    lane = tl.arange(0, LANES)
    is_gpu = lane < WORLD
    words = tl.where(is_gpu, flags + tl.minimum(lane, WORLD - 1), error)
    deadline, seen = nanoseconds(lane) + timeout_ms.to(tl.int64) * 1000000, 1
    while seen == 1:
        word, is_late = load_acquire(words), nanoseconds(lane) > deadline
        is_behind = word - epoch < 0  # a difference, since the count may wrap around
        of_gpu = tl.where(is_behind, tl.where(is_late, 2 + lane, 1), 0)
        seen = tl.max(tl.where(is_gpu, of_gpu, tl.where(word != 0, 1 + word, 0)), 0)
    return tl.maximum(seen - 1, 0)


@triton.jit
def half_of(buffers, gpu, offset, max_packed_rows, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Pointers to the values and the LSE of the half at byte ``offset`` of the buffer of ``gpu``."""
    address = tl.load(buffers + gpu) + offset
    value_bytes = tl.cast(max_packed_rows, tl.int64) * (DIM * DTYPE.primitive_bitwidth // 8)
    values, lse = address.to(tl.pointer_type(DTYPE)), (address + value_bytes).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(values, 16), tl.multiple_of(lse, 16)


@triton.jit(do_not_specialize=["rows", "rank", "half_bytes", "max_packed_rows", "timeout_ms"])
def merge_context_kernel(
    v,  # [rows, HEADS, DIM], contiguous: the values of this GPU's states
    s,  # [rows, HEADS]: their LSE
    buffers,  # int64 [WORLD + 1]: address of the buffer of each GPU, as this one maps it, and of the host's error
    epochs,  # int32 [CTAS]: launches before this one; this and those below are written
    out,  # [rows, OUT_HEADS, DIM]
    lse,  # [rows, OUT_HEADS]
    sinks,  # [HEADS], or any pointer without SINKS
    rows,
    rank,
    half_bytes,  # a multiple of 16
    max_packed_rows,  # of a half, for this DIM; a multiple of 16
    timeout_ms,  # how long a launch waits for the other GPUs
    HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,  # HEADS, or the heads of one GPU if each keeps its share
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CTAS: tl.constexpr,
    WORLD: tl.constexpr,  # fewer than LANES
    ERROR_BYTES: tl.constexpr,
    SINKS: tl.constexpr,
    PACKED_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (CTAS), on each of WORLD GPUs.

    A CTA owns every CTAS-th block of PACKED_ROWS packed rows of the result: it publishes this GPU's states of them, for
    every GPU that keeps them, and merges those of all GPUs, in their order, so that all GPUs compute the same bits.
    Loop invariant: the states, or the merged rows, of the CTA's earlier blocks are written. While it waits: a GPU whose
    flag is behind has not published, no GPU has an error, and the time is not over.
    Barriers: one before the flags are set, so that all stores of the CTA precede them; one after they are seen, so that
    all loads of the CTA follow. The flags are set with release and read with acquire at the scope of the system.
    ``griddepcontrol.wait`` comes first. All CTAs are resident at once, or the GPUs would wait for each other.
    Bound by latency: a flag to each GPU, and a read from each.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    cta, d = tl.program_id(0), tl.arange(0, BLOCK_DIM)
    epoch = tl.load(epochs + cta) + 1
    FLAG_BYTES: tl.constexpr = CTAS * WORLD * 4
    offset = FLAG_BYTES + ERROR_BYTES + (epoch & 1).to(tl.int64) * half_bytes
    total = rows * OUT_HEADS
    own_v, own_s = half_of(buffers, rank, offset, max_packed_rows, DIM, v.dtype.element_ty)
    for first in range(cta * PACKED_ROWS, total, CTAS * PACKED_ROWS):
        packed_row = first + tl.arange(0, PACKED_ROWS)
        mask = packed_row < total
        row, head = packed_row // OUT_HEADS, packed_row % OUT_HEADS
        for begin in tl.static_range(0, HEADS, OUT_HEADS):
            source = (row * HEADS + begin + head).to(tl.int64)
            at, mask_2d = source[:, None] * DIM + d, mask[:, None] & (d < DIM)
            tl.store(own_v + at, tl.load(v + at, mask=mask_2d), mask=mask_2d)
            tl.store(own_s + source, tl.load(s + source, mask=mask), mask=mask)

    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    is_gpu = lane < WORLD
    theirs = tl.load(buffers + lane, mask=is_gpu, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + cta * WORLD + rank, epoch + tl.zeros_like(lane), mask=is_gpu, sem="release", scope="sys")
    own = tl.load(buffers + rank).to(tl.pointer_type(tl.int32))
    error = wait_for_gpus(own + cta * WORLD, own + CTAS * WORLD, epoch, timeout_ms, WORLD)
    has_failed = error != 0
    tl.atomic_xchg(theirs + CTAS * WORLD, error + tl.zeros_like(lane), mask=is_gpu & has_failed, scope="sys")
    tl.store(tl.load(buffers + WORLD).to(tl.pointer_type(tl.int32)), error, mask=has_failed)
    tl.debug_barrier()

    first_head = rank * OUT_HEADS if OUT_HEADS < HEADS else 0
    for first in range(cta * PACKED_ROWS, total, CTAS * PACKED_ROWS):
        packed_row = first + tl.arange(0, PACKED_ROWS)
        mask = packed_row < total
        row, head = packed_row // OUT_HEADS, first_head + packed_row % OUT_HEADS
        source = (row * HEADS + head).to(tl.int64)
        at, mask_2d = source[:, None] * DIM + d, mask[:, None] & (d < DIM)
        row_max, row_sum, acc = empty_state(PACKED_ROWS, BLOCK_DIM)
        if SINKS:
            sink = tl.load(sinks + head, mask=mask, other=0.0) * LOG2E
            row_max, row_sum, acc = add_sink(row_max, row_sum, acc, sink)
        for gpu in tl.static_range(WORLD):
            their_v, their_s = half_of(buffers, gpu, offset, max_packed_rows, DIM, v.dtype.element_ty)
            value = tl.load(their_v + at, mask=mask_2d, other=0.0).to(tl.float32)
            lse_in = tl.load(their_s + source, mask=mask, other=float("-inf"))
            row_max, row_sum, acc = merge_update(row_max, row_sum, acc, value, lse_in)
        row_max, acc = tl.where(has_failed, float("nan"), row_max), tl.where(has_failed, float("nan"), acc)
        store_merged(out, lse, row_max, row_sum, acc, packed_row, mask, d, DIM)
    tl.store(epochs + cta, epoch)


def merge_context(
    v: Tensor,
    s: Tensor,
    buffers: Tensor,
    epochs: Tensor,
    rank: int,
    half_bytes: int,
    timeout_ms: int,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Merge the states ``v, s`` of all GPUs into ``out, lse``, which have all heads or this GPU's share of them."""
    rows, heads, dim = v.shape
    pdl, world = supports_pdl(v), buffers.shape[0] - 1
    launch(
        merge_context_kernel,
        (epochs.shape[0],),
        Options(launch_pdl=pdl),
        v=v,
        s=s,
        buffers=buffers,
        epochs=epochs,
        out=out,
        lse=lse,
        sinks=s if sinks is None else sinks,
        rows=rows,
        rank=rank,
        half_bytes=half_bytes,
        max_packed_rows=half_bytes // (dim * v.element_size() + 4) // 16 * 16,
        timeout_ms=timeout_ms,
        HEADS=heads,
        OUT_HEADS=out.shape[1],
        DIM=dim,
        BLOCK_DIM=padded(dim),
        CTAS=epochs.shape[0],
        WORLD=world,
        ERROR_BYTES=ERROR_BYTES,
        SINKS=sinks is not None,
        PACKED_ROWS=PACKED_ROWS,
        PDL=pdl,
    )
