// Prefill on Hopper: persistent and warp-specialised, one producer and two consumer warpgroups in each CTA.
//
// Compiled for HEAD_DIM_QK, HEAD_DIM_VO, PAGED, DTYPE (1 float16, 2 bfloat16) and KV_FP8: 1 if keys and values
// are FP8 and not DTYPE. Head counts, strides, page size, windows, soft cap, sinks, scales and the type of the output
// are parameters.
//
// Packed row p of a work item is query row p / group of the item and head p % group of a KV head's group (PackGQA). A
// unit is a block of packed rows of one work item for one KV head: 128 of them, 64 for each consumer. If a work item
// has 64 at most, a unit has 64: both consumers have all of them, take alternate KV tiles and reduce their states at
// the end (`split_kv`).
//
// Roles
// -----
// warp 0            producer K: keys, by TMA into a ring of kKeyStages KV tiles
// warp 1            producer V: values, by TMA into a ring of kValueStages KV tiles
// warps 2, 3        producer Q: the queries of the unit and of the next, into kQueries buffers. One thread, by TMA, if
//                   a group divides 64, as a box then has 64 packed rows; otherwise all threads, by cp.async
// warpgroups 1, 2   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers
//
// Each producer walks the units of its CTA by itself (`Schedule`). Producer Q passes them to the consumers.
//
// Schedule
// --------
// KV tiles are counted over all units of a CTA. Tile j lies in stage j % stages of its ring; its loads complete
// full[j % (2 * stages)], and consumers arrive on empty[j % stages]. Unit n has query buffer b = n % kQueries. S is a
// tile of logits, P of probabilities, O the accumulator.
//
// prologue
//     0.  [all]         initialise barriers; griddepcontrol.wait, before the plan is read; setmaxnreg
// for each unit n
//     1.  [producer Q]  wait for q_empty[b]; write the unit and load its queries; they complete q_full[b]
//     2.  [consumer]    wait for q_full[b]
// mainloop, for each KV tile j of the unit
//     3.  [producer K]  wait for k_empty[j]; expect the bytes of the tile on k_full[j]; issue a TMA load for each box;
//                       load the page numbers of tile j+1, or of the next unit's first
//     4.  [producer V]  the same with v. Where the KV ends, or a window begins, inside a box: wait for the loads on
//                       `staging`, set the other rows of the box to 0, arrive on v_full[j]
//     5.  [consumer]    wait for k_full[j]; issue S_j = Q K_j^T
//     6.  [consumer]    wait for v_full[j-1]; issue O += P_{j-1} V_{j-1}. Not for the first tile
//     7.  [consumer]    wait for S_j, while O is computed; arrive on k_empty[j]
//     8.  [consumer]    soft cap, mask, online softmax: P_j and alpha
//     9.  [consumer]    wait for O; arrive on v_empty[j-1]; O *= alpha, if any alpha of the warp is not 1; round P_j
// epilogue of the unit
//     10. [consumer]    arrive on q_empty[b]; wait for v_full of the last tile; O += P V; arrive on its v_empty
//     11. [consumer]    split_kv: consumer 1 stores its state (m, l, O) in the query buffer, consumer 0 adds it to its
//                       own; both arrive on q_empty[b] here, not in step 10
//     12. [consumer]    join the sink, divide by l; store output and LSE, or the partial result in its slot. With
//                       split_kv consumer 0 alone
//
// Producers run ahead into the next unit while consumers are in their epilogue.
//
// FP8 keys and values
// -------------------
// The rings have 16-bit tiles as otherwise, and consumers do the same. The four producer warps convert: each has a
// quarter of the tokens of every tile. Steps 3 and 4 are these, in which a lane reads and writes chunks of its own:
//     3.  wait for k_empty[j+1]; copy 16 bytes of FP8 each to the first of the two chunks that they become (cp.async);
//         wait for v_empty[j]; copy v_j; wait for the keys, convert them in place; proxy fence; arrive on k_full[j+1]
//     4.  the same with v_j, behind a load of the next page numbers
// Tokens that no row sees are copied as zeros. Warps 2 and 3 also do step 1, while the first keys of the unit arrive.
#include "basics.cuh"
#include "descriptors.cuh"
#include "epilogue.cuh"
#include "fp8.cuh"
#include "hopper.cuh"
#include "schedule.cuh"
#include "tanh.cuh"

#ifndef KV_FP8
#define KV_FP8 0
#endif

