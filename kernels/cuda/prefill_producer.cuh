// Prefill: the producers of keys and values, and of queries.
#pragma once

#include "division.cuh"
#include "hopper.cuh"
#include "prefill_problem.cuh"
#if CUSTOM_MASK
#include "prefill_mask.cuh"
#endif
#if FEW_ROWS
#include "prefill_fp8_queries.cuh"
#endif

namespace attn_ops {
namespace {

constexpr int kSchedulerThreads = kCustomMask ? 32 : 1;

// The scheduler: waits until the producers ask for unit n of this CTA, takes it, and passes it to them. After the last
// unit, it passes a unit with a count of 0.
DEVICE void pass_unit(const Problem& p, Schedule& schedule, uint32 n, Shared& shared) {
  Unit& unit = shared.unit;
  wait(shared_address(&shared.unit_empty), n & 1 ^ 1);
#if CUSTOM_MASK
  const bool takes = threadIdx.x % 32 == 0;
  __syncwarp();  // all lanes have read the previous unit
  if (takes && !schedule.next(p, unit)) unit = {};
  __syncwarp();
  if (unit.count > 0) skip_hidden_ends(p, unit, shared);
  if (!takes) return;
#else
  if (!schedule.next(p, unit)) unit = {};
#endif
  arrive(shared_address(&shared.unit_full));
}

using LoadedValues = LoadedLayout<kValueColumns>;
// 16-byte chunks of the values of a token: of whole blocks of columns, whose chunks the swizzle permutes.
constexpr int kValueChunks = LoadedValues::kBlocks * LoadedValues::kRow / 16;

DEVICE void zero_chunk(uint32 values, int row, int chunk) {
  using Layout = LoadedValues;
  constexpr int kOfRow = Layout::kRow / 16;
  store_shared(values + row / 8 * Layout::kGroup + chunk / kOfRow * Layout::kColumn + row % 8 * Layout::kRow +
                   chunk % kOfRow * 16,
               uint4{0, 0, 0, 0});
}

// One warp: sets rows `begin` to `end` of a tile of values to 0.
DEVICE void zero_rows(uint32 values, int begin, int end, int lane) {
  for (int i = begin * kValueChunks + lane; i < end * kValueChunks; i += 32)
    zero_chunk(values, i / kValueChunks, i % kValueChunks);
}

// One warp: sets the rows of a tile of values that are not in `seen`, the result of seen_tokens, to 0. These may be all
// rows, since a mask may hide whole KV tiles.
DEVICE void zero_unseen(uint32 values, uint32 seen, int lane) {
  static_assert(kLoadedTile * kValueChunks % 32 == 0);  // all lanes take part in each shuffle
#pragma unroll 2
  for (int i = lane; i < kLoadedTile * kValueChunks; i += 32) {
    const int row = i / kValueChunks;
    if (!(__shfl_sync(~0u, seen, row / 32) >> row % 32 & 1)) zero_chunk(values, row, i % kValueChunks);
  }
}

// The ring into which a producer loads keys or values: the ring of the consumers, or the FP8 ring of the converters.
template <bool VALUES>
struct LoadedTiles {
  static constexpr bool kRotated = ROPE && !KV_FP8 && !VALUES;  // converters rotate the keys in this ring
  static constexpr int kDim = VALUES ? kValueColumns : kKeyDim;
  static constexpr int kParts = VALUES ? 1 : kKeyParts;  // stages that a loaded tile takes
  static constexpr int kStages = KV_FP8 ? (VALUES ? kFp8ValueStages : kFp8KeyStages)
                                        : (VALUES ? kValueStages : kKeyStages);
  static constexpr int kFullBarriers = KV_FP8 || kRotated ? kStages : 2 * kStages;
  using Layout = LoadedLayout<kDim>;
  static constexpr int kBytes = kLoadedTile * Layout::kBlocks * Layout::kRow;

  uint32 memory, full, empty;

