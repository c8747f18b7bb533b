// FP8 numbers as operands of 16-bit products. The conversion is exact: float16 and bfloat16 have every FP8 number. NaN
// stays NaN.
//
// The macro DTYPE is the type of the operands: 1 float16, 2 bfloat16.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

enum Fp8Type { kFp8E4M3, kFp8E5M2 };

// Two FP8 numbers, the first in the lower byte.
template <Fp8Type TYPE>
DEVICE uint32 widen(uint16 pair) {
  const uint32 wide = TYPE == kFp8E4M3 ? float16_of_e4m3(pair) : float16_of_e5m2(pair);
  if (DTYPE == 1) return wide;
  float low, high;
  float16_values(wide, low, high);
  return pack(low, high);
}

// Eight FP8 numbers, the first in the lowest byte of `first`.
template <Fp8Type TYPE>
DEVICE uint4 widen(uint32 first, uint32 second) {
  return {widen<TYPE>(uint16(first)), widen<TYPE>(uint16(first >> 16)), widen<TYPE>(uint16(second)),
          widen<TYPE>(uint16(second >> 16))};
}

}  // namespace attn_ops