namespace attn_ops {
namespace {

constexpr int kDimQk = HEAD_DIM_QK, kDimVo = HEAD_DIM_VO;
// Sizes by head dims are those of TILES in prefill.py.
constexpr int kTile = kDimVo > 128 ? 64 : 128;                        // tokens of a KV tile
constexpr int kKeyStages = kDimQk == 64 ? 4 : kDimQk == 256 ? 3 : 2;  // KV tiles of the ring of keys
constexpr int kValueStages = kDimQk == 64 ? 4 : 2;                    // and of values
constexpr int kQueries = kDimQk > 128 ? 1 : 2;                        // query buffers
constexpr int kPackedRows = 64;                                       // of a consumer
constexpr int kRowBytes = 128;                                        // of 64 columns in shared memory
constexpr int kGroupBytes = 8 * kRowBytes;                            // of 8 rows and 64 columns
constexpr int kQueryBytes = kPackedRows * kDimQk * 2, kKeyBytes = kTile * kDimQk * 2, kValueBytes = kTile * kDimVo * 2;
constexpr int kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64, kProducerWarps = 4;
// Of a thread.
constexpr int kProducerRegisters = KV_FP8 ? 48 : 40, kConsumerRegisters = 232;
constexpr int kNone = 1 << 30;                                   // a window without a bound
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;  // of logits
enum NamedBarrier { kBothConsumers = 1 };

struct Shared {
  alignas(1024) char query[kQueries][2][kQueryBytes];
  alignas(1024) char keys[kKeyStages][kKeyBytes];
  alignas(1024) char values[kValueStages][kValueBytes];
  float peer_max[kPackedRows], peer_sum[kPackedRows];
  int unit[kQueries][8];
  // There are twice as many full barriers as stages, so that each is always waited for by the same consumer when they
  // take alternate KV tiles: one that skipped every other phase could take one that is two phases behind for complete.
  uint64 k_full[2 * kKeyStages], k_empty[kKeyStages], v_full[2 * kValueStages], v_empty[kValueStages];
  uint64 q_full[kQueries], q_empty[kQueries], staging;
};

struct Problem {
  const int *qo_indptr, *kv_indices, *work;
  int window_left, window_right, rows, kv_rows, num_pages, max_pages, max_items, max_batch, num_kv_heads, group;
  int page_size, box, tile_rows, num_items, num_units;
  bool planned;

  DEVICE bool split_kv() const { return tile_rows * group <= kPackedRows; }
  DEVICE int block_rows() const { return split_kv() ? kPackedRows : 2 * kPackedRows; }
  DEVICE int blocks() const { return (tile_rows * group + block_rows() - 1) / block_rows(); }
  DEVICE int row_of(int packed_row) const { return uint32(packed_row) / uint32(group); }
};

// Keys or values in global memory. A page adds `page_step` and a head `head_step` to the outermost index.
struct Source {
  const TensorMap* map;
  int page_step, head_step;
};

struct Unit : Item {     // `start` to `end` are loaded
  int hidden;            // tokens from start on that no row sees, less than a box
  int first_packed_row;
  int kv_head;
};

// `position + rows + window`, with a position that may be negative and a sum that may not fit in 32 bits, as a token.
DEVICE int bound(int position, int rows, int window) {
  if (window == kNone) return kMaxTokens;
  return static_cast<int>(max(min(int64(position) + rows + window, int64(kMaxTokens)), int64(0)));
}

// Units of this CTA in their order.
struct Schedule : Walk<PAGED> {
  DEVICE bool next(const Problem& p, Unit& unit) {
    return next_unit(*this, p, unit, blockIdx.x, gridDim.x, p.num_units, p.num_kv_heads * p.blocks());
  }

  DEVICE bool take(const Problem& p, int u, Unit& unit) const {
    const int blocks = p.blocks();
    unit.kv_head = u / blocks % p.num_kv_heads;
    unit.first_packed_row = u % blocks * p.block_rows();
    const int first = unit.first_packed_row / p.group;
    const int last = min((unit.first_packed_row + p.block_rows() - 1) / p.group, unit.count - 1);
    if (first > last) return false;
    unit.end = max(min(unit.end, bound(unit.position, last + 1, p.window_right)), 0);
    int begin = max(unit.start, p.window_left == kNone ? 0 : bound(unit.position, first, -p.window_left));
    unit.start = PAGED ? begin / p.box * p.box : begin;
    unit.start = max(min(unit.start, unit.end), 0);
    unit.hidden = max(begin - unit.start, 0);
    return true;
  }

  DEVICE int locate(const Problem& p, int item, Unit& unit) const {
    if (p.planned) return Walk::locate(p, item, unit);
    unit.row = (p.num_items - 1 - item) * p.tile_rows;
    unit.count = min(p.rows - unit.row, p.tile_rows);
    unit.start = 0, unit.end = p.kv_rows, unit.position = p.kv_rows - p.rows + unit.row;
    unit.page_start = 0, unit.slot = -1;
    return item;
  }
};

// ---- Producers ----------------------------------------------------------------------------------------------------

// The full barriers of a ring, by the number of a KV tile among all of this CTA.
template <int STAGES>
struct FullBarriers {
  uint32 first;

