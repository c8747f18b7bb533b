// MLA with swapped operands: the consumer warpgroup. Numbers of steps are of the schedule in `mla_swap_ab.cu`.
#pragma once

#include "mla_merge.cuh"
#include "mla_swap_ab_shared.cuh"
#include "swapped_operands.cuh"

namespace attn_ops {
namespace {

constexpr int kOwnRows = kPackedRows / 4;  // packed rows of a thread
using Product = float[kPackedRows / 2];
using Output = Product[kValueBlocks];

// Stores four numbers of a partial result. A workspace may lie at any multiple of 4 bytes.
DEVICE void store_four_partial(float* partial, int64 at, const float4& x) {
  if (reinterpret_cast<uint64>(partial) % 16 == 0) return store_four<kFloat32>(partial, at, x);
  partial[at] = x.x, partial[at + 1] = x.y, partial[at + 2] = x.z, partial[at + 3] = x.w;
}

// One warpgroup. It computes all units of the CTA.
struct Consumer {
  const Problem& p;
  const Arguments& arguments;
  Shared& shared;
  const int thread = threadIdx.x % kConsumerThreads, lane = threadIdx.x % 32, warp = thread / 32;
  const int line = warp * 16 + lane / 4;
  const float key_scale = arguments.kv_scale ? arguments.kv_scale[0] : 1.f;
  const float value_scale = arguments.kv_scale ? arguments.kv_scale[1] : 1.f;
  float* const reduced = &shared.reduced[0][0];
  // Shared-memory addresses, and the lower 32 bits of descriptors.
  const uint32 tiles_at = shared_address(shared.kv), full = shared_address(shared.full);
  const uint32 empty = shared_address(shared.empty), p_at = shared_address(shared.p);
  const uint32 staged = shared_address(shared.results);
  const uint32 query = lower(k_major(shared_address(shared.query), kGroupBytes));
  const uint32 keys = lower(k_major(tiles_at, kGroupBytes));
  const uint32 values = lower(mn_major(tiles_at, kGroupBytes, kBlockBytes));
  const uint32 probabilities = lower(k_major(p_at, kGroupBytes));

  uint32 base = 0;              // number of the unit's first KV tile in the CTA
  int start, end;               // the unit's KV tokens
  int visible_end;              // all rows of the unit see all tokens before this one
  int position, first_packed;   // position of the work item's first query row; the unit's first packed row
  float row_max[kOwnRows];
  float row_sum[kOwnRows];      // over the tokens of this thread
  Output output;
  Merge merge;

  DEVICE void sync() const { named_sync(kConsumer, kConsumerThreads); }

  // Step 4: issues the QK product, in the order in which the quarters are loaded.
  DEVICE void issue_qk(Product& logits, uint32 stage, uint32 parity) {
    const uint32 keys = this->keys + stage * (kTileBytes / 16);
#pragma unroll
    for (int i = 0; i < kQuarters; ++i) {
      const int quarter = i ^ first_half<false>(stage) * 2, blocks = i == kQuarters - 1 ? 3 : 2;
      wait(full + (stage * kQuarters + quarter) * 8, parity);
      if (kFencesKv) fence_async_shared();
      mark(kWaitKeys);
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < blocks; ++b) {
        const int block = b == 2 ? kRotary : quarter * 2 + b;
#pragma unroll
        for (int step = 0; step < 4; ++step)
          wgmma_ss(logits, operand(keys + block * (kBlockBytes / 16) + step * 2),
                   operand(query + block * (kQueryBlockBytes / 16) + step * 2), i > 0 || b > 0 || step > 0);
      }
      wgmma_commit();
      mark(kQk);
    }
  }

  DEVICE void mask(Product& logits, int first) const {
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const int seen = p.causal ? min(end, causal_end(position, p.row_of(first_packed + packed_row(j)))) : end;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (first + line + 8 * r >= seen) logits[place(j, r)] = -kInfinity;
    }
  }

