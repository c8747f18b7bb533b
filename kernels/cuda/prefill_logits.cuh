// Prefill: what changes the logits of a KV tile before the softmax.
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

// A thread has two packed rows, 8 apart, and of each the columns 8 i + 2 (lane % 4) and the next one, for every i.
struct Rows {
  float row_max[2], row_sum[2];  // row_max is less kLogScale; row_sum is relative to it, over own columns
  int low[2], high[2];           // tokens that the row sees
};

// The tanh of `to_cap` times each logit. Almost all logits of a model are far below the cap, where it needs no
// exponential: the warp takes the other form if one of its logits is not. So it does where logits are of other memory,
// on which no bit of a result may depend.
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

// By `scales[0]` and `scales[8]`, those of this thread's rows.
DEVICE void multiply_rows(Logits& logits, const float* scales) {
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) logits[i] *= scales[i / 2 % 2 * 8];
}

// A bit for each of this thread's columns of a row, in order, that is before token `end` of the tile.
DEVICE uint32 columns_before(int end) {
  end = max(min(end, kTile), 0);
  return static_cast<uint32>((uint64(1) << (end / 8 * 2 + min(end % 8, 2))) - 1);
}
static_assert(kTile <= 128);

// By bits, of which an instruction makes seven predicates.
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
// The custom mask: `low` is that of row 0 of the unit, and `first` the first token of the tile.
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