  DEVICE uint32 of(uint32 tile) const { return first + tile % (2 * STAGES) * 8; }
  DEVICE uint32 parity(uint32 tile) const { return tile / (2 * STAGES) & 1; }
};

// Where a KV tile of DIM columns has what, in bytes. A page is loaded by one TMA: its tokens are in groups of 8, each
// with all its columns. Ragged KV begins at any token: all tokens of 64 columns, then those of the next.
template <int DIM>
struct TileLayout {
  static constexpr int kGroup = PAGED ? DIM / 64 * kGroupBytes : kGroupBytes;  // to the next 8 tokens
  static constexpr int kColumn = PAGED ? kGroupBytes : kTile * kRowBytes;      // to the next 64 columns
};

DEVICE void zero_rows(uint32 values, int begin, int end, int lane) {
  using Layout = TileLayout<kDimVo>;
  constexpr int kChunks = kDimVo / 8;
  for (int i = begin * kChunks + lane; i < end * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    store_shared(values + row / 8 * Layout::kGroup + chunk / 8 * Layout::kColumn + row % 8 * kRowBytes + chunk % 8 * 16,
                 uint4{0, 0, 0, 0});
  }
}

// One warp: the KV tiles of all units into a ring. Boxes after the end lie outside of the tensor map and read as zeros.
// Tokens of a box that no row sees are arbitrary memory, perhaps NaN. Logits of such keys are masked; VALUES are set to
// 0, since a probability of 0 times NaN is NaN.
template <bool VALUES>
DEVICE void produce(const Problem& p, Source source, Shared& shared) {
  constexpr int kDim = VALUES ? kDimVo : kDimQk, kBytes = VALUES ? kValueBytes : kKeyBytes;
  constexpr int kStages = VALUES ? kValueStages : kKeyStages;
  const int lane = threadIdx.x % 32, box = p.box, boxes = kTile / box;
  const uint32 ring = shared_address(VALUES ? shared.values[0] : shared.keys[0]);
  const uint32 full = shared_address(VALUES ? shared.v_full : shared.k_full);
  const uint32 empty = shared_address(VALUES ? shared.v_empty : shared.k_empty);
  const uint32 staging = shared_address(&shared.staging);
  // The page number of this lane's box of the KV tile from token `first` on.
  const auto load_page = [&](const Unit& unit, int first) -> uint32 {
    if (!PAGED) return 0;
    const int token = first + lane * box, index = unit.page_start + token / p.page_size;
    return lane < boxes && token < unit.end && index < p.max_pages ? p.kv_indices[index] : 0;
  };
  Schedule schedule;
  Unit unit, following;
  bool exists = schedule.next(p, unit);
  uint32 number = exists ? load_page(unit, unit.start) : 0, tile = 0, staged = 0;
  while (exists) {
    int first = unit.start;
    do {
      if (first < unit.end) {
        const uint32 stage = tile % kStages, to = ring + stage * kBytes;
        const int token = first + lane * box, visible = unit.end - first;
        // After the end, outside of the map.
        const int page = PAGED ? min(number, uint32(p.num_pages) - 1) : 0;
        const int row = PAGED ? (token < unit.end ? token % p.page_size : p.page_size) / 8
                              : (token < unit.end ? unit.page_start + token : p.kv_rows);
        const int head = PAGED ? page * source.page_step + unit.kv_head * source.head_step : unit.kv_head;
        const bool zero = VALUES && ((visible < kTile && visible % box) || (first == unit.start && unit.hidden));
        const uint32 loaded = full + tile % (2 * kStages) * 8, barrier = zero ? staging : loaded;
        wait(empty + stage * 8, tile / kStages & 1 ^ 1);
        if (lane == 0) arrive_expect(barrier, kBytes);
        __syncwarp();
        for (int i = 0; i < boxes; ++i) {
          const int row_of_box = __shfl_sync(~0u, row, i), head_of_box = __shfl_sync(~0u, head, i);
          if (elect()) {
            if (PAGED)
              load_box(to + i * box / 8 * TileLayout<kDim>::kGroup, source.map, 0, 0, 0, row_of_box, head_of_box,
                       barrier);
            else
              load_box(to + i * box * kRowBytes, source.map, 0, row_of_box, 0, head_of_box, barrier);
          }
        }
        if (zero) {
          wait(staging, staged & 1);
          ++staged;
          if (first == unit.start) zero_rows(to, 0, unit.hidden, lane);
          if (visible < kTile) zero_rows(to, visible, (visible + box - 1) / box * box, lane);
          fence_async_shared();
          __syncwarp();
          if (lane == 0) arrive(loaded);
        }
        ++tile;
      }
      if (first == unit.start) exists = schedule.next(p, following);  // while the first tile is loaded
      first += kTile;
      number = first < unit.end ? load_page(unit, first) : exists ? load_page(following, following.start) : 0;
    } while (first < unit.end);
    unit = following;
  }
}

// Queries in global memory: the map's boxes are 64 packed rows, or 0 rows of q if a group is not a divisor of 64.
struct Queries {
  const TensorMap* map;
  int box_rows;
  const char* first;
  int64 stride_row, stride_head;  // elements
};

// Copies the packed rows of a unit: threads 8 i to 8 i + 7 have row i of every 8, 16 bytes of each 64 columns.
DEVICE void copy_queries(const Problem& p, const Queries& q, const Unit& unit, uint32 to, int thread) {
  const char* from = q.first + (unit.row * q.stride_row + unit.kv_head * p.group * q.stride_head) * 2 + thread % 8 * 16;
  const uint32 swizzled = thread / 8 * kRowBytes + (thread % 8 ^ thread / 8) * 16;
  for (int row = thread / 8; row < p.block_rows(); row += 8) {
    const int packed = unit.first_packed_row + row, tile_row = p.row_of(packed);
    const int head = packed - tile_row * p.group;
    const bool exists = tile_row < unit.count && uint32(unit.row + tile_row) < uint32(p.rows);
    const char* row_from = exists ? from + (tile_row * q.stride_row + head * q.stride_head) * 2 : q.first;
    const uint32 row_to = to + row / kPackedRows * kQueryBytes + row % kPackedRows / 8 * kGroupBytes + swizzled;
#pragma unroll
    for (int column = 0; column < kDimQk / 64; ++column)
      copy_chunk(row_to + column * kPackedRows * kRowBytes, exists ? row_from + column * kRowBytes : q.first, exists);
  }
  wait_for_chunks();
  fence_async_shared();
}

// The packed rows of unit n, and the unit itself. If TMA loads them, thread 0 alone does. Without a unit it is the end.
DEVICE void load_queries(const Problem& p, const Queries& q, const Unit& unit, bool exists, uint32 n, Shared& shared,
                         int thread) {
  const uint32 buffer = n % kQueries, full = shared_address(&shared.q_full[buffer]);
  wait(shared_address(&shared.q_empty[buffer]), n / kQueries & 1 ^ 1);
  if (thread == 0) {
    const int words[] = {unit.row,   exists ? unit.count : 0, unit.position,         unit.start,
                         unit.end,   unit.slot,               unit.first_packed_row, unit.kv_head * p.group};
#pragma unroll
    for (int i = 0; i < 8; ++i) shared.unit[buffer][i] = words[i];
  }
  const uint32 to = shared_address(shared.query[buffer][0]);
  if (exists && q.box_rows) {
    const int blocks = p.block_rows() / kPackedRows, row = unit.row + unit.first_packed_row / p.group;
    arrive_expect(full, blocks * kQueryBytes);
    for (int i = 0; i < blocks; ++i)
      load_box(to + i * kQueryBytes, q.map, 0, unit.kv_head * p.group, row + i * q.box_rows, 0, full);
  } else {
    if (exists) copy_queries(p, q, unit, to, thread);
    arrive(full);
  }
}

// Two warps, or a thread if TMA loads them: the queries of all units. A unit without rows is the end.
DEVICE void produce_queries(const Problem& p, const Queries& q, Shared& shared) {
  const int thread = threadIdx.x % kQueryThreads;
  if (q.box_rows && thread) return;
  Schedule schedule;
  Unit unit;
  for (uint32 n = 0;; ++n) {
    const bool exists = schedule.next(p, unit);
    load_queries(p, q, unit, exists, n, shared, thread);
    if (!exists) return;
  }
}

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
    const int index = tokens.page_start + token / p.page_size;
    const bool exists = lane < Keys::kGroups && token < tokens.end && index < p.max_pages;
    tokens.page = exists ? p.kv_indices[index] : 0, tokens.row_of_page = token % p.page_size;
  };
  const auto copy_keys = [&](const TileTokens& tokens, uint32 tile) {
    wait(k_empty + tile % kKeyStages * 8, tile / kKeyStages & 1 ^ 1);
    Keys::copy(p, k, tokens, keys + tile % kKeyStages * kKeyBytes);
  };
  const auto publish = [&](uint32 full) {
    fence_async_shared();
    __syncwarp();
    if (lane == 0) arrive(full);
  };
  const auto convert_keys = [&](uint32 tile) {
    Keys::convert(type, keys + tile % kKeyStages * kKeyBytes);
    publish(k_full + tile % (2 * kKeyStages) * 8);
  };
  Schedule schedule;
  Unit unit;
  uint32 tile = 0;
  for (uint32 n = 0;; ++n) {
    const bool exists = schedule.next(p, unit), empty = unit.start >= unit.end;
    TileTokens tokens = {unit.start, unit.start + unit.hidden, exists ? unit.end : 0, unit.page_start, unit.kv_head};
    if (exists && !empty) {
      find_page(tokens);
      copy_keys(tokens, tile);
    }
    if (thread >= 0 && !(q.box_rows && thread)) load_queries(p, q, unit, exists, n, shared, thread);
    __syncwarp();
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

// ---- Consumers ----------------------------------------------------------------------------------------------------

// A thread has two packed rows, 8 apart, and of each the columns 8 i + 2 (lane % 4) and the next one, for every i.
struct Rows {
  float row_max[2], row_sum[2];  // row_sum over the columns of this thread
  int low[2], high[2];           // tokens that the row sees
};

using Logits = float[kTile / 2];
using Output = float[kDimVo / 2];
using Probabilities = uint32[kTile / 16][4];

DEVICE void issue_qk(Logits& logits, uint64 query, uint64 keys) {
#pragma unroll
  for (int column = 0; column < kDimQk; column += 16) {
    const int box = column / 64, step = column % 64 * 2 / 16;
    wgmma_ss(logits, query + (box * kPackedRows * kRowBytes / 16 + step),
             keys + (box * TileLayout<kDimQk>::kColumn / 16 + step), column > 0);
  }
  wgmma_commit();
}

DEVICE void issue_pv(Output& output, const Probabilities& p, uint64 values) {
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i) wgmma_rs(output, p[i], values + i * 2 * TileLayout<kDimVo>::kGroup / 16);
  wgmma_commit();
}

// The tanh of `to_cap` times each logit. Almost all logits of a model are far below the cap, where it needs no
// exponential: the warp takes the other form if one of its logits is not. So it does where logits are of other memory,
// on which no bit of a result may depend.
DEVICE void soft_cap(Logits& logits, float to_cap, bool all_visible) {
  float largest = all_visible ? 0 : kInfinity;
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) largest = fmaxf(largest, fabsf(logits[i]));
  if (__any_sync(~0u, largest * to_cap > kSmallTanh)) {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) logits[i] = tanh_exact(logits[i] * to_cap);
  } else {
#pragma unroll
    for (int i = 0; i < kTile / 2; ++i) logits[i] = tanh_small(logits[i] * to_cap);
  }
}

