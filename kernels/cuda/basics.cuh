// What every kernel here needs: integer types, 16-byte loads and stores, conversions, exponentials, and programmatic
// dependent launch. Plain PTX: nvrtc has no headers of the CUDA toolkit.
#pragma once

namespace attn_ops {

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// 128 bytes that the launcher encodes, a `const __grid_constant__` parameter of a kernel.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// ---- Programmatic dependent launch --------------------------------------------------------------------------------

// Until here a kernel may read only what no unfinished kernel writes.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel of the stream may start: its CTAs run until they wait.
__device__ __forceinline__ void launch_later_kernels() { asm volatile("griddepcontrol.launch_dependents;"); }

// Lets this thread read a plan that a finished kernel has published, before it waits.
__device__ __forceinline__ void acquire_plan() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- Memory -------------------------------------------------------------------------------------------------------

struct alignas(16) Vector {
  uint32 words[4];
};

// 16 bytes that are read once: they are not kept in L1.
__device__ __forceinline__ Vector load_streaming(const void* address) {
  Vector x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "l"(address)
               : "memory");
  return x;
}

__device__ __forceinline__ void store(void* address, const Vector& x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]), "r"(x.words[3])
               : "memory");
}

// Copies 16 bytes, or 4, to shared memory without registers: the assembler would move loads to their uses to save
// these, and fewer would be in flight. Zeros unless `exists`. The thread reads them after wait_for_copies.
__device__ __forceinline__ void copy_async(Vector* shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(shared))), "l"(global), "r"(exists ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async(float* shared, const float* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :
               : "r"(static_cast<uint32>(__cvta_generic_to_shared(shared))), "l"(global), "r"(exists ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but this thread's last `kPending` groups of copies have arrived.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Mathematics --------------------------------------------------------------------------------------------------

// 2^x in one instruction. Denormal results are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `row_max`, or 0 where it is -inf, so that `logit - row_max` is never `-inf - -inf`.
__device__ __forceinline__ float finite(float row_max) { return row_max == -kInfinity ? 0.0f : row_max; }

// ---- Element types ------------------------------------------------------------------------------------------------

// Of a type: `Element`, the elements of a Vector, and conversions between a Vector and floats.
struct Float32 {
  using Element = float;
  static constexpr int kElements = 4;

  __device__ __forceinline__ static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) to[i] = __uint_as_float(x.words[i]);
  }
  __device__ __forceinline__ static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < kElements; ++i) x.words[i] = __float_as_uint(from[i]);
    return x;
  }
};

struct Float16 {
  using Element = uint16;
  static constexpr int kElements = 8;

  __device__ __forceinline__ static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("{ .reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
          : "=f"(to[2 * i]), "=f"(to[2 * i + 1])
          : "r"(x.words[i]));
  }
  __device__ __forceinline__ static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x.words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
    return x;
  }
};

struct BFloat16 {
  using Element = uint16;
  static constexpr int kElements = 8;

  __device__ __forceinline__ static void unpack(const Vector& x, float (&to)[kElements]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(x.words[i] << 16);
      to[2 * i + 1] = __uint_as_float(x.words[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ static Vector pack(const float (&from)[kElements]) {
    Vector x;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x.words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
    return x;
  }
};

// By the macro DTYPE of a kernel: 0 float32, 1 float16, 2 bfloat16.
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
