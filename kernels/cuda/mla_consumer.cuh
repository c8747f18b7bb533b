// MLA, `mla.cu`: the consumer warpgroups. The numbers of steps are those of the schedule in `mla.cu`.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "hopper.cuh"
#include "mla_merge.cuh"
#include "mla_partial.cuh"
#include "mla_shared.cuh"

namespace attn_ops {
namespace {

// The two packed rows of a thread, 8 apart. In each accumulator, a thread has columns 8 i + 2 (lane % 4) and the next
// column of these rows, for every i.
struct Rows {
  float row_max[2], row_sum[2];  // row_sum: over own tiles, and the columns of this thread
  int end[2];                    // one past the last token that the row sees, less 2 (lane % 4), the first column
};

using Logits = float[kTile / 2];
using Output = float[kHalf / 2];
using OutputPart = float[kPvColumns / 2];
using Probabilities = uint32[kTile / 16][4];

// The accumulator of PV product `part`, of kPvColumns columns.
DEVICE OutputPart& part_of(Output& output, int part) {
  return reinterpret_cast<OutputPart&>(output[part * (kPvColumns / 2)]);
}
// What to add to the lower half of a values' descriptor for tokens 16 * `tokens` on and the columns of product `part`.
constexpr DEVICE uint32 value_offset(int tokens, int part) {
  return (tokens * 2 * kGroupBytes + part * (kPvColumns / 64) * kBlockBytes) / 16;
}

// Step 5: issues the QK product as one WGMMA group per quarter, in the order in which the quarters are loaded. Calls
// `between` after the second of the four groups.
template <int SELF, class Between>
DEVICE void issue_qk(Logits& logits, uint32 query, uint32 keys, uint32 full, uint32 parity, Between between) {
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const int quarter = i ^ first_half<true>(SELF) * 2, blocks = i == kQuarters - 1 ? 3 : 2;
    wait(full + quarter * 8, parity);
    if (kFencesKv) fence_async_shared();
    mark(kWaitKeys);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int block = b == 2 ? kRotary : quarter * 2 + b;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = block * (kBlockBytes / 16) + step * 2;
        wgmma_ss(logits, operand(query + at), operand(keys + at), i > 0 || b > 0 || step > 0);
      }
    }
    wgmma_commit();
    mark(kQk);
    if (i == 1) between();
  }
}

// Sets the values of token `visible` of the tile and of later tokens to 0, in this consumer's half of the columns. No
// other warpgroup may read this half meanwhile.
DEVICE void zero_values(uint32 values, int visible, int barrier) {
  constexpr int kChunks = kHalf / 8;
#pragma unroll 1
  for (int i = visible * kChunks + threadIdx.x % kConsumerThreads; i < kTile * kChunks; i += kConsumerThreads) {
    const int token = i / kChunks, chunk = i % kChunks;
    store_shared(values + chunk / 8 * kBlockBytes + token * kRowBytes + chunk % 8 * 16, uint4{0, 0, 0, 0});
  }
  fence_async_shared();
  named_sync(barrier, kConsumerThreads);
}

DEVICE void mask(Logits& logits, const Rows& rows, int first) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int count = rows.end[r] - first;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c >= count) logits[4 * i + 2 * r + c] = -kInfinity;
  }
}

// Step 6: turns logits into probabilities. `alpha` rescales the accumulator. `to` is where the peer reads row_max.
DEVICE void update(Logits& logits, Rows& rows, float factor, float (&alpha)[2], float* to) {
  float anchor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
      largest = fmaxf(largest, fmaxf(logits[4 * i + 2 * r], logits[4 * i + 2 * r + 1]));
    const float row_max = next_row_max(rows.row_max[r], max_of_quad(largest) * factor);
    if (threadIdx.x % 4 == 0) to[8 * r] = row_max;
    anchor[r] = finite(row_max), alpha[r] = rescale_factor(rows.row_max[r], row_max);
    rows.row_max[r] = row_max;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.row_sum[r] * alpha[r];
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = logits[4 * i + 2 * r + c];
        x = exp2_approx(x * factor - anchor[r]);
        sum += x;
      }
    rows.row_sum[r] = sum;
  }
}

// Step 7: stores P as a K-major operand for the peer.
DEVICE void store_probabilities(uint32 to, const Probabilities& p) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kConsumerThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);
  fence_async_shared();
}

// An arrival of this warp on `barrier` of each of the CLUSTER CTAs.
DEVICE void release(uint32 barrier) {
  __syncwarp();
  const uint32 lane = threadIdx.x % 32;
  if (CLUSTER == 1) {
    if (lane == 0) arrive(barrier);
  } else if (lane < CLUSTER) {
    arrive_in_cluster(address_in(barrier, lane));
  }
}

