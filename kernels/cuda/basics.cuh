// PTX that all CUDA kernels use: programmatic dependent launch, clocks, 16-byte loads and stores, exponentials,
// conversions.
#pragma once

#include "types.cuh"

namespace attn_ops {

// ---- Programmatic dependent launch --------------------------------------------------------------------------------

// Waits until earlier kernels of the stream have finished. Before this call a kernel may read only memory that no
// unfinished kernel writes.
DEVICE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start. Its CTAs run up to their wait_for_earlier_kernels.
DEVICE void launch_later_kernels() { asm volatile("griddepcontrol.launch_dependents;"); }

// Orders this thread's memory accesses before the fence and after the fence, for the whole GPU.
DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Lets this thread read a plan that a finished kernel has published, before wait_for_earlier_kernels.
DEVICE void acquire_plan() { fence_gpu(); }

// ---- Clocks (clocks.cuh) ------------------------------------------------------------------------------------------

// The SM's cycle counter, modulo 2^32.
DEVICE uint32 cycles() {
  uint32 x;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(x)::"memory");
  return x;
}

// The global timer, in nanoseconds.
DEVICE uint64 nanoseconds() {
  uint64 x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x)::"memory");
  return x;
}

// A relaxed addition in global memory without a result, so that the thread does not wait.
DEVICE void atomic_add(uint64* sum, uint64 x) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sum), "l"(x) : "memory");
}

// Increments a counter in global memory, from `last` to 0. Returns the value before.
DEVICE uint32 atomic_increment(int* counter, uint32 last) {
  uint32 x;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(x) : "l"(counter), "r"(last) : "memory");
  return x;
}

// ---- Memory -------------------------------------------------------------------------------------------------------

DEVICE Vector load(const void* address) {
  Vector x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "l"(address)
               : "memory");
  return x;
}

// Like load, without allocating in L1: for memory that is read once.
DEVICE Vector load_streaming(const void* address) {
  Vector x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "l"(address)
               : "memory");
  return x;
}

DEVICE void store(void* address, const Vector& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3])
               : "memory");
}

// ---- Mathematics --------------------------------------------------------------------------------------------------

// 2^x in one instruction. Denormal results are 0.
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// sin_approx and cos_approx take radians of at most half a turn.
DEVICE float sin_approx(float x) {
  float y;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float cos_approx(float x) {
  float y;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Byte i of the result is the byte whose number is hexadecimal digit i of `selector`, from the lowest digit on. Bytes 0
// to 3 are those of `low`, bytes 4 to 7 those of `high`.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  uint32 chosen;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(chosen) : "r"(low), "r"(high), "r"(selector));
  return chosen;
}

// ---- Conversions --------------------------------------------------------------------------------------------------

// Conversions of two floats to a pair with `low` in the lower half. FP8 saturates.
DEVICE uint32 float16_pair(float low, float high) {
  uint32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE uint32 bfloat16_pair(float low, float high) {
  uint32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE uint16 e4m3_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE uint16 e5m2_pair(float low, float high) {
  uint16 pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Conversions of a pair of FP8 numbers to a pair of float16 numbers.
DEVICE uint32 float16_of_e4m3(uint16 pair) {
  uint32 wide;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}

DEVICE uint32 float16_of_e5m2(uint16 pair) {
  uint32 wide;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(wide) : "h"(pair));
  return wide;
}

DEVICE void float16_values(uint32 pair, float& low, float& high) {
  asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "r"(pair));
}

}  // namespace attn_ops
