// MLA: the converters of FP8 KV tiles.
#pragma once

#include "fp8.cuh"
#include "mla_swap_ab_shared.cuh"

namespace attn_ops {
namespace {

// One of kConverterWarps: its 16 tokens of an FP8 tile at `fp8` into the stage at `tile`.
//
// A quarter of the latent columns is 64 rows of 128 bytes, whose 16-byte chunks are swizzled as in hopper.cuh; the rotary
// columns are rows of 64 bytes, swizzled by 64 bytes. Each chunk becomes two neighbouring ones. Lanes 4 r to 4 r + 3 have
// the token r of eight, and four of its chunks: the lower half of a quarter for even tokens and the upper one for odd
// tokens, then the other half. So eight lanes load and store in different banks.
struct Conversion {
  static constexpr int kGroups = kTile / 8 / kConverterWarps;

  uint32 fp8, tile;
  int group = uniform(threadIdx.x / 32) % kConverterWarps * kGroups;  // the first of 8 tokens
  int row = threadIdx.x % 32 / 4, chunk = threadIdx.x % 4;

  template <class Widen>
  DEVICE void convert(uint32 from, uint32 block, int token, Widen&& widen) const {
    const uint4 x = load_shared(from);
    const uint32 to = tile + block * kBlockBytes + token * kRowBytes + (chunk * 2 ^ row) * 16;
    store_shared(to, widen(x.x, x.y));
    store_shared(to ^ 16, widen(x.z, x.w));
  }

  template <class Widen>
  DEVICE void quarter(int number, Widen&& widen) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int token = (group + g) * 8 + row;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int half = i ^ row & 1;
        const uint32 from = fp8 + number * kBlockBytes + token * kRowBytes + (half * 4 + chunk ^ row) * 16;
        convert(from, number * 2 + half, token, widen);
      }
      if (number == kQuarters - 1) {
        const uint32 from = fp8 + kQuarters * kBlockBytes + token * (kRowBytes / 2) + (chunk ^ row / 2) * 16;
        convert(from, kRotary, token, widen);
      }
    }
  }

  DEVICE void quarter(int number, Fp8Type type) const {
    FiniteFp8 finite(type);
    quarter(number, [&](uint32 a, uint32 b) { return finite.widen(a, b); });
    if (finite.all_finite()) return;
    if (type == kFp8E4M3)
      quarter(number, [](uint32 a, uint32 b) { return widen<kFp8E4M3>(a, b); });
    else
      quarter(number, [](uint32 a, uint32 b) { return widen<kFp8E5M2>(a, b); });
  }
};

// One warpgroup: all FP8 tiles of the CTA, quarter by quarter, into the stages.
DEVICE void convert_tiles(Fp8Type type, Shared& shared) {
  const uint32 fp8_full = shared_address(shared.fp8_full), fp8_empty = shared_address(shared.fp8_empty);
  const uint32 full = shared_address(shared.full), empty = shared_address(shared.empty);
  for (uint32 tile = 0;; ++tile) {
    const uint32 stage = tile & 1;
    const Conversion conversion = {shared_address(shared.fp8), shared_address(shared.kv[stage])};
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      wait(fp8_full + quarter * 8, tile & 1);
      mark(kWaitKeys);
      if (quarter == 0 && shared.fp8_end) return;
      if (quarter % 2 == 0) wait(empty + (stage * 2 + quarter / 2) * 8, tile >> 1 & 1 ^ 1);
      mark(kWaitEmpty);
      conversion.quarter(quarter, type);
      fence_async_shared();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        arrive(fp8_empty + quarter * 8);
        arrive(full + (stage * kQuarters + quarter) * 8);
      }
      mark(kIssue);
    }
  }
}

}  // namespace
}  // namespace attn_ops
