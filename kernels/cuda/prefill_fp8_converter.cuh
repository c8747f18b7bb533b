// Prefill: the converters of FP8 keys and values.
#pragma once

#include "fp8.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// Keys or values: the FP8 tiles, and the ring.
struct ConvertedRing {
  uint32 fp8, fp8_full, fp8_empty, ring, full, empty;
  const int& end;

  DEVICE ConvertedRing(Shared& s, bool values)
      : fp8(shared_address(values ? s.fp8_values[0] : s.fp8_keys[0])), fp8_full(shared_address(s.fp8_full[values])),
        fp8_empty(shared_address(s.fp8_empty[values])), ring(shared_address(values ? s.values[0] : s.keys[0])),
        full(shared_address(values ? s.v_full : s.k_full)), empty(shared_address(values ? s.v_empty : s.k_empty)),
        end(s.fp8_end[values]) {}
};

// The part of one warp of an FP8 tile of DIM columns: some groups of 8 tokens. A lane has 16 columns of a token, which
// become two neighbouring chunks in the ring. The chunks of 8 lanes are in different banks.
template <int DIM>
struct ConvertedPart {
  using From = LoadedLayout<DIM>;
  using To = TileLayout<DIM>;
  static_assert(From::kBlocks == To::kBlocks && From::kRow == 64);
  static constexpr int kGroups = kLoadedTile / 8 / kWarpsOfTensor, kChunks = kGroups * To::kBlocks;

  uint32 from, to;

  DEVICE ConvertedPart(uint32 fp8, uint32 tile, int warp, int lane)
      : from(fp8 + warp * kGroups * From::kGroup + swizzled<From::kRow>(lane * 16)),
        to(tile + warp * kGroups * To::kGroup + lane / 4 * To::kRow + (lane % 4 * 2 ^ lane / 4) * 16) {}

  DEVICE uint4 load(int i) const {
    return load_shared(from + i / To::kBlocks * From::kGroup + i % To::kBlocks * From::kColumn);
  }

  DEVICE void store(int i, const uint4& first, const uint4& second) const {
    const uint32 chunk = to + i / To::kBlocks * To::kGroup + i % To::kBlocks * To::kColumn;
    store_shared(chunk, first);
    store_shared(chunk ^ 16, second);
  }

  // A loop, whose instructions stay in the cache: the mainloop of consumers fills it.
  template <Fp8Type TYPE>
  DEVICE void convert() const {
    constexpr int kAtOnce = kChunks % 4 ? 2 : 4;
    static_assert(kChunks % kAtOnce == 0);
#pragma unroll 1
    for (int i = 0; i < kChunks; i += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = load(i + j);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) store(i + j, widen<TYPE>(x[j].x, x[j].y), widen<TYPE>(x[j].z, x[j].w));
    }
  }

  DEVICE void convert(Fp8Type type) const {
    if (type == kFp8E4M3)
      convert<kFp8E4M3>();
    else
      convert<kFp8E5M2>();
  }
};

// kWarpsOfTensor warps: all KV tiles of keys, or of values, into their ring.
template <int DIM, int STAGES>
DEVICE void convert_tiles(const ConvertedRing& tiles, Fp8Type type) {
  constexpr int kBytes = kTile * DIM * kElementBytes, kFp8Bytes = kLoadedTile * DIM;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32) % kWarpsOfTensor;
  uint32 loaded = 0;  // FP8 tiles
  for (uint32 tile = 0;; ++tile) {
    for (int part = 0; part < kFp8Parts; ++part, ++loaded) {
      const uint32 stage = loaded % kFp8Stages;
      wait(tiles.fp8_full + stage * 8, loaded / kFp8Stages & 1);
      mark(kWaitKeys);
      if (tiles.end) return;
      if (part == 0) wait(tiles.empty + tile % STAGES * 8, tile / STAGES & 1 ^ 1);
      mark(kWaitEmpty);
      const uint32 to = tiles.ring + tile % STAGES * kBytes + part * kLoadedTile / 8 * TileLayout<DIM>::kGroup;
      ConvertedPart<DIM>(tiles.fp8 + stage * kFp8Bytes, to, warp, lane).convert(type);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) arrive(tiles.fp8_empty + stage * 8);
      mark(kIssue);
    }
    if (lane == 0) arrive(tiles.full + tile % (2 * STAGES) * 8);
  }
}

// The warpgroup of converters: the first warps have the keys, the others the values.
DEVICE void convert_keys_and_values(int warp, Fp8Type type, Shared& shared) {
  const bool values = warp >= kWarpsOfTensor;
  const ConvertedRing tiles(shared, values);
  if (kDimQk == kDimVo || !values)
    convert_tiles<kDimQk, kKeyStages>(tiles, type);
  else
    convert_tiles<kDimVo, kValueStages>(tiles, type);
}
static_assert(kDimQk != kDimVo || kKeyStages == kValueStages);

}  // namespace
}  // namespace attn_ops
