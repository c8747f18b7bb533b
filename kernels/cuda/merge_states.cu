// Merge attention states (v, s): v is the output over a set of keys, s its base-2 LSE.
//
// The output over the union of disjoint key sets is sum(2^s_i * v_i) / sum(2^s_i), computed as an online softmax over
// the states. A state of no keys has s = -inf and adds nothing, whatever its v.
//
// Compiled for DTYPE (basics.cuh). Head counts, head dimension and strides are parameters. A thread owns one Vector, 16
// bytes, of a packed row (a row and a head), and reads the row's s itself: no thread waits for another's.
#include "basics.cuh"
#include "elements.cuh"

namespace attn_ops {

using Type = TypeOf<DTYPE>::Type;
using Element = Type::Element;

constexpr int kThreads = 128;
constexpr int kElements = Type::kElements;
constexpr int kBatch = 4;    // states that are added to the softmax at once
constexpr int kBatches = 2;  // that are copied at the same time

// The online softmax of a packed row. row_max is the largest s so far, row_sum the sum of 2^(s - row_max), acc the sum
// of 2^(s - row_max) * v over this thread's elements.
struct Softmax {
  float row_max = -kInfinity, row_sum = 0.0f;
  float acc[kElements] = {};

  template <int kStates>
  __device__ __forceinline__ void add(const float (&s)[kStates], const Vector (&v)[kStates]) {
    float new_max = row_max;
#pragma unroll
    for (int i = 0; i < kStates; ++i) new_max = fmaxf(new_max, s[i]);
    const float anchor = finite(new_max), alpha = exp2_approx(row_max - anchor);
    row_max = new_max, row_sum *= alpha;
#pragma unroll
    for (int e = 0; e < kElements; ++e) acc[e] *= alpha;
#pragma unroll
    for (int i = 0; i < kStates; ++i) {
      const float p = exp2_approx(s[i] - anchor);
      row_sum += p;
      float value[kElements];
      Type::unpack(v[i], value);
      const bool has_keys = s[i] > -kInfinity;  // the v of a state without keys may be NaN
#pragma unroll
      for (int e = 0; e < kElements; ++e) acc[e] += has_keys ? p * value[e] : 0.0f;
    }
  }

  __device__ __forceinline__ Vector output() const {
    const float inverse = row_sum > 0.0f ? reciprocal_approx(row_sum) : 0.0f;
    float value[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) value[e] = acc[e] * inverse;
    return Type::pack(value);
  }

  __device__ __forceinline__ float lse() const { return row_max + log2_approx(row_sum); }
};

// What a thread owns: the Vector from element `column` on of a packed row. `vectors` are those of a row.
struct Place {
  int64 packed_row, row;
  int head, column;
  bool exists;

  __device__ __forceinline__ Place(int64 packed_rows, int heads, int vectors) {
    const int rows = kThreads / vectors, index = static_cast<int>(threadIdx.x) / vectors;
    packed_row = static_cast<int64>(blockIdx.x) * rows + index;
    exists = index < rows && packed_row < packed_rows;
    column = (static_cast<int>(threadIdx.x) - index * vectors) * kElements;
    if (packed_rows >> 32) {
      row = packed_row / heads;
    } else {  // a division of 32 bits takes a fifth of the time
      row = static_cast<uint32>(packed_row) / static_cast<uint32>(heads);
    }
    head = static_cast<int>(packed_row - row * heads);
  }
};

// Grid: blocks of kThreads / vectors packed rows.
// Owns: a CTA owns that many packed rows, and merges all states of each.
// Loop invariant: `softmax` is that of the states before `state`. The copies of those from `state` to
// `state + kBatches * kBatch` are under way. A thread reads what it has copied itself: there are no barriers.
// Bound by: memory bandwidth; with few rows by latency, since batches of states are loaded one after the other.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const Element* v,   // [rows, states, heads, vectors * kElements]
                        const float* s,     // [rows, states, heads]
                        Element* out,       // [rows, heads, vectors * kElements], contiguous
                        float* lse,         // [rows, heads], contiguous
                        int64 packed_rows,  // rows * heads
                        int states, int heads, int vectors, int64 stride_v_row, int64 stride_v_state,
                        int64 stride_v_head, int64 stride_s_row, int64 stride_s_state) {
  const Place at(packed_rows, heads, vectors);
  wait_for_earlier_kernels();
  launch_later_kernels();
  if (!at.exists) return;
  v += at.row * stride_v_row + at.head * stride_v_head + at.column;
  s += at.row * stride_s_row + at.head;
  __shared__ Vector copied_v[kBatches][kBatch][kThreads];
  __shared__ float copied_s[kBatches][kBatch][kThreads];
  const auto copy = [&](int batch, int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool exists = first + i < states;
      copy_async(&copied_v[batch][i][threadIdx.x], exists ? v + (first + i) * stride_v_state : v, exists);
      copy_async(&copied_s[batch][i][threadIdx.x], exists ? s + (first + i) * stride_s_state : s, exists);
    }
    commit_copies();
  };
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) copy(batch, batch * kBatch);
  Softmax softmax;
  int batch = 0;
  for (int state = 0; state < states; state += kBatch) {
    wait_for_copies<kBatches - 1>();
    float lses[kBatch];
    Vector values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      lses[i] = state + i < states ? copied_s[batch][i][threadIdx.x] : -kInfinity;
      values[i] = copied_v[batch][i][threadIdx.x];
    }
    softmax.add(lses, values);
    copy(batch, state + kBatches * kBatch);
    batch = (batch + 1) % kBatches;
  }
  store(out + at.packed_row * (vectors * kElements) + at.column, softmax.output());
  if (at.column == 0) lse[at.packed_row] = softmax.lse();
}

