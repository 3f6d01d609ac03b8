// Asynchronous copies from global to shared memory, the barriers that count their bytes, and rings of buffers.
#pragma once
#include "common/frag.cuh"

// A place in a ring of buffers: the buffer, and the parity of its barriers' phase in the present round.
struct RingCursor {
    uint32_t index = 0, parity = 0;
    __device__ __forceinline__ void next(uint32_t size) {
        if (++index == size) {
            index = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void advance(uint32_t by, uint32_t size) {
        index += by;
        if (index >= size) index -= size, parity ^= 1;
    }
};
// In a ring of N buffers.
template <int N> struct Ring : RingCursor {
    __device__ __forceinline__ void next() { RingCursor::next(N); }
};

// ---- cp.async: 16 bytes by the thread itself. Visible to it after `copies_wait`, to others after a barrier as well.

__device__ __forceinline__ void copy16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes of the same.
__device__ __forceinline__ void copy4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Zeros unless `real`; `from` is not read then, but has to be an address.
__device__ __forceinline__ void copy16_or_zero(uint32_t to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}

// The same of weights, which are read once and in order: the L2 fetches the neighbours, too.
__device__ __forceinline__ void stream16_or_zero(uint32_t to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

// The first `bytes` of 16 bytes, then zeros.
__device__ __forceinline__ void copy16_partly(void *to, const void *from, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void copy16(void *to, const void *from) { copy16(shared_address(to), from); }
__device__ __forceinline__ void copy16_or_zero(void *to, const void *from, bool real) {
    copy16_or_zero(shared_address(to), from, real);
}
__device__ __forceinline__ void stream16_or_zero(void *to, const void *from, bool real) {
    stream16_or_zero(shared_address(to), from, real);
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of the groups that this thread committed are unfinished.
template <int N> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A CUtensorMap: a matrix of bf16 in memory, and the box of it that a copy takes.
struct alignas(128) TensorMap {
    uint64_t words[16];
};

#if __CUDA_ARCH__ >= 900
// ---- mbarrier (compute capability 9.0 and later)

// A barrier's phase completes when `arrivals` threads have arrived and all expected bytes are there.
__device__ __forceinline__ void barrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// After the initialisation, before another thread or the copy engine sees the barriers.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// `barrier`: shared address.
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t *barrier) { arrive(shared_address(barrier)); }

__device__ __forceinline__ void arrive_expecting(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrives once all copies (cp.async) that this thread has begun are done.
__device__ __forceinline__ void arrive_after_copies(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits for the end of the phase with this parity. `barrier`: shared address.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}
__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) { wait(shared_address(barrier), parity); }

// Whether the phase with this parity, the present one or the one before it, is over.
__device__ __forceinline__ bool phase_over(uint64_t *barrier, uint32_t parity) {
    uint32_t over;
    asm volatile("{\n.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return over;
}

// ---- Copies by the copy engine (TMA): bulk copies of whole runs of bytes, and of boxes of a tensor map

// True for one lane of a converged warp.
__device__ __forceinline__ bool elected() {
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
    return one;
}

// Makes what this thread wrote to shared memory visible to wgmma and bulk copies that are ordered after it.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Starts a copy of `bytes` bytes, a multiple of 16; `barrier` counts them.
__device__ __forceinline__ void copy_bulk(void *to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Starts the copy of the box at this column and row, with zeros for what lies outside the matrix. `barrier` counts its
// bytes, those too.
__device__ __forceinline__ void copy_box(uint32_t to, const TensorMap &map, uint32_t column, uint32_t row,
                                         uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
                 "[%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
}

// The same to this place in the shared memory of all blocks of `blocks` (a bit each) of the cluster, and to their
// barriers.
__device__ __forceinline__ void copy_box_to_blocks(uint32_t to, const TensorMap &map, uint32_t column, uint32_t row,
                                                   uint64_t *barrier, uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
                 : "memory");
}

// Arrives at this barrier of block `block` of the cluster.
__device__ __forceinline__ void arrive_in_block(uint64_t *barrier, uint32_t block) {
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(barrier)),
                 "r"(block)
                 : "memory");
}

// Starts the copy of a box from shared memory, without what lies outside the matrix. This thread waits for it with
// `stores_wait`.
__device__ __forceinline__ void store_box(const TensorMap &map, uint32_t column, uint32_t row, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                 "cp.async.bulk.commit_group;" ::"l"(&map),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}

// Until shared memory was read, or, `Done`, what this thread stores is written.
template <bool Done> __device__ __forceinline__ void stores_wait() {
    if (Done) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    else asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
#endif
