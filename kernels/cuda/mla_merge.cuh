// MLA: how the CTAs of a cluster merge their results, which divide the KV tiles of a unit. SPLITS CTAs have the same
// packed rows; the CTA of split s has those tiles from number n s / SPLITS to n (s + 1) / SPLITS of n.
//
// A warp exchanges with the same warp of one other CTA at a time, thread by thread, since all CTAs have the same packed
// rows and columns in the same threads. In each step it sends half of the columns that it has, and keeps the sum of the
// other half: the partner keeps those that this one sends. So each CTA ends with the results of 1 / SPLITS of the
// columns.
#pragma once

#include "cluster.cuh"
#include "mla_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kMergeSteps = SPLITS == 4 ? 2 : SPLITS - 1;
static_assert(SPLITS == 1 || SPLITS == 2 || SPLITS == 4);
constexpr int kLanesBytes = 32 * 16;  // 16 bytes of each lane

// Memory of a warp for what its partners send: half of the numbers of a thread, and the maxima and sums of its rows.
constexpr DEVICE int merge_bytes(int numbers, int rows) { return (numbers / 2 + 2 * rows) / 4 * kLanesBytes; }

// The first of `columns` that a CTA has after all steps, which divide them.
DEVICE int first_merged(int split, int columns) {
  int first = 0;
#pragma unroll
  for (int step = 0; step < kMergeSteps; ++step) first += (split >> step & 1) * (columns >> step + 1);
  return first;
}

// One warp of each CTA of a cluster.
struct Merge {
  uint32 memory, full, ready;  // of this warp: what arrives; the barrier for that; those for the partners' readiness
  int split, part;             // of this CTA: its split, and which of the CTAs of this split it is
  uint32 parity = 0;           // of the units that this warp has merged

  // Step STEP. `number(j)` is number j of N of a thread's results relative to row_max, and row(j) its row. The first
  // N >> STEP are columns that this CTA has before the step, and the first half of these the ones after it.
  template <int STEP, int N, int ROWS, class Number, class RowOf>
  DEVICE void step(Number number, RowOf row, float (&row_max)[ROWS], float (&row_sum)[ROWS]) {
    constexpr int kKept = N >> STEP + 1, kChunks = kKept / 4, kStates = 2 * ROWS / 4;
    const int lane = threadIdx.x % 32, partner = (split ^ 1 << STEP) * CLUSTER + part;
    const bool upper = split >> STEP & 1;
    __syncwarp();  // all lanes have read what the memory had
    if (lane == 0) {
      arrive_expect(full, (kChunks + kStates) * kLanesBytes);
      arrive_in_cluster(address_in(ready + STEP * 8, partner));
    }
    wait(ready + STEP * 8, parity);  // each partner has a barrier: the one of a later step may arrive first
    const uint32 to = address_in(memory + lane * 16, partner), barrier = address_in(full, partner);
#pragma unroll
    for (int c = 0; c < kStates; ++c) {
      float state[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) state[i] = 4 * c + i < ROWS ? row_max[(4 * c + i) % ROWS] : row_sum[(4 * c + i) % ROWS];
      store_async(to + c * kLanesBytes, state, barrier);
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float sent[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = number(4 * c + i), high = number(4 * c + i + kKept);
        sent[i] = upper ? low : high, number(4 * c + i) = upper ? high : low;
      }
      store_async(to + (kStates + c) * kLanesBytes, sent, barrier);
    }
    wait(full, kMergeSteps == 2 ? STEP : parity);
    float own[ROWS], other[ROWS], state[2 * ROWS];
#pragma unroll
    for (int c = 0; c < kStates; ++c) load_four(state + 4 * c, memory + lane * 16 + c * kLanesBytes);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float new_max = fmaxf(row_max[r], state[r]);
      own[r] = rescale_factor(row_max[r], new_max), other[r] = rescale_factor(state[r], new_max);
      row_max[r] = new_max, row_sum[r] = row_sum[r] * own[r] + state[ROWS + r] * other[r];
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float received[4];
      load_four(received, memory + lane * 16 + (kStates + c) * kLanesBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = number(4 * c + i);
        x = x * own[row(4 * c + i)] + received[i] * other[row(4 * c + i)];
      }
    }
  }

  // All steps. At the end, the first N / SPLITS numbers are results of columns of this CTA; others mean nothing.
  template <int N, int ROWS, class Number, class RowOf>
  DEVICE void run(Number number, RowOf row, float (&row_max)[ROWS], float (&row_sum)[ROWS]) {
    if constexpr (kMergeSteps > 0) step<0, N>(number, row, row_max, row_sum);
    if constexpr (kMergeSteps > 1) step<1, N>(number, row, row_max, row_sum);
    parity ^= 1;
  }

 private:
  static DEVICE void load_four(float* to, uint32 from) {
    const uint4 bits = load_shared(from);
    to[0] = __uint_as_float(bits.x), to[1] = __uint_as_float(bits.y);
    to[2] = __uint_as_float(bits.z), to[3] = __uint_as_float(bits.w);
  }
};

}  // namespace
}  // namespace attn_ops
