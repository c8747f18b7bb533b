// Multi-head latent attention on Hopper for few packed rows: with swapped operands, persistent and warp-specialised,
// one producer and one consumer warpgroup in each CTA.
//
// Compiled for PACKED_ROWS (of a unit, 16 or 32), SPLITS (CTAs with the same packed rows: 1 or 2), DTYPE (1 float16, 2
// bfloat16), KV_FP8 (1 if the cache is FP8, which is converted to that type) and KV_CP_ASYNC (1 if KV tiles are copied
// token by token, from pages of any size). The other sizes are parameters, as of `mla.cu`.
//
// Both products are transposed: the M of WGMMA, 64, is tokens in S^T = K Q^T and value columns in O^T = V^T P^T, and
// its N is packed rows. So 16 packed rows take a quarter of the products that 64 take, and one warpgroup holds all 512
// value columns of its rows. A KV tile is both K-major (keys) and MN-major (values) operand A.
//
// Packed row p of a work item is query row p / heads of the item and head p % heads. A unit is PACKED_ROWS packed rows
// of one work item. With SPLITS 2, each CTA of a cluster has half of its KV tiles, and they merge their results
// (`mla_merge.cuh`). KV tiles are as in `mla.cu`: 64 tokens of 512 latent and 64 rotary columns.
//
// Roles
// -----
// warp 0            producer KV: KV tiles, by TMA into two stages
// warp 1            initialises barriers
// warps 2, 3        producer Q: the queries of the unit. One thread, by TMA, if PACKED_ROWS are a box of whole query
//                   rows or of heads of one row; otherwise all threads, by cp.async
// warps 0 to 3      with KV_CP_ASYNC all are producers KV, as in `mla.cu`
// warpgroup 1       with KV_FP8 the converters: FP8 tiles become 16-bit ones
// last warpgroup    consumer: attention
//
// All producers walk the units of the CTA by themselves (`Schedule`). Producer Q passes them to the consumer.
//
// Schedule
// --------
// KV tiles are counted over all units of a CTA. Tile j lies in stage j % 2. A stage has a full barrier for each quarter
// of the latent columns, and an empty barrier for each half. Below, O^T is the accumulator [512, PACKED_ROWS].
//
// prologue
//     0.  [all]           warp 1 initialises barriers; arrive on the cluster barrier; producers read their first unit,
//                         if the plan is early; wait for the cluster barrier; griddepcontrol.wait
// for each unit n
//     1.  [producer Q]    wait for q_empty; write the unit and load its queries; they complete q_full
//     2.  [consumer]      wait for q_full
// mainloop, for each KV tile j of the unit
//     3.  [producer KV]   half by half: wait for empty; load its two quarters; they complete their full. The rotary
//                         columns count for the last quarter.
//                         With KV_FP8, wait for empty of the lower half; load the quarters into it, and when the upper
//                         half is empty, the rotary columns; they complete their fp8_full.
//                         With KV_CP_ASYNC each producer KV copies two quarters of its tokens, zeros from the end on,
//                         those of the second half also the rotary columns. All lanes arrive on full, or fp8_full, when
//                         their copies have ended
//         [converters]    wait for empty of the upper half; quarter by quarter, the upper ones first: wait for
//                         fp8_full; convert the tokens of this warp, in the stage; arrive on full
//     4.  [consumer]      quarter by quarter: wait for full, and for what threads copied execute a proxy fence; issue
//                         S^T = K_j Q^T
//     5.  [consumer]      wait for S^T; mask; maxima over the tokens of each warp, then over the warps by shared
//                         memory; online softmax; store P^T as a K-major operand; rescale O^T, if a row_max has changed
//     6.  [consumer]      half by half: O^T += V_j^T P^T; arrive on empty
// epilogue of the unit
//     7.  [consumer]      arrive on q_empty; sums over the warps
//     8.  [consumer]      with SPLITS 2, each warp with the same one of the other CTA: expect bytes on merge_full;
//                         arrive on merge_ready of the partner; wait for merge_ready; send it row_max, row_sum and half
//                         of the columns of O, into its `results`, which completes its merge_full; wait for merge_full;
//                         add what has come; wait until all warps have read it
//     9.  [consumer]      divide by l; store the LSE; 256 columns at a time: O, transposed, to shared memory, and
//                         from there to global memory, partial results by bulk stores
//
// The consumer does these steps one after the other: where reading KV bounds, the next tile is on its way meanwhile.
//
// Memory after the last token may hold NaN, which a probability of 0 would not hide. Where the KV ends inside a tile,
// the consumer sets these values to 0 in step 5, when all its warps have their logits.
#define CLUSTER 1  // CTAs with the same KV tiles

