// kernels/cuda/cluster.cuh on the host.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

DEVICE uint32 cluster_rank() { return host::registers.cluster_rank; }
DEVICE void cluster_arrive_after_init() { host::arrive_at_cluster(); }
DEVICE void cluster_wait_for_init() { host::wait_for_cluster(); }
DEVICE uint32 address_in(uint32 address, uint32 rank) { return host::address_in(address, rank); }
DEVICE void arrive_in_cluster(uint32 barrier) { host::arrive(barrier); }
DEVICE void store_async(uint32 to, const float (&x)[4], uint32 barrier) { host::store_async(to, x, barrier); }

DEVICE void load_box_in(uint32 ctas, uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier, uint64) {
  host::load_box(ctas, to, map, std::initializer_list<int>{c0, c1, c2}.begin(), 3, barrier);
}
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier, uint64 policy) {
  load_box_in(0, to, map, c0, c1, c2, barrier, policy);
}

}  // namespace attn_ops
