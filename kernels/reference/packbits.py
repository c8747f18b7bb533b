"""Pack booleans into bytes, eight to a byte, as ``numpy.packbits``."""

from __future__ import annotations

import torch
from torch import Tensor


def _pack(bits: Tensor, bitorder: str) -> Tensor:
    """uint8 ``[bytes]`` of bool ``[bytes, 8]``."""
    bit = torch.arange(8, device=bits.device)
    power = 1 << (bit if bitorder == "little" else 7 - bit)
    return (bits.int() * power).sum(1).to(torch.uint8)


def packbits(x: Tensor, *, bitorder: str = "big") -> Tensor:
    padded = torch.nn.functional.pad(x.bool(), (0, -x.shape[0] % 8))
    return _pack(padded.view(-1, 8), bitorder)


def segment_packbits(x: Tensor, indptr: Tensor, num_bytes: int, *, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack each segment ``x[indptr[i]:indptr[i + 1]]``, padded to whole bytes: ``(bytes, byte_indptr)``.

    Bytes past the last segment are 0.
    """
    length = indptr.diff()
    byte_indptr = torch.nn.functional.pad(((length + 7) // 8).cumsum(0), (1, 0))
    if 0 in (x.shape[0], length.shape[0]):
        return x.new_zeros(num_bytes, dtype=torch.uint8), byte_indptr.int()
    byte = torch.arange(num_bytes, device=x.device)
    segment = (torch.searchsorted(byte_indptr, byte, right=True) - 1).clamp(max=length.shape[0] - 1)
    # A byte past the last segment: behind the bits of that segment.
    bit = (byte - byte_indptr[segment])[:, None] * 8 + torch.arange(8, device=x.device)
    inside = bit < length[segment][:, None]
    source = (indptr[segment][:, None] + bit).clamp(0, x.shape[0] - 1)
    return _pack(x[source].bool() & inside, bitorder), byte_indptr.int()
