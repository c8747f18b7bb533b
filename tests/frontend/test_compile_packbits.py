"""``segment_packbits`` in compiled code."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.page_tables import indptr

import attn_ops


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_segments_compile(device: str) -> None:
    """``attn_ops.segment_packbits`` in one graph for all offsets, whose values its number of bytes depends on."""
    compiled = torch.compile(attn_ops.segment_packbits, fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 17], [8, 1, 30], [0, 0, 0, 9, 2]):
        offsets = indptr(lengths)
        bits = torch.arange(int(offsets[-1])) % 3 != 1
        packed, byte_offsets = compiled(bits.to(device), offsets.to(device), "little")
        segments = [bits[a:b].numpy() for a, b in pairwise(offsets.tolist())]
        assert packed.tolist() == np.concatenate([np.packbits(s, bitorder="little") for s in segments]).tolist()
        assert byte_offsets.tolist() == indptr([-(-n // 8) for n in lengths]).tolist()
