// Weights of four bits in groups of 128 columns or more (csrc/common/int4.cuh), widened to bf16 or to FP8.
//
// All GPUs, bound by memory. Reference: src/cpu/weights.rs.
#include "common/fp8_codes.cuh"
#include "common/int4.cuh"
#include "common/warp.cuh"
#include "abi/gemm_int4.h"
#include "limits.h"

using namespace limits::int4;

// Grid: 32 columns over threads of a block. out = bf16(scale (q - zero)), rows of w from `first` on.
extern "C" __global__ __launch_bounds__(kThreads) void widen_int4(
    const uint8_t *codes, // [n, k / 2], k a multiple of 128
    const uint8_t
        *scales, // [k / group, n] of two bytes; from byte `zeros` on zero points [k / group, n], unless that is 0
    bf16 *out,   // [rows, k]
    uint64_t zeros, uint32_t group_shift, uint32_t f16, uint32_t n, uint32_t k, uint32_t first, uint32_t rows) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(rows) * (k / 32)) return;
    const uint32_t row = at / (k / 32), rest = at - size_t(row) * (k / 32), block = rest / 4, quad = rest % 4;
    const uint4 code = load16(reinterpret_cast<const bf16 *>(codes + (size_t(first + row) * (k / 32) + rest) * 16));
    const uint32_t words[4] = {code.x, code.y, code.z, code.w};
    const size_t scale_at = size_t(block >> group_shift) * n + first + row;
    const float scale = widen_scale(reinterpret_cast<const uint16_t *>(scales)[scale_at], f16 != 0);
    const uint32_t bias = int4_bias(zeros ? scales[zeros + scale_at] : 8);
    const uint32_t lane = threadIdx.x % 32, lanes = 0xfu << lane / 4 * 4; // of the block of columns
    auto scaled = [&](uint32_t pair) {
        float2 v = widen(pair);
        return narrow(v.x * scale, v.y * scale);
    };
    // Pair i of every lane belongs to the eight columns of lane i: transposes the 4 x 4 matrix of pairs.
    auto exchange = [&](uint32_t &low, uint32_t &high, uint32_t distance) {
        const bool upper = lane & distance;
        const uint32_t other = __shfl_xor_sync(lanes, upper ? low : high, distance);
        (upper ? low : high) = other;
    };
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        uint32_t v[4] = {scaled(int4_pair<0>(words[j], bias)), scaled(int4_pair<1>(words[j], bias)),
                         scaled(int4_pair<2>(words[j], bias)), scaled(int4_pair<3>(words[j], bias))};
        exchange(v[0], v[1], 1), exchange(v[2], v[3], 1);
        exchange(v[0], v[2], 2), exchange(v[1], v[3], 2);
        bf16 *to = out + size_t(row) * k + block * kInt4Block + 32 * j + 8 * quad;
        *reinterpret_cast<uint4 *>(to) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

// The bytes of columns 8 quad to 8 quad + 7 of 32, from the bytes that each lane quad has: pairs 0 and 1 in `low`, 2
// and 3 in `high`; pair i is for columns 8 i + 2 quad and + 1.
__device__ __forceinline__ uint2 gather_pairs(uint32_t low, uint32_t high, uint32_t quad) {
    const bool upper = quad & 2, odd = quad & 1;
    const uint32_t kept = upper ? high : low, other = __shfl_xor_sync(kAll, upper ? low : high, 2);
    const uint32_t first = upper ? other : kept, second = upper ? kept : other; // of lanes 0 or 1, of lanes 2 or 3
    constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;                           // halves of two words
    const uint32_t mine = __byte_perm(first, second, odd ? kHigh : kLow);
    const uint32_t theirs = __shfl_xor_sync(kAll, __byte_perm(first, second, odd ? kLow : kHigh), 1);
    const uint32_t of_even = odd ? theirs : mine, of_odd = odd ? mine : theirs;
    return make_uint2(__byte_perm(of_even, of_odd, kLow), __byte_perm(of_even, of_odd, kHigh));
}

// Grid: blocks of 128 columns over the warps of a block, eights of rows. out = e4m3(q - zero), exact; rows of w from
// `first` on. A lane has 32 columns. Scales become f32, by the first threads of the grid.
extern "C" __global__ __launch_bounds__(kThreads) void widen_int4_fp8(
    const uint8_t *codes,  // [n, k / 2], k a multiple of 128
    const uint8_t *scales, // as of widen_int4
    uint8_t *out,          // [rows, k], rows a multiple of 8
    float *out_scales,     // [k / 128, rows]
    uint64_t zeros, uint32_t group_shift, uint32_t f16, uint32_t n, uint32_t k, uint32_t first, uint32_t rows) {
    const uint32_t blocks = k / kInt4Block, warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
    const uint32_t block = blockIdx.x * (kThreads / 32) + warp, row = blockIdx.y * 8 + lane / 4;
    const size_t thread = (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
    if (thread < size_t(rows) * blocks) {
        const uint32_t of_block = thread / rows, of_row = thread - size_t(of_block) * rows;
        const size_t at = size_t(of_block >> group_shift) * n + first + of_row;
        out_scales[thread] = widen_scale(reinterpret_cast<const uint16_t *>(scales)[at], f16 != 0);
    }
    if (block >= blocks) return;
    const size_t rest = size_t(block) * 4 + quad;
    const uint4 code = stream16(reinterpret_cast<const bf16 *>(codes + (size_t(first + row) * (k / 32) + rest) * 16));
    const uint32_t bias = int4_bias(zeros ? scales[zeros + size_t(block >> group_shift) * n + first + row] : 8);
    auto codes_of = [&](uint32_t pair) {
        const float2 v = widen(pair);
        return encode2(v.x, v.y);
    };
    uint8_t *to = out + size_t(row) * k + block * kInt4Block + 8 * quad;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        const uint32_t word = int4_word(code, j);
        const uint32_t low = codes_of(int4_pair<0>(word, bias)) | codes_of(int4_pair<1>(word, bias)) << 16;
        const uint32_t high = codes_of(int4_pair<2>(word, bias)) | codes_of(int4_pair<3>(word, bias)) << 16;
        *reinterpret_cast<uint2 *>(to + 32 * j) = gather_pairs(low, high, quad);
    }
}
