// Prefill: tile sizes, the layout of shared memory, and the units that a CTA computes. `prefill.cu` describes the
// schedule.
#pragma once

#include "clocks.cuh"
#include "division.cuh"
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
#ifndef PADDED
#define PADDED 0
#endif

namespace attn_ops {
namespace {

// An accumulator of 64 rows and 512 columns takes 256 registers of a thread, more than a consumer has. So a consumer
// computes kDimVo of the kOutDim columns. Another unit computes the other columns, or with kSharedRows the other
// consumer, which has the same rows.
constexpr bool kSharedRows = SHARED_ROWS;
constexpr int kOutDim = HEAD_DIM_VO, kValueColumns = kOutDim / UNIT_PARTS;  // columns of values of a unit
constexpr int kValueParts = kSharedRows ? 2 : UNIT_PARTS, kDimVo = kOutDim / kValueParts;
static_assert(!kSharedRows || UNIT_PARTS == 1);
// A stage of the ring of keys has kKeyDim columns of a KV tile, so that kKeyParts stages make up the tile. With heads
// of 512, shared memory has no room for a second KV tile: parts of the next tile replace parts that have been read.
constexpr int kDimQk = HEAD_DIM_QK, kKeyParts = KEY_PARTS, kKeyDim = kDimQk / kKeyParts;
static_assert(PAGED || !KV_CP_ASYNC);
constexpr bool kCustomMask = CUSTOM_MASK;
static_assert(!kCustomMask || CONSUMERS == 2);  // the warps that read the mask need more than 32 registers
constexpr bool kFp8Products = Q_FP8;  // queries, keys and values are e4m3, and so are the operands of both products
constexpr int kElementBytes = kFp8Products ? 1 : 2;
constexpr int kConsumers = CONSUMERS, kCtasPerSm = CTAS_PER_SM;
static_assert(kCtasPerSm == 1 || kConsumers == 1);
constexpr bool kConverts = CONVERTERS > 0;  // with two warpgroups of converters, consumers spare the registers
static_assert(kConverts == (KV_FP8 || ROPE) && (!kConverts || kConsumers == 2));
constexpr bool kAlibi = ALIBI;
static_assert(ROPE + ALIBI + Q_FP8 <= 1 && KV_FP8 + Q_FP8 <= 1);
static_assert(kValueParts == 1 || !(Q_FP8 || ROPE || ALIBI));
static_assert(!PADDED || (kValueParts == 1 && !(Q_FP8 || ROPE || ALIBI || FEW_ROWS || (KV_FP8 && CUSTOM_MASK))));
constexpr bool kFewRows = FEW_ROWS;
static_assert(!kFewRows || (KV_FP8 && !(ROPE || ALIBI) && PAGED && DTYPE == 1));
constexpr int kTile = TILE;                                          // tokens of a KV tile
constexpr int kKeyStages = KEY_STAGES, kValueStages = VALUE_STAGES;  // of the rings of keys and values
constexpr int kTransposedStages = TRANSPOSED_STAGES;                 // of the ring of transposed values (FP8 products)
constexpr int kRaggedBox = RAGGED_BOX;  // tokens of a TMA box of ragged KV; a box of paged KV has at most as many
constexpr bool kShortTiles = kConsumers == 3 && kTile < 128;  // three consumers with heads above 64
// The scheduler takes the next unit when producer K has kTilesAhead KV tiles of a unit left. With a custom mask the
// scheduler then reads the mask of the next unit, which takes longer.
constexpr int kTilesAhead = kCustomMask ? 8 : kKeyStages > 2 * kKeyParts && !kShortTiles && kConsumers > 1 ? 1 : 3;
constexpr int kQueries = QUERIES;           // query buffers
constexpr int kQueryBlocks = 2 * kQueries;  // QueryBlocks in shared memory
constexpr int kPackedRows = 64;             // packed rows of a consumer
constexpr int kQueryTiles = QUERY_TILES;    // blocks of kPackedRows rows of a query buffer
static_assert(kQueryTiles == (kFewRows || kSharedRows ? 1 : kConsumers));
// A row in shared memory is as wide as the swizzle, kRowBytes, and has kColumns columns. The columns of wider heads are
// several blocks of kColumns. Of heads of 96, products do not read the second half of the last block.
constexpr int kRowBytes = kDimQk * kElementBytes < 128 ? kDimQk * kElementBytes : 128;
constexpr int kColumns = kRowBytes / kElementBytes, kRowChunks = kRowBytes / 16;
constexpr int kGroupBytes = 8 * kRowBytes;  // 8 rows of one block of columns
template <int DIM>
constexpr int kColumnBlocks = (DIM + kColumns - 1) / kColumns;  // blocks of columns of a row
constexpr int kQueryBytes = kPackedRows * kColumnBlocks<kDimQk> * kRowBytes;
constexpr int kKeyBytes = kTile * kColumnBlocks<kKeyDim> * kRowBytes;
constexpr int kValueBytes = kTile * kColumnBlocks<kValueColumns> * kRowBytes;
// With KV_FP8, producers load FP8 tiles of kLoadedTile tokens into FP8 rings, and converters convert them into the
// 16-bit rings: kFp8Parts FP8 tiles make up a stage. Without KV_FP8 a loaded tile is a KV tile.
constexpr int kLoadedTile = LOADED_TILE, kFp8Parts = kTile / kLoadedTile;
constexpr int kFp8KeyStages = FP8_KEY_STAGES, kFp8ValueStages = FP8_VALUE_STAGES;
constexpr int kMostFp8Stages = kFp8KeyStages > kFp8ValueStages ? kFp8KeyStages : kFp8ValueStages;
// Bytes of a row of kColumns columns, and of an element, of keys and values as they are loaded.
constexpr int kLoadedRowBytes = KV_FP8 ? 64 : kRowBytes, kLoadedBytes = KV_FP8 ? 1 : kElementBytes;
static_assert(kLoadedTile % kRaggedBox == 0);
constexpr int kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64, kProducerWarps = 4;
constexpr int kConverterWarps = 4 * CONVERTERS;
constexpr int kFirstConsumerWarp = kProducerWarps + kConverterWarps;
// Half of the converter warps convert keys, and half values. With RoPE, and if two units divide the columns of values,
// all of them convert both.
constexpr bool kConvertsInTurn = ROPE || UNIT_PARTS > 1;
static_assert(!KV_FP8 || UNIT_PARTS == 1 || kKeyStages < kKeyParts);  // for the order of convert_in_turn
constexpr int kWarpsOfTensor = kConvertsInTurn ? kConverterWarps : kConverterWarps / 2;  // converter warps of a tensor
constexpr int kThreads = 32 * (kFirstConsumerWarp + kConsumers * kConsumerWarps);
// Registers of a thread, for setmaxnreg. Their sum over all warpgroups must not exceed the registers of the launch, or
// setmaxnreg.inc would wait forever. If consumers can spare registers without spilling, producers have more: those that
// transpose then spill less, those that copy tokens have more addresses at once, and those that scan a custom mask read
// more rows at once.
constexpr bool kSparesRegisters =
    kFp8Products ? kDimQk == 64 : (KV_CP_ASYNC || CUSTOM_MASK) && !kConverts && kConsumers == 2;
constexpr int kLaunchRegisters = 0x10000 / (kCtasPerSm * kThreads) / 8 * 8;
constexpr int kProducerRegisters = kConsumers != 2 ? 32 : kSparesRegisters ? 56 : 40;
constexpr int kConverterRegisters = kConverts ? 56 : 0;
constexpr int kConsumerRegisters = kConsumers == 1                      ? 2 * kLaunchRegisters - kProducerRegisters
                                   : kConsumers == 3 || CONVERTERS == 2 ? 160
                                   : kConverts                          ? 208
                                   : kSparesRegisters                   ? 224
                                                                        : 232;
static_assert(kProducerRegisters + kConverterWarps / 4 * kConverterRegisters + kConsumers * kConsumerRegisters <=
              kThreads / 128 * kLaunchRegisters);
// kTensorProducers    producer warps of keys, and also of values. The second ones, which copy tokens, are the warps of
//                     producer Q
// kProducerArrivals   arrivals of one producer warp at a full barrier; kTensorArrivals: of all producers of the tensor
// kAddresses          addresses that a thread which copies tokens has in registers at once
// kFencesKeys         consumers execute a proxy fence before WGMMA, since it reads keys that threads copied by
//                     cp.async; kFencesValues: the same for values
constexpr int kTensorProducers = KV_CP_ASYNC && !kFp8Products && kLoadedTile >= 64 ? 2 : 1;
constexpr int kProducerArrivals = KV_CP_ASYNC ? 32 : 1, kTensorArrivals = kTensorProducers * kProducerArrivals;
constexpr int kAddresses = kProducerRegisters > 40 ? 8 : 2;
constexpr bool kFencesKeys = KV_CP_ASYNC && !kConverts;
constexpr bool kFencesValues = KV_CP_ASYNC && !KV_FP8 && !kFp8Products;
constexpr int kNone = 1 << 30;                                   // a window without a bound
constexpr int kMaxGroup = 1 << 15;                               // CUDA_PREFILL_GROUP: see DivideByGroup
constexpr int kBeforeAll = -1024;                                // a `low`: low + r <= 0 for every row r of a unit
constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;  // scale of logits that the softmax applies
constexpr float kLeastFactor = 0x1p-126f, kMostFactor = 0x1p126f;  // with the scale of a converted query: not 0 or inf
enum NamedBarrier { kBothConsumers = 1, kFirstInOrder };  // from kFirstInOrder on: one for each consumer, see Order

// The fields of a unit that consumers need. Producer Q computes them once, in 64 bits where sums may not fit in 32.
//
// Rows are counted from the unit's first query row: packed row i of the unit belongs to row (remainder + i) / group.
// Row r sees tokens of [low + r, min(high + r, end)).
//
// A consumer releases a query buffer before its epilogue, which still reads the QueryBlock of the unit: so there are
// twice as many QueryBlocks as query buffers. The QueryBlock of unit n is overwritten for unit n + kQueryBlocks, when
// consumers have released the queries of unit n + kQueries and thus ended the epilogue of unit n.
struct QueryBlock {
  int stored;         // results of rows r < stored are stored. Negative: there is no unit, the CTA has ended
  int low, high;
  int start, end;     // KV tokens
  int slot;           // slot of the partial result, negative without a split
  int head;           // first query head of the KV head's group
  int remainder;      // the unit's first packed row modulo the group
#if UNIT_PARTS > 1
  int first_column;   // first column of values and results
#endif
#if ROPE
  int position;       // position of the unit's first query row
#endif
#if ALIBI
  int bias_row;       // bias of row r for token t: slope * (t - (bias_row + r) + bias_rest)
  int bias_rest;
#endif
#if CUSTOM_MASK
  int request, row;   // the unit's first query row, in `q`
#endif
  int64 first;        // index of the result of row 0 and `head` in `out` or `partial`, as [rows * heads, HEAD_DIM_VO]
};

struct Unit : Item {     // tokens `start` to `end` are loaded. `count` is 0 if there is no unit: the CTA has ended
  int hidden;            // tokens from start on that no row sees, less than a box
  int first_packed_row;
  int first_row;         // query row of the item to which first_packed_row belongs
  int kv_head;
#if UNIT_PARTS > 1
  int first_column;      // first column of values
#endif
};

// The custom mask of a unit: `first` is the bit of the unit's first query row and token 0, `stride` the bits of a query
// row. For producer V and the scheduler it also has the unit's number of query rows, of which row r sees tokens of
// [low + r, min(high + r, end)) as far as the window allows.
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
  float query_scales[kQueries][kQueryTiles * kPackedRows];  // factors of the logits of packed rows that were bfloat16
#endif
  QueryBlock query_blocks[kQueryBlocks];
  Unit unit;
#if CUSTOM_MASK
  UnitMask masks[kThreads / 32];  // a copy for each warp that reads the mask
#endif
  // There are twice as many full barriers as stages. When two consumers take alternate KV tiles, the same consumer then
  // waits for every phase of a barrier. A consumer that waited for every other phase would always wait for the same
  // parity, and could take the phase two before for the one it waits for.
  uint64 k_full[2 * kKeyStages], k_empty[kKeyStages], v_full[2 * kValueStages], v_empty[kValueStages];
  uint64 q_full[kQueries], q_empty[kQueries], unit_full, unit_empty, staging;
#if Q_FP8
  uint64 t_full[2 * kTransposedStages], t_empty[kTransposedStages];  // of transposed values
#elif KV_FP8
  uint64 fp8_full[2][kMostFp8Stages], fp8_empty[2][kMostFp8Stages];  // [0]: FP8 keys, [1]: FP8 values
  int fp8_end[2];                                                    // 1 if no FP8 tile follows
#endif
#if ROPE && !KV_FP8
  uint64 k_loaded[kKeyStages];  // keys are loaded, and not rotated yet
#endif
#if FEW_ROWS || ROPE
  uint64 q_loaded[kQueries];  // queries are loaded, and not converted or rotated yet
#endif
};

// Packed rows of a unit: a work item of `packed_rows` is divided into as few units as possible, of equal size.
DEVICE int equal_unit_rows(int packed_rows) {
  const int parts = (packed_rows + kPackedRows - 1) / kPackedRows, units = (parts + kConsumers - 1) / kConsumers;
  return (parts + units - 1) / units * kPackedRows;
}

struct Problem {
  const int *qo_indptr, *kv_indices, *work;  // null without a plan
  int window_left, window_right, rows, kv_rows, num_pages, max_pages, max_items, max_batch, num_kv_heads, group;
  int page_size, box, tile_rows, unit_rows, num_items, slots;
  int* queue;  // null without a plan
#if PAGED
  static constexpr int request_rows = 0, request_keys = 0;
  DEVICE int splits() const { return 0; }
#else
  // Without a plan, of each of the `max_batch` requests: query rows, keys, and the splits of its visible keys, each of
  // split_keys but the last.
  int request_rows, request_keys, request_splits, split_keys;
  DEVICE int splits() const { return max_batch * request_splits; }  // of all requests
#endif
#if CUSTOM_MASK
  const unsigned char* mask;
  int64 mask_bytes;
  const int* kv_len;  // null without a plan
#endif
#if ALIBI
  bool has_cap;
#endif
#if PADDED
  int head_dim_qk, head_dim_vo;  // columns of queries and keys, and of values; the columns after them are padding
#else
  static constexpr int head_dim_qk = kDimQk, head_dim_vo = kOutDim;
#endif

