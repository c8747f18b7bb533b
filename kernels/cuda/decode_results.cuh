// Decode: where results go, and the combine of a row's splits in eager calls.
#pragma once

#include "decode_problem.cuh"
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

struct Results {
  void* out;             // [rows, heads, kDim]
  float* lse;            // [rows, heads] or null
  float* partial;        // [slots, heads, kDim], then the LSE [slots, heads]
  int* split_counters;   // [slots, heads]
  const float* sinks;    // [heads] or null
  int slots, group;
  bool combines;         // splits of a row. Otherwise another kernel does, and stores rows without tokens
  int out_type;

  DEVICE int heads() const { return num_kv_heads() * group; }
  DEVICE int first_head() const { return kv_head() * group; }
  DEVICE float* partial_lse() const { return partial + int64(slots) * heads() * kDim; }
};

// The online-softmax state of a row and head.
struct RowState {
  float row_max = -kInfinity, row_sum = 0;

  // Adds a logit, or states relative to it with this sum. Returns what rescales earlier values.
  DEVICE float add(float logit, float sum) {
    const float new_max = fmaxf(row_max, logit), anchor = finite(new_max);
    const float alpha = exp2_approx(row_max - anchor);
    row_max = new_max, row_sum = row_sum * alpha + sum * exp2_approx(logit - anchor);
    return alpha;
  }
  DEVICE float add_sink(const Results& to, int head) {
    return to.sinks ? add(to.sinks[to.first_head() + head] * kLog2e, 1) : 1.f;
  }
  DEVICE float inverse() const { return row_sum > 0 ? 1 / row_sum : 0.f; }
  DEVICE float lse() const { return row_max + log2f(row_sum); }
};

// Where the result of a work item is stored.
struct StoredRow {
  bool whole, exists;  // not a split; within the capacity
  int64 first;         // of the row's heads: its number among those of `out` or `partial`
  float* lse;

  DEVICE StoredRow(const Results& to, const WorkItem& item, const Problem& p) {
    whole = item.slot < 0;
    exists = whole ? uint32(item.row) < uint32(p.rows) : item.slot < to.slots;
    first = int64(whole ? item.row : item.slot) * to.heads() + to.first_head();
    lse = whole ? to.lse : to.partial_lse();
  }
};

// The slots of a row's splits, in the order of the request.
struct Splits {
  int begin = 0, end = 0;

  DEVICE Splits(const Problem& p, int row) {
    if (uint32(row) >= uint32(min(p.rows, p.max_batch))) return;
    begin = max(p.merge_indptr[row], 0), end = min(p.merge_indptr[row + 1], p.slots);
  }
  DEVICE int count() const { return end - begin; }

  // Counts a stored split for this KV head. Whether it is the last one, which sets the counter back to 0.
  DEVICE bool count_to_last(const Results& to) const {
    const int64 at = int64(begin) * to.heads() + kv_head();
    return atomic_increment(to.split_counters + at, count() - 1) == uint32(count() - 1);
  }
};

// The partial results of a row's splits for the heads of this CTA. Threads have four columns of a head each.
DEVICE void combine_splits(const Results& to, const Splits& splits, int row, int thread, int threads) {
  constexpr int kAtOnce = 4;
  const int64 heads = to.heads(), first_head = to.first_head();
  const float* lse = to.partial_lse();
#pragma unroll 1
  for (int i = thread; i < to.group * (kDim / 4); i += threads) {
    const int head = i / (kDim / 4), column = i % (kDim / 4) * 4;
    RowState state;
    float4 sum = {};
#pragma unroll 1
    for (int slot = splits.begin; slot < splits.end; slot += kAtOnce) {
      float logits[kAtOnce], x[kAtOnce][4];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const bool exists = slot + n < splits.end;
        const int64 at = (slot + n) * heads + first_head + head;
        logits[n] = exists ? lse[at] : -kInfinity;
#pragma unroll
        for (int c = 0; c < 4; ++c) x[n][c] = exists ? to.partial[at * kDim + column + c] : 0.f;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float alpha = state.add(logits[n], 1), split_alpha = exp2_approx(logits[n] - finite(state.row_max));
        sum = {sum.x * alpha + x[n][0] * split_alpha, sum.y * alpha + x[n][1] * split_alpha,
               sum.z * alpha + x[n][2] * split_alpha, sum.w * alpha + x[n][3] * split_alpha};
      }
    }
    const float norm = state.add_sink(to, head) * state.inverse();
    const int64 at = row * heads + first_head + head;
    store_four_as(to.out_type, to.out, at * kDim + column,
                  {sum.x * norm, sum.y * norm, sum.z * norm, sum.w * norm});
    if (column == 0 && to.lse) to.lse[at] = state.lse();
  }
}

// Zeros, and an LSE of -inf or the sink, to those rows of this CTA that have no tokens: they have no work item. The
// warps of the consumers of a KV head; a lane looks at a row of every 32.
DEVICE void store_empty_rows(const Problem& p, const Results& to) {
  constexpr int kWarps = kTurns * kConsumerWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps, rows = min(p.rows, p.max_batch);
  for (int64 first = cta_of_plan() + int64(32 * warp) * num_ctas(); first < rows;
       first += int64(32) * kWarps * num_ctas()) {
    const int64 row = first + int64(lane) * num_ctas();
    uint32 empty = __ballot_sync(~0u, row < rows && p.kv_len[row] <= 0);
    for (; empty; empty &= empty - 1)
      combine_splits(to, {p, -1}, int(first + int64(__ffs(empty) - 1) * num_ctas()), lane, 32);
  }
}

}  // namespace
}  // namespace attn_ops
