// MLA with swapped operands: sizes and shared memory. The schedule is in `mla_swap_ab.cu`.
#pragma once

#include "mla_merge.cuh"

namespace attn_ops {
namespace {

constexpr int kPackedRows = PACKED_ROWS;  // packed rows of a CTA
constexpr int kUnitRows = kPackedRows;    // packed rows of a unit
constexpr int kValueBlocks = kLatent / 64;
constexpr int kQueryBlockBytes = kPackedRows * kRowBytes;
constexpr int kStoredBlocks = kValueBlocks / SPLITS;  // blocks of 64 columns of a result that a CTA stores
constexpr int kStagedBlocks = 4;                      // blocks that are staged in shared memory at a time
constexpr int kStagedColumns = kStagedBlocks * 64;
constexpr int kStagedRowBytes = kStagedColumns * 4 + 16;  // float32; the 16 bytes avoid bank conflicts
constexpr int kStagedBytes = kPackedRows * kStagedRowBytes;
constexpr int kMergeBytes = merge_bytes(kValueBlocks * kPackedRows / 2, kPackedRows / 4);  // bytes of a warp
constexpr int kMergedBytes = SPLITS > 1 ? kConsumerWarps * kMergeBytes : 0;
enum NamedBarrier { kConsumer = 1 };

constexpr int kThreads = kFirstConsumerWarp * 32 + kConsumerThreads;

struct Shared {
  alignas(1024) char query[kBlocks * kQueryBlockBytes];
  alignas(1024) char kv[2][kTileBytes];
  alignas(1024) char p[kQueryBlockBytes];  // P: a row of 64 tokens for each packed row
  // Results that the other CTA sends, later the staged columns of O.
  alignas(16) char results[kStagedBytes > kMergedBytes ? kStagedBytes : kMergedBytes];
  alignas(16) float reduced[kPackedRows][kConsumerWarps];  // maximum or sum of a packed row over a warp's tokens
  QueryBlock unit;
  uint64 full[2][kQuarters], empty[2][2], q_full, q_empty;
  uint64 merge_full[kConsumerWarps], merge_ready[kConsumerWarps];
#if KV_FP8
  uint64 fp8_full[2][kQuarters];
  int fp8_end[2];  // [stage]: 1 if there is no further tile
#endif
};

}  // namespace
}  // namespace attn_ops