  DEVICE explicit LoadedTiles(Shared& shared)
#if KV_FP8
      : memory(shared_address(VALUES ? shared.fp8_values[0] : shared.fp8_keys[0])),
        full(shared_address(shared.fp8_full[VALUES])), empty(shared_address(shared.fp8_empty[VALUES])) {}
#else
      : memory(shared_address(VALUES ? shared.values[0] : shared.keys[0])),
#if ROPE
        full(shared_address(VALUES ? shared.v_full : shared.k_loaded)),
#else
        full(shared_address(VALUES ? shared.v_full : shared.k_full)),
#endif
        empty(shared_address(VALUES ? shared.v_empty : shared.k_empty)) {}
#endif
  // `n` counts the stages that were filled over all units of this CTA.
  DEVICE void wait_for_empty(uint32 n) const { wait(empty + n % kStages * 8, n / kStages & 1 ^ 1); }

#if KV_FP8 && !ROPE
  // Ends the converters, when all tiles before `tile`, which does not exist, are converted. All producers of the tensor
  // call this; `part` is the producer's number.
  DEVICE void end(uint32 tile, Shared& shared, int lane, int part = 0) const {
    for (int i = 0; i < kStages; ++i) wait_for_empty(tile + i);
    if (lane == 0 && part == 0) shared.fp8_end[VALUES] = 1;
    if (lane < kProducerArrivals) arrive(full + tile % kStages * 8);
  }
#endif
};

// The boxes of a unit's paged KV, in order. A warp loads the page numbers of 32 boxes at a time, one in each lane, and
// 32 boxes ahead. 32 boxes make up whole tiles.
constexpr int kPageLanes = 32;

struct PagedBoxes {
  int outer;         // outermost index of this lane's box in the map; -1, outside of the map, after the end of the KV
  int next;          // lane that has the next box; kPageLanes if it is the first of the following 32 boxes
  int group;         // group of 8 tokens of the page at which the next box begins
  uint32 following;  // page number of this lane's box of the following 32 boxes
};

// The coordinates of a block of columns in a tensor map. Blocks are a dimension of the map. The maps of padded heads
// have one block: there a box begins at any column, and TMA writes zeros for the columns after the last.
struct Columns {
  int first, block;