  // Sets the values of token `visible` of the tile and of later tokens to 0, when all warps have their logits. The
  // proxy fence and the barrier after the store of P order these stores too before the PV product.
  DEVICE void zero_values(uint32 tile, int visible) const {
    constexpr int kChunks = kLatent / 8;
#pragma unroll 1
    for (int i = visible * kChunks + thread; i < kTile * kChunks; i += kConsumerThreads) {
      const int token = i / kChunks, chunk = i % kChunks;
      store_shared(tile + chunk / 8 * kBlockBytes + token * kRowBytes + chunk % 8 * 16, uint4{0, 0, 0, 0});
    }
  }

  // Step 5: turns logits into probabilities, stores them as P, and rescales row_sum and O^T.
  DEVICE void softmax(Product& logits, int visible, uint32 tile) {
    float largest[kOwnRows];
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) largest[j] = fmaxf(logits[place(j, 0)], logits[place(j, 1)]);
    reduce_to<kOwnRows, 16>(reduced + warp, largest, 0, Max{});
    sync();  // maxima are stored
    if (visible < kTile) zero_values(tile, visible);
    float alpha[kOwnRows];
    bool changed = false;
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      const float largest = max_of(of_warps(reduced, j)) * arguments.factor;
      const float new_max = next_row_max(row_max[j], largest);
      const float anchor = finite(new_max);
      alpha[j] = rescale_factor(row_max[j], new_max);
      changed = changed || alpha[j] != 1;
      row_max[j] = new_max, row_sum[j] *= alpha[j];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& x = logits[place(j, r)];
        x = exp2_approx(x * arguments.factor - anchor);
        row_sum[j] += x;
      }
    }
    store_probabilities<kPackedRows>(p_at, logits, warp);
    fence_async_shared();  // for P, and for the zeros of zero_values
    if (__any_sync(~0u, changed))
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block)
#pragma unroll
        for (int j = 0; j < kOwnRows; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) output[block][place(j, r)] *= alpha[j];
    sync();  // P is stored
  }

  // Step 6: O^T += V^T P^T; releases the halves of the stage.
  DEVICE void multiply_values(uint32 stage) {
    const uint32 values = this->values + stage * (kTileBytes / 16);
    fence_output();
    wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
        for (int b = 0; b < kValueBlocks / 2; ++b) {
          const int block = half * (kValueBlocks / 2) + b;
          wgmma_mn_ss(output[block], operand(values + block * (kBlockBytes / 16) + k * (2 * kGroupBytes / 16)),
                      operand(probabilities + k * 2));
        }
      wgmma_commit();
    }
    wgmma_wait<1>();
    arrive_by_warp(empty + stage * 16);
    wgmma_wait<0>();
    fence_output();
    arrive_by_warp(empty + stage * 16 + 8);
  }

  DEVICE void fence_output() {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) fence_registers(output[block]);
  }

  // Steps 4 to 6 of tile `i` of the unit.
  DEVICE void attend(int i) {
    const uint32 number = base + i, stage = number & 1, parity = number >> 1 & 1;
    const int first = start + i * kTile;
    Product logits;
    issue_qk(logits, stage, parity);
    wgmma_wait<0>();
    fence_registers(logits);
    mark(kQk);
    if (KV_FP8)
#pragma unroll
      for (float& x : logits) x *= key_scale;
    if (first + kTile > visible_end) mask(logits, first);
    softmax(logits, end - first, tiles_at + stage * kTileBytes);
    mark(kSoftmax);
    multiply_values(stage);
    mark(kPv);
    tally(kTiles);
  }

  // Index of packed row `packed` of the unit in [rows, heads] of `out`, or [slots, tile_rows, heads] of `partial`. -1:
  // the packed row does not exist.
  DEVICE int64 result_row(int packed, int row, int count, int slot) const {
    const int tile_row = p.row_of(first_packed + packed), head = first_packed + packed - tile_row * p.heads;
    const bool exists =
        tile_row < count && uint32(row + tile_row) < uint32(p.rows) && (slot < 0 || slot < arguments.results.slots);
    return exists ? ((slot < 0 ? int64(row) : int64(slot) * p.tile_rows) + tile_row) * p.heads + head : -1;
  }

  // Steps 7 to 9 after the arrival on q_empty: reduces the row sums, merges with the other CTA, divides by the row
  // sums, and stores this CTA's columns of the output or partial result, and the LSE.
  DEVICE void store(int row, int count, int slot) {
    const Results& to = arguments.results;
    reduce_to<kOwnRows, 16>(reduced + warp, row_sum, 0, Sum{});
    sync();
    float norm[kOwnRows], sums[kOwnRows];
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) sums[j] = sum_of(of_warps(reduced, j));
    constexpr int kNumbers = kPackedRows / 2;  // numbers of a thread in the accumulator of 64 columns
    merge.run<kValueBlocks * kNumbers>([&](int i) -> float& { return output[i / kNumbers][i % kNumbers]; },
                                       [](int i) { return i % kNumbers / 4 * 2 + i % 2; }, row_max, sums);
    if (SPLITS > 1) sync();  // all warps have read the state of the other CTA
    const int first_column = p.split * kStoredBlocks * 64;
    float* lse = slot < 0 ? to.lse : to.partial + int64(to.slots) * p.tile_rows * p.heads * kLatent;
