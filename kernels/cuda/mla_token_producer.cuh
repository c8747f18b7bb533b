// MLA: the producers of KV tiles in pages of any size.
#pragma once

#include "mla_problem.cuh"
#include "token_copies.cuh"
#if KV_FP8
#include "mla_fp8_converter.cuh"
#endif

namespace attn_ops {
namespace {

using Tokens = TileTokens<kTile>;

#if KV_FP8
// The quarters 2 * warp and 2 * warp + 1 of an FP8 tile, in the order of their conversion; the second warp has the
// rotary columns too, which lie where consumers may read until both halves are released.
template <class Shared>
DEVICE void copy_tile(const Problem& p, const TokenSource& latent, const TokenSource& rotary, const Tokens& tokens,
                      int warp, int first, int stage, uint32 parity, Shared& shared) {
  const Fp8Tile tile = {shared_address(shared.kv[stage]), first};
  wait(shared_address(&shared.empty[stage][1 - first]), parity);
  mark(kWaitEmpty);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int quarter = 2 * warp + i;
    tokens.copy_rows<1, kRowBytes, kBlockBytes>(p, latent.from_byte(tile.quarter(quarter) * kRowBytes), [&](int group) {
      return tile.latent(quarter) + group * kGroupBytes;
    });
  }
  if (warp == 1) {
    wait(shared_address(&shared.empty[stage][first]), parity);
    constexpr int kGroups = kConvertedTokens / 8;
    tokens.copy_rows<1, kRowBytes / 2, kBlockBytes>(p, rotary, [&](int group) {
      return tile.rotary(group / kGroups) + group % kGroups * (kGroupBytes / 2);
    });
  }
}
#else
// The half `warp` of the latent columns. The warp of the half that is released last copies the rotary columns too: P,
// which lies there, has been read by then.
template <class Shared>
DEVICE void copy_tile(const Problem& p, const TokenSource& latent, const TokenSource& rotary, const Tokens& tokens,
                      int warp, int first, int stage, uint32 parity, Shared& shared) {
  constexpr int kHalfBlocks = kRotary / 2;
  const uint32 to = shared_address(shared.kv[stage]);
  wait(shared_address(&shared.empty[stage][warp]), parity);
  mark(kWaitEmpty);
  tokens.copy_rows<kHalfBlocks, kRowBytes, kBlockBytes>(
      p, latent.from_byte(warp * kHalfBlocks * kRowBytes),
      [&](int group) { return to + warp * kHalfBlocks * kBlockBytes + group * kGroupBytes; });
  if (warp != first)
    tokens.copy_rows<1, kRowBytes, kBlockBytes>(
        p, rotary, [&](int group) { return to + kRotary * kBlockBytes + group * kGroupBytes; });
}
#endif

// Two warps: the KV tiles of all units, without clusters that share them. Each has two quarters of the latent columns.
// Page numbers are loaded a tile ahead. ALTERNATE: as of `first_half`.
template <bool ALTERNATE, class Shared>
DEVICE void produce_tokens(const Problem& p, const TokenSource& latent, const TokenSource& rotary, int warp,
                           Shared& shared) {
  const int lane = threadIdx.x % 32;
  const FastDivide by_page(p.page_size);
  Schedule schedule;
  Unit unit;
  uint32 tile = 0;
  while (schedule.next_after_prologue(p, unit)) {
    mark(kSchedule);
    const PagedTokens request = {by_page, unit.page_start, unit.end};
    for (Tokens tokens(p, request, unit.start); tokens.first < unit.end; ++tile) {
      const int stage = tile & 1;
      copy_tile(p, latent, rotary, tokens, warp, first_half<ALTERNATE>(stage), stage, tile >> 1 & 1 ^ 1, shared);
      tokens.advance(p);
      finish_copies();
#if KV_FP8
      auto& full = shared.fp8_full;
#else
      auto& full = shared.full;
#endif
      if (lane < 2) arrive(shared_address(&full[stage][2 * warp + lane]));
      mark(kIssue);
    }
  }
#if KV_FP8
  if (warp == 0) end_fp8_tiles(shared, tile);
#endif
}

}  // namespace
}  // namespace attn_ops
