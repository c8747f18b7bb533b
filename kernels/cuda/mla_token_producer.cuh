// MLA with KV_CP_ASYNC: the producer warpgroup, which copies KV tiles from pages of any size, and loads queries.
#pragma once

#include "mla_producer.cuh"
#include "token_copies.cuh"

namespace attn_ops {
namespace {

constexpr int kOwnTokens = kTile / 2, kOwnBlocks = kRotary / 2;

// One of four warps. Of each KV tile it copies half `half` of the latent columns (with KV_FP8, two quarters) of
// kOwnTokens tokens, from token `own` of the tile on. ALTERNATE: see first_half.
template <bool ALTERNATE, class Shared>
struct TokenProducer {
  using Tokens = TileTokens<kOwnTokens, kTile, 4>;

  const Problem& p;
  const TokenSource &latent, &rotary;
  Shared& shared;
  const int warp = uniform(threadIdx.x / 32), half = warp % 2, own = warp / 2 * kOwnTokens;

#if KV_FP8
  // Copies two quarters, in the order of conversion, and with the last quarter the rotary columns. Consumers may read
  // the memory of the rotary columns until both halves of the stage are released.
  DEVICE void copy_tile(const Tokens& tokens, uint32 number) const {
    const int stage = number & 1, first = first_half<ALTERNATE>(stage), quarter = 2 * half;
    const uint32 parity = number >> 1 & 1 ^ 1;
    const Fp8Tile tile = {shared_address(shared.kv[stage]), first};
    wait(shared_address(&shared.empty[stage][1 - first]), parity);
    mark(kWaitEmpty);
    tokens.template copy_rows<2, kRowBytes, kBlockBytes>(
        p, latent.from_byte(tile.quarter(quarter) * kRowBytes),
        [&](int group) { return tile.latent(quarter) + (own / 8 + group) * kGroupBytes; });
    arrive_after_chunks(shared_address(&shared.fp8_full[stage][quarter]));
    if (half) {
      wait(shared_address(&shared.empty[stage][first]), parity);
      constexpr int kGroups = kConvertedTokens / 8;
      tokens.template copy_rows<1, kRowBytes / 2, kBlockBytes>(p, rotary, [&](int group) {
        return tile.rotary((own / 8 + group) / kGroups) + group % kGroups * (kGroupBytes / 2);
      });
    }
    arrive_after_chunks(shared_address(&shared.fp8_full[stage][quarter + 1]));
  }
#else
  // The warps of the half that is released last also copy the rotary columns: by then the consumers have read P, which
  // lies in the memory of the rotary columns.
  DEVICE void copy_tile(const Tokens& tokens, uint32 number) const {
    const int stage = number & 1;
    const uint32 to = shared_address(shared.kv[stage]) + own / 8 * kGroupBytes;
    wait(shared_address(&shared.empty[stage][half]), number >> 1 & 1 ^ 1);
    mark(kWaitEmpty);
    tokens.template copy_rows<kOwnBlocks, kRowBytes, kBlockBytes>(
        p, latent.from_byte(half * kOwnBlocks * kRowBytes),
        [&](int group) { return to + half * kOwnBlocks * kBlockBytes + group * kGroupBytes; });
    arrive_after_chunks(shared_address(&shared.full[stage][2 * half]));
    if (half != first_half<ALTERNATE>(stage))
      tokens.template copy_rows<1, kRowBytes, kBlockBytes>(
          p, rotary, [&](int group) { return to + kRotary * kBlockBytes + group * kGroupBytes; });
    arrive_after_chunks(shared_address(&shared.full[stage][2 * half + 1]));
  }
#endif

  // Copies the tiles of all units. Two of the warps load the queries of a unit before its tiles. Page numbers are read
  // one tile ahead.
  template <int ROWS>
  DEVICE void run(const Queries& queries) const {
    const bool loads_queries = warp >= 2 && !(queries.boxed && threadIdx.x % kQueryThreads);
    const FastDivide by_page(p.page_size);
    Schedule schedule;
    Unit unit;
    uint32 tile = 0;
    for (uint32 n = 0;; ++n) {
      const bool exists = schedule.next_after_prologue(p, unit);
      mark(kSchedule);
      if (loads_queries) load_queries<ROWS>(p, queries, unit, exists, n, shared, 0);
      __syncwarp();
      if (!exists) break;
      const PagedTokens request = {by_page, unit.page_start, unit.end};
      Tokens tokens(p, request, unit.start + own);
      for (int first = unit.start; first < unit.end; first += kTile, ++tile) {
        copy_tile(tokens, tile);
        tokens.advance(p);
        mark(kIssue);
      }
    }
#if KV_FP8
    if (half == 0) end_fp8_tiles(shared, tile);
#endif
  }
};

}  // namespace
}  // namespace attn_ops
