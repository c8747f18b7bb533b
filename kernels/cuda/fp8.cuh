// Conversion of FP8 numbers to the 16-bit operands of products. It is exact: float16 and bfloat16 represent every FP8
// number. NaN stays NaN.
//
// The macro DTYPE is the type of the operands: 1 float16, 2 bfloat16.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

enum Fp8Type { kFp8E4M3, kFp8E5M2 };
constexpr int kBFloat16Queries = 2;  // a flag that is added to Fp8Type: queries are bfloat16, and products in float16

// Two FP8 numbers, the first in the lower byte, as a pair of DTYPE.
template <Fp8Type TYPE>
DEVICE uint32 widen(uint16 pair) {
  const uint32 wide = TYPE == kFp8E4M3 ? float16_of_e4m3(pair) : float16_of_e5m2(pair);
  if (DTYPE == 1) return wide;
  float low, high;
  float16_values(wide, low, high);
  return pack(low, high);
}

// Eight FP8 numbers, the first in the lowest byte of `first`, as eight numbers of DTYPE.
template <Fp8Type TYPE>
DEVICE uint4 widen(uint32 first, uint32 second) {
  return {widen<TYPE>(uint16(first)), widen<TYPE>(uint16(first >> 16)), widen<TYPE>(uint16(second)),
          widen<TYPE>(uint16(second >> 16))};
}

// Bfloat16 queries are converted to float16 if FP8 keys are. Each row is multiplied by a power of 2 first, to fit into
// the range of float16.

// The largest magnitude of a pair of bfloat16 numbers.
DEVICE float largest_bfloat16(uint32 pair) {
  return fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u)));
}

// A pair of bfloat16 numbers times a power of 2, as float16.
DEVICE uint32 scaled_float16(uint32 pair, float power) {
  return float16_pair(__uint_as_float(pair << 16) * power, __uint_as_float(pair & 0xffff0000u) * power);
}

// The power of 2, at most 2^120, that scales `largest`, the largest magnitude of a row, to [2^14, 2^15). Elements of
// the row that then underflow in float16 are too small to matter beside `largest`.
DEVICE float float16_scale(float largest) {
  return __uint_as_float(min(268 - (__float_as_uint(largest) >> 23), 247u) << 23);
}
DEVICE float inverse_of_power(float power) { return __uint_as_float((254u << 23) - __float_as_uint(power)); }

}  // namespace attn_ops
