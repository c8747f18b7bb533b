// Prefill: the epilogue of a unit: the reduction of the states of two consumers (split_kv), and the stores of results.
#pragma once

#include "division.cuh"
#include "prefill_softmax.cuh"
#if ALIBI
#include "prefill_alibi.cuh"
#endif

namespace attn_ops {
namespace {

struct Results {
  const float* sinks;  // a logit for each query head, or null
  void* out;
  float *lse, *partial;  // lse may be null
  int out_type;
  const float* kv_scale;  // scales of FP8 keys, [0], and values, [1], or null
};

// Divides the accumulator by the row sums and stores it from column `first_column` on, as output or as partial result.
// If first_column is 0, also stores the LSE. `line` is this thread's first packed row of the unit.
DEVICE void store(Output& output, const Rows& rows, const Problem& p, DivideByGroup row_of, const Results& to,
                  const QueryBlock& block, int line, int first_column) {
  const int first = uniform(block.remainder) + line, num_heads = p.num_kv_heads * p.group;
  const bool split = block.slot >= 0;
  const float sums[2] = {sum_of_quad(rows.row_sum[0]), sum_of_quad(rows.row_sum[1])};
  float norm[2], lse[2];
  int64 to_row[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = first + 8 * r, row = row_of(packed), head = packed - row * p.group;
    exists[r] = row < block.stored;
    to_row[r] = block.first + int64(row) * num_heads + head;
    float row_max = rows.row_max[r], sum = sums[r], alpha = 1;
#if ALIBI
    row_max += alibi_slope(block.head + head, num_heads) * float(block.bias_rest) * kLog2e;
#endif
    if (to.sinks && !split) {  // the combine kernel adds the sink to split tiles
      const float sink = (exists[r] ? to.sinks[block.head + head] : -kInfinity) * kLog2e, joined = fmaxf(row_max, sink);
      const float anchor = finite(joined);
      alpha = exp2f(row_max - anchor), sum = sum * alpha + exp2f(sink - anchor), row_max = joined;
    }
    norm[r] = (sum > 0 ? alpha / sum : 0.f) * (to.kv_scale ? to.kv_scale[1] : 1.f);
    lse[r] = row_max + log2f(sum);
  }
  float* to_lse = to.lse;
  if (split) to_lse = to.partial + int64(p.slots) * p.slot_rows() * num_heads * p.head_dim_vo;
  if (to_lse && first_column == 0 && threadIdx.x % 4 == 0) {
    if (exists[0]) to_lse[to_row[0]] = lse[0];
    if (exists[1]) to_lse[to_row[1]] = lse[1];
  }
  rescale(output, norm);
#if PADDED
  const PaddedRow of_row = {p.head_dim_vo};
#else
  constexpr FullRow<kOutDim> of_row;
#endif
  if (split) return store_partial(to.partial, output, first_column, of_row, to_row, exists);
  store_as<kFewRows ? kBFloat16 : kLikeOperands>(to.out_type, to.out, output, first_column, of_row, to_row, exists);
}

// If a query buffer is smaller than an accumulator, the accumulator goes through it in kStateParts parts.
constexpr int kStateBytes = kPackedRows * kDimVo * 4, kBufferBytes = kQueryTiles * kQueryBytes;
constexpr int kStateParts = (kStateBytes + kBufferBytes - 1) / kBufferBytes;

// split_kv: the consumer with the odd KV tiles passes its state (m, l, O) to the consumer with the even tiles, which
// adds it to its own. O goes through the query buffer at `memory`, which neither consumer reads any more. Which of the
// two consumers has the odd tiles depends on the units before; the order of additions does not.
DEVICE void reduce(bool odd, Output& output, Rows& rows, Shared& shared, uint32 memory) {
  constexpr int kGroups = kDimVo / 8 / kStateParts;  // groups of 4 registers in a part
  const int thread = threadIdx.x % kConsumerThreads, lane = thread % 32;
  const auto sync = [] { named_sync(kBothConsumers, 2 * kConsumerThreads); };
  const auto store_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int j = 4 * (part * kGroups + i);
      store_shared(memory + (i * kConsumerThreads + thread) * 16,
                   uint4{__float_as_uint(output[j]), __float_as_uint(output[j + 1]), __float_as_uint(output[j + 2]),
                         __float_as_uint(output[j + 3])});
    }
  };
  float sums[2] = {sum_of_quad(rows.row_sum[0]), sum_of_quad(rows.row_sum[1])};
  sync();
  const int line = thread / 32 * 16 + lane / 4;
  if (odd) {
    store_part(0);
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        shared.peer_max[line + 8 * r] = rows.row_max[r], shared.peer_sum[line + 8 * r] = sums[r];
  }
  sync();  // the first part of the state is stored
  if (odd) {
#pragma unroll
    for (int part = 1; part < kStateParts; ++part) sync(), store_part(part), sync();
    return fence_async_shared();  // the next writes to the query buffer may be by TMA
  }
  float alpha[2], peer_alpha[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float peer_max = shared.peer_max[line + 8 * r], row_max = fmaxf(rows.row_max[r], peer_max);
    const float anchor = finite(row_max);
    alpha[r] = exp2_approx(rows.row_max[r] - anchor), peer_alpha[r] = exp2_approx(peer_max - anchor);
    rows.row_max[r] = row_max;
    const float sum = sums[r] * alpha[r] + shared.peer_sum[line + 8 * r] * peer_alpha[r];
    rows.row_sum[r] = lane % 4 == 0 ? sum : 0.f;
  }
  rescale(output, alpha);
#pragma unroll
  for (int part = 0; part < kStateParts; ++part) {
    if (part > 0) sync(), sync();
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint4 peer = load_shared(memory + (i * kConsumerThreads + thread) * 16);
      const int j = 4 * (part * kGroups + i);
      output[j] += __uint_as_float(peer.x) * peer_alpha[0];
      output[j + 1] += __uint_as_float(peer.y) * peer_alpha[0];
      output[j + 2] += __uint_as_float(peer.z) * peer_alpha[1];
      output[j + 3] += __uint_as_float(peer.w) * peer_alpha[1];
    }
  }
  fence_async_shared();
}

}  // namespace
}  // namespace attn_ops
