// Skinny GEMMs with group-quantised weights of each format: see csrc/gemm/skinny_groups.cuh.
//
// All GPUs. With few rows of x bound by memory, or by the instructions that widen codes. Reference:
// src/cpu/linear/mod.rs.
#include "gemm/skinny_groups.cuh"
#include "abi/gemm_skinny_groups.h"

// Grid: blocks, splits. For up to 8 TILES rows of x.
#define STREAM(name, ROWS, TILES, C, S)                                                                                \
    extern "C" __global__ __launch_bounds__(32 * kGroupWarps<TILES>, 1) void skinny_##name##_##ROWS(                   \
        const bf16 *x,         /* [m, k] */                                                                            \
        const uint8_t *codes,  /* common/groups.cuh */                                                                 \
        const uint8_t *scales, /* the same */                                                                          \
        void *out,             /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */               \
        uint64_t extra, uint32_t dtype, uint32_t group_shift, uint32_t m, uint32_t n, uint32_t k, uint32_t pitch,      \
        uint32_t split, uint32_t chunk, uint32_t slots, uint32_t output) {                                             \
        stream_groups<Codes::C, Scales::S, TILES>(                                                                     \
            x, {codes, scales, extra, n, k, dtype, group_shift}, out, {m, pitch, split, chunk, slots, output});        \
    }
#define FORMAT(name, C, S)                                                                                             \
    STREAM(name, 8, 1, C, S)                                                                                           \
    STREAM(name, 16, 2, C, S)                                                                                          \
    STREAM(name, 32, 4, C, S)
FORMAT(int4_wide, kInt4, kWide)
FORMAT(int4_plain, kInt4, kPlain32)
FORMAT(int4_zero, kInt4, kZero32)
FORMAT(int4_min, kInt4, kMin32)
FORMAT(int4_k, kInt4, kK4)
FORMAT(int5_plain, kInt5, kPlain32)
FORMAT(int5_min, kInt5, kMin32)
FORMAT(int5_k, kInt5, kK4)
FORMAT(int6_k, kInt6, kK6)
FORMAT(int8_plain, kInt8, kPlain32)
FORMAT(iq4_plain, kIq4, kPlain32)
FORMAT(iq4_xs, kIq4, kXs)
FORMAT(e2m1_e4m3, kE2m1, kE4m3)
FORMAT(e2m1_e8m0, kE2m1, kE8m0)
FORMAT(e4m3_wide, kE4m3, kWide)
