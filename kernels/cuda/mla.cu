// Multi-head latent attention on Hopper: persistent and warp-specialised, one producer and two consumer warpgroups in
// each CTA.
//
// Compiled for CLUSTER (CTAs of a cluster, 1 or 2) and DTYPE (1 float16, 2 bfloat16). Head count, strides, page size,
// the causal bound and the type of the output are parameters.
//
// There is one KV head. The key of a token is 512 latent and 64 rotary columns, and its value is the latent: a KV tile
// of 64 tokens is loaded once and read twice. It lies in one page. Packed row p of a work item is query row p / heads
// of the item and head p % heads. A unit is a block of 64 * CLUSTER packed rows of one work item; each CTA of the
// cluster has 64 of them, and all have the same KV tiles. Each CTA loads a part of every tile and multicasts it, so a
// cluster reads a tile from L2 once.
//
// Both consumers of a CTA have its 64 packed rows. Each computes the logits of every second KV tile, its own, and
// multiplies the probabilities of all tiles with its half of the value columns: the accumulator [64, 512] does not fit
// in the registers of one warpgroup.
//
// Roles
// -----
// warp 0            producer KV: KV tiles, by TMA into two stages
// warps 2, 3        producer Q: the queries of the unit. One thread, by TMA, if 64 packed rows are a box of whole query
//                   rows or of heads of one row; otherwise all threads, by cp.async
// warpgroups 1, 2   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers
//
// Both producers walk the units of the cluster by themselves (`Schedule`). Producer Q passes them to the consumers.
//
// Schedule
// --------
// KV tiles are counted over all units of a CTA. Tile j lies in stage j % 2, and consumer j % 2 owns it. A stage has a
// full barrier for each quarter of the latent columns, and an empty barrier for each half. Below, `own` is the owner of
// tile j and `peer` the other consumer; S is a tile of logits, P of probabilities, O[c] the accumulator [64, 256] of
// consumer c, V[c] its half of the values.
//
// prologue
//     0.  [all]           initialise barriers; cluster barrier; setmaxnreg; griddepcontrol.wait
// for each unit n
//     1.  [producer Q]    wait for q_empty; write the unit and load its queries; they complete q_full
//     2.  [consumer]      wait for q_full
// mainloop, for each KV tile j of the unit
//     3.  [producer KV]   wait for empty[own], an arrival of each warp that read it in any CTA of the cluster; load the
//                         quarters of V[own], this CTA's blocks of 64 columns, to all CTAs; they complete their full
//     4.  [producer KV]   wait for empty[peer]; the same for V[peer]. The rotary columns count for the last quarter
//     5.  [consumer own]  quarter by quarter: wait for full; issue S_j = Q K_j^T
//     6.  [consumer own]  wait for S_j; mask, online softmax: store row_max for the peer; P_j and alpha
//     7.  [consumer own]  when all its warps have S_j: store P_j over the rotary columns; arrive on p_stored[own]
//     8.  [consumer own]  O[own] *= alpha; O[own] += P_j V_j[own]; arrive on empty[own] of all CTAs
//     9.  [consumer peer] wait for p_stored[own]; read row_max; O[peer] *= alpha; O[peer] += P_j V_j[peer]; arrive on
//                         empty[peer] of all CTAs
// epilogue of the unit
//     10. [consumer]      arrive on q_empty; exchange the row_sum of own tiles
//     11. [consumer]      divide by l; store half of the output columns; consumer 0 stores the LSE
// end
//     12. [producer KV]   wait for all of empty: the CTA stays until the others have arrived for the last time
//
// The row maximum passes through the tiles in order: the owner of tile j continues with the row_max that it read in
// step 9 of tile j-1. A consumer of kKeysFirst issues step 5 of its tile before step 9 of the preceding one, which
// then overlaps step 6; the other issues it after. So one of them has a product in flight while the other computes a
// softmax.
//
// Memory after the last token may hold NaN, which a probability of 0 would not hide. Where the KV ends inside a tile,
// each consumer sets its half of these values to 0 before it multiplies them: after step 7, and in step 9. Then all
// logits of the tile are complete, and no one else reads that half.
#include "basics.cuh"
#include "cluster.cuh"
#include "descriptors.cuh"
#include "epilogue.cuh"
#include "hopper.cuh"
#include "schedule.cuh"

