// Merge attention states (v, s): v is the output over a set of keys, s its base-2 LSE.
//
// The output over the union of disjoint key sets is sum(2^s_i * v_i) / sum(2^s_i), computed as an online softmax over
// the states. A state of no keys has s = -inf and adds nothing, whatever its v. An s of NaN or +inf gives NaN.
//
// Compiled for DTYPE (elements.cuh: 0 float32, 1 float16, 2 bfloat16). Head counts, head dimension and strides are
// parameters. A thread owns one Vector, 16 bytes, of a packed row (a row and a head), and reads all s that it needs
// itself. If there are few packed rows, several threads own a Vector, and each merges a part of the states.
#include "basics.cuh"
#include "elements.cuh"

namespace attn_ops {

using Type = TypeOf<DTYPE>::Type;
using Element = Type::Element;

constexpr int kThreads = 128;
constexpr int kElements = Type::kElements;
// States whose loads are in flight together. With few rows the latency of loads is the limit; with many rows, memory is
// faster if fewer loads are in flight.
constexpr int kBatch = 4, kBatchOfFewRows = 8;

// The online softmax of a packed row over the states added so far. row_max is the largest s, row_sum the sum of
// 2^(s - row_max), and acc the sum of 2^(s - row_max) * v for each element of this thread.
struct Softmax {
  float row_max = -kInfinity, row_sum = 0.0f;
  float acc[kElements] = {};

  Softmax() = default;

  // Loads the Softmax that thread `thread` has stored.
  DEVICE Softmax(const float (&shared)[kElements + 2][kThreads], int thread)
      : row_max(shared[0][thread]), row_sum(shared[1][thread]) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) acc[e] = shared[e + 2][thread];
  }

  DEVICE void store(float (&shared)[kElements + 2][kThreads], int thread) const {
    shared[0][thread] = row_max, shared[1][thread] = row_sum;
#pragma unroll
    for (int e = 0; e < kElements; ++e) shared[e + 2][thread] = acc[e];
  }

  template <int kStates>
  DEVICE void add(const float (&s)[kStates], const Vector (&v)[kStates]) {
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
      const bool empty = s[i] == -kInfinity;  // the v of a state without keys may be NaN
#pragma unroll
      for (int e = 0; e < kElements; ++e) acc[e] += empty ? 0.0f : p * value[e];
    }
  }

  // Adds the states of another thread's Softmax.
  DEVICE void add(const Softmax& other) {
    const float new_max = fmaxf(row_max, other.row_max), anchor = finite(new_max);
    const float alpha = exp2_approx(row_max - anchor), other_alpha = exp2_approx(other.row_max - anchor);
    row_max = new_max, row_sum = row_sum * alpha + other.row_sum * other_alpha;
#pragma unroll
    for (int e = 0; e < kElements; ++e) acc[e] = acc[e] * alpha + other.acc[e] * other_alpha;
  }

  DEVICE Vector output() const {
    const float inverse = row_sum > 0.0f ? reciprocal_approx(row_sum) : 0.0f;
    float value[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) value[e] = acc[e] * inverse;
    return Type::pack(value);
  }

  DEVICE float lse() const { return row_max + log2_approx(row_sum); }
};

// Sizes by which a thread finds its packed row and Vector. Most threads make a few loads and end, and divisions would
// take most of the time before the first load. So divisions are multiplications by ceil(2^32 / divisor).
struct Layout {
  int64 packed_rows;           // rows * heads
  int heads, vectors;          // vectors: Vectors of a packed row
  int64 of_heads, of_vectors;  // inverses: ceil(2^32 / heads), ceil(2^32 / vectors)

  // n / divisor. Exact if n * divisor < 2^32, since the inverse exceeds 2^32 / divisor by less than 1.
  DEVICE static uint32 divide(uint32 n, int64 inverse) {
    return n * static_cast<uint64>(inverse) >> 32;
  }
};

