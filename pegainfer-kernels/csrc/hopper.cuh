// What only Hopper has: products of whole warpgroups with operands in shared memory, and registers that move from one
// warpgroup to another. Both exist in code for sm_90a alone.
#pragma once
#include "bulk.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The place in a ring of N buffers, each with its barriers, and the parity of the present round.
template <int N> struct Ring {
    uint32_t index = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++index == N) {
            index = 0;
            parity ^= 1;
        }
    }
};

// True for one lane of a converged warp.
__device__ __forceinline__ bool elected() {
    uint32_t one;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
    return one;
}

// ---- Copies

// Makes what this thread wrote to shared memory visible to wgmma and bulk copies that are ordered after it.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 16 bytes, global to shared, by the thread itself; complete after `copies_wait`.
__device__ __forceinline__ void copy16(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Warpgroups

// Registers of a thread from here on; all warps of the warpgroup call it.
template <int N> __device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Operand in shared memory with the 128-byte swizzle: rows of 128 bytes, whose 16-byte piece p lies at p ^ (row % 8).
// `stride`: bytes between groups of 8 rows. `leading`: bytes between columns of 128 bytes where these run along the
// operand's rows (the transposed operand below), else unused. The columns start at multiples of 1024 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups are unfinished.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define ACCUMULATORS_8(d, i)                                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define ACCUMULATORS_32(d, i)                                                                                          \
    ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8), ACCUMULATORS_8(d, i + 16), ACCUMULATORS_8(d, i + 24)
#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "       \
             "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"

// d[64, n] = (first ? 0 : d) + a[64, 16] b[n, 16]ᵀ for a warpgroup, n = 64, 80 or 128, both operands in shared memory
// with the sum along their rows. Warp w holds rows 16 w to 16 w + 15 of d, laid out as the d of `mma` for each 8 columns.
template <bool First> __device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : ACCUMULATORS_32(d, 0)
                 : "l"(a), "l"(b), "n"(int(!First)));
}
template <bool First> __device__ __forceinline__ void wgmma(float (&d)[40], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" NAMES_40 "}, %40, %41, p, 1, 1, 0, 0;\n}"
                 : ACCUMULATORS_32(d, 0), ACCUMULATORS_8(d, 32)
                 : "l"(a), "l"(b), "n"(int(!First)));
}
template <bool First> __device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
                 : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
                 : "l"(a), "l"(b), "n"(int(!First)));
}

// As above with a in registers, laid out as the a of `mma`.
template <bool First> __device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, "
                 "p, 1, 1, 0;\n}"
                 : ACCUMULATORS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(!First)));
}

// d[64, n] += a[64, 16] b[16, n] with a in registers, laid out as the a of `mma`, and b in shared memory row by row.
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, "
                 "p, 1, 1, 1;\n}"
                 : ACCUMULATORS_32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void wgmma_transposed(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, "
                 "p, 1, 1, 1;\n}"
                 : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif
