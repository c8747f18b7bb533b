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

// The same for finite numbers, by instructions that have a higher rate. The bits of a number are moved to the exponent and
// the mantissa of the wider type, whose exponent has another bias: a multiplication by a power of two corrects it, of
// subnormal numbers too. NaN and infinities would become numbers. Theirs are the largest magnitudes.
struct FiniteFp8 {
  int shift;              // to the right, from the upper byte of a half
  uint32 mask;            // of magnitudes in both halves, as all of these
  uint32 not_finite;      // the least magnitude of what is not finite, or more than all
  uint32 factor;
  uint32 largest = 0;     // of the magnitudes so far

  DEVICE explicit FiniteFp8(Fp8Type type) {
    constexpr bool kFloat16 = DTYPE == 1;
    constexpr uint32 kBoth = 0x10001, kBias = kFloat16 ? 15 : 127;
    const bool e4m3 = type == kFp8E4M3;
    shift = kFloat16 ? (e4m3 ? 1 : 0) : e4m3 ? 4 : 3;
    mask = (0x7F00 >> shift) * kBoth;
    not_finite = kFloat16 && !e4m3 ? 0x8000 * kBoth : ((e4m3 ? 0x7F00 : 0x7C00) >> shift) * kBoth;
    factor = (2 * kBias - (e4m3 ? 7 : 15) << (kFloat16 ? 10 : 7)) * kBoth;
  }

  DEVICE uint2 widen(uint32 word) {
    uint32 wide[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 spread = permute_bytes(word, 0, i ? 0x3424 : 0x1404);
      const uint32 magnitude = spread >> shift & mask;
      largest = max_of_halves(largest, magnitude);
      wide[i] = multiply_pair(magnitude | (spread & 0x80008000), factor);
    }
    return {wide[0], wide[1]};
  }

  DEVICE uint4 widen(uint32 first, uint32 second) {
    const uint2 a = widen(first), b = widen(second);
    return {a.x, a.y, b.x, b.y};
  }

  // Whether all numbers so far were finite.
  DEVICE bool all_finite() const { return (largest + 0x80008000 - not_finite & 0x80008000) == 0; }
};

}  // namespace attn_ops
