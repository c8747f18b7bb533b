// Prefill: the producers of keys and values in pages of any size.
#pragma once

#include "prefill_producer.cuh"
#include "token_copies.cuh"

namespace attn_ops {
namespace {

// One warp: the KV tiles of all units, as `produce` of prefill_producer.cuh. Page numbers are loaded a tile ahead.
template <bool VALUES>
DEVICE void produce_tokens(const Problem& p, const TokenSource& source, int64 stride_head, Shared& shared) {
  using Tiles = LoadedTiles<VALUES>;
  using Layout = typename Tiles::Layout;
  const Tiles tiles(shared);
  const int lane = threadIdx.x % 32;
  const FastDivide by_page(p.page_size);
  uint32 tile = 0;
  for (uint32 n = 0;; ++n) {
    const Unit& unit = wait_for_unit(n, shared);
    if (unit.count <= 0) break;
    const PagedTokens request = {by_page, unit.page_start, unit.end};
    const TokenSource of_head = source.from_byte(unit.kv_head * stride_head);
    const int tokens_of_unit = unit.end - unit.start;
    TileTokens<kLoadedTile> tokens(p, request, unit.start);
    const int end = tokens.first + (tokens_of_unit + kTile - 1) / kTile * kTile;  // of the last KV tile
    bool released = VALUES || tokens_of_unit <= 0;
    if (released) release_unit(shared);
    mark(kSchedule);
    for (; tokens.first < end; ++tile) {
      if (!released && request.end - tokens.first <= kTilesAhead * kTile) release_unit(shared), released = true;
      const uint32 to = tiles.memory + tile % Tiles::kStages * Tiles::kBytes;
      tiles.wait_for_empty(tile);
      mark(kWaitEmpty);
      tokens.template copy_rows<Layout::kBlocks, Layout::kRow, Layout::kColumn>(
          p, of_head, [&](int group) { return to + group * Layout::kGroup; });
      tokens.advance(p);
      finish_copies();
      if (lane == 0) arrive(tiles.full + tile % Tiles::kFullBarriers * 8);
      mark(kIssue);
    }
  }
#if KV_FP8
  tiles.end(tile, shared, lane);
#endif
}

}  // namespace
}  // namespace attn_ops
