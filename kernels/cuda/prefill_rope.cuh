// Prefill: the converters with RoPE, which rotate queries and keys in place.
#pragma once

#include "division.cuh"
#include "prefill_problem.cuh"
#include "rope.cuh"

namespace attn_ops {
namespace {

using Rotation = RowRotation<kDimQk, 32 * kConverterWarps>;
using RopeAngles = Rotation::OwnAngles;
using RopeTurns = Rotation::OwnTurns;
static_assert(kRowBytes == 128 && kPackedRows % Rotation::kRowsOfStep == 0);

DEVICE void rotate_queries(
    const Rotation& rotation, uint32 queries, const Problem& p, const QueryBlock& block, const RopeTurns& turns) {
  const DivideByGroup row_of(p.group);
  const int position = block.position, first = block.remainder + rotation.row;
  const int rows = min(p.block_rows(), block.stored * p.group - block.remainder);  // that are stored
#pragma unroll 1
  for (int i = 0; i < rows; i += kPackedRows)
    rotation.rotate_rows<kGroupBytes, kPackedRows * kRowBytes>(
        queries + i / kPackedRows * kQueryBytes, min(rows - i, kPackedRows),
        [&](int row) { return RopeAngles(turns, position + row_of(first + i + row)); });
}

// The warpgroup of converters: the queries of all units, and their keys.
DEVICE void rotate_queries_and_keys(const Problem& p, float theta, float scale, Shared& shared) {
  using Layout = TileLayout<kDimQk>;
  const Rotation rotation(threadIdx.x % (32 * kConverterWarps));
  const Frequencies<kDimQk> frequencies(theta, scale);
  RopeTurns turns;
#pragma unroll
  for (int i = 0; i < Rotation::kPairs; ++i) turns[i] = frequencies.turns(rotation.column + i);
  const RopeAngles step(turns, Rotation::kRowsAtOnce);
  uint32 tile = 0;
  for (uint32 n = 0;; ++n) {
    const uint32 buffer = n % kQueries;
    wait(shared_address(&shared.q_loaded[buffer]), n / kQueries & 1);
    mark(kWaitUnit);
    const QueryBlock& block = shared.query_blocks[n % kQueryBlocks];
    const int stored = block.stored, start = block.start, end = block.end;
    if (stored >= 0 && start < end)
      rotate_queries(rotation, shared_address(shared.query[buffer][0]), p, block, turns);
    fence_async_shared();
    arrive_by_warp(shared_address(&shared.q_full[buffer]));
    mark(kIssue);
    if (stored < 0) return;
    for (int first = start; first < end; first += kTile, ++tile) {
      const uint32 stage = tile % kKeyStages;
      wait(shared_address(&shared.k_loaded[stage]), tile / kKeyStages & 1);
      mark(kWaitKeys);
      rotation.rotate_keys<kTile, Layout::kGroup, Layout::kColumn>(shared_address(shared.keys[stage]), first, turns,
                                                                   step);
      fence_async_shared();
      arrive_by_warp(shared_address(&shared.k_full[tile % (2 * kKeyStages)]));
      mark(kIssue);
    }
  }
}

}  // namespace
}  // namespace attn_ops
