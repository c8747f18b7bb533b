// MLA: sizes, parameters and units, for both kernels, `mla.cu` and `mla_swap_ab.cu`.
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
constexpr int kLatent = 512;                // latent columns: a value, and the first part of a key
constexpr int kTile = 64;                   // tokens of a KV tile
constexpr int kRowBytes = 128;              // a row of 64 columns in shared memory
constexpr int kGroupBytes = 8 * kRowBytes;  // 8 rows of 64 columns
constexpr int kBlockBytes = 64 * kRowBytes; // a block of a KV tile: 64 tokens of 64 columns
constexpr int kBlocks = 9;                  // blocks of a query or key: 8 of latent columns, then 1 of rotary columns
constexpr int kRotary = kBlocks - 1;        // index of the block of the rotary columns
constexpr int kTileBytes = kBlocks * kBlockBytes;
constexpr int kCacheBytes = KV_FP8 ? 1 : 2;  // bytes of a cache element
constexpr int kQuarters = 4;  // the latent columns are loaded in quarters of two blocks

// The half of the latent columns that the QK product of a stage reads first. Consumers release a stage half by half:
// half 0 first, or with ALTERNATE half `stage` first. 16-bit quarters are loaded in this order. FP8 quarters are loaded
// into the half that is released first, and the quarters of the other half are converted first.
template <bool ALTERNATE>
constexpr DEVICE int first_half(int stage) {
  return (ALTERNATE ? stage : 0) ^ KV_FP8;
}

constexpr int kQueryBoxBlocks = 4;
constexpr int kProducerThreads = 128, kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64;
constexpr int kTileArrivals = KV_CP_ASYNC ? 64 : 1;  // arrivals of producers KV on the barrier of a quarter
constexpr bool kFencesKv = KV_CP_ASYNC && !KV_FP8;   // consumers execute a proxy fence, since cp.async wrote KV tiles
constexpr int kConverterWarps = KV_FP8 ? 4 : 0;
constexpr int kFirstConsumerWarp = kProducerThreads / 32 + kConverterWarps;

struct Problem {
  const int *qo_indptr, *kv_indices, *work;
  int rows, num_pages, max_pages, max_items, max_batch, heads, page_size, tile_rows, num_items, num_units;
  int unit_rows, cluster;  // constants of a kernel: packed rows of a unit, CTAs of a cluster
  int split, splits;       // this CTA computes cluster split `split` of `splits`, a constant of a kernel
  bool causal, early;      // early: the plan may be read before earlier kernels end

  // Units of a work item.
  DEVICE int blocks() const { return (tile_rows * heads + unit_rows - 1) / unit_rows; }
  DEVICE int row_of(int packed_row) const { return uint32(packed_row) / uint32(heads); }
};

// A unit: its work item, with `start` and `end` of this CTA's cluster split. Unless there are no tokens, `start` is a
// multiple of kTile.
struct Unit : Item {
  int first_packed_row;

  DEVICE int tiles() const { return (end - start + kTile - 1) / kTile; }
};

// A unit in shared memory, where producer Q passes it to consumers.
struct QueryBlock {
  int row, count, position;  // of the work item (`Item`). A count of 0: there is no further unit
  int start, end;            // KV tokens of this CTA
  int slot;                  // of the partial result, negative without a split
  int first_packed_row;      // of this CTA
};

DEVICE QueryBlock load_uniform(const QueryBlock& x) {
  return {uniform(x.row), uniform(x.count), uniform(x.position),        uniform(x.start),
          uniform(x.end), uniform(x.slot),  uniform(x.first_packed_row)};
}

// One past the last token that query row `row` of a work item sees. `position` is that of the item's row 0.
DEVICE int causal_end(int position, int row) {
  return static_cast<int>(max(min(int64(position) + row + 1, int64(kMaxTokens)), int64(0)));
}

// Every thread calls this function once. Before the call it uses no mbarrier, and reads no memory but, if `early`, the
// plan.
DEVICE void end_prologue() {
  cluster_wait_for_init();
  wait_for_earlier_kernels();
  launch_later_kernels();
  mark(kPrologue);
}

// Where results are stored, and the type of the output.
struct Results {
  void* out;
  float *lse, *partial;  // lse may be null
  int slots, out_type;
};

struct Arguments {
  float factor;  // makes base-2 logits of the QK product
  Results results;
  const float* kv_scale = nullptr;  // [2], of keys and of values, or null
};

// Descriptors of WGMMA operands as their lower 32 bits. All descriptors have the same upper 32 bits, and an addition to
// 32 bits takes one instruction.
DEVICE uint32 lower(uint64 descriptor) { return static_cast<uint32>(descriptor); }
DEVICE uint64 operand(uint32 lower) { return k_major(0, kGroupBytes) >> 32 << 32 | lower; }

// Iterates over the units of this CTA's cluster.
struct Schedule : Walk<true> {
  DEVICE bool next(const Problem& p, Unit& unit) {
    const int units = p.rows > 0 ? p.num_units : 0;
    return next_unit(*this, p, unit, blockIdx.x / p.cluster, gridDim.x / p.cluster, units, p.blocks());
  }

  // Fills `unit` as unit `u` of the plan. Its Item has been read. Returns false if the unit has no rows.
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

  // Like `next`. The first call also ends the prologue, which overlaps the preceding kernel. Each role has one call of
  // this function in its code: the first tile of a launch waits until its instructions are fetched.
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
