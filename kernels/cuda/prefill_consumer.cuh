// Prefill: the consumers.
#pragma once

#include "division.cuh"
#include "prefill_epilogue.cuh"
#include "prefill_softmax.cuh"
#if ALIBI
#include "prefill_alibi.cuh"
#endif

namespace attn_ops {
namespace {

// The full barriers of a ring. `n` counts the stages that were filled over all units of this CTA: KV tiles, or parts of
// KV tiles in a ring of keys with kKeyParts > 1.
template <int STAGES>
struct FullBarriers {
  uint32 first;

  DEVICE uint32 of(uint32 n) const { return first + n % (2 * STAGES) * 8; }
  DEVICE uint32 parity(uint32 n) const { return n / (2 * STAGES) & 1; }
  DEVICE void wait(uint32 n) const { attn_ops::wait(of(n), parity(n)); }
};

struct Arguments {
  float scale, cap;
  bool scales_queries;  // logits are multiplied by query_scales: queries were bfloat16
  Results results;
};

// The factors of the logits. The softmax multiplies logits by `factor`, the product of scales and log2(e), so that
// exponentials are to base 2. Scales that cannot be part of `factor` multiply the logits before (`adjust_logits`). With
// a soft cap, `factor` is the cap times log2(e), and the scales are part of `to_cap`.
struct LogitScale {
  float factor;
  float cap, to_cap;      // soft cap; logit * to_cap is the scaled logit divided by the cap
  bool keys_before;       // the scale of FP8 keys multiplies the logits before
  float scale;            // scale of the logits, times the scale of FP8 keys unless keys_before
  bool before_bias;       // `scale` multiplies the logits before the bias of ALiBi; else the bias is divided by `scale`
  float after_bias;       // `scale`, or 1 if before_bias

  DEVICE explicit LogitScale(const Arguments& arguments) : cap(arguments.cap) {
    // If `scale` would be 0, negative or out of range, the scale of FP8 keys, or with ALiBi `scale`, multiplies the
    // logits before.
    const auto in_range = [](float x) { return x >= kLeastScale && x <= kMostScale; };
    const float* of_keys = arguments.results.kv_scale;
    const float of_both = arguments.scale * (of_keys ? of_keys[0] : 1.f);
    scale = arguments.scale, keys_before = true;
    if (!of_keys || in_range(of_both)) scale = of_both, keys_before = false;
    before_bias = kAlibi && !in_range(scale);
    after_bias = before_bias ? 1.f : scale;
    factor = cap > 0 ? cap * kLog2e : after_bias * kLog2e;
    to_cap = cap > 0 ? after_bias / cap : 0.f;
  }

  // Whether no scale, bias or soft cap comes before the softmax.
  DEVICE bool plain() const { return !keys_before && cap <= 0 && !kAlibi; }
};

// The step of a descriptor from the columns of values of one consumer to those of the next (kSharedRows).
constexpr int kPartOfValues = kDimVo / kColumns * TileLayout<kValueColumns>::kColumn / 16;

constexpr int kRowFactors = kFewRows ? 2 : 1;  // factors of a thread: one for each of its rows, or one for both rows

// Consumers begin the exponentials of a KV tile one after another, each when the consumer before has computed the
// exponentials of its rows 0 (CUTLASS: OrderedSequenceBarrier). Without an order, all consumers come to compute
// exponentials at the same time, and then to wait for products at the same time. Measured to be faster without an
// order: soft caps, 16-bit heads of 192/128 and 256, three consumers with heads of 96 and 128, and FP8 caches. Heads of
// 512, FP8 products with heads of 256, and RoPE have no order either.
constexpr bool kOrdered = kConsumers > 1 && kDimQk <= 128 && !kConverts && !kShortTiles;

struct Order {
  const Problem& p;
  int own;  // the named barrier on which the consumer before this one arrives; 0 without an order

  DEVICE Order(int consumer, const Problem& p, float cap) : p(p), own(0) {
    // With split_kv, consumers may have different numbers of tiles.
    if (!kOrdered || cap > 0 || p.split_kv()) return;
    own = kFirstInOrder + consumer;
    if (consumer == p.consumers() - 1) arrive(0);
  }

  DEVICE void wait() const {
    if (own) named_sync(own, 2 * kConsumerThreads);
  }

