// Decode: sizes, shared memory, and which work items a CTA has. `decode.cu` has the schedule.
#pragma once

#include "hopper.cuh"
#include "schedule.cuh"

namespace attn_ops {
namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kHeads = HEADS;                                // query heads of a KV head, at most
constexpr int kElementBytes = KV_FP8 ? 1 : 2;                // of keys and values
constexpr int kTileBytes = 16 << 10;                         // of the keys of a KV tile, and of its values
constexpr int kTile = kTileBytes / (kDim * kElementBytes);   // tokens of a KV tile
constexpr int kStages = 3;                                   // KV tiles of the ring: two CTAs fit on an SM
constexpr int kWarps = 4;                                    // consumers
constexpr int kWarpTokens = kTile / kWarps;                  // of a KV tile
constexpr int kConsumerThreads = kWarps * 32, kThreads = kConsumerThreads + 32;
// A box is a page or a part of one: its tokens are in groups of 8, each with all its columns, in blocks of kRowBytes.
constexpr int kRowBytes = kDim * kElementBytes < 128 ? kDim * kElementBytes : 128;  // of the swizzle
constexpr int kBlockBytes = 8 * kRowBytes;                   // to the next block of columns
constexpr int kGroupBytes = 8 * kDim * kElementBytes;        // to the next 8 tokens
static_assert(kWarpTokens % 16 == 0 && kTile / 8 <= 32);
enum NamedBarrier { kAllConsumers = 1 };

struct Stage {
  char keys[kTileBytes], values[kTileBytes];
};

struct Shared {
  alignas(1024) Stage stages[kStages];
  float row_max[kWarps][kHeads], row_sum[kWarps][kHeads];
  uint64 k_full[kStages], v_full[kStages], empty[kStages];
};
// The accumulators of all consumers are reduced in the last stage of a work item.
static_assert(kWarps * kHeads * kDim * 4 <= sizeof(Stage));

struct Problem {
  const int *kv_indices, *work, *cta_indptr;
  int window_left, num_pages, max_pages, max_items, page_size;
  int box;  // tokens, a power of 2
};

DEVICE int kv_head() { return blockIdx.x; }
DEVICE int num_kv_heads() { return gridDim.x; }
DEVICE int cta_of_plan() { return blockIdx.y; }

struct WorkItem {
  int row;          // of q
  int slot;         // of the partial result, negative without a split
  int page_start;   // of the request in kv_indices
  int begin, end;   // KV tokens that the row sees, none or within the page table
  int first;        // token of the first KV tile: where the box of `begin` begins
};

// Item `item` of those before `stop`, bounded by the capacities; otherwise one without tokens.
DEVICE WorkItem read_item(const Problem& p, int item, int stop) {
  // No wider loads: a plan may lie at any multiple of 4 bytes. All of them before the first use, and none in a branch:
  // they are in flight together.
  const int* record = p.work + int64(item) * kWorkStride;
  const bool listed = item < stop;
  const auto column = [&](Work name, int otherwise) { return listed ? record[name] : otherwise; };
  const int kv_begin = column(kKvBegin, 0), kv_end = column(kKvEnd, 0), position = column(kPosition, 0);
  const int page_start = column(kPageStart, 0);
  WorkItem to = {.row = column(kRow, -1), .slot = column(kSlot, -1)};
  to.page_start = min(max(page_start, 0), p.max_pages);
  const int64 of_window = p.window_left >= 0 ? int64(position) - p.window_left : 0;
  const int64 begin = max(int64(max(kv_begin, 0)), of_window);
  const int64 pages = p.num_pages > 0 ? p.max_pages - to.page_start : 0;
  const int64 end = min(min(int64(kv_end), pages * p.page_size), int64(kMaxTokens));
  to.begin = begin < end ? int(begin) : 0, to.end = begin < end ? int(end) : 0;
  to.first = to.begin & -p.box;
  return to;
}

// The work items of a CTA of the plan.
struct WorkList {
  int item, stop;
  WorkItem first;

  DEVICE explicit WorkList(const Problem& p) {
    // With one request the first item of CTA c is item c: it is read beside cta_indptr, and again if it is another.
    const int cta = cta_of_plan(), begin = p.cta_indptr[cta], end = p.cta_indptr[cta + 1];
    first = read_item(p, cta, p.max_items);
    item = min(max(begin, 0), p.max_items), stop = min(end, p.max_items);
    if (item != cta || item >= stop) first = read_item(p, item, stop);
  }
};

// Behind the reads of the plan: barriers are initialised, earlier kernels have ended, and the next one may start.
DEVICE void end_prologue(bool early) {
  __syncthreads();
  if (early) wait_for_earlier_kernels();
  launch_later_kernels();
}

}  // namespace
}  // namespace attn_ops