namespace attn_ops {
namespace {

constexpr int kLatent = 512;                      // columns of a value, and of the first part of a key
constexpr int kHalf = kLatent / 2;                // columns of a consumer's accumulator
constexpr int kTile = 64;                         // tokens of a KV tile
constexpr int kPackedRows = 64;                   // of a CTA
constexpr int kUnitRows = CLUSTER * kPackedRows;  // packed rows of a unit
constexpr int kRowBytes = 128;                    // of 64 columns in shared memory
constexpr int kGroupBytes = 8 * kRowBytes;        // of 8 rows and 64 columns
constexpr int kBlockBytes = 64 * kRowBytes;       // a block: 64 rows of 64 columns
constexpr int kBlocks = 9;                        // of a query or key: 8 of the latent columns, then the rotary ones
constexpr int kRotary = kBlocks - 1;              // the block of the rotary columns, and later of P
constexpr int kTileBytes = kBlocks * kBlockBytes;
constexpr int kHalfBytes = kHalf / 64 * kBlockBytes;
constexpr int kQuarters = 4;  // of the latent columns, two blocks each
constexpr int kQueryBoxBlocks = 4;
constexpr int kConsumerThreads = 128, kConsumerWarps = 4, kQueryThreads = 64;
constexpr bool kKeysFirst[2] = {false, true};  // by consumer
enum NamedBarrier { kOneConsumer = 1, kBothConsumers = 3 };

struct Shared {
  alignas(1024) char query[kTileBytes];
  alignas(1024) char kv[2][kTileBytes];
  float row_max[2][kPackedRows];     // of each consumer's latest tile
  float row_sum[2][2][kPackedRows];  // of even and odd units, of each consumer
  int unit[8];
  uint64 full[2][kQuarters], empty[2][2], p_stored[2], q_full, q_empty;
};

struct Problem {
  const int *qo_indptr, *kv_indices, *work;
  int rows, num_pages, max_pages, max_items, max_batch, heads, page_size, tile_rows, num_items, num_units;
  bool causal, early;  // early: the plan may be read before earlier kernels end

  DEVICE int blocks() const { return (tile_rows * heads + kUnitRows - 1) / kUnitRows; }
  DEVICE int row_of(int packed_row) const { return uint32(packed_row) / uint32(heads); }
};

struct Unit : Item {  // `start` is the first token of a tile
  int first_packed_row;

  DEVICE int tiles() const { return (end - start + kTile - 1) / kTile; }
};

// One past the last token that query row `row` sees, whose item begins at `position`.
DEVICE int causal_end(int position, int row) {
  return static_cast<int>(max(min(int64(position) + row + 1, int64(kMaxTokens)), int64(0)));
}

// Units of this cluster in their order.
struct Schedule : Walk<true> {
  DEVICE bool next(const Problem& p, Unit& unit) {
    const int units = p.rows > 0 ? p.num_units : 0;
    return next_unit(*this, p, unit, blockIdx.x / CLUSTER, gridDim.x / CLUSTER, units, p.blocks());
  }

  DEVICE bool take(const Problem& p, int u, Unit& unit) const {
    unit.first_packed_row = u % p.blocks() * kUnitRows;
    const int first = unit.first_packed_row / p.heads;
    const int last = min((unit.first_packed_row + kUnitRows - 1) / p.heads, unit.count - 1);
    if (first > last) return false;
    if (p.causal) unit.end = min(unit.end, causal_end(unit.position, last));
    unit.end = max(min(unit.end, kMaxTokens), 0);
    unit.start = max(min(unit.start / kTile * kTile, unit.end), 0);
    return true;
  }

