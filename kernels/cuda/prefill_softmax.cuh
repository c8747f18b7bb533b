// Prefill: from the logits of a KV tile to probabilities.
#pragma once

#include "prefill_logits.cuh"

namespace attn_ops {
namespace {

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
