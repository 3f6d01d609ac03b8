// Asynchronous copies from global to shared memory by the copy engine, and the barriers that count their bytes
// (compute capability 9.0 and later).
#pragma once
#include "common.cuh"

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void *at) { return uint32_t(__cvta_generic_to_shared(at)); }

// A barrier's phase completes when `arrivals` threads have arrived and all expected bytes are there.
__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// After the initialisation, before another thread or the copy engine sees the barriers.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_expecting(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase with this parity.
__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

// Whether the phase with this parity, the present one or the one before it, is over.
__device__ __forceinline__ bool is_over(uint64_t *barrier, uint32_t parity) {
    uint32_t over;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}

// Starts a copy of `bytes` bytes, a multiple of 16; `barrier` counts them.
__device__ __forceinline__ void copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Brings `bytes` bytes, a multiple of 16, from memory to the L2.
__device__ __forceinline__ void prefetch_bulk(const void *from, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
#endif
