// Hyperbolic tangents, of the soft cap.
#pragma once

#include "basics.cuh"

namespace attn_ops {

// tanh(x), by an exponential that may overflow. The hardware's tanh is off by 2^-11, too much for logits.
DEVICE float tanh_exact(float x) {
  return __fmaf_rn(-2.0f, reciprocal_approx(1 + exp2_approx(x * (2 * kLog2e))), 1.0f);
}

constexpr float kSmallTanh = 0.75f;

// tanh(x) for |x| <= kSmallTanh, by the polynomial in x^2 of least relative error, 7e-7.
DEVICE float tanh_small(float x) {
  const float square = x * x;
  float ratio = 0.01292963068f;
  ratio = __fmaf_rn(ratio, square, -0.05005630073f);
  ratio = __fmaf_rn(ratio, square, 0.1325898315f);
  ratio = __fmaf_rn(ratio, square, -0.3332825152f);
  return x * __fmaf_rn(ratio, square, 0.9999994349f);
}

}  // namespace attn_ops
