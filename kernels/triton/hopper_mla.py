"""MLA decode on Hopper, in Gluon: warp-specialised, one producer and two consumer warpgroups for each CTA.

A CTA computes 64 packed rows of one work item (:mod:`.hopper_common`); MLA has one KV head. The key of a token is
``[ckv, kpe]``, 512 + 64 columns, and its value is ckv, so a KV tile of 64 tokens is loaded once and read twice. It lies
in one page. The producer loads it by TMA, or by ``cp.async`` where the KV ends inside the tile.

Both consumers have all 64 packed rows. Consumer c computes the logits and probabilities P of KV tiles c, c + 2 and so
on, and multiplies the P of every tile by its half of the value columns: an accumulator of 64 x 512 does not fit in the
registers of one warpgroup. Consumers pass P to each other in shared memory, in the place of the kpe of the same tile.

Inductor generates Triton only: a compiled graph calls the op for this kernel, and a package contains its image. Work
items and partial results are those of :mod:`.prefill`.

Schedule
--------
Even KV tiles use stage 0, odd ones stage 1; consumer ``c`` owns stage ``c``. A stage has a full and an empty barrier
for each half of the value columns. The loads of ``ckv[h]`` complete ``full[h]``; those of kpe count for the half of the
peer. Consumer h arrives on ``empty[h]`` when it has read half h as values. Below, ``own`` is the consumer that computes
the logits of tile j and ``peer`` the other one. S is a tile of logits, O the accumulator ``[64, 256]``.

prologue
    0.  [all warps]        read the work item; ``griddepcontrol.wait``; return if there are no packed rows
    1.  [producer]         load the page numbers of tiles 0 and 1; copy the query; arrive on ``query_full``
    2.  [consumer]         wait for ``query_full``
mainloop, for each KV tile j in stage ``j % 2``
    3.  [producer]         wait for ``empty[own]``; load ``ckv[own]``; it completes ``full[own]``
    4.  [producer]         wait for ``empty[peer]``; load ``ckv[peer]`` and kpe; they complete ``full[peer]``
    5.  [consumer own]     wait for ``full[own]``, then ``full[peer]``; issue S_j = Q K_j^T
    6.  [consumer own]     mask, online softmax: store row_max for the peer; P_j and alpha
    7.  [consumer own]     store P_j over kpe; arrive on ``p_stored[own]``
    8.  [consumer own]     O[own] = O[own] * alpha + P_j V_j[own]; arrive on ``empty[own]``
    9.  [consumer peer]    wait for ``p_stored[own]``; read row_max; O[peer] = O[peer] * alpha + P_j V_j[peer];
                           arrive on ``empty[peer]``
epilogue
    10. [consumer]         exchange the row_sum of even and of odd tiles; arrive on and wait for ``sums_stored``
    11. [consumer]         divide by l; store half of the output columns; consumer 0 stores the LSE

Row maxima pass through tiles in order: consumer own continues at tile j with the row_max that it read in step 9 of tile
j-1. For tiles 1 on, consumer 1 issues step 5 of its tile before step 9 of the preceding one, consumer 0 after it, and
so the tensor cores work while either consumer computes a softmax::

    time               ---->
    [producer]   TMA   K0 K1 - - - - - - - - K2 - - - - - K3 - - - - - - - - - -
    [consumer 0] WGMMA    S0 - - - - - P0V0 - - - - - P1V1 S2 - - - - - P2V2 - -
                 ALU         softmax 0                        softmax 2
    [consumer 1] WGMMA       S1 - - - - P0V0 - - - - P1V1 - - S3 - - - - P2V2 -
                 ALU                        softmax 1                      softmax

``docs/contributing/kernels/hopper_schedule.md`` has the figure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from attn_ops.kernels.triton.combine_prefill import combine_split_tiles
from attn_ops.kernels.triton.hopper_common import (
    OPERAND,
    PACKED_ROWS,
    WARPS,
    QueryTile,
    allocate_barriers,
    clamp_begin,
    describe,
    load_page,
    load_shared,
    load_work_item,
    locate_packed_rows,
    store_shared,
)
from attn_ops.kernels.triton.launch import Options, launch
from attn_ops.kernels.triton.pdl import acquire, read_plan_early
from attn_ops.kernels.triton.prefill_call import plan_arguments
from attn_ops.kernels.triton.softmax import (
    LOG2E,
    inverse,
    log_sum_exp,
    next_row_max,
    probabilities,
    rescale_factor,
    saturate,
)
from attn_ops.meta.outputs import batch_mla as allocate
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

from attn_ops.ops.options import MLA_SM_SCALE, AttentionOptions
from attn_ops.plan.state import PlanProblem, PrefillPlan, num_partials

CKV, KPE = gl.constexpr(512), gl.constexpr(64)
"""Columns of the two parts of a key."""

HALF = gl.constexpr(256)
"""Columns of ckv that a consumer multiplies P by."""

KV_TILE = gl.constexpr(64)
"""Tokens of a KV tile; page sizes are a multiple of it."""

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""Shared-memory layout ``[page, token, column]`` of what one TMA load writes."""

