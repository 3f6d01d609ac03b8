// What only Hopper has: wgmma, the GEMMs of whole warpgroups with operands in shared memory, and registers that move
// from one warpgroup to another (setmaxnreg). Both exist in code for sm_90a alone.
#pragma once
#include "common/async.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Registers of a thread from here on; all warps of the warpgroup call it.
template <int N> __device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Matrix descriptor (PTX ISA, wgmma) of an operand in shared memory with the 128-byte swizzle: rows of 128 bytes, whose
// vector p lies at p ^ (row % 8). `stride`: bytes between groups of 8 rows. `leading`: bytes between columns of 128
// bytes where these run along the operand's rows (the transposed operand below), else unused. The columns start at
// multiples of 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(1) << 62;
}

// Waits for the 128 threads of warpgroup `group`.
__device__ __forceinline__ void group_sync(uint32_t group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); // barrier 0 is that of __syncthreads
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups are unfinished.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

#define ACCUMULATORS_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define ACCUMULATORS_8(d, i)                                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define ACCUMULATORS_32(d, i)                                                                                          \
    ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8), ACCUMULATORS_8(d, i + 16), ACCUMULATORS_8(d, i + 24)
#define ACCUMULATORS_16(d, i) ACCUMULATORS_8(d, i), ACCUMULATORS_8(d, i + 8)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32                                                                                                       \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, "       \
             "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                                                      \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "  \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "      \
             "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, "  \
             "%120, %121, %122, %123, %124, %125, %126, %127"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"

#define ACCUMULATORS_40(d) ACCUMULATORS_32(d, 0), ACCUMULATORS_8(d, 32)
#define ACCUMULATORS_48(d) ACCUMULATORS_32(d, 0), ACCUMULATORS_16(d, 32)
#define ACCUMULATORS_64(d) ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
#define ACCUMULATORS_128(d) ACCUMULATORS_64(d), ACCUMULATORS_32(d, 64), ACCUMULATORS_32(d, 96)

// d[64, n] = (first ? 0 : d) + a b for a warpgroup, both operands in shared memory with the sum along their rows: a[64,
// 16] b[n, 16]ᵀ of bf16, or a[64, 32] b[n, 32]ᵀ of e4m3. Warp w holds rows 16 w to 16 w + 15 of d, as accumulators
// (csrc/common/frag.cuh), one for each 8 columns. A, B, KEEP: numbers of the operands after the D accumulators;
// WGMMA_BF16 also takes which operands are transposed.
#define WGMMA_BF16 "k16.f32.bf16.bf16", ", 0, 0"
#define WGMMA_FP8 "k32.f32.e4m3.e4m3", ""
#define WGMMA_SHARED(...) WGMMA_SHARED_OF(__VA_ARGS__)
#define WGMMA_SHARED_OF(NAME, TYPES, TRANSPOSED, N, D, NAMES, A, B, KEEP, ...)                                         \
    template <bool First> __device__ __forceinline__ void NAME(float (&d)[D], uint64_t a, uint64_t b) {                \
        asm volatile(                                                                                                  \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                                        \
            "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" NAMES "}, %" #A ", %" #B ", p, 1, 1" TRANSPOSED ";\n}"   \
            : __VA_ARGS__                                                                                              \
            : "l"(a), "l"(b), "n"(int(!First)));                                                                       \
    }
WGMMA_SHARED(wgmma, WGMMA_BF16, 16, 8, NAMES_8, 8, 9, 10, ACCUMULATORS_8(d, 0))
WGMMA_SHARED(wgmma, WGMMA_BF16, 32, 16, NAMES_16, 16, 17, 18, ACCUMULATORS_16(d, 0))
WGMMA_SHARED(wgmma, WGMMA_BF16, 64, 32, NAMES_32, 32, 33, 34, ACCUMULATORS_32(d, 0))
WGMMA_SHARED(wgmma, WGMMA_BF16, 80, 40, NAMES_40, 40, 41, 42, ACCUMULATORS_40(d))
WGMMA_SHARED(wgmma, WGMMA_BF16, 96, 48, NAMES_48, 48, 49, 50, ACCUMULATORS_48(d))
WGMMA_SHARED(wgmma, WGMMA_BF16, 112, 56, NAMES_56, 56, 57, 58, ACCUMULATORS_48(d), ACCUMULATORS_8(d, 48))
WGMMA_SHARED(wgmma, WGMMA_BF16, 128, 64, NAMES_64, 64, 65, 66, ACCUMULATORS_64(d))
WGMMA_SHARED(wgmma, WGMMA_BF16, 256, 128, NAMES_128, 128, 129, 130, ACCUMULATORS_128(d))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 16, 8, NAMES_8, 8, 9, 10, ACCUMULATORS_8(d, 0))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 32, 16, NAMES_16, 16, 17, 18, ACCUMULATORS_16(d, 0))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 64, 32, NAMES_32, 32, 33, 34, ACCUMULATORS_32(d, 0))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 80, 40, NAMES_40, 40, 41, 42, ACCUMULATORS_40(d))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 96, 48, NAMES_48, 48, 49, 50, ACCUMULATORS_48(d))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 112, 56, NAMES_56, 56, 57, 58, ACCUMULATORS_48(d), ACCUMULATORS_8(d, 48))
WGMMA_SHARED(wgmma_fp8, WGMMA_FP8, 128, 64, NAMES_64, 64, 65, 66, ACCUMULATORS_64(d))