DEVICE void multiply(Logits& logits, float scale) {
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) logits[i] *= scale;
}

DEVICE void mask(Logits& logits, const Rows& rows, int first) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int low = rows.low[r] - first, count = rows.high[r] - first;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = 8 * i + c;
        if (token < low || token >= count) logits[4 * i + 2 * r + c] = -kInfinity;
      }
  }
}

// The online softmax over one more KV tile: logits become probabilities. `alpha` rescales sums of the tiles before.
DEVICE void update(Logits& logits, Rows& rows, float factor, float (&alpha)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
      largest = fmaxf(largest, fmaxf(logits[4 * i + 2 * r], logits[4 * i + 2 * r + 1]));
    const float row_max = fmaxf(rows.row_max[r], max_of_quad(largest) * factor);
    const float anchor = finite(row_max);
    alpha[r] = exp2_approx(rows.row_max[r] - anchor);
    rows.row_max[r] = row_max;
    float sum = rows.row_sum[r] * alpha[r];
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = logits[4 * i + 2 * r + c];
        x = exp2_approx(x * factor - anchor);
        sum += x;
      }
    rows.row_sum[r] = sum;
  }
}

DEVICE void round(Probabilities& p, const Logits& logits) {
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) p[i][j] = pack(logits[8 * i + 2 * j], logits[8 * i + 2 * j + 1]);
}