  DEVICE bool planned() const { return PAGED || work; }
  DEVICE int slot_rows() const { return planned() ? tile_rows : request_rows; }  // query rows of a slot of `partial`
  DEVICE int request_blocks() const { return (request_rows * group + block_rows() - 1) / block_rows(); }
  // Blocks of a KV head that follow one another in the order of units. Without a plan they are those of a query tile,
  // or if all rows see the same keys those of the request.
  DEVICE int ordered_blocks() const {
    if (planned()) return blocks();
    return max(kCustomMask || window_right == kNone ? request_blocks() : min(blocks(), request_blocks()), 1);
  }

  DEVICE bool split_kv() const {
    return kConsumers > 1 && !kSharedRows && (kFewRows || tile_rows * group <= kPackedRows);
  }
  // Whether both consumers have the same rows, and divide the KV tiles or the columns of values.
  DEVICE bool same_rows() const { return kSharedRows || split_kv(); }
  // Packed rows of a unit, `unit_rows`. With one or two consumers constants take its place, which saves registers.
  DEVICE int block_rows() const {
    return kConsumers == 3 ? unit_rows : kConsumers == 1 || same_rows() ? kPackedRows : 2 * kPackedRows;
  }
  DEVICE int blocks() const { return (tile_rows * group + block_rows() - 1) / block_rows(); }
  DEVICE int consumers() const { return same_rows() ? 2 : block_rows() / kPackedRows; }  // consumers that have rows
  DEVICE int readers() const { return split_kv() ? 1 : consumers(); }                    // consumers of a KV tile
};

// Keys or values in global memory. Paged KV: a page adds `page_step`, and a head `head_step`, to the outermost index.
struct Source {
  const TensorMap* map;
  int page_step, head_step;
};

// position + rows + window, added in 64 bits and clamped to [0, kMaxTokens]; kMaxTokens if the window has no bound.
// `position` may be negative.
DEVICE int bound(int position, int rows, int window) {
  if (window == kNone) return kMaxTokens;
  return static_cast<int>(max(min(int64(position) + rows + window, int64(kMaxTokens)), int64(0)));
}

// position + rows + window, clamped to [kBeforeAll, kMaxTokens], so that adding a row of a unit or the size of a tile
// does not overflow 32 bits. `none` if the window has no bound.
static_assert(kBeforeAll + kConsumers * kPackedRows <= 0);
DEVICE int relative_bound(int position, int rows, int window, int none) {
  if (window == kNone || window == -kNone) return none;
  return static_cast<int>(max(min(int64(position) + rows + window, int64(kMaxTokens)), int64(kBeforeAll)));
}

// Numbers of work items: `planned` in the work list; `all` counts also the padding items after them, whose query rows
// belong to no request.
struct ItemCounts {
  int planned, all;

