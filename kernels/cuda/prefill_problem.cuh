// Prefill: sizes, shared memory, and which units a CTA has. `prefill.cu` has the schedule.
#pragma once

#include "clocks.cuh"
#include "schedule.cuh"

#ifndef KV_FP8
#define KV_FP8 0
#endif
#ifndef Q_FP8
#define Q_FP8 0
#endif
#ifndef KV_CP_ASYNC
#define KV_CP_ASYNC 0
#endif
#ifndef CUSTOM_MASK
#define CUSTOM_MASK 0
#endif
#ifndef FEW_ROWS
#define FEW_ROWS 0
#endif
#ifndef ROPE
#define ROPE 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef SHARED_ROWS
#define SHARED_ROWS 0
#endif
#define UNIT_PARTS (HEAD_DIM_VO > 256 && !SHARED_ROWS ? 2 : 1)  // units of the columns of values
#ifndef CONSUMERS
#define CONSUMERS 2
#endif

namespace attn_ops {
namespace {

// An accumulator of 64 rows and 512 columns has more registers than a consumer, which then has kDimVo of the kOutDim
// columns. Another unit has the rest, or with kSharedRows the other consumer of the same rows.
constexpr bool kSharedRows = SHARED_ROWS;
constexpr int kOutDim = HEAD_DIM_VO, kValueParts = kOutDim > 256 ? 2 : 1, kDimVo = kOutDim / kValueParts;
constexpr int kUnitParts = UNIT_PARTS, kValueColumns = kOutDim / kUnitParts;  // of a unit
static_assert(!kSharedRows || kValueParts == 2);
// The ring of keys has stages of kKeyDim columns, kKeyParts of which are a KV tile. Shared memory holds just one of
// heads of 512: the next is loaded part by part.
constexpr int kDimQk = HEAD_DIM_QK, kKeyParts = kDimQk > 256 ? 4 : 1, kKeyDim = kDimQk / kKeyParts;
static_assert(PAGED || !KV_CP_ASYNC);
constexpr bool kCustomMask = CUSTOM_MASK;
constexpr bool kFp8Products = Q_FP8;  // queries, keys and values are e4m3, and so are the operands of both products
constexpr int kElementBytes = kFp8Products ? 1 : 2;
constexpr int kConsumers = CONSUMERS;
constexpr bool kConverts = KV_FP8 || ROPE;                        // a warpgroup changes what consumers read
constexpr bool kManyConverters = FEW_ROWS && HEAD_DIM_QK <= 128;  // or two, where consumers spare the registers
static_assert(!kConverts || kConsumers == 2);
constexpr bool kAlibi = ALIBI;
static_assert(ROPE + ALIBI + Q_FP8 <= 1 && KV_FP8 + ALIBI + Q_FP8 <= 1);
static_assert(kValueParts == 1 || !(Q_FP8 || ROPE || ALIBI));
// Sizes by head dims are those of the tables of tiles in prefill.py.
constexpr bool kLargeBatch = kConsumers == 3 && kDimQk == 128;  // LARGE_BATCH_TILES
constexpr bool kFewRows = FEW_ROWS;                             // FEW_ROWS_TILES
static_assert(!kFewRows || (KV_FP8 && PAGED && DTYPE == 1));
constexpr int kTile =  // tokens of a KV tile
    kDimVo > 128 || (KV_FP8 && kDimQk > 128) || kLargeBatch || (kFewRows && kDimQk > 64) ? 64 : 128;
constexpr int kKeyStages =  // of the ring of keys
    kKeyParts > 1 && KV_FP8                                                     ? 2
    : kSharedRows                                                               ? 6
    : kFp8Products || kConsumers == 3 || kKeyParts > 1                          ? 4
    : kDimQk == 64 || (kDimQk == 128 && kFewRows) || (kDimQk == 256 && !KV_FP8) ? 3
                                                                                : 2;
constexpr int kValueStages =  // KV tiles of the ring of values
    kValueParts > 1                                                                   ? 1
    : kFewRows || kLargeBatch || (kDimQk == 64 && !kFp8Products && !(KV_FP8 && ROPE)) ? kKeyStages
                                                                                      : 2;
constexpr int kRaggedBox =  // most tokens of a TMA box, the size of those of ragged keys and values
    kDimQk == 64 ? 64 : kDimQk == 192 && !KV_FP8 ? 128 : 32;
constexpr int kTransposedStages = 4;                                 // and of transposed values, of FP8 products
constexpr int kTilesAhead =  // KV tiles left to load when a unit is taken, whose custom mask is then read
    kCustomMask ? 8 : kKeyStages > 2 * kKeyParts && !kLargeBatch ? 1 : 3;
constexpr int kQueries = kDimQk > 128 ? 1 : 2;                       // query buffers
constexpr int kQueryBlocks = 2 * kQueries;                           // units whose QueryBlock is kept
constexpr int kPackedRows = 64;                                      // of a consumer
constexpr int kQueryTiles = kFewRows || kSharedRows ? 1 : kConsumers;  // blocks of kPackedRows of a query buffer
// A row in shared memory, as wide as the swizzle, has kColumns columns. Wider heads have several such blocks of
// columns.
constexpr int kRowBytes = kDimQk * kElementBytes < 128 ? kDimQk * kElementBytes : 128;
constexpr int kColumns = kRowBytes / kElementBytes, kRowChunks = kRowBytes / 16;
constexpr int kGroupBytes = 8 * kRowBytes;  // of 8 rows of a block of columns
constexpr int kQueryBytes = kPackedRows * kDimQk * kElementBytes;
constexpr int kKeyBytes = kTile * kKeyDim * kElementBytes, kValueBytes = kTile * kValueColumns * kElementBytes;
// TMA loads keys and values to the rings. FP8 ones are loaded to rings of their own, kFp8Parts of whose stages make up
// one of the 16-bit ring, and converted from there.
constexpr int kFp8Parts = KV_FP8 && !kFewRows && kKeyParts == 1 ? 2 : 1, kLoadedTile = kTile / kFp8Parts;
constexpr int kFp8KeyStages = kSharedRows ? 4 : kKeyParts > 1 ? 2 : !kFewRows ? kFp8Parts : kDimQk == 256 ? 2 : 6;
constexpr int kFp8ValueStages = kKeyParts > 1 ? 1 : kFp8KeyStages;
constexpr int kMostFp8Stages = kFp8KeyStages > kFp8ValueStages ? kFp8KeyStages : kFp8ValueStages;
constexpr int kLoadedRowBytes = KV_FP8 ? 64 : kRowBytes, kLoadedBytes = KV_FP8 ? 1 : kElementBytes;  // of an element
static_assert(kLoadedTile % kRaggedBox == 0);
constexpr int kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64, kProducerWarps = 4;
constexpr int kConverterWarps = kManyConverters ? 8 : kConverts ? 4 : 0;
constexpr int kFirstConsumerWarp = kProducerWarps + kConverterWarps;
// Half of the converters have keys, and half values. With RoPE, and where values have fewer columns, all have both.
constexpr bool kConvertsInTurn = ROPE || UNIT_PARTS > 1;
constexpr int kWarpsOfTensor = kConvertsInTurn ? kConverterWarps : kConverterWarps / 2;  // that have keys, or values
constexpr int kThreads = 32 * (kFirstConsumerWarp + kConsumers * kConsumerWarps);
// Of a thread. More than the CTA has from its launch would never become free. Producers that transpose spill less with
// more, and those that copy tokens have several addresses at once, where consumers can spare them without spilling.
constexpr bool kSparesRegisters =
    kFp8Products ? kDimQk == 64 : (KV_CP_ASYNC || CUSTOM_MASK) && !kConverts && kConsumers == 2;
constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kSparesRegisters ? 56 : 40;
constexpr int kConverterRegisters = kConverts ? 56 : 0;
constexpr int kConsumerRegisters =
    kConsumers == 3 || kManyConverters ? 160 : kConverts ? 208 : kSparesRegisters ? 224 : 232;
constexpr int kLaunchRegisters = kThreads == 640 ? 96 : kThreads == 512 ? 128 : 168;
static_assert(kProducerRegisters + kConverterWarps / 4 * kConverterRegisters + kConsumers * kConsumerRegisters <=
              kThreads / 128 * kLaunchRegisters);
// Producers of keys, and as many of values: with two that copy tokens, the second ones are the warps of producer Q too.
// The arrivals of one at a barrier, of all, and the addresses that one which copies tokens has at once. Who multiplies
// what threads copied executes a proxy fence.
constexpr int kTensorProducers = KV_CP_ASYNC && !kFp8Products && kLoadedTile >= 64 ? 2 : 1;
constexpr int kProducerArrivals = KV_CP_ASYNC ? 32 : 1, kTensorArrivals = kTensorProducers * kProducerArrivals;
constexpr int kAddresses = kProducerRegisters > 40 ? 8 : 2;
constexpr bool kFencesKeys = KV_CP_ASYNC && !kConverts;
constexpr bool kFencesValues = KV_CP_ASYNC && !KV_FP8 && !kFp8Products;
constexpr int kNone = 1 << 30;                                   // a window without a bound
constexpr int kMaxGroup = 1 << 15;                               // CUDA_PREFILL_GROUP: see DivideByGroup
constexpr int kBeforeAll = -1024;                                // less than any token plus a row of a unit
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;  // of logits
constexpr float kLeastFactor = 0x1p-126f, kMostFactor = 0x1p126f;  // with that of a query: neither 0 nor inf
enum NamedBarrier { kBothConsumers = 1, kFirstInOrder };  // the latter and following: Order

// What consumers need of a unit. Producer Q computes it once, in 64 bits where sums may not fit in 32.
//
// Rows are counted from the unit's first query row: packed row i of the unit belongs to row (remainder + i) / group.
// Row r sees tokens of [low + r, min(high + r, end)).
//
// A consumer releases a query buffer before its epilogue, which still reads the unit: so there are more of these. The
// one of unit n is written again for unit n + kQueryBlocks, when consumers have released the queries of a unit after n.
struct QueryBlock {
  int stored;         // query rows from the unit's first one on whose results are stored. No unit follows if negative
  int low, high;
  int start, end;     // KV tokens
  int slot;           // of the partial result, negative without a split
  int head;           // the first of the KV head's group
  int remainder;      // of the first packed row divided by the group
#if UNIT_PARTS > 1
  int first_column;   // of values and results
#endif
#if ROPE
  int position;       // of the first query row
#endif
#if ALIBI
  int bias_row;       // bias of row r for token t: slope * (t - (bias_row + r) + bias_rest)
  int bias_rest;
#endif
#if CUSTOM_MASK
  int request, row;   // the first query row among those of all requests
#endif
  int64 first;        // where the first query row and head are stored: its number among those of `out` or `partial`
};

struct Unit : Item {     // `start` to `end` are loaded. No unit follows if `count` is 0
  int hidden;            // tokens from start on that no row sees, less than a box
  int first_packed_row;
  int first_row;         // the query row of the item to which it belongs
  int kv_head;
#if UNIT_PARTS > 1
  int first_column;      // of values
#endif
};

// The custom mask of a unit. `first` is the bit of its first query row and token 0, `stride` the bits of a row.
// Producer V has the rest too: the query rows, of which row r sees tokens of [low + r, min(high + r, end)).
struct UnitMask {
  int64 first;
  int stride, rows, low, high, end;
};

struct Shared {
  alignas(1024) char query[kQueries][kQueryTiles][kQueryBytes];
  alignas(1024) char keys[kKeyStages][kKeyBytes];
  alignas(1024) char values[kValueStages][kValueBytes];
#if Q_FP8
  alignas(1024) char transposed[kTransposedStages][kValueBytes];
#elif KV_FP8
  alignas(512) char fp8_keys[kFp8KeyStages][kLoadedTile * kKeyDim];
  alignas(512) char fp8_values[kFp8ValueStages][kLoadedTile * kValueColumns];
#endif
  float peer_max[kPackedRows], peer_sum[kPackedRows];
#if FEW_ROWS
  float query_scales[kQueries][kQueryTiles * kPackedRows];  // of packed rows that were bfloat16
#endif
  QueryBlock query_blocks[kQueryBlocks];
  Unit unit;
#if CUSTOM_MASK
  UnitMask masks[kThreads / 32];  // of each warp that reads it
#endif
  // There are twice as many full barriers as stages, so that each is always waited for by the same consumer when they
  // take alternate KV tiles: one that skipped every other phase could take one that is two phases behind for complete.
  uint64 k_full[2 * kKeyStages], k_empty[kKeyStages], v_full[2 * kValueStages], v_empty[kValueStages];
  uint64 q_full[kQueries], q_empty[kQueries], unit_full, unit_empty, staging;
#if Q_FP8
  uint64 t_full[2 * kTransposedStages], t_empty[kTransposedStages];  // of transposed values
#elif KV_FP8
  uint64 fp8_full[2][kMostFp8Stages], fp8_empty[2][kMostFp8Stages];  // of FP8 keys, and of values
  int fp8_end[2];                                                    // not 0 if no KV tile follows
#endif
#if ROPE && !KV_FP8
  uint64 k_loaded[kKeyStages];  // before they are rotated
#endif
#if FEW_ROWS || ROPE
  uint64 q_loaded[kQueries];  // before they are converted or rotated
#endif
};

// Packed rows of a unit: those of a work item in as few units as hold them, of equal size.
DEVICE int equal_unit_rows(int packed_rows) {
  const int parts = (packed_rows + kPackedRows - 1) / kPackedRows, units = (parts + kConsumers - 1) / kConsumers;
  return (parts + units - 1) / units * kPackedRows;
}

struct Problem {
  const int *qo_indptr, *kv_indices, *work;
  int window_left, window_right, rows, kv_rows, num_pages, max_pages, max_items, max_batch, num_kv_heads, group;
  int page_size, box, tile_rows, unit_rows, num_items, slots;
  int* queue;  // of the plan; null without one
#if CUSTOM_MASK
  const unsigned char* mask;
  int64 mask_bytes;
  const int* kv_len;  // of the plan; null without one
#endif
#if ALIBI
  bool has_cap;
#endif