  // Arrives after `sum`, of probabilities, is computed. Without this dependence the assembler would move the arrival
  // before the exponentials.
  DEVICE void arrive(float sum) const {
    const int end = kFirstInOrder + (kConsumers == 2 ? 2 : p.consumers());
    const int next = own + 1 < end ? own + 1 : kFirstInOrder;
    if (own) named_arrive(next + (sum < 0), 2 * kConsumerThreads);
  }
};

// The state of a unit in one consumer.
struct ConsumerUnit {
  const QueryBlock& block;
  int stored, low, high, start, end, remainder;  // fields of the block, in uniform registers
  int tiles;
  // KV tiles within [visible_begin, visible_end) are visible to all rows of the consumer. Those that end at or before
  // `plain_end` go to the softmax as they are. `all_rows`: the results of all rows of the consumer are stored.
  int visible_begin, visible_end, plain_end;
  bool all_rows;

  DEVICE ConsumerUnit(const QueryBlock& block)
      : block(block), stored(uniform(block.stored)), low(uniform(block.low)), high(uniform(block.high)),
        start(uniform(block.start)), end(uniform(block.end)) {}

  DEVICE bool exists() const { return stored >= 0; }

  // `plain`: no scale, bias or soft cap comes before the softmax, at most a mask.
  DEVICE void set_bounds(DivideByGroup row_of, int first_line, bool plain) {
    remainder = uniform(block.remainder);
    tiles = (end - start + kTile - 1) / kTile;
    const int last_row = row_of(remainder + first_line + kPackedRows - 1);
    visible_begin = low + last_row, visible_end = min(end, high + row_of(remainder + first_line));
    all_rows = last_row < stored;
    plain_end = uniform(plain && !kCustomMask ? visible_end : 0);  // here: the compiler would compute it in each tile
  }

  DEVICE int first_token(int tile) const { return start + tile * kTile; }
};

// One warpgroup: the attention of its packed rows for all units of the CTA. With split_kv it takes every other KV tile,
// with kSharedRows it computes half of the columns. A KV tile's `number` counts the tiles of all units of the CTA.
struct Consumer {
  const Problem& p;
  const Arguments& arguments;
  Shared& shared;
  const int consumer;
  const bool split_kv;
  const DivideByGroup row_of;
  const LogitScale scale;
  const int first_line, line;  // first packed row of this consumer in a unit, and of this thread
  const uint64 keys, values;   // descriptors of the first stage of the rings
  const FullBarriers<kKeyStages> k_full;
  const FullBarriers<kPvStages> v_full;
  const uint32 k_empty, v_empty;
  const Order order;

  Query query;
  Logits logits;
  Probabilities probabilities;
  Output output;
  Partial partial;
  float alpha[2], alpha_before[2];  // alpha of the current KV tile, and of the tile before
  Rows rows;
  float factors[kRowFactors];
#if FEW_ROWS
  const float* query_scales;  // [0] and [8]: scales of this thread's two rows
  bool scales_logits;         // query_scales multiply the logits in adjust_logits, not as a part of `factors`
#endif
#if ALIBI
  AlibiSlopes slopes;
#endif

  DEVICE Consumer(int consumer, const Problem& p, const Arguments& arguments, Shared& shared)
      : p(p), arguments(arguments), shared(shared), consumer(consumer), split_kv(p.split_kv()), row_of(p.group),
        scale(arguments), first_line(p.same_rows() ? 0 : consumer * kPackedRows),
        line(first_line + threadIdx.x % kConsumerThreads / 32 * 16 + threadIdx.x % 32 / 4),
        keys(k_major(shared_address(shared.keys[0]), TileLayout<kKeyDim>::kGroup, kRowBytes)),
        values(pv_values(shared) + (kSharedRows ? consumer * kPartOfValues : 0)),
        k_full{shared_address(shared.k_full)}, v_full{pv_full(shared)},
        k_empty(shared_address(shared.k_empty)), v_empty(pv_empty(shared)), order(consumer, p, arguments.cap) {}