COPY_256 = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))
COPY_64 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS.value, 1], [1, 0]))
"""Layouts of ``cp.async`` copies of rows of 256 and of 64 columns, 16 bytes per thread."""

CONSUMER_REGISTERS = gl.constexpr(208)
"""Registers per thread that a consumer warpgroup asks for (``setmaxnreg``)."""


class Stage(NamedTuple):
    """A KV tile in shared memory, with barriers for each half of the value columns."""

    ckv: Any  # [2, KV_TILE, HALF]
    kpe_or_p: Any  # [KV_TILE, KPE], later P [PACKED_ROWS, KV_TILE]
    full: Any  # [2] barriers, 1 arrival
    empty: Any  # [2] barriers, 1 arrival


class Exchange(NamedTuple):
    """What consumer c tells its peer about its latest KV tile, at index c; P itself is in the stage."""

    row_max: Any  # float32 [2, PACKED_ROWS]
    p_stored: Any  # [2] barriers, 1 arrival: row_max and P are stored


class ProducerArguments(NamedTuple):
    """What the producer warpgroup gets besides constants."""

    query: Any  # shared memory ([2, PACKED_ROWS, HALF], [PACKED_ROWS, KPE])
    query_full: Any  # barrier, one arrival of each producer thread
    stages: Any
    q: Any  # (q_nope, q_pe) in global memory
    q_strides: Any  # (row, head) of q_nope, (row, head) of q_pe
    tensor_maps: Any  # (ckv, kpe)
    caches: Any  # (ckv, kpe)
    page_strides: Any  # (ckv, kpe)
    page_table: Any  # (kv_indices, page_start, max_pages, num_pages)
    tile: Any
    rows: Any


class ConsumerArguments(NamedTuple):
    """What a consumer warpgroup gets besides constants."""

    query: Any
    query_full: Any
    stages: Any
    exchange: Any
    row_sums: Any  # shared memory, float32 [2, PACKED_ROWS]
    sums_stored: Any  # barrier, 2 arrivals
    outputs: Any  # (out, lse, partial)
    tile: Any
    rows: Any
    slots: Any
    factor: Any  # scale of the logits in base 2


@gluon.jit
def allocate_stage(DTYPE: gl.constexpr):
    """An empty :class:`Stage`."""
    ckv = gl.allocate_shared_memory(DTYPE, [2, KV_TILE, HALF], OPERAND)
    kpe_or_p = gl.allocate_shared_memory(DTYPE, [KV_TILE, KPE], OPERAND)
    return Stage(ckv, kpe_or_p, allocate_barriers(2, 1), allocate_barriers(2, 1))


