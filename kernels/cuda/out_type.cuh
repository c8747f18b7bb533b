// Types of outputs. OUT_TYPES in operands.py has the same numbers.
#pragma once
#include "basics.cuh"

namespace attn_ops {
namespace {

enum OutType { kLikeOperands, kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2 };

// Converts two floats to a pair of type TYPE. FP8 saturates.
template <OutType TYPE>
DEVICE auto pair_of(float x, float y) {
  if constexpr (TYPE == kFloat32) {
    return float2{x, y};
  } else if constexpr (TYPE == kFloat16 || TYPE == kBFloat16) {
    return TYPE == kFloat16 ? float16_pair(x, y) : bfloat16_pair(x, y);
  } else {
    return TYPE == kE4M3 ? e4m3_pair(x, y) : e5m2_pair(x, y);
  }
}

}  // namespace
}  // namespace attn_ops
