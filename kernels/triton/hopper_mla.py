"""MLA decode on Hopper, in Gluon: one program per work item and 64 of its pairs of a query row and a head.

Keys of 512 + 64, of which the first 512 are the values too, are read once, in blocks of 64 tokens of a page: by the
copy engine (TMA), which a warpgroup asks for them, or by that warpgroup itself where the tokens end in a block. Two
warpgroups attend. Each multiplies the queries with every other block and makes its weights, and multiplies the weights
of all blocks with its half of the values: while one makes weights the other keeps the tensor cores busy. The weights
for the other go where the block had the 64 columns that are not values.

Packages of AOTInductor do without: they hold Triton alone. The work items and partial results are those of
:mod:`.prefill`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from attn_ops.kernels.triton.combine_prefill import merge_tiles
from attn_ops.kernels.triton.hopper_common import (
    OPERAND,
    PAIRS,
    WARPS,
    Tile,
    allocate_barriers,
    bounded,
    load_item,
    load_page,
    load_shared,
    locate,
    store_shared,
)
from attn_ops.kernels.triton.launch import Options, launch
from attn_ops.kernels.triton.pdl import acquire, read_plan_early
from attn_ops.kernels.triton.softmax import LOG2E, exp2, finite, inverse, log_sum_exp
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
HALF = gl.constexpr(256)
"""Columns of the values that a warpgroup has."""

TOKENS = gl.constexpr(64)
"""Of a block."""

BLOCK = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
"""The layout of a block in memory, ``[page, token, column]``, as the copy engine brings it."""

WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [WARPS.value, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [WARPS.value, 1], [1, 0]))
"""Of what the warpgroup that copies brings itself, 16 bytes a thread: rows of 256 columns, and of 64."""

REGISTERS = gl.constexpr(208)
"""Of a thread that attends."""


class Stage(NamedTuple):
    """A block in shared memory, and barriers for each half of it."""

    keys: Any  # [2, TOKENS, HALF], the values too
    rest: Any  # [TOKENS, 64], the rest of the keys, and then the weights [PAIRS, TOKENS]
    ready: Any
    free: Any


class Exchange(NamedTuple):
    """What the warpgroups tell each other of each of the last two blocks."""

    tops: Any  # [2, PAIRS], the largest logits up to it
    weighed: Any  # barriers


@gluon.jit
def copy_queries(block, q, tile, rows, stride_row, stride_head, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy ``[PAIRS, dim]`` of the queries, 0 where there is none."""
    tile_row, head, used = locate(tile, tile.first_pair, rows, LAYOUT, HEADS)
    d = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (tile.row + tile_row).to(gl.int64) * stride_row + head.to(gl.int64) * stride_head
    at = gl.multiple_of(q + at[:, None] + d[None, :], [1, 16])
    async_copy.async_copy_global_to_shared(block, at, mask=used[:, None])


