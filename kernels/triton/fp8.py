"""FP8 KV caches. Attention on them is computed in float16, which holds every FP8 value and has hardware conversions.

Values are loaded as int16: pairs of FP8 elements of neighbouring dimensions. The PV product reads them transposed from
shared memory to registers, which hardware does in units of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def readable_in_pairs(cache: Tensor) -> bool:
    """Whether ``cache [num_pages, ..., head_dim]`` is FP8, with rows at even addresses and of an even length."""
    offsets = cache.storage_offset(), *cache.stride()[:3], cache.shape[3]
    return cache.dtype.itemsize == 1 and not any(offset % 2 for offset in offsets)


UNPACK_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
"""PTX from two e5m2 elements in each half of $2: an e5m2 value is the upper byte of the same value in float16."""

UNPACK_E4M3 = tl.constexpr(
    "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
"""PTX from two e4m3 elements in each half of $2: first elements to $0, second ones to $1."""

if triton.knobs.runtime.interpret:

    @triton.jit
    def unpack(pairs, DTYPE: tl.constexpr):
        low, high = pairs.to(tl.uint8).to(DTYPE, bitcast=True), (pairs >> 8).to(tl.uint8).to(DTYPE, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)

else:

    @triton.jit
    def unpack(pairs, DTYPE: tl.constexpr):
        """``(first, second)`` of the two FP8 elements in each int16, as float16."""
        CODE: tl.constexpr = UNPACK_E5M2 if DTYPE == tl.float8e5 else UNPACK_E4M3  # noqa: SIM300
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def float16_scale(magnitude):
    """The power of 2 that scales the largest of ``magnitude [heads, dim]``, at least 0, to the binade of 2^14.

    Scaled values fit in float16, and what underflows there is too small to matter compared with the largest.
    """
    exponent = tl.max(tl.max(magnitude, 1), 0).to(tl.int32, bitcast=True) >> 23
    return (tl.minimum(268 - exponent, 247) << 23).to(tl.float32, bitcast=True)