  DEVICE explicit ItemCounts(const Problem& p) : planned(0), all(p.num_items) {
    if (!p.queue) return;
    const int padding = min(padding_items(p), p.num_items);
    planned = max(min(p.queue[kPlannedItems], p.num_items - padding), 0);
    all = planned + padding;
  }
};

// Whether the scheduler keeps what it computes from the plan and the sizes alone. Otherwise it computes that again for
// each unit: in these images other work of the same threads has the registers.
constexpr bool kKeepsCounts = !(CUSTOM_MASK || FEW_ROWS || (KV_CP_ASYNC && PADDED));

// The units of this CTA in order. The scheduler has it. Units that read the same keys are neighbours.
//
// With a plan, CTA c begins with unit c, and takes the next units from a counter. Together the CTAs increment the
// counter as often as there are units, so that the last increment sets it back to 0.
struct Schedule : Walk<PAGED> {
  const ItemCounts kept;
  const FastDivide by_blocks, by_heads, by_group;
#if PAGED
  DEVICE explicit Schedule(const Problem& p)
      : kept(p), by_blocks(p.blocks()), by_heads(p.num_kv_heads), by_group(p.group) {}
#else
  const FastDivide by_groups;  // without a plan: units of one group of blocks of all splits

  DEVICE explicit Schedule(const Problem& p)
      : kept(p), by_blocks(p.ordered_blocks()), by_heads(p.num_kv_heads), by_group(p.group),
        by_groups(max(p.splits() * p.num_kv_heads * by_blocks.divisor, 1)) {}
#endif

