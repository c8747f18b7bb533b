// Prefill: the online softmax of a KV tile, from logits to probabilities.
#pragma once

#include "prefill_logits.cuh"

namespace attn_ops {
namespace {

// Online softmax with lazy rescaling. Each function works on row ROW, 0 or 1, of this thread. Logits become exponents,
// logit * factor - row_max, whose base-2 exponentials are the probabilities.

// The first KV tile that this consumer has of a unit: sets row_max by its largest logit.
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

// A later KV tile: subtracts the row_max of the tiles before. Almost no tile raises row_max, so the row maximum is not
// computed. Returns an integer above the bits of kMostExponent if one of this thread's exponents is above
// kMostExponent, or if the row saw no token so far. Bits of positive floats, as integers, have the order of the floats,
// and one instruction takes the maximum of three integers. Negative floats are negative integers, and do not matter.
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

// Raises row_max to the largest logit so far if the row saw no token so far, or has an exponent over kMostExponent.
// `alpha` is the factor by which l and O over the tiles before are rescaled; row_sum (l) is rescaled here.
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

// Raises row_max if `largest`, a result of subtract_max, requires it in a lane of this warp. Returns whether one does;
// otherwise `alpha` is 1.
template <int ROW>
DEVICE bool raise_if_over(int largest, Logits& exponents, Rows& rows, float (&alpha)[2]) {
  alpha[ROW] = 1;
  const bool raised = __any_sync(~0u, largest > __float_as_int(kMostExponent));
  if (raised) raise_max<ROW>(exponents, rows, alpha[ROW]);
  return raised;
}

// Makes exponents of tokens 8 * BEGIN to 8 * END of the KV tile probabilities, and adds them to row_sum.
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
