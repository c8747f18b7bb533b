// Decode: the producer.
#pragma once

#include "decode_problem.cuh"

namespace attn_ops {
namespace {

// Keys or values in global memory. A page adds `page_step` and a head `head_step` to the outermost index.
struct Source {
  const TensorMap* map;
  int page_step, head_step;
};

// Where a lane's box lies.
struct Box {
  uint32 page;
  int row;  // group of 8 tokens of the page; that after the last where the work item ends
};

// The box of this lane among the 32 from token `first` on.
DEVICE Box locate_box(const Problem& p, const WorkItem& item, int first) {
  const int token = first + threadIdx.x % 32 * p.box;
  const bool exists = token < item.end;
  return {exists ? uint32(p.kv_indices[item.page_start + token / p.page_size]) : 0,
          (exists ? token % p.page_size : p.page_size) / 8};
}

// One warp: the KV tiles of all work items into the ring. Boxes after the end lie outside of the tensor map and read as
// zeros. The plan is read while tiles are on their way: after the first tile of an item the first page numbers of the next
// item, and the item after that. Page numbers are read 32 boxes at a time, at least one KV tile ahead.
DEVICE void produce(const Problem& p, const Source& keys, const Source& values, bool early, Shared& shared) {
  const int boxes = kTile / p.box;
  const int k_head = kv_head() * keys.head_step, v_head = kv_head() * values.head_step;
  const int box_bytes = p.box / 8 * kGroupBytes;
  WorkList list(p);
  WorkItem item = list.first;
  Box box = locate_box(p, item, item.first);
  WorkItem next = read_item(p, list.item + 1, list.stop);
  end_prologue(early);
  uint32 tile = 0;
  for (; list.item < list.stop; ++list.item) {
    WorkItem after_next = {};
    Box later = {}, of_next = {};
    int first = item.first, used = 0;  // boxes
    do {
      if (first < item.end) {
        const uint32 stage = tile % kStages, to = shared_address(&shared.stages[stage]);
        const uint32 k_full = shared_address(&shared.k_full[stage]), v_full = shared_address(&shared.v_full[stage]);
        const int page = min(box.page, uint32(p.num_pages) - 1);
        const int k_row = page * keys.page_step + k_head, v_row = page * values.page_step + v_head;
        wait(shared_address(&shared.empty[stage]), tile / kStages & 1 ^ 1);
        if (threadIdx.x % 32 == 0) arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);
        __syncwarp();
        for (int i = 0; i < boxes; ++i) {
          const int row = __shfl_sync(~0u, box.row, used + i), k_of_box = __shfl_sync(~0u, k_row, used + i);
          if (elect()) load_box(to + i * box_bytes, keys.map, 0, 0, 0, row, k_of_box, k_full);
        }
        for (int i = 0; i < boxes; ++i) {
          const int row = __shfl_sync(~0u, box.row, used + i), v_of_box = __shfl_sync(~0u, v_row, used + i);
          if (elect()) load_box(to + kTileBytes + i * box_bytes, values.map, 0, 0, 0, row, v_of_box, v_full);
        }
        ++tile;
      }
      if (first == item.first) {
        later = locate_box(p, item, first + 32 * p.box), of_next = locate_box(p, next, next.first);
        after_next = read_item(p, list.item + 2, list.stop);
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
