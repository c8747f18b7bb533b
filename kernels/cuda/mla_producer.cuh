// MLA: the producers of KV tiles and of queries.
#pragma once

#include "cluster.cuh"
#include "hopper.cuh"
#include "mla_problem.cuh"
#if KV_FP8
#include "mla_fp8_converter.cuh"
#endif

namespace attn_ops {
namespace {

struct Cache {
  const TensorMap *latent, *rotary;  // [num_pages, page_size, columns]; boxes: see cache_map in mla.py
};

// Initialises the barriers that both kernels have. An empty barrier completes after `readers` arrivals, q_empty after
// `query_readers`.
template <class Shared>
DEVICE void init_barriers(Shared& shared, int readers, int query_readers, bool boxed) {
  for (auto& stage : shared.full)
    for (uint64& barrier : stage) init_barrier(shared_address(&barrier), KV_FP8 ? kConverterWarps : kTileArrivals);
#if KV_FP8
  for (auto& stage : shared.fp8_full)
    for (uint64& barrier : stage) init_barrier(shared_address(&barrier), kTileArrivals);
  for (int& end : shared.fp8_end) end = 0;
#endif
  for (auto& stage : shared.empty)
    for (uint64& barrier : stage) init_barrier(shared_address(&barrier), readers);
  for (uint64& barrier : shared.merge_full) init_barrier(shared_address(&barrier), 1);
  for (uint64& barrier : shared.merge_ready) init_barrier(shared_address(&barrier), 1);
  init_barrier(shared_address(&shared.q_full), boxed ? 1 : kQueryThreads);
  init_barrier(shared_address(&shared.q_empty), query_readers);
}

// Loads a block into all CTAS CTAs of the cluster. CTA `loader` issues the load, and all CTAs make this call.
template <int CTAS>
DEVICE void load_block(int loader, int rank, uint32 to, const TensorMap* map, int column, int token, int page,
                       uint32 barrier, uint64 policy) {
  if (CTAS == 1)
    load_box(to, map, column, token, page, barrier, policy);
  else if (loader == rank)
    load_box_in(uint16((1 << CTAS) - 1), to, map, column, token, page, barrier, policy);
}

#if KV_FP8
// Loads an FP8 tile, quarter by quarter in the order of conversion. The rotary columns complete the barrier of the last
// quarter. Consumers may read the memory of the rotary columns until both halves of the stage are released.
template <int CTAS, class Shared>
DEVICE void load_fp8_tile(const Cache& cache, Shared& shared, const Fp8Tile& tile, uint32 number, int token, int page,
                          int rank, uint64 policy) {
  const int stage = number & 1;
  wait(shared_address(&shared.empty[stage][1 - tile.first]), number >> 1 & 1 ^ 1);
  mark(kWaitEmpty);
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const bool last = i == kQuarters - 1;
    if (last) wait(shared_address(&shared.empty[stage][tile.first]), number >> 1 & 1 ^ 1);
    if (elect()) {
      const uint32 barrier = shared_address(&shared.fp8_full[stage][i]);
      arrive_expect(barrier, kBlockBytes + (last ? kBlockBytes / 2 : 0));
      load_block<CTAS>(i % 2, rank, tile.latent(i), cache.latent, tile.quarter(i) * 128, token, page, barrier, policy);
      if (last)
#pragma unroll
        for (int warp = 0; warp < kConverterWarps; ++warp)
          load_block<CTAS>(warp % 2, rank, tile.rotary(warp), cache.rotary, 0, token + warp * kConvertedTokens, page,
                           barrier, policy);
    }
  }
  __syncwarp();
  mark(kIssue);
}

// Ends the converters: there is no tile `number`. The producers of its first quarter call this in place of the load.
template <class Shared>
DEVICE void end_fp8_tiles(Shared& shared, uint32 number) {
  const int stage = number & 1;
  for (int half = 0; half < 2; ++half) wait(shared_address(&shared.empty[stage][half]), number >> 1 & 1 ^ 1);
  if (threadIdx.x == 0) shared.fp8_end[stage] = 1;
  if (KV_CP_ASYNC || threadIdx.x == 0) arrive(shared_address(&shared.fp8_full[stage][0]));
}
#endif

// One warp. It loads the KV tiles of all units. It reads page numbers of 32 tiles at a time, 32 tiles ahead. With CTAS
// 2 it ends when both CTAs have read all tiles, so that no arrival of the other CTA comes after the end of this CTA.
// `rank` is this CTA's number of CTAS. ALTERNATE: see first_half.
template <int CTAS, bool ALTERNATE, class Shared>
DEVICE void produce(const Problem& p, const Cache& cache, Shared& shared, int rank) {
  const int lane = threadIdx.x % 32;
  const uint32 stages = shared_address(shared.kv[0]), full = shared_address(shared.full);
  const uint32 empty = shared_address(shared.empty);
  const uint64 policy = l2_cache_policy(p.blocks() == 1);  // evict_first if only one cluster reads a tile
  Schedule schedule;
  Unit unit;
  uint32 tile = 0;
  while (schedule.next_after_prologue(p, unit)) {
    mark(kSchedule);
    const int tiles = unit.tiles();
    // The page number of tile i + lane of the unit.
    const auto load_number = [&](int i) -> uint32 {
      if (i + lane >= tiles) return 0;
      const int index = unit.page_start + (unit.start + (i + lane) * kTile) / p.page_size;
      return index < p.max_pages ? p.kv_indices[index] : 0;
    };
    uint32 numbers = load_number(0), following = load_number(32);
    int token = unit.start % p.page_size;
    for (int i = 0; i < tiles; ++i, ++tile) {
      if (i && i % 32 == 0) numbers = following, following = load_number(i + 32);
      const int page = static_cast<int>(min(__shfl_sync(~0u, numbers, i % 32), uint32(p.num_pages) - 1));
      const int stage = tile & 1;
#if KV_FP8
      const Fp8Tile fp8 = {stages + stage * kTileBytes, first_half<ALTERNATE>(stage)};
      load_fp8_tile<CTAS>(cache, shared, fp8, tile, token, page, rank, policy);
#else
      const uint32 to = stages + stage * kTileBytes, parity = tile >> 1 & 1 ^ 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int half = first_half<ALTERNATE>(stage) ^ h;
        wait(empty + (stage * 2 + half) * 8, parity);
        mark(kWaitEmpty);
        if (elect()) {
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            const int quarter = half * 2 + q;
            const bool last = h == 1 && q == 1;
            const uint32 barrier = full + (stage * kQuarters + quarter) * 8;
            arrive_expect(barrier, (last ? 3 : 2) * kBlockBytes);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              const int block = quarter * 2 + b;
              load_block<CTAS>(b, rank, to + block * kBlockBytes, cache.latent, block * 64, token, page, barrier,
                               policy);
            }
            if (last)
              load_block<CTAS>(tile >> 1 & 1, rank, to + kRotary * kBlockBytes, cache.rotary, 0, token, page, barrier,
                               policy);
          }
        }
        __syncwarp();
        mark(kIssue);
      }
#endif
      token += kTile;
      if (token >= p.page_size) token = 0;
    }
  }
  mark(kSchedule);
