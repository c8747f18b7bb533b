"""Prefill on Hopper, in Gluon: warp-specialised, two producer warps and two consumer warpgroups for each CTA.

A CTA computes a range of packed rows of one work item for one KV head (:mod:`.hopper_common`). Producer warps load KV
tiles by TMA into rings in shared memory, one ring for keys and one for values. Consumer warpgroups compute attention.
They have 64 packed rows each. A query tile of at most 64 packed rows is split the other way
(SPLIT_KV_OVER_WARPGROUPS): both consumers have all rows, take alternate KV tiles and reduce their states at the end.

Inductor generates Triton only: a compiled graph calls the op for this kernel, and a package contains its image. Work
items and partial results are those of :mod:`.prefill`.

Schedule
--------
KV tile ``j`` lies in stage ``j % STAGES`` of its ring. Its loads complete ``full[j % (2 * STAGES)]``; consumers arrive
on ``empty[j % STAGES]``. S is a tile of logits, P of probabilities, O the accumulator.

prologue
    0.  [all warps]    read the work item; ``griddepcontrol.wait``; return if there are no packed rows
mainloop, for each KV tile j
    1.  [producer K]   load the page numbers of tile j
    2.  [producer K]   wait for ``k_ring.empty[j]``; expect the bytes of the tile on ``k_ring.full[j]``; issue TMA loads
    3.  [producer V]   the same with ``v_ring``. Where the KV ends, or a window begins, inside a box: wait for the loads
                       on the staging barrier, set the other rows of the box to 0, arrive on ``v_ring.full[j]``
    4.  [consumer]     issue S_j = Q K_j^T; tile 0: wait for ``k_ring.full[0]`` before it
    5.  [consumer]     wait for ``v_ring.full[j-1]``; issue O += P_{j-1} V_{j-1}
    6.  [consumer]     wait for S_j, while O is computed; arrive on ``k_ring.empty[j]``
    7.  [consumer]     soft cap, mask, online softmax: P_j and alpha
    8.  [consumer]     wait for ``k_ring.full[j+1]``
    9.  [consumer]     wait for O; arrive on ``v_ring.empty[j-1]``; O *= alpha; round P_j to 16 bits
epilogue
    10. [consumer]     wait for ``v_ring.full`` of the last tile; O += P V
    11. [consumer 1]   SPLIT_KV_OVER_WARPGROUPS: store the state (m, l, O) in the ring of values, arrive
    12. [consumer 0]   SPLIT_KV_OVER_WARPGROUPS: wait for it and add it
    13. [consumer]     divide by l; store output and LSE, or the partial result in its slot

Steps 5 to 9 of one consumer, and the two consumers, overlap::

    time                ---->
    [producer K]  TMA   K0 K1 K2 - - - - K3 - - - - - - K4 - - - - -
    [producer V]  TMA   V0 V1 V2 - - - - - - - V3 - - - - - - V4 - -
    [consumer 0]  WGMMA    S0 - - - - - S1 O0 - - - - - S2 O1 - - - -
                  ALU         softmax 0      softmax 1        softmax 2
    [consumer 1]  WGMMA       S0 - - - - - - S1 O0 - - - - - S2 O1 -
                  ALU            softmax 0         softmax 1       sof

``docs/contributing/kernels/hopper_schedule.md`` has the figure.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
from attn_ops.kernels.triton.hopper_common import (
    OPERAND,
    PACKED_ROWS,
    WARPS,
    QueryTile,
    advance,
    allocate_barriers,
    clamp_begin,
    coalesced_rows,
    describe,
    load_page,
    load_shared,
    load_work_item,
    locate_packed_rows,
    packed_row_offsets,
    store_shared,
)
from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.kernels.triton.pdl import acquire, read_plan_early
from attn_ops.kernels.triton.prefill_call import Operands, plan_arguments, prefill_ops
from attn_ops.kernels.triton.softmax import (
    LOG2E,
    combine,
    inverse,
    join_sink,
    log_sum_exp,
    online_softmax_update,
    probabilities,
    saturate,
    soft_cap,
)
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import PlanProblem, PrefillPlan

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Registers per thread that a consumer and a producer warp ask for (``setmaxnreg``)."""

PAGED_BOX, RAGGED_BOX = 16, 32
"""Tokens of a TMA box. A box of a paged cache lies in one page."""