  DEVICE bool split_kv() const { return !kSharedRows && (kFewRows || tile_rows * group <= kPackedRows); }
  // All consumers have the same rows: they divide the KV tiles, or the columns of values.
  DEVICE bool same_rows() const { return kSharedRows || split_kv(); }
  // Packed rows of a unit: `unit_rows`, which is the constant with two consumers, for the sake of registers.
  DEVICE int block_rows() const { return kConsumers == 3 ? unit_rows : same_rows() ? kPackedRows : 2 * kPackedRows; }
  DEVICE int blocks() const { return (tile_rows * group + block_rows() - 1) / block_rows(); }
  DEVICE int consumers() const { return same_rows() ? 2 : block_rows() / kPackedRows; }  // that have rows
  DEVICE int readers() const { return split_kv() ? 1 : consumers(); }                    // of a KV tile
};

// Keys or values in global memory. A page adds `page_step` and a head `head_step` to the outermost index.
struct Source {
  const TensorMap* map;
  int page_step, head_step;
};

// `position + rows + window`, with a position that may be negative and a sum that may not fit in 32 bits, as a token.
DEVICE int bound(int position, int rows, int window) {
  if (window == kNone) return kMaxTokens;
  return static_cast<int>(max(min(int64(position) + rows + window, int64(kMaxTokens)), int64(0)));
}

// position + rows + window, clamped to [kBeforeAll, kMaxTokens], so that adding a row of a unit or the size of a tile
// does not overflow 32 bits. `none` of a window without a bound.
static_assert(kBeforeAll + kConsumers * kPackedRows <= 0);
DEVICE int relative_bound(int position, int rows, int window, int none) {
  if (window == kNone || window == -kNone) return none;
  return static_cast<int>(max(min(int64(position) + rows + window, int64(kMaxTokens)), int64(kBeforeAll)));
}

// How many items there are: in the work list, and with those after them, of rows without a request.
struct ItemCounts {
  int planned, all;

