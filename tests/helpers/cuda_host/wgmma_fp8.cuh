// kernels/cuda/wgmma_fp8.cuh on the host.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

template <int N>
DEVICE void wgmma_e4m3_ss(float (&d)[N], uint64 a, uint64 b, bool accumulate) {
  host::wgmma({d, 2 * N, nullptr, a, b, false, accumulate, host::Operands::kE4M3});
}
template <int N>
DEVICE void wgmma_e4m3_rs(float (&d)[N], const uint32 (&a)[4], uint64 b, bool accumulate) {
  host::wgmma({d, 2 * N, a, 0, b, false, accumulate, host::Operands::kE4M3});
}

}  // namespace attn_ops