DEVICE void rescale(Output& output, const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < kDimVo / 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) output[4 * i + 2 * r + c] *= alpha[r];
}

DEVICE void release(uint32 empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(empty);
}

// Stores the two rows of this thread from registers.
template <OutType TYPE>
DEVICE void store_rows(void* out, const Output& output, const int64 (&row)[2], const bool (&exists)[2]) {
  using Pair = decltype(pair_of<TYPE>(0, 0));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Pair* to = static_cast<Pair*>(out) + row[r] * (kDimVo / 2) + threadIdx.x % 4;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < kDimVo / 8; ++i) to[4 * i] = pair_of<TYPE>(output[4 * i + 2 * r], output[4 * i + 2 * r + 1]);
  }
}

// The same for a partial result: a workspace may lie at any multiple of 4 bytes.
DEVICE void store_partial(float* partial, const Output& output, const int64 (&row)[2], const bool (&exists)[2]) {
  if (reinterpret_cast<uint64>(partial) % 8 == 0) return store_rows<kFloat32>(partial, output, row, exists);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* to = partial + row[r] * kDimVo + threadIdx.x % 4 * 2;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < kDimVo / 8; ++i) to[8 * i] = output[4 * i + 2 * r], to[8 * i + 1] = output[4 * i + 2 * r + 1];
  }
}

struct Results {
  const float* sinks;  // of each head, or null
  void* out;
  float *lse, *partial;  // lse may be null
  int slots, out_type;
  const float* kv_scale;  // of FP8 keys and values, or null
};

struct Arguments {
  float scale, cap;
  Results results;
};

// Stores the two rows of this thread in the type of the query, 16 bytes at a time.
DEVICE void store_like_query(void* out, const Output& output, const int64 (&row)[2], const bool (&exists)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4* to = static_cast<uint4*>(out) + row[r] * (kDimVo / 8) + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kDimVo / 8; i += 4) {
      uint32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack(output[4 * (i + j) + 2 * r], output[4 * (i + j) + 2 * r + 1]);
      const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3]);
      if (exists[r]) to[i] = chunk;
    }
  }
}

