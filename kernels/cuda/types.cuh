// Types and constants of all CUDA kernels. nvrtc compiles them without the headers of the CUDA toolkit.
#pragma once

#define DEVICE __device__ __forceinline__

namespace attn_ops {

using int64 = long long;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// A CUtensorMap, which the launcher encodes: a `const __grid_constant__` parameter of a kernel.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

struct alignas(16) Vector {
  uint32 words[4];
};

constexpr float kLog2e = 1.4426950408889634f;

// `row_max`, or 0 where it is -inf, so that `logit - row_max` is never `-inf - -inf`.
DEVICE float finite(float row_max) { return row_max == -kInfinity ? 0.0f : row_max; }

}  // namespace attn_ops
