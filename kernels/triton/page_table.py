"""Ops on page tables, one launch each.

Every program scans the lengths of all requests in chunks to find the requests of its own elements, so that no second
kernel and no scan across programs is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import launch
from attn_ops.kernels.triton.search import CHUNK, LOG_CHUNK, count_at_most, find_segment
from attn_ops.meta.outputs import batch_indices_positions as allocate_batch_indices_positions
from attn_ops.meta.outputs import page_table as allocate_page_table
from attn_ops.meta.outputs import seq_lens as allocate_seq_lens

BLOCK = 512
"""Elements of the result that a program computes."""


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
    """Grid: (blocks of BLOCK appended tokens).

    A program owns BLOCK consecutive tokens and finds the request and position of each; tokens of no request get -1
    and -1.
    Loop invariant: ``request`` is the number of entries of ``append_indptr[:first]`` that are at most ``row``, minus 1.
    Bound by latency: ``cdiv(batch + 1, CHUNK)`` dependent steps of a search.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, batch + 1, CHUNK):
        i = first + tl.arange(0, CHUNK)
        begins = tl.load(append_indptr + i, mask=i <= batch, other=2**31 - 1)
        request += count_at_most(begins, row, CHUNK, LOG_CHUNK)
    used = within(request, batch)
    before_end = row - tl.load(append_indptr + 1 + request, mask=used, other=0)  # -1 for the request's last token
    position = tl.load(seq_lens + request, mask=used, other=0) + before_end
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
    """Grid: (blocks of BLOCK requests).

    A program owns BLOCK requests and computes the length of each from its number of pages and the tokens in the last.
    Bound by launch latency.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < batch
    pages = tl.load(kv_indptr + 1 + i, mask=mask, other=0) - tl.load(kv_indptr + i, mask=mask, other=0)
    last = tl.load(kv_last_page_len + i, mask=mask, other=0)
    tl.store(out + i, tl.where(pages > 0, (pages - 1) * PAGE_SIZE + last, 0), mask=mask)


@triton.jit(do_not_specialize=["batch", "max_pages", "num_indices"])
def page_table_kernel(
    block_tables,  # [batch, max_pages]
    seq_lens,  # [batch]
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    kv_last_page_len,  # [batch]
    batch,
    max_pages,  # of one request
    num_indices,
    stride_row,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    """Grid: (blocks of BLOCK entries of ``kv_indices``).

    A program owns BLOCK consecutive entries and gathers their pages from the block table; entries past the last page
    are 0. Program 0 also writes ``kv_indptr`` and ``kv_last_page_len``. A length past a row of the table fills the row.
    Loop invariant: ``total`` is the number of pages of the first ``first`` requests, and ``row``, ``column`` locate in
    the block table every owned entry below ``total``.
    Bound by latency: ``cdiv(batch, CHUNK)`` dependent steps of a scan and a search.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = tl.full((BLOCK,), -1, tl.int32), tl.zeros((BLOCK,), tl.int32)
    total = 0
    for first in range(0, batch, CHUNK):
        i = first + tl.arange(0, CHUNK)
        length = tl.load(seq_lens + i, mask=i < batch, other=0)
        pages = tl.minimum(tl.where(length > 0, (length - 1) // PAGE_SIZE + 1, 0), max_pages)
        ends = total + tl.cumsum(pages, 0)
        found, request, offset = find_segment(ends, pages, entry, total, CHUNK, LOG_CHUNK)
        row, column = tl.where(found, first + request, row), tl.where(found, offset, column)
        if tl.program_id(0) == 0:
            tl.store(kv_indptr + 1 + i, ends, mask=i < batch)
            last = tl.minimum(length - (pages - 1) * PAGE_SIZE, PAGE_SIZE)
            tl.store(kv_last_page_len + i, tl.where(pages > 0, last, 0), mask=i < batch)
        total = tl.max(ends, 0)
    if tl.program_id(0) == 0:
        tl.store(kv_indptr, 0)
    page = tl.load(block_tables + row.to(tl.int64) * stride_row + column, mask=row >= 0, other=0)
    tl.store(kv_indices + entry, page, mask=entry < num_indices)


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int) -> tuple[Tensor, Tensor]:
    batch_indices, positions = allocate_batch_indices_positions(append_indptr, seq_lens, nnz)
    launch(
        batch_indices_positions_kernel,
        (triton.cdiv(nnz, BLOCK),),
        append_indptr=append_indptr,
        seq_lens=seq_lens,
        batch_indices=batch_indices,
        positions=positions,
        batch=seq_lens.shape[0],
        nnz=nnz,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        LOG_CHUNK=LOG_CHUNK,
    )
    return batch_indices, positions


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    out = allocate_seq_lens(kv_indptr, kv_last_page_len, page_size)
    batch = out.shape[0]
    launch(
        seq_lens_kernel,
        (triton.cdiv(batch, BLOCK),),
        kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
        out=out,
        batch=batch,
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
    )
    return out


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    kv_indptr, kv_indices, kv_last_page_len = allocate_page_table(block_tables, seq_lens, page_size)
    (batch, max_pages), num_indices = block_tables.shape, kv_indices.shape[0]
    launch(
        page_table_kernel,
        (1 + num_indices // BLOCK,),
        block_tables=block_tables,
        seq_lens=seq_lens,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        batch=batch,
        max_pages=max_pages,
        num_indices=num_indices,
        stride_row=block_tables.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        LOG_CHUNK=LOG_CHUNK,
    )
    return kv_indptr, kv_indices, kv_last_page_len