  DEVICE ItemCounts counts(const Problem& p) const { return kKeepsCounts ? kept : ItemCounts(p); }

  DEVICE static uint32 quotient(uint32 n, const FastDivide& by) {
    return kKeepsCounts ? by.quotient(n) : n / by.divisor;
  }

  DEVICE static FastDivide kept_or_new(const FastDivide& kept, uint32 divisor) {
    return kKeepsCounts ? kept : FastDivide(divisor);
  }

  DEVICE bool next(const Problem& p, Unit& unit) {
    const int64 of_heads = int64(p.num_kv_heads) * UNIT_PARTS;
    const int64 of_head = p.planned() ? int64(counts(p).all) * p.blocks() : int64(p.splits()) * p.request_blocks();
    const int units = static_cast<int>(min(of_head * of_heads, int64(0x7FFFFFFF)));
    for (;;) {
      const int64 u = p.planned() && wave ? int64(gridDim.x) + atomic_increment(p.queue + kNextUnit, units - 1)
                                          : unit_of_wave(wave, blockIdx.x, gridDim.x);
      if (u >= units) return false;
      ++wave;
      if (find(p, uint32(u), unit)) return true;
    }
  }

  // Unit number u. False if the unit has no rows.
  DEVICE bool find(const Problem& p, uint32 u, Unit& unit) const {
#if UNIT_PARTS > 1
    unit.first_column = u % UNIT_PARTS * kDimVo;
#endif
    if (!p.planned())
      find_without_plan(p, u / UNIT_PARTS, unit);
    else if (!find_in_plan(p, u / UNIT_PARTS, unit))
      return false;
    const int first = quotient(unit.first_packed_row, by_group);
    const int last = min(int(quotient(unit.first_packed_row + p.block_rows() - 1, by_group)), unit.count - 1);
    if (first > last) return false;
    const int last_end = max(min(unit.end, bound(unit.position, last + 1, p.window_right)), 0);
    const int from = max(unit.start, p.window_left == kNone ? 0 : bound(unit.position, first, -p.window_left));
    unit.first_row = first;
    unit.start = max(min(PAGED ? from / p.box * p.box : from, last_end), 0);
    unit.end = last_end, unit.hidden = max(min(from, last_end) - unit.start, 0);
    return true;
  }

