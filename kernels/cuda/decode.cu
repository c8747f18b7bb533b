// Decode on Hopper: persistent and warp-specialised. A CTA has one producer warp, and two consumer warpgroups for each
// of its KV heads.
//
// Compiled for
//     HEAD_DIM     64 or 128
//     KV_HEADS     KV heads of a CTA, 1 or 2
//     PACKED_ROWS  the largest group (query heads per KV head) that the kernel takes, 8 or 16
//     DTYPE        type of the WGMMA operands: 1 float16, 2 bfloat16; float16 with an FP8 cache
//     KV_FP8       type of an FP8 cache: 1 e4m3, 2 e5m2; 0 for a 16-bit cache
//     ROPE         1: rotate queries and keys by their positions (ROPE_LLAMA); for 16-bit caches alone
//     PADDED       1: heads have fewer columns, head_dim, from 64 on (see HeadDim); not with ROPE
//     DENSE        1: requests of one row and equal numbers of dense keys, without a plan
// Head counts, group, strides, page size, window, soft cap, sinks, scales, the type of the output and, with an FP8
// cache, the type of the query are parameters.
//
// Both products have swapped operands: the M of WGMMA, 64, is tokens in S^T = K Q^T and value columns in O^T = V^T P^T,
// and its N is packed rows, the query heads of a group. So 8 heads take an eighth of the WGMMA work of a 64-row tile. A
// KV tile is 16 KB of keys and 16 KB of values. FP8 keys and values become float16 operands in registers. A bfloat16
// query with an FP8 cache becomes float16 too, each head multiplied by a power of 2.
//
// A CTA has two KV heads if the number of KV heads is even and a token of one head has at most 128 bytes: heads of 64,
// and, if the plan was made for an FP8 cache, FP8 heads of 128. A TMA box then has twice the bytes, and in NHD the rows
// of both heads are adjacent in memory. With one FP8 head of 64, one consumer at a time would not keep
// up with memory.
//
// Roles
// -----
// warps 0 to 3            consumer 0, first KV head: work items 0, 2, 4 and so on of the CTA
// warps 4 to 7            consumer 1, first KV head: work items 1, 3, 5 and so on
// warps 8 to 15           with KV_HEADS 2: consumers 2 and 3, which are consumers 0 and 1 of the second KV head
// next warp               producer: loads keys and values of all work items by TMA into a ring of kStages KV tiles
// last 4 warps with ROPE  converters: rotate the keys of all work items
//
// The two consumers of a KV head take turns: while one stores its result and loads its next query, the other computes
// attention on its KV tiles.
//
// Schedule
// --------
// Tile j is KV tile j of the CTA, counted over all its work items. Tile j lies in stage j % kStages; k_full[j] is the
// barrier k_full of this stage.
//
// prologue
//     0.  [warp 0]    initialise barriers
//     1.  [all]       unless `early`: griddepcontrol.wait. Read the CTA's range of the work list and its first work
//                     item; the producer also reads the second item and the first page numbers; with ROPE the
//                     converters store the turns of column pairs. __syncthreads, which waits for step 0. If `early`:
//                     griddepcontrol.wait. griddepcontrol.launch_dependents
// for each work item
//     2.  [consumer]  load the query; read the next two work items of the CTA; with ROPE rotate the query; store the
//                     query as a K-major operand; wait for this consumer's turn
// mainloop, for each KV tile j of the work item
//     3.  [producer]  wait for empty[j]; each lane that has a box of the tile loads the keys and the values of the box,
//                     which complete k_full[j] and v_full[j]. After the first tile of a work item: read page numbers of
//                     the next work item, and the work item after the next
//     3r. [converter] with ROPE, step 3 completes k_loaded[j] in place of k_full[j]: wait for k_loaded[j]; rotate the
//                     keys; proxy fence; arrive on k_full[j]
//     4.  [consumer]  wait for k_full[j]; S^T = K Q^T
//     5.  [consumer]  scale, soft cap, mask; compute P^T relative to row_max and store it as a K-major operand. The
//                     barrier after that store also tells whether a logit exceeds row_max by more than the threshold.
//                     If so, and in the first tile: reduce maxima over the warps, raise row_max, rescale O^T, and
//                     compute and store P^T with the new row_max
//     6.  [consumer]  wait for v_full[j]; in the last tile: pass the turn to the other consumer; O^T += V^T P^T; arrive
//                     on empty[j]
// epilogue of the work item
//     7.  [consumer]  reduce row sums over the warps; add the sink; divide by l
//     8.  [consumer]  store the LSE; store O through shared memory to the output, or a partial result to its slot
//     9.  [consumer]  if `combines`: the consumer that stores the last split of a row combines the splits of the row
//
// Memory of tokens that the row does not see may hold NaN, which a probability of 0 would not hide. In a tile with such
// tokens, the consumer waits for v_full[j] and sets their values to 0 in step 5, after the mask.
//
// With DENSE there is no plan to read: the sizes of the requests give the work items, each a split of a request. A box
// is a whole KV tile, and step 9 is left to a later kernel.
#include "decode_consumer.cuh"
#if !DENSE
#include "decode_producer.cuh"
#endif
#if ROPE
#include "decode_rope.cuh"
#endif

