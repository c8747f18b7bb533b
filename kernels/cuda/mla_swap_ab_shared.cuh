// MLA with swapped operands: sizes and shared memory. `mla_swap_ab.cu` has the schedule.
#pragma once

#include "mla_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kUnitRows = CONSUMERS * ROWS;  // packed rows of a unit
constexpr int kValueBlocks = kLatent / 64;
constexpr int kQueryBlockBytes = ROWS * kRowBytes;
constexpr int kQueryBytes = kBlocks * kQueryBlockBytes;  // of a consumer
constexpr int kStagedBlocks = kValueBlocks / 2;          // of a result, at a time
constexpr int kStagedColumns = kStagedBlocks * 64;
constexpr int kStagedRowBytes = kStagedColumns * 4 + 16;  // by the 16, lanes store to different banks
constexpr int kStagedBytes = ROWS * kStagedRowBytes;      // of a consumer
// Results are staged in memory of their own if there is room, or else in that of the query.
constexpr bool kOwnStaging = CONSUMERS == 1;
static_assert(kStagedBytes <= kQueryBytes);
enum NamedBarrier { kOneConsumer = 1, kAllConsumers = 3 };

struct Shared {
  alignas(1024) char query[CONSUMERS][kQueryBytes];
  alignas(1024) char kv[2][kTileBytes];
  alignas(1024) char p[CONSUMERS][kQueryBlockBytes];  // rows of 64 tokens
  alignas(16) char staged[kOwnStaging ? kStagedBytes : 16];
  alignas(16) float reduced[CONSUMERS][ROWS][kConsumerWarps];  // maxima or sums of the warps
  int unit[8];
  uint64 full[2][kQuarters], empty[2][2], q_full, q_empty;
};

}  // namespace
}  // namespace attn_ops
