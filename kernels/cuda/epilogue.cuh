// Reductions, rescaling and stores of WGMMA results, for the consumers of attention kernels. A thread of a warpgroup
// has two rows of a result, 8 apart, and of each row columns 8 i + 2 (lane % 4) and the next one, for every i. The four
// lanes that share a row are a quad.
#pragma once
#include "hopper.cuh"
#include "out_type.cuh"

namespace attn_ops {
namespace {

// Four floats in shared memory, at a multiple of 16 bytes.
DEVICE float4 load_four(uint32 from) {
  const uint4 bits = load_shared(from);
  return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w)};
}

DEVICE float max_of_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

DEVICE float sum_of_quad(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The online softmax with lazy rescaling, as in FlashAttention 4. Exponentials of a row are relative to `row_max`. When
// a logit exceeds row_max by more than the threshold, in base 2, row_max becomes the largest logit so far; until then
// row_max stays, and no sum is rescaled. Probabilities are at most 2^threshold.
constexpr float kRescaleThreshold = 8;

// `row_max` after a KV tile whose largest logit is `largest`.
DEVICE float next_row_max(float row_max, float largest) {
  return largest <= row_max + kRescaleThreshold ? row_max : largest;
}

// The factor that rescales sums from old_max to new_max. Sums over no token are 0: their factor is 1.
DEVICE float rescale_factor(float old_max, float new_max) {
  return old_max == -kInfinity ? 1 : exp2_approx(old_max - new_max);
}

// Arrives on `barrier` once for the warp, after all lanes.
DEVICE void arrive_by_warp(uint32 barrier) {
  __syncwarp();
  if (elect()) arrive(barrier);
}

// Rounds the probabilities of row ROW to DTYPE, as operand A of WGMMA in registers: p[i] has 16 tokens.
template <int ROW, int N>
DEVICE void round_row(uint32 (&p)[N / 8][4], const float (&logits)[N]) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i)
#pragma unroll
    for (int j = ROW; j < 4; j += 2) p[i][j] = pack(logits[8 * i + 2 * j], logits[8 * i + 2 * j + 1]);
}

template <int N>
DEVICE void rescale(float (&output)[N], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) output[i] *= alpha[i / 2 % 2];
}

// Rescales the output of a warp only if `row_max` of one of its rows has changed.
template <int N>
DEVICE void rescale_if_changed(float (&output)[N], const float (&alpha)[2]) {
  if (__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) rescale(output, alpha);
}

// Transposes the four words of each of the four lanes of a quad: lane i gets word i of each lane.
DEVICE uint4 transpose_quad(uint32 w0, uint32 w1, uint32 w2, uint32 w3) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const uint32 a = __shfl_xor_sync(~0u, odd ? w0 : w1, 1), b = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
  w0 = odd ? a : w0, w1 = odd ? w1 : a, w2 = odd ? b : w2, w3 = odd ? w3 : b;
  const uint32 c = __shfl_xor_sync(~0u, upper ? w0 : w2, 2), d = __shfl_xor_sync(~0u, upper ? w1 : w3, 2);
  return upper ? uint4{c, d, w2, w3} : uint4{w0, w1, c, d};
}

// ---- Stores -------------------------------------------------------------------------------------------------------

// The columns of a row of a result. All columns that a thread computes are columns of a FullRow. Those of a PaddedRow
// end before them: the others are not stored.
template <int COLUMNS>
struct FullRow {
  static constexpr int columns = COLUMNS;
  DEVICE static bool has(int) { return true; }
};
struct PaddedRow {
  int columns;  // a multiple of 8
  DEVICE bool has(int column) const { return column < columns; }
};

// Stores the N / 2 elements that this thread has of each of its two rows. The N * 2 columns of `output` begin at column
// `first_column` of a result with rows as `of_row`, a FullRow or a PaddedRow. `row` are the indices of the two rows in
// the result; rows without `exists` are not stored.
template <OutType TYPE, class Row, int N>
DEVICE void store_rows(void* out, const float (&output)[N], int first_column, Row of_row, const int64 (&row)[2],
                       const bool (&exists)[2]) {
  using Pair = decltype(pair_of<TYPE>(0, 0));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Pair* to = static_cast<Pair*>(out) + row[r] * (of_row.columns / 2) + first_column / 2 + threadIdx.x % 4;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
        if (of_row.has(first_column + 8 * i))
          to[4 * i] = pair_of<TYPE>(output[4 * i + 2 * r], output[4 * i + 2 * r + 1]);
  }
}

// Stores a partial result in float32: as store_rows, but `partial` may lie at any multiple of 4 bytes.
template <class Row, int N>
DEVICE void store_partial(float* partial, const float (&output)[N], int first_column, Row of_row,
                          const int64 (&row)[2], const bool (&exists)[2]) {
  if (reinterpret_cast<uint64>(partial) % 8 == 0)
    return store_rows<kFloat32>(partial, output, first_column, of_row, row, exists);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* to = partial + row[r] * of_row.columns + first_column + threadIdx.x % 4 * 2;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
        if (of_row.has(first_column + 8 * i))
          to[8 * i] = output[4 * i + 2 * r], to[8 * i + 1] = output[4 * i + 2 * r + 1];
  }
}

// As store_rows, in a 16-bit type and 16 bytes at a time.
template <OutType TYPE, class Row, int N>
DEVICE void store_vectors(void* out, const float (&output)[N], int first_column, Row of_row, const int64 (&row)[2],
                          const bool (&exists)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4* to = static_cast<uint4*>(out) + row[r] * (of_row.columns / 8) + first_column / 8 + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < N / 4; i += 4) {
      uint32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = pair_of<TYPE>(output[4 * (i + j) + 2 * r], output[4 * (i + j) + 2 * r + 1]);
      const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3]);
      if (exists[r] && of_row.has(first_column + 8 * (i + threadIdx.x % 4))) to[i] = chunk;
    }
  }
}

// As store_rows, in type `type`. Stores 16 bytes at a time in the type of the operands and in ALSO, another type that
// queries may have.
template <OutType ALSO = kLikeOperands, class Row, int N>
DEVICE void store_as(int type, void* out, const float (&output)[N], int first_column, Row of_row,
                     const int64 (&row)[2], const bool (&exists)[2]) {
  constexpr OutType kOfOperands = DTYPE == 2 ? kBFloat16 : kFloat16;
  if (type == kLikeOperands) return store_vectors<kOfOperands>(out, output, first_column, of_row, row, exists);
  if constexpr (ALSO != kLikeOperands)
    if (type == ALSO) return store_vectors<ALSO>(out, output, first_column, of_row, row, exists);
  switch (type) {
    case kFloat32: return store_rows<kFloat32>(out, output, first_column, of_row, row, exists);
    case kFloat16: return store_rows<kFloat16>(out, output, first_column, of_row, row, exists);
    case kBFloat16: return store_rows<kBFloat16>(out, output, first_column, of_row, row, exists);
    case kE4M3: return store_rows<kE4M3>(out, output, first_column, of_row, row, exists);
    case kE5M2: return store_rows<kE5M2>(out, output, first_column, of_row, row, exists);
  }
}

}  // namespace
}  // namespace attn_ops
