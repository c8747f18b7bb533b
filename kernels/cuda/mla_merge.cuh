// MLA: with SPLITS 2, the two CTAs of a cluster merge their results of a unit. Both have the same packed rows. Of the n
// KV tiles of the unit, CTA s has tiles n s / 2 to n (s + 1) / 2 - 1.
//
// A warp and its partner, the same warp of the other CTA, have the same packed rows and columns in the same threads, so
// they exchange results thread by thread. A warp sends one half of its columns and merges the other half.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "mla_problem.cuh"

namespace attn_ops {
namespace {

static_assert(CLUSTER * SPLITS <= 2);  // clusters of more than two CTAs do not fill all SMs at the same time
constexpr int kLanesBytes = 32 * 16;   // 16 bytes of each lane

// Bytes that a warp receives from its partner: of each thread half of its `numbers` results, and row_max and row_sum of
// its `rows` rows.
constexpr DEVICE int merge_bytes(int numbers, int rows) { return (numbers / 2 + 2 * rows) / 4 * kLanesBytes; }

// The merges of one warp. `memory` is its shared memory that receives the results of the partner. `full` is its barrier
// merge_full, which these results complete. `ready` is its barrier merge_ready, on which the partner arrives.
struct Merge {
  uint32 memory, full, ready;
  int split;           // cluster split of this CTA
  uint32 parity = 0;   // parity of the number of units that this warp has merged

  // Merges results with the partner. `result(i)` is result i of N of this thread, relative to row_max of row
  // `row_of(i)`. CTA 0 merges the lower half of the thread's results, and CTA 1 the upper half. Afterwards the merged
  // half is in result(0) to result(N / 2 - 1), and the other results are undefined. A barrier of the warpgroup must lie
  // between two calls, so that all lanes have read `memory` before the partner writes to it again.
  template <int N, int ROWS, class ResultOf, class RowOf>
  DEVICE void run(ResultOf result, RowOf row_of, float (&row_max)[ROWS], float (&row_sum)[ROWS]) {
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
        const float low = result(4 * c + i), high = result(4 * c + i + kKept);
        sent[i] = split ? low : high, result(4 * c + i) = split ? high : low;
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
        float& sum = result(4 * c + i);
        sum = sum * own[row_of(4 * c + i)] + received[i] * other[row_of(4 * c + i)];
      }
    }
    parity ^= 1;
  }
};

}  // namespace
}  // namespace attn_ops
