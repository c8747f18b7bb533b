// Combine of decode: the output of a row from the partial results of its splits, and zeros for rows without tokens.
//
// One image: head counts, head dim, and the type of the output are parameters.
#include "decode_epilogue.cuh"

namespace attn_ops {
namespace {

constexpr int kSplits = 8;  // partial results that a lane has in flight

// A row, and the slots of its splits. `pending` if it has splits or no tokens: decode has not written it.
struct SplitRow {
  int first, end;
  bool pending;
};

DEVICE SplitRow read_row(const int* kv_len, const int* merge_indptr, int row, int rows, int max_batch, int slots) {
  if (row >= rows) return {};
  if (row >= max_batch) return {0, 0, true};
  const int first = min(max(merge_indptr[row], 0), slots), end = min(merge_indptr[row + 1], slots);
  return {first, end, end > first || kv_len[row] <= 0};
}

// The lane of the bit of `mask` that has `rank` bits before it.
DEVICE int lane_of(uint32 mask, int rank) {
  for (int i = 0; i < rank; ++i) mask &= mask - 1;
  return __ffs(mask) - 1;
}

// Partial results of each lane: four values, and the LSE. Copies take no registers: the assembler would move loads to
// their uses, and few would be in flight.
struct Copies {
  Vector values[kSplits][32];
  float lse[kSplits][32];
};

// Copies `count` partial results, but at most kSplits. `stride` is in rows of `dim` values and one LSE.
DEVICE void copy_splits(Copies& to, const float* values, const float* lse, int64 stride, int dim, int count) {
  const int lane = threadIdx.x;
  const bool aligned = reinterpret_cast<uint64>(values) % 16 == 0;  // a workspace may lie at any multiple of 4 bytes
#pragma unroll
  for (int i = 0; i < kSplits; ++i) copy_async(&to.lse[i][lane], i < count ? lse + i * stride : lse, i < count);
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kSplits; ++i)
      copy_async(&to.values[i][lane], i < count ? values + i * stride * dim : values, i < count);
  } else {
    for (int i = 0; i < kSplits; ++i)
      for (int j = 0; j < 4; ++j)
        copy_async(reinterpret_cast<float*>(&to.values[i][lane]) + j, (i < count ? values + i * stride * dim : values) + j,
                   i < count);
  }
  commit_copies();
}

}  // namespace

// Grid: any number of warps.
// Owns: jobs blockIdx.x, blockIdx.x + gridDim.x and so on of all pending rows. A job is 4 * lanes columns of one head.
// Loop invariant: `rank` pending rows are before row `block`; the jobs of this warp before `job` are done.
// Barriers: none, a lane reads its own copies; griddepcontrol.wait before the first partial result is read.
// Bound by: latency. The first row is found while decode ends.
extern "C" __global__ void __launch_bounds__(32) combine_decode(
    void* out,                // [rows, heads, dim]
    float* lse,               // [rows, heads] or null
    const float* partial,     // [slots, heads, dim], then the LSE [slots, heads]
    const float* sinks,       // [heads] or null
    const int* kv_len,        // [max_batch]
    const int* merge_indptr,  // [max_batch + 1]
    int rows, int max_batch, int slots, int heads, int dim,
    int lanes,                // that share a partial result, with four columns each; a power of 2 from 8 on
    int out_type) {           // OutType
  __shared__ Copies copies;
  acquire_plan();
  const int lane = threadIdx.x, groups = 32 / lanes, slices = dim / (4 * lanes), jobs_of_row = heads * slices;
  const float* partial_lse = partial + int64(slots) * heads * dim;
  bool waited = false;
  int job = blockIdx.x, rank = 0;
  SplitRow row = read_row(kv_len, merge_indptr, lane, rows, max_batch, slots);
  for (int block = 0; block < rows; block += 32) {
    const SplitRow next = read_row(kv_len, merge_indptr, block + 32 + lane, rows, max_batch, slots);
    const uint32 pending = __ballot_sync(~0u, row.pending);
    const int after = rank + __popc(pending);
    for (; job < after * jobs_of_row; job += gridDim.x) {
      const int of_row = job % jobs_of_row, head = of_row / slices, slice = of_row % slices;
      const int source = lane_of(pending, job / jobs_of_row - rank), column = (slice * lanes + lane % lanes) * 4;
      const int first = __shfl_sync(~0u, row.first, source), end = __shfl_sync(~0u, row.end, source);
      if (!waited) {
        wait_for_earlier_kernels();
        launch_later_kernels();
        waited = true;
      }
      const float sink = sinks ? sinks[head] : 0;
      RowState state;
      for (int slot = first + lane / lanes; slot < end; slot += kSplits * groups) {
        const int count = (end - slot + groups - 1) / groups;
        const int64 at = int64(slot) * heads + head;
        copy_splits(copies, partial + at * dim + column, partial_lse + at, int64(groups) * heads, dim, count);
        float of_split[kSplits], sums[kSplits], values[kSplits][4];
        wait_for_copies<0>();
#pragma unroll
        for (int i = 0; i < kSplits; ++i) {
          of_split[i] = i < count ? copies.lse[i][lane] : -kInfinity;
          sums[i] = 1;  // a partial result is a state with a sum of 1
#pragma unroll
          for (int j = 0; j < 4; ++j) values[i][j] = __uint_as_float(copies.values[i][lane].words[j]);
        }
        state.add(of_split, sums, values);
      }
      for (int mask = lanes; mask < 32; mask *= 2) {
        const float other_max[1] = {__shfl_xor_sync(~0u, state.row_max, mask)};
        const float other_sum[1] = {__shfl_xor_sync(~0u, state.sum, mask)};
        float other[1][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) other[0][i] = __shfl_xor_sync(~0u, state.values[i], mask);
        state.add(other_max, other_sum, other);
      }
      if (sinks) state.add_sink(sink);
      const int64 to = int64(block + source) * heads + head;
      if (lane == 0 && slice == 0 && lse) lse[to] = state.lse();
      state.normalize(1);
      if (lane < lanes) store_four(out_type, out, to * dim + column, state.values);
    }
    rank = after, row = next;
  }
  if (!waited) {
    launch_later_kernels();
    wait_for_earlier_kernels();
  }
}

}  // namespace attn_ops
