// What decode and its combine share: the state of a row, sinks, and stores of four columns.
#pragma once

#include "out_type.cuh"

namespace attn_ops {
namespace {

// The online-softmax state of a row and head: `sum` and `values`, of four columns, are relative to `row_max`.
struct RowState {
  float row_max = -kInfinity, sum = 0;
  float values[4] = {};

  // Adds N states of other tokens.
  template <int N>
  DEVICE void add(const float (&maxima)[N], const float (&sums)[N], const float (&others)[N][4]) {
    float joined = row_max;
#pragma unroll
    for (int n = 0; n < N; ++n) joined = fmaxf(joined, maxima[n]);
    const float anchor = finite(joined), alpha = exp2_approx(row_max - anchor);
    row_max = joined, sum *= alpha;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= alpha;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float weight = exp2_approx(maxima[n] - anchor);
      sum += sums[n] * weight;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += others[n][i] * weight;
    }
  }

  // Adds a logit of value 0.
  DEVICE void add_sink(float sink) { add<1>({sink * kLog2e}, {1}, {}); }

  DEVICE float lse() const { return row_max + log2f(sum); }

  // Divides the values by the sum.
  DEVICE void normalize(float scale) {
    const float norm = sum > 0 ? scale / sum : 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] *= norm;
  }
};

template <OutType TYPE>
DEVICE void store_four(void* out, int64 index, const float (&x)[4]) {
  using Pair = decltype(pair_of<TYPE>(0, 0));
  struct alignas(2 * sizeof(Pair)) Four {
    Pair low, high;
  };
  static_cast<Four*>(out)[index / 4] = {pair_of<TYPE>(x[0], x[1]), pair_of<TYPE>(x[2], x[3])};
}

// Stores elements `index` to `index` + 3, a multiple of 4. `type` is not kLikeQuery.
DEVICE void store_four(int type, void* out, int64 index, const float (&x)[4]) {
  switch (type) {
    case kFloat32: return store_four<kFloat32>(out, index, x);
    case kFloat16: return store_four<kFloat16>(out, index, x);
    case kBFloat16: return store_four<kBFloat16>(out, index, x);
    case kE4M3: return store_four<kE4M3>(out, index, x);
    case kE5M2: return store_four<kE5M2>(out, index, x);
  }
}

}  // namespace
}  // namespace attn_ops
