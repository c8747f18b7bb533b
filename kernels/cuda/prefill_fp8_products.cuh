// Prefill: the QK and PV products of a consumer in FP8, e4m3 times e4m3.
//
// Keys of a KV tile as operands of PV
// -----------------------------------
// Of 32 keys, a thread with c = lane % 4 has the logits of keys 8 i + 2 c + e, with i < 4 and e < 2. As operand A of
// PV, the thread must have columns 16 h + 4 c + j, with h < 2 and j < 4. So column 16 h + 4 c + 2 i + e of the operand
// is key 16 h + 8 i + 2 c + e, with i < 2: each thread rounds the probabilities that it has, without shuffles, and the
// transposed values have their tokens in the same order (`prefill_fp8_transpose.cuh`).
//
// Probabilities
// -------------
// Probabilities are multiplied by 2^kLogScale = 32. Below 2^-6, the smallest normal number of e4m3, they lose
// precision: 2^-6 is 2^-11 times the probability of the logit that set row_max. Row sums add probabilities before they
// are rounded.
//
// Sums
// ----
// The tensor cores add FP8 products and the accumulator with about 14 bits, and drop lower bits. Over thousands of keys
// the accumulator would lose most of what a KV tile adds to it. So the product of each KV tile has an accumulator of
// its own, `Partial`, which is added to the output in float32. With wide heads, `Partial` has a part of the columns at
// a time.
#pragma once

#include "descriptors.cuh"
#include "epilogue.cuh"
#include "prefill_problem.cuh"
#include "wgmma_fp8.cuh"

namespace attn_ops {
namespace {

using Logits = float[kTile / 2];
using Output = float[kDimVo / 2];
using Probabilities = uint32[kTile / 32][4];
constexpr int kPvParts = kDimVo > 128 ? 4 : 1;  // parts of the columns; products of two parts do not overlap
using Partial = float[kDimVo / 2 / kPvParts];

constexpr bool kFinishEarly = true;  // prefill_products.cuh describes it

constexpr float kLogScale = 5;         // probabilities are those of the online softmax times 2^kLogScale
constexpr float kMostExponent = 8.75;  // largest exponent without a raise of row_max: e4m3 ends at 448 = 2^8.81

// The ring from which PV reads values.
constexpr int kPvStages = kTransposedStages;
DEVICE uint64 pv_values(Shared& shared) { return k_major(shared_address(shared.transposed[0]), 8 * kTile, kTile); }
DEVICE uint32 pv_full(Shared& shared) { return shared_address(shared.t_full); }
DEVICE uint32 pv_empty(Shared& shared) { return shared_address(shared.t_empty); }

struct Query {
  uint64 shared;  // descriptor

  DEVICE void load(uint32 address) { shared = k_major(address, kGroupBytes, kRowBytes); }
};

DEVICE void issue_qk(Logits& logits, const Query& query, uint64 keys, int) {
  discard_registers(logits);
#pragma unroll
  for (int column = 0; column < kDimQk; column += 32) {
    const int box = column / kColumns, step = column % kColumns / 16;
    wgmma_e4m3_ss(logits, query.shared + (box * kPackedRows * kRowBytes / 16 + step),
                  keys + (box * TileLayout<kDimQk>::kColumn / 16 + step), column > 0);
  }
  wgmma_commit();
}

// Issues the product with part `part` of the columns of values.
DEVICE void issue_part(Partial& partial, const Probabilities& p, uint64 values, int part) {
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i)
    wgmma_e4m3_rs(partial, p[i], values + (part * (kDimVo / kPvParts) * kTile + i * 32) / 16, i > 0);
  wgmma_commit();
}

DEVICE void add_part(Output& output, Partial& partial, int part, const float (&alpha)[2]) {
  constexpr int kCount = kDimVo / 2 / kPvParts;
  fence_registers(partial);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    output[part * kCount + i] = fmaf(output[part * kCount + i], alpha[i / 2 % 2], partial[i]);
}

// Issues the product with the first part of the columns. finish_pv issues the products with the other parts.
DEVICE void issue_pv(Output&, Partial& partial, const Probabilities& p, uint64 values) {
  wgmma_fence();
  issue_part(partial, p, values, 0);
}

// Rescales the output by the `alpha` of the KV tile of this product, and adds the product: its first part, which is
// complete, and then the other parts, which are computed here.
static_assert(kPvParts == 1 || kQueries == 1);  // else wgmma_wait<0> would wait for the first logits of the next unit
DEVICE void finish_pv(Output& output, Partial& partial, const Probabilities& p, uint64 values,
                      const float (&alpha)[2]) {
  add_part(output, partial, 0, alpha);
#pragma unroll
  for (int part = 1; part < kPvParts; ++part) {
    wgmma_fence();
    issue_part(partial, p, values, part);
    wgmma_wait<0>();
    add_part(output, partial, part, alpha);
  }
}

DEVICE void rescale_for_next(Output&, const float (&)[2]) {}  // finish_pv does it

template <int ROW>
DEVICE void round_row(Probabilities& p, const Logits& logits) {
#pragma unroll
  for (int i = 0; i < kTile / 32; ++i)
#pragma unroll
    for (int j = ROW; j < 4; j += 2) {
      const float* pairs = logits + 16 * i + j / 2 * 8 + j % 2 * 2;  // [0], [1]: two keys of a row; [4], [5]: 8 on
      p[i][j] = e4m3_pair(pairs[0], pairs[1]) | uint32(e4m3_pair(pairs[4], pairs[5])) << 16;
    }
}

}  // namespace
}  // namespace attn_ops