  DEVICE explicit Columns(int block) : first(PADDED ? block * kColumns : 0), block(PADDED ? 0 : block) {}
};

// One warp, of which one lane issues the loads: a tile of kLoadedTile tokens from token `first` on, and the columns of
// a stage, from block `first_block` of columns on.
template <class Layout>
DEVICE void load_tile(const Problem& p, const Source& source, const Unit& unit, int first, int first_block,
                      PagedBoxes& boxes, uint32 to, uint32 barrier) {
  if (PAGED) {
    const int groups = p.box / 8, groups_of_page = p.page_size / 8;
    for (int i = 0; i < kLoadedTile / 8; i += groups) {
      const int outer = __shfl_sync(~0u, boxes.outer, boxes.next++);
      if (elect())
#pragma unroll
        for (int block = 0; block < (kBoxHasAllColumns ? 1 : Layout::kBlocks); ++block) {
          const Columns columns(first_block + block);
          load_box(to + block * Layout::kColumn + i * Layout::kGroup, source.map, columns.first, 0, columns.block,
                   boxes.group, outer, barrier);
        }
      boxes.group += groups;
      if (boxes.group == groups_of_page) boxes.group = 0;
    }
  } else if (elect()) {
#pragma unroll
    for (int i = 0; i < kLoadedTile / kRaggedBox; ++i) {
      const int token = first + i * kRaggedBox, row = token < unit.end ? unit.page_start + token : p.kv_rows;
#pragma unroll
      for (int block = 0; block < Layout::kBlocks; ++block) {
        const Columns columns(first_block + block);
        load_box(to + block * Layout::kColumn + i * kRaggedBox * Layout::kRow, source.map, columns.first, row,
                 columns.block, unit.kv_head, barrier);
      }
    }
  }
}

// One producer warp: loads the keys or values of all units by TMA. The producer of keys releases a unit when
// kTilesAhead tiles of it are left, the producer of values at once.
//
// Boxes after the end of the KV lie outside of the tensor map and read as zeros. Tokens of a box that no row sees are
// arbitrary memory, perhaps NaN. Logits of such keys are masked; such values are set to 0, since a probability of 0
// times NaN is NaN.
//
// A producer warp shares the issue slots and the special function unit of its SM sub-partition with consumers: the loop
// has few instructions.
template <bool VALUES>
DEVICE void produce(const Problem& p, Source source, Shared& shared) {
  using Tiles = LoadedTiles<VALUES>;
  using Layout = typename Tiles::Layout;
  const Tiles tiles(shared);
  const int lane = threadIdx.x % 32, box = p.box;
  const FastDivide by_page(p.page_size);
  const uint32 staging = shared_address(&shared.staging);
  // The page number of this lane's box, of the 32 boxes from token `first` on.
  const auto load_page = [&](const Unit& unit, int first) -> uint32 {
    const int token = first + lane * box;
    if (!PAGED || token >= unit.end) return 0;
    const uint32 index = uint32(unit.page_start) + by_page.quotient(token);
    return index < uint32(p.max_pages) ? p.kv_indices[index] : 0;
  };
  uint32 stage = 0, staged = 0;
  for (uint32 n = 0;; ++n) {
    const Unit unit = wait_for_unit(n, shared);
    if (unit.count <= 0) {
#if KV_FP8 && !ROPE
      tiles.end(stage, shared, lane);
#endif
      return;
    }
#if CUSTOM_MASK
    if (VALUES) store_mask(p, unit, shared);
#endif
    PagedBoxes boxes = {-1, kPageLanes, int(by_page.remainder(unit.start)) / 8, load_page(unit, unit.start)};
#if UNIT_PARTS > 1
    const int first_block = VALUES ? unit.first_column / kColumns : 0;
#else
    constexpr int first_block = 0;
#endif
    bool released = VALUES || unit.start >= unit.end;
    if (released) release_unit(shared);
    mark(kSchedule);
    const int end = unit.start + (unit.end - unit.start + kTile - 1) / kTile * kTile;  // end of the last KV tile
    for (int first = unit.start; first < end;) {
      if (!released && unit.end - first <= kTilesAhead * kTile) release_unit(shared), released = true;
      const int visible = unit.end - first;
      if (PAGED && boxes.next == kPageLanes) {
        const int page = min(boxes.following, uint32(p.num_pages) - 1);
        boxes.outer = lane * box < visible ? page * source.page_step + unit.kv_head * source.head_step : -1;
        boxes.following = load_page(unit, first + kPageLanes * box);
        boxes.next = 0;
      }
#if CUSTOM_MASK
      const uint32 seen = VALUES ? seen_tokens<kLoadedTile / 32>(p, own_mask(shared), first) : 0;
      const bool zero = VALUES && __any_sync(~0u, seen != ~0u);
#else
      const bool ends = visible > 0 && visible < kLoadedTile && visible & (box - 1);  // the KV ends inside of a box
      const bool zero = VALUES && (ends || (first == unit.start && unit.hidden));
#endif
      const PagedBoxes of_tile = boxes;
      uint32 to, loaded;
#pragma unroll
      for (int part = 0; part < Tiles::kParts; ++part, ++stage) {
        to = tiles.memory + stage % Tiles::kStages * Tiles::kBytes;
        loaded = tiles.full + stage % Tiles::kFullBarriers * 8;
        const uint32 barrier = zero ? staging : loaded;
        tiles.wait_for_empty(stage);
        mark(kWaitEmpty);
        if (lane == 0) arrive_expect(barrier, Tiles::kBytes);
        __syncwarp();
        boxes = of_tile;
        load_tile<Layout>(p, source, unit, first, first_block + part * Layout::kBlocks, boxes, to, barrier);
      }
      if (zero) {
        wait(staging, staged & 1);
        ++staged;
#if CUSTOM_MASK
        zero_unseen(to, seen, lane);
#else
        if (first == unit.start) zero_rows(to, 0, unit.hidden, lane);
        if (ends) zero_rows(to, visible, (visible + box - 1) / box * box, lane);
#endif
        fence_async_shared();
        __syncwarp();
        if (lane == 0) arrive(loaded);
      }
      mark(kIssue);
      first += kLoadedTile;
    }
  }
}

constexpr int kQueryColumnBlocks = kColumnBlocks<kDimQk>;

// Queries in global memory.
struct Queries {
  const TensorMap* map;
  int box_rows;                   // query rows of a box, which has 64 packed rows; 0 if the group does not divide 64
  const char* first;
  int64 stride_row, stride_head;  // elements
  bool converts;                  // bfloat16 queries are converted to float16 in shared memory

