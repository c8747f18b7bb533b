// Decode of paged KV: the producer.
#pragma once

#include "decode_plan.cuh"
#include "hopper.cuh"

namespace attn_ops {
namespace {

// Keys or values in global memory. The outermost index of a box is page * page_step + head * head_step.
struct Source {
  const TensorMap* map;
  int page_step, head_step;
};

// The position of a TMA box in the cache.
struct Box {
  uint32 page;
  int row;  // index of the first group of 8 tokens in the page; page_size / 8 for a box after the end of the work item
};

// The box of this lane: of the 32 boxes from token `first` on, lane l has box l.
DEVICE Box locate_box(const Problem& p, const WorkItem& item, int first) {
  const int token = first + threadIdx.x % 32 * p.box;
  const bool exists = token < item.end;
  return {exists ? uint32(p.kv_indices[item.page_start + token / p.page_size]) : 0,
          (exists ? token % p.page_size : p.page_size) / 8};
}

// One warp. It loads the KV tiles of all work items into the ring. Boxes after the end of a work item lie outside of
// the tensor map, so that TMA writes zeros. The warp reads the plan while loads of tiles are in flight: after it has
// issued the first tile of a work item, it reads the first page numbers of the next item, and the item after the next.
// It reads page numbers of 32 boxes at a time, at least one KV tile ahead.
DEVICE void produce(const Problem& p, const Source& keys, const Source& values, bool early, Shared& shared) {
  const int lane = threadIdx.x % 32, boxes = kTile / p.box, box_bytes = p.box / 8 * kGroupBytes;
  const int k_head = first_kv_head() * keys.head_step, v_head = first_kv_head() * values.head_step;
  const uint64 policy = l2_cache_policy(true);
  const WorkList list(p);
  WorkItem item = list.first;
  Box box = locate_box(p, item, item.first);
  WorkItem next = read_item(p, list.begin + 1, list.stop);
  end_prologue(early);
  uint32 stage = 0, parity = 1;
  for (int i = list.begin; i < list.stop; ++i) {
    WorkItem after_next = {};
    Box later = {}, of_next = {};
    int first = item.first, used = 0;  // first token of the tile; boxes of `box` that earlier tiles have used
    do {
      if (first < item.end) {
#if ROPE
        const uint32 k_full = shared_address(&shared.k_loaded[stage]);
#else
        const uint32 k_full = shared_address(&shared.k_full[stage]);
#endif
        const uint32 v_full = shared_address(&shared.v_full[stage]);
        const int place = lane - used, page = min(box.page, uint32(p.num_pages) - 1);
        const uint32 to = shared_address(&shared.stages[stage]) + place * box_bytes;
        wait(shared_address(&shared.empty[stage]), parity);
        if (lane == 0) arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);
        __syncwarp();
        if (place >= 0 && place < boxes) {
          load_box(to, keys.map, 0, 0, 0, box.row, page * keys.page_step + k_head, k_full, policy);
          load_box(to + kTileBytes, values.map, 0, 0, 0, box.row, page * values.page_step + v_head, v_full, policy);
        }
        __syncwarp();
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      if (first == item.first) {
        later = locate_box(p, item, first + 32 * p.box), of_next = locate_box(p, next, next.first);
        after_next = read_item(p, i + 2, list.stop);
      }
      first += kTile, used += boxes;
      if (used == 32) {
        box = later, used = 0;
        later = locate_box(p, item, first + 32 * p.box);
      }
    } while (first < item.end);
    item = next, box = of_next, next = after_next;
  }
}

}  // namespace
}  // namespace attn_ops