BOX_COLUMNS = gl.constexpr(64)
"""Columns of a TMA box: 128 bytes, the width of the swizzle."""

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
"""Shared-memory layout of a box ``[page, token, head, column]``."""


class TileConfig(NamedTuple):
    """The KV tile and the rings of one pair of head dims."""

    kv_tile: int  # tokens of a KV tile
    k_stages: int  # KV tiles in the ring of keys
    v_stages: int  # KV tiles in the ring of values


TILE_CONFIGS = {
    (64, 0, 64): TileConfig(128, 4, 4),
    (128, 0, 128): TileConfig(128, 3, 3),
    (128, 64, 128): TileConfig(128, 2, 2),
    (256, 0, 256): TileConfig(64, 3, 2),
}
"""By the head dims ``(DIM, DIM_B, DIM)`` of the two parts of a key and of a value.

Each part is a power of 2. The output is staged in the shared memory of the query's first part, as wide as a value.
"""


class Ring(NamedTuple):
    """A circular buffer of KV tiles in shared memory, filled by one producer warp.

    There are twice as many full barriers as stages, so that each full barrier is always waited for by the same consumer
    when two consumers take alternate KV tiles. A consumer that skipped every other phase of a barrier could take one
    that is two phases behind for complete. The last full barrier is the staging barrier of tiles with rows to zero.
    """

    parts: Any  # DIM and DIM_B columns of the head, each [STAGES, KV_TILE, columns]
    full: Any  # [2 * STAGES + 1] barriers, 1 arrival
    empty: Any  # [STAGES] barriers, one arrival of each reading thread


class Reduction(NamedTuple):
    """How two consumers that split the KV tiles combine their states; empty without SPLIT_KV_OVER_WARPGROUPS."""

    stats: Any  # float32 [2, PACKED_ROWS]: row_max and row_sum of consumer 1
    ring_idle: Any  # barrier, 2 arrivals: neither consumer reads the ring of values any more
    state_stored: Any  # barrier, 1 arrival: consumer 1 has stored its state


class KvRange(NamedTuple):
    """The KV tokens that a producer loads, and what it needs to find them."""

    start: Any
    end: Any
    hidden: Any  # tokens from start on that no row sees, less than a box
    page_start: Any  # of the request in kv_indices; its first token in ragged KV
    kv_indices: Any
    kv_rows: Any
    max_pages: Any
    num_pages: Any


class ConsumerArguments(NamedTuple):
    """What a consumer warpgroup gets beside constants."""

    query: Any  # shared memory [2, PACKED_ROWS, columns] for each part of a head; index: the consumer
    k_ring: Any
    v_ring: Any
    reduction: Any
    q: Any  # global memory
    q_strides: Any  # (row, head)
    sinks: Any
    outputs: Any  # (out, lse, partial)
    tile: Any
    rows: Any
    slots: Any
    logits: Any  # (scale, cap, window_left)


@gluon.jit
def allocate_parts(
    DTYPE: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, DIM_B: gl.constexpr
):  # fmt: skip
    """Shared memory ``[COUNT, ROWS, DIM]`` and, unless DIM_B is 0, ``[COUNT, ROWS, DIM_B]``: the parts of heads."""
    first = gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, DIM], OPERAND)
    if DIM_B == 0:
        return (first,)
    else:  # noqa: RET505  what follows a return is compiled too
        return first, gl.allocate_shared_memory(DTYPE, [COUNT, ROWS, DIM_B], OPERAND)


@gluon.jit
def allocate_ring(
    DTYPE: gl.constexpr, STAGES: gl.constexpr, KV_TILE: gl.constexpr, DIM: gl.constexpr, DIM_B: gl.constexpr,
    READERS: gl.constexpr,
):  # fmt: skip
    """An empty ring; ``READERS`` threads read each KV tile."""
    parts = allocate_parts(DTYPE, STAGES, KV_TILE, DIM, DIM_B)
    return Ring(parts, allocate_barriers(2 * STAGES + 1, 1), allocate_barriers(STAGES, READERS))


