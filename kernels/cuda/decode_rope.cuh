// Decode with RoPE: the converter warpgroup, which rotates keys in place. Consumers rotate their queries.
#pragma once

#include "decode_problem.cuh"
#include "rope.cuh"

namespace attn_ops {
namespace {

// Stores the turns of all pairs of columns, which converters and consumers read after end_prologue.
DEVICE void store_turns(float theta, float scale, Shared& shared) {
  const int pair = threadIdx.x % kConverterThreads;
  if (pair < kDim / 2) shared.turns[pair] = Frequencies<kDim>(theta, scale).turns(pair);
}

// One warpgroup. It rotates the keys of all KV tiles of the CTA.
DEVICE void rotate_keys(const Problem& p, const WorkList& list, Shared& shared) {
  using Rotation = RowRotation<kDim, kConverterThreads>;
  const Rotation rotation(threadIdx.x % kConverterThreads);
  Rotation::OwnTurns turns;
#pragma unroll
  for (int i = 0; i < Rotation::kPairs; ++i) turns[i] = shared.turns[rotation.column + i];
  const Rotation::OwnAngles step(turns, Rotation::kRowsAtOnce);
  uint32 stage = 0, parity = 0;
  WorkItem item = list.first;
  for (int i = list.begin; i < list.stop; ++i) {
    const WorkItem next = read_item(p, i + 1, list.stop);
#pragma unroll 1
    for (int first = item.first; first < item.end; first += kTile) {
      wait(shared_address(&shared.k_loaded[stage]), parity);
#pragma unroll
      for (int head = 0; head < KV_HEADS; ++head)
        rotation.rotate_keys<kTile, kGroupBytes, kBlockBytes>(
            shared_address(shared.stages[stage].keys) + head * kHeadBytes, first, turns, step);
      fence_async_shared();
      arrive_by_warp(shared_address(&shared.k_full[stage]));
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    item = next;
  }
}

}  // namespace
}  // namespace attn_ops