  // The units of a work item follow one another, KV head by KV head. False if the item has no rows.
  DEVICE bool find_in_plan(const Problem& p, uint32 u, Unit& unit) const {
    const ItemCounts items = counts(p);
    const FastDivide blocks = kept_or_new(by_blocks, p.blocks());
    const uint32 of_heads = quotient(u, blocks), of_items = quotient(of_heads, by_heads);
    unit.first_packed_row = (u - of_heads * blocks.divisor) * p.block_rows();
    unit.kv_head = of_heads - of_items * by_heads.divisor;
    const int item = int(of_items) < items.planned ? of_items : of_items + p.num_items - items.all;
    return locate(p, item, unit) == item;
  }

  // Requests of equal lengths; each split of a request is a work item. The last groups of blocks of all splits come
  // first: if rows see no later keys, these see the most. The units of a group follow one another, KV head by KV head.
  DEVICE void find_without_plan(const Problem& p, uint32 u, Unit& unit) const {
#if !PAGED
    const FastDivide of_group = kept_or_new(by_blocks, p.ordered_blocks());
    const FastDivide of_groups = kept_or_new(by_groups, p.splits() * p.num_kv_heads * of_group.divisor);
    const uint32 group = quotient(u, of_groups), blocks = p.request_blocks() - group * of_group.divisor;
    const uint32 count = min(of_group.divisor, blocks);  // blocks of the group; the first of a request may have fewer
    u -= group * of_groups.divisor;
    const uint32 head = count == of_group.divisor ? quotient(u, of_group) : u / count;
    const uint32 split = quotient(head, by_heads), request = p.request_splits > 1 ? split / p.request_splits : split;
    unit.first_packed_row = (blocks - count + u - head * count) * p.block_rows();
    unit.kv_head = head - split * by_heads.divisor, unit.request = request;
    unit.row = request * p.request_rows, unit.count = p.request_rows;
    unit.start = 0, unit.end = p.request_keys, unit.position = p.request_keys - p.request_rows;
    unit.page_start = request * p.request_keys, unit.slot = -1;
    if (p.request_splits > 1) {
      const int first = p.window_left == kNone ? 0 : bound(unit.position, 0, -p.window_left);
      unit.start = first + (split - request * p.request_splits) * p.split_keys;
      unit.end = unit.start + min(unit.end - unit.start, p.split_keys), unit.slot = split;
    }
#endif
  }
};

// Waits for unit n of this CTA. The reference is valid until this warp arrives on unit_empty: the last arrival lets the
// scheduler write the next unit.
DEVICE const Unit& wait_for_unit(uint32 n, Shared& shared) {
  wait(shared_address(&shared.unit_full), n & 1);
  return shared.unit;
}

// Arrives on unit_empty, once for the warp.
DEVICE void release_unit(Shared& shared) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(shared_address(&shared.unit_empty));
}

