// MLA with an FP8 cache: the converter warpgroup, which converts FP8 KV tiles to DTYPE inside their stages.
#pragma once

#include "fp8.cuh"
#include "mla_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kConvertedTokens = kTile / kConverterWarps;  // tokens of a warp

// The layout of an FP8 tile in its stage. A quarter of the latent columns is one block in FP8, and two blocks after its
// conversion. Half `first` of the latent columns is converted first. All four FP8 quarters are loaded into the four
// blocks of the other half, in the order of their conversion. So a quarter is converted into blocks that are free, or
// hold FP8 quarters that are already converted, or, for the last quarter, also this quarter itself: a converter warp
// reads its tokens before it overwrites them, and touches no tokens of other warps. The rotary columns of each warp's
// tokens are loaded into the first half of the memory that they take after the conversion.
struct Fp8Tile {
  uint32 stage;  // shared-memory address
  int first;

  // The i-th quarter that is converted, and the addresses of its FP8 numbers and of the FP8 rotary columns of a warp.
  DEVICE int quarter(int i) const { return i ^ first * 2; }
  DEVICE uint32 latent(int i) const { return stage + ((1 - first) * kQuarters + i) * kBlockBytes; }
  DEVICE uint32 rotary(int warp) const { return stage + kRotary * kBlockBytes + warp * kConvertedTokens * kRowBytes; }
};

// The conversion of one warp's tokens. An FP8 row of a quarter is 128 bytes, whose 16-byte chunks are swizzled as in
// hopper.cuh; an FP8 row of the rotary columns is 64 bytes, swizzled by 64 bytes. An FP8 chunk becomes two adjacent
// 16-bit chunks. Lanes 4 r to 4 r + 3 convert token r of each 8 tokens, 4 of the 8 chunks of a row at a time: of even
// tokens first the lower half of the row, of odd tokens first the upper half. So each 8 lanes load and store without
// bank conflicts.
template <Fp8Type TYPE>
struct Conversion {
  static constexpr int kGroups = kConvertedTokens / 8;

  Fp8Tile tile;
  int warp = uniform(threadIdx.x / 32) % kConverterWarps;
  int row = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4;
  uint32 to = tile.stage + (warp * kConvertedTokens + row) * kRowBytes + (chunk * 2 ^ row) * 16;  // in block 0

  // Converts N chunks per lane: chunk j at address `from(j)` into the chunks at `to(j)` and `to(j) ^ 16`. The warp
  // loads all its chunks before it stores, so that sources and destinations may overlap.
  template <int N, class From, class To>
  DEVICE void convert(From from, To to) const {
    uint4 x[N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = load_shared(from(j));
    __syncwarp();
#pragma unroll
    for (int j = 0; j < N; ++j) {
      store_shared(to(j), widen<TYPE>(x[j].x, x[j].y));
      store_shared(to(j) ^ 16, widen<TYPE>(x[j].z, x[j].w));
    }
  }

  DEVICE void convert_quarter(int i) const {
    const uint32 from = tile.latent(i) + (warp * kConvertedTokens + row) * kRowBytes;
    const uint32 to = this->to + tile.quarter(i) * 2 * kBlockBytes;
    const auto half = [&](int j) { return (j ^ row) & 1; };
    convert<kGroups * 2>([&](int j) { return from + j / 2 * kGroupBytes + (half(j) * 4 + chunk ^ row) * 16; },
                         [&](int j) { return to + j / 2 * kGroupBytes + half(j) * kBlockBytes; });
  }

  DEVICE void convert_rotary() const {
    const uint32 from = tile.rotary(warp) + row * (kRowBytes / 2) + (chunk ^ row / 2) * 16;
    const uint32 to = this->to + kRotary * kBlockBytes;
    convert<kGroups>([&](int j) { return from + j * (kGroupBytes / 2); }, [&](int j) { return to + j * kGroupBytes; });
  }
};

// One warpgroup. It converts all tiles of the CTA, quarter by quarter, the quarters of half `first_half` first.
template <bool ALTERNATE, Fp8Type TYPE, class Shared>
DEVICE void convert_tiles_of(Shared& shared) {
  for (uint32 number = 0;; ++number) {
    const int stage = number & 1, first = first_half<ALTERNATE>(stage);
    const uint32 parity = number >> 1 & 1;
    const Conversion<TYPE> conversion = {{shared_address(shared.kv[stage]), first}};
#pragma unroll 1  // small code: the mainloop of consumers fills the instruction cache
    for (int i = 0; i < kQuarters; ++i) {
      wait(shared_address(&shared.fp8_full[stage][i]), parity);
      mark(kWaitKeys);
      if (i == 0 && shared.fp8_end[stage]) return;
      if (i == 0) wait(shared_address(&shared.empty[stage][first]), parity ^ 1);  // the FP8 tile is in the other half
      mark(kWaitEmpty);
      conversion.convert_quarter(i);
      if (i == kQuarters - 1) conversion.convert_rotary();
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.full[stage][conversion.tile.quarter(i)]));
      mark(kIssue);
    }
  }
}

template <bool ALTERNATE, class Shared>
DEVICE void convert_tiles(Fp8Type type, Shared& shared) {
  if (type == kFp8E4M3)
    convert_tiles_of<ALTERNATE, kFp8E4M3>(shared);
  else
    convert_tiles_of<ALTERNATE, kFp8E5M2>(shared);
}

}  // namespace
}  // namespace attn_ops
