// Prefill: the producers that copy keys and values token by token, from pages of any size.
#pragma once

#include "prefill_producer.cuh"
#include "token_copies.cuh"

namespace attn_ops {
namespace {

// One producer warp: loads the keys or values of all units by cp.async, as `produce` of prefill_producer.cuh does by
// TMA. Page numbers are loaded a tile ahead. Of two producers of a tensor, each copies half of the tokens of a tile,
// half number `part`. The second ones are the warps of producer Q: before the tiles of a unit they take its unit and
// load its queries, as `produce_queries` does.
template <bool VALUES>
DEVICE void produce_tokens(const Problem& p, const TokenSource& source, int64 stride_head, const Queries& q, int part,
                           Shared& shared) {
  using Tiles = LoadedTiles<VALUES>;
  using Layout = typename Tiles::Layout;
  constexpr int kOwnTokens = kLoadedTile / kTensorProducers;
  const int end_byte = (VALUES ? p.head_dim_vo : p.head_dim_qk) * kLoadedBytes;  // of a padded head
  const Tiles tiles(shared);
  const FastDivide by_page(p.page_size);
  const int query_thread = threadIdx.x % kQueryThreads;
  Schedule schedule(p);
  uint32 stage = 0;
  for (uint32 n = 0;; ++n) {
    if (!VALUES && kTensorProducers > 1 && part && query_thread < kSchedulerThreads)
      pass_unit(p, schedule, n, shared);
    __syncwarp();
    const Unit& unit = wait_for_unit(n, shared);
    if (kTensorProducers > 1 && part && query_thread < q.threads())
      load_queries(p, q, unit, n, shared, query_thread);
#if FEW_ROWS
    if (kTensorProducers > 1 && VALUES && part && q.converts) convert_queries(n, shared);
#endif
    __syncwarp();
    if (unit.count <= 0) break;
    const PagedTokens request = {by_page, unit.page_start, unit.end};
#if UNIT_PARTS > 1
    const int first_byte = VALUES ? unit.first_column * kLoadedBytes : 0;
#else
    constexpr int first_byte = 0;
#endif
    const TokenSource of_head = source.from_byte(unit.kv_head * stride_head + first_byte);
    const int tokens_of_unit = unit.end - unit.start;
    int first = unit.start;
    const int end = first + (tokens_of_unit + kTile - 1) / kTile * kTile;  // end of the last KV tile
    TileTokens<kOwnTokens, kLoadedTile, kAddresses> tokens(p, request, first + part * kOwnTokens);
#if CUSTOM_MASK
    if (VALUES) store_mask(p, unit, shared);
#endif
    bool released = VALUES || tokens_of_unit <= 0;
    if (released) release_unit(shared);
    mark(kSchedule);
    for (; first < end; first += kLoadedTile) {
      if (!released && request.end - first <= kTilesAhead * kTile) release_unit(shared), released = true;
#pragma unroll
      for (int key_part = 0; key_part < Tiles::kParts; ++key_part, ++stage) {
        const uint32 to =
            tiles.memory + stage % Tiles::kStages * Tiles::kBytes + part * (kOwnTokens / 8) * Layout::kGroup;
        tiles.wait_for_empty(stage);
        mark(kWaitEmpty);
        const TokenSource of_columns = of_head.from_byte(key_part * Layout::kBlocks * Layout::kRow);
        const auto groups = [&](int group) { return to + group * Layout::kGroup; };
#if CUSTOM_MASK
        if (VALUES) {
          const uint32 seen = seen_tokens<kOwnTokens / 32>(p, own_mask(shared), first + part * kOwnTokens);
          tokens.template copy_rows<Layout::kBlocks, Layout::kRow, Layout::kColumn>(
              p, of_columns, groups, [&](int i) { return __shfl_sync(~0u, seen, i); },
              PADDED ? end_byte : Layout::kBlocks * Layout::kRow);
        } else
#endif
          tokens.template copy_rows<Layout::kBlocks, Layout::kRow, Layout::kColumn>(
              p, of_columns, groups, [](int) { return ~0u; }, PADDED ? end_byte : Layout::kBlocks * Layout::kRow);
        arrive_after_chunks(tiles.full + stage % Tiles::kFullBarriers * 8);
      }
      tokens.advance(p);
      mark(kIssue);
    }
  }
#if KV_FP8 && !ROPE
  tiles.end(stage, shared, threadIdx.x % 32, part);
#endif
}

}  // namespace
}  // namespace attn_ops