  DEVICE int threads() const { return box_rows ? 1 : kQueryThreads; }  // threads that load queries
};

// kQueryThreads threads: copy the packed rows of a unit by cp.async. Each thread copies one 16-byte chunk of each block
// of columns, of every kAtOnce-th packed row. kAtOnce is a multiple of 8, so that the chunk has the same place in each
// group of 8 rows.
DEVICE void copy_queries(const Problem& p, const Queries& q, const Unit& unit, uint32 to, int thread) {
  constexpr int kAtOnce = kQueryThreads / kRowChunks;
  const int chunk = thread % kRowChunks, first = thread / kRowChunks;
  const char* from =
      q.first + (unit.row * q.stride_row + unit.kv_head * p.group * q.stride_head) * kElementBytes + chunk * 16;
  const uint32 in_group = swizzled(first % 8 * kRowBytes + chunk * 16);
#pragma unroll 4
  for (int row = first; row < p.block_rows(); row += kAtOnce) {
    const int packed = unit.first_packed_row + row, tile_row = uint32(packed) / uint32(p.group);
    const int head = packed - tile_row * p.group;
    const bool exists = tile_row < unit.count && uint32(unit.row + tile_row) < uint32(p.rows);
    const char* row_from = exists ? from + (tile_row * q.stride_row + head * q.stride_head) * kElementBytes : q.first;
    const uint32 row_to = to + row / kPackedRows * kQueryBytes + row % kPackedRows / 8 * kGroupBytes + in_group;
#pragma unroll
    for (int block = 0; block < kQueryColumnBlocks; ++block) {
      const bool copies = exists && (!PADDED || block * kColumns + chunk * 8 < p.head_dim_qk);
      copy_chunk(row_to + block * kPackedRows * kRowBytes, copies ? row_from + block * kRowBytes : q.first, copies);
    }
  }
  wait_for_chunks();
  fence_async_shared();
}

#if ALIBI
// ALiBi's bias is slope * (token - row), where the token counts from the first KV token of the request, and the row
// from its first query row. Logits get slope * (token - position of the row) instead: this distance is small, and so
// exact, where the row has most of its weight. The difference of the two is the same for all tokens of a row, and the
// epilogue adds it to the LSE (`bias_rest`). With a soft cap, which is not linear, logits get the whole bias.
// Sums wrap, for any contents of a plan; rows without a request have no keys.
DEVICE void write_bias_rows(const Problem& p, const Unit& unit, QueryBlock& to) {
  const bool exists = uint32(unit.request) < uint32(p.max_batch);
  const uint32 first = !exists ? 0 : p.planned() ? p.qo_indptr[unit.request] : unit.request * p.request_rows;
  const uint32 in_request = uint32(unit.row) + uint32(unit.first_row) - first;
  const uint32 position = uint32(unit.position) + uint32(unit.first_row);
  to.bias_row = int(p.has_cap ? in_request : position), to.bias_rest = int(uint32(to.bias_row) - in_request);
}
#endif

DEVICE void write_query_block(const Problem& p, const Unit& unit, QueryBlock& to) {
  if (unit.count <= 0) {
    to = {.stored = -1};
    return;
  }
  to.start = unit.start, to.end = unit.end, to.slot = unit.slot;
  to.remainder = unit.first_packed_row - unit.first_row * p.group;
#if UNIT_PARTS > 1
  to.first_column = unit.first_column;
#endif
#if ROPE
  to.position = int(uint32(unit.position) + uint32(unit.first_row));
#endif
#if ALIBI
  write_bias_rows(p, unit, to);
#endif
#if CUSTOM_MASK
  to.request = unit.request, to.row = unit.row + unit.first_row;
#endif
  to.low = relative_bound(unit.position, unit.first_row, -p.window_left, kBeforeAll);
  to.high = relative_bound(unit.position, unit.first_row + 1, p.window_right, kMaxTokens);
  const int row = unit.row + unit.first_row, head = unit.kv_head * p.group;
  const bool exists = row >= 0 && unit.slot < p.slots;
  to.stored = exists ? max(min(unit.count - unit.first_row, p.rows - row), 0) : 0;
  const int64 to_row = unit.slot < 0 ? int64(row) : int64(unit.slot) * p.slot_rows() + unit.first_row;
  to.first = to_row * (p.num_kv_heads * p.group) + head;
  to.head = head;
}

// Writes the QueryBlock of unit n and loads its packed rows: by all kQueryThreads threads, or by thread 0 alone if TMA
// loads them. If unit n does not exist, the QueryBlock says so, and no rows are loaded.
DEVICE void load_queries(const Problem& p, const Queries& q, const Unit& unit, uint32 n, Shared& shared, int thread) {
  const bool exists = unit.count > 0;
  const uint32 buffer = n % kQueries;
#if FEW_ROWS || ROPE
  const uint32 full = shared_address(ROPE || q.converts ? &shared.q_loaded[buffer] : &shared.q_full[buffer]);
#else
  const uint32 full = shared_address(&shared.q_full[buffer]);
#endif
  mark(kSchedule);
  wait(shared_address(&shared.q_empty[buffer]), n / kQueries & 1 ^ 1);
  mark(kWaitEmpty);
  if (thread == 0) write_query_block(p, unit, shared.query_blocks[n % kQueryBlocks]);
  const uint32 to = shared_address(shared.query[buffer][0]);
  if (exists && q.box_rows) {
    const int blocks = p.block_rows() / kPackedRows, row = unit.row + unit.first_row;
    arrive_expect(full, blocks * kQueryBytes);
    for (int i = 0; i < blocks; ++i)
      for (int block = 0; block < (PADDED ? kQueryColumnBlocks : 1); ++block)
        load_box(to + i * kQueryBytes + block * kPackedRows * kRowBytes, q.map, Columns(block).first,
                 unit.kv_head * p.group, row + i * q.box_rows, 0, full);
  } else {
    if (exists) copy_queries(p, q, unit, to, thread);
    arrive(full);
  }
  mark(kIssue);
}

// Producer Q, warps 2 and 3: the queries of all units. One thread loads them by TMA, or all threads copy them. The
// first thread, or with a custom mask warp 2, is also the scheduler. Warp 3 converts queries (FEW_ROWS), so that the
// scheduler does not wait for the conversion. With two producers of keys and of values, `produce_tokens` does all this.
DEVICE void produce_queries(const Problem& p, const Queries& q, Shared& shared) {
  const int thread = threadIdx.x % kQueryThreads;
  const bool loads = thread < q.threads(), converts = q.converts && thread >= 32;
  const bool schedules = thread < kSchedulerThreads;
  if (!loads && !converts && !(kCustomMask && schedules)) return;
  Schedule schedule(p);
  for (uint32 n = 0;; ++n) {
    if (schedules) pass_unit(p, schedule, n, shared);
    bool more = true;
    if (loads) {
      const Unit& unit = wait_for_unit(n, shared);
      load_queries(p, q, unit, n, shared, thread);
      more = unit.count > 0;
      if (more) arrive(shared_address(&shared.unit_empty));
    } else if (kCustomMask && schedules) {
      more = wait_for_unit(n, shared).count > 0;
    }
#if FEW_ROWS
    if (converts) more = convert_queries(n, shared);
#endif
    if (!more) return;
  }
}

}  // namespace
}  // namespace attn_ops
