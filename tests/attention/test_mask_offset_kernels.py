"""The mask functions of the ``triton`` backend count bits and bytes of a mask beyond 2^31 in 64 bits."""

from __future__ import annotations

import pytest
import torch
from helpers.backends import each_triton

triton = pytest.importorskip("triton")
tl = triton.language

from attn_ops.kernels.triton.masks import mask_bits, mask_offset  # noqa: E402

ROWS, TOKENS, REQUESTS = 70_000, 70_001, 5
"""Query rows and KV tokens of each request: 4.9e9 bits, or 612508750 bytes."""

BYTES = (ROWS * TOKENS + 7) // 8


@triton.jit
def offset_kernel(qo_indptr, kv_len, offsets, max_batch, BLOCK: tl.constexpr):
    """Grid: (requests + 1). Store the byte at which each request's mask begins, and where the last one ends."""
    request = tl.program_id(0)
    tl.store(offsets + request, mask_offset(qo_indptr, kv_len, request, max_batch, BLOCK))


@triton.jit(do_not_specialize=["offset", "row", "length", "mask_bytes"])
def bits_kernel(mask, out, offset, row, length, mask_bytes, TOKEN_BLOCK: tl.constexpr):
    """Grid: (1). Store the bits of the first TOKEN_BLOCK tokens of ``row`` of a mask that begins at byte ``offset``."""
    rows, tokens = row + tl.zeros((1,), tl.int32), tl.arange(0, TOKEN_BLOCK)
    bits = mask_bits(mask, tl.cast(offset, tl.int64), rows, length, tokens, mask_bytes)
    tl.store(out + tokens, tl.sum(bits.to(tl.int32), 0))


@each_triton
def test_bytes_before_a_request(device: str, backend: str) -> None:
    qo_indptr = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device) * ROWS
    kv_len = torch.full((REQUESTS,), TOKENS, dtype=torch.int32, device=device)
    offsets = torch.zeros(REQUESTS + 1, dtype=torch.int64, device=device)
    offset_kernel[(REQUESTS + 1,)](qo_indptr, kv_len, offsets, REQUESTS, BLOCK=8)
    assert offsets.tolist() == [BYTES * b for b in range(REQUESTS + 1)]


@each_triton
def test_bits_before_a_row(device: str, backend: str) -> None:
    """The mask begins so far before the memory that its last row is at the beginning of the memory."""
    first_bit = (ROWS - 1) * TOKENS
    mask = torch.tensor([0b10110010, 0b01], dtype=torch.uint8, device=device)
    bits = torch.zeros(8, dtype=torch.int32, device=device)
    bits_kernel[(1,)](mask, bits, -(first_bit // 8), ROWS - 1, TOKENS, 2, TOKEN_BLOCK=8)
    skipped = first_bit % 8
    assert bits.tolist() == [(0b01_10110010 >> (skipped + i)) & 1 for i in range(8)]
