// MLA with swapped operands: sizes and shared memory. `mla_swap_ab.cu` has the schedule.
#pragma once

#include "mla_merge.cuh"

namespace attn_ops {
namespace {

constexpr int kPackedRows = PACKED_ROWS;  // of a CTA
constexpr int kUnitRows = kPackedRows;    // packed rows of a unit
constexpr int kValueBlocks = kLatent / 64;
constexpr int kQueryBlockBytes = kPackedRows * kRowBytes;
constexpr int kStoredBlocks = kValueBlocks / SPLITS;  // columns of a result that a CTA stores
constexpr int kStagedBlocks = 4;                      // and at a time
constexpr int kStagedColumns = kStagedBlocks * 64;
constexpr int kStagedRowBytes = kStagedColumns * 4 + 16;  // by the 16, lanes store to different banks
constexpr int kStagedBytes = kPackedRows * kStagedRowBytes;
constexpr int kMergeBytes = merge_bytes(kValueBlocks * kPackedRows / 2, kPackedRows / 4);  // of a warp
constexpr int kMergedBytes = SPLITS > 1 ? kConsumerWarps * kMergeBytes : 0;
enum NamedBarrier { kConsumer = 1 };

constexpr int kThreads = kFirstConsumerWarp * 32 + kConsumerThreads;

struct Shared {
  alignas(1024) char query[kBlocks * kQueryBlockBytes];
  alignas(1024) char kv[2][kTileBytes];
  alignas(1024) char p[kQueryBlockBytes];  // rows of 64 tokens
  alignas(16) char results[kStagedBytes > kMergedBytes ? kStagedBytes : kMergedBytes];  // staged, or from the other CTA
  alignas(16) float reduced[kPackedRows][kConsumerWarps];  // maxima or sums of the warps
  QueryBlock unit;
  uint64 full[2][kQuarters], empty[2][2], q_full, q_empty;
  uint64 merge_full[kConsumerWarps], merge_ready[kConsumerWarps];  // of each consumer warp
#if KV_FP8
  uint64 fp8_full[2][kQuarters];
  int fp8_end[2];  // of a stage: there is no further tile
#endif
};

}  // namespace
}  // namespace attn_ops
