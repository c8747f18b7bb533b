// Decode on Hopper: persistent and warp-specialised, a producer warp and two consumer warpgroups for each KV head.
//
// Compiled for HEAD_DIM, KV_HEADS (1 or 2, of a CTA), PACKED_ROWS (8 or 16: query heads of a KV head, at most), DTYPE
// (1 float16, 2 bfloat16: of the products), KV_FP8 (0, 1 e4m3, 2 e5m2) and ROPE (1: queries and keys, of 16 bits, are
// rotated by their positions, ROPE_LLAMA). Head counts, group, strides, page size,
// window, soft cap, sinks, scales and the types of an FP8 cache's query and of the output are parameters.
//
// Both products are transposed: the M of WGMMA, 64, is tokens in S^T = K Q^T and value columns in O^T = V^T P^T, and
// its N is packed rows, the heads of a group. So 8 heads take an eighth of the products that 64 rows take. A KV tile is
// 16 KB of keys and 16 KB of values. FP8 ones become float16 operands in registers; a bfloat16 query becomes float16
// too, times a power of 2 for each head.
//
// A CTA has two KV heads where their number is even and a token of one has at most 128 bytes: heads of 64, and those of
// 128 with an FP8 cache if the plan is for it. A box of TMA then has twice the bytes, and in NHD rows of both heads
// follow each other in memory. With FP8 heads of 64 one consumer would not keep up with memory.
//
// Roles
// -----
// warps 0 to 3      consumer 0: work items 0, 2, 4 and so on of the CTA
// warps 4 to 7      consumer 1: work items 1, 3, 5 and so on
// warps 8 to 15     consumers 2 and 3: the same for the second of two KV heads
// the next warp     producer: keys and values of all items, by TMA into a ring of kStages KV tiles
// 4 more with RoPE  converters: rotate the keys of all items
//
// The consumers of a KV head take turns: while one stores its result and loads its next query, the other one has the
// tiles.
//
// Schedule
// --------
// KV tiles are counted over all work items of a CTA. Tile j lies in stage j % kStages.
//
// prologue
//     0.  [warp 0]    initialise barriers
//     1.  [all]       read the work list and the first work items; the producer the first page numbers; with RoPE the
//                     converters store the turns of columns. Wait for step 0; griddepcontrol.wait; the next kernel may
//                     start
// for each work item
//     2.  [consumer]  load the query; read the next items; with RoPE rotate the query; store it as an operand; wait for
//                     its turn
// mainloop, for each KV tile j of the item
//     3.  [producer]  wait for empty[j]; each lane with a box of the tile loads its keys and values; they complete
//                     k_full and v_full[j]. First tile of an item: read the page numbers of the next item
//     3r. [converter] with RoPE, where step 3 completes k_loaded[j]: wait for it; rotate the keys; proxy fence; arrive
//                     on k_full[j]
//     4.  [consumer]  wait for k_full[j]; S^T = K Q^T
//     5.  [consumer]  scale, soft cap, mask; online softmax: store P^T as a K-major operand. Only if a logit exceeds
//                     row_max by the threshold, found at the barrier behind P, reduce maxima over the warps, rescale
//                     O^T and compute P^T again
//     6.  [consumer]  wait for v_full[j]; last tile: the other consumer's turn. O^T += V^T P^T; arrive on empty[j]
// epilogue of the item
//     7.  [consumer]  reduce row sums over the warps; join the sink; divide by l
//     8.  [consumer]  store the LSE; O through shared memory to the output, or as a partial result to its slot
//     9.  [consumer]  if the kernel combines splits: who stores the last split of a row combines them
//
// Memory of tokens that the row does not see may hold NaN, which a probability of 0 would not hide. In the tiles that
// have such tokens, the consumer sets these values to 0 before step 5.
#include "decode_consumer.cuh"
#include "decode_producer.cuh"
#if ROPE
#include "decode_rope.cuh"
#endif