  DEVICE explicit ItemCounts(const Problem& p) : planned(0), all(p.num_items) {
    if (!p.queue) return;
    const int padding = min(padding_items(p), p.num_items);
    planned = max(min(p.queue[kPlannedItems], p.num_items - padding), 0);
    all = planned + padding;
  }
};

// Units of this CTA in their order. One thread has it, and passes the units to the producers.
//
// With a plan a CTA begins with the unit of its number, and takes the others from a counter. Together the CTAs
// increment it as often as there are units: the last increment sets it back to 0. The units of an item follow one
// another, KV head by KV head; those of the same keys are neighbours.
struct Schedule : Walk<PAGED> {
  DEVICE bool next(const Problem& p, Unit& unit) {
    const int64 of_item = int64(p.num_kv_heads) * p.blocks() * kUnitParts;
    const int units = static_cast<int>(min(ItemCounts(p).all * of_item, int64(0x7FFFFFFF)));
    for (;;) {
      const int64 u = p.queue && wave ? int64(gridDim.x) + atomic_increment(p.queue + kNextUnit, units - 1)
                                      : unit_of_wave(wave, blockIdx.x, gridDim.x);
      if (u >= units) return false;
      ++wave;
      if (find(p, int(u), unit)) return true;
    }
  }

  // Unit number u. False if it has no rows.
  DEVICE bool find(const Problem& p, int u, Unit& unit) const {
    const ItemCounts items(p);  // again, which takes no registers while the counter is waited for
    const int blocks = p.blocks(), of_rows = u / kUnitParts, of_heads = of_rows / blocks;
    const int first_packed_row = of_rows % blocks * p.block_rows(), first = first_packed_row / p.group;
    unit.kv_head = of_heads % p.num_kv_heads, unit.first_packed_row = first_packed_row, unit.first_row = first;
#if UNIT_PARTS > 1
    unit.first_column = u % kUnitParts * kDimVo;
#endif
    if (!locate(p, items, of_heads / p.num_kv_heads, unit)) return false;
    const int last = min((first_packed_row + p.block_rows() - 1) / p.group, unit.count - 1);
    if (first > last) return false;
    const int last_end = max(min(unit.end, bound(unit.position, last + 1, p.window_right)), 0);
    const int from = max(unit.start, p.window_left == kNone ? 0 : bound(unit.position, first, -p.window_left));
    unit.start = max(min(PAGED ? from / p.box * p.box : from, last_end), 0);
    unit.end = last_end, unit.hidden = max(min(from, last_end) - unit.start, 0);
    return true;
  }

