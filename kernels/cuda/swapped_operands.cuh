// Functions of consumers with swapped operands, in decode and MLA. One warpgroup computes S^T = K Q^T, O^T = V^T P^T.
//
// The M of WGMMA, 64, is tokens in S^T and value columns in O^T. Its N is packed rows.
//
// A line of a product [64, N] is a token of S^T or a value column of O^T. A thread of warp w of the warpgroup has lines
// 16 w + lane / 4 (line 0 of the thread) and 16 w + lane / 4 + 8 (line 1). In each line it has packed rows 8 i +
// 2 (lane % 4) and 8 i + 2 (lane % 4) + 1, for every i: the own rows of the thread.
#pragma once

#include "descriptors.cuh"
#include "epilogue.cuh"

namespace attn_ops {
namespace {

constexpr int kSwappedWarps = 4;  // warps of the warpgroup

// The index, in this thread's part of a product, of own row `j` in line `r`; and the packed row that own row `j` is.
constexpr DEVICE int place(int j, int r) { return j / 2 * 4 + 2 * r + j % 2; }
DEVICE int packed_row(int j) { return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2; }

struct Max {
  DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  DEVICE float operator()(float a, float b) const { return a + b; }
};

// Reduces `x`, a number for each own row, over the eight lanes of a warp that have the same own rows. Stores the result
// in `to` [packed rows, warps], which begins at this warp's column. In each step a lane sends half of its rows to
// another lane and keeps the other half, until one row is left.
template <int N, int MASK, class Combine>
DEVICE void reduce_to(float* to, const float (&x)[N], int first, Combine combine) {
  if constexpr (N > 1) {
    const bool upper = threadIdx.x & MASK;
    float half[N / 2];
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const float sent = upper ? x[j] : x[j + N / 2], kept = upper ? x[j + N / 2] : x[j];
      half[j] = combine(kept, __shfl_xor_sync(~0u, sent, MASK));
    }
    reduce_to<N / 2, MASK / 2>(to, half, first + (upper ? N / 2 : 0), combine);
  } else {
    float all = x[0];
#pragma unroll
    for (int mask = MASK; mask >= 4; mask /= 2) all = combine(all, __shfl_xor_sync(~0u, all, mask));
    if (!(threadIdx.x & (2 * MASK - 4))) to[packed_row(first) * kSwappedWarps] = all;
  }
}

// The results of the four warps for own row `j`, from `reduced` [packed rows, warps].
DEVICE float4 of_warps(const float* reduced, int j) {
  return *reinterpret_cast<const float4*>(reduced + packed_row(j) * kSwappedWarps);
}
DEVICE float max_of(const float4& x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }
DEVICE float sum_of(const float4& x) { return (x.x + x.y) + (x.z + x.w); }

// Stores P of 64 tokens as the K-major operand [N, 64], at most 16 packed rows at a time. Matrix m of a store has 8
// packed rows, from 8 (m / 2) on, and the first (m even) or second (m odd) 8 of this warp's 16 tokens.
template <int N>
DEVICE void store_probabilities(uint32 to, const float (&p)[N / 2], int warp) {
  constexpr int kRows = N < 16 ? N : 16;
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 % kRows + lane % 8, chunk = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int first = 0; first < N; first += kRows) {
    uint32 words[kRows / 4];
#pragma unroll
    for (int m = 0; m < kRows / 4; ++m) words[m] = pack(p[first / 2 + 2 * m], p[first / 2 + 2 * m + 1]);
    store_transposed(to + (first + row) * 128 + (chunk ^ lane % 8) * 16, words);
  }
}

// Stores four numbers of a result at index `at`, a multiple of 4, in type TYPE.
template <OutType TYPE>
DEVICE void store_four(void* out, int64 at, const float4& x) {
  using Pair = decltype(pair_of<TYPE>(0, 0));
  struct alignas(2 * sizeof(Pair)) Four {
    Pair pairs[2];
  };
  static_cast<Four*>(out)[at / 4] = {pair_of<TYPE>(x.x, x.y), pair_of<TYPE>(x.z, x.w)};
}

DEVICE void store_four_as(int type, void* out, int64 at, const float4& x) {
  switch (type) {
    case kLikeOperands: return store_four<DTYPE == 2 ? kBFloat16 : kFloat16>(out, at, x);
    case kFloat32: return store_four<kFloat32>(out, at, x);
    case kFloat16: return store_four<kFloat16>(out, at, x);
    case kBFloat16: return store_four<kBFloat16>(out, at, x);
    case kE4M3: return store_four<kE4M3>(out, at, x);
    case kE5M2: return store_four<kE5M2>(out, at, x);
  }
}

}  // namespace
}  // namespace attn_ops
