// Multi-head latent attention on Hopper: persistent and warp-specialised. A CTA has one producer and two consumer
// warpgroups, and with KV_FP8 a converter warpgroup.
//
// Compiled for
//     CLUSTER      CTAs that share KV tiles and have different packed rows: 1 or 2
//     SPLITS       CTAs that have the same packed rows and different KV tiles: 1, or with CLUSTER 1 also 2
//     DTYPE        type of the queries and of the WGMMA operands: 1 float16, 2 bfloat16
//     KV_FP8       1: the cache is FP8, and KV tiles are converted to DTYPE
//     KV_CP_ASYNC  1: KV tiles are copied token by token by cp.async, from pages of any size; CLUSTER is 1
// Head count, strides, page size, the causal bound and the type of the output are parameters.
//
// There is one KV head. The key of a token is 512 latent and 64 rotary columns, and its value is the latent columns: a
// KV tile of 64 tokens is loaded once and is an operand of both products. With TMA a KV tile lies in one page. Packed
// row p of a work item is query row p / heads of the item and head p % heads. A unit is 64 * CLUSTER packed rows of one
// work item. CLUSTER * SPLITS CTAs, a cluster, compute a unit. With CLUSTER 2, each CTA has 64 of the packed rows,
// loads a part of every KV tile and multicasts that part to both CTAs, so that a tile is read from L2 once. With SPLITS
// 2, both CTAs have the same packed rows, each has half of the KV tiles, and they merge their results
// (`mla_merge.cuh`).
//
// Both consumers of a CTA have the CTA's 64 packed rows. A consumer computes the logits of every second KV tile, its
// own tiles, and multiplies the probabilities of all tiles by its half of the value columns: the accumulator [64, 512]
// does not fit in the registers of one warpgroup.
//
// Roles
// -----
// warp 0            producer KV: loads KV tiles by TMA into two stages
// warp 1            initialises barriers
// warps 2, 3        producer Q: loads the queries of a unit. If the 64 packed rows of the CTA are a TMA box (whole
//                   query rows, or heads of one query row), one thread by TMA; otherwise all threads by cp.async
// warps 0 to 3      with KV_CP_ASYNC all four warps are producers KV: warp w copies half w % 2 of the latent columns of
//                   32 tokens. Before the tiles of a unit, warps 2 and 3 are producer Q
// warpgroup 1       with KV_FP8: converters, which convert FP8 KV tiles to DTYPE
// last warpgroups   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers
//
// Every producer warp iterates over the units of the cluster (`Schedule`). Producer Q passes units to the consumers
// through shared memory.
//
// Schedule
// --------
// Tile j is KV tile j of the CTA, counted over all its units. Tile j lies in stage j % 2, and consumer j % 2 owns it.
// A stage has a full barrier for each quarter of the latent columns, and an empty barrier for each half. Below, `own`
// is the consumer that owns tile j and `peer` is the other consumer. V_j[c] is the half of the values of tile j that
// consumer c multiplies, and empty[c] is the empty barrier of this half. O[c] is the accumulator [64, 256] of consumer
// c. S_j are the logits and P_j the probabilities of tile j.
//
// prologue
//     0.  [all]           warp 1 initialises barriers; arrive on the cluster barrier; setmaxnreg. If `early`, producers
//                         read their first unit. Wait for the cluster barrier; griddepcontrol.wait
// for each unit n
//     1.  [producer Q]    wait for q_empty; write the unit to shared memory and load its queries, which completes
//                         q_full
//     2.  [consumer]      wait for q_full
// mainloop, for each KV tile j of the unit
//     3.  [producer KV]   wait for empty[own], on which the warps that read this half arrive, of all CLUSTER CTAs; load
//                         the quarters of V_j[own], which complete their full barriers. A CTA loads one block of 64
//                         columns of each quarter, or with CLUSTER 1 both, and multicasts it to all CLUSTER CTAs
//     4.  [producer KV]   wait for empty[peer]; load the quarters of V_j[peer] like step 3, and the rotary columns,
//                         which complete the full barrier of the last quarter.
//                         With KV_FP8, in place of steps 3 and 4: wait for empty[own]; load the FP8 quarters into the
//                         memory of V_j[own] (with CLUSTER 2 a CTA loads two of the four, and multicasts); wait for
//                         empty[peer]; load the rotary columns. The loads complete the fp8_full barriers
//         [producers KV]  with KV_CP_ASYNC, in place of these loads: each warp copies two quarters of its tokens, and
//                         zeros for tokens after the end. The rotary columns are copied by the warps whose half of the
//                         stage is released last, with KV_FP8 by the warps of the last two quarters. All lanes arrive
//                         on full, or with KV_FP8 on fp8_full, when their copies are complete
//         [converters]    with KV_FP8: wait for empty[peer]; for each quarter, those of V_j[peer] first: wait for
//                         fp8_full; convert the tokens of this warp inside the stage; arrive on full
//     5.  [consumer own]  for each quarter: wait for full; with KV_CP_ASYNC and a 16-bit cache, proxy fence; issue the
//                         WGMMA of this quarter in S_j = Q K_j^T
//     6.  [consumer own]  wait for S_j; mask; online softmax: store row_max for the peer; compute P_j and alpha
//     7.  [consumer own]  wait until all warps of this consumer have S_j; store P_j over the rotary columns; arrive on
//                         p_stored[own]
//     8.  [consumer own]  O[own] *= alpha, if a row_max of the warp has changed; O[own] += P_j V_j[own]; arrive on
//                         empty[own] in CLUSTER CTAs
//     9.  [consumer peer] wait for p_stored[own]; read row_max; O[peer] *= alpha, if a row_max of the warp has changed;
//                         O[peer] += P_j V_j[peer]; arrive on empty[peer] in CLUSTER CTAs
// epilogue of the unit
//     10. [consumer]      with SPLITS 1 and no partial result, arrive on q_empty, before step 9 of the unit's last
//                         tile; exchange the row_sum of own tiles with the peer. After this exchange both consumers
//                         have read the query
//     11. [consumer]      with SPLITS 2, each warp and its partner, the same warp of the other CTA: expect bytes on
//                         merge_full; arrive on the partner's merge_ready; wait for merge_ready; send row_max, row_sum
//                         and half of the columns of O into the memory of the partner's query, which completes the
//                         partner's merge_full; wait for merge_full; merge the received state
//     12. [consumer]      divide by l. Without a slot: store columns of the output; the consumer of column 0 also
//                         stores the LSE. With a slot: store the partial result through the memory of the query, by
//                         bulk stores, and wait until the bulk stores have read it. With SPLITS 2 or a slot, arrive on
//                         q_empty
// end
//     13. [producer KV]   with CLUSTER 2: wait for all empty barriers, so that this CTA does not exit before the last
//                         arrivals of the other CTA
//
// With SPLITS 2, the waits of step 11 likewise keep the CTA alive until the last store and arrival of the other CTA.
//
// The row maximum passes through the tiles in order: the owner of tile j continues from the row_max that it read in
// step 9 of tile j-1. A consumer with kKeysFirst issues step 5 of tile j before step 9 of tile j-1, whose product then
// overlaps step 6 of tile j. The other consumer issues step 9 of tile j-1 first. So one consumer has a product in
// flight while the other computes a softmax. With KV_FP8 or KV_CP_ASYNC both consumers issue step 9 first: step 5 may
// wait for a conversion or for copies, and step 9 releases half a stage.
//
// Memory after the last token may hold NaN, which a probability of 0 would not hide. If the KV ends inside a tile, each
// consumer sets the values after the end, in its half of the columns, to 0 before it multiplies them: the owner after
// step 7, the peer in step 9. By then S_j is complete, and no other consumer reads this half.
#include "mla_consumer.cuh"
#include "mla_producer.cuh"
#include "mla_shared.cuh"
#if KV_CP_ASYNC
#include "mla_token_producer.cuh"
#endif