namespace attn_ops {

// Grid: (num_kv_heads / KV_HEADS, CTAs of the plan, or with DENSE at most one for each work item). CTAs of neighbouring
//     KV heads read the same tokens.
// Owns: the work items of CTA blockIdx.y, for KV_HEADS KV heads: their rows in `out` and `lse`, or
//     their partial results in `partial`. If `combines`, also the output rows whose last split the CTA stores, and
//     those of the rows blockIdx.y + i * gridDim.y that have no tokens.
// Loop invariant of a consumer, before KV tile j: O^T, row_max and row_sum include the item's tiles before j. row_sum
//     is over the tokens of the thread, relative to row_max. row_max of a packed row is equal in all threads.
// Barriers: k_full and v_full, one per stage: one arrival of the producer, and the bytes of the tile. With ROPE these
//     are the arrivals of k_loaded, and k_full has one arrival of each converter warp. empty, one per stage: one
//     arrival of each warp of the consumers that read the tile, one consumer per KV head. Named barriers: kConsumer,
//     the threads of one consumer, after they stored the query, P, maxima, sums, columns of a result or a split; kTurn,
//     the threads of both consumers of a KV head, to pass the turn.
// Bound by: reading keys and values; with little work per CTA, the latency of reading the work item, then the page
//     number, then the tile.
extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(
    const char* q,                            // [rows, num_kv_heads * group, HEAD_DIM]
    // [pages and heads, page_size / 8, KV_HEADS * HEAD_DIM / columns, 8, columns]; kRowBytes of columns. If PADDED, FP8
    // caches have head_dim columns. If DENSE: [rows, num_kv_heads / KV_HEADS, KV_HEADS * HEAD_DIM / columns, keys,
    // columns]
    const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const float* sinks,                       // [num_kv_heads * group] or null
    const float* kv_scale,                    // [2] or null
    void* out,                                // [rows, num_kv_heads * group, HEAD_DIM]
    float* lse,                               // [rows, num_kv_heads * group] or null
    float* partial,                           // [slots, num_kv_heads * group, HEAD_DIM], then LSEs [slots, heads]
#if !DENSE
    int* split_counters,                      // [slots, num_kv_heads * group]
    const int* kv_indices,                    // [max_pages]
    const int* kv_len,                        // [max_batch]
    const int* work,                          // [max_items, kWorkStride]
    const int* cta_indptr,                    // [CTAs of the plan + 1]
    const int* merge_indptr,                  // [max_batch + 1]
#endif
    float scale, float cap,                   // of the logits; a cap of 0: no soft cap
#if ROPE
    float rope_theta, float rope_scale,       // the base of the frequencies, and the divisor of positions
#endif
    int window_left,                          // tokens that a row sees before its position; negative: all of them
#if DENSE
    int rows, int keys, int splits, int split_keys, int slots,  // keys and splits of a request, keys of a split
#else
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
#endif
    int64 stride_q_row, int64 stride_q_head,  // elements
#if PADDED
    int head_dim,                             // takes the place of HEAD_DIM in global memory
#endif
    int group,
#if !DENSE
    int page_size,
    int box,                                  // tokens of a TMA box
    // Steps of the outermost index of the maps from a page to the next page, and from a head to the next head:
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
    int early,                                // whether the plan may be read before earlier kernels have ended
    int combines,                             // whether this kernel combines splits and stores rows without tokens
#endif
    int query_type, int out_type) {           // OutType; query_type is read with an FP8 cache alone
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const int warp = uniform(threadIdx.x / 32);
#if DENSE
  constexpr bool early = true, combines = false;  // no plan to read; a later kernel combines
  int* const split_counters = nullptr;
  const Problem p = {
      .window_left = window_left, .rows = rows, .keys = keys, .splits = splits, .split_keys = split_keys};
  const bool has_keys = keys > 0;
#else
  const Problem p = {
      .kv_indices = kv_indices, .kv_len = kv_len, .work = work, .cta_indptr = cta_indptr, .merge_indptr = merge_indptr,
      .window_left = window_left, .rows = rows, .num_pages = num_pages, .max_pages = max_pages,
      .max_items = max_items, .max_batch = max_batch, .slots = slots, .page_size = page_size, .box = box,
  };
  const bool has_keys = num_pages > 0;
  if (early)
    acquire_plan();
  else
    wait_for_earlier_kernels();
#endif
  if (warp == 0 && elect()) {  // meanwhile, the producer reads the plan
    if (has_keys) prefetch_map(&k), prefetch_map(&v);  // without keys, the maps are zeros
    for (int i = 0; i < kStages; ++i) {
#if ROPE
      init_barrier(shared_address(&shared.k_loaded[i]), 1);
#endif
      init_barrier(shared_address(&shared.k_full[i]), ROPE ? kConverterThreads / 32 : 1);
      init_barrier(shared_address(&shared.v_full[i]), 1);
      init_barrier(shared_address(&shared.empty[i]), KV_HEADS * kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncwarp();
  if (warp == kProducerWarp) {
#if DENSE
    produce(p, k, v, shared);
#else
    produce(p, {&k, k_page_step, k_head_step}, {&v, v_page_step, v_head_step}, early, shared);
#endif
#if ROPE
  } else if (warp > kProducerWarp) {
    store_turns(rope_theta, rope_scale, shared);
    const WorkList list(p);
    end_prologue(early);
    rotate_keys(p, list, shared);
#endif
  } else {
#if PADDED
    const HeadDim columns = {head_dim};
#else
    constexpr HeadDim columns = {};
#endif
    const Queries queries = {.q = q, .row = stride_q_row, .head = stride_q_head, .columns = columns, .group = group,
                             .type = query_type, .scale = scale,
                             .cap = cap, .kv_scale = kv_scale};
    const Results results = {.columns = columns, .out = out, .lse = lse, .partial = partial,
                             .split_counters = split_counters, .sinks = sinks, .slots = slots, .group = group,
                             .combines = combines != 0, .out_type = out_type};
    const WorkList list(p);
    end_prologue(early);
    const int number = warp / kConsumerWarps;
    Consumer{.p = p, .queries = queries, .results = results, .shared = shared, .number = number}.run(list);
#if !DENSE
    if (combines) store_empty_rows(p, results);
#endif
  }
}

}  // namespace attn_ops
