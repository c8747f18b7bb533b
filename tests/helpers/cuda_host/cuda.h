// The part of CUDA's language that kernels here use, for a C++ compiler of the host.
#pragma once

#include <math.h>

#include <bit>
#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "interface.h"
#include "numbers.h"

#define __device__
#ifndef __global__  // programs that call only device functions leave kernels out
#define __global__ __attribute__((noinline))
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
// Static shared memory: CTAs that have it run one after the other. The section says where it is.
#define __shared__ static __attribute__((section("cuda_shared"), aligned(16)))

#define threadIdx host::registers.thread
#define blockIdx host::registers.block
#define gridDim host::registers.grid

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(std::uint64_t(a) * b >> 32); }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

// Of the whole warp: kernels here pass ~0u.
#define __syncthreads host::sync_threads
#define __syncwarp host::sync_warp
template <class T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  lane = int(threadIdx.x % 32) / width * width + lane % width;
  return std::bit_cast<T>(Bits(host::exchange(std::bit_cast<Bits>(x), lane, "__shfl_sync")));
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  const int lane = int(threadIdx.x % 32) ^ mask;
  return std::bit_cast<T>(Bits(host::exchange(std::bit_cast<Bits>(x), lane, "__shfl_xor_sync")));
}
inline bool __any_sync(unsigned, bool x) { return host::any(x); }
inline unsigned __ballot_sync(unsigned, bool x) { return host::ballot(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __clz(unsigned x) { return std::countl_zero(x); }
