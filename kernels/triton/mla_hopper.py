"""MLA decode on Hopper, in Gluon: one program per work item and 64 of its pairs of a query row and a head.

Keys of 512 + 64, of which the first 512 are the values too, are read once, in blocks of 64 tokens of a page. Two
blocks are in shared memory: while one is multiplied the next is on its way. Two warpgroups share a block: each
multiplies the queries with half of its tokens, and the weights of all of them, which they exchange through shared
memory, with half of the values.

Packages of AOTInductor do without: they hold Triton alone. The work items and partial results are those of
:mod:`.prefill`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...plan import PlanProblem, PrefillPlan, num_pieces
from .hopper_steps import LONGEST_STRIDE, aligned, load_page
from .launch import Options, launch, starts_early
from .merge_tiles import merge_tiles
from .prefill import Options as AttentionOptions
from .primitives import LOG2E

CKV, KPE = gl.constexpr(512), gl.constexpr(64)
PAIRS, TOKENS = gl.constexpr(64), gl.constexpr(64)
WARPS = 8


@gluon.jit
def copy_part(block, cache, slot, count, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy ``[tokens, dim]`` from the token at ``cache + slot * STRIDE`` on; zeros from ``count`` on."""
    n = gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, block.shape[1], gl.SliceLayout(0, LAYOUT))
    at = cache + slot * STRIDE + (n[:, None] * STRIDE + d[None, :])
    async_copy.async_copy_global_to_shared(block, at, mask=n[:, None] < count)


