// MLA, `mla.cu`: sizes and shared memory. The schedule is in `mla.cu`.
#pragma once

#include "mla_merge.cuh"

namespace attn_ops {
namespace {

constexpr int kHalf = kLatent / 2;                // columns of a consumer's accumulator
constexpr int kPackedRows = 64;                   // packed rows of a CTA
constexpr int kUnitRows = CLUSTER * kPackedRows;  // packed rows of a unit
constexpr int kHalfBytes = kHalf / 64 * kBlockBytes;
constexpr int kStored = kHalf / SPLITS;           // columns of a result that a consumer stores
constexpr int kScaleColumns = 128;                // columns of a partial result that share a scale
static_assert(kStored % kScaleColumns == 0);
constexpr int kStagedRowBytes = kStored * 2 + 16;  // a row of a partial result; the 16 bytes avoid bank conflicts
// Bytes of a warp in the memory of the query: results that the other CTA sends, and later 16 rows of a partial result.
constexpr int kResultBytes = merge_bytes(kHalf / 2, 2);
static_assert(16 * kStagedRowBytes <= kResultBytes && 2 * kConsumerWarps * kResultBytes <= kTileBytes);
// N of the PV product. With KV_FP8 a CTA has 512 threads, which have too few registers for N = 256.
constexpr int kPvColumns = KV_FP8 ? kHalf / 2 : kHalf;
struct Registers {
  int producer, converter, consumer;  // registers of a thread
};
constexpr Registers kRegisters =
    KV_FP8 ? Registers{40, 56, 208} : KV_CP_ASYNC ? Registers{56, 0, 224} : Registers{40, 0, 232};
constexpr int kThreads = kFirstConsumerWarp * 32 + 2 * kConsumerThreads;
constexpr bool kKeysFirst[2] = {false, !KV_FP8 && !KV_CP_ASYNC};  // by consumer
enum NamedBarrier { kOneConsumer = 1, kBothConsumers = 3 };

struct Shared {
  alignas(1024) char query[kTileBytes];
  alignas(1024) char kv[2][kTileBytes];  // KV tiles; P of a tile overwrites the rotary columns
  float row_max[2][kPackedRows];         // [consumer]: after its latest own tile
  float row_sum[2][2][kPackedRows];      // [unit number % 2][consumer]
  QueryBlock unit;
  uint64 full[2][kQuarters], empty[2][2], p_stored[2], q_full, q_empty;
  uint64 merge_full[2 * kConsumerWarps], merge_ready[2 * kConsumerWarps];
#if KV_FP8
  uint64 fp8_full[2][kQuarters];
  int fp8_end[2];  // [stage]: 1 if there is no further tile
#endif
};

}  // namespace
}  // namespace attn_ops