  // Reads an item. False if it has no rows.
  DEVICE bool locate(const Problem& p, ItemCounts items, int item, Unit& unit) const {
    if (p.queue) {
      if (item >= items.planned) item += p.num_items - items.all;
      return Walk::locate(p, item, unit) == item;
    }
    unit.row = (p.num_items - 1 - item) * p.tile_rows;
    unit.count = min(p.rows - unit.row, p.tile_rows);
    unit.start = 0, unit.end = p.kv_rows, unit.position = p.kv_rows - p.rows + unit.row;
    unit.page_start = 0, unit.slot = -1, unit.request = 0;
    return true;
  }
};

// Unit n of this CTA, until an arrival on unit_empty. The last arrival asks for the next unit.
DEVICE const Unit& wait_for_unit(uint32 n, Shared& shared) {
  wait(shared_address(&shared.unit_full), n & 1);
  return shared.unit;
}

// An arrival of this warp.
DEVICE void release_unit(Shared& shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.unit_empty));
}

// Where a KV tile of DIM columns has what, in bytes. A box is a page or a part of one: its tokens are in groups of
// 8, each with all its columns. Ragged KV begins at any token: all tokens of a block of columns, then those of the
// next.
template <int DIM, int TOKENS = kTile, int ROW_BYTES = kRowBytes, int BYTES = kElementBytes>
struct TileLayout {
  static constexpr int kRow = ROW_BYTES;
  static constexpr int kBlocks = DIM * BYTES / ROW_BYTES;               // of columns
  static constexpr int kGroup = PAGED ? kBlocks * 8 * kRow : 8 * kRow;  // to the next 8 tokens
  static constexpr int kColumn = PAGED ? 8 * kRow : TOKENS * kRow;      // to the next block of columns
};

// Of keys or values as TMA loads them.
template <int DIM>
using LoadedLayout = TileLayout<DIM, kLoadedTile, kLoadedRowBytes, kLoadedBytes>;

// The place in a swizzled tile of what is at byte `offset` of one that is not.
template <int ROW_BYTES = kRowBytes>
DEVICE uint32 swizzled(uint32 offset) {
  return offset ^ (offset >> 7 & (ROW_BYTES / 16 - 1)) << 4;
}

}  // namespace
}  // namespace attn_ops
