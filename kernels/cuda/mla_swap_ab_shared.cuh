// MLA with swapped operands: sizes and shared memory. `mla_swap_ab.cu` has the schedule.
#pragma once

#include "mla_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kPackedRows = 16;         // of a CTA
constexpr int kUnitRows = kPackedRows;  // packed rows of a unit
constexpr int kValueBlocks = kLatent / 64;
constexpr int kQueryBlockBytes = kPackedRows * kRowBytes;
constexpr int kStagedBlocks = kValueBlocks / 2;  // of a result, at a time
constexpr int kStagedColumns = kStagedBlocks * 64;
constexpr int kStagedRowBytes = kStagedColumns * 4 + 16;  // by the 16, lanes store to different banks
enum NamedBarrier { kConsumer = 1 };

struct Shared {
  alignas(1024) char query[kBlocks * kQueryBlockBytes];
  alignas(1024) char kv[2][kTileBytes];
  alignas(1024) char p[kQueryBlockBytes];  // rows of 64 tokens
  alignas(16) char staged[kPackedRows * kStagedRowBytes];
  alignas(16) float reduced[kPackedRows][kConsumerWarps];  // maxima or sums of the warps
  int unit[8];
  uint64 full[2][kQuarters], empty[2][2], q_full, q_empty;
};

}  // namespace
}  // namespace attn_ops