// Divides by the row sums and stores output and LSE, or the partial result.
DEVICE void store(Output& output, Rows& rows, const Problem& p, const Results& to, const int (&unit)[8],
                  int first_packed_row) {
  const int lane = threadIdx.x % 32, first = first_packed_row + threadIdx.x % kConsumerThreads / 32 * 16 + lane / 4;
  const int row = unit[0], count = unit[1], slot = unit[5], first_head = unit[7];
  const int num_heads = p.num_kv_heads * p.group;
  float norm[2];
  int64 to_row[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = first + 8 * r, tile_row = p.row_of(packed);
    const int head = first_head + packed - tile_row * p.group;
    exists[r] = tile_row < count && uint32(row + tile_row) < uint32(p.rows) && (slot < 0 || slot < to.slots);
    float row_max = rows.row_max[r], sum = sum_of_quad(rows.row_sum[r]), alpha = 1;
    if (to.sinks && slot < 0) {  // the combine kernel adds the sink to split tiles
      const float sink = (exists[r] ? to.sinks[head] : -kInfinity) * kLog2e, joined = fmaxf(row_max, sink);
      const float anchor = finite(joined);
      alpha = exp2f(row_max - anchor), sum = sum * alpha + exp2f(sink - anchor), row_max = joined;
    }
    norm[r] = (sum > 0 ? alpha / sum : 0.f) * (to.kv_scale ? to.kv_scale[1] : 1.f);
    to_row[r] = ((slot < 0 ? int64(row) : int64(slot) * p.tile_rows) + tile_row) * num_heads + head;
    float* lse = slot < 0 ? to.lse : to.partial + int64(to.slots) * p.tile_rows * num_heads * kDimVo;
    if (lane % 4 == 0 && exists[r] && lse) lse[to_row[r]] = row_max + log2f(sum);
  }
  rescale(output, norm);
  if (slot >= 0) return store_partial(to.partial, output, to_row, exists);
  switch (to.out_type) {
    case kLikeQuery: return store_like_query(to.out, output, to_row, exists);
    case kFloat32: return store_rows<kFloat32>(to.out, output, to_row, exists);
    case kFloat16: return store_rows<kFloat16>(to.out, output, to_row, exists);
    case kBFloat16: return store_rows<kBFloat16>(to.out, output, to_row, exists);
    case kE4M3: return store_rows<kE4M3>(to.out, output, to_row, exists);
    case kE5M2: return store_rows<kE5M2>(to.out, output, to_row, exists);
  }
}

