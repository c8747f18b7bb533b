// FP8 numbers as operands of 16-bit products. The conversion is exact: float16 and bfloat16 have every FP8 number. NaN
// stays NaN.
//
// The macro DTYPE is the type of the operands: 1 float16, 2 bfloat16.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

enum Fp8Type { kFp8E4M3, kFp8E5M2 };

// Eight FP8 numbers, the first in the lowest byte of `first`.
template <Fp8Type TYPE>
DEVICE uint4 widen(uint32 first, uint32 second) {
  const uint32 words[2] = {first, second};
  uint32 wide[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint16 pair = uint16(words[i / 2] >> i % 2 * 16);
    wide[i] = TYPE == kFp8E4M3 ? float16_of_e4m3(pair) : float16_of_e5m2(pair);
    if (DTYPE == 1) continue;
    float low, high;
    float16_values(wide[i], low, high);
    wide[i] = pack(low, high);
  }
  return {wide[0], wide[1], wide[2], wide[3]};
}

}  // namespace attn_ops
