// Prefill: converts bfloat16 queries to float16 (FEW_ROWS), the type to which FP8 keys and values are converted.
#pragma once

#include "epilogue.cuh"
#include "fp8.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// One warp: converts the packed rows of unit n in place. Each row is multiplied by a power of 2, whose inverse goes to
// query_scales. False if there is no unit n. Eight lanes have a row, each a 16-byte chunk of every block of columns.
DEVICE bool convert_queries(uint32 n, Shared& shared) {
  constexpr int kBlocks = kDimQk / kColumns, kBlockBytes = kPackedRows * kRowBytes;
  constexpr int kRowsAtOnce = 32 / kRowChunks, kUnrolled = 4;  // a lane loads kUnrolled rows at once
  const uint32 buffer = n % kQueries;
  const int lane = threadIdx.x % 32, chunk = lane % kRowChunks;
  wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);
  mark(kWaitUnit);
  if (shared.query_blocks[n % kQueryBlocks].stored < 0) {
    arrive_by_warp(shared_address(&shared.q_full[buffer]));
    return false;
  }
  const uint32 queries = shared_address(shared.query[buffer][0]);
  float* const scales = shared.query_scales[buffer];
#pragma unroll 1
  for (int first = lane / kRowChunks; first < kPackedRows; first += kUnrolled * kRowsAtOnce) {
    const auto address = [&](int i) {
      return queries + swizzled((first + i * kRowsAtOnce) * kRowBytes + chunk * 16);
    };
    float largest[kUnrolled] = {};
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i)
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint4 x = load_shared(address(i) + block * kBlockBytes);
        largest[i] = fmaxf(largest[i], fmaxf(largest_bfloat16(x.x), largest_bfloat16(x.y)));
        largest[i] = fmaxf(largest[i], fmaxf(largest_bfloat16(x.z), largest_bfloat16(x.w)));
      }
#pragma unroll
    for (int lanes = 1; lanes < kRowChunks; lanes *= 2)
#pragma unroll
      for (float& x : largest) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const float scale = float16_scale(largest[i]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {  // loads each chunk again, rather than keep it in registers
        const uint32 at = address(i) + block * kBlockBytes;
        const uint4 x = load_shared(at);
        store_shared(at, uint4{scaled_float16(x.x, scale), scaled_float16(x.y, scale), scaled_float16(x.z, scale),
                               scaled_float16(x.w, scale)});
      }
      if (chunk == 0) scales[first + i * kRowsAtOnce] = inverse_of_power(scale);
    }
  }
  fence_async_shared();
  arrive_by_warp(shared_address(&shared.q_full[buffer]));
  mark(kIssue);
  return true;
}
static_assert(kRowChunks == 8 && kPackedRows % 16 == 0);

}  // namespace
}  // namespace attn_ops
