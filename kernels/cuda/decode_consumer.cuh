// Decode: the consumer warpgroups. The numbers of steps are those of the schedule in `decode.cu`.
#pragma once

#include "decode_query.cuh"
#include "decode_results.cuh"
#include "swapped_operands.cuh"
#include "tanh.cuh"
#if KV_FP8
#include "decode_fp8_products.cuh"
#else
#include "decode_products.cuh"
#endif

namespace attn_ops {
namespace {

constexpr int kOwnRows = kPackedRows / 4;  // packed rows of a thread

// One warpgroup. It computes every second work item of the CTA, for one KV head.
struct Consumer {
  const Problem& p;
  const Queries& queries;
  const Results& results;
  Shared& shared;
  const int number;  // of this consumer in the CTA: kTurns consecutive numbers for each KV head
  const int turn = number % kTurns;
  ConsumerShared& own = shared.consumers[number];
  const int thread = threadIdx.x % kConsumerThreads, warp = thread / 32;
  const int line = warp * 16 + threadIdx.x % 32 / 4;
  const float cap = queries.base2_cap();
  float* const reduced = &own.reduced[0][0];

  uint32 stage = 0, parity = 0;
  uint32 buffer = 0;        // index of the buffer of P
  float factors[kOwnRows];  // multiply the results of the QK product
  float row_max[kOwnRows];
  float row_sum[kOwnRows];  // over the tokens of this thread
  Product output[kColumnBlocks];

  DEVICE void sync() const { named_sync(kConsumer + number, kConsumerThreads); }

  // Passes the turn to the other consumer of the KV head, which then waits for its KV tiles. Called after this consumer
  // has waited for all its own KV tiles: a wait knows the parity of a phase alone, and would return at once while the
  // phase before is not complete.
  DEVICE void hand_over() const { named_arrive(kTurn + (number ^ 1), kTurns * kConsumerThreads); }
  DEVICE void wait_for_turn() const { named_sync(kTurn + number, kTurns * kConsumerThreads); }

  // Shared-memory address of this consumer's KV head in the keys or values of a KV tile.
  DEVICE uint32 of_head(const char (&rows)[kTileBytes]) const {
    return shared_address(rows) + number / kTurns * kHeadBytes;
  }

  DEVICE void fence_output() {
#pragma unroll
    for (int c = 0; c < kColumnBlocks; ++c) fence_registers(output[c]);
  }

  // Turns the QK product of the tile that begins at token `first` into base-2 logits, -inf for tokens that the row does
  // not see.
  DEVICE void scale_and_mask(Product (&logits)[kTokenBlocks], const WorkItem& item, int first) const {
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) logits[t][place(j, r)] *= factors[j];
    if (cap > 0) {
      const SmallTanh small(1);
#pragma unroll
      for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
        for (float& x : logits[t]) x = cap * (fabsf(x) <= kSmallTanh ? small(x) : tanh_exact(x));
    }
    if (!item.hides(first)) return;
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!item.sees(first + 64 * t + line + 8 * r))
#pragma unroll
          for (int j = 0; j < kOwnRows; ++j) logits[t][place(j, r)] = -kInfinity;
  }

  // Sets the values of tokens that the row does not see to 0: their memory may hold NaN, which a probability of 0 would
  // not hide. The proxy fence and the barrier after the store of P order these stores too before the PV product.
  DEVICE void zero_values(const WorkItem& item, int first) const {
    constexpr int kChunks = kTokenBytes / 16;
    const uint32 values = of_head(shared.stages[stage].values);
#pragma unroll 1
    for (int i = thread; i < kTile * kChunks; i += kConsumerThreads) {
      const int token = i / kChunks, chunk = i % kChunks, of_row = kRowBytes / 16;
      if (!item.sees(first + token))
        store_shared(values + token / 8 * kGroupBytes + chunk / of_row * kBlockBytes + token % 8 * kRowBytes +
                         chunk % of_row * 16,
                     uint4{0, 0, 0, 0});
    }
  }

