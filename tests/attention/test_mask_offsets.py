"""Offsets into packed masks of more than 2^31 bits or bytes need 64 bits. No such mask is allocated here."""

from __future__ import annotations

import pytest
import torch
from attn_ops.kernels.reference.masks import byte_offsets, unpack
from helpers.backends import INTERPRETER, TRITON
from torch import Tensor

from attn_ops import PrefillPlanner

ROWS, TOKENS, REQUESTS = 70_000, 70_001, 5
"""Query rows and KV tokens of each request: 4.9e9 bits, or 612508750 bytes."""

BYTES = (ROWS * TOKENS + 7) // 8


def _lengths(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """``qo_indptr`` and ``kv_len``."""
    qo_indptr = torch.arange(REQUESTS + 1, dtype=torch.int32, device=device) * ROWS
    return qo_indptr, torch.full((REQUESTS,), TOKENS, dtype=torch.int32, device=device)


def test_the_reference_counts_bytes_in_64_bits() -> None:
    sizes = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "max_kv_len": TOKENS}
    plan = PrefillPlanner(REQUESTS, 1, 0, **sizes).state
    qo_indptr, kv_len = _lengths()
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


@pytest.mark.parametrize(("device", "backend"), [TRITON, INTERPRETER])
def test_the_kernels_count_bytes_and_bits_in_64_bits(device: str, backend: str) -> None:
    triton = pytest.importorskip("triton")
    from helpers.mask_kernels import mask_bits_kernel, mask_offset_kernel

    qo_indptr, kv_len = _lengths(device)
    offsets = torch.zeros(REQUESTS + 1, dtype=torch.int64, device=device)
    mask_offset_kernel[(REQUESTS + 1,)](qo_indptr, kv_len, offsets, REQUESTS, BLOCK=triton.next_power_of_2(REQUESTS))
    assert offsets.tolist() == [BYTES * b for b in range(REQUESTS + 1)]

    first_bit = (ROWS - 1) * TOKENS
    mask = torch.tensor([0b10110010, 0b01], dtype=torch.uint8, device=device)
    bits = torch.zeros(8, dtype=torch.int32, device=device)
    mask_bits_kernel[(1,)](mask, bits, -(first_bit // 8), ROWS - 1, TOKENS, 2, TOKEN_BLOCK=8)
    skipped = first_bit % 8
    assert bits.tolist() == [(0b01_10110010 >> (skipped + i)) & 1 for i in range(8)]
