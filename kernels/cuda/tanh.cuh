// Hyperbolic tangents for the soft cap.
#pragma once

#include "basics.cuh"

namespace attn_ops {

// tanh(x) = 1 - 2 / (1 + e^(2 x)). The result is also right where the exponential overflows. The hardware's tanh is off
// by 2^-11, too much for logits.
DEVICE float tanh_exact(float x) {
  return __fmaf_rn(-2.0f, reciprocal_approx(1 + exp2_approx(x * (2 * kLog2e))), 1.0f);
}

constexpr float kSmallTanh = 0.5f;

// tanh(scale * x) for |scale * x| <= kSmallTanh and |scale| from kLeastTanhScale to 1 / kLeastTanhScale: x times the
// polynomial in x^2 of least relative error, 6e-7. Powers of the scale, which are finite in this range, are factors of
// the coefficients.
struct SmallTanh {
  float c0, c1, c2, c3;

  DEVICE explicit SmallTanh(float scale) {
    const float square = scale * scale;
    c0 = scale * 0.9999994636f, c1 = scale * square * -0.3332631886f;
    c2 = scale * square * (square * 0.1319029778f), c3 = scale * square * (square * square * -0.04440223053f);
  }
  DEVICE float operator()(float x) const {
    const float square = x * x;
    return x * __fmaf_rn(__fmaf_rn(__fmaf_rn(c3, square, c2), square, c1), square, c0);
  }
};
constexpr float kLeastTanhScale = 0x1p-16f;

}  // namespace attn_ops