  // The first unit, and the end of the prologue that overlaps the preceding kernel.
  DEVICE bool first(const Problem& p, Unit& unit) {
    if (!p.early) {
      wait_for_earlier_kernels();
      launch_later_kernels();
      return next(p, unit);
    }
    acquire_plan();
    const bool exists = next(p, unit);
    wait_for_earlier_kernels();
    launch_later_kernels();
    return exists;
  }
};

// ---- Producers ----------------------------------------------------------------------------------------------------

struct Cache {
  const TensorMap *latent, *rotary;  // [num_pages, page_size, columns], boxes of a block
};

// A block to all CTAs of the cluster, by the CTA `loader`.
DEVICE void load_block(int loader, int rank, uint32 to, const TensorMap* map, int column, int token, int page,
                       uint32 barrier) {
  if (CLUSTER == 1)
    load_box(to, map, column, token, page, barrier);
  else if (loader == rank)
    load_box_in(uint16((1 << CLUSTER) - 1), to, map, column, token, page, barrier);
}

// One warp: the KV tiles of all units. Page numbers are loaded for 32 tiles at a time, and 32 tiles ahead. At the end
// it waits until all CTAs of the cluster have read what it loaded, and their arrivals at barriers of this one are here.
DEVICE void produce(const Problem& p, const Cache& cache, Shared& shared, int rank) {
  const int lane = threadIdx.x % 32;
  const uint32 stages = shared_address(shared.kv[0]), full = shared_address(shared.full);
  const uint32 empty = shared_address(shared.empty);
  Schedule schedule;
  Unit unit;
  uint32 tile = 0;
  for (bool exists = schedule.first(p, unit); exists; exists = schedule.next(p, unit)) {
    const int tiles = unit.tiles();
    // The page number of this lane's tile, of those from tile `i` on.
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
      const uint32 to = stages + stage * kTileBytes, parity = tile >> 1 & 1 ^ 1;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int half = stage ^ h;
        wait(empty + (stage * 2 + half) * 8, parity);
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
              load_block(b, rank, to + block * kBlockBytes, cache.latent, block * 64, token, page, barrier);
            }
            if (last) load_block(tile >> 1 & 1, rank, to + kRotary * kBlockBytes, cache.rotary, 0, token, page, barrier);
          }
        }
        __syncwarp();
      }
      token += kTile;
      if (token >= p.page_size) token = 0;
    }
  }
  if (CLUSTER > 1)
    for (int i = 0; i < 2; ++i, ++tile)
      for (int half = 0; half < 2; ++half) wait(empty + ((tile & 1) * 2 + half) * 8, tile >> 1 & 1 ^ 1);
}

// Queries in global memory, in two parts. The maps' boxes are 64 packed rows if `boxed`.
struct Queries {
  const TensorMap *latent_map, *rotary_map;
  const char *latent, *rotary;
  int64 latent_row, latent_head, rotary_row, rotary_head;  // strides in elements
  bool boxed;
};

// Copies 64 packed rows: threads 8 i to 8 i + 7 have row i of every 8, 16 bytes of each block.
DEVICE void copy_queries(const Problem& p, const Queries& q, const Unit& unit, int first_packed_row, uint32 to,
                         int thread) {
  const uint32 swizzled = thread / 8 * kRowBytes + (thread % 8 ^ thread / 8) * 16;
  for (int row = thread / 8; row < kPackedRows; row += 8) {
    const int packed = first_packed_row + row, tile_row = p.row_of(packed);
    const int64 head = packed - tile_row * p.heads, q_row = int64(unit.row) + tile_row;
    const bool exists = tile_row < unit.count && q_row >= 0 && q_row < p.rows;
    const char* latent = q.latent + (q_row * q.latent_row + head * q.latent_head) * 2 + thread % 8 * 16;
    const char* rotary = q.rotary + (q_row * q.rotary_row + head * q.rotary_head) * 2 + thread % 8 * 16;
    const uint32 row_to = to + row / 8 * kGroupBytes + swizzled;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      copy_chunk(row_to + block * kBlockBytes,
                 !exists ? q.latent : block == kRotary ? rotary : latent + block * kRowBytes, exists);
  }
  wait_for_chunks();
  fence_async_shared();
}

