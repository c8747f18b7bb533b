// Types of elements in memory, and their conversion to and from floats.
#pragma once

#include "basics.cuh"

namespace attn_ops {

// Each type has its `Element`, the number `kElements` of elements in a 16-byte Vector, and conversions between a Vector
// and floats.
struct Float32 {
  using Element = float;
  static constexpr int kElements = 4;

  DEVICE static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) to[i] = __uint_as_float(x.words[i]);
  }
  DEVICE static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < kElements; ++i) x.words[i] = __float_as_uint(from[i]);
    return x;
  }
};

struct Float16 {
  using Element = uint16;
  static constexpr int kElements = 8;

  DEVICE static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) float16_values(x.words[i], to[2 * i], to[2 * i + 1]);
  }
  DEVICE static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.words[i] = float16_pair(from[2 * i], from[2 * i + 1]);
    return x;
  }
};

struct BFloat16 {
  using Element = uint16;
  static constexpr int kElements = 8;

  DEVICE static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(x.words[i] << 16);
      to[2 * i + 1] = __uint_as_float(x.words[i] & 0xffff0000u);
    }
  }
  DEVICE static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < 4; ++i) x.words[i] = bfloat16_pair(from[2 * i], from[2 * i + 1]);
    return x;
  }
};

// The type of a kernel's macro DTYPE: 0 float32, 1 float16, 2 bfloat16.
template <int kDtype>
struct TypeOf;
template <>
struct TypeOf<0> {
  using Type = Float32;
};
template <>
struct TypeOf<1> {
  using Type = Float16;
};
template <>
struct TypeOf<2> {
  using Type = BFloat16;
};

}  // namespace attn_ops
