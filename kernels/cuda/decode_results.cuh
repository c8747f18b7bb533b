// Decode: where results are stored, and the combine of the splits of a row, which this kernel does in eager calls.
#pragma once

#if DENSE
#include "decode_dense.cuh"
#else
#include "decode_plan.cuh"
#endif
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

struct Results {
  HeadDim columns;
  void* out;             // [rows, heads, head_dim]
  float* lse;            // [rows, heads] or null
  float* partial;        // [slots, heads, head_dim], then LSEs [slots, heads]
  int* split_counters;   // [slots, heads]
  const float* sinks;    // [heads] or null
  int slots, group;
  bool combines;         // whether this kernel, not a later one, combines splits and stores rows without tokens
  int out_type;

  DEVICE int heads() const { return num_kv_heads() * group; }
  DEVICE int first_head() const { return kv_head() * group; }
  DEVICE float* partial_lse() const { return partial + int64(slots) * heads() * columns.head_dim; }
};

// The online-softmax state of a query row and head.
struct RowState {
  float row_max = -kInfinity, row_sum = 0;

  // Adds 2^logit to the softmax denominator. Returns the factor that rescales the values added before.
  DEVICE float add(float logit) {
    const float new_max = fmaxf(row_max, logit), anchor = finite(new_max);
    const float alpha = exp2_approx(row_max - anchor);
    row_max = new_max, row_sum = row_sum * alpha + exp2_approx(logit - anchor);
    return alpha;
  }
  DEVICE float add_sink(const Results& to, int head) {
    return to.sinks ? add(to.sinks[to.first_head() + head] * kLog2e) : 1.f;
  }
  DEVICE float inverse() const { return row_sum > 0 ? 1 / row_sum : 0.f; }
  DEVICE float lse() const { return row_max + log2f(row_sum); }
};

// Where the result of a work item is stored.
struct StoredRow {
  bool whole, exists;  // whole: the row is not split; exists: the row or slot is within the capacity
  int64 first;         // index of the group's first head in [rows, heads] of `out`, or [slots, heads] of `partial`
  float* lse;          // LSEs of `out` or of `partial`, with the same index; may be null for `out`

  DEVICE StoredRow(const Results& to, const WorkItem& item, const Problem& p) {
    whole = item.slot < 0;
    exists = whole ? uint32(item.row) < uint32(p.rows) : item.slot < to.slots;
    first = int64(whole ? item.row : item.slot) * to.heads() + to.first_head();
    lse = whole ? to.lse : to.partial_lse();
  }
};

#if !DENSE

// The slots of a row's splits, in the order of their tokens.
struct Splits {
  int begin = 0, end = 0;

  DEVICE Splits(const Problem& p, int row) {
    if (uint32(row) >= uint32(min(p.rows, p.max_batch))) return;
    begin = max(p.merge_indptr[row], 0), end = min(p.merge_indptr[row + 1], p.slots);
  }
  DEVICE int count() const { return end - begin; }

  // Counts a stored split for this KV head. Returns whether it is the last one, which sets the counter back to 0.
  DEVICE bool count_to_last(const Results& to) const {
    const int64 at = int64(begin) * to.heads() + kv_head();
    return atomic_increment(to.split_counters + at, count() - 1) == uint32(count() - 1);
  }
};

// Combines the partial results of the splits of a row, for the query heads of one KV head. Without splits it stores
// zeros, and an LSE of the sink or -inf. A thread computes four columns of a head at a time.
DEVICE void combine_splits(const Results& to, const Splits& splits, int row, int thread, int threads) {
  constexpr int kAtOnce = 4;
  const int dim = to.columns.head_dim;
  const int64 heads = to.heads(), first_head = to.first_head();
  const float* lse = to.partial_lse();
#pragma unroll 1
  for (int i = thread; i < to.group * (dim / 4); i += threads) {
    const int head = i / (dim / 4), column = i % (dim / 4) * 4;
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
        for (int c = 0; c < 4; ++c) x[n][c] = exists ? to.partial[at * dim + column + c] : 0.f;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float alpha = state.add(logits[n]), split_alpha = exp2_approx(logits[n] - finite(state.row_max));
        sum = {sum.x * alpha + x[n][0] * split_alpha, sum.y * alpha + x[n][1] * split_alpha,
               sum.z * alpha + x[n][2] * split_alpha, sum.w * alpha + x[n][3] * split_alpha};
      }
    }
    const float norm = state.add_sink(to, head) * state.inverse();
    const int64 at = row * heads + first_head + head;
    store_four_as(to.out_type, to.out, at * dim + column,
                  {sum.x * norm, sum.y * norm, sum.z * norm, sum.w * norm});
    if (column == 0 && to.lse) to.lse[at] = state.lse();
  }
}

// Stores the results of rows without tokens, which have no work item: zeros, and an LSE of the sink or -inf. This CTA
// has the rows cta_of_heads() + i * num_ctas(). All warps of the consumers of a KV head call this function. A warp
// reads the lengths of 32 of these rows at a time, one per lane.
DEVICE void store_empty_rows(const Problem& p, const Results& to) {
  constexpr int kWarps = kTurns * kConsumerWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps, rows = min(p.rows, p.max_batch);
  for (int64 first = cta_of_heads() + int64(32 * warp) * num_ctas(); first < rows;
       first += int64(32) * kWarps * num_ctas()) {
    const int64 row = first + int64(lane) * num_ctas();
    uint32 empty = __ballot_sync(~0u, row < rows && p.kv_len[row] <= 0);
    for (; empty; empty &= empty - 1)
      combine_splits(to, {p, -1}, int(first + int64(__ffs(empty) - 1) * num_ctas()), lane, 32);
  }
}

#endif

}  // namespace
}  // namespace attn_ops