// Adds the state of consumer 1 to that of consumer 0, through the query buffer, which neither reads any more.
DEVICE void reduce(int consumer, Output& output, Rows& rows, Shared& shared, uint32 memory) {
  const int thread = threadIdx.x % kConsumerThreads, lane = thread % 32;
  float sums[2] = {sum_of_quad(rows.row_sum[0]), sum_of_quad(rows.row_sum[1])};
  named_sync(kBothConsumers, 2 * kConsumerThreads);
  const int line = thread / 32 * 16 + lane / 4;
  if (consumer == 1) {
#pragma unroll
    for (int i = 0; i < kDimVo / 8; ++i)
      store_shared(memory + (i * kConsumerThreads + thread) * 16,
                   uint4{__float_as_uint(output[4 * i]), __float_as_uint(output[4 * i + 1]),
                         __float_as_uint(output[4 * i + 2]), __float_as_uint(output[4 * i + 3])});
    if (lane % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        shared.peer_max[line + 8 * r] = rows.row_max[r], shared.peer_sum[line + 8 * r] = sums[r];
  }
  named_sync(kBothConsumers, 2 * kConsumerThreads);
  if (consumer == 1) return fence_async_shared();  // TMA writes here next
  float alpha[2], peer_alpha[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float peer_max = shared.peer_max[line + 8 * r], row_max = fmaxf(rows.row_max[r], peer_max);
    const float anchor = finite(row_max);
    alpha[r] = exp2_approx(rows.row_max[r] - anchor), peer_alpha[r] = exp2_approx(peer_max - anchor);
    rows.row_max[r] = row_max;
    const float sum = sums[r] * alpha[r] + shared.peer_sum[line + 8 * r] * peer_alpha[r];
    rows.row_sum[r] = lane % 4 == 0 ? sum : 0.f;
  }
  rescale(output, alpha);
#pragma unroll
  for (int i = 0; i < kDimVo / 8; ++i) {
    const uint4 peer = load_shared(memory + (i * kConsumerThreads + thread) * 16);
    output[4 * i] += __uint_as_float(peer.x) * peer_alpha[0];
    output[4 * i + 1] += __uint_as_float(peer.y) * peer_alpha[0];
    output[4 * i + 2] += __uint_as_float(peer.z) * peer_alpha[1];
    output[4 * i + 3] += __uint_as_float(peer.w) * peer_alpha[1];
  }
  fence_async_shared();
}

// One warpgroup: the attention of its packed rows, or of its KV tiles, for all units.
DEVICE void consume(int consumer, const Problem& p, const Arguments& arguments, Shared& shared) {
  const bool split_kv = p.split_kv();
  // The scale of the keys is one of the logits, unless that is 0, negative or out of range: then it multiplies them.
  const float* kv_scale = arguments.results.kv_scale;
  const float of_both = arguments.scale * (kv_scale ? kv_scale[0] : 1.f);
  const bool folded = !kv_scale || (of_both >= kLeastScale && of_both <= kMostScale);
  const float scale = folded ? of_both : arguments.scale;
  const float factor = arguments.cap > 0 ? arguments.cap * kLog2e : scale * kLog2e;
  const float to_cap = arguments.cap > 0 ? scale / arguments.cap : 0.f;
  const int lane = threadIdx.x % 32, line = threadIdx.x % kConsumerThreads / 32 * 16 + lane / 4;
  const uint64 keys = k_major(shared_address(shared.keys[0]), TileLayout<kDimQk>::kGroup);
  const uint64 values =
      mn_major(shared_address(shared.values[0]), TileLayout<kDimVo>::kGroup, TileLayout<kDimVo>::kColumn);
  const FullBarriers<kKeyStages> k_full = {shared_address(shared.k_full)};
  const FullBarriers<kValueStages> v_full = {shared_address(shared.v_full)};
  const uint32 k_empty = shared_address(shared.k_empty), v_empty = shared_address(shared.v_empty);
  uint32 base = 0;  // number of the unit's first KV tile among all of this CTA
  for (uint32 n = 0;; ++n) {
    const uint32 buffer = n % kQueries;
    wait(shared_address(&shared.q_full[buffer]), n / kQueries & 1);
    int unit[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) unit[i] = uniform(shared.unit[buffer][i]);
    const int count = unit[1], position = unit[2], start = unit[3], end = unit[4];
    if (count <= 0) return;
    const int first_packed_row = unit[6] + (split_kv ? 0 : consumer * kPackedRows);
    const uint32 q_empty = shared_address(&shared.q_empty[buffer]);
    const uint32 query_memory = shared_address(shared.query[buffer][split_kv ? 0 : consumer]);
    const uint64 query = k_major(query_memory, kGroupBytes);

    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = p.row_of(first_packed_row + line + 8 * r);
      // Relative to this thread's first column of a tile.
      rows.low[r] = (p.window_left == kNone ? 0 : bound(position, row, -p.window_left)) - lane % 4 * 2;
      rows.high[r] = min(end, bound(position, row + 1, p.window_right)) - lane % 4 * 2;
      rows.row_max[r] = -kInfinity, rows.row_sum[r] = 0;
    }
    // Tiles within these bounds are visible to all rows of this consumer.
    const int first_row = p.row_of(first_packed_row), last_row = p.row_of(first_packed_row + kPackedRows - 1);
    const int visible_begin = p.window_left == kNone ? 0 : bound(position, last_row, -p.window_left);
    const int visible_end = min(end, bound(position, first_row + 1, p.window_right));
    const bool all_rows = last_row < count;

    Output output;
#pragma unroll
    for (int i = 0; i < kDimVo / 2; ++i) output[i] = 0;
    const int tiles = (end - start + kTile - 1) / kTile, step = split_kv ? 2 : 1;
    int tile = split_kv ? (base ^ consumer) & 1 : 0;  // which full barriers a consumer waits for depends on this
    if (tile < tiles) {
      Logits logits;
      Probabilities probabilities;
      float alpha[2];
      const auto softmax = [&](int first) {
        const bool all_visible = first + kTile <= visible_end && first >= visible_begin && all_rows;
        if (!folded) multiply(logits, kv_scale[0]);
        if (arguments.cap > 0) soft_cap(logits, to_cap, all_visible);
        if (first + kTile > visible_end || first < visible_begin) mask(logits, rows, first);
        update(logits, rows, factor, alpha);
      };
      uint32 number = base + tile;  // of the KV tile whose logits are computed, among all of this CTA
      wait(k_full.of(number), k_full.parity(number));
      wgmma_fence();
      issue_qk(logits, query, keys + number % kKeyStages * (kKeyBytes / 16));
      wgmma_wait<0>();
      fence_registers(logits);
      release(k_empty + number % kKeyStages * 8);
      softmax(start + tile * kTile);
      round(probabilities, logits);
      for (tile += step; tile < tiles; tile += step) {
        const uint32 previous = number;
        number = base + tile;
        wait(k_full.of(number), k_full.parity(number));
        wgmma_fence();
        issue_qk(logits, query, keys + number % kKeyStages * (kKeyBytes / 16));
        wait(v_full.of(previous), v_full.parity(previous));
        fence_registers(output);
        wgmma_fence();
        issue_pv(output, probabilities, values + previous % kValueStages * (kValueBytes / 16));
        wgmma_wait<1>();
        fence_registers(logits);
        release(k_empty + number % kKeyStages * 8);
        softmax(start + tile * kTile);
        fence_registers(logits);
        // Complete already. Without a loop here, the assembler may move the exponentials behind the wait for O.
        wait(v_full.of(previous), v_full.parity(previous));
        wgmma_wait<0>();
        fence_registers(output);
        release(v_empty + previous % kValueStages * 8);
        if (__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) rescale(output, alpha);
        round(probabilities, logits);
      }
      if (!split_kv) release(q_empty);
      wait(v_full.of(number), v_full.parity(number));
      wgmma_fence();
      issue_pv(output, probabilities, values + number % kValueStages * (kValueBytes / 16));
      wgmma_wait<0>();
      fence_registers(output);
      release(v_empty + number % kValueStages * 8);
    }
    base += tiles;

    if (split_kv) reduce(consumer, output, rows, shared, query_memory);
    if (split_kv || tiles <= 0) release(q_empty);
    if (!split_kv || consumer == 0) store(output, rows, p, arguments.results, unit, first_packed_row);
  }
}

}  // namespace

