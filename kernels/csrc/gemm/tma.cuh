// The TMA forms that only the products use.
#pragma once
#include "common/ptx.cuh"

// Weights: read once, so they must not push the activations out of the L2 cache.
template <bool ONCE> DEVICE void tma_weights(uint32_t dst, const void* map, uint32_t bar, int x, int y, int z) {
  constexpr uint64_t EVICT_FIRST = 0x12F0000000000000ull;  // the encoding createpolicy gives
  if (!ONCE) return tma_3d(dst, map, bar, x, y, z);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3,%4,%5}], [%2], "
      "%6;" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "l"(EVICT_FIRST) : "memory");
}
DEVICE void tma_plane(uint32_t dst, const void* map, uint32_t bar, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
// To the same place in every CTA of `mask`, and to its barrier there.
DEVICE void tma_plane_multicast(uint32_t dst, const void* map, uint32_t bar, int x, int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3,%4}], [%2], "
      "%5;" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(mask) : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------
DEVICE int cluster_rank() {
  int r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// Orders nothing: a release would wait until this thread's stores to global memory are seen.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Of the same place in CTA `cta` of the cluster.
DEVICE float4 lds_cluster_f32x4(uint32_t addr, int cta) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(in_cta(addr, cta)) : "memory");
  return v;
}