// Two warps, or a thread if TMA loads them: this CTA's packed rows of each unit, and the unit itself. One without rows
// is the end.
DEVICE void produce_queries(const Problem& p, const Queries& q, Shared& shared, int rank) {
  const int thread = threadIdx.x % kQueryThreads;
  if (q.boxed && thread) {
    wait_for_earlier_kernels();
    return launch_later_kernels();
  }
  const uint32 full = shared_address(&shared.q_full), empty = shared_address(&shared.q_empty);
  const uint32 to = shared_address(shared.query);
  Schedule schedule;
  Unit unit;
  for (uint32 n = 0;; ++n) {
    const bool exists = n == 0 ? schedule.first(p, unit) : schedule.next(p, unit);
    const int first_packed_row = unit.first_packed_row + rank * kPackedRows;
    wait(empty, n & 1 ^ 1);
    if (thread == 0) {
      const int words[] = {unit.row,   exists ? unit.count : 0, unit.position, unit.start,
                           unit.end,   unit.slot,               first_packed_row};
#pragma unroll
      for (int i = 0; i < 7; ++i) shared.unit[i] = words[i];
    }
    if (exists && q.boxed) {
      const int row = unit.row + first_packed_row / p.heads, head = first_packed_row % p.heads;
      arrive_expect(full, kTileBytes);
#pragma unroll
      for (int block = 0; block < kRotary; block += kQueryBoxBlocks)
        load_box(to + block * kBlockBytes, q.latent_map, 0, head, row, block, full);
      load_box(to + kRotary * kBlockBytes, q.rotary_map, 0, head, row, 0, full);
    } else {
      if (exists) copy_queries(p, q, unit, first_packed_row, to, thread);
      arrive(full);
    }
    if (!exists) return;
  }
}

// ---- Consumers ----------------------------------------------------------------------------------------------------

// A thread has two packed rows, 8 apart, and of each the columns 8 i + 2 (lane % 4) and the next one, for every i.
struct Rows {
  float row_max[2], row_sum[2];  // row_sum over the columns of this thread, and own tiles
  int end[2];                    // of the tokens that the row sees, relative to this thread's first column
};

using Logits = float[kTile / 2];
using Output = float[kHalf / 2];
using Probabilities = uint32[kTile / 16][4];

// Operands of matrix products by the lower halves of their descriptors: all have the same upper half, and an addition
// to 32 bits takes one instruction.
DEVICE uint32 lower(uint64 descriptor) { return static_cast<uint32>(descriptor); }
DEVICE uint64 operand(uint32 lower) { return k_major(0, kGroupBytes) >> 32 << 32 | lower; }

// Step 5: the quarters of the owner's half are loaded first. Calls `between` when half of it is issued, as two groups.
template <int SELF, class Between>
DEVICE void issue_qk(Logits& logits, uint32 query, uint32 keys, uint32 full, uint32 parity, Between between) {
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const int quarter = i ^ SELF * 2, blocks = i == kQuarters - 1 ? 3 : 2;
    wait(full + quarter * 8, parity);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < blocks; ++b) {
      const int block = b == 2 ? kRotary : quarter * 2 + b;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int at = block * (kBlockBytes / 16) + step * 2;
        wgmma_ss(logits, operand(query + at), operand(keys + at), i > 0 || b > 0 || step > 0);
      }
    }
    wgmma_commit();
    if (i == 1) between();
  }
}

// Sets the values of this consumer's half to 0 from token `visible` of the tile on. No warp may read them meanwhile.
DEVICE void zero_values(uint32 values, int visible, int barrier) {
  constexpr int kChunks = kHalf / 8;
  for (int i = visible * kChunks + threadIdx.x % kConsumerThreads; i < kTile * kChunks; i += kConsumerThreads) {
    const int token = i / kChunks, chunk = i % kChunks;
    store_shared(values + chunk / 8 * kBlockBytes + token * kRowBytes + chunk % 8 * 16, uint4{0, 0, 0, 0});
  }
  fence_async_shared();
  named_sync(barrier, kConsumerThreads);
}

DEVICE void mask(Logits& logits, const Rows& rows, int first) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int count = rows.end[r] - first;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c >= count) logits[4 * i + 2 * r + c] = -kInfinity;
  }
}

// What rescales sums relative to the old row_max.
DEVICE float rescale_factor(float old_max, float new_max) { return exp2_approx(old_max - finite(new_max)); }