  DEVICE void run() {
    bool first_logits = false;  // the logits of the unit's first KV tile are complete
    uint32 base = 0;            // number of the unit's first KV tile
    for (uint32 n = 0;; ++n) {
      wait_for_queries(n);
      ConsumerUnit unit(shared.query_blocks[n % kQueryBlocks]);
      mark(unit.exists() ? kWaitUnit : kIdle);
      if (!unit.exists()) return;
      tally(kUnits);
      begin(n, unit);
      const uint32 q_empty = shared_address(&shared.q_empty[n % kQueries]);
      const bool odd = split_kv && (base ^ consumer) & 1;  // a consumer has tiles, and full barriers, of one parity
      int tile = odd ? 1 : 0;
      if (tile < unit.tiles) {
        uint32 number = base + tile;
        if (!first_logits) {
          query.load(queries(n));
          issue_logits(number);
          finish_logits<0>(number);
        }
        first_logits = false;
        first_probabilities(unit, unit.first_token(tile));
        for (tile += step(); tile < unit.tiles; tile += step()) {
          const uint32 previous = number;
          number = base + tile;
          next_probabilities(unit, unit.first_token(tile), number, previous);
        }
        if (!split_kv) arrive_by_warp(q_empty);
        issue_output(number);
        if (kQueries > 1 && !split_kv) {
          mark(kPv);
          wait_for_queries(n + 1);
          mark(kWaitUnit);
          const QueryBlock& following = shared.query_blocks[(n + 1) % kQueryBlocks];
          if (uniform(following.stored) >= 0 && uniform(following.start) < uniform(following.end)) {
            base += unit.tiles;
            query.load(queries(n + 1));
            issue_logits(base);
            wgmma_wait<1>();
            finish_output(number);
            store_output(unit);
            mark(kEpilogue);
            finish_logits<0>(base);
            first_logits = true;
            continue;
          }
        }
        wgmma_wait<0>();
        finish_output(number);
      }
      base += unit.tiles;
      if (split_kv) reduce(odd, output, rows, shared, queries(n));
      if (split_kv || unit.tiles <= 0) arrive_by_warp(q_empty);
      if (!odd) store_output(unit);
      mark(kEpilogue);
    }
  }

  DEVICE int step() const { return split_kv ? 2 : 1; }

  DEVICE void wait_for_queries(uint32 n) { wait(shared_address(&shared.q_full[n % kQueries]), n / kQueries & 1); }

  DEVICE uint32 queries(uint32 n) { return shared_address(shared.query[n % kQueries][p.same_rows() ? 0 : consumer]); }

  // The state of unit n before its first KV tile.
  DEVICE void begin(uint32 n, ConsumerUnit& unit) {
    unit.set_bounds(row_of, first_line, scale.plain());
    const int first_column = threadIdx.x % 4 * 2;  // this thread's first column of a KV tile; low and high are less it
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(unit.remainder + line + 8 * r);
      rows.low[r] = unit.low + row - first_column;
      rows.high[r] = min(unit.end, unit.high + row) - first_column;
      rows.row_max[r] = -kInfinity, rows.row_sum[r] = 0;
    }
#if CUSTOM_MASK
    store_mask(mask_of(p, uniform(unit.block.request), uniform(unit.block.row)), shared);
#endif
#if ALIBI
    slopes = AlibiSlopes(p, row_of, unit.block.head, unit.remainder + line, scale.after_bias);
#endif
#pragma unroll
    for (float& x : factors) x = scale.factor;
#if FEW_ROWS
    query_scales = shared.query_scales[n % kQueries] + line;
    scales_logits = arguments.scales_queries && (scale.cap > 0 || scale.keys_before);
    if (arguments.scales_queries && !scales_logits)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        factors[r] = fminf(fmaxf(scale.factor * query_scales[8 * r], kLeastFactor), kMostFactor);
#endif
#pragma unroll
    for (float& x : output) x = 0;
  }

  DEVICE void issue_logits(uint32 number) {
    uint64 ring = keys;
    if (kKeyParts > 1) keep_in_loop(ring);  // or each of the 32 descriptors derived from it has registers of its own
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      const uint32 stage = number * kKeyParts + part;
      k_full.wait(stage);
      if (kFencesKeys) fence_async_shared();
      mark(kWaitKeys);
      wgmma_fence();
      issue_qk(logits, query, ring + stage % kKeyStages * (kKeyBytes / 16), part);
      if (part > 0) {
        wgmma_wait<1>();
        release_keys(stage - 1);
      }
    }
  }

  DEVICE void release_keys(uint32 stage) { arrive_by_warp(k_empty + stage % kKeyStages * 8); }

  // Waits for the logits; PENDING products that were issued after them may run on.
  template <int PENDING>
  DEVICE void finish_logits(uint32 number) {
    wgmma_wait<PENDING>();
    fence_registers(logits);
    release_keys(number * kKeyParts + kKeyParts - 1);
    mark(kQk);
  }

  DEVICE uint64 values_of(uint32 number) const { return values + number % kPvStages * (kValueBytes / 16); }

  DEVICE void issue_output(uint32 number) {
    v_full.wait(number);
    if (kFencesValues) fence_async_shared();
    mark(kWaitValues);
    issue_pv(output, partial, probabilities, values_of(number));
  }

