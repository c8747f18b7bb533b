// Prefill on Hopper: persistent and warp-specialised, one producer and kConsumers consumer warpgroups in each CTA, and
// with FP8 keys and values or RoPE converters.
//
// Compiled for HEAD_DIM_QK, HEAD_DIM_VO, PAGED, DTYPE (1 float16, 2 bfloat16: of the products), CONSUMERS, KV_CP_ASYNC
// (1 if paged keys and values are copied token by token, from pages of any size), CUSTOM_MASK (1 with a packed custom
// mask) and some of
//     KV_FP8  1 if keys and values are FP8, and converted to the type of the query
//     FEW_ROWS  1 beside it for work items of at most 64 packed rows: queries, keys and values are converted to float16
//     Q_FP8   1 if queries, keys and values are e4m3, and multiplied as such. DTYPE is then that of outputs "like the
//             query"
//     ROPE    1 if queries and keys are rotated by their positions (ROPE_LLAMA)
//     ALIBI   1 if logits get the bias of ALiBi
//     SHARED_ROWS  1 with heads of 512, for work items of at most 64 packed rows: the consumers share them
// of which ROPE, ALIBI and Q_FP8 exclude one another, and KV_FP8 excludes ALIBI and Q_FP8.
// Head counts, strides, page size, windows, soft cap, sinks, scales and the type of the output are parameters.
//
// Packed row p of a work item is query row p / group of the item and head p % group of a KV head's group (PackGQA). A
// unit is a block of packed rows of one work item for one KV head: 64 for each consumer. If a work item has 64 at most,
// a unit has 64: two consumers have all of them, take alternate KV tiles and reduce their states at the end
// (`split_kv`). Units of heads of 512 are otherwise: see below.
//
// Roles
// -----
// warp 0            producer K: keys, by TMA into a ring of kKeyStages KV tiles, or parts of them with heads of 512
// warp 1            producer V: values, by TMA into a ring of kValueStages KV tiles
// warps 2, 3        producer Q: the queries of the unit and of the next, into kQueries buffers. One thread, by TMA, if
//                   a group divides 64, as a box then has 64 packed rows; otherwise all threads, by cp.async. Its first
//                   thread is the scheduler, which passes the units of the CTA to the producers. With FP8 products they
//                   also transpose values. With KV_CP_ASYNC, unless they transpose or a loaded tile has 32 tokens, they
//                   are a second producer K and a second producer V
// warpgroups 1, 2   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers
// warpgroup 3       consumer 2 of three, in 16 bits: with heads of 64, and with heads of 128 and shorter KV tiles in
//                   large batches. It has no rows if blocks of a work item have at most 128
//
// With converters, consumers are the last two warpgroups:
// warps 4, 5        converters K: FP8 keys into the ring
// warps 6, 7        converters V: FP8 values into the ring
// warps 4 to 7      with RoPE: rotate queries and keys; with FP8 they convert keys and values too
// With FEW_ROWS and heads of at most 128, warps 4 to 7 are converters K, and 8 to 11 converters V. With heads of 512,
// but for SHARED_ROWS, warps 4 to 7 convert keys and values in turn: a unit has twice as many columns of keys.
//
// The scheduler takes the next unit from a counter (`Schedule`) when producer K has kTilesAhead tiles of a unit left:
// early enough that nobody waits for it, and as late as that allows, so that CTAs end together. If it copies keys
// itself, it takes the next unit after the last tile of this one. With a custom mask the scheduler is a warp, which
// leaves out the KV tiles at both ends of the unit that no row sees. The unit goes to the producers through `unit` in
// shared memory, and from producer Q to the consumers with the queries.
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
//     1.  [producer Q]  scheduler: wait for unit_empty; increment the counter; write the unit; arrive on unit_full
//                       wait for unit_full; wait for q_empty[b]; write its QueryBlock and load its queries; they
//                       complete q_full[b]; arrive on unit_empty
//         [producers K and V]  wait for unit_full, read the unit. Producer V arrives on unit_empty
//     2.  [consumer]    wait for q_full[b]; with heads of 128 in 16 bits without RoPE, load Q into
//                       registers
// mainloop, for each KV tile j of the unit
//     3.  [producer K]  wait for k_empty[j]; expect the bytes of the tile on k_full[j]; issue a TMA load for each box;
//                       load the page numbers of tile j+1. With kTilesAhead tiles of the unit left: arrive on
//                       unit_empty
//     4.  [producer V]  the same with v. Where the KV ends, or a window begins, inside a box: wait for the loads on
//                       `staging`, set the other rows of the box to 0, arrive on v_full[j]. With a custom mask the
//                       same for all tokens of the tile that no row of the unit sees
//         [producers K and V]  with KV_CP_ASYNC, in place of steps 3 and 4: wait for empty; all lanes copy the rows of
//                       the tile's tokens, zeros from the end on, and arrive on full[j] when their copies have ended;
//                       load the page numbers of tile j+1. Each of two producers copies half of the tokens, and the
//                       second ones take step 1 before these. Consumers that read these copies execute a proxy fence
//                       after they have waited for full
//     5.  [consumer]    wait for k_full[j]; issue S_j = Q K_j^T
//     6.  [consumer]    wait for v_full[j-1]; issue O += P_{j-1} V_{j-1}. Not for the first tile
//     7.  [consumer]    wait for S_j, while O is computed; arrive on k_empty[j]
//     8.  [consumer]    bias of ALiBi, soft cap, mask; subtract row_max from row 0 of each thread; in order: wait until
//                       it is this consumer's turn; raise row_max if a logit of the warp is too large; probabilities of
//                       row 0; subtract row_max from row 1; pass the turn on; raise row_max if need be
//     9.  [consumer]    wait for O; arrive on v_empty[j-1]; O *= alpha, if a row_max of the warp was raised; round P_j
//                       of row 0
//     10. [consumer]    probabilities of row 1; round P_j of row 1
// epilogue of the unit
//     11. [consumer]    arrive on q_empty[b]; wait for v_full of the last tile; issue O += P V; with two query buffers,
//                       without split_kv and if unit n+1 has KV tiles: its steps 2 and 5; wait for O; arrive on v_empty
//     12. [consumer]    split_kv: the one with the odd tiles stores its state (m, l, O) in the query buffer, the one
//                       with the even ones adds it to its own; both arrive on q_empty[b] here, not in step 11
//     13. [consumer]    join the sink, divide by l; store output and LSE, or the partial result in its slot. With
//                       split_kv the consumer with the even tiles alone
//     14. [consumer]    wait for the first logits of unit n+1, if they were issued: their QK product overlaps step 13;
//                       arrive on k_empty
//
// Exponentials take every eighth issue slot of a warp. In the others, step 9 is done beside those of step 10: O is
// complete by then. With wide heads (kFinishEarly is false) it is not, and step 9 follows step 10.
//
// Producers run ahead into the next unit while consumers are in their epilogue.
//
// Heads of 512
// ------------
// An accumulator of 512 columns does not fit in the registers of a consumer, nor a second KV tile in shared memory. So
// there are two units of the same packed rows and KV head, neighbours, each with kDimVo of the columns of values and of
// O. Both compute the logits; the first stores the LSE. With SHARED_ROWS there is one unit, whose keys and values are
// loaded once: its consumers have the same rows and all KV tiles, and divide the columns in place of the units.
//
// The ring of keys has kKeyParts stages for a KV tile, each with kKeyDim columns of its keys. Steps 3 and 5 are done
// for each of them: when the consumer has issued the product with a part, it waits for that with the part before, and
// arrives on its k_empty. Step 7 is that of the last part.
//
// FP8 keys and values
// -------------------
// The rings have 16-bit tiles, and consumers do the same as otherwise. Producers load FP8 tiles, kFp8Parts of which
// make up a stage of the 16-bit ring, to rings of FP8, and count them over all units too. Below x is k or v:
//     1c.    [warp 3]     with FEW_ROWS and bfloat16 queries: wait for q_loaded[b], which is completed in place of
//                         q_full[b]; convert in place, each packed row times a power of 2, whose inverse goes to
//                         query_scales; proxy fence; arrive on q_full[b]. Consumers scale the logits of the row by it
//     3, 4.  [producer]   for each FP8 tile i of KV tile j: steps 3 and 4 with fp8_empty[x][i] and fp8_full[x][i]
//     4c.    [converter]  for each FP8 tile i: wait for fp8_full[x][i]; for the first of KV tile j, wait for
//                         x_empty[j]; convert into the ring; proxy fence; arrive on fp8_empty[x][i]. Then arrive on
//                         x_full[j]
// After the last unit the producers wait until all is converted; one sets fp8_end[x]; they arrive on fp8_full[x], as
// for a tile. With RoPE converters end at the unit without rows, for which they wait with its queries.
//
// Converters of keys and values in turn fill all stages of the ring of keys with parts of KV tile j+1, and then the
// stage of values with those of KV tile j: the former are free when S_j is complete, the latter after O += P V.
//
// RoPE
// ----
// Producers complete q_loaded[b] and k_loaded[j % kKeyStages] in place of q_full[b] and k_full[j].
//     2r.    [converter]  wait for q_loaded[b]; rotate in place the packed rows of the unit whose results are stored;
//                         proxy fence; arrive on q_full[b]
//     4r.    [converter]  for each KV tile j of the unit: wait for k_loaded[j]; rotate the keys in place; proxy fence;
//                         arrive on k_full[j]
// With FP8 keys and values there is no k_loaded. In place of step 4r, for each KV tile of the unit:
//     4c.    [converter]  as above for the keys, which a warp rotates when it has converted them; then for the values
//
// FP8 products
// ------------
// WGMMA takes 8-bit operands K-major alone, and values are [tokens, columns]. So step 4 fills a ring that consumers do
// not read, and warps 2 and 3 transpose from it into a third ring, of kTransposedStages. They take these steps:
//     1.  as otherwise, but for the scheduler, and with an arrival of each of the two warps on unit_empty
//     4b. for each KV tile j of the unit: wait for v_full[j] and t_empty[j]; transpose, each warp half of the columns;
//         proxy fence; arrive on v_empty[j] and t_full[j]. Before the last tile, or at once without tiles: the
//         scheduler's part of step 1 for unit n+1; for unit 0 at the beginning
// The scheduler also waits for the last tile of producer K, which waits for consumers, which wait for transposed
// values: but only for those of earlier tiles. Consumers wait for t_full in place of v_full, and arrive on t_empty. The
// product of a tile is added to O in float32: steps 6 and 11 issue D = P V, and step 9 and the epilogue do O = alpha O
// + D once it is complete, with the alpha of the tile of D. With heads of 256, D has 64 columns: the other three
// products are issued, awaited and added there, one after the other. A query buffer has half the size of an
// accumulator: in step 12, O goes through it in two parts.
#include "prefill_consumer.cuh"
#include "prefill_problem.cuh"
#include "prefill_producer.cuh"
#if KV_CP_ASYNC
#include "prefill_token_producer.cuh"
#endif
#if Q_FP8
#include "prefill_fp8_transpose.cuh"
#elif ROPE
#include "prefill_rope.cuh"
#elif KV_FP8
#include "prefill_fp8_converter.cuh"
#endif

