// FP8 keys and values for kernels that multiply 16-bit operands. The conversion is exact: float16 and bfloat16 hold every
// FP8 number. NaN stays NaN.
//
// The macro DTYPE is the type of the operands: 1 float16, 2 bfloat16.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

enum Fp8Type { kFp8E4M3, kFp8E5M2 };

// Two FP8 numbers, the first in the lower byte, as float16.
template <Fp8Type TYPE>
DEVICE uint32 widen_to_float16(uint16 pair) {
  uint32 wide;
  if constexpr (TYPE == kFp8E4M3)
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
  else
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}

// The same in the type of the operands.
template <Fp8Type TYPE>
DEVICE uint32 widen(uint16 pair) {
  const uint32 half = widen_to_float16<TYPE>(pair);
  if constexpr (DTYPE == 1) return half;
  float low, high;
  asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
      : "=f"(low), "=f"(high)
      : "r"(half));
  return pack(low, high);
}

// Eight FP8 numbers.
template <Fp8Type TYPE>
DEVICE uint4 widen(uint32 first, uint32 second) {
  return {widen<TYPE>(uint16(first)), widen<TYPE>(uint16(first >> 16)), widen<TYPE>(uint16(second)),
          widen<TYPE>(uint16(second >> 16))};
}

}  // namespace attn_ops
