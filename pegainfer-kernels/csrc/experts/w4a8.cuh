// FP4 weights times FP8 activations (W4A8) by Hopper's wgmma: weights are operand A in registers, activations operand B
// in shared memory.
//
//   weights      [rows, k / 2] E2M1, the even column in the low nibble; scales [rows, k / 32] E8M0. As stored, not
//   repacked
//   activations  [tokens, k] e4m3, permuted within each 128 columns (`permuted`); f32 scales [tokens, k / 128], powers
//   of two
//
// A step is 128 columns, four wgmmas of 32. A thread owns rows `group` and `group + 8` of its warp's 16 and of each the
// 32 columns of one E8M0 scale: 16 bytes, and one table of eight magnitudes for both. The sum over k does not see the
// order of the columns, as long as both operands have the same.
//
// Rebasing: with ref the largest scale of a row, a code of a group with scale s enters as E2M1 * 2^(6 - (ref - s)) in
// e4m3, and 2^(ref - 127 - 6) multiplies the row's sum. That is exact for ref - s <= 14 (0.5 * 2^-8 is the smallest
// subnormal, 6 * 2^6 is below 448); codes of groups further below are rounded to the nearest e4m3 number, an error of
// at most 2^-16 of the row's largest magnitude each.
//
// Promotion: Hopper sums e4m3 multiplications with about 14 bits, so the sum of each step is added to an f32 total
// times the token's scale of these columns (DeepGEMM).
#pragma once
#include "common/fp8_codes.cuh"
#include "common/hopper.cuh"

namespace w4a8 {
constexpr uint32_t kStep = 128;     // columns of a step
constexpr uint32_t kScaled = 32;    // columns that share a weight's scale
constexpr uint32_t kRowBytes = 64;  // bytes of a weight's row in a step
constexpr uint32_t kTable = 256;    // entries: one for each ref - s
constexpr uint32_t kZeroFrom = 100; // of ref - s: all magnitudes are 0 in e4m3, and 2^(6 - (ref - s)) is still normal

// Where the four neighbouring columns 4 word to 4 word + 3 of a step lie among the words of a token's 128 bytes: a
// thread's columns 32 q + 8 s + 4 h + i are element i of register (q, h) of the step's wgmma s.
__device__ __forceinline__ uint32_t permuted(uint32_t word) { return word % 8 / 2 * 8 + word % 2 * 4 + word / 8; }

// Fills entry ref - s of the table with the magnitudes of E2M1 times 2^(6 - (ref - s)), as e4m3. `threads` threads call
// it.
__device__ __forceinline__ void fill_table(uint2 *table, uint32_t thread, uint32_t threads) {
    for (uint32_t i = thread; i < kTable; i += threads) {
        float unit = i < kZeroFrom ? __uint_as_float((127 + 6 - i) << 23) : 0.f;
        table[i] = make_uint2(encode2(0.f, .5f * unit) | encode2(unit, 1.5f * unit) << 16,
                              encode2(2 * unit, 3 * unit) | encode2(4 * unit, 6 * unit) << 16);
    }
}

// The factor 2^(ref - 127 - 6) of a row's sum.
__device__ __forceinline__ float row_factor(uint32_t ref) { return ldexpf(1.f, int(ref) - 127 - 6); }

__device__ __forceinline__ uint4 shared16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
    return v;
}
__device__ __forceinline__ uint2 shared8(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ float2 shared_floats(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t shared_word(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}
__device__ __forceinline__ uint32_t shared_byte(uint32_t at) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
}

// The bytes of `table` that the lower four nibbles of `places` name, each below 8. (The compiler would mask `places`
// again.)
__device__ __forceinline__ uint32_t look_up(uint2 table, uint32_t places) {
    uint32_t v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(table.x), "r"(table.y), "r"(places));
    return v;
}

// Eight codes of E2M1 as e4m3: the first four, then the others.
__device__ __forceinline__ void widen(uint32_t codes, uint2 table, uint32_t &low, uint32_t &high) {
    uint32_t magnitudes = codes & 0x77777777u, odd = codes,
             even = codes << 4; // the signs are at the top of their bytes
    low = (__byte_perm(even, odd, 0x5140) & 0x80808080u) | look_up(table, magnitudes);
    high = (__byte_perm(even, odd, 0x7362) & 0x80808080u) | look_up(table, magnitudes >> 16);
}

// A thread's rows of a step as they are stored: 32 codes of each, and the tables of their scales.
struct RowCodes {
    uint4 top, bottom;
    uint2 top_table, bottom_table;
};

// A thread's registers of operand A of a step's wgmma.
struct OperandA {
    uint32_t x[4];
    // Sets the registers for wgmma `part` of the step.
    __device__ __forceinline__ void set(const RowCodes &codes, int part) {
        const uint32_t top[4] = {codes.top.x, codes.top.y, codes.top.z, codes.top.w};
        const uint32_t bottom[4] = {codes.bottom.x, codes.bottom.y, codes.bottom.z, codes.bottom.w};
        widen(top[part], codes.top_table, x[0], x[2]), widen(bottom[part], codes.bottom_table, x[1], x[3]);
        // Keeps the compiler from moving the widening to where the registers are used.
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[i]));
    }
};

// Keeps the compiler from reading sums before the wgmma that computes them was waited for.
template <int SUMS> __device__ __forceinline__ void pin(float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// totals += sums times the tokens' scales; `scales`: shared memory, of the quad's first token.
template <int SUMS>
__device__ __forceinline__ void promote(float (&totals)[SUMS], const float (&sums)[SUMS], uint32_t scales) {
#pragma unroll
    for (int b = 0; b < SUMS / 4; ++b) {
        float2 scale = shared_floats(scales + 32 * b);
        totals[4 * b] = fmaf(sums[4 * b], scale.x, totals[4 * b]);
        totals[4 * b + 1] = fmaf(sums[4 * b + 1], scale.y, totals[4 * b + 1]);
        totals[4 * b + 2] = fmaf(sums[4 * b + 2], scale.x, totals[4 * b + 2]);
        totals[4 * b + 3] = fmaf(sums[4 * b + 3], scale.y, totals[4 * b + 3]);
    }
}
} // namespace w4a8
