// kernels/cuda/basics.cuh on the host.
#pragma once

#include "cuda.h"
#include "types.cuh"

namespace attn_ops {

DEVICE void wait_for_earlier_kernels() { host::wait_for_earlier_kernels(); }
DEVICE void launch_later_kernels() {}
DEVICE void fence_gpu() { host::fence_gpu(); }
DEVICE void acquire_plan() { host::acquire_plan(); }

DEVICE uint64 nanoseconds() { return host::nanoseconds(); }
DEVICE uint32 cycles() { return uint32(nanoseconds() / 16); }  // 32 bits last for a minute
DEVICE void atomic_add(uint64* sum, uint64 x) { *sum += x; }
DEVICE uint32 atomic_increment(int* counter, uint32 last) { return host::atomic_increment(counter, last); }

DEVICE Vector load(const void* address) { return *static_cast<const Vector*>(address); }
DEVICE Vector load_streaming(const void* address) { return *static_cast<const Vector*>(address); }
DEVICE void store(void* address, const Vector& x) { *static_cast<Vector*>(address) = x; }

DEVICE float without_denormals(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
DEVICE float exp2_approx(float x) { return without_denormals(std::exp2(without_denormals(x))); }
DEVICE float log2_approx(float x) { return std::log2(x); }
DEVICE float reciprocal_approx(float x) { return without_denormals(1 / without_denormals(x)); }
DEVICE float sin_approx(float x) { return std::sin(x); }
DEVICE float cos_approx(float x) { return std::cos(x); }

// prmt takes the lowest three bits of a digit as the byte's number; kernels here leave the fourth, the sign, at 0.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  uint32 chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32((uint64(high) << 32 | low) >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return chosen;
}

DEVICE uint32 float16_pair(float low, float high) {
  return host::to_float16(low) | uint32(host::to_float16(high)) << 16;
}
DEVICE uint32 bfloat16_pair(float low, float high) {
  return host::to_bfloat16(low) | uint32(host::to_bfloat16(high)) << 16;
}
DEVICE uint16 e4m3_pair(float low, float high) { return uint16(host::to_e4m3(low) | host::to_e4m3(high) << 8); }
DEVICE uint16 e5m2_pair(float low, float high) { return uint16(host::to_e5m2(low) | host::to_e5m2(high) << 8); }
DEVICE uint32 float16_of_e4m3(uint16 pair) {
  return float16_pair(host::from_e4m3(uint8_t(pair)), host::from_e4m3(uint8_t(pair >> 8)));
}
DEVICE uint32 float16_of_e5m2(uint16 pair) { return uint32(pair & 0xFF) << 8 | uint32(pair & 0xFF00) << 16; }
DEVICE void float16_values(uint32 pair, float& low, float& high) {
  low = host::from_float16(uint16(pair)), high = host::from_float16(uint16(pair >> 16));
}

}  // namespace attn_ops