#pragma unroll
    for (int j = 0; j < kOwnRows; ++j) {
      norm[j] = (sums[j] > 0 ? 1 / sums[j] : 0.f) * (KV_FP8 ? value_scale : 1.f);
      if (thread < 4 && lse && p.split == 0) {
        const int64 at = result_row(packed_row(j), row, count, slot);
        if (at >= 0) lse[at] = row_max[j] + log2f(sums[j]);
      }
    }
    const bool bulk = slot >= 0 && reinterpret_cast<uint64>(to.partial) % 16 == 0;
#pragma unroll
    for (int half = 0; half < kStoredBlocks / kStagedBlocks; ++half) {
#pragma unroll
      for (int b = 0; b < kStagedBlocks; ++b)
#pragma unroll
        for (int j = 0; j < kOwnRows; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            store_shared(staged + packed_row(j) * kStagedRowBytes + (b * 64 + line + 8 * r) * 4,
                         output[half * kStagedBlocks + b][place(j, r)] * norm[j]);
      fence_async_shared();  // for bulk stores
      sync();                // columns are stored
      if (bulk) {
        if (thread < kPackedRows) {
          const int64 at = result_row(thread, row, count, slot);
          if (at >= 0)
            store_bulk(to.partial + at * kLatent + first_column + half * kStagedColumns,
                       staged + thread * kStagedRowBytes, kStagedColumns * 4);
          wait_for_bulk_reads();
        }
      } else {
        store_staged(first_column + half * kStagedColumns, row, count, slot);
      }
      sync();  // columns are read
    }
  }

  // Copies the staged columns to the output or partial result, from column `first_column` on. A warp copies whole rows.
  DEVICE void store_staged(int first_column, int row, int count, int slot) const {
    const Results& to = arguments.results;
#pragma unroll 1
    for (int packed = warp; packed < kPackedRows; packed += kConsumerWarps) {
      const int64 at = result_row(packed, row, count, slot);
      if (at < 0) continue;
#pragma unroll
      for (int c = lane * 4; c < kStagedColumns; c += 128) {
        const float4 x = load_four(staged + packed * kStagedRowBytes + c * 4);
        const int64 index = at * kLatent + first_column + c;
        if (slot < 0)
          store_four_as(to.out_type, to.out, index, x);
        else
          store_four_partial(to.partial, index, x);
      }
    }
  }

  DEVICE void run() {
    const uint32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    for (uint32 n = 0;; ++n) {
      wait(q_full, n & 1);
      const QueryBlock unit = load_uniform(shared.unit);
      mark(unit.count > 0 ? kWaitUnit : kIdle);
      if (unit.count <= 0) return;
      tally(kUnits);
      position = unit.position, start = unit.start, end = unit.end, first_packed = unit.first_packed_row;
      visible_end = p.causal ? min(end, causal_end(position, p.row_of(first_packed))) : end;
#pragma unroll
      for (int j = 0; j < kOwnRows; ++j) row_max[j] = -kInfinity, row_sum[j] = 0;
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block)
#pragma unroll
        for (int i = 0; i < kPackedRows / 2; ++i) output[block][i] = 0;

      const int tiles = (end - start + kTile - 1) / kTile;
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) attend(i);
      base += max(tiles, 0);
      arrive_by_warp(q_empty);
      store(unit.row, unit.count, unit.slot);
      mark(kEpilogue);
    }
  }
};

}  // namespace
}  // namespace attn_ops