// What a thread owns: the Vector from element `column` on of packed row `packed_row`. A CTA has `rows` packed rows.
// Each `vectors` consecutive threads are a group with one packed row: group g has packed row g % rows of the CTA, and
// part g / rows of the states.
struct Place {
  int64 packed_row, row;
  int head, column, group;
  bool exists;

  DEVICE Place(const Layout& to, int rows, int parts = 1) {
    group = Layout::divide(threadIdx.x, to.of_vectors);
    const int first = parts > 1 ? group % rows : group;
    packed_row = static_cast<int64>(blockIdx.x) * rows + first;
    exists = group < rows * parts && packed_row < to.packed_rows;
    column = (static_cast<int>(threadIdx.x) - group * to.vectors) * kElements;
    row = to.packed_rows * to.heads >> 32 ? packed_row / to.heads : Layout::divide(packed_row, to.of_heads);
    head = static_cast<int>(packed_row - row * to.heads);
  }
};

// Loads that do not allocate in L1 are faster for outputs of up to half of the 50 MB L2 cache of a Hopper GPU, ordinary
// loads for larger outputs. The limit is in Vectors.
constexpr int64 kLargeOutput = (25 << 20) / sizeof(Vector);

DEVICE Vector load_state(const Element* v, bool large_output) { return large_output ? load(v) : load_streaming(v); }

// The states of this thread's packed row, at this thread's Vector.
struct States {
  const Element* v;
  const float* s;
  int64 stride_v, stride_s;
  bool large_output;

  // Adds N states, from state `first` on. Their loads are in flight together.
  template <int N>
  DEVICE void add_to(Softmax& softmax, int first) const {
    float lses[N];
    Vector values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      lses[i] = s[(first + i) * stride_s];
      values[i] = load_state(v + (first + i) * stride_v, large_output);
    }
    softmax.add(lses, values);
  }
};

// Grid: blocks of `rows` packed rows.
// Owns: a CTA owns `rows` packed rows, and merges all states of each. A thread merges the states of its part, and then
//     the threads of part 0 add the results of the other parts.
// Loop invariant: `softmax` has the states of the thread's part before `state`.
// Barrier: one, if there are several parts, before part 0 reads the results of the other parts.
// Bound by: memory bandwidth; with few rows by latency, since batches of states are loaded one after the other.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const Element* v,   // [rows, states, heads, vectors * kElements]
                        const float* s,     // [rows, states, heads]
                        Element* out,       // [rows, heads, vectors * kElements], contiguous
                        float* lse,         // [rows, heads], contiguous
                        int64 packed_rows, int heads, int vectors, int64 of_heads, int64 of_vectors, int rows,
                        int states, int parts, int part_states,  // parts * part_states >= states
                        int64 stride_v_row, int64 stride_v_state, int64 stride_v_head, int64 stride_s_row,
                        int64 stride_s_state) {
  const Place at({packed_rows, heads, vectors, of_heads, of_vectors}, rows, parts);
  const int part = parts > 1 ? at.group / rows : 0;
  wait_for_earlier_kernels();
  launch_later_kernels();
  Softmax softmax;
  if (at.exists) {
    const States of_row = {v + at.row * stride_v_row + at.head * stride_v_head + at.column,
                           s + at.row * stride_s_row + at.head, stride_v_state, stride_s_state,
                           packed_rows * vectors > kLargeOutput};
    int state = part * part_states;
    const int end = min(state + part_states, states);
    if (parts > 1)
      for (; state + kBatchOfFewRows <= end; state += kBatchOfFewRows) of_row.add_to<kBatchOfFewRows>(softmax, state);
    for (; state + kBatch <= end; state += kBatch) of_row.add_to<kBatch>(softmax, state);
    switch (end - state) {
      case 3: of_row.add_to<3>(softmax, state); break;
      case 2: of_row.add_to<2>(softmax, state); break;
      case 1: of_row.add_to<1>(softmax, state); break;
    }
  }
  if (parts > 1) {
    __shared__ float sums[kElements + 2][kThreads];
    softmax.store(sums, threadIdx.x);
    __syncthreads();
    for (int i = 1; i < parts && part == 0; ++i) softmax.add(Softmax(sums, threadIdx.x + i * rows * vectors));
  }
  if (!at.exists || part > 0) return;
  store(out + at.packed_row * (vectors * kElements) + at.column, softmax.output());
  if (at.column == 0) lse[at.packed_row] = softmax.lse();
}