#if KV_FP8
  end_fp8_tiles(shared, tile);
#endif
  if (CTAS > 1)
    for (int i = 0; i < 2; ++i, ++tile)
      for (int half = 0; half < 2; ++half) wait(empty + ((tile & 1) * 2 + half) * 8, tile >> 1 & 1 ^ 1);
  mark(kWaitEmpty);
}

// Queries in global memory: latent and rotary columns. If `boxed`, a box of the maps has the packed rows of a CTA.
struct Queries {
  const TensorMap *latent_map, *rotary_map;
  const char *latent, *rotary;
  int64 latent_row, latent_head, rotary_row, rotary_head;  // strides in elements
  bool boxed;
};

// Copies ROWS packed rows by cp.async. Threads 8 i to 8 i + 7 copy row i of every 8 rows, 16 bytes of each block each.
template <int ROWS>
DEVICE void copy_queries(const Problem& p, const Queries& q, const Unit& unit, int first_packed_row, uint32 to,
                         int thread) {
  const uint32 swizzled = thread / 8 * kRowBytes + (thread % 8 ^ thread / 8) * 16;
  for (int row = thread / 8; row < ROWS; row += 8) {
    const int packed = first_packed_row + row, tile_row = p.row_of(packed);
    const int64 head = packed - tile_row * p.heads, q_row = int64(unit.row) + tile_row;
    const bool exists = tile_row < unit.count && q_row >= 0 && q_row < p.rows;
    const char* latent = q.latent + (q_row * q.latent_row + head * q.latent_head) * 2 + thread % 8 * 16;
    const char* rotary = q.rotary + (q_row * q.rotary_row + head * q.rotary_head) * 2 + thread % 8 * 16;
    const uint32 row_to = to + row / 8 * kGroupBytes + swizzled;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      copy_chunk(row_to + block * (ROWS * kRowBytes),
                 !exists ? q.latent : block == kRotary ? rotary : latent + block * kRowBytes, exists);
  }
}

// Step 1 for unit n: writes the unit, and loads the ROWS packed rows of this CTA, which begin at packed row `offset` of
// the unit. Two warps call it, or one thread if TMA loads the queries. If not `exists`, it writes a unit without rows,
// which ends the consumers.
template <int ROWS, class Shared>
DEVICE void load_queries(const Problem& p, const Queries& q, const Unit& unit, bool exists, uint32 n, Shared& shared,
                         int offset) {
  const int thread = threadIdx.x % kQueryThreads;
  const uint32 full = shared_address(&shared.q_full), empty = shared_address(&shared.q_empty);
  const uint32 to = shared_address(shared.query);
  const int first_packed_row = unit.first_packed_row + offset;
  wait(empty, n & 1 ^ 1);
  mark(kWaitEmpty);
  if (thread == 0)
    shared.unit = {unit.row, exists ? unit.count : 0, unit.position, unit.start, unit.end, unit.slot, first_packed_row};
  if (exists && q.boxed) {
    arrive_expect(full, kBlocks * ROWS * kRowBytes);
    const int tile_row = first_packed_row / p.heads;
    const int row = unit.row + tile_row, head = first_packed_row - tile_row * p.heads;
#pragma unroll
    for (int block = 0; block < kRotary; block += kQueryBoxBlocks)
      load_box(to + block * (ROWS * kRowBytes), q.latent_map, 0, head, row, block, full);
    load_box(to + kRotary * (ROWS * kRowBytes), q.rotary_map, 0, head, row, 0, full);
  } else {
    if (exists) {
      copy_queries<ROWS>(p, q, unit, first_packed_row, to, thread);
      wait_for_chunks();
      fence_async_shared();
    }
    arrive(full);
  }
  mark(kIssue);
}

// Two warps. They load the queries of all units.
template <int ROWS, class Shared>
DEVICE void produce_queries(const Problem& p, const Queries& q, Shared& shared, int offset) {
  if (q.boxed && threadIdx.x % kQueryThreads) return end_prologue();
  Schedule schedule;
  Unit unit;
  for (uint32 n = 0;; ++n) {
    const bool exists = schedule.next_after_prologue(p, unit);
    mark(kSchedule);
    load_queries<ROWS>(p, q, unit, exists, n, shared, offset);
    if (!exists) return;
  }
}

}  // namespace
}  // namespace attn_ops
