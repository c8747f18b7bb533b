// Decode: the products of an FP8 KV tile. Operand A of WGMMA is the keys or values, converted to float16 in registers.
//
// ldmatrix gives a lane 4 adjacent columns of a key, where operand A has 2 adjacent columns, and 2 more that are 8
// further. So the columns of the query are permuted in the same way (`QueryChunks::store`). Of the values, ldmatrix
// gives a lane 2 adjacent columns, where operand A has 2 rows that are 8 apart. So the columns of O^T are permuted
// (`column_of`).
#pragma once

#include "decode_problem.cuh"
#include "fp8.cuh"
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

using Product = float[kPackedRows / 2];
static_assert(kTokenBytes == kRowBytes);  // one block of columns per token and head
constexpr Fp8Type kKvType = KV_FP8 == 2 ? kFp8E5M2 : kFp8E4M3;

// The value column, in its block of 64, of this thread's line `r` of O^T.
DEVICE int column_of(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 * 2 + r; }

// The address of 16-byte chunk `chunk` of token `token`.
DEVICE uint32 chunk_address(uint32 tile, int token, int chunk) {
  constexpr int kChunks = kRowBytes / 16;
  const int row = token % 8, swizzle = row * kRowBytes / 128 & (kChunks - 1);
  return tile + token / 8 * kGroupBytes + row * kRowBytes + (chunk ^ swizzle) * 16;
}

// Converts four words of FP8 numbers into the operands A of two products: words 0 and 1 into to[0], 2 and 3 into to[1].
// `first_by_row`: the two words of a product are rows r and r + 8 of A, and the halves of a word are the halves of K.
// Otherwise the two words are the halves of K, and the halves of a word are rows r and r + 8.
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

// S^T = K Q^T. A warp has 16 tokens of each block of 64.
DEVICE void multiply(Product (&logits)[kTokenBlocks], uint32 keys, uint64 query) {
  const int lane = threadIdx.x % 32, token = threadIdx.x % 128 / 32 * 16 + lane % 16, odd = lane / 16;
  Operand wide[kTokenBlocks][kDim / 32][2];  // not written again before the wait
#pragma unroll
  for (int t = 0; t < kTokenBlocks; ++t) {
    Operand k[kDim / 32];  // tokens r and r + 8 of chunk 2 i, then of chunk 2 i + 1, with r = lane / 4
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

// O^T += V^T P^T. A warp has 16 value columns of each block of 64.
DEVICE void multiply_add(Product (&output)[kColumnBlocks], uint32 values, uint64 probabilities) {
  constexpr int kAtOnce = kTile < 128 ? kTile / 32 : 4;  // blocks of 32 tokens that are loaded before a product
  static_assert(kTile % (32 * kAtOnce) == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  Operand wide[kColumnBlocks][kTile / 32][2];  // not written again before the wait
#pragma unroll
  for (int first = 0; first < kTile / 32; first += kAtOnce)
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) {
      Operand v[kAtOnce];  // a word for each 8 tokens: columns 2 r and 2 r + 1 of two tokens, with r = lane / 4
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        load_transposed(v[i], chunk_address(values, 32 * (first + i) + lane, 4 * c + warp));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (uint32& word : v[i]) word = permute_bytes(word, 0, 0x3120);  // two tokens of column 2 r, then of 2 r + 1
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