// Step 6: logits become probabilities; `alpha` rescales sums of the tiles before. `to` is where the peer finds row_max.
DEVICE void update(Logits& logits, Rows& rows, float factor, float (&alpha)[2], float* to) {
  float anchor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -kInfinity;
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
      largest = fmaxf(largest, fmaxf(logits[4 * i + 2 * r], logits[4 * i + 2 * r + 1]));
    const float row_max = fmaxf(rows.row_max[r], max_of_quad(largest) * factor);
    if (threadIdx.x % 4 == 0) to[8 * r] = row_max;
    anchor[r] = finite(row_max), alpha[r] = exp2_approx(rows.row_max[r] - anchor[r]);
    rows.row_max[r] = row_max;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.row_sum[r] * alpha[r];
#pragma unroll
    for (int i = 0; i < kTile / 8; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = logits[4 * i + 2 * r + c];
        x = exp2_approx(x * factor - anchor[r]);
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

// Step 7: P as the K-major operand of the peer. Lanes 8 m to 8 m + 7 have the addresses of the rows of matrix m.
DEVICE void store_probabilities(uint32 to, const Probabilities& p) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kConsumerThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i)
    store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);
  fence_async_shared();
}

DEVICE void rescale(Output& output, const float (&alpha)[2]) {
  if (!__any_sync(~0u, alpha[0] != 1 || alpha[1] != 1)) return;
#pragma unroll
  for (int i = 0; i < kHalf / 8; ++i)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) output[4 * i + 2 * r + c] *= alpha[r];
}

DEVICE void arrive_by_warp(uint32 barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

// An arrival of this warp on the barrier at this place of each CTA of the cluster.
DEVICE void release(uint32 barrier) {
  __syncwarp();
  const uint32 lane = threadIdx.x % 32;
  if (CLUSTER == 1) {
    if (lane == 0) arrive(barrier);
  } else if (lane < CLUSTER) {
    arrive_in_cluster(address_in(barrier, lane));
  }
}

// Stores this thread's columns of its two rows, whose first elements of 512 are at `row`.
template <OutType TYPE>
DEVICE void store_pairs(void* out, const Output& output, int first_column, const int64 (&row)[2],
                        const bool (&exists)[2]) {
  using Pair = decltype(pair_of<TYPE>(0, 0));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Pair* to = static_cast<Pair*>(out) + row[r] * (kLatent / 2) + first_column / 2 + threadIdx.x % 4;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) to[4 * i] = pair_of<TYPE>(output[4 * i + 2 * r], output[4 * i + 2 * r + 1]);
  }
}

// The same for a partial result: a workspace may lie at any multiple of 4 bytes.
DEVICE void store_partial(float* partial, const Output& output, int first_column, const int64 (&row)[2],
                          const bool (&exists)[2]) {
  if (reinterpret_cast<uint64>(partial) % 8 == 0)
    return store_pairs<kFloat32>(partial, output, first_column, row, exists);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* to = partial + row[r] * kLatent + first_column + threadIdx.x % 4 * 2;
    if (exists[r])
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) to[8 * i] = output[4 * i + 2 * r], to[8 * i + 1] = output[4 * i + 2 * r + 1];
  }
}

// In the type of the query, 16 bytes at a time.
DEVICE void store_like_query(void* out, const Output& output, int first_column, const int64 (&row)[2],
                             const bool (&exists)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4* to = static_cast<uint4*>(out) + row[r] * (kLatent / 8) + first_column / 8 + threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kHalf / 8; i += 4) {
      uint32 words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack(output[4 * (i + j) + 2 * r], output[4 * (i + j) + 2 * r + 1]);
      const uint4 chunk = transpose_quad(words[0], words[1], words[2], words[3]);
      if (exists[r]) to[i] = chunk;
    }
  }
}

struct Results {
  void* out;
  float *lse, *partial;  // lse may be null
  int slots, out_type;
};

struct Arguments {
  float factor;  // of the logits, in base 2
  Results results;
};

