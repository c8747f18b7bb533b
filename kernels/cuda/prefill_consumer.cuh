// Prefill: the consumers.
#pragma once

#include "division.cuh"
#include "prefill_softmax.cuh"
#if ALIBI
#include "prefill_alibi.cuh"
#endif

namespace attn_ops {
namespace {

// The full barriers of a ring, by the number of a KV tile among all of this CTA.
template <int STAGES>
struct FullBarriers {
  uint32 first;

  DEVICE uint32 of(uint32 tile) const { return first + tile % (2 * STAGES) * 8; }
  DEVICE uint32 parity(uint32 tile) const { return tile / (2 * STAGES) & 1; }
};

struct Results {
  const float* sinks;  // of each head, or null
  void* out;
  float *lse, *partial;  // lse may be null
  int out_type;
  const float* kv_scale;  // of FP8 keys and values, or null
};

struct Arguments {
  float scale, cap;
  bool scales_queries;  // those that were bfloat16
  Results results;
};

// Divides by the row sums and stores output and LSE, or the partial result. `line` is this thread's first packed row of
// the unit.
DEVICE void store(Output& output, const Rows& rows, const Problem& p, DivideByGroup row_of, const Results& to,
                  const QueryBlock& block, int line) {
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
  if (split) to_lse = to.partial + int64(p.slots) * p.tile_rows * num_heads * kDimVo;
  if (to_lse && threadIdx.x % 4 == 0) {
    if (exists[0]) to_lse[to_row[0]] = lse[0];
    if (exists[1]) to_lse[to_row[1]] = lse[1];
  }
  rescale(output, norm);
  if (split) return store_partial<kDimVo>(to.partial, output, 0, to_row, exists);
  store_as<kDimVo, kFewRows ? kBFloat16 : kLikeOperands>(to.out_type, to.out, output, 0, to_row, exists);
}

// An accumulator passes through a query buffer that is smaller in parts.
constexpr int kStateBytes = kPackedRows * kDimVo * 4, kBufferBytes = kQueryTiles * kQueryBytes;
constexpr int kStateParts = (kStateBytes + kBufferBytes - 1) / kBufferBytes;

// Adds the state of the odd KV tiles to that of the even ones, through the query buffer, which neither consumer reads
// any more. Which consumer has which depends on the units before; the order of additions does not.
DEVICE void reduce(bool odd, Output& output, Rows& rows, Shared& shared, uint32 memory) {
  constexpr int kGroups = kDimVo / 8 / kStateParts;  // of 4 registers, in a part
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
  sync();  // the state is stored
  if (odd) {
#pragma unroll
    for (int part = 1; part < kStateParts; ++part) sync(), store_part(part), sync();
    return fence_async_shared();  // TMA writes here next
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

// Consumers begin the exponentials of a KV tile one after another, each when the one before has those of its rows 0 (an
// OrderedSequenceBarrier in CUTLASS). Without an order they come to compute exponentials all at the same time, and then
// to wait for products. Soft caps, 16-bit heads of 192/128 and 256, three consumers of heads of 128, and FP8 caches
// were measured to be faster without it.
constexpr bool kOrdered = kDimQk <= 128 && !kConverts && !kLargeBatch;

struct Order {
  const Problem& p;
  int own;  // named barrier, on which the consumer before arrives; 0 without an order

  DEVICE Order(int consumer, const Problem& p, float cap) : p(p), own(0) {
    // Consumers with alternate tiles may have one more or less.
    if (!kOrdered || cap > 0 || p.split_kv()) return;
    own = kFirstInOrder + consumer;
    if (consumer == p.consumers() - 1) arrive();
  }

  DEVICE void wait() const {
    if (own) named_sync(own, 2 * kConsumerThreads);
  }

  DEVICE void arrive() const {
    const int end = kFirstInOrder + (kConsumers == 2 ? 2 : p.consumers());
    if (own) named_arrive(own + 1 < end ? own + 1 : kFirstInOrder, 2 * kConsumerThreads);
  }
};

constexpr int kRowFactors = kFewRows ? 2 : 1;  // what logits are multiplied by: of each of a thread's rows, or of both

// One warpgroup: the attention of its packed rows, or of its KV tiles, for all units.
DEVICE void consume(int consumer, const Problem& p, const Arguments& arguments, Shared& shared) {
  const bool split_kv = p.split_kv();
  const DivideByGroup row_of(p.group);
  // The scale of the keys is one of the logits, unless that is 0, negative or out of range: then it multiplies them.
  const float* kv_scale = arguments.results.kv_scale;
  const float of_both = arguments.scale * (kv_scale ? kv_scale[0] : 1.f);
  const bool folded = !kv_scale || (of_both >= kLeastScale && of_both <= kMostScale);
  const float scale = folded ? of_both : arguments.scale;
  // The bias of ALiBi is divided by the scale, unless that is 0, negative or out of range: then logits are multiplied
  // by it before.
  const bool divides_slopes = !kAlibi || (scale >= kLeastScale && scale <= kMostScale);
  const float left = divides_slopes ? scale : 1.f;  // what logits have to be multiplied by
  const float factor = arguments.cap > 0 ? arguments.cap * kLog2e : left * kLog2e;
  const float to_cap = arguments.cap > 0 ? left / arguments.cap : 0.f;
  const int first_line = split_kv ? 0 : consumer * kPackedRows;
  const int lane = threadIdx.x % 32, line = first_line + threadIdx.x % kConsumerThreads / 32 * 16 + lane / 4;
  const uint64 keys = k_major(shared_address(shared.keys[0]), TileLayout<kDimQk>::kGroup, kRowBytes);
  const uint64 values = pv_values(shared);
  const FullBarriers<kKeyStages> k_full = {shared_address(shared.k_full)};
  const FullBarriers<kPvStages> v_full = {pv_full(shared)};
  const uint32 k_empty = shared_address(shared.k_empty), v_empty = pv_empty(shared);
  const auto wait_for_queries = [&](uint32 n) { wait(shared_address(&shared.q_full[n % kQueries]), n / kQueries & 1); };
  const auto queries = [&](uint32 n) { return shared_address(shared.query[n % kQueries][split_kv ? 0 : consumer]); };
  Query query;
  const auto values_of = [&](uint32 tile) { return values + tile % kPvStages * (kValueBytes / 16); };
  const auto issue_tile = [&](Logits& logits, uint32 tile) {
    wait(k_full.of(tile), k_full.parity(tile));
    if (kFencesKeys) fence_async_shared();
    mark(kWaitKeys);
    wgmma_fence();
    issue_qk(logits, query, keys + tile % kKeyStages * (kKeyBytes / 16));
  };
  const Order order(consumer, p, arguments.cap);
  Logits logits;
  bool first_logits = false;  // of the unit are complete
  uint32 base = 0;            // number of the unit's first KV tile among all of this CTA
  for (uint32 n = 0;; ++n) {
    wait_for_queries(n);
    const QueryBlock& block = shared.query_blocks[n % kQueryBlocks];
    const int stored = uniform(block.stored), low = uniform(block.low), high = uniform(block.high);
    const int start = uniform(block.start), end = uniform(block.end);
    mark(stored >= 0 ? kWaitUnit : kIdle);
    if (stored < 0) return;
    tally(kUnits);
    const int remainder = uniform(block.remainder);
    const uint32 q_empty = shared_address(&shared.q_empty[n % kQueries]);

    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(remainder + line + 8 * r);
      // Relative to this thread's first column of a tile.
      rows.low[r] = low + row - lane % 4 * 2;
      rows.high[r] = min(end, high + row) - lane % 4 * 2;
      rows.row_max[r] = -kInfinity, rows.row_sum[r] = 0;
    }
    // Tiles within these bounds are visible to all rows of this consumer.
    const int last_row = row_of(remainder + first_line + kPackedRows - 1);
    const int visible_begin = low + last_row, visible_end = min(end, high + row_of(remainder + first_line));
    const bool all_rows = last_row < stored;
#if CUSTOM_MASK
    store_mask(mask_of(p, uniform(block.request), uniform(block.row)), shared);
#endif
    // And need no more if they end before this.
    const int plain_end = folded && arguments.cap <= 0 && !kCustomMask && !kAlibi ? visible_end : 0;

#if ALIBI
    const AlibiSlopes slopes(p, row_of, block.head, remainder + line, left);
#endif

    float factors[kRowFactors];
#pragma unroll
    for (float& x : factors) x = factor;
#if FEW_ROWS
    const float* const scales = shared.query_scales[n % kQueries] + line;  // of this thread's rows, 8 apart
    // Of logits themselves where something else comes before the factors.
    const bool scales_logits = arguments.scales_queries && (arguments.cap > 0 || !folded);
    if (arguments.scales_queries && !scales_logits)
#pragma unroll
      for (int r = 0; r < 2; ++r) factors[r] = fminf(fmaxf(factor * scales[8 * r], kLeastFactor), kMostFactor);
#endif

    Output output;
    Partial partial;
#pragma unroll
    for (int i = 0; i < kDimVo / 2; ++i) output[i] = 0;
    const int tiles = (end - start + kTile - 1) / kTile, step = split_kv ? 2 : 1;
    int tile = split_kv ? (base ^ consumer) & 1 : 0;  // which full barriers a consumer waits for depends on this
    if (tile < tiles) {
      Probabilities probabilities;
      float alpha[2], alpha_before[2];
      const auto mask_tile = [&](int first) {
        if (first + kTile <= plain_end && first >= visible_begin) [[likely]] return;
        const bool visible_to_all = first + kTile <= visible_end && first >= visible_begin;
#if FEW_ROWS
        if (scales_logits) multiply_rows(logits, scales);
#endif
        if (!folded) multiply(logits, kv_scale[0]);
#if ALIBI
        if (!divides_slopes) multiply(logits, scale);
        add_bias(logits, rows, slopes, first, block.bias_row, low);
#endif
        if (arguments.cap > 0) soft_cap(logits, to_cap, visible_to_all && all_rows && !kCustomMask);
        if (!visible_to_all) mask(logits, rows, first);
#if CUSTOM_MASK
        mask(logits, rows, p, own_mask(shared), low, first);
#endif
      };
      uint32 number = base + tile;  // of the KV tile whose logits are computed, among all of this CTA
      if (!first_logits) {
        query.load(queries(n));
        issue_tile(logits, number);
        wgmma_wait<0>();
        fence_registers(logits);
        arrive_by_warp(k_empty + number % kKeyStages * 8);
        mark(kQk);
      }
      first_logits = false;
      mask_tile(start + tile * kTile);
      subtract_first_max<0>(logits, rows, factors[0]), exponentiate<0>(logits, rows);
      subtract_first_max<1>(logits, rows, factors[kRowFactors - 1]), exponentiate<1>(logits, rows);
      alpha_before[0] = alpha_before[1] = 1;
      round_row<0>(probabilities, logits), round_row<1>(probabilities, logits);
      mark(kSoftmax);
      tally(kTiles);
      for (tile += step; tile < tiles; tile += step) {
        const uint32 previous = number;
        number = base + tile;
        issue_tile(logits, number);
        mark(kQk);
        wait(v_full.of(previous), v_full.parity(previous));
        if (kFencesValues) fence_async_shared();
        mark(kWaitValues);
        issue_pv(output, partial, probabilities, values_of(previous));
        wgmma_wait<1>();
        fence_registers(logits);
        arrive_by_warp(k_empty + number % kKeyStages * 8);
        mark(kQk);
        // O += P V of the tile before, which is complete already. The assembler would move exponentials behind the wait
        // for it: see keep_before. With wide heads a barrier that is complete is waited for again, which takes fewer
        // registers.
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
        mask_tile(start + tile * kTile);
        // The last quarter of row 0 fills the latency of keep_before.
        constexpr int kKept = kTile / 8 * 3 / 4;
        const int largest_0 = subtract_max<0>(logits, rows, factors[0]);
        order.wait();
        bool raised = raise_if_over<0>(largest_0, logits, rows, alpha);
        exponentiate<0, 0, kKept>(logits, rows);
        const float kept = rows.row_sum[0];
        exponentiate<0, kKept>(logits, rows);
        const int largest_1 = subtract_max<1>(logits, rows, factors[kRowFactors - 1]);
        order.arrive();
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
      if (!split_kv) arrive_by_warp(q_empty);
      wait(v_full.of(number), v_full.parity(number));
      if (kFencesValues) fence_async_shared();
      mark(kWaitValues);
      issue_pv(output, partial, probabilities, values_of(number));
      if (kQueries > 1 && !split_kv) {
        mark(kPv);
        wait_for_queries(n + 1);
        mark(kWaitUnit);
        const QueryBlock& following = shared.query_blocks[(n + 1) % kQueryBlocks];
        if (uniform(following.stored) >= 0 && uniform(following.start) < uniform(following.end)) {
          base += tiles;
          query.load(queries(n + 1));
          issue_tile(logits, base);
          wgmma_wait<1>();
          finish_pv(output, partial, probabilities, values_of(number), alpha_before);
          arrive_by_warp(v_empty + number % kPvStages * 8);
          mark(kPv);
          store(output, rows, p, row_of, arguments.results, block, line);
          mark(kEpilogue);
          wgmma_wait<0>();
          fence_registers(logits);
          arrive_by_warp(k_empty + base % kKeyStages * 8);
          mark(kQk);
          first_logits = true;
          continue;
        }
      }
      wgmma_wait<0>();
      finish_pv(output, partial, probabilities, values_of(number), alpha_before);
      arrive_by_warp(v_empty + number % kPvStages * 8);
      mark(kPv);
    }
    const bool odd = split_kv && (base ^ consumer) & 1;
    base += tiles;

    if (split_kv) reduce(odd, output, rows, shared, queries(n));
    if (split_kv || tiles <= 0) arrive_by_warp(q_empty);
    if (!odd) store(output, rows, p, row_of, arguments.results, block, line);
    mark(kEpilogue);
  }
}

}  // namespace
}  // namespace attn_ops
