// Weights of four bits: their order in memory (csrc/common/int4.cuh), and weights widened to bf16.
//
// All GPUs, bound by memory. Reference: src/cpu/weights.rs.
#include "common/int4.cuh"
#include "abi/gemm_int4.h"
#include "limits.h"

using namespace limits::int4;

// Column of pair `i` of word `j` of lane quad in a block of 128.
__device__ __forceinline__ uint32_t pair_column(uint32_t j, uint32_t i, uint32_t quad) {
    return 32 * j + i / 2 * 16 + i % 2 * 8 + 2 * quad;
}

// Grid: 16 bytes of codes over threads of a block. In place, from the order of checkpoints: 16 bytes for 32 columns,
// byte b has column b in its low nibble and column b + 16 in its high one. The four lanes of a block of columns are of
// one warp.
extern "C" __global__ __launch_bounds__(kThreads) void pack_int4(uint8_t *codes, // [n, k / 2], k a multiple of 128
                                                                 uint32_t n, uint32_t k) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const bool inside = at < size_t(n) * (k / 32);
    const uint8_t *from = codes + at / 4 * 64;
    auto code = [&](uint32_t column) -> uint32_t {
        uint32_t in = column % 32;
        return from[column / 32 * 16 + in % 16] >> (in / 16 * 4) & 15;
    };
    uint32_t words[4] = {};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            if (!inside) continue;
            uint32_t column = pair_column(j, i, at % 4);
            words[j] |= code(column) << 4 * i | code(column + 1) << 4 * (i + 4);
        }
    __syncwarp();
    if (inside) *reinterpret_cast<uint4 *>(codes + at * 16) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Grid: elements over threads of a block. Elements of `bytes` bytes, transposed.
extern "C" __global__ __launch_bounds__(kThreads) void transpose_scales(
    const uint8_t *from, // [n, pitch] bytes, the elements of a row from `first` on
    uint8_t *to,         // from byte to_first on: [groups, n] elements
    uint64_t to_first, uint32_t n, uint32_t groups, uint32_t pitch, uint32_t first, uint32_t bytes) {
    size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(n) * groups) return;
    uint32_t group = at / n, row = at - size_t(group) * n;
    const uint8_t *element = from + size_t(row) * pitch + first + group * bytes;
    for (uint32_t i = 0; i < bytes; ++i) to[to_first + at * bytes + i] = element[i];
}

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