  // Stores P, relative to row_max, in buffer `buffer`. `sums` are the sums of P over the tokens of this thread.
  DEVICE void exponentiate(const Product (&logits)[kTokenBlocks], float (&sums)[kOwnRows]) const {
#pragma unroll
    for (float& sum : sums) sum = 0;
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t) {
      Product probabilities;
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = probabilities[place(j, r)];
          x = exp2_approx(logits[t][place(j, r)] - finite(row_max[j]));
          sums[j] += x;
        }
      store_probabilities<kPackedRows>(shared_address(own.p[buffer][t]), probabilities, warp);
    }
    fence_async_shared();  // for P, and for the zeros of zero_values
  }

  // Raises row_max where a logit of the KV tile exceeds it by more than the threshold. Rescales row_sum and O^T.
  DEVICE void raise_row_max(const Product (&logits)[kTokenBlocks]) {
    float largest[kOwnRows];
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      largest[j] = -kInfinity;
#pragma unroll
      for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r) largest[j] = fmaxf(largest[j], logits[t][place(j, r)]);
    }
    reduce_to<kOwnRows, 16>(reduced + warp, largest, 0, Max{});
    sync();  // maxima are stored
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const float new_max = next_row_max(row_max[j], max_of(of_warps(reduced, j)));
      const float alpha = rescale_factor(row_max[j], new_max);
      row_max[j] = new_max, row_sum[j] *= alpha;
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r) output[c][place(j, r)] *= alpha;
    }
  }

  DEVICE bool exceeds_row_max(const Product (&logits)[kTokenBlocks]) const {
    bool exceeds = false;
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t)
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) exceeds |= logits[t][place(j, r)] > row_max[j] + kRescaleThreshold;
    return exceeds;
  }

  // Step 5. Most KV tiles do not raise row_max and need no maximum over threads. The barrier after the store of P tells
  // all threads whether one of them has a logit that exceeds row_max by more than the threshold. Only then, and in the
  // first tile, maxima are reduced, and P is computed with the new row_max.
  DEVICE void softmax(const Product (&logits)[kTokenBlocks], bool first_tile) {
    float sums[kOwnRows];
    bool exceeds = first_tile;
    if (!first_tile) {
      exponentiate(logits, sums);
      exceeds = named_any(kConsumer + number, kConsumerThreads, exceeds_row_max(logits));
    }
    if (exceeds) {
      raise_row_max(logits);
      exponentiate(logits, sums);
      sync();  // P is stored
    }
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) row_sum[j] += sums[j];
  }

  // Steps 4 to 6 of the KV tile that begins at token `first`. `hands_over`: the CTA has another work item after this.
  DEVICE void attend(const WorkItem& item, int first, bool hands_over) {
    const Stage& tile = shared.stages[stage];
    Product logits[kTokenBlocks];
    wait(shared_address(&shared.k_full[stage]), parity);
    multiply(logits, of_head(tile.keys), k_major(shared_address(own.query), kOperandGroupBytes));
#pragma unroll
    for (int t = 0; t < kTokenBlocks; ++t) fence_registers(logits[t]);
    scale_and_mask(logits, item, first);
    if (kClearsValues && item.hides(first)) {
      wait(shared_address(&shared.v_full[stage]), parity);
      zero_values(item, first);
    }
    softmax(logits, first == item.first);
    if (!(kClearsValues && item.hides(first))) wait(shared_address(&shared.v_full[stage]), parity);
    if (hands_over && first + kTile >= item.end) hand_over();
    fence_output();
    multiply_add(output, of_head(tile.values), k_major(shared_address(own.p[buffer]), kOperandGroupBytes));
    fence_output();
    arrive_by_warp(shared_address(&shared.empty[stage]));
    if (++stage == kStages) stage = 0, parity ^= 1;
    buffer ^= 1;
  }

  // Steps 7 to 9: divides by the row sums, stores output and LSE or the partial result of a split, and combines.
  DEVICE void store(const WorkItem& item) {
    const StoredRow to(results, item, p);
    const int dim = results.columns.head_dim;
    reduce_to<kOwnRows, 16>(reduced + warp, row_sum, 0, Sum{});
    sync();  // sums are stored
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const int head = packed_row(j);
      const bool exists = to.exists && head < results.group;
      RowState state = {row_max[j], sum_of(of_warps(reduced, j))};
      const float alpha = to.whole && head < results.group ? state.add_sink(results, head) : 1.f;
      const float norm = state.inverse() * alpha * (queries.kv_scale ? queries.kv_scale[1] : 1.f);
      if (thread < 4 && to.lse && exists) to.lse[to.first + head] = state.lse();
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int column = results.columns.column_of_head(c * 64 + column_of(r));
          const float x = output[c][place(j, r)] * norm;
          if (PADDED && column < 0) continue;
          if (to.whole)
            store_shared(shared_address(own.staged) + head * kStagedRowBytes + column * 4, x);
          else if (exists)
            // The 8 lanes of a packed row store 8 consecutive columns, with FP8 every second of 16.
            results.partial[(to.first + head) * dim + column] = x;
        }
    }
    if (to.whole)
      store_staged(to);