// d[64, n] += a[16, 64]ᵀ b[n, 16]ᵀ, n = 16 or 32: as the first, with a in shared memory row by row, 64 columns of 128
// bytes.
__device__ __forceinline__ void wgmma_of_columns(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {" NAMES_8 "}, %8, %9, p, 1, 1, 1, 0;\n}"
                 : ACCUMULATORS_8(d, 0)
                 : "l"(a), "l"(b));
}
__device__ __forceinline__ void wgmma_of_columns(float (&d)[16], uint64_t a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" NAMES_16 "}, %16, %17, p, 1, 1, 1, 0;\n}"
                 : ACCUMULATORS_16(d, 0)
                 : "l"(a), "l"(b));
}

// The same with a in registers. Lane 4 g + q has four e4m3 codes a register: a[0] and a[1] are rows g and g + 8 of the
// warp's 16 from column 4 q on, a[2] and a[3] the same rows from column 16 + 4 q on; bf16: pairs, as operand A of
// `mma`.
#define WGMMA_BF16_REGISTERS "k16.f32.bf16.bf16", ", 0"
#define WGMMA_REGISTERS(...) WGMMA_REGISTERS_OF(__VA_ARGS__)
#define WGMMA_REGISTERS_OF(NAME, TYPES, TRANSPOSED, N, D, NAMES, A0, A1, A2, A3, B, KEEP, ...)                         \
    template <bool First> __device__ __forceinline__ void NAME(float (&d)[D], const uint32_t *a, uint64_t b) {         \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" NAMES "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
                     "}, %" #B ", p, 1, 1" TRANSPOSED ";\n}"                                                           \
                     : __VA_ARGS__                                                                                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(!First)));                          \
    }
WGMMA_REGISTERS(wgmma, WGMMA_BF16_REGISTERS, 8, 4, NAMES_4, 4, 5, 6, 7, 8, 9, ACCUMULATORS_4(d))
WGMMA_REGISTERS(wgmma, WGMMA_BF16_REGISTERS, 16, 8, NAMES_8, 8, 9, 10, 11, 12, 13, ACCUMULATORS_8(d, 0))
WGMMA_REGISTERS(wgmma, WGMMA_BF16_REGISTERS, 32, 16, NAMES_16, 16, 17, 18, 19, 20, 21, ACCUMULATORS_16(d, 0))
WGMMA_REGISTERS(wgmma, WGMMA_BF16_REGISTERS, 64, 32, NAMES_32, 32, 33, 34, 35, 36, 37, ACCUMULATORS_32(d, 0))
WGMMA_REGISTERS(wgmma, WGMMA_BF16_REGISTERS, 128, 64, NAMES_64, 64, 65, 66, 67, 68, 69, ACCUMULATORS_64(d))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 8, 4, NAMES_4, 4, 5, 6, 7, 8, 9, ACCUMULATORS_4(d))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 16, 8, NAMES_8, 8, 9, 10, 11, 12, 13, ACCUMULATORS_8(d, 0))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 32, 16, NAMES_16, 16, 17, 18, 19, 20, 21, ACCUMULATORS_16(d, 0))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 48, 24, NAMES_24, 24, 25, 26, 27, 28, 29, ACCUMULATORS_16(d, 0),
                ACCUMULATORS_8(d, 16))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 64, 32, NAMES_32, 32, 33, 34, 35, 36, 37, ACCUMULATORS_32(d, 0))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 80, 40, NAMES_40, 40, 41, 42, 43, 44, 45, ACCUMULATORS_40(d))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 96, 48, NAMES_48, 48, 49, 50, 51, 52, 53, ACCUMULATORS_48(d))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 112, 56, NAMES_56, 56, 57, 58, 59, 60, 61, ACCUMULATORS_48(d),
                ACCUMULATORS_8(d, 48))
WGMMA_REGISTERS(wgmma_fp8, WGMMA_FP8, 128, 64, NAMES_64, 64, 65, 66, 67, 68, 69, ACCUMULATORS_64(d))

// The same in bf16, n = 64, with a as one vector.
template <bool First> __device__ __forceinline__ void wgmma(float (&d)[32], const uint4 &a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, "
                 "p, 1, 1, 0;\n}"
                 : ACCUMULATORS_32(d, 0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "n"(int(!First)));
}

// d[64, n] += a[64, 16] b[16, n] with a in registers, as operand A of `mma`, and b in shared memory row by row.
__device__ __forceinline__ void wgmma_transposed(float (&d)[32], const uint4 &a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, "
                 "p, 1, 1, 1;\n}"
                 : ACCUMULATORS_32(d, 0)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
__device__ __forceinline__ void wgmma_transposed(float (&d)[64], const uint4 &a, uint64_t b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, "
                 "p, 1, 1, 1;\n}"
                 : ACCUMULATORS_32(d, 0), ACCUMULATORS_32(d, 32)
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
#endif