@gluon.jit
def copy_query(memory, q, tile, rows, stride_row, stride_head, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue ``cp.async`` of ``[PACKED_ROWS, columns]`` of the query, 0 for padding rows."""
    tile_row, head, exists = locate_packed_rows(tile, tile.first_packed_row, rows, LAYOUT, HEADS)
    d = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (tile.row + tile_row).to(gl.int64) * stride_row + head.to(gl.int64) * stride_head
    at = gl.multiple_of(q + at[:, None] + d[None, :], [1, 16])
    async_copy.async_copy_global_to_shared(memory, at, mask=exists[:, None])


@gluon.jit
def copy_tokens(memory, cache, count, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Issue ``cp.async`` of ``[KV_TILE, columns]`` from the token at ``cache`` on; 0 from token ``count`` on."""
    n = gl.arange(0, KV_TILE, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, memory.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(cache + (n[:, None] * STRIDE + d[None, :]), [1, 16])  # the host has checked the alignment
    async_copy.async_copy_global_to_shared(memory, at, mask=(n < count)[:, None])


@gluon.jit
def copies_done(barrier):
    """Wait for the ``cp.async`` copies of this warpgroup and arrive on ``barrier``."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(barrier)


@gluon.jit
def copy_last_kv_tile(
    own: gl.constexpr, stage, caches, page_strides, page, first, end, phase,
    PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr,
):  # fmt: skip
    """Steps 3 and 4 for a KV tile in which the KV ends, by ``cp.async``: memory after the last token may be NaN."""
    peer: gl.constexpr = 1 - own
    ckv = caches[0] + page * page_strides[0] + (first % PAGE_SIZE).to(gl.int64) * STRIDE_CKV
    kpe = caches[1] + page * page_strides[1] + (first % PAGE_SIZE).to(gl.int64) * STRIDE_KPE
    mbarrier.wait(stage.empty.index(own), phase)
    copy_tokens(stage.ckv.index(own), ckv + own * HALF, end - first, STRIDE_CKV, COPY_256)
    copies_done(stage.full.index(own))
    mbarrier.wait(stage.empty.index(peer), phase)
    copy_tokens(stage.ckv.index(peer), ckv + peer * HALF, end - first, STRIDE_CKV, COPY_256)
    copy_tokens(stage.kpe_or_p, kpe, end - first, STRIDE_KPE, COPY_64)
    copies_done(stage.full.index(peer))


@gluon.jit
def tma_load(memory, tensor_map, page, token, column, barrier):
    """Issue a TMA load of ``memory [tokens, columns]``, which completes ``barrier``."""
    memory = memory._reinterpret(memory.dtype, [1, memory.shape[0], memory.shape[1]], BOX_LAYOUT)
    tma.async_copy_global_to_shared(tensor_map, [page, token, column], barrier, memory)


@gluon.jit
def tma_load_kv_tile(own: gl.constexpr, stage, tensor_maps, page, token, phase):
    """Steps 3 and 4 by TMA, from ``token`` of ``page`` on.

    The half of consumer ``own``, which computes the logits, comes first: that consumer is the first to need it, and
    its peer the last to read P, which lies where kpe goes.
    """
    peer: gl.constexpr = 1 - own
    ckv, kpe = tensor_maps
    HALF_BYTES: gl.constexpr = KV_TILE * HALF * 2
    mbarrier.wait(stage.empty.index(own), phase)
    mbarrier.expect(stage.full.index(own), HALF_BYTES)
    tma_load(stage.ckv.index(own), ckv, page, token, own * HALF, stage.full.index(own))
    mbarrier.wait(stage.empty.index(peer), phase)
    mbarrier.expect(stage.full.index(peer), HALF_BYTES + KV_TILE * KPE * 2)
    tma_load(stage.ckv.index(peer), ckv, page, token, peer * HALF, stage.full.index(peer))
    tma_load(stage.kpe_or_p, kpe, page, token, 0, stage.full.index(peer))


@gluon.jit
def load_kv_tile(
    own: gl.constexpr, stage, tensor_maps, caches, page_strides, page, first, end, phase,
    PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr,
):  # fmt: skip
    """Steps 3 and 4: load the KV tile from token ``first`` on into ``stage`` when it is empty."""
    if first + KV_TILE <= end:
        tma_load_kv_tile(own, stage, tensor_maps, page.to(gl.int32), first % PAGE_SIZE, phase)
    else:
        copy_last_kv_tile(
            own, stage, caches, page_strides, page, first, end, phase, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE
        )  # fmt: skip


@gluon.jit
def produce_kv_tiles(
    arguments, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr
):  # fmt: skip
    """Steps 1, 3 and 4, the role of the producer warpgroup: load the query, then two KV tiles an iteration.

    Page numbers are loaded one iteration ahead. There is a KV tile even without tokens.
    """
    tile, rows, stages = arguments.tile, arguments.rows, arguments.stages
    kv_indices, page_start, max_pages, num_pages = arguments.page_table
    begin, end = tile.start, tile.end
    next_even = load_page(kv_indices, page_start + begin // PAGE_SIZE, max_pages, num_pages)
    next_odd = load_page(kv_indices, page_start + (begin + KV_TILE) // PAGE_SIZE, max_pages, num_pages)
    query_ckv, query_kpe = arguments.query
    strides = arguments.q_strides
    for half in gl.static_range(2):
        q_half = arguments.q[0] + half * HALF
        copy_query(query_ckv.index(half), q_half, tile, rows, strides[0], strides[1], HEADS, COPY_256)
    copy_query(query_kpe, arguments.q[1], tile, rows, strides[2], strides[3], HEADS, COPY_64)
    async_copy.mbarrier_arrive(arguments.query_full, increment_count=False)
    phase = 1
    for even in range(begin, gl.maximum(end, begin + 1), 2 * KV_TILE):
        odd, following = even + KV_TILE, even + 2 * KV_TILE
        even_page, odd_page = next_even, next_odd
        next_even = load_page(kv_indices, page_start + following // PAGE_SIZE, max_pages, num_pages)
        next_odd = load_page(kv_indices, page_start + (following + KV_TILE) // PAGE_SIZE, max_pages, num_pages)
        load_kv_tile(
            0, stages[0], arguments.tensor_maps, arguments.caches, arguments.page_strides, even_page, even, end, phase,
            PAGE_SIZE, STRIDE_CKV, STRIDE_KPE,
        )  # fmt: skip
        if odd < end:
            load_kv_tile(
                1, stages[1], arguments.tensor_maps, arguments.caches, arguments.page_strides, odd_page, odd, end,
                phase, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE,
            )  # fmt: skip
        phase ^= 1


@gluon.jit
def issue_qk(own: gl.constexpr, opaque_zero, query, stage, phase, S_LAYOUT: gl.constexpr):
    """Step 5: issue S = Q K^T for the KV tile in ``stage``; the result is not complete.

    ``opaque_zero`` is 0, which the compiler does not know: from constant addresses it would compute all matrix
    descriptors ahead of the loop and spill them.
    """
    query_ckv, query_kpe = query
    peer: gl.constexpr = 1 - own
    logits = gl.zeros([PACKED_ROWS, KV_TILE], gl.float32, S_LAYOUT)
    mbarrier.wait(stage.full.index(own), phase)
    key = stage.ckv.index(own + opaque_zero).permute([1, 0])
    logits = warpgroup_mma(query_ckv.index(own + opaque_zero), key, logits, use_acc=False, is_async=True)
    mbarrier.wait(stage.full.index(peer), phase)
    key = stage.ckv.index(peer + opaque_zero).permute([1, 0])
    logits = warpgroup_mma(query_ckv.index(peer + opaque_zero), key, logits, is_async=True)
    return warpgroup_mma(query_kpe, stage.kpe_or_p.permute([1, 0]), logits, is_async=True)


@gluon.jit
def mask_logits(logits, first, end, row_position, CAUSAL: gl.constexpr):
    """``logits [packed rows, KV_TILE]`` of the tokens from ``first`` on, -inf where a row does not see one."""
    tokens = first + gl.arange(0, KV_TILE, gl.SliceLayout(0, logits.type.layout))
    bound = gl.minimum(end, row_position + 1) if CAUSAL else end + 0 * row_position
    return gl.where(tokens[None, :] < bound[:, None], logits, float("-inf"))


@gluon.jit
def softmax_step(own: gl.constexpr, logits, exchange, row_max, row_sum, factor):
    """Step 6: ``(row_max, row_sum, p, alpha)`` after an own KV tile.

    :func:`.softmax.online_softmax_update`, except that row_max is stored for the peer before the exponentials: a store
    after them takes one more load.
    """
    new_max = next_row_max(row_max, logits, factor)
    store_shared(exchange.row_max.index(own), new_max)
    alpha = rescale_factor(row_max, new_max)
    p = probabilities(logits, factor, new_max)
    return new_max, row_sum * alpha + gl.sum(p, 1), p, alpha


@gluon.jit
def own_pv(own: gl.constexpr, stage, exchange, acc, p, alpha, P_LAYOUT: gl.constexpr):
    """Steps 7 and 8: pass P to the peer, and the accumulator with this consumer's half of P V added."""
    p = p.to(stage.kpe_or_p.dtype)
    stage.kpe_or_p.store(p)
    fence_async_shared()
    mbarrier.arrive(exchange.p_stored.index(own))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = gl.convert_layout(p, P_LAYOUT, assert_trivial=True)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, stage.ckv.index(own), acc, is_async=True)])
    mbarrier.arrive(stage.empty.index(own))
    return acc


