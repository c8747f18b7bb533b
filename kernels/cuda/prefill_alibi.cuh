// Prefill: the bias of ALiBi, the slope of the head times the distance from the query row to the token. It is added to
// the logits before the soft cap. `write_bias_rows` says how rows are counted.
#pragma once

#include "division.cuh"
#include "prefill_logits.cuh"

namespace attn_ops {
namespace {

// The slope of head `head` of `num_heads`. With n the largest power of 2 up to num_heads: 2^(-8 (head + 1) / n) for the
// first n heads; for head n + i 2^(-8 (i + 1 / 2) / n), with an exponent halfway between two of them.
DEVICE float alibi_slope(int head, int num_heads) {
  const int log2_n = 31 - __clz(num_heads), beyond = head - (1 << log2_n);
  const float inverse = __uint_as_float(uint32(127 - log2_n) << 23);  // 1 / n
  return exp2_approx(float(beyond < 0 ? -8 * (head + 1) : -8 * beyond - 4) * inverse);
}

// The slopes of this thread's two rows, packed rows `packed` and `packed + 8` of the KV head whose first query head is
// `head`. They are divided by `scale`, which the softmax or soft cap multiplies the logits by after the bias.
struct AlibiSlopes {
  float of[2];

  AlibiSlopes() = default;

  DEVICE AlibiSlopes(const Problem& p, DivideByGroup row_of, int head, int packed, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r, packed += 8)
      of[r] = alibi_slope(head + packed - row_of(packed) * p.group, p.num_kv_heads * p.group) / scale;
  }
};

// Adds the bias to the logits of the KV tile from token `first` on. `row` and `low` are bias_row and low of the unit's
// QueryBlock: rows.low[r] - low is this thread's row r of the unit less its first column. Distances are integers, exact
// in float32 below 2^24; differences of two biases would not be exact.
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
