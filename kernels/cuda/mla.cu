// Multi-head latent attention on Hopper: persistent and warp-specialised, one producer and two consumer warpgroups in
// each CTA.
//
// Compiled for CLUSTER (CTAs with the same KV tiles: 1 or 2), SPLITS (CTAs with the same packed rows: 1, or 2 where
// CLUSTER is 1), DTYPE (1 float16, 2 bfloat16), KV_FP8 (1 if the cache is FP8, which is converted to that type) and
// KV_CP_ASYNC (1 if KV tiles are copied token by token, from pages of any size; CLUSTER is then 1).
// Head count, strides, page size, the causal bound and the type of the output are parameters.
//
// There is one KV head. The key of a token is 512 latent and 64 rotary columns, and its value is the latent: a KV tile
// of 64 tokens is loaded once and read twice. For TMA it lies in one page. Packed row p of a work item is query row p /
// heads of the item and head p % heads. A unit is a block of 64 * CLUSTER packed rows of one work item. A cluster has
// it. With CLUSTER 2, each of its CTAs has 64 of the packed rows, loads a part of every KV tile and multicasts it to
// both, so that a tile is read from L2 once. With SPLITS 2, its CTAs have the same packed rows and each half of the KV
// tiles, and merge their results (`mla_merge.cuh`).
//
// Both consumers of a CTA have its 64 packed rows. Each computes the logits of every second KV tile, its own, and
// multiplies the probabilities of all tiles with its half of the value columns: the accumulator [64, 512] does not fit
// in the registers of one warpgroup.
//
// Roles
// -----
// warp 0            producer KV: KV tiles, by TMA into two stages
// warp 1            initialises barriers
// warps 2, 3        producer Q: the queries of the unit. One thread, by TMA, if 64 packed rows are a box of whole query
//                   rows or of heads of one row; otherwise all threads, by cp.async
// warps 0 to 3      with KV_CP_ASYNC all are producers KV: warp w copies half w % 2 of the latent columns, of 32
//                   tokens. Warps 2 and 3 are producer Q before the tiles of a unit
// warpgroup 1       with KV_FP8 the converters: FP8 tiles become 16-bit ones
// last warpgroups   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers
//
// All producers walk the units of the cluster by themselves (`Schedule`). Producer Q passes them to the consumers.
//
// Schedule
// --------
// KV tiles are counted over all units of a CTA. Tile j lies in stage j % 2, and consumer j % 2 owns it. A stage has a
// full barrier for each quarter of the latent columns, and an empty barrier for each half. Below, `own` is the owner of
// tile j and `peer` the other consumer; S is a tile of logits, P of probabilities, O[c] the accumulator [64, 256] of
// consumer c, V[c] its half of the values.
//
// prologue
//     0.  [all]           warp 1 initialises barriers; arrive on the cluster barrier; setmaxnreg; producers read their
//                         first unit, if the plan is early; wait for the cluster barrier; griddepcontrol.wait
// for each unit n
//     1.  [producer Q]    wait for q_empty; write the unit and load its queries; they complete q_full
//     2.  [consumer]      wait for q_full
// mainloop, for each KV tile j of the unit
//     3.  [producer KV]   wait for empty[own], an arrival of each warp that read it in CLUSTER CTAs; load the quarters
//                         of V[own], this CTA's blocks of 64 columns, to these CTAs; they complete their full
//     4.  [producer KV]   wait for empty[peer]; the same for V[peer]. The rotary columns count for the last quarter.
//                         With KV_FP8, in place of steps 3 and 4: wait for empty[own]; load the quarters, this CTA's
//                         half of them, into V[own] of these CTAs, and when empty[peer] is complete, the rotary
//                         columns; they complete their fp8_full
//         [producers KV]  with KV_CP_ASYNC, in place of these loads: each copies two quarters of its tokens, zeros from
//                         the end on; those whose half is released last, or with KV_FP8 the second ones, also the
//                         rotary columns. All lanes arrive on full, or fp8_full, when their copies have ended
//         [converters]    wait for empty[peer]; quarter by quarter, those of V[peer] first: wait for fp8_full; convert
//                         the tokens of this warp, in the stage; arrive on full
//     5.  [consumer own]  quarter by quarter: wait for full, and for what threads copied execute a proxy fence; issue
//                         S_j = Q K_j^T
//     6.  [consumer own]  wait for S_j; mask, online softmax: store row_max for the peer; P_j and alpha
//     7.  [consumer own]  when all its warps have S_j: store P_j over the rotary columns; arrive on p_stored[own]
//     8.  [consumer own]  O[own] *= alpha, if a row_max of the warp has changed; O[own] += P_j V_j[own]; arrive on
//                         empty[own] of these CTAs
//     9.  [consumer peer] wait for p_stored[own]; read row_max; O[peer] *= alpha, if one has changed; O[peer] +=
//                         P_j V_j[peer]; arrive on empty[peer] of these CTAs
// epilogue of the unit
//     10. [consumer]      arrive on q_empty, but with SPLITS 2 or for a partial result; exchange the row_sum of own
//                         tiles. With that both consumers have read the query
//     11. [consumer]      with SPLITS 2, each warp with the same one of the other CTA: expect bytes on merge_full;
//                         arrive on merge_ready of the partner; wait for merge_ready; send it row_max, row_sum and half
//                         of the columns of O, into the memory of its query, which completes its merge_full; wait for
//                         merge_full; add what has come
//     12. [consumer]      divide by l; store the columns of the output, and the LSE with the first one. Or the partial
//                         result, through the memory of the query, by bulk stores; when they have read it, or with
//                         SPLITS 2, arrive on q_empty
// end
//     13. [producer KV]   wait for all of empty: the CTA stays until the others have arrived for the last time
//
// What the other CTA sends in step 11, and its arrivals, are waited for there: the CTA stays until then too.
//
// The row maximum passes through the tiles in order: the owner of tile j continues with the row_max that it read in
// step 9 of tile j-1. A consumer of kKeysFirst issues step 5 of its tile before step 9 of the preceding one, which
// then overlaps step 6; the other issues it after. So one of them has a product in flight while the other computes a
// softmax. With KV_FP8 or KV_CP_ASYNC both issue it after: step 5 may wait for a conversion or for copies, and step 9
// releases a stage.
//
// Memory after the last token may hold NaN, which a probability of 0 would not hide. Where the KV ends inside a tile,
// each consumer sets its half of these values to 0 before it multiplies them: after step 7, and in step 9. Then all
// logits of the tile are complete, and no one else reads that half.
#include "mla_consumer.cuh"
#include "mla_producer.cuh"
#include "mla_shared.cuh"
#if KV_CP_ASYNC
#include "mla_token_producer.cuh"
#endif

