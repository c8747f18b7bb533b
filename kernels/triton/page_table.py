"""Ops on page tables, each in one launch: every program looks for its places in the lengths of all requests."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import Options, launch
from attn_ops.kernels.triton.search import CHUNK, LOG_CHUNK, count_at_most, find_segment
from attn_ops.meta.outputs import batch_indices_positions as allocate_places
from attn_ops.meta.outputs import page_table as allocate_table
from attn_ops.meta.outputs import seq_lens as allocate_lengths
from torch import Tensor

BLOCK = 512
"""Elements of the result that a program makes."""


@triton.jit(do_not_specialize=["batch", "nnz"])
def batch_indices_positions_kernel(
    append_indptr,  # [batch + 1]
    seq_lens,  # [batch]
    batch_indices,  # [nnz]
    positions,  # [nnz]
    batch,
    nnz,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, batch + 1, CHUNK):
        i = first + tl.arange(0, CHUNK)
        begins = tl.load(append_indptr + i, mask=i <= batch, other=2**31 - 1)
        request += count_at_most(begins, row, CHUNK, LOG_CHUNK)
    used = within(request, batch)
    after = row - tl.load(append_indptr + 1 + request, mask=used, other=0)
    position = tl.load(seq_lens + request, mask=used, other=0) + after
    tl.store(batch_indices + row, tl.where(used, request, -1), mask=row < nnz)
    tl.store(positions + row, tl.where(used, position, -1), mask=row < nnz)


@triton.jit(do_not_specialize=["batch"])
def seq_lens_kernel(
    kv_indptr,  # [batch + 1]
    kv_last_page_len,  # [batch]
    out,  # [batch]
    batch,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < batch
    pages = tl.load(kv_indptr + 1 + i, mask=mask, other=0) - tl.load(kv_indptr + i, mask=mask, other=0)
    last = tl.load(kv_last_page_len + i, mask=mask, other=0)
    tl.store(out + i, tl.where(pages > 0, (pages - 1) * PAGE_SIZE + last, 0), mask=mask)


@triton.jit(do_not_specialize=["batch", "width", "places"])
def page_table_kernel(
    block_tables,  # [batch, width]
    seq_lens,  # [batch]
    kv_indptr,  # [batch + 1]
    kv_indices,  # [places]
    kv_last_page_len,  # [batch]
    batch,
    width,
    places,
    stride_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = tl.full((BLOCK,), -1, tl.int32), tl.zeros((BLOCK,), tl.int32)
    total = 0
    for first in range(0, batch, CHUNK):
        i = first + tl.arange(0, CHUNK)
        length = tl.load(seq_lens + i, mask=i < batch, other=0)
        pages = tl.minimum(tl.maximum(tl.cdiv(length, PAGE_SIZE), 0), width)
        ends = total + tl.cumsum(pages, 0)
        here, request, offset = find_segment(ends, pages, place, total, CHUNK, LOG_CHUNK)
        row, column = tl.where(here, first + request, row), tl.where(here, offset, column)
        if tl.program_id(0) == 0:
            tl.store(kv_indptr + 1 + i, ends, mask=i < batch)
            tl.store(kv_last_page_len + i, tl.where(pages > 0, (length - 1) % PAGE_SIZE + 1, 0), mask=i < batch)
        total = tl.max(ends, 0)
    if tl.program_id(0) == 0:
        tl.store(kv_indptr, 0)
    page = tl.load(block_tables + row.to(tl.int64) * stride_row + column, mask=row >= 0, other=0)
    tl.store(kv_indices + place, page, mask=place < places)


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    batch_indices, positions = allocate_places(append_indptr, seq_lens, nnz)
    launch(
        batch_indices_positions_kernel,
        (triton.cdiv(nnz, BLOCK),),
        (append_indptr, seq_lens, batch_indices, positions),
        (seq_lens.shape[0], nnz),
        (),
        (BLOCK, CHUNK, LOG_CHUNK),
        Options(),
    )
    return batch_indices, positions


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    out = allocate_lengths(kv_indptr, kv_last_page_len, page_size)
    batch = out.shape[0]
    tensors, constants = (kv_indptr, kv_last_page_len, out), (page_size, BLOCK)
    launch(seq_lens_kernel, (triton.cdiv(batch, BLOCK),), tensors, (batch,), (), constants, Options())
    return out


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    kv_indptr, kv_indices, kv_last_page_len = allocate_table(block_tables, seq_lens, page_size)
    (batch, width), places = block_tables.shape, kv_indices.shape[0]
    launch(
        page_table_kernel,
        (1 + places // BLOCK,),
        (block_tables, seq_lens, kv_indptr, kv_indices, kv_last_page_len),
        (batch, width, places),
        (block_tables.stride(0),),
        (page_size, BLOCK, CHUNK, LOG_CHUNK),
        Options(),
    )
    return kv_indptr, kv_indices, kv_last_page_len
