// Decode: the products of an FP8 KV tile, which becomes float16 in registers, by WGMMA from there.
//
// A lane gets four neighbouring columns of a key, or two of a value, where the operand in registers has two and two, or
// one and one that is 8 further. So the columns of the query are permuted (`QueryChunks::store`), and those of the
// result (`column_of`).
#pragma once

#include "decode_problem.cuh"
#include "fp8.cuh"
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

using Product = float[kPackedRows / 2];
static_assert(kTokenBytes == kRowBytes);  // a token has one block of columns
constexpr Fp8Type kKvType = KV_FP8 == 2 ? kFp8E5M2 : kFp8E4M3;

DEVICE int column_of(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2 + r; }

// The address of chunk `chunk`, 16 bytes, of token `token`.
DEVICE uint32 chunk_address(uint32 tile, int token, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const int row = token % 8, swizzle = row * kRowBytes / 128 & (kChunks - 1);
  return tile + token / 8 * kGroupBytes + row * kRowBytes + (chunk ^ swizzle) * 16;
}

// Four words of FP8 numbers as the operands in registers of two products: halves of word 0 and 1, of 2 and 3.
using Operand = uint32[4];
DEVICE void widen_two(Operand (&to)[2], const uint32 (&words)[4], bool first_by_row) {
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[step][first_by_row ? j + 2 * half : 2 * j + half] = widen<kKvType>(uint16(words[2 * step + j] >> 16 * half));
}

// S^T = K Q^T. Of each 64 tokens a warp has 16.
DEVICE void multiply(Product (&logits)[kTokenBlocks], uint32 keys, uint64 query) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % 128 / 32 * 16 + lane % 16, odd = lane / 16;
  Operand wide[kTokenBlocks][kDim / 32][2];  // not written again before the wait
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t) {
    Operand k[kDim / 32];  // tokens r and r + 8, of one chunk and the next
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) load_matrices(k[i], chunk_address(keys, 64 * t + token, 2 * i + odd));
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) widen_two(wide[t][i], k[i], true);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i)
      wgmma_rs(logits[t], wide[t][i / 2][i % 2], query + (i / 4 * kOperandBytes + i % 4 * 32) / 16, i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// O^T += V^T P^T. Of each 64 columns a warp has 16.
DEVICE void multiply_add(Product (&output)[kColumnBlocks], uint32 values, uint64 probabilities) {
  constexpr int kAtOnce = kTile < 128 ? kTile / 32 : 4;  // of 32 tokens
  static_assert(kTile % (32 * kAtOnce) == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  Operand wide[kColumnBlocks][kTile / 32][2];  // not written again before the wait
#pragma unroll
  for (int first = 0; first < kTile / 32; first += kAtOnce)
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      Operand v[kAtOnce];  // columns 2 r and 2 r + 1 of two tokens, of each 8 tokens
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        load_transposed(v[i], chunk_address(values, 32 * (first + i) + lane, 4 * c + warp));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (uint32& word : v[i]) word = permute_bytes(word, 0, 0x3120);  // two tokens of one column, and of the next
        widen_two(wide[c][first + i], v[i], false);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 2 * first; i < 2 * (first + kAtOnce); ++i)
        wgmma_rs(output[c], wide[c][i / 2][i % 2], probabilities + (i / 4 * kOperandBytes + i % 4 * 32) / 16, true);
    }
  wgmma_commit();
  wgmma_wait<0>();
}

}  // namespace
}  // namespace attn_ops
