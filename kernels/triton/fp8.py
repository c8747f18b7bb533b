"""FP8 caches, which are computed in float16: that holds every FP8 number, and the hardware converts to it alone.

Values are read as int16 pairs of neighbouring dimensions. A dot wants them across tokens, and shared memory is
transposed on the way to registers in units of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def in_pairs(cache: Tensor) -> bool:
    """Whether every row of a cache is FP8, begins at an even address and has an even length."""
    places = cache.storage_offset(), *cache.stride()[:3], cache.shape[3]
    return cache.dtype.itemsize == 1 and not any(place % 2 for place in places)


UNPACK_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")
"""An e5m2 number is the upper half of a float16."""

UNPACK_E4M3 = tl.constexpr(
    "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted; "
    "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)

if triton.knobs.runtime.interpret:

    @triton.jit
    def unpack(pairs, DTYPE: tl.constexpr):
        low, high = pairs.to(tl.uint8).to(DTYPE, bitcast=True), (pairs >> 8).to(tl.uint8).to(DTYPE, bitcast=True)
        return low.to(tl.float16), high.to(tl.float16)

else:

    @triton.jit
    def unpack(pairs, DTYPE: tl.constexpr):
        """Float16 of the first and of the second ``DTYPE`` number in each int16."""
        CODE: tl.constexpr = UNPACK_E5M2 if DTYPE == tl.float8e5 else UNPACK_E4M3  # noqa: SIM300
        return tl.inline_asm_elementwise(CODE, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def float16_scale(size):
    """The power of 2 that brings the largest of ``size [heads, d]`` to 2^14: float16 then holds all that matters."""
    exponent = tl.max(tl.max(size, 1), 0).to(tl.int32, bitcast=True) >> 23
    return (tl.minimum(268 - exponent, 247) << 23).to(tl.float32, bitcast=True)
