// Decode: sizes, shared memory and work items. The schedule is in `decode.cu`.
#pragma once

#include "basics.cuh"

#ifndef KV_FP8
#define KV_FP8 0  // 1 e4m3, 2 e5m2
#endif
#ifndef ROPE
#define ROPE 0
#endif
#ifndef PADDED
#define PADDED 0
#endif
#ifndef DENSE
#define DENSE 0
#endif

namespace attn_ops {
namespace {

constexpr int kDim = HEAD_DIM;
constexpr int kPackedRows = PACKED_ROWS;                      // at least the group
constexpr int kTileBytes = 16 << 10;                          // keys of a KV tile; its values have as many bytes
constexpr int kTokenBytes = kDim * (KV_FP8 ? 1 : 2);          // the key, or value, of a token and KV head
constexpr int kTile = kTileBytes / (KV_HEADS * kTokenBytes);  // tokens of a KV tile
// KV tiles of the ring. With more stages, SMs share the bandwidth less evenly. With ROPE, the keys of one are rotated.
constexpr int kStages = ROPE ? 4 : 3;
constexpr int kTurns = 2;   // consumers of a KV head, which take turns
constexpr int kConsumers = KV_HEADS * kTurns, kConsumerWarps = 4, kConsumerThreads = 32 * kConsumerWarps;
constexpr int kProducerWarp = kConsumers * kConsumerWarps;
constexpr int kConverterThreads = ROPE ? 128 : 0, kThreads = 32 * (kProducerWarp + 1) + kConverterThreads;
constexpr int kColumnBlocks = kDim / 64, kTokenBlocks = kTile / 64;  // of 64, the M of WGMMA
// Keys or values of a KV tile in shared memory, as TMA boxes write them:
// [kTile / kBlockTokens, KV_HEADS, kTokenBytes / kRowBytes, kBlockTokens, kRowBytes]. A row is as wide as the swizzle.
// A box of dense KV is a whole tile, one of pages has groups of 8 tokens.
constexpr int kRowBytes = kTokenBytes < 128 ? kTokenBytes : 128;
constexpr int kBlockTokens = DENSE ? kTile : 8;
constexpr int kBlockBytes = kBlockTokens * kRowBytes;                       // to the next block of columns
constexpr int kHeadBytes = kBlockTokens * kTokenBytes;                      // to the second KV head
constexpr int kGroupBytes = DENSE ? 8 * kRowBytes : KV_HEADS * kHeadBytes;  // to the next 8 tokens
// The query and P are 16-bit operands. Their rows, one per packed row, have 64 columns of the query or 64 tokens of P.
constexpr int kOperandRowBytes = 128, kOperandGroupBytes = 8 * kOperandRowBytes;
constexpr int kOperandBytes = kPackedRows * kOperandRowBytes;  // to the next 64 columns or tokens
constexpr int kStagedRowBytes = kDim * 4 + 16;  // a packed row of O, float32; the 16 bytes avoid bank conflicts
static_assert(kDim % 64 == 0 && kTile % 64 == 0 && (kPackedRows == 8 || kPackedRows == 16));
static_assert(kTile / 8 <= 32);                 // a lane loads at most one box of pages of a KV tile
static_assert(KV_HEADS == 1 || kTokenBytes == kRowBytes);  // one dimension of the maps is heads or column blocks
// Whether values of tokens that the row does not see are set to 0. If dense splits are whole KV tiles, there are none:
// TMA writes zeros after the last key.
constexpr int kSplitKeys = 128;  // split_keys is a multiple
constexpr bool kClearsValues = !DENSE || kTile > kSplitKeys;
static_assert(!(ROPE && (KV_FP8 || PADDED)));
static_assert(!PADDED || (kDim == 128 && kColumnBlocks == 2));
enum NamedBarrier { kConsumer = 1, kTurn = kConsumer + kConsumers };  // the first of kConsumers barriers each

struct Stage {
  char keys[kTileBytes], values[kTileBytes];
};

// Shared memory of one consumer.
struct alignas(1024) ConsumerShared {
  char query[kColumnBlocks][kOperandBytes];
  char p[2][kTokenBlocks][kOperandBytes];      // probabilities of two KV tiles
  char staged[kPackedRows * kStagedRowBytes];  // O on its way to the output
  float reduced[kPackedRows][kConsumerWarps];  // maximum or sum of a packed row over the tokens of each warp
  float scales[kPackedRows];                   // with an FP8 cache: factor of the logits of each query head
};

struct Shared {
  alignas(1024) Stage stages[kStages];
  ConsumerShared consumers[kConsumers];
  uint64 k_full[kStages], v_full[kStages], empty[kStages];
#if ROPE
  uint64 k_loaded[kStages];
  uint64 turns[kDim / 2];  // turns per position of each pair of columns, in units of 2^-64 (rope.cuh)
#endif
  int combines[kConsumers];  // whether each consumer stored the last split of a row
};

// The columns of a head in global memory: kDim, or fewer with PADDED. Then rows of kDim columns in shared memory, and
// in results of products, have other columns too. Rows of an FP8 cache end with zeros. Rows of a 16-bit cache have two
// blocks of 64 columns, the second of which has the last 64 of the head: some columns are in both.
struct HeadDim {
#if PADDED
  int head_dim;

  // The column of the head that is column `stored` of a row; negative if it is a zero, or in the first block too.
  DEVICE int column_of_head(int stored) const {
    if (KV_FP8) return stored < head_dim ? stored : -1;
    const int column = stored < 64 ? stored : stored - kDim + head_dim;
    return stored < 64 || column >= 64 ? column : -1;
  }
#else
  static constexpr int head_dim = kDim;
  DEVICE static int column_of_head(int stored) { return stored; }
#endif
};

DEVICE int first_kv_head() { return blockIdx.x * KV_HEADS; }
DEVICE int kv_head() {  // KV head of the consumer that this thread belongs to
  return first_kv_head() + (KV_HEADS > 1 ? threadIdx.x / (kTurns * kConsumerThreads) : 0);
}
DEVICE int num_kv_heads() { return gridDim.x * KV_HEADS; }
DEVICE int cta_of_heads() { return blockIdx.y; }  // of the CTAs that have the same KV heads
DEVICE int num_ctas() { return gridDim.y; }

struct WorkItem {
  int row;         // query row, an index of q
  int position;    // position of the query row in the KV sequence
  int slot;        // slot of the partial result; negative: the row is not split
  int page_start;  // index of the request's first page in kv_indices; unused with dense KV
  int begin, end;  // KV tokens of the item that the row sees, within the page table; 0 and 0 if there are none
  int first;       // first token of the first KV tile: `begin`; of pages, the first token of the box that holds it

  DEVICE int tiles() const { return (end - first + kTile - 1) / kTile; }
  // Whether the row does not see all tokens of the KV tile that begins at token `tile`.
  DEVICE bool hides(int tile) const { return tile < begin || tile + kTile > end; }
  DEVICE bool sees(int token) const { return uint32(token - begin) < uint32(end - begin); }
};

// Called after the first reads of a plan. Afterwards barriers are initialised, earlier kernels have ended, and the
// next kernel may start.
DEVICE void end_prologue(bool early) {
  __syncthreads();
  if (early) wait_for_earlier_kernels();
  launch_later_kernels();
}

}  // namespace
}  // namespace attn_ops