@gluon.jit
def copy_tokens(block, cache, count, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy ``[TOKENS, dim]`` from the token at ``cache`` on; zeros from ``count`` on."""
    n = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))
    at = gl.multiple_of(cache + (n[:, None] * STRIDE + d[None, :]), [1, 16])  # bytes, which the compiler does not know
    async_copy.async_copy_global_to_shared(block, at, mask=(n < count)[:, None])


@gluon.jit
def copy_done(barrier):
    """Wait for what this warpgroup has copied, and tell."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(barrier)


@gluon.jit
def copy_cut_block(
    own: gl.constexpr, stage, caches, page_strides, page, first, end, phase,
    PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr,
):  # fmt: skip
    """As :func:`copy_block` for a block in which the tokens end; what follows them in memory may be anything."""
    other: gl.constexpr = 1 - own
    ckv = caches[0] + page * page_strides[0] + (first % PAGE_SIZE).to(gl.int64) * STRIDE_CKV
    kpe = caches[1] + page * page_strides[1] + (first % PAGE_SIZE).to(gl.int64) * STRIDE_KPE
    mbarrier.wait(stage.free.index(own), phase)
    copy_tokens(stage.keys.index(own), ckv + own * HALF, end - first, STRIDE_CKV, WIDE)
    copy_done(stage.ready.index(own))
    mbarrier.wait(stage.free.index(other), phase)
    copy_tokens(stage.keys.index(other), ckv + other * HALF, end - first, STRIDE_CKV, WIDE)
    copy_tokens(stage.rest, kpe, end - first, STRIDE_KPE, NARROW)
    copy_done(stage.ready.index(other))


@gluon.jit
def tma_load(block, cache, page, token, column, barrier):
    """Let the copy engine bring ``block [tokens, columns]`` and tell."""
    block = block._reinterpret(block.dtype, [1, block.shape[0], block.shape[1]], BLOCK)
    tma.async_copy_global_to_shared(cache, [page, token, column], barrier, block)


@gluon.jit
def copy_block(own: gl.constexpr, stage, maps, page, token, phase):
    """Start to copy the block from ``token`` of ``page`` on, first the half of the values of warpgroup ``own``.

    It is to multiply the block with the queries. The other one has the rest of the keys free last.
    """
    other: gl.constexpr = 1 - own
    ckv, kpe = maps
    HALF_BYTES: gl.constexpr = TOKENS * HALF * 2
    mbarrier.wait(stage.free.index(own), phase)
    mbarrier.expect(stage.ready.index(own), HALF_BYTES)
    tma_load(stage.keys.index(own), ckv, page, token, own * HALF, stage.ready.index(own))
    mbarrier.wait(stage.free.index(other), phase)
    mbarrier.expect(stage.ready.index(other), HALF_BYTES + TOKENS * KPE * 2)
    tma_load(stage.keys.index(other), ckv, page, token, other * HALF, stage.ready.index(other))
    tma_load(stage.rest, kpe, page, token, 0, stage.ready.index(other))


@gluon.jit
def copy_next(
    own: gl.constexpr, stage, maps, caches, page_strides, page, first, end, phase,
    PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr,
):  # fmt: skip
    """Start to copy the tokens from ``first`` on, as many as a block has."""
    if first + TOKENS <= end:
        copy_block(own, stage, maps, page.to(gl.int32), first % PAGE_SIZE, phase)
    else:
        copy_cut_block(
            own, stage, caches, page_strides, page, first, end, phase, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE
        )  # fmt: skip


@gluon.jit
def copy_all(
    given, HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, STRIDE_CKV: gl.constexpr, STRIDE_KPE: gl.constexpr
):  # fmt: skip
    """The role of the warpgroup that copies."""
    query, query_ready, stages, q, q_strides, maps, caches, page_strides, pages, tile, rows = given
    kv_indices, page_start, max_pages, num_pages = pages
    begin, end = tile.start, tile.end
    even = load_page(kv_indices, page_start + begin // PAGE_SIZE, max_pages, num_pages)
    odd = load_page(kv_indices, page_start + (begin + TOKENS) // PAGE_SIZE, max_pages, num_pages)
    query_v, query_k = query
    for half in gl.static_range(2):
        copy_queries(query_v.index(half), q[0] + half * HALF, tile, rows, q_strides[0], q_strides[1], HEADS, WIDE)
    copy_queries(query_k, q[1], tile, rows, q_strides[2], q_strides[3], HEADS, NARROW)
    async_copy.mbarrier_arrive(query_ready, increment_count=False)
    phase = 1
    for first in range(begin, gl.maximum(end, begin + 1), 2 * TOKENS):
        then, after = first + TOKENS, first + 2 * TOKENS
        now_even, now_odd = even, odd
        even = load_page(kv_indices, page_start + after // PAGE_SIZE, max_pages, num_pages)
        odd = load_page(kv_indices, page_start + (after + TOKENS) // PAGE_SIZE, max_pages, num_pages)
        copy_next(
            0, stages[0], maps, caches, page_strides, now_even, first, end, phase, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE
        )  # fmt: skip
        if then < end:
            copy_next(
                1, stages[1], maps, caches, page_strides, now_odd, then, end, phase, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE
            )  # fmt: skip
        phase ^= 1


@gluon.jit
def multiply_keys(own: gl.constexpr, opaque_zero, query, stage, phase, LOGITS: gl.constexpr):
    """Start to multiply the queries with the block in ``stage``; ``nil`` is 0."""
    query_v, query_k = query
    other: gl.constexpr = 1 - own
    logits = gl.zeros([PAIRS, TOKENS], gl.float32, LOGITS)
    mbarrier.wait(stage.ready.index(own), phase)
    key = stage.keys.index(own + opaque_zero).permute([1, 0])
    logits = warpgroup_mma(query_v.index(own + opaque_zero), key, logits, use_acc=False, is_async=True)
    mbarrier.wait(stage.ready.index(other), phase)
    key = stage.keys.index(other + opaque_zero).permute([1, 0])
    logits = warpgroup_mma(query_v.index(other + opaque_zero), key, logits, is_async=True)
    return warpgroup_mma(query_k, stage.rest.permute([1, 0]), logits, is_async=True)


@gluon.jit
def multiply_theirs(own: gl.constexpr, stage, exchange, state, phase):
    """Start to multiply the other warpgroup's weights with this one's half of the values of their block."""
    m, total, acc = state
    other: gl.constexpr = 1 - own
    mbarrier.wait(exchange.weighed.index(other), phase)
    top = load_shared(exchange.tops.index(other), m)
    decay = exp2(m - finite(top))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    return top, total * decay, warpgroup_mma(stage.rest, stage.keys.index(own), acc, is_async=True)


@gluon.jit
def hide(logits, first, end, row_position, CAUSAL: gl.constexpr):
    """``logits [pairs, tokens]`` of the tokens from ``first`` on, -inf where a row does not see one."""
    tokens = first + gl.arange(0, TOKENS, gl.SliceLayout(0, logits.type.layout))
    bound = gl.minimum(end, row_position + 1) if CAUSAL else end + 0 * row_position
    return gl.where(tokens[None, :] < bound[:, None], logits, float("-inf"))


@gluon.jit
def softmax_step(own: gl.constexpr, logits, exchange, m, total, factor):
    """``(largest logits, weights, decay of earlier sums, sums)``."""
    top = gl.maximum(m, gl.max(logits, 1) * factor)
    store_shared(exchange.tops.index(own), top)
    decay = exp2(m - finite(top))
    weight = exp2(logits * factor - finite(top)[:, None])
    return top, weight, decay, total * decay + gl.sum(weight, 1)


@gluon.jit
def multiply_own(own: gl.constexpr, stage, exchange, acc, weight, decay, WEIGHTS: gl.constexpr):
    """Give the weights to the other warpgroup and multiply them with this one's half of the values."""
    weights = weight.to(stage.rest.dtype)
    stage.rest.store(weights)
    fence_async_shared()
    mbarrier.arrive(exchange.weighed.index(own))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = gl.convert_layout(weights, WEIGHTS, assert_trivial=True)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, stage.keys.index(own), acc, is_async=True)])
    mbarrier.arrive(stage.free.index(own))
    return acc


@gluon.jit
def attend_half(
    own: gl.constexpr, given, HEADS: gl.constexpr, TILE_ROWS: gl.constexpr, CAUSAL: gl.constexpr, LSE: gl.constexpr
):  # fmt: skip
    """The role of the warpgroup that multiplies the queries with blocks ``own``, ``own + 2`` and so on."""
    query, stages, query_ready, exchange, totals, done, out, lse, partial, tile, rows, slots, factor = given
    begin, end = tile.start, tile.end
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    mine, theirs = stages[own], stages[1 - own]
    their_free = theirs.free.index(own)
    row_position = tile.position + (tile.first_pair + gl.arange(0, PAIRS, gl.SliceLayout(1, LOGITS))) // HEADS
    first_position = tile.position + tile.first_pair // HEADS
    m = gl.full([PAIRS], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    total = gl.zeros([PAIRS], gl.float32, gl.SliceLayout(1, LOGITS))
    acc = gl.zeros([PAIRS, HALF], gl.float32, VALUES)
    mbarrier.wait(query_ready, 0)
    fence_async_shared()
    phase, their_phase = 0, 0
    start = begin + TOKENS
    if own == 0:  # the first block of all, perhaps of no tokens
        logits = warpgroup_mma_wait(0, deps=[multiply_keys(own, 0, query, mine, phase, LOGITS)])
        logits = hide(logits, begin, end, row_position, CAUSAL)
        m, weight, decay, total = softmax_step(own, logits, exchange, m, total, factor)
        acc = multiply_own(own, mine, exchange, acc, weight, decay, WEIGHTS)
        phase, start = 1, begin + 2 * TOKENS
    for first in range(start, end, 2 * TOKENS):
        opaque_zero = (
            first >> 31
        )  # 0, which the assembler cannot know: it would keep the addresses of all operands, and spill
        if own == 1:
            logits = multiply_keys(own, opaque_zero, query, mine, phase, LOGITS)
            m, total, acc = multiply_theirs(own, theirs, exchange, (m, total, acc), their_phase)
            logits = warpgroup_mma_wait(1, deps=[logits])
        else:
            m, total, acc = multiply_theirs(own, theirs, exchange, (m, total, acc), their_phase)
            logits = multiply_keys(own, opaque_zero, query, mine, phase, LOGITS)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(their_free)
            logits = warpgroup_mma_wait(0, deps=[logits])
        if first + TOKENS > (gl.minimum(end, first_position + 1) if CAUSAL else end):
            logits = hide(logits, first, end, row_position, CAUSAL)
        m, weight, decay, total = softmax_step(own, logits, exchange, m, total, factor)
        if own == 1:
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(their_free)
        acc = multiply_own(own, mine, exchange, acc, weight, decay, WEIGHTS)
        phase, their_phase = phase ^ 1, their_phase ^ 1
    num_blocks = gl.maximum((end - begin + TOKENS - 1) // TOKENS, 1)
    if num_blocks % 2 == own:  # the last block was the other's: 1 + own blocks are of this kind
        m, total, acc = multiply_theirs(own, theirs, exchange, (m, total, acc), their_phase)
        acc = warpgroup_mma_wait(0, deps=[acc])

    store_shared(totals.index(own), total)
    mbarrier.arrive(done)
    mbarrier.wait(done, 0)
    total += load_shared(totals.index(1 - own), total)
    value = acc * gl.convert_layout(inverse(total), gl.SliceLayout(1, VALUES))[:, None]
    d = own * HALF + gl.arange(0, HALF, gl.SliceLayout(0, VALUES))
    tile_row, head, used = locate(tile, tile.first_pair, rows, LOGITS, HEADS)
    value_row, value_head, value_used = locate(tile, tile.first_pair, rows, VALUES, HEADS)
    if tile.slot >= 0:
        slot_row = tile.slot.to(gl.int64) * TILE_ROWS
        at = (slot_row + value_row) * HEADS + value_head
        there = value_used & (tile.slot < slots)
        gl.store(partial + at[:, None] * CKV + d[None, :], value, mask=there[:, None])
        partial_sums = partial + slots.to(gl.int64) * (TILE_ROWS * HEADS * CKV)
        if own == 0:
            sums_at = partial_sums + (slot_row + tile_row) * HEADS + head
            gl.store(sums_at, log_sum_exp(m, total), mask=used & (tile.slot < slots))
    else:
        at = (tile.row + value_row).to(gl.int64) * HEADS + value_head
        gl.store(out + at[:, None] * CKV + d[None, :], value.to(out.dtype.element_ty), mask=value_used[:, None])
        if LSE and own == 0:
            gl.store(lse + (tile.row + tile_row).to(gl.int64) * HEADS + head, log_sum_exp(m, total), mask=used)


@gluon.jit
def allocate_stage(DTYPE: gl.constexpr):
    keys = gl.allocate_shared_memory(DTYPE, [2, TOKENS, HALF], OPERAND)
    rest = gl.allocate_shared_memory(DTYPE, [TOKENS, KPE], OPERAND)
    return Stage(keys, rest, allocate_barriers(2, 1), allocate_barriers(2, 1))


@gluon.jit(do_not_specialize=["scale", "rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"])
def mla_kernel(
    q_nope,  # [rows, HEADS, 512]
    q_pe,  # [rows, HEADS, 64]
    ckv,  # [num_pages, PAGE_SIZE, 512]
    kpe,  # [num_pages, PAGE_SIZE, 64]
    ckv_map,  # the same for the copy engine
    kpe_map,
    out,  # [rows, HEADS, 512]
    lse,  # [rows, HEADS] or [0]
    partial,  # [slots, TILE_ROWS, HEADS, 512], then the same without 512
    qo_indptr,  # [max_batch + 1]
    kv_indices,  # [max_pages]
    work,  # [max_items, 8]
    scale,
    rows,
    num_pages,
    max_pages,
    max_items,
    max_batch,
    slots,
    stride_q_row,
    stride_q_head,
    stride_qb_row,
    stride_qb_head,
    stride_ckv_page,
    stride_kpe_page,
    STRIDE_CKV: gl.constexpr,  # of a token
    STRIDE_KPE: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,  # a multiple of 64
    CAUSAL: gl.constexpr,
    LSE: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        acquire()
    BLOCKS: gl.constexpr = (TILE_ROWS * HEADS + PAIRS - 1) // PAIRS
    item, num_items = gl.program_id(0) // BLOCKS, gl.num_programs(0) // BLOCKS
    first_pair = gl.program_id(0) % BLOCKS * PAIRS
    row, count, begin, end, position, page_start, slot = load_item(
        work,
        item,
        num_items,
        max_items,
        qo_indptr,
        max_batch,
        rows,
        num_pages,
        max_pages,
        0,
        TILE_ROWS,
        True,
        PAGE_SIZE,
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    last_row = gl.minimum((first_pair + PAIRS - 1) // HEADS, count - 1)
    if first_pair // HEADS > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)

    DTYPE: gl.constexpr = q_nope.dtype.element_ty
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    query = (
        gl.allocate_shared_memory(DTYPE, [2, PAIRS, HALF], OPERAND),
        gl.allocate_shared_memory(DTYPE, [PAIRS, KPE], OPERAND),
    )
    stages = (allocate_stage(DTYPE), allocate_stage(DTYPE))
    tops = gl.allocate_shared_memory(gl.float32, [2, PAIRS], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [2, PAIRS], PLAIN)
    exchange = Exchange(tops, allocate_barriers(2, 1))
    query_ready, done = allocate_barriers(1, 32 * WARPS).index(0), allocate_barriers(1, 2).index(0)
    begin = bounded(begin // TOKENS * TOKENS, end)
    tile = Tile(row, count, position, begin, end, slot, first_pair, 0)
    attended = (
        query, stages, query_ready, exchange, totals, done, out, lse, partial, tile, rows, slots, scale * LOG2E
    )  # fmt: skip
    copied = (
        query, query_ready, stages, (q_nope, q_pe), (stride_q_row, stride_q_head, stride_qb_row, stride_qb_head),
        (ckv_map, kpe_map), (ckv, kpe), (stride_ckv_page, stride_kpe_page),
        (kv_indices, page_start, max_pages, num_pages), tile, rows,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (copy_all, (copied, HEADS, PAGE_SIZE, STRIDE_CKV, STRIDE_KPE)),
            (attend_half, (0, attended, HEADS, TILE_ROWS, CAUSAL, LSE)),
            (attend_half, (1, attended, HEADS, TILE_ROWS, CAUSAL, LSE)),
        ],
        [WARPS, WARPS],
        [REGISTERS, REGISTERS],
    )


def described(cache: Tensor) -> TensorDescriptor:
    block = [1, TOKENS.value, min(HALF.value, cache.shape[2])]
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), block, BLOCK.value)


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
    out, lse = allocate(q_nope, return_lse=return_lse)
    o, p = AttentionOptions(**options), PrefillPlan(*plan)
    problem, partials = PlanProblem.of(p.problem), num_partials(p)
    (rows, heads), tile_rows, max_batch = q_nope.shape[:2], problem.tile_rows, p.kv_len.shape[0]
    num_items, pdl = triton.cdiv(rows, tile_rows) + max_batch + partials, read_plan_early(out, max_batch)
    caches = ckv_cache, kpe_cache
    launch(
        mla_kernel,
        (num_items * triton.cdiv(tile_rows * heads, PAIRS.value),),
        (q_nope, q_pe, *caches, *map(described, caches), out, lse, workspace, p.qo_indptr, p.kv_indices, p.work),
        (
            *(MLA_SM_SCALE if o.sm_scale is None else o.sm_scale, rows, ckv_cache.shape[0]),
            *(p.kv_indices.shape[0], p.work.shape[0], max_batch, partials),
        ),
        (*q_nope.stride()[:2], *q_pe.stride()[:2], ckv_cache.stride(0), kpe_cache.stride(0)),
        (
            *(ckv_cache.stride(1), kpe_cache.stride(1), heads, tile_rows, problem.page_size),
            *(o.causal, lse.dim() > 1, pdl),
        ),
        Options(WARPS.value, launch_pdl=pdl),
    )
    if partials:
        merge_tiles(out, lse, workspace, None, p)
    return out, lse
