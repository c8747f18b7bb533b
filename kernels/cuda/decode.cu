// Decode on Hopper: persistent and warp-specialised, a producer warp and four consumer warps in each CTA.
//
// Compiled for HEAD_DIM, HEADS (8 or 16: query heads of a KV head, at most), DTYPE (1 float16, 2 bfloat16: of the
// products) and KV_FP8 (0, 1 e4m3, 2 e5m2). Head counts, group, strides, page size, window, soft cap, sinks, scales and
// the types of query and output are parameters.
//
// Products are transposed: keys and values are the operands of 16 rows, tokens and columns, and the heads of the group the
// 8 or 16 columns of the result. They are those of a warp (mma.sync): decode is bound by memory, and a warp with tokens of
// its own waits for no other before the end of a work item.
//
// Roles
// -----
// warp 4            producer: keys and values, by TMA into a ring of kStages KV tiles
// warps 0 to 3      consumers: each has a quarter of the tokens of every KV tile, for all heads of the group, and an
//                   online-softmax state of its own. Query, logits, probabilities and accumulator are in registers
//
// Schedule
// --------
// KV tiles are counted over all work items of a CTA. Tile j lies in stage j % kStages.
//
// prologue
//     0.  [warp 0]    initialise barriers
//     1.  [all]       read the work list and the first work item; the producer the first page numbers, and the next item
//     2.  [all]       wait for step 0; griddepcontrol.wait; the next kernel may start
// mainloop, for each work item and each of its KV tiles j
//     3.  [producer]  wait for empty[j]; expect the bytes of the tile on k_full[j] and v_full[j]; issue a TMA load for
//                     each box of keys, and of values. First tile of an item: read the page numbers of the next item
//     4.  [consumer]  first tile of an item: load the query, read the next work item
//     5.  [consumer]  wait for k_full[j]; S = K Q^T
//     6.  [consumer]  soft cap, mask, online softmax, rescale O: P, transposed to be an operand
//     7.  [consumer]  wait for v_full[j]; O += V^T P, with 0 for values that the row does not see
//     8.  [consumer]  arrive on empty[j], but not for the last tile of the item
// epilogue of the item
//     9.  [consumer]  wait for all consumers; store the state (m, l, O) in the stage of the last tile; wait for all
//     10. [consumer]  reduce the four states; join the sink, divide by l; store output and LSE, or the partial result in
//                     its slot; arrive on empty of the last tile
//
// The producer runs ahead into the next work item while consumers are in their epilogue.
#include "decode_consumer.cuh"
#include "decode_problem.cuh"
#include "decode_producer.cuh"

namespace attn_ops {

// Grid: KV heads by CTAs of the plan. CTAs of neighbouring heads read the same tokens.
// Owns: the work items of its CTA of the plan for the heads of one KV head: their rows in `out` and `lse`, or their partial
//     results in `partial`. The combine writes the rows that are split and those without tokens.
// Loop invariant of a consumer, before KV tile j: its state has its part of the item's tiles before j.
// Barriers: k_full and v_full, one for each stage: an arrival of the producer, and the bytes. empty: an arrival of each
//     consumer warp. A named barrier of all consumers around step 9.
// Bound by: reading keys and values; with short work per CTA latency, item to page number to tile.
extern "C" __global__ void __launch_bounds__(kThreads, 2) decode(
    const uint16* q,                          // [rows, num_kv_heads * group, HEAD_DIM]
    // [pages and heads, page_size / 8, HEAD_DIM / columns, 8, columns] with rows of kRowBytes
    const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
    const float* sinks,                       // [num_kv_heads * group] or null
    const float* kv_scale,                    // [2] or null
    void* out,                                // [rows, num_kv_heads * group, HEAD_DIM]
    float* lse,                               // [rows, num_kv_heads * group] or null
    float* partial,                           // [slots, num_kv_heads * group, HEAD_DIM], then the LSE without HEAD_DIM
    const int* kv_indices,                    // [max_pages]
    const int* work,                          // [max_items, kWorkStride]
    const int* cta_indptr,                    // [CTAs of the plan + 1]
    float scale, float cap,                   // of the logits; a cap of 0 is none
    int window_left,                          // tokens that a row sees before its position, negative for all
    int rows, int num_pages, int max_pages, int max_items, int slots,
    int64 stride_q_row, int64 stride_q_head,  // elements
    int group, int page_size,
    int box,                                  // tokens of a box of the maps
    // What a page and a head add to the outermost index of the maps:
    int k_page_step, int k_head_step, int v_page_step, int v_head_step,
    int early,                                // the plan may be read before earlier kernels have ended
    int query_type, int out_type) {           // OutType
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared());
  const Problem p = {
      .kv_indices = kv_indices, .work = work, .cta_indptr = cta_indptr, .window_left = window_left,
      .num_pages = num_pages, .max_pages = max_pages, .max_items = max_items, .page_size = page_size,
      .box = box,
  };
  const int warp = uniform(threadIdx.x / 32);
  if (early)
    acquire_plan();
  else
    wait_for_earlier_kernels();
  if (warp == 0 && elect()) {  // the producer reads the plan meanwhile
    prefetch_map(&k), prefetch_map(&v);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(shared_address(&shared.k_full[i]), 1);
      init_barrier(shared_address(&shared.v_full[i]), 1);
      init_barrier(shared_address(&shared.empty[i]), kWarps);
    }
    fence_barrier_init();
  }
  if (warp == kWarps)
    produce(p, {&k, k_page_step, k_head_step}, {&v, v_page_step, v_head_step}, early, shared);
  else
    consume(p,
            {q, stride_q_row, stride_q_head, query_type, sinks, kv_scale, out, lse, partial, scale, cap, rows, slots,
             group, out_type},
            early, shared);
}

}  // namespace attn_ops
