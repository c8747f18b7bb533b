// Prefill: warps 2 and 3 with FP8 products, which load queries and transpose values. WGMMA takes FP8 operands K-major
// alone, so PV needs the values of a KV tile as [columns, tokens].
#pragma once

#include "prefill_producer.cuh"

namespace attn_ops {
namespace {

constexpr int kTransposeWarps = 2;
static_assert(kTile == 64 || kTile == 128);  // a row of transposed values is as wide as a swizzle

// One warp: transposes its half of the columns of a KV tile, for all tokens.
//
// A step takes 32 tokens of 16 columns. ldmatrix.trans loads them as four matrices [8 tokens, 8 pairs of columns] of
// 16-bit elements. From matrix i, a lane gets tokens 8 i + 2 (lane % 4) and the next one, each of columns 2 g and
// 2 g + 1, with g = lane / 4. From matrices 0 and 1, one byte permutation makes the word of one of the two columns, and
// another the word of the other column: four tokens, which lie side by side in the order of tokens of
// prefill_fp8_products.cuh. Matrices 2 and 3 make the next 16 tokens likewise.
//
// stmatrix stores four matrices [8 columns, 16 tokens], two for each 16 tokens. One has the even columns of the first 8
// columns and the odd columns of the last 8, the other has the other columns. So the 8 rows of a matrix are in
// different banks.
DEVICE void transpose(uint32 from, uint32 to, int warp, int lane) {
  using Layout = TileLayout<kDimVo>;
  constexpr int kChunksOfWarp = kDimVo / 16 / kTransposeWarps, kSteps = kTile / 32, kAtOnce = 2;
  // Lane l gives the address of token l of a step to ldmatrix, and to stmatrix the address of row l % 8, a column, of
  // matrix l / 8.
  const int row = lane % 8, column = 2 * row + ((row >= 4) ^ (lane / 8 & 1));
  const uint32 token = from + swizzled(lane / 8 * Layout::kGroup + lane % 8 * kRowBytes);
  const uint32 stored = to + swizzled<kTile>(column * kTile + lane / 16 * 16);
  const bool upper = lane >= 16;  // this lane has two of the last 8 columns
  const uint32 first = upper ? 0x7531 : 0x6420, second = upper ? 0x6420 : 0x7531;
#pragma unroll
  for (int i = 0; i < kChunksOfWarp; ++i) {
    const int chunk = warp * kChunksOfWarp + i;
    const uint32 loaded = (token ^ chunk % kRowChunks * 16) + chunk / kRowChunks * Layout::kColumn;
#pragma unroll
    for (int begin = 0; begin < kSteps; begin += kAtOnce) {
      uint32 m[kAtOnce][4];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) load_transposed(m[j], loaded + (begin + j) * 4 * Layout::kGroup);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const auto& x = m[j];
        store_matrices((stored ^ (begin + j) * 32) + chunk * 16 * kTile,
                       {permute_bytes(x[0], x[1], first), permute_bytes(x[0], x[1], second),
                        permute_bytes(x[2], x[3], first), permute_bytes(x[2], x[3], second)});
      }
    }
  }
}

// Warps 2 and 3: load the queries of all units, and transpose the values of their KV tiles. The first thread is the
// scheduler. It takes the next unit before the last tile of the current unit is transposed, so that producers load the
// next unit in the meantime.
DEVICE void produce_queries_and_transpose(const Problem& p, const Queries& q, Shared& shared) {
  const int thread = threadIdx.x % kQueryThreads, lane = thread % 32, warp = uniform(thread / 32);
  const uint32 values = shared_address(shared.values[0]), transposed = shared_address(shared.transposed[0]);
  const uint32 v_full = shared_address(shared.v_full), v_empty = shared_address(shared.v_empty);
  const uint32 t_full = shared_address(shared.t_full), t_empty = shared_address(shared.t_empty);
  Schedule schedule(p);
  uint32 n = 0, tile = 0;  // the next unit and KV tile
  int first = 0, end = 0;  // tokens of the current unit that are not transposed yet
  for (;;) {
    if (thread == 0 && first + kTile >= end) pass_unit(p, schedule, n, shared);
    __syncwarp();
    if (first < end) {
      const uint32 stage = tile % kValueStages, to = tile % kTransposedStages;
      wait(v_full + tile % (2 * kValueStages) * 8, tile / (2 * kValueStages) & 1);
      wait(t_empty + to * 8, tile / kTransposedStages & 1 ^ 1);
      mark(kWaitEmpty);
      transpose(values + stage * kValueBytes, transposed + to * kValueBytes, warp, recomputed(lane));
      fence_async_shared();
      __syncwarp();
      if (lane == 0) arrive(v_empty + stage * 8);
      if (lane == 0) arrive(t_full + tile % (2 * kTransposedStages) * 8);
      mark(kIssue);
      ++tile, first += kTile;
    }
    if (first < end) continue;
    const Unit& unit = wait_for_unit(n, shared);
    const bool exists = unit.count > 0;
    first = unit.start, end = unit.end;
    if (thread < q.threads()) load_queries(p, q, unit, n, shared, thread);
    release_unit(shared);
    if (!exists) return;
    ++n;
  }
}

}  // namespace
}  // namespace attn_ops
