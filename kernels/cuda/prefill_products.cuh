// Prefill: the QK and PV products of a consumer with 16-bit operands. `prefill_fp8_products.cuh` has the same functions
// for FP8 operands.
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

// Whether a consumer finishes O of the KV tile before (wait, rescale, round P) in the issue slots between the
// exponentials of row 1. With wide heads O is not complete by then, and is finished after them.
constexpr bool kFinishEarly = kDimVo <= 128;

constexpr float kLogScale = 0;  // probabilities are those of the online softmax times 2^kLogScale
constexpr float kMostExponent = kRescaleThreshold;  // largest exponent without a raise of row_max

// The ring from which PV reads values.
constexpr int kPvStages = kValueStages;
DEVICE uint64 pv_values(Shared& shared) {
  using Layout = TileLayout<kValueColumns>;
  return mn_major(shared_address(shared.values[0]), Layout::kGroup, Layout::kColumn);
}
DEVICE uint32 pv_full(Shared& shared) { return shared_address(shared.v_full); }
DEVICE uint32 pv_empty(Shared& shared) { return shared_address(shared.v_empty); }

// The queries of a unit as operand A of QK, in parts of 16 columns. With heads of 96 and 128 and without converters
// they are in registers, and QK reads a third less of shared memory. Three consumers with heads of 128 have registers
// for half of the parts. Other kernels have no registers for queries.
constexpr int kQueryParts = kDimQk / 16;
constexpr int kRegisterParts = kConverts || (kDimQk != 96 && kDimQk != 128) ? 0
                               : kShortTiles && kDimQk == 128               ? kQueryParts / 2
                                                                            : kQueryParts;

struct Query {
  uint32 registers[kRegisterParts > 0 ? kRegisterParts : 1][4];
  uint64 shared;

  // `address`: 64 packed rows in shared memory.
  DEVICE void load(uint32 address) {
    shared = k_major(address, kGroupBytes, kRowBytes);
    if (kRegisterParts == 0) return;
    const int lane = threadIdx.x % 32, row = threadIdx.x % kConsumerThreads / 32 * 16 + lane % 16;
#pragma unroll
    for (int part = 0; part < kRegisterParts; ++part)
      load_matrices(registers[part], address + part / 4 * kPackedRows * kRowBytes +
                                         swizzled(row * kRowBytes + (part % 4 * 2 + lane / 16) * 16));
  }
};

// Issues the product with part `key_part` of the columns of keys. Part 0 sets the logits, other parts add to them.
DEVICE void issue_qk(Logits& logits, const Query& query, uint64 keys, int key_part) {
#pragma unroll
  for (int i = 0; i < kQueryParts / kKeyParts; ++i) {
    const int part = key_part * (kQueryParts / kKeyParts) + i, box = part / 4, step = part % 4 * 2;
    const uint64 of_keys = keys + (i / 4 * TileLayout<kKeyDim>::kColumn / 16 + step);
    if (part < kRegisterParts)
      wgmma_rs(logits, query.registers[part < kRegisterParts ? part : 0], of_keys, part > 0);
    else
      wgmma_ss(logits, query.shared + (box * kPackedRows * kRowBytes / 16 + step), of_keys, part > 0);
  }
  wgmma_commit();
}

// A WGMMA of 256 columns has 128 accumulator registers: with its other operands, more than the 128 registers of a
// launch with 512 threads. So the columns are divided.
constexpr int kPvParts = kConverts && kDimVo > 192 ? 2 : 1;

DEVICE void issue_pv(Output& output, Partial&, const Probabilities& p, uint64 values) {
  fence_registers(output);
  wgmma_fence();
  using Layout = TileLayout<kValueColumns>;
#pragma unroll
  for (int part = 0; part < kPvParts; ++part) {
    auto& columns = reinterpret_cast<float(&)[kDimVo / 2 / kPvParts]>(output[part * (kDimVo / 2 / kPvParts)]);
    const uint64 of_part = values + part * (kDimVo / kPvParts / kColumns) * Layout::kColumn / 16;
#pragma unroll
    for (int i = 0; i < kTile / 16; ++i) wgmma_rs_mn(columns, p[i], of_part + i * 2 * Layout::kGroup / 16);
  }
  wgmma_commit();
}

DEVICE void finish_pv(Output& output, Partial&, const Probabilities&, uint64, const float (&)[2]) {
  fence_registers(output);
}

// Rescales the output by the `alpha` of the next KV tile, before the PV product of that tile.
DEVICE void rescale_for_next(Output& output, const float (&alpha)[2]) { rescale(output, alpha); }

}  // namespace
}  // namespace attn_ops