namespace attn_ops {

// Grid: any number n of clusters. The host launches as many as run at the same time, or one per unit if there are fewer
//     units. Cluster c computes units c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by length, so
//     alternating the direction of the waves balances the clusters.
// Owns: for each unit, the rows of the CTA's 64 packed rows in `out` and `lse`, or their partial results in `partial`.
//     With SPLITS 2 a CTA stores half of the columns, and the CTA that stores column 0 stores the LSE.
// Loop invariant of a consumer, before step 5 of own tile j: O and row_max include the tiles up to j-2, and row_sum the
//     own tiles of these, relative to row_max. The peer has stored P of tile j-1 in its stage, or will.
// Barriers, with their arrivals per phase:
//     full         per stage and quarter of the latent columns: one of producer KV, and the bytes that CLUSTER CTAs
//                  load by TMA; with KV_CP_ASYNC one of each thread that copies the quarter; with KV_FP8 one of each
//                  converter warp
//     fp8_full     like full without KV_FP8; the first quarter's has one more phase, after the last tile
//     empty        per stage and half of the latent columns: one of each warp, in CLUSTER CTAs, of the consumer that
//                  multiplies this half
//     p_stored     per consumer: one of each warp of the consumer
//     q_full       one and the bytes of the queries, or one of each thread that copies queries
//     q_empty      one of each consumer warp
//     merge_full   per consumer warp: one of this warp, and the bytes from its partner; a phase for each unit of which
//                  the warp has rows
//     merge_ready  per consumer warp: one of its partner; phases as of merge_full
//     named        kOneConsumer + c: the threads of consumer c, when all have their logits, or have stored zeros.
//                  kBothConsumers: all consumer threads, when both have stored row_sum, and so have read the query
//     cluster      once, after the initialisation of the barriers
// Bound by: tensor cores for 128 heads, with reading KV from memory close to that; reading KV for few heads.
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla(
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
    float* partial,                                // `Partial` of [slots, tile_rows, heads]
    const int* qo_indptr,                          // [max_batch + 1]
    const int* kv_indices,                         // [max_pages]
    const int* work,                               // [max_items, kWorkStride]
    float scale,                                   // of the logits
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head, int64 stride_qb_row, int64 stride_qb_head,  // elements
    int boxed,                                     // whether a box of q_nope_map and q_pe_map has 64 packed rows
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
  const int rank = CLUSTER * SPLITS == 1 ? 0 : cluster_rank(), part = CLUSTER > 1 ? rank : 0;
  const Problem p = {
      .qo_indptr = qo_indptr, .kv_indices = kv_indices, .work = work, .rows = rows, .num_pages = num_pages,
      .max_pages = max_pages, .max_items = max_items, .max_batch = max_batch, .heads = heads, .page_size = page_size,
      .tile_rows = tile_rows, .num_items = num_items, .num_units = num_units, .unit_rows = kUnitRows,
      .cluster = CLUSTER * SPLITS, .split = rank - part, .splits = SPLITS, .causal = causal != 0,
      .early = early != 0,
  };
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 32) {
    if (rows > 0 && num_pages > 0) {  // maps of tensors without elements are zeros
#if !KV_CP_ASYNC
      prefetch_map(&ckv), prefetch_map(&kpe);
#endif
      prefetch_map(&q_nope_map), prefetch_map(&q_pe_map);
    }
    init_barriers(shared, kConsumerWarps * CLUSTER, 2 * kConsumerWarps, boxed);
    for (uint64& barrier : shared.p_stored) init_barrier(shared_address(&barrier), kConsumerWarps);
    fence_barrier_init();
  }
  cluster_arrive_after_init();
  if (warp < 4) {
    decrease_registers<kRegisters.producer>();
    const Queries queries = {
        .latent_map = &q_nope_map, .rotary_map = &q_pe_map, .latent = q_nope, .rotary = q_pe,
        .latent_row = stride_q_row, .latent_head = stride_q_head, .rotary_row = stride_qb_row,
        .rotary_head = stride_qb_head, .boxed = boxed != 0,
    };
#if KV_CP_ASYNC
    const TokenSource latent = {ckv, kCacheBytes * stride_ckv_page, kCacheBytes * stride_ckv_token};
    const TokenSource rotary = {kpe, kCacheBytes * stride_kpe_page, kCacheBytes * stride_kpe_token};
    const TokenProducer<true, Shared> producer = {.p = p, .latent = latent, .rotary = rotary, .shared = shared};
    producer.run<kPackedRows>(queries);
#else
    if (warp == 0)
      produce<CLUSTER, true>(p, {.latent = &ckv, .rotary = &kpe}, shared, part);
    else if (warp >= 2)
      produce_queries<kPackedRows>(p, queries, shared, part * kPackedRows);
    else
      end_prologue();
#endif
#if KV_FP8
  } else if (warp < kFirstConsumerWarp) {
    decrease_registers<kRegisters.converter>();
    end_prologue();
    convert_tiles<true>(Fp8Type(kv_type), shared);
#endif
  } else {
    increase_registers<kRegisters.consumer>();
    const Results results = {.out = out, .lse = lse, .partial = partial, .slots = slots, .out_type = out_type};
#if !KV_FP8
    constexpr const float* kv_scale = nullptr;
#endif
    const Arguments arguments = {.factor = scale * kLog2e, .results = results, .kv_scale = kv_scale};
    const int consumer_warp = warp - kFirstConsumerWarp;
    const Merge merge = {
        .memory = shared_address(shared.query) + consumer_warp * kResultBytes,
        .full = shared_address(&shared.merge_full[consumer_warp]),
        .ready = shared_address(&shared.merge_ready[consumer_warp]), .split = p.split,
    };
    end_prologue();
    if (consumer_warp < kConsumerWarps)
      Consumer<0>{.p = p, .arguments = arguments, .shared = shared, .merge = merge}.run();
    else
      Consumer<1>{.p = p, .arguments = arguments, .shared = shared, .merge = merge}.run();
  }
  stop_clocks();
}

}  // namespace attn_ops
