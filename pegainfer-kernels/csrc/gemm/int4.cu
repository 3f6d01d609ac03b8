// Weights of four bits in groups of 128 columns or more (csrc/common/int4.cuh), widened to bf16.
//
// All GPUs, bound by memory. Reference: src/cpu/weights.rs.
#include "common/int4.cuh"
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