// Step 11: divides by the row sums and stores half of the output columns, and the LSE; or the partial result.
DEVICE void store(int consumer, Output& output, const Rows& rows, const float (&sums)[2], const Problem& p,
                  const Results& to, const int (&unit)[7]) {
  const int lane = threadIdx.x % 32, first = unit[6] + threadIdx.x % kConsumerThreads / 32 * 16 + lane / 4;
  const int row = unit[0], count = unit[1], slot = unit[5], first_column = consumer * kHalf;
  float norm[2];
  int64 to_row[2];
  bool exists[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = first + 8 * r, tile_row = p.row_of(packed);
    const int head = packed - tile_row * p.heads;
    exists[r] = tile_row < count && uint32(row + tile_row) < uint32(p.rows) && (slot < 0 || slot < to.slots);
    norm[r] = sums[r] > 0 ? 1 / sums[r] : 0.f;
    to_row[r] = ((slot < 0 ? int64(row) : int64(slot) * p.tile_rows) + tile_row) * p.heads + head;
    float* lse = slot < 0 ? to.lse : to.partial + int64(to.slots) * p.tile_rows * p.heads * kLatent;
    if (consumer == 0 && lane % 4 == 0 && exists[r] && lse) lse[to_row[r]] = rows.row_max[r] + log2f(sums[r]);
  }
  rescale(output, norm);
  if (slot >= 0) return store_partial(to.partial, output, first_column, to_row, exists);
  switch (to.out_type) {
    case kLikeQuery: return store_like_query(to.out, output, first_column, to_row, exists);
    case kFloat32: return store_pairs<kFloat32>(to.out, output, first_column, to_row, exists);
    case kFloat16: return store_pairs<kFloat16>(to.out, output, first_column, to_row, exists);
    case kBFloat16: return store_pairs<kBFloat16>(to.out, output, first_column, to_row, exists);
    case kE4M3: return store_pairs<kE4M3>(to.out, output, first_column, to_row, exists);
    case kE5M2: return store_pairs<kE5M2>(to.out, output, first_column, to_row, exists);
  }
}

// One warpgroup: the logits of every second KV tile, and half of the value columns of all, for all units.
template <int SELF>
struct Consumer {
  static constexpr int kPeer = 1 - SELF;
  static constexpr int kBarrier = kOneConsumer + SELF;

  const Problem& p;
  const Arguments& arguments;
  Shared& shared;
  const int line = threadIdx.x % kConsumerThreads / 32 * 16 + threadIdx.x % 32 / 4;  // of the first of two rows
  // Shared-memory addresses, and lower halves of descriptors.
  const uint32 own_stage = shared_address(shared.kv[SELF]), peer_stage = shared_address(shared.kv[kPeer]);
  const uint32 query = lower(k_major(shared_address(shared.query), kGroupBytes));
  const uint32 keys = lower(k_major(own_stage, kGroupBytes));
  const uint32 peer_p = lower(k_major(peer_stage + kRotary * kBlockBytes, kGroupBytes));
  const uint32 own_values = lower(mn_major(own_stage + SELF * kHalfBytes, kGroupBytes, kBlockBytes));
  const uint32 peer_values = lower(mn_major(peer_stage + SELF * kHalfBytes, kGroupBytes, kBlockBytes));
  const uint32 full = shared_address(shared.full[SELF]), p_stored = shared_address(shared.p_stored);

  uint32 base = 0;      // number of the unit's first KV tile among all of this CTA
  int start, end;       // of the unit's KV tokens
  int visible_end;      // all rows of this CTA see the tiles before this token
  Rows rows;
  Output output;

  DEVICE uint32 parity(int i) const { return base + i >> 1 & 1; }

  // Step 9 of tile `i` of the unit, but for the wait and the arrival.
  DEVICE void issue_peer_pv(int i) {
    wait(p_stored + kPeer * 8, parity(i));
    float alpha[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float row_max = shared.row_max[kPeer][line + 8 * r];
      alpha[r] = rescale_factor(rows.row_max[r], row_max);
      rows.row_max[r] = row_max, rows.row_sum[r] *= alpha[r];
    }
    const int visible = end - start - i * kTile;
    if (visible < kTile) zero_values(peer_stage + SELF * kHalfBytes, visible, kBarrier);
    rescale(output, alpha);
    fence_registers(output);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
      wgmma_ss_mn(output, operand(peer_p + k * 2), operand(peer_values + k * (2 * kGroupBytes / 16)));
    wgmma_commit();
  }

  template <int PENDING>
  DEVICE void end_peer_pv() {
    wgmma_wait<PENDING>();
    fence_registers(output);
    release(shared_address(&shared.empty[kPeer][SELF]));
  }

