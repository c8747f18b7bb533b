// Multi-head latent attention on Hopper for few packed rows: swapped operands, persistent and warp-specialised. A CTA
// has one producer and one consumer warpgroup, and with KV_FP8 a converter warpgroup.
//
// Compiled for
//     PACKED_ROWS  packed rows of a unit: 16 or 32
//     SPLITS       CTAs that have the same packed rows and different KV tiles: 1 or 2
//     DTYPE        type of the queries and of the WGMMA operands: 1 float16, 2 bfloat16
//     KV_FP8       1: the cache is FP8, and KV tiles are converted to DTYPE
//     KV_CP_ASYNC  1: KV tiles are copied token by token by cp.async, from pages of any size
// Head count, strides, page size, the causal bound and the type of the output are parameters.
//
// The M of WGMMA, 64, is tokens in S^T = K Q^T and value columns in O^T = V^T P^T, and its N is packed rows. So 16
// packed rows take a quarter of the WGMMA work of a 64-row tile, and one warpgroup holds all 512 value columns of its
// rows. A KV tile is operand A of both products: K-major as keys, MN-major as values.
//
// Packed row p of a work item is query row p / heads of the item and head p % heads. A unit is PACKED_ROWS packed rows
// of one work item. With SPLITS 2, a cluster of two CTAs computes a unit: each CTA has half of the KV tiles, and they
// merge their results (`mla_merge.cuh`). KV tiles are as in `mla.cu`: 64 tokens of 512 latent and 64 rotary columns.
//
// Roles
// -----
// warp 0            producer KV: loads KV tiles by TMA into two stages
// warp 1            initialises barriers
// warps 2, 3        producer Q: loads the queries of a unit. If PACKED_ROWS packed rows are a TMA box (whole query
//                   rows, or heads of one query row), one thread by TMA; otherwise all threads by cp.async
// warps 0 to 3      with KV_CP_ASYNC all four warps are producers KV, as in `mla.cu`
// warpgroup 1       with KV_FP8: converters, which convert FP8 KV tiles to DTYPE
// last warpgroup    consumer: attention
//
// Every producer warp iterates over the units of the cluster (`Schedule`). Producer Q passes units to the consumer
// through shared memory.
//
// Schedule
// --------
// Tile j is KV tile j of the CTA, counted over all its units. Tile j lies in stage j % 2. A stage has a full barrier
// for each quarter of the latent columns, and an empty barrier for each half. Below, O^T is the accumulator
// [512, PACKED_ROWS].
//
// prologue
//     0.  [all]           warp 1 initialises barriers; arrive on the cluster barrier. If `early`, producers read their
//                         first unit. Wait for the cluster barrier; griddepcontrol.wait
// for each unit n
//     1.  [producer Q]    wait for q_empty; write the unit to shared memory and load its queries, which completes
//                         q_full
//     2.  [consumer]      wait for q_full
// mainloop, for each KV tile j of the unit
//     3.  [producer KV]   for each half of the latent columns: wait for empty; load the two quarters, which complete
//                         their full barriers. The rotary columns complete the full barrier of the last quarter.
//                         With KV_FP8: wait for empty of the lower half; load the four FP8 quarters into the memory of
//                         the lower half; wait for empty of the upper half; load the rotary columns. The loads complete
//                         the fp8_full barriers.
//                         With KV_CP_ASYNC each warp copies two quarters of its tokens, and zeros for tokens after the
//                         end. The warps of the last two quarters also copy the rotary columns. All lanes arrive on
//                         full, or with KV_FP8 on fp8_full, when their copies are complete
//         [converters]    with KV_FP8: wait for empty of the upper half; for each quarter, the upper ones first: wait
//                         for fp8_full; convert the tokens of this warp inside the stage; arrive on full
//     4.  [consumer]      for each quarter: wait for full; with KV_CP_ASYNC and a 16-bit cache, proxy fence; issue the
//                         WGMMA of this quarter in S^T = K_j Q^T
//     5.  [consumer]      wait for S^T; mask; reduce maxima over the tokens of each warp, then over the warps through
//                         shared memory; online softmax; store P^T as a K-major operand; rescale O^T, if a row_max of
//                         the warp has changed
//     6.  [consumer]      for each half of the value columns: O^T += V_j^T P^T; arrive on empty
// epilogue of the unit
//     7.  [consumer]      arrive on q_empty; reduce row sums over the warps
//     8.  [consumer]      with SPLITS 2, each warp and its partner, the same warp of the other CTA: expect bytes on
//                         merge_full; arrive on the partner's merge_ready; wait for merge_ready; send row_max, row_sum
//                         and half of the columns of O into the partner's `results`, which completes the partner's
//                         merge_full; wait for merge_full; merge the received state. Then wait until all warps have
//                         read `results`
//     9.  [consumer]      divide by l; store the LSE; for each 256 columns: store O^T as rows of O in shared memory,
//                         and copy them to global memory, to an aligned workspace by bulk stores
//
// The consumer does these steps one after the other. The loads of the next tile are in flight meanwhile, which is
// enough where reading KV is the bound.
//
// Memory after the last token may hold NaN, which a probability of 0 would not hide. If the KV ends inside a tile, the
// consumer sets the values after the end to 0 in step 5, when all its warps have their logits.
#define CLUSTER 1  // CTAs that share KV tiles