@gluon.jit
def issue_peer_pv(own: gl.constexpr, stage, exchange, state, phase):
    """Step 9 without its arrival: ``(row_max, row_sum, acc)`` with the peer's KV tile; ``acc`` is not complete.

    ``row_sum`` is rescaled only. It is a sum over this consumer's own KV tiles.
    """
    row_max, row_sum, acc = state
    peer: gl.constexpr = 1 - own
    mbarrier.wait(exchange.p_stored.index(peer), phase)
    new_max = load_shared(exchange.row_max.index(peer), row_max)
    alpha = rescale_factor(row_max, new_max)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return new_max, row_sum * alpha, warpgroup_mma(stage.kpe_or_p, stage.ckv.index(own), acc, is_async=True)


@gluon.jit
def store_half(
    own: gl.constexpr, row_max, row_sum, acc, arguments, HEADS: gl.constexpr, TILE_ROWS: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """Step 11: store half of the output columns; consumer 0 the LSE too. Work items with a slot store float32 there."""
    tile, rows, slots = arguments.tile, arguments.rows, arguments.slots
    out, lse, partial = arguments.outputs
    S_LAYOUT: gl.constexpr = row_max.type.layout.parent
    O_LAYOUT: gl.constexpr = acc.type.layout
    value = acc * gl.convert_layout(inverse(row_sum), gl.SliceLayout(1, O_LAYOUT))[:, None]
    d = own * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
    tile_row, head, exists = locate_packed_rows(tile, tile.first_packed_row, rows, S_LAYOUT, HEADS)
    value_row, value_head, value_exists = locate_packed_rows(tile, tile.first_packed_row, rows, O_LAYOUT, HEADS)
    if tile.slot >= 0:
        slot_row = tile.slot.to(gl.int64) * TILE_ROWS
        at = (slot_row + value_row) * HEADS + value_head
        stored = value_exists & (tile.slot < slots)
        gl.store(partial + at[:, None] * CKV + d[None, :], value, mask=stored[:, None])
        partial_lse = partial + slots.to(gl.int64) * (TILE_ROWS * HEADS * CKV)
        if own == 0:
            slot_lse_at = partial_lse + (slot_row + tile_row) * HEADS + head
            gl.store(slot_lse_at, log_sum_exp(row_max, row_sum), mask=exists & (tile.slot < slots))
    else:
        at = (tile.row + value_row).to(gl.int64) * HEADS + value_head
        result = saturate(value, out.dtype.element_ty)
        gl.store(out + at[:, None] * CKV + d[None, :], result, mask=value_exists[:, None])
        if LSE and own == 0:
            lse_at = lse + (tile.row + tile_row).to(gl.int64) * HEADS + head
            gl.store(lse_at, log_sum_exp(row_max, row_sum), mask=exists)


@gluon.jit
def consume_kv_tiles(
    own: gl.constexpr, arguments, HEADS: gl.constexpr, TILE_ROWS: gl.constexpr, CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
):  # fmt: skip
    """Steps 2 and 5 to 11, the role of a consumer warpgroup.

    Owns: the logits of KV tiles ``own``, ``own + 2`` and so on, and columns ``256 * own`` on of the output.
    Loop invariant: at the top of the iteration for own tile j the stage of tile j-1 holds its P or will; ``acc`` and
    ``row_max`` include the tiles up to j-2, and ``row_sum`` the own tiles among them, all relative to row_max.
    """
    query, stages, exchange, tile = arguments.query, arguments.stages, arguments.exchange, arguments.tile
    begin, end = tile.start, tile.end
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KV_TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    own_stage, peer_stage = stages[own], stages[1 - own]
    peer_empty = peer_stage.empty.index(own)
    packed_row = tile.first_packed_row + gl.arange(0, PACKED_ROWS, gl.SliceLayout(1, S_LAYOUT))
    row_position = tile.position + packed_row // HEADS
    first_position = tile.position + tile.first_packed_row // HEADS
    row_max = gl.full([PACKED_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([PACKED_ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([PACKED_ROWS, HALF], gl.float32, O_LAYOUT)
    mbarrier.wait(arguments.query_full, 0)  # 2
    fence_async_shared()
    phase, peer_phase = 0, 0
    start = begin + KV_TILE
    if own == 0:  # tile 0, which may have no tokens
        logits = warpgroup_mma_wait(0, deps=[issue_qk(own, 0, query, own_stage, phase, S_LAYOUT)])
        logits = mask_logits(logits, begin, end, row_position, CAUSAL)
        row_max, row_sum, p, alpha = softmax_step(own, logits, exchange, row_max, row_sum, arguments.factor)
        acc = own_pv(own, own_stage, exchange, acc, p, alpha, P_LAYOUT)
        phase, start = 1, begin + 2 * KV_TILE
    for first in range(start, end, 2 * KV_TILE):
        opaque_zero = first >> 31
        if own == 1:
            logits = issue_qk(own, opaque_zero, query, own_stage, phase, S_LAYOUT)  # 5
            row_max, row_sum, acc = issue_peer_pv(own, peer_stage, exchange, (row_max, row_sum, acc), peer_phase)  # 9
            logits = warpgroup_mma_wait(1, deps=[logits])
        else:
            row_max, row_sum, acc = issue_peer_pv(own, peer_stage, exchange, (row_max, row_sum, acc), peer_phase)  # 9
            logits = issue_qk(own, opaque_zero, query, own_stage, phase, S_LAYOUT)  # 5
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(peer_empty)
            logits = warpgroup_mma_wait(0, deps=[logits])
        if first + KV_TILE > (gl.minimum(end, first_position + 1) if CAUSAL else end):
            logits = mask_logits(logits, first, end, row_position, CAUSAL)
        row_max, row_sum, p, alpha = softmax_step(own, logits, exchange, row_max, row_sum, arguments.factor)  # 6
        if own == 1:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(peer_empty)
        acc = own_pv(own, own_stage, exchange, acc, p, alpha, P_LAYOUT)  # 7 and 8
        phase, peer_phase = phase ^ 1, peer_phase ^ 1
    num_tiles = gl.maximum((end - begin + KV_TILE - 1) // KV_TILE, 1)
    if num_tiles % 2 == own:  # the last tile is the peer's
        row_max, row_sum, acc = issue_peer_pv(own, peer_stage, exchange, (row_max, row_sum, acc), peer_phase)
        acc = warpgroup_mma_wait(0, deps=[acc])

    store_shared(arguments.row_sums.index(own), row_sum)  # 10
    mbarrier.arrive(arguments.sums_stored)
    mbarrier.wait(arguments.sums_stored, 0)
    row_sum += load_shared(arguments.row_sums.index(1 - own), row_sum)
    store_half(own, row_max, row_sum, acc, arguments, HEADS, TILE_ROWS, LSE)


@gluon.jit(do_not_specialize=["scale", "rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"])
def hopper_mla_kernel(
    q_nope,  # [rows, HEADS, 512]
    q_pe,  # [rows, HEADS, 64]
    ckv,  # [num_pages, PAGE_SIZE, 512]
    kpe,  # [num_pages, PAGE_SIZE, 64]
    ckv_map,  # tensor map of ckv
    kpe_map,  # tensor map of kpe
    out,  # [rows, HEADS, 512]
    lse,  # float32 [rows, HEADS] or [0]
    partial,  # float32 [slots, TILE_ROWS, HEADS, 512], then the LSE without 512
    qo_indptr,  # [max_batch + 1]
    kv_indices,  # [max_pages]
    work,  # [max_items, WORK_STRIDE]
    scale,  # of the logits
    rows,  # of q_nope and q_pe
    num_pages,
    max_pages,
    max_items,
    max_batch,
    slots,  # of the workspace
    stride_q_row,
    stride_q_head,
    stride_qb_row,
    stride_qb_head,
    stride_ckv_page,
    stride_kpe_page,
    STRIDE_CKV: gl.constexpr,  # of a token
    STRIDE_KPE: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_ROWS: gl.constexpr,  # query rows of a work item
    PAGE_SIZE: gl.constexpr,  # a multiple of KV_TILE
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid: work items x blocks of 64 packed rows of an item, blocks fastest.
    Owns: 64 packed rows of one work item and all its KV tokens.
    Loop invariant: that of :func:`consume_kv_tiles`; each stage holds a KV tile that its consumers have not finished.
    Barriers: 2 full and 2 empty barriers for each stage, query_full, 2 x p_stored, sums_stored.
    Bound by: L2 throughput. A KV tile is loaded for 64 packed rows, so 128 heads load it twice, once from memory.
    """
    if PDL:
        acquire()
    BLOCKS: gl.constexpr = (TILE_ROWS * HEADS + PACKED_ROWS - 1) // PACKED_ROWS
    item, num_items = gl.program_id(0) // BLOCKS, gl.num_programs(0) // BLOCKS
    first_packed_row = gl.program_id(0) % BLOCKS * PACKED_ROWS
    row, count, begin, end, position, page_start, slot = load_work_item(
        work, item, num_items, max_items, qo_indptr, max_batch, rows, num_pages, max_pages,
        TILE_ROWS, PAGE_SIZE,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    last_row = gl.minimum((first_packed_row + PACKED_ROWS - 1) // HEADS, count - 1)
    if first_packed_row // HEADS > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)

    DTYPE: gl.constexpr = q_nope.dtype.element_ty
    UNSWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = (
        gl.allocate_shared_memory(DTYPE, [2, PACKED_ROWS, HALF], OPERAND),
        gl.allocate_shared_memory(DTYPE, [PACKED_ROWS, KPE], OPERAND),
    )
    stages = (allocate_stage(DTYPE), allocate_stage(DTYPE))
    row_maxima = gl.allocate_shared_memory(gl.float32, [2, PACKED_ROWS], UNSWIZZLED)
    row_sums = gl.allocate_shared_memory(gl.float32, [2, PACKED_ROWS], UNSWIZZLED)
    exchange = Exchange(row_maxima, allocate_barriers(2, 1))
    query_full, sums_stored = allocate_barriers(1, 32 * WARPS).index(0), allocate_barriers(1, 2).index(0)
    begin = clamp_begin(begin // KV_TILE * KV_TILE, end)
    tile = QueryTile(row, count, position, begin, end, slot, first_packed_row, 0)
    consumer = ConsumerArguments(
        query, query_full, stages, exchange, row_sums, sums_stored, (out, lse, partial), tile, rows, slots,
        scale * LOG2E,
    )  # fmt: skip
    producer = ProducerArguments(
        query, query_full, stages, (q_nope, q_pe), (stride_q_row, stride_q_head, stride_qb_row, stride_qb_head),
        (ckv_map, kpe_map), (ckv, kpe), (stride_ckv_page, stride_kpe_page),
        (kv_indices, page_start, max_pages, num_pages), tile, rows,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (produce_kv_tiles, (producer, HEADS, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE)),
            (consume_kv_tiles, (0, consumer, HEADS, TILE_ROWS, CAUSAL, LSE)),
            (consume_kv_tiles, (1, consumer, HEADS, TILE_ROWS, CAUSAL, LSE)),
        ],
        [WARPS, WARPS],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


def make_tensor_descriptor(cache: Tensor) -> TensorDescriptor:
    """The tensor map of ``cache [pages, page_size, columns]``; a box is a KV tile of at most 256 columns."""
    block = [1, KV_TILE.value, min(HALF.value, cache.shape[2])]
    return describe(cache, list(cache.shape), list(cache.stride()), block, BOX_LAYOUT.value)


def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    o, p = AttentionOptions(**options), PrefillPlan(*plan)
    out, lse = allocate(q_nope, return_lse=return_lse, out_dtype=o.out_dtype)
    problem, partials = PlanProblem.of(p.problem), num_partials(p)
    (rows, heads), tile_rows, max_batch = q_nope.shape[:2], problem.tile_rows, p.kv_len.shape[0]
    num_items, pdl = triton.cdiv(rows, tile_rows) + max_batch + partials, read_plan_early(out, max_batch)
    launch(
        hopper_mla_kernel,
        (num_items * triton.cdiv(tile_rows * heads, PACKED_ROWS.value),),
        Options(WARPS.value, launch_pdl=pdl, writes=("out", "lse", "partial")),
        q_nope=q_nope,
        q_pe=q_pe,
        ckv=ckv_cache,
        kpe=kpe_cache,
        ckv_map=make_tensor_descriptor(ckv_cache),
        kpe_map=make_tensor_descriptor(kpe_cache),
        out=out,
        lse=lse,
        partial=workspace,
        **plan_arguments(p),
        scale=MLA_SM_SCALE if o.sm_scale is None else o.sm_scale,
        rows=rows,
        num_pages=ckv_cache.shape[0],
        stride_q_row=q_nope.stride(0),
        stride_q_head=q_nope.stride(1),
        stride_qb_row=q_pe.stride(0),
        stride_qb_head=q_pe.stride(1),
        stride_ckv_page=ckv_cache.stride(0),
        stride_kpe_page=kpe_cache.stride(0),
        STRIDE_CKV=ckv_cache.stride(1),
        STRIDE_KPE=kpe_cache.stride(1),
        HEADS=heads,
        TILE_ROWS=tile_rows,
        PAGE_SIZE=problem.page_size,
        CAUSAL=o.causal,
        LSE=lse.dim() > 1,
        PDL=pdl,
    )
    if partials:
        combine_split_tiles(out, lse, workspace, None, p)
    return out, lse