namespace attn_ops {

// Grid: KV heads, KV_HEADS at a time, by CTAs of the plan. CTAs of neighbouring heads read the same tokens.
// Owns: the work items of its CTA of the plan for the heads of KV_HEADS KV heads: their rows in `out` and `lse`, or
//     their partial results in `partial`. If it combines splits, the rows of which it stores the last one, and of every
//     num_ctas rows one, if that has no tokens.
// Loop invariant of a consumer, before KV tile j: O^T, row_max and row_sum include the item's tiles before j, row_sum
//     those tokens of them that the thread has, relative to row_max, which all its threads have alike.
// Barriers: k_full and v_full, one for each stage: an arrival of the producer, and the bytes; with RoPE that is
//     k_loaded, and k_full an arrival of each warp of converters. empty: an arrival of each warp of the consumers that
//     have the tile, one for each KV head. Named barriers: the threads of a consumer, when all have stored P, maxima,
//     sums or columns; and of both of a KV head, when it is the turn of one.
// Bound by: reading keys and values; with short work per CTA latency, item to page number to tile.
extern "C" __global__ void __launch_bounds__(kThreads, 1) decode(
    const char* q,                            // [rows, num_kv_heads * group, HEAD_DIM]
    // [pages and heads, page_size / 8, KV_HEADS * HEAD_DIM / columns, 8, columns] with rows of kRowBytes
    const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const float* sinks,                       // [num_kv_heads * group] or null
    const float* kv_scale,                    // [2] or null
    void* out,                                // [rows, num_kv_heads * group, HEAD_DIM]
    float* lse,                               // [rows, num_kv_heads * group] or null
    float* partial,                           // [slots, num_kv_heads * group, HEAD_DIM], then the LSE without HEAD_DIM
    int* split_counters,                      // [slots, num_kv_heads * group]
    const int* kv_indices,                    // [max_pages]
    const int* kv_len,                        // [max_batch]
    const int* work,                          // [max_items, kWorkStride]
    const int* cta_indptr,                    // [CTAs of the plan + 1]
    const int* merge_indptr,                  // [max_batch + 1]
    float scale, float cap,                   // of the logits; a cap of 0 is none
#if ROPE
    float rope_theta, float rope_scale,       // the base of the frequencies, and what divides positions
#endif
    int window_left,                          // tokens that a row sees before its position, negative for all
    int rows, int num_pages, int max_pages, int max_items, int max_batch, int slots,
    int64 stride_q_row, int64 stride_q_head,  // elements
    int group, int page_size,
    int box,                                  // tokens of a box of the maps
    // What a page and a head add to the outermost index of the maps:
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
    int early,                                // the plan may be read before earlier kernels have ended
    int combines,                             // splits of a row; otherwise another kernel does, and stores empty rows
    int query_type, int out_type) {           // OutType; the former is of an FP8 cache
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const Problem p = {
      .kv_indices = kv_indices, .kv_len = kv_len, .work = work, .cta_indptr = cta_indptr, .merge_indptr = merge_indptr,
      .window_left = window_left, .rows = rows, .num_pages = num_pages, .max_pages = max_pages,
      .max_items = max_items, .max_batch = max_batch, .slots = slots, .page_size = page_size, .box = box,
  };
  const int warp = uniform(threadIdx.x / 32);
  if (early)
    acquire_plan();
  else
    wait_for_earlier_kernels();
  if (warp == 0 && elect()) {  // the producer reads the plan meanwhile
    if (num_pages > 0) prefetch_map(&k), prefetch_map(&v);  // the maps of no elements are zeros
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
    produce(p, {&k, k_page_step, k_head_step}, {&v, v_page_step, v_head_step}, early, shared);
#if ROPE
  } else if (warp > kProducerWarp) {
    store_turns(rope_theta, rope_scale, shared);
    const WorkList list(p);
    end_prologue(early);
    rotate_keys(p, list, shared);
#endif
  } else {
    const Queries queries = {.q = q, .row = stride_q_row, .head = stride_q_head, .group = group,
                             .type = query_type, .scale = scale,
                             .cap = cap, .kv_scale = kv_scale};
    const Results results = {.out = out, .lse = lse, .partial = partial, .split_counters = split_counters,
                             .sinks = sinks, .slots = slots, .group = group, .combines = combines != 0,
                             .out_type = out_type};
    const WorkList list(p);
    end_prologue(early);
    const int number = warp / kConsumerWarps;
    Consumer{.p = p, .queries = queries, .results = results, .shared = shared, .number = number}.run(list);
    if (combines) store_empty_rows(p, results);
  }
}

}  // namespace attn_ops
