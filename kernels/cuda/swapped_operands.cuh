// Attention with swapped operands, S^T = K Q^T and O^T = V^T P^T by one warpgroup: what its consumers share.
//
// The M of WGMMA, 64, is tokens of S^T and columns of O^T, and its N is packed rows, few of them.
//
// Of a product [64, N] a thread has the lines 16 w + lane / 4, of warp w, and the one 8 further: tokens or columns. Of
// each it has the packed rows 8 i + 2 (lane % 4) and the next one for every i: its own.
#pragma once

#include "descriptors.cuh"
#include "epilogue.cuh"

namespace attn_ops {
namespace {

constexpr int kSwappedWarps = 4;  // of the warpgroup

// The place of own row `j` in line `r` of a product, and its number.
constexpr DEVICE int place(int j, int r) { return j / 2 * 4 + 2 * r + j % 2; }
DEVICE int packed_row(int j) { return j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2; }

struct Max {
  DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  DEVICE float operator()(float a, float b) const { return a + b; }
};

// Reduces `x` of own rows over the eight lanes of the warp that have the same ones, and stores the result of each warp
// in `to` [packed rows, warps]. In each step a lane keeps half of its rows, as long as it has several.
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

// Of own row `j`, what the warps have stored.
DEVICE float4 of_warps(const float* reduced, int j) {
  return *reinterpret_cast<const float4*>(reduced + packed_row(j) * kSwappedWarps);
}
DEVICE float max_of(const float4& x) { return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)); }
DEVICE float sum_of(const float4& x) { return (x.x + x.y) + (x.z + x.w); }

// P of 64 tokens as the K-major operand [N, 64], at most 16 packed rows at a time. Lanes 8 m to 8 m + 7 have the
// addresses of the rows of matrix m, which is of packed rows 8 (m / 2) on, and of the first or second 8 tokens of this
// warp.
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

// Four numbers of a result, from number `at` on, which is a multiple of 4.
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
