// Prefill: ALiBi. Before the soft cap, a logit gets the slope of its head times the distance from its query row to its
// token. `write_bias_rows` says how rows are counted.
#pragma once

#include "division.cuh"
#include "prefill_logits.cuh"

namespace attn_ops {
namespace {

// Of head `head` of `num_heads`: powers of 2^(-8 / n) for the first n heads, where n is the largest power of 2 up to
// their number, and for the others those halfway between.
DEVICE float alibi_slope(int head, int num_heads) {
  const int log2_n = 31 - __clz(num_heads), beyond = head - (1 << log2_n);
  const float inverse = __uint_as_float(uint32(127 - log2_n) << 23);  // 1 / n
  return exp2_approx(float(beyond < 0 ? -8 * (head + 1) : -8 * beyond - 4) * inverse);
}

// The slopes of this thread's rows, packed rows `packed` and `packed + 8` of a KV head whose first head is `head`,
// divided by the scale that multiplies the logits later.
struct AlibiSlopes {
  float of[2];

  AlibiSlopes() = default;

  DEVICE AlibiSlopes(const Problem& p, DivideByGroup row_of, int head, int packed, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r, packed += 8)
      of[r] = alibi_slope(head + packed - row_of(packed) * p.group, p.num_kv_heads * p.group) / scale;
  }
};

// Adds the bias to the logits of the tile from token `first` on. `row` is the bias_row of the unit, and `low` that of
// its first row: rows.low minus `low` is this thread's row of the unit minus its first column. Distances are exact
// below 2^24, as differences of biases in float32 would not be.
DEVICE void add_bias(Logits& logits, const Rows& rows, const AlibiSlopes& slopes, int first, int row, int low) {
  const uint32 origin = uint32(first) - uint32(row) + uint32(low);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float distance = float(int(origin - uint32(rows.low[r])));
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = logits[4 * i + 2 * r + c];
        x = __fmaf_rn(slopes.of[r], distance + float(8 * i + c), x);
      }
  }
}

}  // namespace
}  // namespace attn_ops
