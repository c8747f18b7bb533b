// Clusters of CTAs on sm_90a: ranks, barriers over the CTAs of a cluster, multicast loads. Plain PTX.
#pragma once

#include "hopper.cuh"

namespace attn_ops {

DEVICE uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of all CTAs of the cluster, in two steps. Barriers that are initialised and fenced
// (fence_barrier_init) before the first may be used after the second.
DEVICE void cluster_arrive_after_init() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

DEVICE void cluster_wait_for_init() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The address, for the whole cluster, of what CTA `rank` has at this address of its shared memory.
DEVICE uint32 address_in(uint32 address, uint32 rank) {
  uint32 mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// An arrival at a barrier of any CTA of the cluster. It publishes no writes to other CTAs, which would take a fence of
// the whole GPU: it says that this thread has finished to read.
DEVICE void arrive_in_cluster(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// 16 bytes to the shared memory of a CTA of the cluster, which complete on `barrier` of the same CTA: who waits for it
// there sees them, without a fence. Both addresses are of the cluster (address_in).
DEVICE void store_async(uint32 to, const float (&x)[4], uint32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
               : "memory");
}

// A box of `map` at the given coordinates, innermost first, to `to`; completes its bytes on `barrier`.
DEVICE void load_box(uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to this place of each CTA of `ctas`, a bit mask; completes the bytes on the barrier at this place of each.
DEVICE void load_box_in(uint16 ctas, uint32 to, const TensorMap* map, int c0, int c1, int c2, uint32 barrier,
                        uint64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6, %7;"
      ::"r"(to), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

}  // namespace attn_ops
