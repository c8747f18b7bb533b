"""Steps that the planning kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_ops.kernels.triton.context import tokens_before
from attn_ops.kernels.triton.pdl import publish

COPY_PAGES = 4096
"""Page numbers that a program copies."""


@triton.jit
def count_tokens(first_page, end_page, last_page_len, max_pages, PAGE_SIZE: tl.constexpr):
    """KV tokens of requests; page numbers and last page lengths out of range are clamped."""
    pages = tl.maximum(tl.minimum(end_page, max_pages), 0) - tl.maximum(first_page, 0)
    tokens = (pages - 1) * PAGE_SIZE + tl.minimum(tl.maximum(last_page_len, 1), PAGE_SIZE)
    return tl.where(pages > 0, tokens, 0)


@triton.jit
def window_start(seq_len, WINDOW: tl.constexpr, SHARD: tl.constexpr):
    """The rank's first token that the last row of a request of ``seq_len`` tokens sees."""
    return tl.maximum(tokens_before(seq_len - WINDOW, SHARD), 0) if WINDOW else tl.zeros_like(seq_len)


@triton.jit
def blocks_of_decode(
    kv_len, seq_len, CONTEXT: tl.constexpr, WINDOW: tl.constexpr, SHARD: tl.constexpr, KV_BLOCK: tl.constexpr
):
    """``(kv_len, start, first_block, blocks)`` of requests: the tokens that their decode row sees, as KV blocks.

    kv_len   tokens of this rank; the returned number is 0 if the row sees none of them
    seq_len  tokens on all ranks, which are more with CONTEXT
    start    the first token inside the window
    """
    start = window_start(seq_len, WINDOW, SHARD)
    if CONTEXT:  # another rank may hold the last token
        kv_len = tl.where(start < kv_len, kv_len, 0)
        start = tl.minimum(start, kv_len)
    first_block = start // KV_BLOCK
    return kv_len, start, first_block, tl.cdiv(kv_len, KV_BLOCK) - first_block


@triton.jit
def copy_page_numbers(source, target, count, chunk, COPY_PAGES: tl.constexpr):
    """Copy and publish chunk number ``chunk`` of ``count`` page numbers."""
    i = chunk * COPY_PAGES + tl.arange(0, COPY_PAGES)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)
    publish(target + chunk * COPY_PAGES)


@triton.jit
def clear(target, count, BLOCK: tl.constexpr):
    """Set this program's blocks of ``target [count]`` to 0."""
    for i in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = i + tl.arange(0, BLOCK)
        tl.store(target + at, tl.zeros((BLOCK,), tl.int32), mask=at < count)


@triton.jit
def at_previous(values, i, first):
    """``values[i - 1]``, or ``first`` where i is 0."""
    return tl.where(i > 0, tl.gather(values, tl.maximum(i - 1, 0), 0), first)
