// MLA: what its kernels, `mla.cu` and `mla_swap_ab.cu`, share: sizes, and which units a CTA or cluster has.
#pragma once

#ifndef KV_FP8
#define KV_FP8 0
#endif
#ifndef KV_CP_ASYNC
#define KV_CP_ASYNC 0
#endif

#include "clocks.cuh"
#include "cluster.cuh"
#include "descriptors.cuh"
#include "schedule.cuh"

namespace attn_ops {
namespace {

static_assert(!KV_CP_ASYNC || CLUSTER == 1);
constexpr int kLatent = 512;                // columns of a value, and of the first part of a key
constexpr int kTile = 64;                   // tokens of a KV tile
constexpr int kRowBytes = 128;              // of 64 columns in shared memory
constexpr int kGroupBytes = 8 * kRowBytes;  // of 8 rows and 64 columns
constexpr int kBlockBytes = 64 * kRowBytes; // a block of a KV tile: 64 tokens of 64 columns
constexpr int kBlocks = 9;                  // of a query or key: 8 of the latent columns, then the rotary ones
constexpr int kRotary = kBlocks - 1;        // the block of the rotary columns
constexpr int kTileBytes = kBlocks * kBlockBytes;
constexpr int kCacheBytes = KV_FP8 ? 1 : 2;  // of an element of the cache
constexpr int kQuarters = 4;  // of the latent columns, two blocks each

// The half of the latent columns whose quarters a consumer takes first. A stage is released half by half, half 0 first,
// or with ALTERNATE the half of this number: 16-bit quarters are loaded in this order. FP8 quarters are loaded into the
// half that is released first, and converted into the other one first.
template <bool ALTERNATE>
constexpr DEVICE int first_half(int stage) {
  return (ALTERNATE ? stage : 0) ^ KV_FP8;
}

constexpr int kQueryBoxBlocks = 4;
constexpr int kProducerThreads = 128, kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64;
constexpr int kTileArrivals = KV_CP_ASYNC ? 64 : 1;  // of producers KV at the barrier of a quarter
constexpr bool kFencesKv = KV_CP_ASYNC && !KV_FP8;   // consumers execute a proxy fence, as threads copied KV tiles
constexpr int kConverterWarps = KV_FP8 ? 4 : 0;
constexpr int kFirstConsumerWarp = kProducerThreads / 32 + kConverterWarps;

struct Problem {
  const int *qo_indptr, *kv_indices, *work;
  int rows, num_pages, max_pages, max_items, max_batch, heads, page_size, tile_rows, num_items, num_units;
  int unit_rows, cluster;  // constants of a kernel: the packed rows of a unit, and the CTAs that share them
  int split, splits;       // of the KV tiles of a unit: the one that this CTA has, and their number, a constant
  bool causal, early;      // early: the plan may be read before earlier kernels end

  DEVICE int blocks() const { return (tile_rows * heads + unit_rows - 1) / unit_rows; }
  DEVICE int row_of(int packed_row) const { return uint32(packed_row) / uint32(heads); }
};

struct Unit : Item {  // with the KV tokens of this CTA's split; `start` is the first token of a tile
  int first_packed_row;

  DEVICE int tiles() const { return (end - start + kTile - 1) / kTile; }
};

// A unit as its consumers read it in shared memory.
struct QueryBlock {
  int row, count, position;  // as of its item. No unit follows if there are no rows
  int start, end;            // KV tokens
  int slot;                  // of the partial result, negative without a split
  int first_packed_row;      // of the CTA
};

DEVICE QueryBlock load_uniform(const QueryBlock& x) {
  return {uniform(x.row), uniform(x.count), uniform(x.position),        uniform(x.start),
          uniform(x.end), uniform(x.slot),  uniform(x.first_packed_row)};
}

// One past the last token that query row `row` sees, whose item begins at `position`.
DEVICE int causal_end(int position, int row) {
  return static_cast<int>(max(min(int64(position) + row + 1, int64(kMaxTokens)), int64(0)));
}

// Every thread calls this once. Before it no mbarrier is used, and memory is not read, but the plan if it is `early`.
DEVICE void end_prologue() {
  cluster_wait_for_init();
  wait_for_earlier_kernels();
  launch_later_kernels();
  mark(kPrologue);
}

// What a result is of a unit: where it goes, and the type of the output.
struct Results {
  void* out;
  float *lse, *partial;  // lse may be null
  int slots, out_type;
};

struct Arguments {
  float factor;  // of the logits, in base 2
  Results results;
  const float* kv_scale = nullptr;  // of keys and values, or null
};

// Operands of matrix products by the lower halves of their descriptors: all have the same upper half, and an addition
// to 32 bits takes one instruction.
DEVICE uint32 lower(uint64 descriptor) { return static_cast<uint32>(descriptor); }
DEVICE uint64 operand(uint32 lower) { return k_major(0, kGroupBytes) >> 32 << 32 | lower; }

// Units of this CTA or cluster in their order.
struct Schedule : Walk<true> {
  DEVICE bool next(const Problem& p, Unit& unit) {
    const int units = p.rows > 0 ? p.num_units : 0;
    return next_unit(*this, p, unit, blockIdx.x / p.cluster, gridDim.x / p.cluster, units, p.blocks());
  }

  DEVICE bool take(const Problem& p, int u, Unit& unit) const {
    unit.first_packed_row = u % p.blocks() * p.unit_rows;
    const int first = unit.first_packed_row / p.heads;
    const int last = min((unit.first_packed_row + p.unit_rows - 1) / p.heads, unit.count - 1);
    if (first > last) return false;
    if (p.causal) unit.end = min(unit.end, causal_end(unit.position, last));
    unit.end = max(min(unit.end, kMaxTokens), 0);
    unit.start = max(min(unit.start / kTile * kTile, unit.end), 0);
    const int tiles = unit.tiles(), start = unit.start;
    unit.start += tiles * p.split / p.splits * kTile;
    unit.end = min(unit.end, start + tiles * (p.split + 1) / p.splits * kTile);
    return true;
  }

  // As `next`; the first call also ends the prologue, which overlaps the preceding kernel. A role calls it in one
  // place: the first tile of a launch waits until these instructions are fetched.
  DEVICE bool next_after_prologue(const Problem& p, Unit& unit) {
    const bool first = wave == 0;
    if (first && p.early)
      acquire_plan();
    else if (first)
      end_prologue();
    const bool exists = next(p, unit);
    if (first && p.early) end_prologue();
    return exists;
  }
};

}  // namespace
}  // namespace attn_ops
