// Prefill on Hopper: persistent and warp-specialised. A CTA has a producer warpgroup, kConsumers consumer warpgroups
// and, with FP8 keys and values or with RoPE, one or two converter warpgroups. With one consumer, for short KV,
// kCtasPerSm CTAs run on an SM: a unit of few KV tiles is a chain of latencies, which units of other CTAs overlap.
//
// Macros of all specializations:
//     HEAD_DIM_QK, HEAD_DIM_VO  head dims of queries and keys, and of values and outputs
//     PAGED         1 for paged keys and values, 0 for ragged ones
//     DTYPE         type of the operands of both products: 1 float16, 2 bfloat16
//     CONSUMERS     consumer warpgroups, 1 to 3
//     TILE, KEY_STAGES and others  the sizes of a row of the tables of tiles in prefill.py, which describes them
// Macros of some specializations, 1 where they are defined:
//     KV_CP_ASYNC   paged keys and values are copied token by token, by cp.async, from pages of any size
//     CUSTOM_MASK   a packed custom mask decides which keys a row sees
//     KV_FP8        keys and values are FP8, and converters convert them to DTYPE
//     FEW_ROWS      only with KV_FP8: work items have at most 64 packed rows. DTYPE is float16, and bfloat16 queries
//                   are converted to float16 too
//     Q_FP8         queries, keys, values and the operands of both products are e4m3. DTYPE is the type of outputs of
//                   type kLikeOperands
//     ROPE          queries and keys are rotated by their positions (ROPE_LLAMA)
//     ALIBI         logits get the bias of ALiBi
//     SHARED_ROWS   only with heads of 512: work items have at most 64 packed rows, and both consumers have all of them
//     PADDED        heads have fewer columns, head_dim_qk and head_dim_vo: the other columns are zeros in shared memory
// ROPE, ALIBI and Q_FP8 exclude one another, and KV_FP8 excludes Q_FP8. PADDED excludes ROPE,
// ALIBI, Q_FP8, FEW_ROWS and SHARED_ROWS, and with CUSTOM_MASK also KV_FP8.
// Head counts, strides, page size, windows, soft cap, sinks, scales and the type of the output are parameters.
//
// Packed row p of a work item is query row p / group of the item and head p % group of a KV head's group (PackGQA). A
// unit is a block of packed rows of one work item for one KV head: 64 packed rows for each consumer. If a work item has
// at most 64 packed rows, a unit has 64, and two consumers have all of them: each takes alternate KV tiles, and they
// reduce their states at the end (`split_kv`). Heads of 512 have other units: see below.
//
// Roles
// -----
// warp 0            producer K: loads keys by TMA into a ring of kKeyStages stages. A stage is a KV tile, or a part of
//                   one with heads of 512
// warp 1            producer V: loads values by TMA into a ring of kValueStages KV tiles
// warps 2, 3        producer Q: loads the queries of each unit into one of kQueries buffers. If the group divides 64, a
//                   TMA box has 64 packed rows, and one thread loads the boxes; otherwise all threads copy, by
//                   cp.async. The first thread of warp 2 is the scheduler, which passes the units of the CTA to the
//                   producers. With FP8 products, warps 2 and 3 also transpose values. With KV_CP_ASYNC they are also a
//                   second producer K and a second producer V, unless they transpose or a loaded tile has 32 tokens
// warpgroups 1, 2   consumers 0 and 1: attention. The accumulator, the logits and the probabilities are in registers.
//                   With one consumer there is no warpgroup 2
// warpgroup 3       consumer 2, if there are three: without converters, FP8 and custom masks, with heads of 64 and 96,
//                   and in large batches with heads of 128. KV tiles are shorter then with heads of 96 and 128. It has
//                   no rows, and exits, if units have at most 128 packed rows
//
// With converters, the consumers are the last two warpgroups, and these warps convert or rotate:
// warps 4, 5        converters K: FP8 keys into the ring of keys
// warps 6, 7        converters V: FP8 values into the ring of values
// With FEW_ROWS and heads of at most 128, warps 4 to 7 are converters K, and warps 8 to 11 converters V. With heads of
// 512, unless SHARED_ROWS, warps 4 to 7 convert keys and values in turn, since a unit has twice as many columns of keys
// as of values. With RoPE, warps 4 to 7 rotate queries and keys, and convert FP8 keys and values.
//
// The scheduler takes the next unit from a counter (`Schedule`) when producer K has kTilesAhead tiles of a unit left.
// That is early enough that no producer waits for a unit, and otherwise as late as possible, so that CTAs end together.
// A scheduler that copies keys itself takes the next unit after the last tile of the current one. With a custom mask
// the scheduler is a warp, which drops the KV tiles at both ends of the unit that no row sees (not in requests of at
// most kTreeRows query rows). The unit goes to the producers through `unit` in shared memory, and producer Q passes it
// to the consumers with the queries, as a QueryBlock.
//
// Schedule
// --------
// KV tiles are counted over all units of a CTA. Tile j lies in stage j % stages of its ring; its loads complete
// full[j % (2 * stages)], and consumers arrive on empty[j % stages]. Unit n has query buffer b = n % kQueries. S is a
// tile of logits, P a tile of probabilities, O the accumulator. "Row 0" and "row 1" are the two packed rows of a
// thread.
//
// prologue
//     0.  [all]         initialise barriers; griddepcontrol.wait, before the plan is read; setmaxnreg
// for each unit n
//     1.  [scheduler]   wait for unit_empty; increment the counter; write the unit; arrive on unit_full
//         [producer Q]  wait for unit_full; wait for q_empty[b]; write the unit's QueryBlock; load its queries, which
//                       completes q_full[b]; arrive on unit_empty
//         [producers K and V]  wait for unit_full; read the unit. Producer V arrives on unit_empty
//     2.  [consumer]    wait for q_full[b]; with heads of 96 and 128, unless FP8 or RoPE, load Q into registers (half
//                       of Q with heads of 128 and three consumers)
// mainloop, for each KV tile j of the unit
//     3.  [producer K]  if kTilesAhead tiles of the unit are left, arrive on unit_empty; wait for k_empty[j]; expect
//                       the bytes of the tile on k_full[j]; issue a TMA load for each box. Every 32 boxes, load the
//                       page numbers of the next 32
//     4.  [producer V]  as step 3 for values, without unit_empty. If the KV ends or a window begins inside a box: wait
//                       for the loads on `staging`, set the rows of the box outside of the KV or window to 0, arrive on
//                       v_full[j]. With a custom mask, do this for all tokens of the tile that no row of the unit sees
//         [producers K and V]  with KV_CP_ASYNC, in place of steps 3 and 4: wait for empty[j]; all lanes copy the rows
//                       of the tile's tokens, zeros for tokens after the end and, with a custom mask, for values that
//                       no row sees; each lane arrives on full[j] when its copies are complete; load the page numbers
//                       of tile j+1. Of two producers, each copies half of the tokens, and the second one (warp 2 or 3)
//                       takes step 1 of producer Q before the tiles of a unit. Consumers that read these copies execute
//                       a proxy fence after they have waited for full[j]
//     5.  [consumer]    wait for k_full[j]; issue S_j = Q K_j^T
//     6.  [consumer]    unless j is the first tile: wait for v_full[j-1]; issue O += P_{j-1} V_{j-1}
//     7.  [consumer]    wait for S_j, while O is computed; arrive on k_empty[j]
//     8.  [consumer]    add the bias of ALiBi, apply the soft cap, mask; subtract row_max from row 0. In order, wait
//                       for this consumer's turn; raise row_max of row 0 if a logit of the warp is too large;
//                       probabilities of row 0; subtract row_max from row 1; pass the turn on; raise row_max of row 1
//                       if need be
//     9.  [consumer]    wait for O; arrive on v_empty[j-1]; O *= alpha, if a row_max of the warp was raised; round row
//                       0 of P_j
//     10. [consumer]    probabilities of row 1; round row 1 of P_j
// epilogue of the unit
//     11. [consumer]    arrive on q_empty[b]; wait for v_full of the last tile; issue O += P V. With two query buffers,
//                       without split_kv and if unit n+1 has KV tiles: steps 2 and 5 of unit n+1. Wait for O; arrive on
//                       v_empty
//     12. [consumer]    split_kv: the consumer with the odd tiles stores O in the query buffer, and m and l in peer_max
//                       and peer_sum; the consumer with the even tiles adds this state to its own. Both arrive on
//                       q_empty[b] here, not in step 11
//     13. [consumer]    join the sink, divide by l; store output and LSE, or the partial result in its slot. With
//                       split_kv, only the consumer with the even tiles
//     14. [consumer]    if the first S of unit n+1 was issued: wait for it, so that this product overlaps step 13;
//                       arrive on k_empty
//
// The exponentials of a warp take every eighth issue slot. The instructions of step 9 use the slots between the
// exponentials of step 10: O is complete by then. With wide heads in 16 bits O is not complete by then (kFinishEarly is
// false), and step 9 follows the exponentials of step 10.
//
// Producers run ahead into the next unit while consumers are in their epilogue.
//
// Heads of 512
// ------------
// An accumulator of 512 columns does not fit in the registers of a consumer, nor a second KV tile in shared memory. So
// two neighbouring units have the same packed rows and KV head, each with kDimVo of the columns of values and of O.
// Both units compute the logits; the first stores the LSE. With SHARED_ROWS there is one unit, which loads keys and
// values once. Both consumers then have the same rows and all KV tiles, and each has kDimVo of the columns.
//
// A KV tile takes kKeyParts stages of the ring of keys, each with kKeyDim of its columns. Steps 3 and 5 are done for
// each part: when the consumer has issued the product with a part, it waits for the product with the part before, and
// arrives on the k_empty of that part. Step 7 is done for the last part.
//
// FP8 keys and values
// -------------------
// The rings of keys and values have 16-bit tiles, and consumers take the steps above. Producers load FP8 tiles into FP8
// rings; kFp8Parts FP8 tiles make up a stage of the 16-bit ring. FP8 tiles, too, are counted over all units. Below x is
// k or v:
//     1c.    [warp 3]     with FEW_ROWS and bfloat16 queries: wait for q_loaded[b], which the loads complete in place
//                         of q_full[b]; convert in place, each packed row times a power of 2, whose inverse goes to
//                         query_scales; proxy fence; arrive on q_full[b]. Consumers multiply the logits of the packed
//                         row by this inverse
//     3, 4.  [producer]   for each FP8 tile i of KV tile j: steps 3 and 4 with fp8_empty[x][i] and fp8_full[x][i]
//     4c.    [converter]  for each FP8 tile i of KV tile j: wait for fp8_full[x][i]; if i is the first of tile j, wait
//                         for x_empty[j]; convert into the ring; proxy fence; arrive on fp8_empty[x][i]. After the last
//                         FP8 tile, arrive on x_full[j]
// After the last unit the producers wait until all FP8 tiles are converted. Then one sets fp8_end[x], and they arrive
// on fp8_full[x] as for a tile, so that the converters end. With RoPE the converters end at the QueryBlock without a
// unit.
//
// Converters that convert keys and values in turn fill all stages of the ring of keys with the first parts of KV tile
// j+1, and then the stage of values with KV tile j. The stages of keys are free when S_j is complete, the stage of
// values after O += P_{j-1} V_{j-1}.
//
// RoPE
// ----
// Producers complete q_loaded[b] and k_loaded[j % kKeyStages] in place of q_full[b] and k_full[j].
//     2r.    [converter]  wait for q_loaded[b]; rotate in place the packed rows of the unit whose results are stored;
//                         proxy fence; arrive on q_full[b]
//     4r.    [converter]  for each KV tile j of the unit: wait for k_loaded[j]; rotate the keys in place; proxy fence;
//                         arrive on k_full[j]
// With FP8 keys and values there is no k_loaded. In place of step 4r, for each KV tile of the unit:
//     4c.    [converter]  step 4c above for keys, which a warp rotates after it has converted them; then for values
//
// FP8 products
// ------------
// WGMMA takes 8-bit operands K-major alone, and values are [tokens, columns]. So consumers do not read the ring that
// step 4 fills: warps 2 and 3 transpose its tiles into a third ring, of kTransposedStages. These two warps take the
// steps
//     1.  as producer Q above, but each of the two warps arrives on unit_empty
//     4b. for each KV tile j of the unit: wait for v_full[j] and t_empty[j]; transpose, each warp half of the columns;
//         proxy fence; arrive on v_empty[j] and t_full[j]. The scheduler's part of step 1 for unit n+1 is done before
//         the last tile of unit n, or at once if unit n has no tiles
// The scheduler then waits on unit_empty until producer K has only the last tile of unit n left. Producer K may wait
// for a stage of keys, which consumers release when they have the transposed values of earlier tiles: no deadlock.
// Consumers wait for t_full in place of v_full, and arrive on t_empty. The product of a tile is added to O in float32:
// steps 6 and 11 issue D = P V, and step 9 and the epilogue compute O = alpha O + D, once D is complete, with the alpha
// of the KV tile of D. With heads of 256, D has 64 columns: the products of the other three quarters of the columns are
// issued, awaited and added there, one after the other. A query buffer has half the size of an accumulator, as with
// FEW_ROWS: in step 12, O goes through it in two parts.
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

