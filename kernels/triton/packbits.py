"""Packing booleans into bytes."""

from __future__ import annotations

import triton
import triton.language as tl
from attn_ops.kernels.triton.launch import Options, launch
from attn_ops.kernels.triton.search import CHUNK, LOG_CHUNK, find_segment
from attn_ops.meta.outputs import packbits as allocate
from attn_ops.meta.outputs import segment_packbits as allocate_segments
from torch import Tensor

BYTES = 512
"""Bytes that a program packs."""


@triton.jit
def pack(x, first, count, bits, BIG: tl.constexpr):
    """``[bytes]`` of the ``count`` bits from ``first`` on for each, 0 where ``x [bits]`` has none."""
    bit = tl.arange(0, 8)[None, :]
    at = first.to(tl.int64)[:, None] + bit
    given = tl.load(x + at, mask=(bit < count[:, None]) & (at >= 0) & (at < bits), other=0)
    return tl.sum((given != 0).to(tl.int32) << (7 - bit if BIG else bit), 1).to(tl.uint8)


@triton.jit(do_not_specialize=["bits", "num_bytes"])
def packbits_kernel(
    x,  # [bits]
    out,  # [num_bytes]
    bits,
    num_bytes,
    BIG: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    tl.store(
        out + byte, pack(x, byte.to(tl.int64) * 8, tl.full((BYTES,), 8, tl.int32), bits, BIG), mask=byte < num_bytes
    )


@triton.jit(do_not_specialize=["bits", "segments", "num_bytes"])
def segment_packbits_kernel(
    x,  # [bits]
    indptr,  # [segments + 1]
    out,  # [num_bytes]
    byte_indptr,  # [segments + 1]
    bits,
    segments,
    num_bytes,
    BIG: tl.constexpr,
    BYTES: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    byte = tl.program_id(0) * BYTES + tl.arange(0, BYTES)
    source, left = tl.zeros((BYTES,), tl.int32), tl.zeros((BYTES,), tl.int32)
    total = 0
    for first in range(0, segments, CHUNK):
        i = first + tl.arange(0, CHUNK)
        begin = tl.load(indptr + i, mask=i < segments, other=0)
        length = tl.load(indptr + i + 1, mask=i < segments, other=0) - begin
        sizes = tl.cdiv(length, 8)
        ends = total + tl.cumsum(sizes, 0)
        here, segment, offset = find_segment(ends, sizes, byte, total, CHUNK, LOG_CHUNK)
        source = tl.where(here, tl.gather(begin, segment, 0) + offset * 8, source)
        left = tl.where(here, tl.gather(length, segment, 0) - offset * 8, left)
        if tl.program_id(0) == 0:
            tl.store(byte_indptr + 1 + i, ends, mask=i < segments)
        total = tl.max(ends, 0)
    if tl.program_id(0) == 0:
        tl.store(byte_indptr, 0, mask=segments >= 0)
    tl.store(out + byte, pack(x, source, left, bits, BIG), mask=byte < num_bytes)


def packbits(x: Tensor, *, bitorder: str = "big") -> Tensor:
    out = allocate(x)
    num_bytes = out.shape[0]
    scalars, constants = (x.shape[0], num_bytes), (bitorder == "big", BYTES)
    launch(packbits_kernel, (triton.cdiv(num_bytes, BYTES),), (x, out), scalars, (), constants, Options())
    return out


def segment_packbits(x: Tensor, indptr: Tensor, num_bytes: int, *, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    out, byte_indptr = allocate_segments(x, indptr, num_bytes)
    launch(
        segment_packbits_kernel,
        (1 + num_bytes // BYTES,),
        (x, indptr, out, byte_indptr),
        (x.shape[0], indptr.shape[0] - 1, num_bytes),
        (),
        (bitorder == "big", BYTES, CHUNK, LOG_CHUNK),
        Options(),
    )
    return out, byte_indptr
