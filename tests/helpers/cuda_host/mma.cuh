// kernels/cuda/mma.cuh on the host.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

DEVICE void load_matrices(uint32 (&m)[4], uint32 row) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32 from = uint32(host::exchange(row, 8 * i + lane / 4, "ldmatrix")) + lane % 4 * 4;
    m[i] = *static_cast<const uint32*>(host::from_shared_address(from));
  }
}

DEVICE void load_transposed(uint32 (&m)[4], uint32 row) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    m[i] = 0;
    for (int half = 0; half < 2; ++half) {
      const uint32 from = uint32(host::exchange(row, 8 * i + lane % 4 * 2 + half, "ldmatrix.trans")) + lane / 4 * 2;
      m[i] |= uint32(*static_cast<const uint16*>(host::from_shared_address(from))) << 16 * half;
    }
  }
}

DEVICE uint32 transpose(uint32 m) {
  const int lane = threadIdx.x % 32;
  uint32 transposed = 0;
  for (int half = 0; half < 2; ++half) {
    const auto word = uint32(host::exchange(m, (lane % 4 * 2 + half) * 4 + lane / 8, "movmatrix"));
    transposed |= (word >> lane / 4 % 2 * 16 & 0xFFFF) << 16 * half;
  }
  return transposed;
}

DEVICE uint32 even_bytes_first(uint32 x) { return (x & 0xFF0000FF) | (x >> 8 & 0xFF00) | (x << 8 & 0xFF0000); }

// prmt takes the lowest three bits of a digit as the byte's number; kernels here leave the fourth, the sign, at 0.
DEVICE uint32 permute_bytes(uint32 low, uint32 high, uint32 selector) {
  uint32 chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32((uint64(high) << 32 | low) >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return chosen;
}

DEVICE void multiply_add(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
  host::multiply_by_warp({d, a, b}, DTYPE == 2);
}

}  // namespace attn_ops
