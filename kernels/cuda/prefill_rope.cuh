// Prefill: the converter warpgroup with RoPE. It rotates queries and keys in place, and converts FP8 keys and values.
#pragma once

#include "division.cuh"
#include "prefill_problem.cuh"
#include "rope.cuh"
#if KV_FP8
#include "prefill_fp8_converter.cuh"
#endif

namespace attn_ops {
namespace {

constexpr int kRotatingThreads = KV_FP8 ? 32 : 32 * kConverterWarps;  // threads that share the keys of a call
using QueryRotation = RowRotation<kDimQk, 32 * kConverterWarps>;
using KeyRotation = RowRotation<kDimQk, kRotatingThreads>;
using RopeAngles = KeyRotation::OwnAngles;
using RopeTurns = KeyRotation::OwnTurns;
static_assert(kRowBytes == 128 && kPackedRows % QueryRotation::kRowsOfStep == 0);
static_assert(32 % KeyRotation::kLanes == 0);  // a thread has the same columns of queries as of keys

DEVICE void rotate_queries(uint32 queries, const Problem& p, const QueryBlock& block, const RopeTurns& turns) {
  const QueryRotation rotation(threadIdx.x % (32 * kConverterWarps));
  const DivideByGroup row_of(p.group);
  const int position = block.position, first = block.remainder + rotation.row;
  const int rows = min(p.block_rows(), block.stored * p.group - block.remainder);  // packed rows that are stored
#pragma unroll 1
  for (int i = 0; i < rows; i += kPackedRows)
    rotation.rotate_rows<kGroupBytes, kPackedRows * kRowBytes>(
        queries + i / kPackedRows * kQueryBytes, min(rows - i, kPackedRows),
        [&](int row) { return RopeAngles(turns, position + row_of(first + i + row)); });
}

// Rotates the queries of each unit, and calls `next_tile(first)` for each KV tile of the unit, which begins at token
// `first`.
template <class NextTile>
DEVICE void rotate_units(const Problem& p, const RopeTurns& turns, Shared& shared, NextTile next_tile) {
  for (uint32 n = 0;; ++n) {
    const uint32 buffer = n % kQueries;
    wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);
    mark(kWaitUnit);
    const QueryBlock& block = shared.query_blocks[n % kQueryBlocks];
    const int stored = block.stored, start = block.start, end = block.end;
    if (stored >= 0 && start < end) rotate_queries(shared_address(shared.query[buffer][0]), p, block, turns);
    fence_async_shared();
    arrive_by_warp(shared_address(&shared.q_full[buffer]));
    mark(kIssue);
    if (stored < 0) return;
    for (int first = start; first < end; first += kTile) next_tile(first);
  }
}

// The converter warpgroup.
DEVICE void rotate_queries_and_keys(const Problem& p, float theta, float scale, int kv_type, Shared& shared) {
  using Layout = TileLayout<kDimQk>;
  const KeyRotation rotation(threadIdx.x % kRotatingThreads);
  const Frequencies<kDimQk> frequencies(theta, scale);
  RopeTurns turns;
#pragma unroll
  for (int i = 0; i < KeyRotation::kPairs; ++i) turns[i] = frequencies.turns(rotation.column + i);
  const RopeAngles step(turns, KeyRotation::kRowsAtOnce);
#if KV_FP8
  KeyConverter keys(shared, false, Fp8Type(kv_type));
  ValueConverter values(shared, true, Fp8Type(kv_type));
  rotate_units(p, turns, shared, [&](int first) {
    keys.fill_stage([&](uint32 to, int token) {
      __syncwarp();
      rotation.rotate_keys<8 * KeyConverter::Part::kGroups, Layout::kGroup, Layout::kColumn>(to, first + token, turns,
                                                                                             step);
    });
    values.fill_stage([](uint32, int) {});
  });
#else
  uint32 tile = 0;
  rotate_units(p, turns, shared, [&](int first) {
    const uint32 stage = tile % kKeyStages;
    wait(shared_address(&shared.k_loaded[stage]), tile / kKeyStages & 1);
    mark(kWaitKeys);
    rotation.rotate_keys<kTile, Layout::kGroup, Layout::kColumn>(shared_address(shared.keys[stage]), first, turns,
                                                                 step);
    fence_async_shared();
    arrive_by_warp(shared_address(&shared.k_full[tile % (2 * kKeyStages)]));
    mark(kIssue);
    ++tile;
  });
#endif
}

}  // namespace
}  // namespace attn_ops