// Step 12: divides by the row sums, and stores kStored columns of the output or partial result, from `first_column` on,
// and the LSE if that is 0. `staged` is the warp's part of shared memory for partial results.
DEVICE void store(int first_column, uint32 staged, Stored& output, const float (&row_max)[2], const float (&sums)[2],
                  const Problem& p, const Arguments& arguments, const QueryBlock& unit) {
  const Results& to = arguments.results;
  const float value_scale = arguments.kv_scale ? arguments.kv_scale[1] : 1.f;
  const int lane = threadIdx.x % 32, line = threadIdx.x % kConsumerThreads / 32 * 16 + lane / 4;
  const int first = unit.first_packed_row + line, row = unit.row, slot = unit.slot;
  const Partial partial(to.partial, int64(to.slots) * p.tile_rows * p.heads);
  float norm[2];
  int64 to_row[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = first + 8 * r, tile_row = p.row_of(packed);
    const int head = packed - tile_row * p.heads;
    exists[r] = tile_row < unit.count && uint32(row + tile_row) < uint32(p.rows) && (slot < 0 || slot < to.slots);
    norm[r] = (sums[r] > 0 ? 1 / sums[r] : 0.f) * (KV_FP8 ? value_scale : 1.f);
    to_row[r] = ((slot < 0 ? int64(row) : int64(slot) * p.tile_rows) + tile_row) * p.heads + head;
    float* lse = slot < 0 ? to.lse : partial.lse;
    if (first_column == 0 && lane % 4 == 0 && exists[r] && lse) lse[to_row[r]] = row_max[r] + log2f(sums[r]);
  }
  if (slot >= 0) return store_scaled(partial, staged, output, first_column, norm, to_row, exists);
  rescale(output, norm);
  store_as(to.out_type, to.out, output, first_column, FullRow<kLatent>{}, to_row, exists);
}

// One warpgroup. For all units, it computes the logits of every second KV tile, and half of the value columns of O.
template <int SELF>
struct Consumer {
  static constexpr int kPeer = 1 - SELF;
  static constexpr int kBarrier = kOneConsumer + SELF;

  const Problem& p;
  const Arguments& arguments;
  Shared& shared;
  const int line = threadIdx.x % kConsumerThreads / 32 * 16 + threadIdx.x % 32 / 4;  // this thread's first row of 64
  const float key_scale = arguments.kv_scale ? arguments.kv_scale[0] : 1.f;
  // Shared-memory addresses, and the lower 32 bits of descriptors.
  const uint32 own_stage = shared_address(shared.kv[SELF]), peer_stage = shared_address(shared.kv[kPeer]);
  const uint32 query = lower(k_major(shared_address(shared.query), kGroupBytes));
  const uint32 keys = lower(k_major(own_stage, kGroupBytes));
  const uint32 peer_p = lower(k_major(peer_stage + kRotary * kBlockBytes, kGroupBytes));
  const uint32 own_values = lower(mn_major(own_stage + SELF * kHalfBytes, kGroupBytes, kBlockBytes));
  const uint32 peer_values = lower(mn_major(peer_stage + SELF * kHalfBytes, kGroupBytes, kBlockBytes));
  const uint32 full = shared_address(shared.full[SELF]), p_stored = shared_address(shared.p_stored);

  uint32 base = 0;      // number of the unit's first KV tile in the CTA
  int start, end;       // the unit's KV tokens
  int visible_end;      // all rows of this CTA see all tokens before this one
  Rows rows;
  Output output;
  Merge merge;

  DEVICE uint32 parity(int i) const { return base + i >> 1 & 1; }