namespace attn_ops {

namespace {

// One thread: with the arrivals that the comment on the kernel lists.
DEVICE void init_barriers(Shared& shared, const Problem& p, const Queries& queries) {
  const int readers = kConsumerWarps * p.readers();
  constexpr int writers = KV_FP8 ? kWarpsOfTensor : kTensorArrivals;
  for (uint64& barrier : shared.k_full) init_barrier(shared_address(&barrier), kConverts ? kWarpsOfTensor : writers);
  for (uint64& barrier : shared.v_full) init_barrier(shared_address(&barrier), writers);
  for (uint64& barrier : shared.k_empty) init_barrier(shared_address(&barrier), readers);
#if Q_FP8
  for (uint64& barrier : shared.v_empty) init_barrier(shared_address(&barrier), kTransposeWarps);
  for (uint64& barrier : shared.t_full) init_barrier(shared_address(&barrier), kTransposeWarps);
  for (uint64& barrier : shared.t_empty) init_barrier(shared_address(&barrier), readers);
#else
  for (uint64& barrier : shared.v_empty) init_barrier(shared_address(&barrier), readers);
#endif
#if KV_FP8
  for (auto& barriers : shared.fp8_full)
    for (uint64& barrier : barriers) init_barrier(shared_address(&barrier), kTensorArrivals);
  for (auto& barriers : shared.fp8_empty)
    for (uint64& barrier : barriers) init_barrier(shared_address(&barrier), kWarpsOfTensor);
  for (int& end : shared.fp8_end) end = 0;
#endif
#if ROPE && !KV_FP8
  for (uint64& barrier : shared.k_loaded) init_barrier(shared_address(&barrier), writers);
#endif
#if FEW_ROWS || ROPE
  for (uint64& barrier : shared.q_loaded) init_barrier(shared_address(&barrier), queries.threads());
#endif
  for (uint64& barrier : shared.q_full)
    init_barrier(shared_address(&barrier), ROPE ? kConverterWarps : queries.converts ? 1 : queries.threads());
  for (uint64& barrier : shared.q_empty) init_barrier(shared_address(&barrier), p.consumers() * kConsumerWarps);
  init_barrier(shared_address(&shared.unit_full), 1);
  init_barrier(shared_address(&shared.unit_empty),
               Q_FP8 || kTensorProducers > 1 ? kProducerWarps : 2 + queries.threads());
  init_barrier(shared_address(&shared.staging), 1);
}

}  // namespace

// Grid: any number n of CTAs; the host launches one for each SM, or for each unit if there are fewer. CTA c runs unit
//     c, then those that it takes from the counter in `queue`. Without a plan it runs units c, 2n - 1 - c, 2n + c,
//     4n - 1 - c and so on.
// Owns: the rows of its units in `out` and `lse`, or their partial results in `partial`.
// Loop invariant of a consumer, before it takes KV tile j: P holds the probabilities of its last tile, row_max and
//     row_sum include that tile, O includes those before it and is relative to row_max (with FP8 products, to the
//     maximum before that tile).
// Barriers: k_full and v_full, two for each stage: an arrival of the producer, and the bytes that TMA loads; with
//     KV_CP_ASYNC an arrival of each thread that copies; with FP8 KV, and of keys with RoPE, an arrival of each warp
//     that converts the tensor. k_loaded, one for each stage: as k_full without RoPE. fp8_full and fp8_empty, one for
//     each FP8 stage: as full barriers without FP8, and an arrival of each warp that converts the tensor. k_empty and
//     v_empty, one for each stage: an arrival of each warp that reads the tile. q_full, one for each query buffer: an
//     arrival and the bytes, or an arrival of each thread that copies; of converted queries an arrival, of rotated
//     ones that of each warp of converters. q_loaded: what q_full has otherwise. q_empty: an arrival of each consumer
//     warp that has rows. unit_full: an arrival of the scheduler. unit_empty: an arrival of each warp that is a
//     producer of K or V, and of each other thread that loads queries; with FP8 products of each producer warp.
//     staging: an arrival of producer V, and the bytes. Named barriers: one for each consumer in order, of its threads
//     and those of the consumer before it (step 8); one of the threads of two consumers, around the exchange of step
//     12. With FP8 products v_empty and t_full, two for each stage as v_full, have an arrival of each warp that
//     transposes, and t_empty those that v_empty has otherwise.
// Bound by: tensor cores for long chunks; exponentials at heads of 64; reading KV for few query rows on long KV.
extern "C" __global__ void __launch_bounds__(kThreads, 1) prefill(
    const char* q,                            // [rows, num_kv_heads * group, HEAD_DIM_QK]
    const __grid_constant__ TensorMap q_map,  // [HEAD_DIM_QK / 64, rows, num_kv_heads * group, 64]
#if KV_CP_ASYNC
    const char* k,                            // [num_pages, page_size, num_kv_heads, HEAD_DIM_QK], of any strides
    const char* v,                            // with HEAD_DIM_VO
#else
    // [pages and heads, page_size / 8, HEAD_DIM_QK / 64, 8, 64]; ragged [num_kv_heads, HEAD_DIM_QK / 64, kv_rows, 64]
    const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v,      // with HEAD_DIM_VO
#endif
    const float* sinks,                       // [num_kv_heads * group] or null
#if CUSTOM_MASK
    const unsigned char* mask,                // [mask_bytes], of all requests
    int64 mask_bytes,
    const int* kv_len,                        // [max_batch], or null without a plan
#endif
    void* out,                                // [rows, num_kv_heads * group, HEAD_DIM_VO]
    float* lse,                               // [rows, num_kv_heads * group] or null
    float* partial,  // [slots, tile_rows, num_kv_heads * group, HEAD_DIM_VO], then the LSE without HEAD_DIM_VO
    const int* qo_indptr,                     // [max_batch + 1]; this and the next two are null without a plan
    const int* kv_indices,                    // [max_pages]
    const int* work,                          // [max_items, kWorkStride]
    int* queue,                               // [kQueueSize] or null without a plan
    float scale, float cap,                   // of the logits; a cap of 0 is none
    int window_left, int window_right,        // tokens that a row sees before and after its position; kNone: all
    int rows,
#if PAGED
    int num_pages,
#else
    int kv_rows,
#endif
    int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head,  // elements
    int num_kv_heads, int group, int page_size,
#if KV_CP_ASYNC
    int64 stride_k_page, int64 stride_k_token, int64 stride_k_head,  // elements
    int64 stride_v_page, int64 stride_v_token, int64 stride_v_head,
#else
    int box,                                  // tokens of a box of the maps of keys and values
    // What a page and a head add to the outermost index of the maps of paged KV:
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
#endif
#if KV_FP8
    int kv_type,                              // Fp8Type; with FEW_ROWS also kBFloat16Queries
#endif
#if KV_FP8 || Q_FP8
    const float* kv_scale,                    // [2] or null
#endif
#if ROPE
    float rope_theta, float rope_scale,       // the base of the frequencies, and what divides positions
#endif
    int tile_rows,                            // query rows of a work item
#if CLOCKS
    int out_type, uint64* clocks) {
  start_clocks(clocks, kThreads / 32);
#else
    int out_type) {
#endif
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
#if PAGED
  constexpr int kv_rows = 0;
#else
  constexpr int num_pages = 0;
#endif
#if KV_CP_ASYNC
  constexpr int box = 1;
#endif
  const Problem p = {
      .qo_indptr = qo_indptr, .kv_indices = kv_indices, .work = work, .window_left = window_left,
      .window_right = window_right, .rows = rows, .kv_rows = kv_rows, .num_pages = num_pages, .max_pages = max_pages,
      .max_items = max_items, .max_batch = max_batch, .num_kv_heads = num_kv_heads, .group = group,
      .page_size = page_size, .box = box, .tile_rows = tile_rows, .unit_rows = equal_unit_rows(tile_rows * group),
      .num_items = (rows + tile_rows - 1) / tile_rows + max_batch + slots, .slots = slots, .queue = queue,
#if CUSTOM_MASK
      .mask = mask, .mask_bytes = mask_bytes, .kv_len = kv_len,
#endif
#if ALIBI
      .has_cap = cap > 0,
#endif
  };
  const int q_box_rows = kPackedRows % group ? 0 : kPackedRows / group;  // rows of q in a box of its map
#if FEW_ROWS
  const bool converts_queries = kv_type & kBFloat16Queries;
#else
  constexpr bool converts_queries = false;
#endif
  const Queries queries = {&q_map, q_box_rows, q, stride_q_row, stride_q_head, converts_queries};
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    init_barriers(shared, p, queries);
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_earlier_kernels();
  launch_later_kernels();
  mark(kPrologue);
  if (warp < kProducerWarps) {
    decrease_registers<kProducerRegisters>();
#if KV_CP_ASYNC
    if (warp < 2 * kTensorProducers && warp % 2 == 0)
      produce_tokens<false>(p, {k, kLoadedBytes * stride_k_page, kLoadedBytes * stride_k_token},
                            kLoadedBytes * stride_k_head, queries, warp / 2, shared);
    else if (warp < 2 * kTensorProducers)
      produce_tokens<true>(p, {v, kLoadedBytes * stride_v_page, kLoadedBytes * stride_v_token},
                           kLoadedBytes * stride_v_head, queries, warp / 2, shared);
#else
    if (warp == 0)
      produce<false>(p, {&k, k_page_step, k_head_step}, shared);
    else if (warp == 1)
      produce<true>(p, {&v, v_page_step, v_head_step}, shared);
#endif
    else
#if Q_FP8
      produce_queries_and_transpose(p, queries, shared);
#else
      produce_queries(p, queries, shared);
#endif
#if ROPE
  } else if (warp < kFirstConsumerWarp) {
    decrease_registers<kConverterRegisters>();
#if !KV_FP8
    constexpr int kv_type = 0;
#endif
    rotate_queries_and_keys(p, rope_theta, rope_scale, kv_type, shared);
#elif KV_FP8
  } else if (warp < kFirstConsumerWarp) {
    decrease_registers<kConverterRegisters>();
    convert_keys_and_values(warp - kProducerWarps, Fp8Type(kv_type & ~kBFloat16Queries), shared);
#endif
  } else {
    increase_registers<kConsumerRegisters>();
#if !KV_FP8 && !Q_FP8
    constexpr const float* kv_scale = nullptr;
#endif
    const int consumer = (warp - kFirstConsumerWarp) / kConsumerWarps;
    if (kConsumers == 2 || consumer < p.consumers())
      Consumer(consumer, p, {scale, cap, converts_queries, {sinks, out, lse, partial, out_type, kv_scale}}, shared)
          .run();
  }
  stop_clocks();
}

}  // namespace attn_ops
