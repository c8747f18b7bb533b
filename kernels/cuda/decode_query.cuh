// Decode: the query of a work item.
#pragma once

#include "decode_problem.cuh"
#include "hopper.cuh"
#include "out_type.cuh"
#if KV_FP8
#include "fp8.cuh"
#elif ROPE
#include "rope.cuh"
#endif

namespace attn_ops {
namespace {

// Queries in global memory, and what their logits are multiplied by.
struct Queries {
  const char* q;
  int64 row, head;         // strides in elements
  int group;
  int type;                // OutType, with an FP8 cache
  float scale, cap;        // a cap of 0 is none
  const float* kv_scale;   // [2] or null

  // Without a cap logits are of base 2; the cap takes natural ones, and is itself of base 2.
  DEVICE float factor() const { return scale * (cap > 0 ? 1 / cap : kLog2e) * (kv_scale ? kv_scale[0] : 1.f); }
  DEVICE float base2_cap() const { return cap > 0 ? cap * kLog2e : 0.f; }
};

// The query of a work item on its way to shared memory: 16-byte chunks of this thread.
struct QueryChunks {
  static constexpr int kHeadChunks = kDim / 8, kChunks = kPackedRows * kHeadChunks;
  static constexpr int kOwn = (kChunks + kConsumerThreads - 1) / kConsumerThreads;
  uint32 chunks[kOwn][4];

  // Zeros for heads that the group does not have.
  DEVICE QueryChunks(const Queries& q, int row, int rows, int thread) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int chunk = thread + i * kConsumerThreads, head = chunk / kHeadChunks;
      Vector x = {};
      if (head < q.group && uint32(row) < uint32(rows))
        x = load(q.q + 2 * (row * q.row + (kv_head() * q.group + head) * q.head) + chunk % kHeadChunks * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) chunks[i][j] = x.words[j];
    }
  }

#if ROPE
  // A chunk has one column of each of its pairs; the chunk of another lane, half a head away, has the other one.
  DEVICE void rotate(const uint64 (&turns)[kDim / 2], int position, int thread) {
    constexpr int kHalf = kHeadChunks / 2;
    const int column = thread % kHeadChunks, first = column % kHalf * 8;
    const bool second_half = column >= kHalf;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint64 of_pairs[2] = {turns[first + 2 * j], turns[first + 2 * j + 1]};
      const Angles<2> angles(of_pairs, position);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const uint32 own = chunks[i][j], other = __shfl_xor_sync(~0u, own, kHalf);
        float x[2], y[2];
        unpack(second_half ? other : own, x[0], x[1]), unpack(second_half ? own : other, y[0], y[1]);
        angles.turn(x, y);
        chunks[i][j] = second_half ? pack(y[0], y[1]) : pack(x[0], x[1]);
      }
    }
  }
#endif

  // To the K-major operand [packed rows, kDim]. Of a bfloat16 query in float16, the scales of heads go to `scales`.
  DEVICE void store(uint32 to, float* scales, int type, int thread) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int chunk = thread + i * kConsumerThreads, head = chunk / kHeadChunks, column = chunk % kHeadChunks;
      const uint32 row = to + column / 8 * kOperandBytes + head * kOperandRowBytes;
      const bool exists = kChunks % kConsumerThreads == 0 || chunk < kChunks;
      uint32(&x)[4] = chunks[i];
#if KV_FP8
      float scale = 1;
      if (type == kBFloat16) {
        float largest = 0;
#pragma unroll
        for (uint32 pair : x) largest = fmaxf(largest, largest_bfloat16(pair));
#pragma unroll
        for (int mask = 1; mask < kHeadChunks; mask *= 2)  // the lanes of a head
          largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
        scale = float16_scale(largest);
#pragma unroll
        for (uint32& pair : x) pair = scaled_float16(pair, scale);
      }
      if (exists && column == 0) scales[head] = inverse_of_power(scale);
      if (exists)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd)  // pairs 0 and 2, or 1 and 3, of this chunk are neighbours in the operand
          store_shared(row + (column % 8 / 2 * 2 + odd ^ head % 8) * 16 + column % 2 * 8, __uint_as_float(x[odd]),
                       __uint_as_float(x[odd + 2]));
#else
      if (exists) store_shared(row + (column % 8 ^ head % 8) * 16, uint4{x[0], x[1], x[2], x[3]});
#endif
    }
  }
};

}  // namespace
}  // namespace attn_ops