// Grid: blocks of `rows` packed rows.
// Owns: a CTA owns `rows` packed rows, and merges the states a and b of each.
// Bound by: memory bandwidth; with few rows by launch latency.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state_kernel(const Element* v_a,  // [rows, heads, vectors * kElements]
                       const float* s_a,    // [rows, heads]
                       const Element* v_b, const float* s_b,
                       Element* out,  // [rows, heads, vectors * kElements], contiguous
                       float* lse,    // [rows, heads], contiguous
                       int64 packed_rows, int heads, int vectors, int64 of_heads, int64 of_vectors, int rows,
                       int64 stride_va_row, int64 stride_va_head, int64 stride_sa_row, int64 stride_vb_row,
                       int64 stride_vb_head, int64 stride_sb_row) {
  const Place at({packed_rows, heads, vectors, of_heads, of_vectors}, rows);
  wait_for_earlier_kernels();
  launch_later_kernels();
  if (!at.exists) return;
  const float lses[2] = {s_a[at.row * stride_sa_row + at.head], s_b[at.row * stride_sb_row + at.head]};
  const bool large = packed_rows * vectors > kLargeOutput;
  const Vector values[2] = {load_state(v_a + at.row * stride_va_row + at.head * stride_va_head + at.column, large),
                            load_state(v_b + at.row * stride_vb_row + at.head * stride_vb_head + at.column, large)};
  Softmax softmax;
  softmax.add(lses, values);
  store(out + at.packed_row * (vectors * kElements) + at.column, softmax.output());
  if (at.column == 0) lse[at.packed_row] = softmax.lse();
}

// Grid: blocks of `rows` packed rows.
// Owns: a CTA owns `rows` packed rows, and merges the other state into each, in place.
// Barrier: one, between the loads of s and the store of s, since all threads of a packed row load its s.
// Bound by: memory bandwidth; with few rows by launch latency.
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_state_in_place_kernel(Element* v,  // [rows, heads, vectors * kElements]
                                float* s,    // [rows, heads]
                                const Element* v_other, const float* s_other,
                                const unsigned char* merged,  // [rows]: whether a row is merged, or null for all
                                int64 packed_rows, int heads, int vectors, int64 of_heads, int64 of_vectors, int rows,
                                int64 stride_v_row, int64 stride_v_head, int64 stride_s_row, int64 stride_vo_row,
                                int64 stride_vo_head, int64 stride_so_row) {
  const Place at({packed_rows, heads, vectors, of_heads, of_vectors}, rows);
  wait_for_earlier_kernels();
  launch_later_kernels();
  const bool merges = at.exists && (!merged || merged[at.row]);
  Element* target = v + at.row * stride_v_row + at.head * stride_v_head + at.column;
  float* sum = s + at.row * stride_s_row + at.head;
  Softmax softmax;
  if (merges) {
    const float lses[2] = {*sum, s_other[at.row * stride_so_row + at.head]};
    const bool large = packed_rows * vectors > kLargeOutput;
    const Vector values[2] = {
        load_state(target, large),
        load_state(v_other + at.row * stride_vo_row + at.head * stride_vo_head + at.column, large)};
    softmax.add(lses, values);
  }
  __syncthreads();
  if (!merges) return;
  store(target, softmax.output());
  if (at.column == 0) *sum = softmax.lse();
}

}  // namespace attn_ops