  // Steps 5 to 8 of tile `i` of the unit, which this consumer owns, and step 9 of the one before it if FOLLOWS.
  template <bool FOLLOWS>
  DEVICE void attend(int i) {
    constexpr bool kKeys = kKeysFirst[SELF];
    Logits logits;
    if (FOLLOWS && !kKeys) issue_peer_pv(i - 1);
    issue_qk<SELF>(logits, query, keys, full, parity(i), [&] {
      if (FOLLOWS && !kKeys) end_peer_pv<2>();
    });
    if (FOLLOWS && kKeys) {
      issue_peer_pv(i - 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    fence_registers(logits);
    const int first = start + i * kTile, visible = end - first;
    if (first + kTile > visible_end) mask(logits, rows, first);
    float alpha[2];
    update(logits, rows, arguments.factor, alpha, &shared.row_max[SELF][line]);
    Probabilities probabilities;
    round(probabilities, logits);
    named_sync(kBarrier, kConsumerThreads);
    store_probabilities(own_stage + kRotary * kBlockBytes, probabilities);
    arrive_by_warp(p_stored + SELF * 8);
    if (visible < kTile) zero_values(own_stage + SELF * kHalfBytes, visible, kBarrier);
    if (FOLLOWS && kKeys) end_peer_pv<0>();
    rescale(output, alpha);
    fence_registers(output);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k)
      wgmma_rs(output, probabilities[k], operand(own_values + k * (2 * kGroupBytes / 16)));
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(output);
    release(shared_address(&shared.empty[SELF][SELF]));
  }

  DEVICE void run() {
    const uint32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const int lane = threadIdx.x % 32;
    for (uint32 n = 0;; ++n) {
      wait(q_full, n & 1);
      int unit[7];
#pragma unroll
      for (int i = 0; i < 7; ++i) unit[i] = uniform(shared.unit[i]);
      const int count = unit[1], position = unit[2], first_packed_row = unit[6];
      if (count <= 0) return;
      start = unit[3], end = unit[4];
      visible_end = p.causal ? min(end, causal_end(position, p.row_of(first_packed_row))) : end;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = p.row_of(first_packed_row + line + 8 * r);
        rows.end[r] = (p.causal ? min(end, causal_end(position, row)) : end) - lane % 4 * 2;
        rows.row_max[r] = -kInfinity, rows.row_sum[r] = 0;
      }
#pragma unroll
      for (int i = 0; i < kHalf / 2; ++i) output[i] = 0;

      const int tiles = (end - start + kTile - 1) / kTile;
      int i = (base ^ SELF) & 1;
      if (i == 0 && tiles > 0) {
        attend<false>(0);
        i = 2;
      }
      for (; i < tiles; i += 2) attend<true>(i);
      arrive_by_warp(q_empty);
      if (tiles > 0 && (base + tiles - 1 & 1) != SELF) {
        issue_peer_pv(tiles - 1);
        end_peer_pv<0>();
      }
      base += max(tiles, 0);

      float sums[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r] = sum_of_quad(rows.row_sum[r]);
        if (lane % 4 == 0) shared.row_sum[n & 1][SELF][line + 8 * r] = sums[r];
      }
      named_sync(kBothConsumers, 2 * kConsumerThreads);
#pragma unroll
      for (int r = 0; r < 2; ++r) sums[r] += shared.row_sum[n & 1][kPeer][line + 8 * r];
      store(SELF, output, rows, sums, p, arguments.results, unit);
    }
  }
};

}  // namespace

