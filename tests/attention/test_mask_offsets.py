"""Offsets into packed masks of more than 2^31 bits or bytes need 64 bits. No such mask is allocated here."""

from __future__ import annotations

import torch

from attn_ops import PrefillPlanner
from attn_ops.kernels.reference.masks import byte_offsets, unpack

ROWS, TOKENS, REQUESTS = 70_000, 70_001, 5
"""Query rows and KV tokens of each request: 4.9e9 bits, or 612508750 bytes."""

BYTES = (ROWS * TOKENS + 7) // 8


def test_the_reference_counts_bytes_in_64_bits() -> None:
    sizes = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "max_kv_len": TOKENS}
    plan = PrefillPlanner(REQUESTS, 1, 0, **sizes).state
    qo_indptr = torch.arange(REQUESTS + 1, dtype=torch.int32) * ROWS
    kv_len = torch.full((REQUESTS,), TOKENS, dtype=torch.int32)
    offsets = byte_offsets(plan._replace(qo_indptr=qo_indptr, kv_len=kv_len))
    assert offsets.tolist() == [BYTES * b for b in range(REQUESTS)]
    assert BYTES * (REQUESTS - 1) > 2**31


def test_the_reference_counts_bits_in_64_bits() -> None:
    """The mask begins so far before the memory that its last row is at the beginning of the memory."""
    row, length = torch.tensor([[ROWS - 1]]), torch.tensor([TOKENS])
    first_bit = (ROWS - 1) * TOKENS
    mask = torch.tensor([0b10110010, 0b01], dtype=torch.uint8)
    bits = unpack(mask, torch.tensor([-(first_bit // 8)]), row, length, 8)
    skipped = first_bit % 8
    expected = [(0b01_10110010 >> (skipped + i)) & 1 > 0 for i in range(8)]
    assert bits.flatten().tolist() == expected
