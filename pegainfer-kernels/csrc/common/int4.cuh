// Weights of four bits with a scale for each group of columns of a row, as the GPU holds them: w = scale (q - zero).
//
// Codes: [n, k / 2], k a multiple of 128; a block of 128 columns is 64 bytes. Lane quad (lane % 4) of a
// warp finds 16 bytes of a block at 16 quad: word j has the codes of the 16 columns from 32 j on that the lane holds in
// operand A of two steps of 16 columns (csrc/common/frag.cuh). Nibbles i and i + 4 of a word are a pair:
//   i = 0: columns 32 j + 2 quad, + 1    i = 1: columns 32 j + 8 + 2 quad, + 1    i = 2, 3: the same 16 columns on
// A pair becomes bf16 by one mask, because a bf16 of 128 has the value 1 in its last place (the technique of Kim et
// al., "Who Says Elephants Can't Run", arXiv 2211.10017, for bf16): 0x4300 | q is 128 + q. Scales: [k / group, n] f16
// or bf16, n a multiple of 16; zero points: [k / group, n] u8.
#pragma once
#include "common/frag.cuh"
#include <cuda_fp16.h>

constexpr uint32_t kInt4Block = 128; // columns of a block

// Bits of a scale, bf16 or f16.
__device__ __forceinline__ float widen_scale(uint16_t bits, bool is_f16) {
    return is_f16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
}

// Pair I of a word plus a pair of -(128 + zero): two bf16 numbers, exact.
template <uint32_t I> __device__ __forceinline__ uint32_t int4_pair(uint32_t word, uint32_t bias) {
    uint32_t pair, out;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(pair) : "r"(word >> 4 * I)); // (a & b) | c
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(0x3f803f80u), "r"(bias));
    return out;
}

// A pair of -(128 + zero).
__device__ __forceinline__ uint32_t int4_bias(uint32_t zero) { return (0xc300 + zero) * 0x00010001u; }

// Scales and zero points of a weight.
struct Int4Weights {
    const uint16_t *values; // [groups, rows]
    const uint8_t *zeros;   // [groups, rows], or null: 8
    uint32_t rows, blocks;  // of w, in multiples of 16; of 128 columns
    uint32_t group_shift;   // a group has 2^group_shift blocks
    bool is_f16;
};

// Word i of the codes of a lane in a block.
__device__ __forceinline__ uint32_t int4_word(const uint4 &codes, uint32_t i) {
    return i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
}

// Codes at an address in shared memory.
__device__ __forceinline__ uint4 load_codes(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
