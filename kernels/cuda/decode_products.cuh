// Decode: the products of a 16-bit KV tile. Both operands of WGMMA are in shared memory.
#pragma once

#include "decode_problem.cuh"
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

using Product = float[kPackedRows / 2];

// The value column, in its block of 64, of this thread's line `r` of O^T. A thread has lines 0 and 1 of each product.
DEVICE int column_of(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// S^T = K Q^T.
DEVICE void multiply(Product (&logits)[kTokenBlocks], uint32 keys, uint64 query) {
  const uint64 operand = k_major(keys, kGroupBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i)
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t)
      wgmma_ss(logits[t], operand + (t * 8 * kGroupBytes + i / 4 * kBlockBytes + i % 4 * 32) / 16,
               query + (i / 4 * kOperandBytes + i % 4 * 32) / 16, i > 0);
  wgmma_commit();
  wgmma_wait<0>();
}

// O^T += V^T P^T.
DEVICE void multiply_add(Product (&output)[kColumnBlocks], uint32 values, uint64 probabilities) {
  const uint64 operand = mn_major(values, kGroupBytes, kBlockBytes);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c)
      wgmma_mn_ss(output[c], operand + (i * 2 * kGroupBytes + c * kBlockBytes) / 16,
                  probabilities + (i / 4 * kOperandBytes + i % 4 * 32) / 16);
  wgmma_commit();
  wgmma_wait<0>();
}

}  // namespace
}  // namespace attn_ops
