"""This rank's pages of a page table whose pages are interleaved over several ranks: one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.indexing import within
from attn_ops.kernels.triton.launch import launch
from attn_ops.kernels.triton.page_table import BLOCK
from attn_ops.kernels.triton.search import CHUNK, LOG_CHUNK, find_segment
from attn_ops.meta.outputs import shard_page_table as allocate_shard_page_table


@triton.jit(do_not_specialize=["batch", "num_indices", "page_size", "rank", "world", "run"])
def shard_page_table_kernel(
    kv_indptr,  # [batch + 1]
    kv_indices,  # [num_indices]
    kv_last_page_len,  # [batch]
    own_indptr,  # [batch + 1]; this and those below are written
    own_indices,  # [num_indices]
    own_last_page_len,  # [batch]
    batch,
    num_indices,
    page_size,
    rank,
    world,
    run,  # pages that a rank holds in a row
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    """Grid: (blocks of BLOCK entries of ``own_indices``).

    A program owns BLOCK consecutive entries and gathers their pages; entries past the last page are 0. Program 0 also
    writes ``own_indptr`` and ``own_last_page_len``.
    Loop invariant: ``total`` is the number of own pages of the first ``first`` requests, and ``source`` is the place in
    ``kv_indices`` of every owned entry below ``total``.
    Bound by latency: ``cdiv(batch, CHUNK)`` dependent steps of a scan and a search.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.full((BLOCK,), -1, tl.int32)
    total = 0
    for first in range(0, batch, CHUNK):
        i = first + tl.arange(0, CHUNK)
        mask = i < batch
        begin = tl.minimum(tl.maximum(tl.load(kv_indptr + i, mask=mask, other=0), 0), num_indices)
        end = tl.minimum(tl.maximum(tl.load(kv_indptr + 1 + i, mask=mask, other=0), 0), num_indices)
        pages = tl.maximum(end - begin, 0)
        rest = tl.minimum(tl.maximum(pages % (run * world) - rank * run, 0), run)
        owned = pages // (run * world) * run + rest
        ends = total + tl.cumsum(owned, 0)
        found, request, offset = find_segment(ends, owned, entry, total, CHUNK, LOG_CHUNK)
        page = tl.gather(begin, request, 0) + (offset // run * world + rank) * run + offset % run
        source = tl.where(found, page, source)
        if tl.program_id(0) == 0:
            tl.store(own_indptr + 1 + i, ends, mask=mask)
            last = tl.load(kv_last_page_len + i, mask=mask, other=0)
            last = tl.where(tl.maximum(pages - 1, 0) // run % world == rank, last, page_size)
            tl.store(own_last_page_len + i, tl.where(owned > 0, last, 0), mask=mask)
        total = tl.max(ends, 0)
    if tl.program_id(0) == 0:
        tl.store(own_indptr, 0)
    page_number = tl.load(kv_indices + source, mask=within(source, num_indices), other=0)
    tl.store(own_indices + entry, page_number, mask=entry < num_indices)


def shard_page_table(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    rank: int,
    world: int,
    interleave: int,
) -> tuple[Tensor, Tensor, Tensor]:
    own = allocate_shard_page_table(kv_indptr, kv_indices, kv_last_page_len)
    num_indices = kv_indices.shape[0]
    launch(
        shard_page_table_kernel,
        (1 + num_indices // BLOCK,),
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        own_indptr=own[0],
        own_indices=own[1],
        own_last_page_len=own[2],
        batch=kv_last_page_len.shape[0],
        num_indices=num_indices,
        page_size=page_size,
        rank=rank,
        world=world,
        run=interleave // page_size,
        BLOCK=BLOCK,
        CHUNK=CHUNK,
        LOG_CHUNK=LOG_CHUNK,
    )
    return own
