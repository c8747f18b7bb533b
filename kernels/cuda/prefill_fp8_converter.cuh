// Prefill: the converter warps, which convert FP8 keys and values to 16 bits.
#pragma once

#include "fp8.cuh"
#include "prefill_problem.cuh"

namespace attn_ops {
namespace {

// Keys or values: addresses of the FP8 ring and of the 16-bit ring `ring`, with their barriers.
struct ConvertedRing {
  uint32 fp8, fp8_full, fp8_empty, ring, full, empty;
  const int& end;

  DEVICE ConvertedRing(Shared& s, bool values)
      : fp8(shared_address(values ? s.fp8_values[0] : s.fp8_keys[0])), fp8_full(shared_address(s.fp8_full[values])),
        fp8_empty(shared_address(s.fp8_empty[values])), ring(shared_address(values ? s.values[0] : s.keys[0])),
        full(shared_address(values ? s.v_full : s.k_full)), empty(shared_address(values ? s.v_empty : s.k_empty)),
        end(s.fp8_end[values]) {}
};

// One warp's part of an FP8 tile of DIM columns: kGroups groups of 8 tokens. A lane converts 16 columns of a token at a
// time, one 16-byte chunk, to two neighbouring chunks of the 16-bit ring. The chunks of 8 lanes are in different banks.
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

  // A loop that is not unrolled further: its few instructions stay in the instruction cache, which the mainloop of the
  // consumers fills.
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

// One of the kWarpsOfTensor warps that convert the keys, or the values, of all KV tiles.
template <int DIM, int STAGES, int FP8_STAGES>
struct Converter {
  using Part = ConvertedPart<DIM>;
  static constexpr int kBytes = kTile * DIM * kElementBytes, kFp8Bytes = kLoadedTile * DIM;

  const ConvertedRing ring;
  const Fp8Type type;
  const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32) % kWarpsOfTensor;
  uint32 stage = 0, fp8_stage = 0;  // next stage of the 16-bit ring and of the FP8 ring, counted over all units

  DEVICE Converter(Shared& shared, bool values, Fp8Type type) : ring(shared, values), type(type) {}

  // Fills the next stage of the 16-bit ring. False if no KV tile follows. For each FP8 tile, `change(address, token)`
  // may change the 8 * Part::kGroups tokens that this warp has converted, which begin at token `token` of the KV tile.
  template <class Change>
  DEVICE bool fill_stage(Change change) {
    for (int part = 0; part < kFp8Parts; ++part, ++fp8_stage) {
      const uint32 from = fp8_stage % FP8_STAGES;
      wait(ring.fp8_full + from * 8, fp8_stage / FP8_STAGES & 1);
      mark(kWaitKeys);
      if (ring.end) return false;
      if (part == 0) wait(ring.empty + stage % STAGES * 8, stage / STAGES & 1 ^ 1);
      mark(kWaitEmpty);
      const int group = part * kLoadedTile / 8;
      const uint32 to = ring.ring + stage % STAGES * kBytes + group * TileLayout<DIM>::kGroup;
      Part(ring.fp8 + from * kFp8Bytes, to, warp, lane).convert(type);
      change(to + warp * Part::kGroups * TileLayout<DIM>::kGroup, 8 * (group + warp * Part::kGroups));
      fence_async_shared();
      __syncwarp();
      if (lane == 0) arrive(ring.fp8_empty + from * 8);
      mark(kIssue);
    }
    if (lane == 0) arrive(ring.full + stage % (2 * STAGES) * 8);
    ++stage;
    return true;
  }
};

using KeyConverter = Converter<kKeyDim, kKeyStages, kFp8KeyStages>;
using ValueConverter = Converter<kValueColumns, kValueStages, kFp8ValueStages>;
constexpr bool kEqualConverters =
    kKeyDim == kValueColumns && kKeyStages == kValueStages && kFp8KeyStages == kFp8ValueStages;

template <class TensorConverter>
DEVICE void convert_all(bool values, Fp8Type type, Shared& shared) {
  TensorConverter converter(shared, values, type);
  while (converter.fill_stage([](uint32, int) {})) {
  }
}

// Converts keys and values in turn: the values of a KV tile after the first kKeyStages parts of the keys of the next KV
// tile, which fill the ring of keys.
DEVICE void convert_in_turn(Fp8Type type, Shared& shared) {
  constexpr auto unchanged = [](uint32, int) {};
  KeyConverter keys(shared, false, type);
  ValueConverter values(shared, true, type);
  for (;;) {
    const bool more = keys.fill_stage(unchanged);
    const bool next_begins = keys.stage > kKeyParts && keys.stage % kKeyParts == kKeyStages;
    if (more ? next_begins : keys.stage > 0) values.fill_stage(unchanged);
    if (!more) return;
  }
}

// Converter warp `warp`: the first kWarpsOfTensor warps convert keys, the others values. If keys and values have equal
// rings, both run the same instructions.
DEVICE void convert_keys_and_values(int warp, Fp8Type type, Shared& shared) {
  if (kConvertsInTurn) return convert_in_turn(type, shared);
  const bool values = warp >= kWarpsOfTensor;
  if (kEqualConverters || !values)
    convert_all<KeyConverter>(values, type, shared);
  else
    convert_all<ValueConverter>(values, type, shared);
}

}  // namespace
}  // namespace attn_ops
