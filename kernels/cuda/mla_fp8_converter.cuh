// MLA: FP8 KV tiles, which are converted in the stages that they are loaded into.
#pragma once

#include "fp8.cuh"
#include "mla_problem.cuh"

namespace attn_ops {
namespace {

constexpr int kConvertedTokens = kTile / kConverterWarps;  // of a warp

// Where an FP8 tile lies in its stage. The half `first` of the latent columns is converted first. The FP8 numbers of
// both halves are in the blocks of the other one, a quarter of the columns in each, in the order of their conversion:
// the blocks that a quarter is converted into have earlier ones, or at the end this one. A converter warp overwrites
// tokens of its own alone. The rotary columns, of half as many bytes, are where they will be, by the tokens of each
// warp.
struct Fp8Tile {
  uint32 stage;
  int first;

  DEVICE int quarter(int i) const { return i ^ first * 2; }
  DEVICE uint32 latent(int i) const { return stage + ((1 - first) * kQuarters + i) * kBlockBytes; }
  DEVICE uint32 rotary(int warp) const { return stage + kRotary * kBlockBytes + warp * kConvertedTokens * kRowBytes; }
};

// The tokens of one warp. A row of a quarter is 128 bytes, whose 16-byte chunks are swizzled as in hopper.cuh; a row of
// the rotary columns is 64 bytes, swizzled by 64 bytes. Each chunk becomes two neighbouring ones. Lanes 4 r to 4 r + 3
// have the token r of eight, and four of its chunks: the lower half of a quarter for even tokens and the upper one for
// odd tokens, then the other half. So eight lanes load and store in different banks.
template <Fp8Type TYPE>
struct Conversion {
  static constexpr int kGroups = kConvertedTokens / 8;

  Fp8Tile tile;
  int warp = uniform(threadIdx.x / 32) % kConverterWarps;
  int row = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4;
  uint32 to = tile.stage + (warp * kConvertedTokens + row) * kRowBytes + (chunk * 2 ^ row) * 16;  // in block 0

  // N chunks: chunk j from `from(j)`, into the two at `to(j)`, which may overlap what any lane of the warp loads here.
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

// One warpgroup: all tiles of the CTA, quarter by quarter, in the order of `first_half`.
template <bool ALTERNATE, Fp8Type TYPE, class Shared>
DEVICE void convert_tiles_of(Shared& shared) {
  for (uint32 number = 0;; ++number) {
    const int stage = number & 1, first = first_half<ALTERNATE>(stage);
    const uint32 parity = number >> 1 & 1;
    const Conversion<TYPE> conversion = {{shared_address(shared.kv[stage]), first}};
#pragma unroll 1  // the instructions stay in the cache, which the mainloop of consumers fills
    for (int i = 0; i < kQuarters; ++i) {
      wait(shared_address(&shared.fp8_full[stage][i]), parity);
      mark(kWaitKeys);
      if (i == 0 && shared.fp8_end[stage]) return;
      if (i == 0) wait(shared_address(&shared.empty[stage][first]), parity ^ 1);  // the tile is in the other one
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
