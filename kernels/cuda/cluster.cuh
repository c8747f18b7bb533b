// PTX for clusters of CTAs on sm_90a: ranks, barriers, distributed shared memory, multicast loads.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

DEVICE uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster, in two steps. An mbarrier that is initialised and fenced
// (fence_barrier_init) before the arrival may be used by all CTAs of the cluster after the wait.
DEVICE void cluster_arrive_after_init() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

DEVICE void cluster_wait_for_init() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The shared::cluster address, in CTA `rank`, of the location that has shared-memory address `address` in this CTA.
DEVICE uint32 address_in(uint32 address, uint32 rank) {
  uint32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// An arrival on a barrier of any CTA of the cluster, by its shared::cluster address. It signals that this thread has
// finished reading. It does not publish writes of this thread to other CTAs: that would need a fence of the whole GPU.
DEVICE void arrive_in_cluster(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores 16 bytes in the shared memory of a CTA of the cluster. The bytes complete on `barrier` of that CTA, and a
// thread that has waited on the barrier sees them without a fence. `to` and `barrier` are shared::cluster addresses
// (address_in).
DEVICE void store_async(uint32 to, const float (&x)[4], uint32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
               : "memory");
}

// Loads the box of `map` at the given coordinates, innermost first, into `to`. The bytes complete on `barrier`.
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}

// Like load_box, multicast to the CTAs of the bit mask `ctas`: the box is written at address `to` of each of these
// CTAs, and completes on the barrier at address `barrier` of the same CTA.
DEVICE void load_box_in(uint16 ctas, uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier,
                        uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

}  // namespace attn_ops