@gluon.jit
def allocate_reduction(SPLIT_KV_OVER_WARPGROUPS: gl.constexpr):
    """A :class:`Reduction`, or nothing if each consumer has its own packed rows."""
    if SPLIT_KV_OVER_WARPGROUPS:
        stats = gl.allocate_shared_memory(gl.float32, [2, PACKED_ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return Reduction(stats, allocate_barriers(1, 2), allocate_barriers(1, 1))
    else:  # noqa: RET505  what follows a return is compiled too
        return ()


@gluon.jit
def advance_full(ring, index, phase, STEP: gl.constexpr):
    """``(index, phase)`` of the full barrier of the KV tile ``STEP`` after this one."""
    return advance(index, phase, 2 * ring.empty.shape[0], STEP)


@gluon.jit
def stage_of(ring, full_index):
    """The stage that the full barrier ``full_index`` belongs to."""
    STAGES: gl.constexpr = ring.empty.shape[0]
    return gl.where(full_index >= STAGES, full_index - STAGES, full_index)


@gluon.jit
def release(ring, stage):
    """Arrive on the empty barrier of ``stage`` for this thread, which has read the KV tile.

    ``mbarrier.arrive`` arrives once for the warpgroup, after a barrier of its threads. Here every thread arrives for
    itself: the arrival of ``cp.async``, of which this thread has issued none, needs no barrier.
    """
    async_copy.mbarrier_arrive(ring.empty.index(stage), increment_count=False)


@gluon.jit
def box_of(part, stage, column, row_box, BOX: gl.constexpr):
    """``[BOX, BOX_COLUMNS]`` of the KV tile in ``stage`` of ``part [STAGES, KV_TILE, columns]``.

    In shared memory all tokens of the first 64 columns come before the next 64 columns.
    """
    ROW_BOXES: gl.constexpr = part.shape[1] // BOX
    COLUMN_BOXES: gl.constexpr = part.shape[2] // BOX_COLUMNS
    boxes = part._reinterpret(part.dtype, [part.shape[0] * COLUMN_BOXES * ROW_BOXES, BOX, BOX_COLUMNS], OPERAND)
    return boxes.index((stage * COLUMN_BOXES + column) * ROW_BOXES + row_box)


@gluon.jit
def zero_rows(part, stage, begin, end):
    """Set the tokens ``[begin, end)`` of the KV tile in ``stage`` to 0."""
    STEP: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for step in range(begin // STEP, (end + STEP - 1) // STEP):
        token = step * STEP + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
        keep = (token < begin) | (token >= end)
        for column in gl.static_range(part.shape[2] // BOX_COLUMNS):
            rows = box_of(part, stage, column, step, STEP)
            store_shared(rows, gl.where(keep[:, None], rows.load(LAYOUT), 0.0))
    fence_async_shared()


@gluon.jit
def produce_kv_tiles(
    kv, ring, tensor_map, kv_head, VALUES: gl.constexpr, PAGED: gl.constexpr, PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Steps 1 to 3, the role of a producer warp: load the KV tiles of ``kv`` into ``ring``, box by box.

    tensor_map  ``[pages, tokens, heads, dim]`` of keys or values in global memory

    Boxes from ``kv.end`` on are loaded from outside of the tensor map and are 0. Tokens of a box outside of
    ``[kv.start + kv.hidden, kv.end)`` are arbitrary memory, perhaps NaN. Logits of such keys are masked. VALUES are set
    to 0, since a probability of 0 times NaN is NaN.
    """
    KV_TILE: gl.constexpr = ring.parts[0].shape[1]
    BOX: gl.constexpr = tensor_map.block_type.shape[1]
    BOXES: gl.constexpr = KV_TILE // BOX
    DIM: gl.constexpr = ring.parts[0].shape[2]
    COLUMNS: gl.constexpr = DIM if len(ring.parts) == 1 else DIM + ring.parts[1].shape[2]
    STAGING_BARRIER: gl.constexpr = ring.full.shape[0] - 1
    ZERO_HEAD: gl.constexpr = VALUES and PAGED and WINDOW  # ragged KV starts with the window
    hidden = kv.hidden  # -1 once they are zeroed, which was the first phase of the staging barrier
    stage, empty_phase, full_index = 0, 1, 0
    for first in range(kv.start, kv.end, KV_TILE):
        boxes = ()  # (page, token) of each
        for i in gl.static_range(BOXES):
            token = first + i * BOX
            if PAGED:
                page_index = kv.page_start + token // PAGE_SIZE
                page = load_page(kv.kv_indices, page_index, kv.max_pages, kv.num_pages).to(gl.int32)
                boxes += ((page, gl.where(token < kv.end, token % PAGE_SIZE, PAGE_SIZE)),)  # type: ignore[assignment]
            else:
                boxes += ((0, gl.where(token < kv.end, kv.page_start + token, kv.kv_rows)),)  # type: ignore[assignment]
        zeroes = (first + KV_TILE > kv.end) & ((kv.end - first) % BOX > 0) if VALUES else False
        if ZERO_HEAD:
            zeroes = zeroes | (hidden > 0)
        loaded = ring.full.index(gl.where(zeroes, STAGING_BARRIER, full_index))
        mbarrier.wait(ring.empty.index(stage), empty_phase)
        mbarrier.expect(loaded, KV_TILE * COLUMNS * 2)
        for part in gl.static_range(len(ring.parts)):
            for i in gl.static_range(BOXES):
                for column in gl.static_range(ring.parts[part].shape[2] // BOX_COLUMNS):
                    box = box_of(ring.parts[part], stage, column, i, BOX)
                    box = box._reinterpret(box.dtype, [1, BOX, 1, BOX_COLUMNS], BOX_LAYOUT)
                    at = [boxes[i][0], boxes[i][1], kv_head, part * DIM + column * BOX_COLUMNS]
                    tma.async_copy_global_to_shared(tensor_map, at, loaded, box)
        if zeroes:
            count = gl.minimum(kv.end - first, KV_TILE)
            if ZERO_HEAD:
                mbarrier.wait(loaded, (hidden < 0).to(gl.int32))
                zero_rows(ring.parts[0], stage, hidden * 0, hidden)
                hidden = gl.where(hidden > 0, -1, hidden)
            else:
                mbarrier.wait(loaded, 0)
            zero_rows(ring.parts[0], stage, count, (count + BOX - 1) // BOX * BOX)
            mbarrier.arrive(ring.full.index(full_index))
        stage, empty_phase = advance(stage, empty_phase, ring.empty.shape[0], 1)
        full_index, _ = advance_full(ring, full_index, 0, 1)


@gluon.jit
def mask_logits(logits, tokens, row_position, end, window_left, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):
    """``logits [packed rows, tokens]``, -inf where a row does not see a token."""
    bound = gl.minimum(end, row_position + 1) if CAUSAL else end + 0 * row_position
    visible = tokens[None, :] < bound[:, None]
    if WINDOW:
        visible = visible & (tokens[None, :] >= (row_position - window_left)[:, None])
    return gl.where(visible, logits, float("-inf"))


@gluon.jit
def issue_qk(query, warpgroup, keys, stage, LAYOUT: gl.constexpr):
    """Issue S = Q K^T for the keys in ``stage``, part by part of the head; the result is not complete."""
    KV_TILE: gl.constexpr = keys[0].shape[1]
    logits = gl.zeros([PACKED_ROWS, KV_TILE], gl.float32, LAYOUT)
    for part in gl.static_range(len(keys)):
        transposed = keys[part].index(stage).permute([1, 0])
        logits = warpgroup_mma(query[part].index(warpgroup), transposed, logits, use_acc=part > 0, is_async=True)
    return logits


@gluon.jit
def reduce_warpgroups(warpgroup: gl.constexpr, reduction, values, row_max, row_sum, acc):
    """Steps 11 and 12: the state over the KV tiles of both consumers, for consumer 0.

    Consumer 1 passes its accumulator through the ring of values, once neither consumer reads the ring any more.
    """
    staged_acc = values._reinterpret(gl.float32, acc.type.shape, gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    mbarrier.arrive(reduction.ring_idle.index(0))
    if warpgroup == 1:
        mbarrier.wait(reduction.ring_idle.index(0), 0)
        store_shared(staged_acc, acc)
        store_shared(reduction.stats.index(0), row_max)
        store_shared(reduction.stats.index(1), row_sum)
        mbarrier.arrive(reduction.state_stored.index(0))
    else:
        mbarrier.wait(reduction.state_stored.index(0), 0)
        peer_max = load_shared(reduction.stats.index(0), row_max)
        peer_sum = load_shared(reduction.stats.index(1), row_max)
        row_max, row_sum, alpha, peer_alpha = combine(row_max, row_sum, peer_max, peer_sum)
        ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc = acc * gl.convert_layout(alpha, ROWS)[:, None]
        acc += load_shared(staged_acc, acc) * gl.convert_layout(peer_alpha, ROWS)[:, None]
    return row_max, row_sum, acc


@gluon.jit
def store_result(
    row_max, row_sum, acc, staged, sinks, out, lse, partial, tile, first_packed_row, rows, slots,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_ROWS: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Step 13: store the normalized output and the LSE, or the partial result if the work item has a slot.

    staged  shared memory ``[PACKED_ROWS, DIM]``, through which the output is stored 16 bytes per thread
    """
    DIM: gl.constexpr = acc.shape[1]
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = acc.type.layout
    tile_row, head, exists = locate_packed_rows(tile, first_packed_row, rows, S_LAYOUT, GROUP)
    norm = inverse(row_sum)
    if SINKS:  # the combine kernel adds the sink to split tiles
        sink = gl.load(sinks + tile.first_head + head, mask=exists & (tile.slot < 0), other=float("-inf")) * LOG2E
        row_max, row_sum, alpha = join_sink(row_max, row_sum, sink)
        norm = inverse(row_sum) * alpha
    result = acc * gl.convert_layout(norm, gl.SliceLayout(1, O_LAYOUT))[:, None]
    sums = log_sum_exp(row_max, row_sum)
    strides = NUM_HEADS * DIM, DIM
    if tile.slot >= 0:
        slot_row, in_workspace = tile.slot.to(gl.int64) * TILE_ROWS, tile.slot < slots
        slot_at, slot_mask = packed_row_offsets(tile, slot_row, first_packed_row, rows, strides, DIM, GROUP, O_LAYOUT)
        gl.store(partial + slot_at, result, mask=slot_mask & in_workspace)
        slot_lse = partial + slots.to(gl.int64) * (TILE_ROWS * NUM_HEADS * DIM)
        slot_lse_at = slot_lse + (slot_row + tile_row) * NUM_HEADS + tile.first_head + head
        gl.store(slot_lse_at, sums, mask=exists & in_workspace)
    else:
        STAGED: gl.constexpr = out.dtype.element_ty == staged.dtype
        LAYOUT: gl.constexpr = coalesced_rows(DIM) if STAGED else O_LAYOUT
        out_at, mask = packed_row_offsets(tile, tile.row, first_packed_row, rows, strides, DIM, GROUP, LAYOUT)
        if STAGED:
            staged.store(result.to(staged.dtype))
            gl.store(out + out_at, staged.load(LAYOUT), mask=mask)
        else:
            gl.store(out + out_at, saturate(result, out.dtype.element_ty), mask=mask)
        if LSE:
            lse_at = (tile.row + tile_row).to(gl.int64) * NUM_HEADS + tile.first_head + head
            gl.store(lse + lse_at, sums, mask=exists)


@gluon.jit
def consume_kv_tiles(
    warpgroup: gl.constexpr, arguments, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, TILE_ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
    SPLIT_KV_OVER_WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Steps 4 to 13, the role of a consumer warpgroup.

    Owns: packed rows ``64 * warpgroup`` to ``64 * warpgroup + 63`` of the CTA over all KV tiles; with
    SPLIT_KV_OVER_WARPGROUPS all 64 packed rows over KV tiles ``warpgroup``, ``warpgroup + 2`` and so on.
    Loop invariant: at the top of the iteration for tile j the keys of tile j are in the ring; ``p`` are the
    probabilities of tile j-1; ``(row_max, row_sum)`` include tile j-1; ``acc`` includes the tiles before it and is
    relative to row_max.
    """
    query, k_ring, v_ring, reduction = arguments.query, arguments.k_ring, arguments.v_ring, arguments.reduction
    tile, rows = arguments.tile, arguments.rows
    keys, values = k_ring.parts, v_ring.parts[0]
    out, lse, partial = arguments.outputs
    scale, cap, window_left = arguments.logits
    # Without a cap the scale is left out of the logits and multiplies their differences.
    factor = LOG2E if CAP else scale * LOG2E
    KV_TILE: gl.constexpr = values.shape[1]
    DIM: gl.constexpr = values.shape[2]
    DTYPE: gl.constexpr = values.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KV_TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    FIRST_TILE: gl.constexpr = warpgroup if SPLIT_KV_OVER_WARPGROUPS else 0
    TILE_STEP: gl.constexpr = 2 if SPLIT_KV_OVER_WARPGROUPS else 1
    STEP: gl.constexpr = TILE_STEP * KV_TILE
    start, end = tile.start + FIRST_TILE * KV_TILE, tile.end
    first_packed_row = tile.first_packed_row + (0 if SPLIT_KV_OVER_WARPGROUPS else warpgroup * PACKED_ROWS)

    for part in gl.static_range(len(query)):
        q_at, exists = packed_row_offsets(
            tile, tile.row, first_packed_row, rows, arguments.q_strides, query[part].shape[2], GROUP,
            coalesced_rows(query[part].shape[2]),
        )  # fmt: skip
        query[part].index(warpgroup).store(gl.load(arguments.q + part * DIM + q_at, mask=exists, other=0.0))
    fence_async_shared()

    row_position = tile.position + locate_packed_rows(tile, first_packed_row, rows, S_LAYOUT, GROUP)[0]
    first_position = tile.position + first_packed_row // GROUP
    last_position = tile.position + (first_packed_row + PACKED_ROWS - 1) // GROUP
    n = gl.arange(0, KV_TILE, gl.SliceLayout(0, S_LAYOUT))
    row_max = gl.full([PACKED_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([PACKED_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([PACKED_ROWS, DIM], gl.float32, O_LAYOUT)
    if end > start:
        mbarrier.wait(k_ring.full.index(FIRST_TILE), 0)
        logits = warpgroup_mma_wait(0, deps=[issue_qk(query, warpgroup, keys, FIRST_TILE, S_LAYOUT)])
        release(k_ring, FIRST_TILE)
        if CAP:
            logits = soft_cap(logits * scale, cap)
        logits = mask_logits(logits, start + n, row_position, end, window_left, CAUSAL, WINDOW)
        row_max = gl.max(logits, 1) * factor
        p = probabilities(logits, factor, row_max)
        row_sum = gl.sum(p, 1)
        p = gl.convert_layout(p.to(DTYPE), P_LAYOUT, assert_trivial=True)
        v_full, v_phase = FIRST_TILE, 0
        k_full, k_phase = advance_full(k_ring, FIRST_TILE, 0, TILE_STEP)
        mbarrier.wait(k_ring.full.index(k_full), k_phase, pred=start + STEP < end)
        for first in range(start + STEP, end, STEP):
            k_stage, v_stage = stage_of(k_ring, k_full), stage_of(v_ring, v_full)
            logits = issue_qk(query, warpgroup, keys, k_stage, S_LAYOUT)  # 4
            mbarrier.wait(v_ring.full.index(v_full), v_phase)  # 5
            acc = warpgroup_mma(p, values.index(v_stage), acc, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])  # 6
            release(k_ring, k_stage)
            if CAP:  # 7
                logits = soft_cap(logits * scale, cap)
            masked = first + KV_TILE > (gl.minimum(end, first_position + 1) if CAUSAL else end)
            if WINDOW:
                masked = masked | (first < last_position - window_left)
            if masked:
                logits = mask_logits(logits, first + n, row_position, end, window_left, CAUSAL, WINDOW)
            row_max, row_sum, next_p, alpha = online_softmax_update(row_max, row_sum, logits, factor)
            k_full, k_phase = advance_full(k_ring, k_full, k_phase, TILE_STEP)  # 8
            # This wait is a loop, over which the assembler does not move the exponentials behind the wait for O.
            mbarrier.wait(k_ring.full.index(k_full), k_phase, pred=first + STEP < end)
            acc = warpgroup_mma_wait(0, deps=[acc])  # 9
            release(v_ring, v_stage)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            p = gl.convert_layout(next_p.to(DTYPE), P_LAYOUT, assert_trivial=True)
            v_full, v_phase = advance_full(v_ring, v_full, v_phase, TILE_STEP)
        mbarrier.wait(v_ring.full.index(v_full), v_phase)  # 10
        v_stage = stage_of(v_ring, v_full)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, values.index(v_stage), acc, is_async=True)])

    if SPLIT_KV_OVER_WARPGROUPS:
        row_max, row_sum, acc = reduce_warpgroups(warpgroup, reduction, values, row_max, row_sum, acc)
    if not SPLIT_KV_OVER_WARPGROUPS or warpgroup == 0:
        store_result(
            row_max, row_sum, acc, query[0].index(warpgroup), arguments.sinks, out, lse, partial, tile,
            first_packed_row, rows, arguments.slots, NUM_HEADS, GROUP, TILE_ROWS, SINKS, LSE,
        )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("scale", "cap", "window_left", "rows", "kv_rows", "num_pages", "max_pages", "max_items", "max_batch", "slots")
    ]
)
def hopper_prefill_kernel(
    q,  # [rows, NUM_KV_HEADS * GROUP, DIM + DIM_B]
    k,  # tensor map [num_pages, PAGE_SIZE, NUM_KV_HEADS, DIM + DIM_B] or [1, kv_rows, ...]
    v,  # tensor map with DIM instead
    sinks,  # [NUM_KV_HEADS * GROUP], not read unless SINKS
    out,  # [rows, NUM_KV_HEADS * GROUP, DIM]
    lse,  # float32 [rows, NUM_KV_HEADS * GROUP] or [0]
    partial,  # float32 [slots, TILE_ROWS, NUM_KV_HEADS * GROUP, DIM], then the LSE without DIM
    qo_indptr,  # [max_batch + 1]; this and the next two are read if PLANNED
    kv_indices,  # [max_pages]
    work,  # [max_items, WORK_STRIDE]
    scale,  # of the logits
    cap,
    window_left,
    rows,  # of q
    kv_rows,  # tokens of ragged KV
    num_pages,
    max_pages,
    max_items,
    max_batch,
    slots,  # of the workspace
    stride_q_row,
    stride_q_head,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,  # of a value, and of the first part of a key
    DIM_B: gl.constexpr,  # of the second part of a key, or 0
    PAGE_SIZE: gl.constexpr,
    TILE_ROWS: gl.constexpr,  # query rows of a work item
    PLANNED: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    PDL: gl.constexpr,
    KV_TILE: gl.constexpr,  # tokens of a KV tile
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):
    """Grid: work items x KV heads x blocks of packed rows of an item, blocks fastest.
    Owns: 128 packed rows of one work item, or 64 with SPLIT_KV_OVER_WARPGROUPS, and all KV tokens of the item.
    Loop invariant: that of :func:`consume_kv_tiles`; a ring holds the next tiles that its producer has loaded.
    Barriers: full and empty barriers of both rings, the staging barrier, two of :class:`Reduction`.
    Bound by: tensor cores for long chunks; exponentials at heads of 64; KV loads for few query rows on long KV.
    """
    SPLIT_KV_OVER_WARPGROUPS: gl.constexpr = TILE_ROWS * GROUP <= PACKED_ROWS
    BLOCK_M: gl.constexpr = PACKED_ROWS if SPLIT_KV_OVER_WARPGROUPS else 2 * PACKED_ROWS
    BLOCKS: gl.constexpr = (TILE_ROWS * GROUP + BLOCK_M - 1) // BLOCK_M
    item, num_items = gl.program_id(0) // (NUM_KV_HEADS * BLOCKS), gl.num_programs(0) // (NUM_KV_HEADS * BLOCKS)
    kv_head = gl.program_id(0) // BLOCKS % NUM_KV_HEADS
    first_packed_row = gl.program_id(0) % BLOCKS * BLOCK_M
    if PLANNED:
        if PDL:
            acquire()
        row, count, begin, end, position, page_start, slot = load_work_item(
            work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages, kv_rows,
            TILE_ROWS, PAGED, PAGE_SIZE,
        )  # fmt: skip
    else:
        row = (num_items - 1 - item) * TILE_ROWS
        count, begin, end = gl.minimum(rows - row, TILE_ROWS), row * 0, kv_rows
        # A slot of -1 is a constant, on which Triton 3.6 fails.
        position, page_start, slot = kv_rows - rows + row, row * 0, -1 - rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first_row, last_row = first_packed_row // GROUP, gl.minimum((first_packed_row + BLOCK_M - 1) // GROUP, count - 1)
    if first_row > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)
    if WINDOW:
        begin = gl.maximum(begin, position + first_row - window_left)
    BOX: gl.constexpr = k.block_type.shape[1]
    start = clamp_begin(begin // BOX * BOX if PAGED else begin, end)

    DTYPE: gl.constexpr = q.dtype.element_ty
    query = allocate_parts(DTYPE, 2, PACKED_ROWS, DIM, DIM_B)
    READERS: gl.constexpr = 32 * WARPS * (1 if SPLIT_KV_OVER_WARPGROUPS else 2)
    k_ring = allocate_ring(DTYPE, K_STAGES, KV_TILE, DIM, DIM_B, READERS)
    v_ring = allocate_ring(DTYPE, V_STAGES, KV_TILE, DIM, 0, READERS)
    reduction = allocate_reduction(SPLIT_KV_OVER_WARPGROUPS)
    tile = QueryTile(row, count, position, start, end, slot, first_packed_row, kv_head * GROUP)
    consumer = ConsumerArguments(
        query, k_ring, v_ring, reduction, q, (stride_q_row, stride_q_head), sinks, (out, lse, partial),
        tile, rows, slots, (scale, cap, window_left),
    )  # fmt: skip
    kv = KvRange(start, end, gl.maximum(begin - start, 0), page_start, kv_indices, kv_rows, max_pages, num_pages)
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    gl.warp_specialize(
        [
            (
                consume_kv_tiles,
                (0, consumer, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, SPLIT_KV_OVER_WARPGROUPS),
            ),
            (
                consume_kv_tiles,
                (1, consumer, NUM_HEADS, GROUP, TILE_ROWS, CAUSAL, WINDOW, CAP, SINKS, LSE, SPLIT_KV_OVER_WARPGROUPS),
            ),
            (produce_kv_tiles, (kv, k_ring, k, kv_head, False, PAGED, PAGE_SIZE, WINDOW)),
            (produce_kv_tiles, (kv, v_ring, v, kv_head, True, PAGED, PAGE_SIZE, WINDOW)),
        ],
        [WARPS, 1, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def make_tensor_descriptor(t: Tensor, strides: tuple[int, int, int], page_size: int, x: Operands) -> TensorDescriptor:
    """The tensor map of keys or values as ``[pages, tokens, heads, dim]``; ragged KV (``page_size`` 0) is one page.

    strides  of pages, tokens and heads, in elements
    """
    pages, tokens, stride = (t.shape[0], page_size, strides[0]) if page_size else (1, x.kv_rows, x.kv_rows * strides[1])
    shape, box = [pages, tokens, x.heads[1], t.shape[-1]], PAGED_BOX if page_size else RAGGED_BOX
    return describe(t, shape, [stride, *strides[1:], 1], [1, box, 1, BOX_COLUMNS.value], BOX_LAYOUT.value)


def launch_tiles(
    x: Operands,
    out: Tensor,
    lse: Tensor,
    plan: PrefillPlan | None,
    workspace: Tensor | None,
    tile_rows: int,
    num_items: int,
    o: AttentionOptions,
) -> None:
    """Launch the Hopper kernel (:data:`.prefill_call.LaunchTiles`)."""
    (num_heads, num_kv_heads), (dim, dim_b, _) = x.heads, x.dims
    group = num_heads // num_kv_heads
    pdl = supports_pdl(out, image=True) if plan is None else read_plan_early(out, plan.kv_len.shape[0])
    paged = plan is not None and x.k.dim() == 4  # also with a plan for no pages
    page_size = 1 if plan is None else PlanProblem.of(plan.problem).page_size
    k, v = (make_tensor_descriptor(*t, page_size if paged else 0, x) for t in ((x.k, x.k_strides), (x.v, x.v_strides)))
    tile = TILE_CONFIGS[x.dims]
    arguments = plan_arguments(plan)
    arguments |= {
        name: lse for name, value in arguments.items() if value is None
    }  # not read, but Triton needs a tensor
    launch(
        hopper_prefill_kernel,
        (num_items * num_kv_heads * triton.cdiv(tile_rows * group, 2 * PACKED_ROWS.value),),
        Options(WARPS.value, launch_pdl=pdl, writes=("out", "lse", "partial")),
        q=x.q,
        k=k,
        v=v,
        sinks=lse if o.sinks is None else o.sinks,
        out=out,
        lse=lse,
        partial=lse if workspace is None else workspace,
        **arguments,
        scale=o.sm_scale or 1 / math.sqrt(dim + dim_b),
        cap=o.logits_soft_cap,
        window_left=min(o.window_left, 1 << 30),
        rows=x.q.shape[0],
        kv_rows=x.kv_rows,
        num_pages=x.k.shape[0],
        stride_q_row=x.q.stride(0),
        stride_q_head=x.q.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_B=dim_b,
        PAGE_SIZE=page_size,
        TILE_ROWS=tile_rows,
        PLANNED=plan is not None,
        PAGED=paged,
        CAUSAL=o.causal,
        WINDOW=o.window_left >= 0,
        CAP=o.logits_soft_cap > 0,
        SINKS=o.sinks is not None,
        LSE=lse.dim() > 1,
        PDL=pdl,
        KV_TILE=tile.kv_tile,
        K_STAGES=tile.k_stages,
        V_STAGES=tile.v_stages,
    )


batch_prefill, ragged_prefill, single_prefill = prefill_ops(launch_tiles)
