// What consumers of attention kernels share: a thread of a warpgroup has two rows of a result, 8 apart, and of each the
// columns 8 i + 2 (lane % 4) and the next one, for every i. The four lanes that share a row are a quad.
#pragma once
#include "hopper.cuh"

namespace attn_ops {
namespace {

enum OutType { kLikeQuery, kFloat32, kFloat16, kBFloat16, kE4M3, kE5M2 };

DEVICE float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Transposes four words of the four lanes of a quad: lane i gets word i of each.
DEVICE uint4 transpose_quad(uint32 w0, uint32 w1, uint32 w2, uint32 w3) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32 a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  w0 = odd ? a : w0, w1 = odd ? w1 : a, w2 = odd ? b : w2, w3 = odd ? w3 : b;
  const uint32 c = __shfl_xor_sync(~0u, upper ? w0 : w2, 2), d = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
  return upper ? uint4{c, d, w2, w3} : uint4{w0, w1, c, d};
}

// Two floats as a pair of another type. FP8 saturates.
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
