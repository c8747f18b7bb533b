// Prefill: the producers of FP8 keys and values.
#pragma once

#include "fp8.cuh"
#include "prefill_producer.cuh"

namespace attn_ops {
namespace {

// FP8 keys or values in global memory. Strides are in bytes; that of pages is 0 for ragged KV.
struct Fp8Source {
  const char* first;
  int64 page, token, head;
};

// Which tokens a KV tile has, and where they are.
struct TileTokens {
  int first;       // of the tile
  int begin, end;  // those from `begin` to `end` are loaded
  int page_start, kv_head;
  uint32 page;      // of this lane's group of 8 tokens of those that the warp converts; paged KV alone
  int row_of_page;  // the first of these tokens in its page
};

// What a lane of a producer converts of a KV tile of DIM columns: of each group of 8 tokens of its warp, and of each 64
// columns, 16 of one token. The chunks of 8 lanes are in different banks.
template <int DIM>
struct Fp8Part {
  static constexpr int kGroups = kTile / 8 / kProducerWarps, kChunks = kGroups * (DIM / 64);

  // The first of the two neighbouring chunks of 16 bytes in `tile` that 16 columns of FP8 become.
  DEVICE static uint32 chunk(uint32 tile, int lane, int i) {
    const int row = lane / 4, group = threadIdx.x / 32 * kGroups + i / (DIM / 64);
    return tile + group * TileLayout<DIM>::kGroup + i % (DIM / 64) * TileLayout<DIM>::kColumn + row * kRowBytes +
           (lane % 4 * 2 ^ row) * 16;
  }

  // Copies to these chunks. Zeros where no row sees a token.
  DEVICE static void copy(const Problem& p, const Fp8Source& source, const TileTokens& tokens, uint32 tile) {
    const int lane = recomputed(threadIdx.x % 32), first = tokens.first + uniform(threadIdx.x / 32) * kGroups * 8;
    const char* from = source.first + tokens.kv_head * source.head + lane / 4 * source.token + lane % 4 * 16;
    int64 offset = 0;
    if (PAGED)
      offset = min(tokens.page, uint32(p.num_pages) - 1) * source.page + tokens.row_of_page * source.token;
    else
      from += (int64(tokens.page_start) + first) * source.token;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int token = first + i * 8 + lane / 4;
      const bool exists = token >= tokens.begin && token < tokens.end;
      const char* group = from + (PAGED ? __shfl_sync(~0u, offset, i) : i * 8 * source.token);
#pragma unroll
      for (int column = 0; column < DIM / 64; ++column)
        copy_chunk(chunk(tile, lane, i * (DIM / 64) + column), exists ? group + column * 64 : source.first, exists);
    }
    commit_copies();
  }

  // Converts what this lane has copied, in place.
  DEVICE static void convert(Fp8Type type, uint32 tile) {
    if (type == kFp8E4M3)
      convert<kFp8E4M3>(tile);
    else
      convert<kFp8E5M2>(tile);
  }

  template <Fp8Type TYPE>
  DEVICE static void convert(uint32 tile) {
    constexpr int kAtOnce = 2;
    const int lane = recomputed(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < kChunks; i += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = load_shared(chunk(tile, lane, i + j));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32 to = chunk(tile, lane, i + j);
        store_shared(to, widen<TYPE>(x[j].x, x[j].y));
        store_shared(to ^ 16, widen<TYPE>(x[j].z, x[j].w));
      }
    }
  }
};

// A warpgroup, all producers at once: FP8 KV, which is converted to the type of the queries in the rings, each warp a
// part of each KV tile, and the queries.
DEVICE void produce_fp8(const Problem& p, const Fp8Source& k, const Fp8Source& v, const Queries& q, Fp8Type type,
                        Shared& shared) {
  using Keys = Fp8Part<kDimQk>;
  using Values = Fp8Part<kDimVo>;
  const int lane = threadIdx.x % 32, thread = int(threadIdx.x) - 2 * 32;  // of producer Q
  const uint32 keys = shared_address(shared.keys[0]), values = shared_address(shared.values[0]);
  const uint32 k_full = shared_address(shared.k_full), k_empty = shared_address(shared.k_empty);
  const uint32 v_full = shared_address(shared.v_full), v_empty = shared_address(shared.v_empty);
  const auto find_page = [&](TileTokens& tokens) {
    if (!PAGED) return;
    const int token = tokens.first + (uniform(threadIdx.x / 32) * Keys::kGroups + lane) * 8;
    const uint32 index = uint32(tokens.page_start) + uint32(token / p.page_size);
    const bool exists = lane < Keys::kGroups && token < tokens.end && index < uint32(p.max_pages);
    tokens.page = exists ? p.kv_indices[index] : 0, tokens.row_of_page = token % p.page_size;
  };
  const auto copy_keys = [&](const TileTokens& tokens, uint32 tile) {
    wait(k_empty + tile % kKeyStages * 8, tile / kKeyStages & 1 ^ 1);
    mark(kWaitEmpty);
    Keys::copy(p, k, tokens, keys + tile % kKeyStages * kKeyBytes);
  };
  const auto publish = [&](uint32 full) {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) arrive(full);
    mark(kIssue);
  };
  const auto convert_keys = [&](uint32 tile) {
    Keys::convert(type, keys + tile % kKeyStages * kKeyBytes);
    publish(k_full + tile % (2 * kKeyStages) * 8);
  };
  Schedule schedule;
  uint32 tile = 0;
  for (uint32 n = 0;; ++n) {
    if (thread == 0) pass_unit(p, schedule, n, shared);
    const Unit& unit = wait_for_unit(n, shared);
    const bool exists = unit.count > 0;
    TileTokens tokens = {unit.start, unit.start + unit.hidden, unit.end, unit.page_start, unit.kv_head};
    mark(kSchedule);
    const bool empty = tokens.first >= tokens.end;
    if (!empty) {
      find_page(tokens);
      copy_keys(tokens, tile);
    }
    if (thread >= 0 && !(q.box_rows && thread)) load_queries(p, q, unit, n, shared, thread);
    release_unit(shared);
    if (!exists) return;
    if (empty) continue;
    TileTokens next = tokens;
    next.first += kTile, next.begin = 0;
    find_page(next);
    wait_for_copies<0>();
    convert_keys(tile);
    for (;; ++tile) {
      const bool last = next.first >= next.end;
      if (!last) copy_keys(next, tile + 1);
      wait(v_empty + tile % kValueStages * 8, tile / kValueStages & 1 ^ 1);
      mark(kWaitEmpty);
      const uint32 to = values + tile % kValueStages * kValueBytes;
      Values::copy(p, v, tokens, to);
      tokens = next;
      next.first += kTile;
      if (!last) {
        find_page(next);
        wait_for_copies<1>();
        convert_keys(tile + 1);
      }
      wait_for_copies<0>();
      Values::convert(type, to);
      publish(v_full + tile % (2 * kValueStages) * 8);
      if (last) break;
    }
    ++tile;
  }
}

}  // namespace
}  // namespace attn_ops