#include "mla_producer.cuh"
#if KV_CP_ASYNC
#include "mla_token_producer.cuh"
#endif
#include "mla_swap_ab_consumer.cuh"
#include "mla_swap_ab_shared.cuh"

namespace attn_ops {

// Grid: any number n of clusters; the host launches as many as run at the same time, or one for each unit if there are
//     fewer. Cluster c runs units c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by length, so
//     waves in turn forwards and backwards balance.
// Owns: a CTA the rows of its packed rows of each unit in `out` and `lse`, or their partial results in `partial`;
//     of these 1 / SPLITS of the columns, and the LSE if it has the first.
// Loop invariant of the consumer, at the top for tile j: O^T, row_max and row_sum include the tiles before j, row_sum
//     those tokens of them that the thread has, relative to row_max, which all its threads have alike.
// Barriers: full, one for each stage and quarter of the latent columns: an arrival of producer KV, and the bytes, or an
//     arrival of each converter warp, or with KV_CP_ASYNC of each thread that copies the quarter. fp8_full, as full
//     without converters, and once more after the last tile. empty, one for each stage and half: an arrival of each
//     consumer warp. q_full: an arrival and the bytes, or an arrival of each thread that copies. q_empty: an arrival of
//     each consumer warp. merge_full, one for each consumer warp: an arrival of the warp, and the bytes from its
//     partner. merge_ready, one for each consumer warp: an arrival of the partner. Named barrier: the threads of the
//     consumer, when all have stored maxima or sums, or P, or columns of the result, or have read the latter or what
//     the other CTA has sent.
// Bound by: reading KV from memory.
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla_swap_ab(
    const char* q_nope,                            // [rows, heads, 512]
    const char* q_pe,                              // [rows, heads, 64]
    const __grid_constant__ TensorMap q_nope_map,  // [8, rows, heads, 64]
    const __grid_constant__ TensorMap q_pe_map,    // [1, rows, heads, 64]
#if KV_CP_ASYNC
    const char* ckv,                               // [num_pages, page_size, 512], of any strides
    const char* kpe,                               // [num_pages, page_size, 64]
#else
    const __grid_constant__ TensorMap ckv,         // [num_pages, page_size, 512]
    const __grid_constant__ TensorMap kpe,         // [num_pages, page_size, 64]
#endif
    void* out,                                     // [rows, heads, 512]
    float* lse,                                    // [rows, heads] or null
    float* partial,                                // [slots, tile_rows, heads, 512], then the LSE without 512
    const int* qo_indptr,                          // [max_batch + 1]
    const int* kv_indices,                         // [max_pages]
    const int* work,                               // [max_items, kWorkStride]
    float scale,                                   // of the logits
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head, int64 stride_qb_row, int64 stride_qb_head,  // elements
    int boxed,                                     // whether a box of the queries' maps is PACKED_ROWS
    int heads,
#if KV_CP_ASYNC
    int64 stride_ckv_page, int64 stride_ckv_token, int64 stride_kpe_page, int64 stride_kpe_token,  // elements
#endif
    int page_size,                                 // with TMA a multiple of kTile
    int tile_rows,                                 // query rows of a work item
    int num_items,
    int num_units,                                 // blocks of all items
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
    if (rows > 0 && num_pages > 0) {  // the maps of no elements are zeros
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
