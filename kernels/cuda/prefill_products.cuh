// Prefill: the products of a consumer in the 16-bit type of the query. `prefill_fp8_products.cuh` has the same in FP8.
#pragma once

#include "descriptors.cuh"
#include "epilogue.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

using Logits = float[kTile / 2];
using Output = float[kDimVo / 2];
using Probabilities = uint32[kTile / 16][4];
struct Partial {};  // PV adds to the output itself

constexpr float kLogScale = 0;  // probabilities are those of the online softmax times 2^kLogScale

// The ring from which PV reads values.
constexpr int kPvStages = kValueStages;
DEVICE uint64 pv_values(Shared& shared) {
  return mn_major(shared_address(shared.values[0]), TileLayout<kDimVo>::kGroup, TileLayout<kDimVo>::kColumn);
}
DEVICE uint32 pv_full(Shared& shared) { return shared_address(shared.v_full); }
DEVICE uint32 pv_empty(Shared& shared) { return shared_address(shared.v_empty); }

DEVICE void issue_qk(Logits& logits, uint64 query, uint64 keys) {
#pragma unroll
  for (int column = 0; column < kDimQk; column += 16) {
    const int box = column / 64, step = column % 64 * 2 / 16;
    wgmma_ss(logits, query + (box * kPackedRows * kRowBytes / 16 + step),
             keys + (box * TileLayout<kDimQk>::kColumn / 16 + step), column > 0);
  }
  wgmma_commit();
}

DEVICE void issue_pv(Output& output, Partial&, const Probabilities& p, uint64 values) {
  fence_registers(output);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i) wgmma_rs(output, p[i], values + i * 2 * TileLayout<kDimVo>::kGroup / 16);
  wgmma_commit();
}

DEVICE void finish_pv(Output& output, Partial&, const Probabilities&, uint64) { fence_registers(output); }

}  // namespace
}  // namespace attn_ops