// Grid: blocks of kThreads / vectors packed rows.
// Owns: a CTA owns that many packed rows, and merges the states a and b of each.
// Bound by: memory bandwidth; with few rows by launch latency.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state_kernel(const Element* v_a,  // [rows, heads, vectors * kElements]
                       const float* s_a,    // [rows, heads]
                       const Element* v_b, const float* s_b,
                       Element* out,  // [rows, heads, vectors * kElements], contiguous
                       float* lse,    // [rows, heads], contiguous
                       int64 packed_rows, int heads, int vectors, int64 stride_va_row, int64 stride_va_head,
                       int64 stride_sa_row, int64 stride_vb_row, int64 stride_vb_head, int64 stride_sb_row) {
  const Place at(packed_rows, heads, vectors);
  wait_for_earlier_kernels();
  launch_later_kernels();
  if (!at.exists) return;
  const float lses[2] = {s_a[at.row * stride_sa_row + at.head], s_b[at.row * stride_sb_row + at.head]};
  const Vector values[2] = {load_streaming(v_a + at.row * stride_va_row + at.head * stride_va_head + at.column),
                            load_streaming(v_b + at.row * stride_vb_row + at.head * stride_vb_head + at.column)};
  Softmax softmax;
  softmax.add(lses, values);
  store(out + at.packed_row * (vectors * kElements) + at.column, softmax.output());
  if (at.column == 0) lse[at.packed_row] = softmax.lse();
}

// Grid: blocks of kThreads / vectors packed rows.
// Owns: a CTA owns that many packed rows, merges the other state into each and stores it in place.
// Barrier: one, between the loads of s and its store, since several threads load the same element.
// Bound by: memory bandwidth; with few rows by launch latency.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state_in_place_kernel(Element* v,  // [rows, heads, vectors * kElements]
                                float* s,    // [rows, heads]
                                const Element* v_other, const float* s_other,
                                const unsigned char* merged,  // [rows]: whether a row is merged, or null for all
                                int64 packed_rows, int heads, int vectors, int64 stride_v_row, int64 stride_v_head,
                                int64 stride_s_row, int64 stride_vo_row, int64 stride_vo_head, int64 stride_so_row) {
  const Place at(packed_rows, heads, vectors);
  wait_for_earlier_kernels();
  launch_later_kernels();
  const bool merges = at.exists && (!merged || merged[at.row]);
  Element* target = v + at.row * stride_v_row + at.head * stride_v_head + at.column;
  float* sum = s + at.row * stride_s_row + at.head;
  Softmax softmax;
  if (merges) {
    const float lses[2] = {*sum, s_other[at.row * stride_so_row + at.head]};
    const Vector values[2] = {
        load_streaming(target),
        load_streaming(v_other + at.row * stride_vo_row + at.head * stride_vo_head + at.column)};
    softmax.add(lses, values);
  }
  __syncthreads();
  if (!merges) return;
  store(target, softmax.output());
  if (at.column == 0) *sum = softmax.lse();
}

}  // namespace attn_ops