namespace attn_ops {

// Grid: any number n of clusters; the host launches as many as run at the same time, or one for each unit if
//     there are fewer. Cluster c runs units c, 2n - 1 - c, 2n + c, 4n - 1 - c and so on: plans sort their items by
//     length, so waves in turn forwards and backwards balance.
// Owns: a CTA the rows of its 64 packed rows of each unit in `out` and `lse`, or their partial results in `partial`; of
//     these 1 / SPLITS of the columns, and the LSE if it has the first.
// Loop invariant of a consumer, at the top for own tile j: O, row_max and row_sum include the tiles up to j-2, own ones
//     alone in row_sum, relative to row_max; the stage of tile j-1 holds its P or will.
// Barriers: full, one for each stage and quarter of the latent columns: an arrival of producer KV, and the bytes that
//     CLUSTER CTAs load by TMA, or an arrival of each converter warp, or with KV_CP_ASYNC of each thread that copies
//     the quarter. fp8_full, as full without converters, and once more after the last tile. empty, one for each stage
//     and half: an arrival of each warp of that half's consumer in each CTA. p_stored, one for each consumer: an
//     arrival of each of its warps. q_full: an arrival and the bytes, or an arrival of each thread that copies.
//     q_empty: an arrival of each consumer warp. merge_full, one for each consumer warp, with a phase for each unit of
//     which it has rows: an arrival of the warp, and the bytes from its partner. merge_ready, the same: an arrival of
//     the partner. Named barriers: the threads of a consumer, when all have their logits; all consumer threads, when
//     both have stored row_sum, and with that have read the query. A cluster barrier at the start.
// Bound by: tensor cores for 128 heads, with reading KV from memory close; reading KV for few heads.
extern "C" __global__ void __launch_bounds__(kThreads, 1) mla(
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
    float* partial,                                // `Partial` of [slots, tile_rows, heads]
    const int* qo_indptr,                          // [max_batch + 1]
    const int* kv_indices,                         // [max_pages]
    const int* work,                               // [max_items, kWorkStride]
    float scale,                                   // of the logits
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head, int64 stride_qb_row, int64 stride_qb_head,  // elements
    int boxed,                                     // whether a box of the queries' maps is 64 packed rows
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
    if (rows > 0 && num_pages > 0) {  // the maps of no elements are zeros
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