@gluon.jit
def load_query(
    q, row, first_pair, rows, count, stride_row, stride_head,
    HEADS: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """``[PAIRS, DIM]`` of the query from pair ``first_pair`` of the tile on, 0 where there is none."""
    pair = first_pair + gl.arange(0, PAIRS, gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    tile_row, head = pair // HEADS, pair % HEADS
    used = (tile_row < count) & ((row + tile_row).to(gl.uint32) < rows.to(gl.uint32))
    at = (row + tile_row).to(gl.int64) * stride_row + head * stride_head
    return gl.load(q + at[:, None] + d[None, :], mask=used[:, None], other=0.0)


@gluon.jit
def store_pairs(out, lse, value, sums, first, pair, pair_of_sums, used, used_of_sums, LSE: gl.constexpr):
    """``value [pairs, dim]`` and ``sums [pairs]``, of which each has a layout of its own, from pair ``first`` on."""
    DIM: gl.constexpr = value.shape[1]
    d = gl.arange(0, DIM, gl.SliceLayout(0, value.type.layout))
    gl.store(out + (first + pair)[:, None] * DIM + d[None, :], value, mask=used[:, None])
    if LSE:
        gl.store(lse + first + pair_of_sums, sums, mask=used_of_sums)


@gluon.jit(do_not_specialize=["scale", "rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"])
def mla_kernel(
    q_nope,  # [rows, HEADS, 512]
    q_pe,  # [rows, HEADS, 64]
    ckv,  # [num_pages, PAGE_SIZE, 512]
    kpe,  # [num_pages, PAGE_SIZE, 64]
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
        gdc_wait()
        gdc_launch_dependents()
    M: gl.constexpr = PAIRS
    N: gl.constexpr = TOKENS
    DTYPE: gl.constexpr = q_nope.dtype.element_ty
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BLOCKS: gl.constexpr = (TILE_ROWS * HEADS + M - 1) // M
    TILE_PAIRS: gl.constexpr = TILE_ROWS * HEADS
    item, num_items = gl.program_id(0) // BLOCKS, gl.num_programs(0) // BLOCKS
    first_pair = gl.program_id(0) % BLOCKS * M
    pair = first_pair + gl.arange(0, M, gl.SliceLayout(1, VALUES))
    pair_s = first_pair + gl.arange(0, M, gl.SliceLayout(1, LOGITS))

    record, planned = work + item * 8, item < max_items
    row, count = gl.load(record, mask=planned, other=0), gl.load(record + 1, mask=planned, other=0)
    begin, end = gl.load(record + 2, mask=planned, other=0), gl.load(record + 3, mask=planned, other=0)
    position, page_start = gl.load(record + 4, mask=planned, other=0), gl.load(record + 5, mask=planned, other=0)
    slot = gl.load(record + 6, mask=planned, other=-1)
    if count <= 0:
        first = gl.load(qo_indptr + max_batch) + (num_items - 1 - item) * TILE_ROWS
        unused = (pair < TILE_PAIRS) & ((first + pair // HEADS).to(gl.uint32) < rows.to(gl.uint32))
        unused_s = (pair_s < TILE_PAIRS) & ((first + pair_s // HEADS).to(gl.uint32) < rows.to(gl.uint32))
        nothing = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        zeros = gl.zeros([M, CKV], DTYPE, VALUES)
        store_pairs(out, lse, zeros, nothing, first.to(gl.int64) * HEADS, pair, pair_s, unused, unused_s, LSE)
        return
    count, page_start = gl.minimum(count, TILE_ROWS), gl.maximum(page_start, 0)
    begin = gl.maximum(begin, 0) // N * N
    end = gl.minimum(end, gl.where(num_pages > 0, gl.maximum(max_pages - page_start, 0), 0) * PAGE_SIZE)
    last_row = gl.minimum((first_pair + M - 1) // HEADS, count - 1)
    if first_pair // HEADS > last_row:
        return
    if CAUSAL:
        end = gl.minimum(end, position + last_row + 1)

    keys = gl.allocate_shared_memory(DTYPE, [2, N, CKV], SHARED)
    parts = gl.allocate_shared_memory(DTYPE, [2, N, KPE], SHARED)
    page = load_page(kv_indices, page_start + begin // PAGE_SIZE, max_pages, num_pages)
    copy_part(keys.index(0), ckv + page * stride_ckv_page, begin % PAGE_SIZE, end - begin, STRIDE_CKV, WIDE)
    copy_part(parts.index(0), kpe + page * stride_kpe_page, begin % PAGE_SIZE, end - begin, STRIDE_KPE, NARROW)
    async_copy.commit_group()
    page = load_page(kv_indices, page_start + (begin + N) // PAGE_SIZE, max_pages, num_pages)
    part_a = load_query(q_nope, row, first_pair, rows, count, stride_q_row, stride_q_head, HEADS, CKV, WIDE)
    part_b = load_query(q_pe, row, first_pair, rows, count, stride_qb_row, stride_qb_head, HEADS, KPE, NARROW)
    query_a = gl.allocate_shared_memory(DTYPE, [M, CKV], SHARED, part_a)
    query_b = gl.allocate_shared_memory(DTYPE, [M, KPE], SHARED, part_b)
    weights = gl.allocate_shared_memory(DTYPE, [M, N], SHARED)

    factor = scale * LOG2E
    bound = gl.minimum(end, position + pair_s // HEADS + 1) if CAUSAL else end + 0 * pair_s
    n = gl.arange(0, N, gl.SliceLayout(0, LOGITS))
    m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
    totals = gl.zeros([M, N], gl.float32, LOGITS)
    acc = gl.zeros([M, CKV], gl.float32, VALUES)
    stage = 0
    for first in range(begin, end, N):
        async_copy.wait_group(0)
        fence_async_shared()
        block = keys.index(stage)
        logits = gl.zeros([M, N], gl.float32, LOGITS)
        logits = warpgroup_mma(query_b, parts.index(stage).permute([1, 0]), logits, use_acc=False, is_async=True)
        logits = warpgroup_mma(query_a, block.permute([1, 0]), logits, is_async=True)
        stage ^= 1
        then, slot_in_page = first + N, (first + N) % PAGE_SIZE
        copy_part(keys.index(stage), ckv + page * stride_ckv_page, slot_in_page, end - then, STRIDE_CKV, WIDE)
        copy_part(parts.index(stage), kpe + page * stride_kpe_page, slot_in_page, end - then, STRIDE_KPE, NARROW)
        async_copy.commit_group()
        page = load_page(kv_indices, page_start + (then + N) // PAGE_SIZE, max_pages, num_pages)
        logits = warpgroup_mma_wait(0, deps=[logits])
        logits = gl.where(first + n[None, :] < bound[:, None], logits, float("-inf"))
        top = gl.maximum(m, gl.max(logits, 1) * factor)
        anchor = gl.where(top == float("-inf"), 0.0, top)
        weight = gl.exp2(logits * factor - anchor[:, None])
        decay = gl.exp2(m - anchor)
        m, totals = top, totals * decay[:, None] + weight
        weights.store(weight.to(DTYPE))
        fence_async_shared()
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(weights, block, acc, is_async=True)])

    async_copy.wait_group(0)  # the last copies write zeros, where the sums below may have their scratch memory
    total = gl.sum(totals, 1)
    inverse = gl.where(total > 0.0, 1.0 / total, 0.0)
    value = acc * gl.convert_layout(inverse, gl.SliceLayout(1, VALUES))[:, None]
    sums = m + gl.log2(total)
    used = (pair // HEADS < count) & ((row + pair // HEADS).to(gl.uint32) < rows.to(gl.uint32))
    used_s = (pair_s // HEADS < count) & ((row + pair_s // HEADS).to(gl.uint32) < rows.to(gl.uint32))
    if slot >= 0:
        used, used_s = used & (slot < slots), used_s & (slot < slots)
        partial_sums = partial + slots.to(gl.int64) * (TILE_PAIRS * CKV)
        store_pairs(
            partial, partial_sums, value, sums, slot.to(gl.int64) * TILE_PAIRS, pair, pair_s, used, used_s, True
        )
    else:
        store_pairs(out, lse, value.to(DTYPE), sums, row.to(gl.int64) * HEADS, pair, pair_s, used, used_s, LSE)


def objections(
    q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, problem: PlanProblem, o: AttentionOptions
) -> list[str]:
    """Why the kernel does not run this call, which is then left to the general one."""
    caches = (ckv_cache, kpe_cache)
    tensors = q_nope, q_pe, *caches
    in_units = aligned(*tensors) and not any(stride % 8 for t in tensors for stride in t.stride()[:2])
    checks = [
        (q_nope.dtype in (torch.float16, torch.bfloat16), f"{q_nope.dtype} is not a 16-bit dtype"),
        (ckv_cache.dtype == q_nope.dtype, f"the cache is {ckv_cache.dtype}"),
        ((q_nope.shape[2], q_pe.shape[2]) == (CKV.value, KPE.value), "the head is not 512 + 64 wide"),
        (problem.page_size % TOKENS.value == 0, f"pages of {problem.page_size} are not whole blocks of 64 tokens"),
        (in_units and max(t.stride(1) for t in caches) <= LONGEST_STRIDE, "rows are not aligned to 16 bytes"),
        (problem.window == 0 and o.window_left < 0, "a window cuts blocks"),
        (o.logits_soft_cap == 0 and o.sinks is None and o.kv_scale is None, "a cap, sinks or scales are given"),
    ]
    return [reason for ok, reason in checks if not ok]


def attend(
    q: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    plan: PrefillPlan,
    workspace: Tensor,
    scale: float,
    causal: bool,
) -> None:
    """Write ``out`` and, unless it has no elements, ``lse``."""
    problem, pieces = PlanProblem.of(plan.problem), num_pieces(plan)
    (rows, heads), tile_rows, max_batch = q[0].shape[:2], problem.tile_rows, plan.kv_len.shape[0]
    num_items, pdl = triton.cdiv(rows, tile_rows) + max_batch + pieces, starts_early(out)
    launch(
        mla_kernel,
        (num_items * triton.cdiv(tile_rows * heads, PAIRS.value),),
        (*q, *caches, out, lse, workspace, plan.qo_indptr, plan.kv_indices, plan.work),
        (scale, rows, caches[0].shape[0], plan.kv_indices.shape[0], plan.work.shape[0], max_batch, pieces),
        (*q[0].stride()[:2], *q[1].stride()[:2], caches[0].stride(0), caches[1].stride(0)),
        (
            *(caches[0].stride(1), caches[1].stride(1), heads, tile_rows, problem.page_size),
            *(causal, lse.dim() > 1, pdl),
        ),
        Options(WARPS, launch_pdl=pdl),
    )
    if pieces:
        merge_tiles(out, lse, workspace, None, plan)
