// Prefill: bfloat16 queries beside FP8 keys and values, which become float16.
#pragma once

#include "fp8.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// The packed rows of a unit, in place, each times a power of 2 whose inverse goes to `scales`. Of each block of columns
// a thread has the chunks that it has in `copy_queries`, and eight lanes have a row.
DEVICE void convert_queries(const Problem& p, uint32 queries, float* scales, int thread) {
  constexpr int kBlocks = kDimQk / kColumns, kBlockBytes = kPackedRows * kRowBytes;
  const int chunk = thread % kRowChunks;
#pragma unroll 1
  for (int row = thread / kRowChunks; row < p.block_rows(); row += kQueryThreads / kRowChunks) {
    const uint32 at =
        queries + row / kPackedRows * kQueryBytes + swizzled(row % kPackedRows * kRowBytes + chunk * 16);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint4 x = load_shared(at + i * kBlockBytes);
      largest = fmaxf(largest, fmaxf(largest_bfloat16(x.x), largest_bfloat16(x.y)));
      largest = fmaxf(largest, fmaxf(largest_bfloat16(x.z), largest_bfloat16(x.w)));
    }
#pragma unroll
    for (int lanes = 1; lanes < kRowChunks; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    const float scale = float16_scale(largest);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {  // loaded again, which takes no registers
      const uint4 x = load_shared(at + i * kBlockBytes);
      store_shared(at + i * kBlockBytes, uint4{scaled_float16(x.x, scale), scaled_float16(x.y, scale),
                                               scaled_float16(x.z, scale), scaled_float16(x.w, scale)});
    }
    if (chunk == 0) scales[row] = inverse_of_power(scale);
  }
}
static_assert(kRowChunks == 8);

}  // namespace
}  // namespace attn_ops