// Whether a TMA box has all columns of its tokens. Otherwise it has one block of columns: of ragged KV, which begins at
// any token, and of padded heads, whose last block ends before the others.
constexpr bool kBoxHasAllColumns = PAGED && !PADDED;

// The layout of a KV tile of DIM columns in shared memory, in bytes: groups of 8 tokens, each with all blocks of
// columns, or blocks of columns, each with all tokens of the tile.
template <int DIM, int TOKENS = kTile, int ROW_BYTES = kRowBytes, int BYTES = kElementBytes>
struct TileLayout {
  static constexpr int kRow = ROW_BYTES;
  static constexpr int kBlocks = (DIM * BYTES + ROW_BYTES - 1) / ROW_BYTES;         // blocks of columns
  static constexpr int kGroup = kBoxHasAllColumns ? kBlocks * 8 * kRow : 8 * kRow;  // from 8 tokens to the next 8
  static constexpr int kColumn = kBoxHasAllColumns ? 8 * kRow : TOKENS * kRow;  // from a block of columns to the next
};

// The layout of keys or values as producers load them.
template <int DIM>
using LoadedLayout = TileLayout<DIM, kLoadedTile, kLoadedRowBytes, kLoadedBytes>;

// The byte offset in a swizzled tile of the element that is at byte `offset` of the tile without a swizzle.
template <int ROW_BYTES = kRowBytes>
DEVICE uint32 swizzled(uint32 offset) {
  return offset ^ (offset >> 7 & (ROW_BYTES / 16 - 1)) << 4;
}

}  // namespace
}  // namespace attn_ops
