// Prefill: scales, soft cap and masks of the logits of a KV tile, before the softmax.
#pragma once

#if CUSTOM_MASK
#include "prefill_mask.cuh"
#else
#include "prefill_problem.cuh"
#endif
#include "tanh.cuh"
#if Q_FP8
#include "prefill_fp8_products.cuh"
#else
#include "prefill_products.cuh"
#endif

namespace attn_ops {
namespace {

// The two packed rows of a thread, 8 apart. Of each, the thread has columns 8 i + 2 (lane % 4) and the next one, for
// every i.
struct Rows {
  // row_max is the row maximum less kLogScale; row_sum the sum of 2^(logit - row_max) over the columns of this thread.
  float row_max[2], row_sum[2];
  int low[2], high[2];  // the row sees tokens of [low, high); both are less the thread's first column of a KV tile
};

// tanh(to_cap * logit) of each logit. Almost all logits of a model are far below the cap, where SmallTanh needs no
// exponential. A warp takes tanh_exact if one of its logits is larger, and whenever not all logits are visible. Hidden
// logits come from arbitrary memory: if the choice depended on them, so would bits of the result.
DEVICE void soft_cap(Logits& logits, float to_cap, bool all_visible) {
  const float scale = fabsf(to_cap);
  float largest = all_visible && scale >= kLeastTanhScale && scale <= 1 / kLeastTanhScale ? 0 : kInfinity;
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) largest = fmaxf(largest, fabsf(logits[i]));
  if (__any_sync(~0u, largest * scale > kSmallTanh)) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) logits[i] = tanh_exact(logits[i] * to_cap);
  } else {
    const SmallTanh tanh(to_cap);
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) logits[i] = tanh(logits[i]);
  }
}

DEVICE void multiply(Logits& logits, float scale) {
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) logits[i] *= scale;
}

// Multiplies the logits of this thread's two rows by `scales[0]` and `scales[8]`.
DEVICE void multiply_rows(Logits& logits, const float* scales) {
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) logits[i] *= scales[i / 2 % 2 * 8];
}

// A bit for each of this thread's columns of a row, in order: 1 if the column is before token `end` of the tile. `end`
// is less the thread's first column.
DEVICE uint32 columns_before(int end) {
  end = max(min(end, kTile), 0);
  return static_cast<uint32>((uint64(1) << (end / 8 * 2 + min(end % 8, 2))) - 1);
}
static_assert(kTile <= 128);

// Sets logits outside of [rows.low, rows.high) to -inf, by bits: one instruction makes predicates of seven bits.
DEVICE void mask(Logits& logits, const Rows& rows, int first) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int low = rows.low[r] - first, count = rows.high[r] - first;
    const uint32 visible = columns_before(count) & ~columns_before(low);
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (!(visible >> (2 * i + c) & 1)) logits[4 * i + 2 * r + c] = -kInfinity;
  }
}

#if CUSTOM_MASK
// Sets logits that the custom mask hides to -inf. `low` is the unit's (QueryBlock), `first` the first token of the
// tile.
DEVICE void mask(Logits& logits, const Rows& rows, const Problem& p, const UnitMask& custom, int low, int first) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = rows.low[r] + column - low;
    uint32 visible[kTile / 32];
    load_bits(p, custom.first + int64(row) * custom.stride + first + column, visible);
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (!(visible[i / 4] >> (i % 4 * 8 + c) & 1)) logits[4 * i + 2 * r + c] = -kInfinity;
  }
}
#endif

}  // namespace
}  // namespace attn_ops
