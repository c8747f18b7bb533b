"""``attn::packbits`` and ``attn::segment_packbits`` against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.page_tables import indptr
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("cpu_calls_on_each_backend")

ORDERS = st.sampled_from(["big", "little"])
BITS = st.lists(st.booleans(), max_size=70)

MANY = [[j % 3 == 0 for j in range(i * 7 % 19)] for i in range(1100)]
"""More segments, and more bytes, than a program of the kernel handles at a time."""


@given(BITS, ORDERS, st.sampled_from([torch.bool, torch.uint8]))
@example([i % 7 < 3 for i in range(9001)], "big", torch.uint8)
def test_packbits(bits: list[bool], order: str, dtype: torch.dtype) -> None:
    """Every number but 0 is a set bit."""
    x = (torch.tensor(bits, dtype=torch.bool).to(torch.uint8) * 200).to(dtype)
    packed = torch.ops.attn.packbits(x, bitorder=order)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == np.packbits(np.array(bits, bool), bitorder=order).tolist()


def test_big_endian_is_the_default() -> None:
    one = torch.tensor([True, False])
    assert torch.ops.attn.packbits(one).tolist() == [128]
    assert torch.ops.attn.segment_packbits(one, indptr([1, 1]), 2)[0].tolist() == [128, 0]


@given(st.lists(BITS, max_size=6), ORDERS, st.integers(0, 3))
@example(MANY, "little", 2)
@example([[]] * 600 + [[True, True]], "big", 0)
def test_segment_packbits(segments: list[list[bool]], order: str, spare: int) -> None:
    """Every segment begins at a new byte. Bytes behind the last segment are 0."""
    packed = [np.packbits(np.array(bits, bool), bitorder=order).tolist() for bits in segments]
    expected = [byte for each in packed for byte in each]
    x = torch.tensor([bit for bits in segments for bit in bits], dtype=torch.bool)
    out, byte_indptr = torch.ops.attn.segment_packbits(
        x, indptr([len(bits) for bits in segments]), len(expected) + spare, bitorder=order
    )
    assert out.tolist() == expected + [0] * spare
    assert byte_indptr.dtype == torch.int32
    assert byte_indptr.tolist() == indptr([len(each) for each in packed]).tolist()


@pytest.mark.parametrize(
    ("offsets", "packed", "byte_offsets"),
    [
        ([0], [0, 0, 0, 0], [0]),
        ([0, 0, 0], [0, 0, 0, 0], [0, 0, 0]),
        ([0, 3], [7, 0, 0, 0], [0, 1]),
        ([0, 8], [255, 0, 0, 0], [0, 1]),
        ([0, 9, 9], [255, 1, 0, 0], [0, 2, 2]),
        ([5, 7, 16, 16], [3, 255, 1, 0], [0, 1, 3, 3]),
    ],
    ids=str,
)
def test_bits_outside_of_all_segments_are_in_no_byte(
    offsets: list[int], packed: list[int], byte_offsets: list[int]
) -> None:
    """The bytes past the last segment are 0, although ``x`` has more bits, all of them set."""
    x = torch.ones(40, dtype=torch.bool)
    out, byte_indptr = torch.ops.attn.segment_packbits(x, torch.tensor(offsets).int(), 4, bitorder="little")
    assert out.tolist() == packed
    assert byte_indptr.tolist() == byte_offsets


@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (9,)])
def test_output_sizes(shape: tuple[int]) -> None:
    assert torch.ops.attn.packbits(torch.ones(shape, dtype=torch.bool)).shape == (-(-shape[0] // 8),)
