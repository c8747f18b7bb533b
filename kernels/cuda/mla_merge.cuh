// MLA: how the two CTAs of a cluster merge their results, of which each has half of the KV tiles of a unit (SPLITS 2):
// CTA s has those from number n s / 2 to n (s + 1) / 2 of n. Both have the same packed rows.
//
// A warp exchanges with the same warp of the other CTA, thread by thread, since both have the same packed rows and
// columns in the same threads. It sends half of its columns, and keeps the sum of the other half.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "mla_problem.cuh"

namespace attn_ops {
namespace {

static_assert(CLUSTER * SPLITS <= 2);  // more than two CTAs do not run on all SMs at the same time
constexpr int kLanesBytes = 32 * 16;   // 16 bytes of each lane

// Memory of a warp for what its partner sends: half of the numbers of a thread, and the maxima and sums of its rows.
constexpr DEVICE int merge_bytes(int numbers, int rows) { return (numbers / 2 + 2 * rows) / 4 * kLanesBytes; }

// One warp of each CTA.
struct Merge {
  uint32 memory, full, ready;  // of this warp: what arrives; the barrier for that; the one for the partner's readiness
  int split;                   // of this CTA
  uint32 parity = 0;           // of the units that this warp has merged

  // `number(i)` is number i of N of a thread's results relative to row_max, and row(i) its row. At the end, the first
  // half are results of columns that this CTA keeps, the lower half of all columns for CTA 0; the others mean nothing.
  // All lanes have read what the memory had: a barrier of their warpgroup lies between two calls.
  template <int N, int ROWS, class Number, class RowOf>
  DEVICE void run(Number number, RowOf row, float (&row_max)[ROWS], float (&row_sum)[ROWS]) {
    if (SPLITS == 1) return;
    constexpr int kKept = N / 2, kChunks = kKept / 4, kStates = 2 * ROWS / 4;
    const int lane = threadIdx.x % 32, partner = split ^ 1;
    if (lane == 0) {
      arrive_expect(full, (kChunks + kStates) * kLanesBytes);
      arrive_in_cluster(address_in(ready, partner));
    }
    wait(ready, parity);
    const uint32 to = address_in(memory + lane * 16, partner), barrier = address_in(full, partner);
#pragma unroll
    for (int c = 0; c < kStates; ++c) {
      float state[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) state[i] = 4 * c + i < ROWS ? row_max[4 * c + i] : row_sum[4 * c + i - ROWS];
      store_async(to + c * kLanesBytes, state, barrier);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float sent[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = number(4 * c + i), high = number(4 * c + i + kKept);
        sent[i] = split ? low : high, number(4 * c + i) = split ? high : low;
      }
      store_async(to + (kStates + c) * kLanesBytes, sent, barrier);
    }
    wait(full, parity);
    float own[ROWS], other[ROWS], state[2 * ROWS];
#pragma unroll
    for (int c = 0; c < kStates; ++c) {
      const float4 x = load_four(memory + lane * 16 + c * kLanesBytes);
      state[4 * c] = x.x, state[4 * c + 1] = x.y, state[4 * c + 2] = x.z, state[4 * c + 3] = x.w;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float new_max = fmaxf(row_max[r], state[r]);
      own[r] = rescale_factor(row_max[r], new_max), other[r] = rescale_factor(state[r], new_max);
      row_max[r] = new_max, row_sum[r] = row_sum[r] * own[r] + state[ROWS + r] * other[r];
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4 x = load_four(memory + lane * 16 + (kStates + c) * kLanesBytes);
      const float received[] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = number(4 * c + i);
        sum = sum * own[row(4 * c + i)] + received[i] * other[row(4 * c + i)];
      }
    }
    parity ^= 1;
  }
};

}  // namespace
}  // namespace attn_ops