#include "mla_producer.cuh"
#if KV_CP_ASYNC
#include "mla_token_producer.cuh"
#endif
#include "mla_swap_ab_consumer.cuh"
#include "mla_swap_ab_shared.cuh"

namespace attn_ops {

// Grid: any number n of clusters. The host launches as many as run at the same time, or one per unit if there are fewer
//     units. Cluster c computes units c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by length, so
//     alternating the direction of the waves balances the clusters.
// Owns: for each unit, the rows of the unit in `out` and `lse`, or their partial results in `partial`. With SPLITS 2 a
//     CTA stores half of the columns, and CTA 0 of the cluster stores the LSE.
// Loop invariant of the consumer, before step 4 of tile j: O^T, row_max and row_sum include the tiles before j. row_sum
//     is over the tokens of the thread, relative to row_max. row_max of a packed row is equal in all threads.
// Barriers, with their arrivals per phase:
//     full         per stage and quarter of the latent columns: one of producer KV, and the bytes; with KV_CP_ASYNC one
//                  of each thread that copies the quarter; with KV_FP8 one of each converter warp
//     fp8_full     like full without KV_FP8; the first quarter's has one more phase, after the last tile
//     empty        per stage and half of the latent columns: one of each consumer warp
//     q_full       one and the bytes of the queries, or one of each thread that copies queries
//     q_empty      one of each consumer warp
//     merge_full   per consumer warp: one of this warp, and the bytes from its partner
//     merge_ready  per consumer warp: one of its partner
//     named        kConsumer: the threads of the consumer, when all have stored maxima, sums, P or columns of O, or
//                  have read columns of O or the state of the other CTA
//     cluster      once, after the initialisation of the barriers
// Bound by: reading KV from memory.
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_swap_ab(
    const char* q_nope,                            // [rows, heads, 512]
    const char* q_pe,                              // [rows, heads, 64]
    const __grid_constant__ TensorMap q_nope_map,  // [8, rows, heads, 64]
    const __grid_constant__ TensorMap q_pe_map,    // [1, rows, heads, 64]
#if KV_CP_ASYNC
    const char* ckv,                               // [num_pages, page_size, 512]
    const char* kpe,                               // [num_pages, page_size, 64]
#else
    const __grid_constant__ TensorMap ckv,         // [num_pages, page_size, 512]
    const __grid_constant__ TensorMap kpe,         // [num_pages, page_size, 64]
#endif
    void* out,                                     // [rows, heads, 512]
    float* lse,                                    // [rows, heads] or null
    float* partial,                                // [slots, tile_rows, heads, 512], then LSEs without 512
    const int* qo_indptr,                          // [max_batch + 1]
    const int* kv_indices,                         // [max_pages]
    const int* work,                               // [max_items, kWorkStride]
    float scale,                                   // of the logits
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head, int64 stride_qb_row, int64 stride_qb_head,  // elements
    int boxed,                                     // whether a box of q_nope_map and q_pe_map has PACKED_ROWS rows
    int heads,
#if KV_CP_ASYNC
    int64 stride_ckv_page, int64 stride_ckv_token, int64 stride_kpe_page, int64 stride_kpe_token,  // elements
#endif
    int page_size,                                 // with TMA a multiple of kTile
    int tile_rows,                                 // query rows of a work item
    int num_items,
    int num_units,                                 // units of all work items
    int causal,
    int early,                                     // whether the plan may be read before earlier kernels end
#if KV_FP8
    int kv_type,                                   // Fp8Type
    const float* kv_scale,                         // [2] or null
#endif
#if CLOCKS
    int out_type, uint64* clocks) {
  start_clocks(clocks, kThreads / 32);
#else
    int out_type) {
#endif
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int split = SPLITS == 1 ? 0 : cluster_rank();
  const Problem p = {
      .qo_indptr = qo_indptr, .kv_indices = kv_indices, .work = work, .rows = rows, .num_pages = num_pages,
      .max_pages = max_pages, .max_items = max_items, .max_batch = max_batch, .heads = heads, .page_size = page_size,
      .tile_rows = tile_rows, .num_items = num_items, .num_units = num_units, .unit_rows = kUnitRows,
      .cluster = SPLITS, .split = split, .splits = SPLITS, .causal = causal != 0, .early = early != 0,
  };
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 32) {
    if (rows > 0 && num_pages > 0) {  // maps of tensors without elements are zeros
#if !KV_CP_ASYNC
      prefetch_map(&ckv), prefetch_map(&kpe);
#endif
      prefetch_map(&q_nope_map), prefetch_map(&q_pe_map);
    }
    init_barriers(shared, kConsumerWarps, kConsumerWarps, boxed);
    fence_barrier_init();
  }
  cluster_arrive_after_init();
  if (warp < 4) {
    const Queries queries = {
        .latent_map = &q_nope_map, .rotary_map = &q_pe_map, .latent = q_nope, .rotary = q_pe,
        .latent_row = stride_q_row, .latent_head = stride_q_head, .rotary_row = stride_qb_row,
        .rotary_head = stride_qb_head, .boxed = boxed != 0,
    };
#if KV_CP_ASYNC
    const TokenSource latent = {ckv, kCacheBytes * stride_ckv_page, kCacheBytes * stride_ckv_token};
    const TokenSource rotary = {kpe, kCacheBytes * stride_kpe_page, kCacheBytes * stride_kpe_token};
    const TokenProducer<false, Shared> producer = {.p = p, .latent = latent, .rotary = rotary, .shared = shared};
    producer.run<kPackedRows>(queries);
#else
    if (warp == 0)
      produce<CLUSTER, false>(p, {.latent = &ckv, .rotary = &kpe}, shared, 0);
    else if (warp >= 2)
      produce_queries<kPackedRows>(p, queries, shared, 0);
    else
      end_prologue();
#endif
#if KV_FP8
  } else if (warp < kFirstConsumerWarp) {
    end_prologue();
    convert_tiles<false>(Fp8Type(kv_type), shared);
#endif
  } else {
    const Results results = {.out = out, .lse = lse, .partial = partial, .slots = slots, .out_type = out_type};
#if !KV_FP8
    constexpr const float* kv_scale = nullptr;
#endif
    const Arguments arguments = {.factor = scale * kLog2e, .results = results, .kv_scale = kv_scale};
    const Merge merge = {
        .memory = shared_address(shared.results) + (warp - kFirstConsumerWarp) * kMergeBytes,
        .full = shared_address(&shared.merge_full[warp - kFirstConsumerWarp]),
        .ready = shared_address(&shared.merge_ready[warp - kFirstConsumerWarp]), .split = split,
    };
    end_prologue();
    Consumer{.p = p, .arguments = arguments, .shared = shared, .merge = merge}.run();
  }
  stop_clocks();
}

}  // namespace attn_ops
