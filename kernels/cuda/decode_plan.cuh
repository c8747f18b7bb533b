// Decode of paged KV: the work items of a CTA, which the plan lists.
#pragma once

#include "decode_problem.cuh"
#include "schedule.cuh"

namespace attn_ops {
namespace {

struct Problem {
  const int *kv_indices, *kv_len, *work, *cta_indptr, *merge_indptr;
  int window_left, rows, num_pages, max_pages, max_items, max_batch, slots, page_size;
  int box;  // tokens of a TMA box, a power of 2 that divides a page
};

// Reads work item `item`, bounded by the capacities. If item >= stop: a work item without tokens.
DEVICE WorkItem read_item(const Problem& p, int item, int stop) {
  // Loads of 4 bytes: a plan may lie at any multiple of 4 bytes. All loads precede the first use of a result and none
  // is in a branch, so that they are in flight together.
  const int* record = p.work + int64(item) * kWorkStride;
  const bool listed = item < stop;
  const auto column = [&](Work name, int otherwise) { return listed ? record[name] : otherwise; };
  const int kv_begin = column(kKvBegin, 0), kv_end = column(kKvEnd, 0), position = column(kPosition, 0);
  const int page_start = column(kPageStart, 0);
  WorkItem to = {.row = column(kRow, -1), .position = position, .slot = column(kSlot, -1)};
  to.page_start = min(max(page_start, 0), p.max_pages);
  const int64 of_window = p.window_left >= 0 ? int64(position) - p.window_left : 0;
  const int64 begin = max(int64(max(kv_begin, 0)), of_window);
  const int64 pages = p.num_pages > 0 ? p.max_pages - to.page_start : 0;
  const int64 end = min(min(int64(kv_end), pages * p.page_size), int64(kMaxTokens));
  to.begin = begin < end ? int(begin) : 0, to.end = begin < end ? int(end) : 0;
  to.first = to.begin & -p.box;
  return to;
}

// The work items of this CTA.
struct WorkList {
  int begin, stop;  // items of the plan
  WorkItem first;   // item `begin`

  DEVICE explicit WorkList(const Problem& p) {
    // With one request, the first item of CTA c is item c. So item c is loaded at the same time as cta_indptr, and the
    // first item is loaded again if it is another one.
    const int cta = cta_of_heads(), from = p.cta_indptr[cta], to = p.cta_indptr[cta + 1];
    first = read_item(p, cta, p.max_items);
    begin = min(max(from, 0), p.max_items), stop = min(to, p.max_items);
    if (begin != cta || begin >= stop) first = read_item(p, begin, stop);
  }
};

}  // namespace
}  // namespace attn_ops
