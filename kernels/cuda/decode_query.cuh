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

// Queries in global memory, and the scales of their logits.
struct Queries {
  const char* q;
  int64 row, head;         // strides in elements
  HeadDim columns;
  int group;
  int type;                // OutType of q; read with an FP8 cache alone
  float scale, cap;        // a cap of 0: no soft cap
  const float* kv_scale;   // [2], of keys and of values, or null

  // Multiplies the QK product. Without a cap the result is base-2 logits. With a cap it is the arguments of tanh, and
  // base2_cap() * tanh(argument) is base-2 logits.
  DEVICE float factor() const { return scale * (cap > 0 ? 1 / cap : kLog2e) * (kv_scale ? kv_scale[0] : 1.f); }
  DEVICE float base2_cap() const { return cap > 0 ? cap * kLog2e : 0.f; }
};

// The query of a work item on its way to shared memory. A thread has kOwn chunks of 16 bytes, of 8 columns each.
struct QueryChunks {
  static constexpr int kHeadChunks = kDim / 8, kChunks = kPackedRows * kHeadChunks;
  static constexpr int kOwn = (kChunks + kConsumerThreads - 1) / kConsumerThreads;
  uint32 chunks[kOwn][4];

  // Loads the chunks. Packed rows after the group are zeros, and so are columns that keys do not have, or have twice.
  DEVICE QueryChunks(const Queries& q, int row, int rows, int thread) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int chunk = thread + i * kConsumerThreads, head = chunk / kHeadChunks;
      const int column = q.columns.column_of_head(chunk % kHeadChunks * 8);
      Vector x = {};
      if (head < q.group && uint32(row) < uint32(rows) && (!PADDED || column >= 0))
        x = load(q.q + 2 * (row * q.row + (kv_head() * q.group + head) * q.head) + column * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) chunks[i][j] = x.words[j];
    }
  }

#if ROPE
  // Rotates the chunks. RoPE pairs columns i and i + kDim / 2. A chunk has one column of each of 8 pairs; the chunk of
  // lane ^ kHalf, half a head away, has the other column.
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

  // Stores the chunks as the K-major operand [packed rows, kDim]. With an FP8 cache a bfloat16 query is stored as
  // float16, each head multiplied by a power of 2, and `scales` gets the inverse powers (1 for a float16 query).
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
        for (int odd = 0; odd < 2; ++odd)  // pairs 0 and 2, then 1 and 3, of the chunk are adjacent in the operand
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
