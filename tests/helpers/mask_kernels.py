"""Kernels that store what the mask functions of the ``triton`` backend compute."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.masks import mask_bits, mask_offset


@triton.jit
def mask_offset_kernel(qo_indptr, kv_len, offsets, max_batch, BLOCK: tl.constexpr):
    """Grid: (requests + 1). Store the byte at which each request's mask begins, and where the last one ends."""
    request = tl.program_id(0)
    tl.store(offsets + request, mask_offset(qo_indptr, kv_len, request, max_batch, BLOCK))


@triton.jit(do_not_specialize=["offset", "row", "length", "mask_bytes"])
def mask_bits_kernel(mask, out, offset, row, length, mask_bytes, TOKEN_BLOCK: tl.constexpr):
    """Grid: (1). Store the bits of the first TOKEN_BLOCK tokens of ``row`` of a mask that begins at byte ``offset``."""
    rows, tokens = row + tl.zeros((1,), tl.int32), tl.arange(0, TOKEN_BLOCK)
    bits = mask_bits(mask, tl.cast(offset, tl.int64), rows, length, tokens, mask_bytes)
    tl.store(out + tokens, tl.sum(bits.to(tl.int32), 0))
