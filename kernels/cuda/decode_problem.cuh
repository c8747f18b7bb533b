// Decode: sizes, shared memory, and which work items a CTA has. `decode.cu` has the schedule.
#pragma once

#include "schedule.cuh"

#ifndef KV_FP8
#define KV_FP8 0  // 1 e4m3, 2 e5m2
#endif
#ifndef ROPE
#define ROPE 0
#endif

namespace attn_ops {
namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kPackedRows = PACKED_ROWS;                      // query heads of a KV head, at most
constexpr int kTileBytes = 16 << 10;                          // of the keys of a KV tile, and of its values
constexpr int kTokenBytes = kDim * (KV_FP8 ? 1 : 2);          // of one head
constexpr int kTile = kTileBytes / (KV_HEADS * kTokenBytes);  // tokens of a KV tile
// KV tiles of the ring. With more, SMs share the bandwidth less evenly; with RoPE one is being rotated.
constexpr int kStages = ROPE ? 4 : 3;
constexpr int kTurns = 2;   // consumers of a KV head
constexpr int kConsumers = KV_HEADS * kTurns, kConsumerWarps = 4, kConsumerThreads = 32 * kConsumerWarps;
constexpr int kProducerWarp = kConsumers * kConsumerWarps;
constexpr int kConverterThreads = ROPE ? 128 : 0, kThreads = 32 * (kProducerWarp + 1) + kConverterThreads;
constexpr int kColumnBlocks = kDim / 64, kTokenBlocks = kTile / 64;  // of 64, the M of WGMMA
// A token in shared memory has rows as wide as the swizzle. A page is one box: its tokens are in groups of 8, each with
// all columns of one head, then of the other.
constexpr int kRowBytes = kTokenBytes < 128 ? kTokenBytes : 128;
constexpr int kBlockBytes = 8 * kRowBytes;          // to the next rows of the same tokens
constexpr int kHeadBytes = 8 * kTokenBytes;         // to the same tokens of the other head
constexpr int kGroupBytes = KV_HEADS * kHeadBytes;  // to the next 8 tokens
// The query and P are 16-bit operands of rows of 64 columns, or of 64 tokens.
constexpr int kOperandRowBytes = 128, kOperandGroupBytes = 8 * kOperandRowBytes;
constexpr int kOperandBytes = kPackedRows * kOperandRowBytes;  // to the next 64 columns or tokens
constexpr int kStagedRowBytes = kDim * 4 + 16;  // of a head of a result. By the 16, lanes store to different banks
static_assert(kDim % 64 == 0 && kTile % 64 == 0 && (kPackedRows == 8 || kPackedRows == 16));
static_assert(kTile / 8 <= 32);                 // boxes of a KV tile: a lane has one
static_assert(KV_HEADS == 1 || kTokenBytes == kRowBytes);  // a tensor map has one dimension for heads and rows
static_assert(!(ROPE && KV_FP8));
enum NamedBarrier { kConsumer = 1, kTurn = kConsumer + kConsumers };  // and those of the other consumers

struct Stage {
  char keys[kTileBytes], values[kTileBytes];
};

// Of one consumer.
struct alignas(1024) ConsumerShared {
  char query[kColumnBlocks][kOperandBytes];
  char p[2][kTokenBlocks][kOperandBytes];  // probabilities of two KV tiles
  char staged[kPackedRows * kStagedRowBytes];
  float reduced[kPackedRows][kConsumerWarps];  // maxima or sums of the warps
  float scales[kPackedRows];                   // of heads of the query, with an FP8 cache
};

struct Shared {
  alignas(1024) Stage stages[kStages];
  ConsumerShared consumers[kConsumers];
  uint64 k_full[kStages], v_full[kStages], empty[kStages];
#if ROPE
  uint64 k_loaded[kStages];
  uint64 turns[kDim / 2];  // of pairs of columns, as in rope.cuh
#endif
  int combines[kConsumers];  // whether the consumer stored the last split of a row
};

struct Problem {
  const int *kv_indices, *kv_len, *work, *cta_indptr, *merge_indptr;
  int window_left, rows, num_pages, max_pages, max_items, max_batch, slots, page_size;
  int box;  // tokens of a TMA box, a power of 2 that divides a page
};

DEVICE int first_kv_head() { return blockIdx.x * KV_HEADS; }
DEVICE int kv_head() {  // of a consumer
  return first_kv_head() + (KV_HEADS > 1 ? threadIdx.x / (kTurns * kConsumerThreads) : 0);
}
DEVICE int num_kv_heads() { return gridDim.x * KV_HEADS; }
DEVICE int cta_of_plan() { return blockIdx.y; }
DEVICE int num_ctas() { return gridDim.y; }

struct WorkItem {
  int row;         // of q
  int position;    // of the row in the KV sequence
  int slot;        // of the partial result, negative without a split
  int page_start;  // of the request in kv_indices
  int begin, end;  // KV tokens that the row sees, within the page table; 0 and 0 if there are none
  int first;       // token of the first KV tile: where the box of `begin` begins

  DEVICE int tiles() const { return (end - first + kTile - 1) / kTile; }
  // Whether the KV tile from token `tile` on has tokens that the row does not see.
  DEVICE bool hides(int tile) const { return tile < begin || tile + kTile > end; }
  DEVICE bool sees(int token) const { return uint32(token - begin) < uint32(end - begin); }
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
  WorkItem to = {.row = column(kRow, -1), .position = position, .slot = column(kSlot, -1)};
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
  int begin, stop;
  WorkItem first;

  DEVICE explicit WorkList(const Problem& p) {
    // With one request the first item of CTA c is item c: it is read beside cta_indptr, and again if it is another.
    const int cta = cta_of_plan(), from = p.cta_indptr[cta], to = p.cta_indptr[cta + 1];
    first = read_item(p, cta, p.max_items);
    begin = min(max(from, 0), p.max_items), stop = min(to, p.max_items);
    if (begin != cta || begin >= stop) first = read_item(p, begin, stop);
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
