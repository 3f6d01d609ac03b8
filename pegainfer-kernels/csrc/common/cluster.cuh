// Thread block clusters (compute capability 9.0 and later; PTX ISA, "Cluster"): ranks, barriers, and shared memory of
// other blocks. Elsewhere a block is a cluster of its own.
#pragma once
#include "common/frag.cuh"

__device__ __forceinline__ uint32_t block_rank() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

__device__ __forceinline__ uint32_t cluster_blocks() {
    uint32_t blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
    return blocks;
}

// Waits for all threads of the cluster; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

// The address of this block's shared variable `shared` in block `rank` of the cluster.
template <typename T> __device__ __forceinline__ T *in_block(T *shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    T *there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(shared), "r"(rank));
    return there;
#else
    return shared;
#endif
}

#if __CUDA_ARCH__ >= 900
// The halves of `cluster_sync`, for warps whose lanes are all there.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Stores a float to the shared memory of another block of the cluster, at this block's address `at`.
__device__ __forceinline__ void store_to_peer(float *at, uint32_t block, float value) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(at)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}
#endif
