// Decode of dense KV: the work items of a CTA, splits of requests of equal lengths, and the producer.
#pragma once

#include "decode_problem.cuh"
#include "hopper.cuh"

namespace attn_ops {
namespace {

struct Problem {
  int window_left, rows;         // a request has one row
  int keys, splits, split_keys;  // of a request: keys, splits, and keys of each split but the last

  DEVICE int64 units() const { return int64(rows) * splits; }
};

// Work item `item` of this CTA. If item >= stop: a work item without tokens. The first split begins at the first key
// that the row sees. split_keys is a multiple of kSplitKeys.
DEVICE WorkItem read_item(const Problem& p, int item, int stop) {
  if (item >= stop) return {.row = -1, .slot = -1};
  const uint32 unit = cta_of_heads() + uint32(item) * num_ctas();
  const uint32 row = p.splits > 1 ? unit / p.splits : unit;
  WorkItem to = {.row = int(row), .position = p.keys - 1, .slot = p.splits > 1 ? int(unit) : -1};
  const int64 visible = p.window_left >= 0 ? max(int64(to.position) - p.window_left, int64(0)) : 0;
  const int64 begin = visible + int64(unit - row * p.splits) * p.split_keys;
  const int64 end = p.splits > 1 ? min(begin + p.split_keys, int64(p.keys)) : p.keys;
  to.begin = begin < end ? int(begin) : 0, to.end = begin < end ? int(end) : 0;
  to.first = to.begin;
  return to;
}

// The work items of this CTA: every num_ctas()-th unit.
struct WorkList {
  int begin = 0, stop;
  WorkItem first;

  DEVICE explicit WorkList(const Problem& p) {
    stop = int((p.units() - cta_of_heads() + num_ctas() - 1) / num_ctas());
    first = read_item(p, begin, stop);
  }
};

// One warp, of which one thread loads the KV tiles of all work items into the ring. A box is a KV tile: the tokens of
// the KV heads of this CTA. TMA writes zeros in place of tokens after the last of the request.
DEVICE void produce(const Problem& p, const TensorMap& k, const TensorMap& v, Shared& shared) {
  const uint64 policy = l2_cache_policy(true);
  const WorkList list(p);
  end_prologue(true);
  if (!elect()) return;
  uint32 stage = 0, parity = 1;
  for (int i = list.begin; i < list.stop; ++i) {
    const WorkItem item = read_item(p, i, list.stop);
    for (int first = item.first; first < item.end; first += kTile) {
#if ROPE
      const uint32 k_full = shared_address(&shared.k_loaded[stage]);
#else
      const uint32 k_full = shared_address(&shared.k_full[stage]);
#endif
      const uint32 v_full = shared_address(&shared.v_full[stage]);
      wait(shared_address(&shared.empty[stage]), parity);
      arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);
      load_box(shared_address(shared.stages[stage].keys), &k, 0, first, 0, blockIdx.x, item.row, k_full, policy);
      load_box(shared_address(shared.stages[stage].values), &v, 0, first, 0, blockIdx.x, item.row, v_full, policy);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
}

}  // namespace
}  // namespace attn_ops
