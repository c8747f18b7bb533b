// kernels/cuda/hopper.cuh on the host.
#pragma once

#include <limits>

#include "basics.cuh"

namespace attn_ops {

DEVICE uint32 shared_address(const void* p) { return host::shared_address(p); }
DEVICE char* dynamic_shared() { return host::shared_memory(); }
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }
DEVICE int recomputed(int x) { return x; }
DEVICE bool elect() { return host::elect(); }

DEVICE void init_barrier(uint32 barrier, uint32 arrivals) { host::init_barrier(barrier, arrivals); }
DEVICE void fence_barrier_init() { host::fence_barrier_init(); }
DEVICE void arrive(uint32 barrier) { host::arrive(barrier); }
DEVICE void arrive_expect(uint32 barrier, uint32 bytes) { host::arrive(barrier, bytes); }
DEVICE void wait(uint32 barrier, uint32 parity) { host::wait(barrier, parity); }

DEVICE void named_sync(int id, int threads) { host::sync_named(id, threads); }
DEVICE void named_arrive(int id, int threads) { host::arrive_named(id, threads); }
DEVICE bool named_any(int id, int threads, bool x) { return host::any_named(id, threads, x); }
template <int N>
DEVICE void increase_registers() {}
template <int N>
DEVICE void decrease_registers() {}

DEVICE void prefetch_map(const TensorMap*) {}
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, uint32 barrier) {
  host::load_box(0, to, map, std::initializer_list<int>{c0, c1, c2, c3}.begin(), 4, barrier);
}
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32 barrier) {
  host::load_box(0, to, map, std::initializer_list<int>{c0, c1, c2, c3, c4}.begin(), 5, barrier);
}
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32 barrier, uint64) {
  load_box(to, map, c0, c1, c2, c3, c4, barrier);
}
DEVICE uint64 l2_cache_policy(bool) { return 0; }
DEVICE void copy_chunk(uint32 to, const void* from, bool exists) {
  host::copy_async(host::from_shared_address(to), from, 16, exists);
}
DEVICE void arrive_after_chunks(uint32 barrier) { host::arrive_after_copies(barrier); }
DEVICE void wait_for_chunks() { host::wait_for_copies(); }
DEVICE void fence_async_shared() { host::fence_async_proxy(); }
DEVICE void store_bulk(void* to, uint32 from, uint32 bytes) { host::store_bulk(to, from, bytes); }
DEVICE void wait_for_bulk_reads() { host::wait_for_bulk_reads(); }
DEVICE void store_shared(uint32 to, float x, float y) {
  *static_cast<float2*>(host::from_shared_address(to)) = float2{x, y};
}
DEVICE void store_shared(uint32 to, float x) { *static_cast<float*>(host::from_shared_address(to)) = x; }
DEVICE void store_shared(uint32 to, uint4 v) { *static_cast<uint4*>(host::from_shared_address(to)) = v; }
DEVICE uint2 load_two_words(uint32 from) { return *static_cast<const uint2*>(host::from_shared_address(from)); }
DEVICE uint4 load_shared(uint32 from) { return *static_cast<const uint4*>(host::from_shared_address(from)); }
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
DEVICE void store_matrices(uint32 row, const uint32 (&m)[4]) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32 to = uint32(host::exchange(row, 8 * i + lane / 4, "stmatrix")) + lane % 4 * 4;
    *static_cast<uint32*>(host::from_shared_address(to)) = m[i];
  }
}
// A lane stores what two lanes have: the elements of a word, 2 (l % 4) and the next one of row l / 4.
template <int N>
DEVICE void store_transposed(uint32 row, const uint32 (&m)[N]) {
  const int lane = threadIdx.x % 32, r = lane / 4;
  for (int i = 0; i < N; ++i) {
    uint32 word = 0;
    for (int half = 0; half < 2; ++half) {
      const uint32 pair = uint32(host::exchange(m[i], (lane % 4 * 2 + half) * 4 + r / 2, "stmatrix.trans"));
      word |= (pair >> 16 * (r % 2) & 0xFFFF) << 16 * half;
    }
    const uint32 to = uint32(host::exchange(row, 8 * i + r, "stmatrix.trans")) + lane % 4 * 4;
    *static_cast<uint32*>(host::from_shared_address(to)) = word;
  }
}

DEVICE uint32 pack(float low, float high) { return DTYPE == 2 ? bfloat16_pair(low, high) : float16_pair(low, high); }

DEVICE void wgmma_fence() { host::wgmma_fence(); }
DEVICE void wgmma_commit() { host::wgmma_commit(); }
template <int PENDING>
DEVICE void wgmma_wait() {
  host::wgmma_wait(PENDING);
}
DEVICE void keep_before(float sum) {
  host::check_sum(sum);
}
template <int N>
DEVICE void fence_registers(float (&d)[N]) {
  host::check_registers(d, N);
}
DEVICE void keep_in_loop(uint64&) {}
template <int N>
DEVICE void discard_registers(float (&d)[N]) {
  host::check_registers(d, N);
  for (float& x : d) x = std::numeric_limits<float>::quiet_NaN();
}
constexpr host::Operands kOperands = DTYPE == 2 ? host::Operands::kBFloat16 : host::Operands::kFloat16;
template <int N>
DEVICE void wgmma_ss(float (&d)[N], uint64 a, uint64 b, bool accumulate) {
  host::wgmma({d, 2 * N, nullptr, a, b, false, accumulate, kOperands});
}
template <int N>
DEVICE void wgmma_ss_mn(float (&d)[N], uint64 a, uint64 b) {
  host::wgmma({d, 2 * N, nullptr, a, b, true, true, kOperands});
}
template <int N>
DEVICE void wgmma_mn_ss(float (&d)[N], uint64 a, uint64 b) {
  host::wgmma({d, 2 * N, nullptr, a, b, false, true, kOperands, true});
}
template <int N>
DEVICE void wgmma_rs(float (&d)[N], const uint32 (&a)[4], uint64 b, bool accumulate) {
  host::wgmma({d, 2 * N, a, 0, b, false, accumulate, kOperands});
}
template <int N>
DEVICE void wgmma_rs_mn(float (&d)[N], const uint32 (&a)[4], uint64 b) {
  host::wgmma({d, 2 * N, a, 0, b, true, true, kOperands});
}

}  // namespace attn_ops