// Grid: any number n of CTAs; the host launches one for each SM, or for each unit if there are fewer. CTA c runs units
//     c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by length, so waves in turn forwards and
//     backwards balance.
// Owns: the rows of its units in `out` and `lse`, or their partial results in `partial`.
// Loop invariant of a consumer, before it takes KV tile j: P holds the probabilities of its last tile, row_max and
//     row_sum include that tile, O includes those before it and is relative to row_max.
// Barriers: k_full and v_full, two for each stage: an arrival of the producer, and the bytes of the tile; with FP8 KV
//     an arrival of each producer warp. k_empty and v_empty, one for each stage: an arrival of each warp that reads
//     the tile. q_full, one for each query buffer: an arrival and the bytes, or an arrival of each thread that copies.
//     q_empty: an arrival of each consumer warp. staging: an arrival of producer V, and the bytes. A named barrier of
//     all consumer threads, around the exchange of step 11.
// Bound by: tensor cores for long chunks; exponentials at heads of 64; reading KV for few query rows on long KV.
extern "C" __global__ void __launch_bounds__(384, 1) prefill(
    const char* q,                            // [rows, num_kv_heads * group, HEAD_DIM_QK]
    const __grid_constant__ TensorMap q_map,  // [HEAD_DIM_QK / 64, rows, num_kv_heads * group, 64]
#if KV_FP8
    const char* k,                            // [pages, page_size, num_kv_heads, HEAD_DIM_QK] or without pages
    const char* v,                            // with HEAD_DIM_VO
#else
    // [pages and heads, page_size / 8, HEAD_DIM_QK / 64, 8, 64]; ragged [num_kv_heads, HEAD_DIM_QK / 64, kv_rows, 64]
    const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v,      // with HEAD_DIM_VO
#endif
    const float* sinks,                       // [num_kv_heads * group] or null
    void* out,                                // [rows, num_kv_heads * group, HEAD_DIM_VO]
    float* lse,                               // [rows, num_kv_heads * group] or null
    float* partial,  // [slots, tile_rows, num_kv_heads * group, HEAD_DIM_VO], then the LSE without HEAD_DIM_VO
    const int* qo_indptr,                     // [max_batch + 1]; this and the next two are null without a plan
    const int* kv_indices,                    // [max_pages]
    const int* work,                          // [max_items, kWorkStride]
    float scale, float cap,                   // of the logits; a cap of 0 is none
    int window_left, int window_right,        // tokens that a row sees before and after its position; kNone: all
    int rows, int kv_rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head,  // elements
    int q_box_rows,                           // rows of q in a box of its map, or 0
    int num_kv_heads, int group, int page_size,
#if KV_FP8
    int64 k_page, int64 k_token, int64 k_head,  // strides in bytes
    int64 v_page, int64 v_token, int64 v_head,
    const float* kv_scale,                    // [2] or null
    int kv_type,                              // Fp8Type
#else
    int box,                                  // tokens of a box of the maps of keys and values
    // What a page and a head add to the outermost index of the maps of paged KV:
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
#endif
    int tile_rows,                            // query rows of a work item
    int num_items,
    int num_units,                            // blocks of all items and KV heads
    int out_type) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
#if KV_FP8
  constexpr int box = 8;  // tokens that are copied at once
#endif
  const Problem p = {
      .qo_indptr = qo_indptr, .kv_indices = kv_indices, .work = work, .window_left = window_left,
      .window_right = window_right, .rows = rows, .kv_rows = kv_rows, .num_pages = num_pages, .max_pages = max_pages,
      .max_items = max_items, .max_batch = max_batch, .num_kv_heads = num_kv_heads, .group = group,
      .page_size = page_size, .box = box, .tile_rows = tile_rows, .num_items = num_items, .num_units = num_units,
      .planned = work != nullptr,
  };
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    const int readers = kConsumerWarps * (p.split_kv() ? 1 : 2);
    const int writers = KV_FP8 ? kProducerWarps : 1;
    for (uint64& barrier : shared.k_full) init_barrier(shared_address(&barrier), writers);
    for (uint64& barrier : shared.v_full) init_barrier(shared_address(&barrier), writers);
    for (uint64& barrier : shared.k_empty) init_barrier(shared_address(&barrier), readers);
    for (uint64& barrier : shared.v_empty) init_barrier(shared_address(&barrier), readers);
    for (uint64& barrier : shared.q_full) init_barrier(shared_address(&barrier), q_box_rows ? 1 : kQueryThreads);
    for (uint64& barrier : shared.q_empty) init_barrier(shared_address(&barrier), 2 * kConsumerWarps);
    init_barrier(shared_address(&shared.staging), 1);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  launch_later_kernels();
  const Queries queries = {&q_map, q_box_rows, q, stride_q_row, stride_q_head};
  if (warp < kProducerWarps) {
    decrease_registers<kProducerRegisters>();
#if KV_FP8
    const Fp8Source keys = {k, k_page, k_token, k_head}, values = {v, v_page, v_token, v_head};
    produce_fp8(p, keys, values, queries, Fp8Type(kv_type), shared);
#else
    if (warp == 0)
      produce<false>(p, {&k, k_page_step, k_head_step}, shared);
    else if (warp == 1)
      produce<true>(p, {&v, v_page_step, v_head_step}, shared);
    else
      produce_queries(p, queries, shared);
#endif
  } else {
    increase_registers<kConsumerRegisters>();
#if !KV_FP8
    constexpr const float* kv_scale = nullptr;
#endif
    consume(warp / 4 - 1, p, {scale, cap, {sinks, out, lse, partial, slots, out_type, kv_scale}}, shared);
  }
}

}  // namespace attn_ops
