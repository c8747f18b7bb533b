"""Pack booleans into bytes, eight to a byte, as ``numpy.packbits``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.launch import launch
from attn_ops.kernels.triton.search import CHUNK, LOG_CHUNK, find_segment
from attn_ops.meta.outputs import packbits as allocate_packbits
from attn_ops.meta.outputs import segment_packbits as allocate_segment_packbits

BYTES_PER_PROGRAM = 512
"""Bytes of the result that a program writes."""


@triton.jit
def pack(x, first, count, num_bits, BIG_ENDIAN: tl.constexpr):
    """One byte for each of ``first [bytes]``: elements ``first`` to ``first + min(count, 8)`` of ``x [num_bits]``.

    Bits past ``count`` or outside of ``x`` are 0.
    """
    bit = tl.arange(0, 8)[None, :]
    index = first.to(tl.int64)[:, None] + bit
    value = tl.load(x + index, mask=(bit < count[:, None]) & (index >= 0) & (index < num_bits), other=0)
    return tl.sum((value != 0).to(tl.int32) << (7 - bit if BIG_ENDIAN else bit), 1).to(tl.uint8)


@triton.jit(do_not_specialize=["num_bits", "num_bytes"])
def packbits_kernel(
    x,  # [num_bits]
    out,  # [num_bytes]
    num_bits,
    num_bytes,
    BIG_ENDIAN: tl.constexpr,
    BYTES_PER_PROGRAM: tl.constexpr,
):
    """Grid: (blocks of BYTES_PER_PROGRAM bytes of ``out``).

    A program owns BYTES_PER_PROGRAM consecutive bytes and reads the eight elements of each.
    Bound by memory bandwidth; small masks by launch latency.
    """
    byte = tl.program_id(0) * BYTES_PER_PROGRAM + tl.arange(0, BYTES_PER_PROGRAM)
    eight = tl.full((BYTES_PER_PROGRAM,), 8, tl.int32)
    tl.store(out + byte, pack(x, byte.to(tl.int64) * 8, eight, num_bits, BIG_ENDIAN), mask=byte < num_bytes)


@triton.jit(do_not_specialize=["num_bits", "segments", "num_bytes"])
def segment_packbits_kernel(
    x,  # [num_bits]
    indptr,  # [segments + 1]: where each segment's elements begin in x
    out,  # [num_bytes]
    byte_indptr,  # [segments + 1]: where each segment's bytes begin in out
    num_bits,
    segments,
    num_bytes,
    BIG_ENDIAN: tl.constexpr,
    BYTES_PER_PROGRAM: tl.constexpr,
    CHUNK: tl.constexpr,
    LOG_CHUNK: tl.constexpr,
):
    """Grid: (blocks of BYTES_PER_PROGRAM bytes of ``out``).

    A program owns BYTES_PER_PROGRAM consecutive bytes and finds the segment of each; every segment begins on a byte of
    its own. Program 0 also writes ``byte_indptr``. Bytes past the last segment are 0.
    Loop invariant: ``total`` is the number of bytes of the first ``first`` segments, and for every owned byte below
    ``total``, ``source`` is its first element of ``x`` and ``remaining`` the elements from there to the segment's end.
    Bound by latency: ``cdiv(segments, CHUNK)`` dependent steps of a scan and a search.
    """
    byte = tl.program_id(0) * BYTES_PER_PROGRAM + tl.arange(0, BYTES_PER_PROGRAM)
    source, remaining = tl.zeros((BYTES_PER_PROGRAM,), tl.int32), tl.zeros((BYTES_PER_PROGRAM,), tl.int32)
    total = 0
    for first in range(0, segments, CHUNK):
        i = first + tl.arange(0, CHUNK)
        begin = tl.load(indptr + i, mask=i < segments, other=0)
        length = tl.load(indptr + i + 1, mask=i < segments, other=0) - begin
        sizes = tl.cdiv(length, 8)
        ends = total + tl.cumsum(sizes, 0)
        found, segment, offset = find_segment(ends, sizes, byte, total, CHUNK, LOG_CHUNK)
        source = tl.where(found, tl.gather(begin, segment, 0) + offset * 8, source)
        remaining = tl.where(found, tl.gather(length, segment, 0) - offset * 8, remaining)
        if tl.program_id(0) == 0:
            tl.store(byte_indptr + 1 + i, ends, mask=i < segments)
        total = tl.max(ends, 0)
    if tl.program_id(0) == 0:
        tl.store(byte_indptr, 0, mask=segments >= 0)
    tl.store(out + byte, pack(x, source, remaining, num_bits, BIG_ENDIAN), mask=byte < num_bytes)


def packbits(x: Tensor, *, bitorder: str = "big") -> Tensor:
    out = allocate_packbits(x)
    num_bytes = out.shape[0]
    launch(
        packbits_kernel,
        (triton.cdiv(num_bytes, BYTES_PER_PROGRAM),),
        x=x,
        out=out,
        num_bits=x.shape[0],
        num_bytes=num_bytes,
        BIG_ENDIAN=bitorder == "big",
        BYTES_PER_PROGRAM=BYTES_PER_PROGRAM,
    )
    return out


def segment_packbits(x: Tensor, indptr: Tensor, num_bytes: int, *, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    out, byte_indptr = allocate_segment_packbits(x, indptr, num_bytes)
    launch(
        segment_packbits_kernel,
        (1 + num_bytes // BYTES_PER_PROGRAM,),
        x=x,
        indptr=indptr,
        out=out,
        byte_indptr=byte_indptr,
        num_bits=x.shape[0],
        segments=indptr.shape[0] - 1,
        num_bytes=num_bytes,
        BIG_ENDIAN=bitorder == "big",
        BYTES_PER_PROGRAM=BYTES_PER_PROGRAM,
        CHUNK=CHUNK,
        LOG_CHUNK=LOG_CHUNK,
    )
    return out, byte_indptr