#if !DENSE
    else if (to.exists && results.combines)
      combine_if_last(item.row);
#endif
  }

  // Stores the rows that are not split in the type of the output. A thread stores 4 columns at a time.
  DEVICE void store_staged(const StoredRow& to) const {
    sync();  // columns are stored
    if (!to.exists) return;
    const int dim = results.columns.head_dim;
#pragma unroll 1
    for (int i = thread; i < results.group * (dim / 4); i += kConsumerThreads) {
      const int head = i / (dim / 4), column = i % (dim / 4) * 4;
      store_four_as(results.out_type, results.out, (to.first + head) * dim + column,
                    load_four(shared_address(own.staged) + head * kStagedRowBytes + column * 4));
    }
  }

#if !DENSE
  // Step 9. The consumer that stores the last split of a row, in whichever CTA, combines the splits of the row.
  DEVICE void combine_if_last(int row) const {
    const Splits splits(p, row);
    if (splits.count() <= 0) return;
    fence_gpu();
    sync();  // all threads have stored their part of the split
    int& combines = shared.combines[number];
    if (thread == 0) combines = splits.count_to_last(results);
    sync();
    if (!combines) return;
    fence_gpu();
    combine_splits(results, splits, row, thread, kConsumerThreads);
  }
#endif

  DEVICE void run(const WorkList& list) {
    int i = list.begin + turn;
    WorkItem item = turn == 0 ? list.first : read_item(p, i, list.stop);
    uint32 tile = turn == 0 ? 0 : list.first.tiles();  // number of the item's first KV tile in the CTA
    for (; i < list.stop; i += kTurns) {
      QueryChunks query(queries, item.row, p.rows, thread);
      const WorkItem of_other = read_item(p, i + 1, list.stop), next = read_item(p, i + 2, list.stop);
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) row_max[j] = -kInfinity, row_sum[j] = 0;
#pragma unroll
      for (int c = 0; c < kColumnBlocks; ++c)
#pragma unroll
        for (float& x : output[c]) x = 0;
#if ROPE
      query.rotate(shared.turns, item.position, thread);
#endif
      query.store(shared_address(own.query), own.scales, queries.type, thread);
      fence_async_shared();
      sync();  // the query is stored
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) factors[j] = queries.factor() * (KV_FP8 ? own.scales[packed_row(j)] : 1.f);
      if (i > list.begin) wait_for_turn();
      stage = tile % kStages, parity = tile / kStages & 1;
      const bool hands_over = i + 1 < list.stop;
#pragma unroll 1
      for (int first = item.first; first < item.end; first += kTile) attend(item, first, hands_over);
      if (item.end == 0 && hands_over) hand_over();
      store(item);
      tile += item.tiles() + of_other.tiles();
      item = next;
    }
  }
};

}  // namespace
}  // namespace attn_ops
