// MLA in clusters: sizes and shared memory. `mla.cu` has the schedule.
#pragma once

#include "mla_merge.cuh"

namespace attn_ops {
namespace {

constexpr int kHalf = kLatent / 2;                // columns of a consumer's accumulator
constexpr int kPackedRows = 64;                   // of a CTA
constexpr int kUnitRows = CLUSTER * kPackedRows;  // packed rows of a unit
constexpr int kHalfBytes = kHalf / 64 * kBlockBytes;
constexpr int kStored = kHalf / SPLITS;           // columns of a result that a consumer stores
constexpr int kScaleColumns = 128;                // of a partial result that share a scale
static_assert(kStored % kScaleColumns == 0);
constexpr int kStagedRowBytes = kStored * 2 + 16;  // of a partial result; by the 16, rows lie in different banks
// Of a warp, in the memory of the query: what the other CTA sends, and later 16 rows of a partial result.
constexpr int kResultBytes = merge_bytes(kHalf / 2, 2);
static_assert(16 * kStagedRowBytes <= kResultBytes && 2 * kConsumerWarps * kResultBytes <= kTileBytes);
// Columns of a product of values: 512 threads have too few registers for 256.
constexpr int kPvColumns = KV_FP8 ? kHalf / 2 : kHalf;
struct Registers {
  int producer, converter, consumer;  // of a thread
};
constexpr Registers kRegisters =
    KV_FP8 ? Registers{40, 56, 208} : KV_CP_ASYNC ? Registers{56, 0, 224} : Registers{40, 0, 232};
constexpr int kThreads = kFirstConsumerWarp * 32 + 2 * kConsumerThreads;
constexpr bool kKeysFirst[2] = {false, !KV_FP8 && !KV_CP_ASYNC};  // by consumer
enum NamedBarrier { kOneConsumer = 1, kBothConsumers = 3 };

struct Shared {
  alignas(1024) char query[kTileBytes];
  alignas(1024) char kv[2][kTileBytes];  // of a tile, P lies over the rotary columns later
  float row_max[2][kPackedRows];         // of each consumer's latest tile
  float row_sum[2][2][kPackedRows];      // of even and odd units, of each consumer
  QueryBlock unit;
  uint64 full[2][kQuarters], empty[2][2], p_stored[2], q_full, q_empty;
  uint64 merge_full[2 * kConsumerWarps], merge_ready[2 * kConsumerWarps];  // of each consumer warp
#if KV_FP8
  uint64 fp8_full[2][kQuarters];
  int fp8_end[2];  // of a stage: there is no further tile
#endif
};

}  // namespace
}  // namespace attn_ops