  // Step 9 of tile `i` of the unit, up to the commit of the product; end_peer_pv waits for the product. With kFencesKv
  // the peer has executed the proxy fence for the values too, before it arrived on p_stored.
  DEVICE void issue_peer_pv(int i) {
    wait(p_stored + kPeer * 8, parity(i));
    mark(kWaitPeer);
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_max = shared.row_max[kPeer][line + 8 * r];
      alpha[r] = rescale_factor(rows.row_max[r], row_max);
      rows.row_max[r] = row_max, rows.row_sum[r] *= alpha[r];
    }
    const int visible = end - start - i * kTile;
    if (visible < kTile) zero_values(peer_stage + SELF * kHalfBytes, visible, kBarrier);
    rescale_if_changed(output, alpha);
    fence_registers(output);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
      for (int part = 0; part < kHalf / kPvColumns; ++part)
        wgmma_ss_mn(part_of(output, part), operand(peer_p + k * 2), operand(peer_values + value_offset(k, part)));
    wgmma_commit();
    mark(kPv);
  }

  // The end of step 9: waits until at most PENDING later groups are in flight, and releases the half.
  template <int PENDING>
  DEVICE void end_peer_pv() {
    wgmma_wait<PENDING>();
    fence_registers(output);
    release(shared_address(&shared.empty[kPeer][SELF]));
    mark(kPv);
  }

  // Steps 5 to 8 of tile `i` of the unit, which this consumer owns. If FOLLOWS, also step 9 of tile i - 1 of the unit.
  template <bool FOLLOWS>
  DEVICE void attend(int i) {
    constexpr bool kKeys = kKeysFirst[SELF];
    Logits logits;
    if (FOLLOWS && !kKeys) issue_peer_pv(i - 1);
    issue_qk<SELF>(logits, query, keys, full, parity(i), [&] {
      if (FOLLOWS && !kKeys) end_peer_pv<2>();
    });
    if (FOLLOWS && kKeys) {
      issue_peer_pv(i - 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    fence_registers(logits);
    mark(kQk);
    if (KV_FP8)
#pragma unroll
      for (float& x : logits) x *= key_scale;
    const int first = start + i * kTile, visible = end - first;
    if (first + kTile > visible_end) mask(logits, rows, first);
    float alpha[2];
    update(logits, rows, arguments.factor, alpha, &shared.row_max[SELF][line]);
    Probabilities probabilities;
    round_row<0>(probabilities, logits), round_row<1>(probabilities, logits);
    named_sync(kBarrier, kConsumerThreads);
    store_probabilities(own_stage + kRotary * kBlockBytes, probabilities);
    arrive_by_warp(p_stored + SELF * 8);
    mark(kSoftmax);
    if (visible < kTile) zero_values(own_stage + SELF * kHalfBytes, visible, kBarrier);
    if (FOLLOWS && kKeys) end_peer_pv<0>();
    if (FOLLOWS) rescale_if_changed(output, alpha);
    fence_registers(output);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
      for (int part = 0; part < kHalf / kPvColumns; ++part)
        wgmma_rs_mn(part_of(output, part), probabilities[k], operand(own_values + value_offset(k, part)));
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(output);
    release(shared_address(&shared.empty[SELF][SELF]));
    mark(kPv);
    tally(kTiles);
  }

  DEVICE void run() {
    const uint32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const int lane = threadIdx.x % 32;
    for (uint32 n = 0;; ++n) {
      wait(q_full, n & 1);
      const QueryBlock unit = load_uniform(shared.unit);
      mark(unit.count > 0 ? kWaitUnit : kIdle);
      if (unit.count <= 0) return;
      tally(kUnits);
      start = unit.start, end = unit.end;
      visible_end = p.causal ? min(end, causal_end(unit.position, p.row_of(unit.first_packed_row))) : end;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = p.row_of(unit.first_packed_row + line + 8 * r);
        rows.end[r] = (p.causal ? min(end, causal_end(unit.position, row)) : end) - lane % 4 * 2;
        rows.row_max[r] = -kInfinity, rows.row_sum[r] = 0;
      }
#pragma unroll
      for (int i = 0; i < kHalf / 2; ++i) output[i] = 0;

      const int tiles = (end - start + kTile - 1) / kTile;
      int i = (base ^ SELF) & 1;
      if (i == 0 && tiles > 0) {
        attend<false>(0);
        i = 2;
      }
      for (; i < tiles; i += 2) attend<true>(i);
      const bool reused = SPLITS > 1 || unit.slot >= 0;  // whether the epilogue writes to the memory of the query
      if (!reused) arrive_by_warp(q_empty);
      if (tiles > 0 && (base + tiles - 1 & 1) != SELF) {
        issue_peer_pv(tiles - 1);
        end_peer_pv<0>();
      }
      base += max(tiles, 0);

      float sums[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r] = sum_of_quad(rows.row_sum[r]);
        if (lane % 4 == 0) shared.row_sum[n & 1][SELF][line + 8 * r] = sums[r];
      }
      named_sync(kBothConsumers, 2 * kConsumerThreads);
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[r] += shared.row_sum[n & 1][kPeer][line + 8 * r];
      // A warp and its partner have the same rows, so that both merge or neither does.
      if (p.row_of(unit.first_packed_row + line / 16 * 16) < unit.count)
        merge.run<kHalf / 2>([&](int i) -> float& { return output[i]; }, [](int i) { return i / 2 % 2; }, rows.row_max,
                             sums);
      Stored stored;
#pragma unroll
      for (int i = 0; i < kStored / 2; ++i) stored[i] = output[i];
      __syncwarp();  // all lanes have read the state of the other CTA
      store(SELF * kHalf + p.split * kStored, merge.memory, stored, rows.row_max, sums, p, arguments, unit);
      if (SPLITS > 1) fence_async_shared();  // before TMA loads the next query there
      if (reused) arrive_by_warp(q_empty);
      mark(kEpilogue);
    }
  }
};

}  // namespace
}  // namespace attn_ops
