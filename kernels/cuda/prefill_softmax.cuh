// Prefill: from the logits of a KV tile to probabilities.
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

// The online softmax over one more KV tile with lazy rescaling, of row ROW of this thread. Its logits become exponents,
// relative to its row_max, whose base-2 exponentials are the probabilities.

// Of the first tile that this consumer has of a unit: row_max is its largest logit.
template <int ROW>
DEVICE void subtract_first_max(Logits& logits, Rows& rows, float factor) {
  float largest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i)
    largest = fmaxf(largest, fmaxf(logits[4 * i + 2 * ROW], logits[4 * i + 2 * ROW + 1]));
  rows.row_max[ROW] = max_of_quad(largest) * factor - kLogScale;
  const float anchor = finite(rows.row_max[ROW]);
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = logits[4 * i + 2 * ROW + c];
      x = x * factor - anchor;
    }
}

// The same with the row_max of the tiles before. Almost no tile raises one: so not the maximum of the row is returned,
// but an integer over that of kMostExponent if an exponent is, or if the row saw no token so far. Positive floats have
// the order of their bits as integers, of which one instruction takes the maximum of three; negative ones do not
// matter.
template <int ROW>
DEVICE int subtract_max(Logits& logits, const Rows& rows, float factor) {
  const float anchor = finite(rows.row_max[ROW]);
  int largest = __float_as_int(rows.row_max[ROW] > -kInfinity ? 0 : kInfinity);
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i) {
    float &a = logits[4 * i + 2 * ROW], &b = logits[4 * i + 2 * ROW + 1];
    a = a * factor - anchor, b = b * factor - anchor;
    largest = max(max(largest, __float_as_int(a)), __float_as_int(b));
  }
  return largest;
}

// Raises row_max of rows that saw no token so far, and of those that have an exponent over kMostExponent, to the
// largest logit so far. `alpha` rescales sums over the tiles before.
template <int ROW>
DEVICE void raise_max(Logits& exponents, Rows& rows, float& alpha) {
  float largest = -kInfinity;
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i)
    largest = fmaxf(largest, fmaxf(exponents[4 * i + 2 * ROW], exponents[4 * i + 2 * ROW + 1]));
  largest = max_of_quad(largest);
  const float before = rows.row_max[ROW], anchor_before = finite(before);
  const bool keep = before > -kInfinity && largest <= kMostExponent;
  const float row_max = keep ? before : anchor_before + (largest - kLogScale), anchor = finite(row_max);
#pragma unroll
  for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) exponents[4 * i + 2 * ROW + c] -= anchor - anchor_before;
  alpha = exp2_approx(before - anchor);
  rows.row_max[ROW] = row_max, rows.row_sum[ROW] *= alpha;
}

// Whether row_max of a row of this warp was raised: else `alpha` is 1.
template <int ROW>
DEVICE bool raise_if_over(int largest, Logits& exponents, Rows& rows, float (&alpha)[2]) {
  alpha[ROW] = 1;
  const bool raised = __any_sync(~0u, largest > __float_as_int(kMostExponent));
  if (raised) raise_max<ROW>(exponents, rows, alpha[ROW]);
  return raised;
}

// Exponents of tokens 8 * BEGIN to 8 * END of the tile become probabilities.
template <int ROW, int BEGIN = 0, int END = kTile / 8>
DEVICE void exponentiate(Logits& exponents, Rows& rows) {
#pragma unroll
  for (int i = BEGIN; i < END; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float& x = exponents[4 * i + 2 * ROW + c];
      x = exp2_approx(x);
      rows.row_sum[ROW] += x;
    }
}

}  // namespace
}  // namespace attn_ops