// One thread. The comment on the kernel lists the arrivals of each barrier.
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

// Grid: any number n of CTAs; the host launches kCtasPerSm for each SM, or one for each unit if there are fewer. CTA c
//     runs unit c, then the units that it takes from the counter in `queue`. Without a plan CTA c runs units c,
//     2n - 1 - c, 2n + c, 4n - 1 - c and so on.
// Owns: the rows of its units in `out` and `lse`, or their partial results in `partial`.
// Loop invariant of a consumer, before it takes KV tile j: P holds the probabilities of its last tile; row_max and
//     row_sum include that tile; O includes the tiles before that tile, and is relative to row_max (with FP8 products,
//     to the row_max before that tile).
// Barriers, and the arrivals that complete a phase:
//     k_full, v_full      two for each stage: one arrival of the producer, and the bytes that TMA loads. With
//                         KV_CP_ASYNC each thread that copies. With FP8 keys and values, and for keys with RoPE, each
//                         warp that converts or rotates the tensor
//     k_empty, v_empty    one for each stage: each consumer warp that reads the tile
//     k_loaded            one for each stage, with RoPE: as k_full without RoPE
//     fp8_full            one for each FP8 stage: as k_full without FP8
//     fp8_empty           one for each FP8 stage: each warp that converts the tensor
//     v_empty, t_full, t_empty  with FP8 products, one, two and one for each stage: each warp that transposes on
//                         v_empty and t_full, each consumer warp that reads the tile on t_empty
//     q_full              one for each query buffer: one arrival, and the bytes that TMA loads; or each thread that
//                         copies. Converted queries: one arrival. Rotated queries: each converter warp
//     q_loaded            one for each query buffer, of queries that are converted or rotated: as q_full of other
//                         queries
//     q_empty             one for each query buffer: each consumer warp that has rows
//     unit_full           the scheduler
//     unit_empty          each producer warp of K or V, and each thread that loads queries in another warp. With FP8
//                         products each producer warp
//     staging             one arrival of producer V, and the bytes that TMA loads
//     Named barriers: in step 8 one for each consumer, of its threads and the threads of the consumer before it; in
//     step 12 one of the threads of both consumers, around the exchange of states.
// Bound by: tensor cores for long chunks; exponentials at heads of 64; reading KV for few query rows on long KV.
extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm) prefill(
    const char* q,                            // [rows, num_kv_heads * group, HEAD_DIM_QK]
    const __grid_constant__ TensorMap q_map,  // [HEAD_DIM_QK / kColumns, rows, num_kv_heads * group, kColumns]
#if KV_CP_ASYNC
    const char* k,                            // [num_pages, page_size, num_kv_heads, HEAD_DIM_QK], of any strides
    const char* v,                            // with HEAD_DIM_VO
#else
    // With C = kColumns: paged [pages and heads, page_size / 8, HEAD_DIM_QK / C, 8, C],
    // ragged [num_kv_heads, HEAD_DIM_QK / C, kv_rows, C]. If PADDED, all maps have 1 in place of HEAD_DIM_QK / C, and
    // head_dim_qk in place of C.
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
    float* partial,  // [slots, tile_rows, num_kv_heads * group, HEAD_DIM_VO], then LSE [slots, tile_rows, heads]
                     // Without a plan request_rows take the place of tile_rows
    const int* qo_indptr,                     // [max_batch + 1]. Null without a plan, as kv_indices, work and queue:
                                              // all requests then have equal lengths
    const int* kv_indices,                    // [max_pages]
    const int* work,                          // [max_items, kWorkStride]
    int* queue,                               // [kQueueSize]
    float scale, float cap,                   // scale and soft cap of the logits; 0: no soft cap
    int window_left, int window_right,        // tokens that a row sees before and after its position; kNone: all
    int rows,
#if PAGED
    int num_pages,
#else
    int kv_rows,
    // Without a plan: query rows and keys of each request, and the splits of its keys, each of split_keys but the last.
    int request_rows, int request_keys, int request_splits, int split_keys,
#endif
    int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head,  // elements
    int num_kv_heads, int group,
#if PAGED
    int page_size,
#endif
#if KV_CP_ASYNC
    int64 stride_k_page, int64 stride_k_token, int64 stride_k_head,  // elements
    int64 stride_v_page, int64 stride_v_token, int64 stride_v_head,
#else
    int box,                                  // tokens of a TMA box of keys or values
#endif
#if PAGED && !KV_CP_ASYNC
    // What a page and a head add to the outermost index of the maps.
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
#endif
#if KV_FP8
    int kv_type,                              // Fp8Type; with FEW_ROWS also kBFloat16Queries
#endif
#if KV_FP8 || Q_FP8
    const float* kv_scale,                    // [2], of keys and of values, or null
#endif
#if ROPE
    float rope_theta, float rope_scale,       // the base of the frequencies, and the divisor of positions
#endif
#if PADDED
    int head_dim_qk, int head_dim_vo,         // take the place of HEAD_DIM_QK and HEAD_DIM_VO in global memory
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
  constexpr int num_pages = 0, page_size = 1, k_page_step = 0, k_head_step = 0, v_page_step = 0, v_head_step = 0;
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
#if !PAGED
      .request_rows = request_rows, .request_keys = request_keys, .request_splits = request_splits,
      .split_keys = split_keys,
#endif
#if CUSTOM_MASK
      .mask = mask, .mask_bytes = mask_bytes, .kv_len = kv_len,
#endif
#if ALIBI
      .has_cap = cap > 0,
#endif
#if PADDED
      .head_dim_qk = head_dim_qk, .head_dim_vo = head_dim_vo,
#endif
  };
  const int q_box_rows = kPackedRows % group ? 0 : kPackedRows / group;  // query rows of a box of q_map
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
    if (kConsumers != 3 || consumer < p.consumers())
      Consumer(consumer, p, {scale, cap, converts_queries, {sinks, out, lse, partial, out_type, kv_scale}}, shared)
          .run();
  }
  stop_clocks();
}

}  // namespace attn_ops
