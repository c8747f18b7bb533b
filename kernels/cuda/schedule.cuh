// Work items of a plan, and the walk of a persistent kernel over their units.
#pragma once

#include "basics.cuh"

namespace attn_ops {
namespace {

constexpr int kMaxTokens = 0x7FF00000;  // limit of tokens of a request, to which a tile size is added in 32 bits
enum Work { kRow, kRows, kKvBegin, kKvEnd, kPosition, kPageStart, kSlot, kRequest, kWorkStride };
enum Queue { kNextUnit, kPlannedItems, kQueueSize };

// A work item.
struct Item {
  int row;         // first query row, in `q`
  int count;       // number of query rows
  int position;    // position of the first query row in the KV sequence of its request
  int start, end;  // KV tokens
  int page_start;  // index of the request's first page in kv_indices; ragged KV: the request's first token
  int slot;        // slot of the partial result, negative without a split
  int request;     // index of the request in the plan
};

// The unit of walker `walker`, one of `walkers` CTAs or clusters, in wave 0, 1, 2 and so on: walker, 2 * walkers - 1 -
// walker, 2 * walkers + walker and so on. Plans sort items by length, so that alternating forward and backward waves
// balance the walkers.
DEVICE int64 unit_of_wave(int wave, int walker, int walkers) {
  return int64(wave) * walkers + (wave & 1 ? walkers - 1 - walker : walker);
}

// The number of padding items: items at the end of the work list, for the query rows after the last request.
template <class Problem>
DEVICE int padding_items(const Problem& p) {
  return (max(p.rows - max(p.qo_indptr[p.max_batch], 0), 0) + p.tile_rows - 1) / p.tile_rows;
}

// The walk of a CTA or cluster over a plan, whose KV is paged or ragged.
template <bool kPaged>
struct Walk {
  int wave = 0;

  // Reads item `item`, bounded by the capacities, and returns `item`. For an item that has no rows, returns the number
  // of the first padding item instead, the next item that has rows.
  //
  // The plan lists items without rows last. The last padding_items(p) of them are padding items, which divide the query
  // rows after the last request.
  template <class Problem>
  DEVICE int locate(const Problem& p, int item, Item& to) const {
    // No wider loads: a plan may lie at any multiple of 4 bytes.
    const int* record = p.work + int64(item) * kWorkStride;
    const bool listed = item < p.max_items;
    const auto column = [&](Work name, int otherwise) { return listed ? record[name] : otherwise; };
    to.row = min(column(kRow, 0), kMaxTokens), to.count = column(kRows, 0);
    to.start = column(kKvBegin, 0), to.end = column(kKvEnd, 0);
    to.position = column(kPosition, 0), to.page_start = max(column(kPageStart, 0), 0), to.slot = column(kSlot, -1);
    to.request = column(kRequest, 0);
    if constexpr (kPaged) {
      const int64 pages = p.num_pages > 0 ? max(p.max_pages - to.page_start, 0) : 0;
      to.end = static_cast<int>(min(int64(to.end), pages * p.page_size));
    } else {
      to.end = min(to.end, p.kv_rows - to.page_start);
    }
    if (to.count <= 0) {
      const int first = p.num_items - padding_items(p);
      if (item < first) return first;
      to.row = max(p.qo_indptr[p.max_batch], 0) + (p.num_items - 1 - item) * p.tile_rows;
      to.count = p.rows - to.row;
      to.end = min(to.start, 0), to.slot = -1;
    }
    to.count = min(to.count, p.tile_rows);
    return item;
  }
};

// The next unit of a walker that has rows; false if there is none. An item has `of_item` units.
// `schedule.locate(p, item, unit)` reads the item, or returns the number of a later item to go on with.
// `schedule.take(p, number, unit)` sets the other fields of unit `number`, or returns false if the unit has no rows.
template <class Schedule, class Problem, class Unit>
DEVICE bool next_unit(
    Schedule& schedule, const Problem& p, Unit& unit, int walker, int walkers, int units, int of_item) {
  for (;; ++schedule.wave) {
    const int64 u = unit_of_wave(schedule.wave, walker, walkers);
    if (int64(schedule.wave) * walkers >= units) return false;
    if (u >= units) continue;
    const int item = int(u) / of_item, first_padding = schedule.locate(p, item, unit);
    if (first_padding > item) {
      schedule.wave = max(schedule.wave, int(int64(first_padding) * of_item / walkers) - 1);
      continue;
    }
    if (!schedule.take(p, int(u), unit)) continue;
    ++schedule.wave;
    return true;
  }
}

}  // namespace
}  // namespace attn_ops