// Grid: any number n of clusters of CLUSTER CTAs; the host launches as many as fill the SMs, or one for each unit if
//     there are fewer. Cluster c runs units c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by
//     length, so waves in turn forwards and backwards balance.
// Owns: a CTA the rows of its 64 packed rows of each unit in `out` and `lse`, or their partial results in `partial`.
// Loop invariant of a consumer, at the top for own tile j: O, row_max and row_sum include the tiles up to j-2, own ones
//     alone in row_sum, relative to row_max; the stage of tile j-1 holds its P or will.
// Barriers: full, one for each stage and quarter of the latent columns: an arrival of producer KV, and the bytes that
//     the CTAs of the cluster load. empty, one for each stage and half: an arrival of each warp of that half's consumer
//     in each CTA. p_stored, one for each consumer: an arrival of each of its warps. q_full: an arrival and the bytes,
//     or an arrival of each thread that copies. q_empty: an arrival of each consumer warp. Named barriers: the threads
//     of a consumer, when all have their logits; all consumer threads, when both have stored row_sum. A cluster barrier
//     at the start.
// Bound by: tensor cores for 128 heads, with reading KV from memory close; reading KV for few heads.
extern "C" __global__ void __launch_bounds__(384, 1) mla(
    const char* q_nope,                            // [rows, heads, 512]
    const char* q_pe,                              // [rows, heads, 64]
    const __grid_constant__ TensorMap q_nope_map,  // [8, rows, heads, 64]
    const __grid_constant__ TensorMap q_pe_map,    // [1, rows, heads, 64]
    const __grid_constant__ TensorMap ckv,         // [num_pages, page_size, 512]
    const __grid_constant__ TensorMap kpe,         // [num_pages, page_size, 64]
    void* out,                                     // [rows, heads, 512]
    float* lse,                                    // [rows, heads] or null
    float* partial,                                // [slots, tile_rows, heads, 512], then the LSE without 512
    const int* qo_indptr,                          // [max_batch + 1]
    const int* kv_indices,                         // [max_pages]
    const int* work,                               // [max_items, kWorkStride]
    float scale,                                   // of the logits
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head, int64 stride_qb_row, int64 stride_qb_head,  // elements
    int boxed,                                     // whether a box of the queries' maps is 64 packed rows
    int heads,
    int page_size,                                 // a multiple of kTile
    int tile_rows,                                 // query rows of a work item
    int num_items,
    int num_units,                                 // blocks of all items
    int causal,
    int early,                                     // whether the plan may be read before earlier kernels end
    int out_type) {
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const Problem p = {
      .qo_indptr = qo_indptr, .kv_indices = kv_indices, .work = work, .rows = rows, .num_pages = num_pages,
      .max_pages = max_pages, .max_items = max_items, .max_batch = max_batch, .heads = heads, .page_size = page_size,
      .tile_rows = tile_rows, .num_items = num_items, .num_units = num_units, .causal = causal != 0,
      .early = early != 0,
  };
  const int warp = uniform(threadIdx.x / 32), rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    if (rows > 0 && num_pages > 0)  // the maps of no elements are zeros
      prefetch_map(&ckv), prefetch_map(&kpe), prefetch_map(&q_nope_map), prefetch_map(&q_pe_map);
    for (auto& stage : shared.full)
      for (uint64& barrier : stage) init_barrier(shared_address(&barrier), 1);
    for (auto& stage : shared.empty)
      for (uint64& barrier : stage) init_barrier(shared_address(&barrier), kConsumerWarps * CLUSTER);
    for (uint64& barrier : shared.p_stored) init_barrier(shared_address(&barrier), kConsumerWarps);
    init_barrier(shared_address(&shared.q_full), boxed ? 1 : kQueryThreads);
    init_barrier(shared_address(&shared.q_empty), 2 * kConsumerWarps);
    fence_barrier_init();
  }
  if (CLUSTER == 1)
    __syncthreads();
  else
    cluster_sync_after_init();
  if (warp < 4) {
    decrease_registers<40>();
    const Queries queries = {
        .latent_map = &q_nope_map, .rotary_map = &q_pe_map, .latent = q_nope, .rotary = q_pe,
        .latent_row = stride_q_row, .latent_head = stride_q_head, .rotary_row = stride_qb_row,
        .rotary_head = stride_qb_head, .boxed = boxed != 0,
    };
    if (warp == 0)
      produce(p, {.latent = &ckv, .rotary = &kpe}, shared, rank);
    else if (warp >= 2)
      produce_queries(p, queries, shared, rank);
    else
      wait_for_earlier_kernels(), launch_later_kernels();
  } else {
    increase_registers<232>();
    const Results results = {.out = out, .lse = lse, .partial = partial, .slots = slots, .out_type = out_type};
    const Arguments arguments = {.factor = scale * kLog2e, .results = results};
    wait_for_earlier_kernels();
    launch_later_kernels();
    if (warp < 8)
      Consumer<0>{p, arguments, shared}.run();
    else
      Consumer<1>{p, arguments, shared}.run();
  }
}

}  // namespace attn_ops
