// Thread-block clusters: blocks that run at the same time and write to each other's shared memory (compute capability
// 9.0 and later).
#pragma once
#include "common.cuh"

constexpr uint32_t kMaxCluster = 16; // more than 8 needs the launch attribute for non-portable sizes

#if __CUDA_ARCH__ >= 900
// All threads of the cluster arrive, then wait. What they wrote before they arrived is then visible to all.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address in the cluster of what block `rank` has where this block has `at`.
__device__ __forceinline__ uint32_t cluster_address(const void *at, uint32_t rank) {
    uint32_t out;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(uint32_t(__cvta_generic_to_shared(at))), "r"(rank));
    return out;
}

__device__ __forceinline__ void store_cluster(uint32_t to, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

__device__ __forceinline__ void store_cluster(uint32_t to, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x.x), "f"(x.y) : "memory");
}
#endif