  DEVICE void finish_output(uint32 number) {
    finish_pv(output, partial, probabilities, values_of(number), alpha_before);
    arrive_by_warp(v_empty + number % kPvStages * 8);
    mark(kPv);
  }

  DEVICE void store_output(const ConsumerUnit& unit) {
#if UNIT_PARTS > 1
    const int first_column = uniform(unit.block.first_column);
#else
    const int first_column = kSharedRows ? consumer * kDimVo : 0;
#endif
    store(output, rows, p, row_of, arguments.results, unit.block, line, first_column);
  }

  // Scales, bias of ALiBi, soft cap and masks of the KV tile from token `first` on.
  DEVICE void adjust_logits(const ConsumerUnit& unit, int first) {
    if (first + kTile <= unit.plain_end && first >= unit.visible_begin) [[likely]] return;
    const bool visible_to_all = first + kTile <= unit.visible_end && first >= unit.visible_begin;
#if FEW_ROWS
    if (scales_logits) multiply_rows(logits, query_scales);
#endif
    if (scale.keys_before) multiply(logits, arguments.results.kv_scale[0]);
#if ALIBI
    if (scale.before_bias) multiply(logits, scale.scale);
    add_bias(logits, rows, slopes, first, unit.block.bias_row, unit.low);
#endif
    if (scale.cap > 0) soft_cap(logits, scale.to_cap, visible_to_all && unit.all_rows && !kCustomMask);
    if (!visible_to_all) mask(logits, rows, first);
#if CUSTOM_MASK
    mask(logits, rows, p, own_mask(shared), unit.low, first);
#endif
  }

  // Softmax of the first KV tile that this consumer has of a unit. Its logits are complete.
  DEVICE void first_probabilities(const ConsumerUnit& unit, int first) {
    adjust_logits(unit, first);
    subtract_first_max<0>(logits, rows, factors[0]), exponentiate<0>(logits, rows);
    subtract_first_max<1>(logits, rows, factors[kRowFactors - 1]), exponentiate<1>(logits, rows);
    alpha_before[0] = alpha_before[1] = 1;
    round_row<0>(probabilities, logits), round_row<1>(probabilities, logits);
    mark(kSoftmax);
    tally(kTiles);
  }

  // QK product and softmax of KV tile `number`, which overlap the PV product of KV tile `previous`.
  DEVICE void next_probabilities(const ConsumerUnit& unit, int first, uint32 number, uint32 previous) {
    issue_logits(number);
    mark(kQk);
    issue_output(previous);
    finish_logits<1>(number);
    // Finishes O += P V of the previous tile, which is complete already. The assembler would move exponentials behind
    // wgmma_wait: see keep_before. With wide heads a second wait for a full barrier, at an address that depends on the
    // row sum, keeps the order with fewer registers.
    const auto finish_previous = [&](float kept, bool raised) {
      if (kFinishEarly)
        keep_before(kept);
      else
        wait(v_full.of(previous) + (rows.row_sum[0] < 0), v_full.parity(previous));
      wgmma_wait<0>();
      finish_pv(output, partial, probabilities, values_of(previous), alpha_before);
      arrive_by_warp(v_empty + previous % kPvStages * 8);
      if (raised) rescale_for_next(output, alpha);
      round_row<0>(probabilities, logits);
    };
    adjust_logits(unit, first);
    // keep_before takes the row sum over three quarters of row 0: the exponentials of the last quarter fill its
    // latency.
    constexpr int kKept = kTile / 8 * 3 / 4;
    const int largest_0 = subtract_max<0>(logits, rows, factors[0]);
    order.wait();
    bool raised = raise_if_over<0>(largest_0, logits, rows, alpha);
    exponentiate<0, 0, kKept>(logits, rows);
    const float kept = rows.row_sum[0];
    exponentiate<0, kKept>(logits, rows);
    const int largest_1 = subtract_max<1>(logits, rows, factors[kRowFactors - 1]);
    order.arrive(kept);
    raised |= raise_if_over<1>(largest_1, logits, rows, alpha);
    if (kFinishEarly) finish_previous(kept, raised);
    exponentiate<1>(logits, rows);
    fence_registers(logits);
    mark(kSoftmax);
    if (!kFinishEarly) finish_previous(kept, raised);
    alpha_before[0] = alpha[0], alpha_before[1] = alpha[1];
    round_row<1>(probabilities, logits);
    mark(kPv);
    tally(kTiles);
  }
};

}  // namespace
}  // namespace attn_ops
