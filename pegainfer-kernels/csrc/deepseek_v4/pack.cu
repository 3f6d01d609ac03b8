// What surrounds cuBLASLt in the large-M GEMMs of DeepSeek-V4, where activations are bf16:
//
//   pack_activations: x to e4m3 codes and a scale for each 128 columns of a row, 2^ceil(log2(max(amax, 1e-4) / 448)).
//                     Exact for the activations of round_activation, whose rounding it is (deepseek_v4/quant.cu). In
//                     the same launch: E8M0 scales of up to two weights to f32
//   widen_e8m0:       FP8 weights with E8M0 scales to bf16, exactly
//   pack_swiglu:      h = bf16(silu(min(gate, limit)) clamp(up, ±limit)), then as pack_activations
//
// Codes and scales lie as cuBLASLt takes them (CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F): [m, k], and [k / 128, m], m a
// multiple of four. All GPUs, bound by memory. Reference: src/cpu/deepseek_v4/{kv_quant,experts}.rs,
// src/cpu/weights.rs.
#include "deepseek_v4/rounding.cuh"
#include "common/weight_codes.cuh"
#include "abi/deepseek_v4_pack.h"
#include "limits.h"

using namespace limits::deepseek_v4_pack;

constexpr uint32_t kLanes = kGroup / kVector; // of a group: a vector each

// A vector of eight bf16 values, in f32.
struct Eight {
    float v[kVector];
    __device__ __forceinline__ explicit Eight(const uint4 &from) {
        const uint32_t pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 two = widen(pairs[i]);
            v[2 * i] = two.x, v[2 * i + 1] = two.y;
        }
    }
    __device__ __forceinline__ Eight() {}
};

// Writes the codes and the scale of a group of 128 columns, unless it is not `valid`. All lanes of the warp call it,
// each 16 of them with a group. Multiplying by the inverse of the scale, a power of two, is exact.
__device__ __forceinline__ void pack_group(const Eight &x, uint8_t *codes, float *scale_at, bool valid) {
    float amax = kLeastAmax;
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) amax = fmaxf(amax, fabsf(x.v[i]));
    amax = reduce_lanes(amax, kLanes, Max());
    float scale = ceil_power_of_two(amax / E4M3::kMax), inverse = power_of_two(-exponent(scale));
    if (!valid) return;
    uint32_t packed[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
        const float *v = x.v + 4 * i;
        packed[i] = encode2(v[0] * inverse, v[1] * inverse) | encode2(v[2] * inverse, v[3] * inverse) << 16;
    }
    *reinterpret_cast<uint2 *>(codes) = make_uint2(packed[0], packed[1]);
    if (threadIdx.x % kLanes == 0) *scale_at = scale;
}

// The group of each 16 threads of the grid: its row and its number in the row.
struct GroupOf {
    uint32_t row, group;
    bool valid;
    __device__ __forceinline__ GroupOf(uint32_t rows, uint32_t k) {
        uint32_t each = k / kGroup, i = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
        row = i / each, group = i - row * each, valid = row < rows;
    }
    __device__ __forceinline__ uint32_t column() const { return group * kGroup + threadIdx.x % kLanes * kVector; }
};

// Writes 2^(scale - 127) of the `each` scales of `first`, and behind them of those of `second`, which may be null.
__device__ __forceinline__ void widen_scales(const uint8_t *first, const uint8_t *second, uint32_t each, float *out) {
    uint32_t all = second ? 2 * each : each;
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < all; i += gridDim.x * kThreads) {
        uint32_t scale = i < each ? first[i] : second[i - each];
        out[i] = __uint_as_float(scale ? scale << 23 : 1u << 22);
    }
}

// Grid: groups of 128 over half-warps. Rows behind the m-th become zeros.
extern "C" __global__ __launch_bounds__(kThreads) void pack_activations(
    const bf16 *x,  // [m, k], k a multiple of 128
    uint8_t *codes, // [padded, k]
    float *scales,  // [k / 128, padded]
    const uint8_t *first,
    const uint8_t *second, // [each], E8M0; the second may be null
    float *weight_scales,  // [2, each]
    uint32_t each, uint32_t m, uint32_t padded, uint32_t k) {
    start_after_predecessor();
    GroupOf at(padded, k);
    Eight values(at.row < m ? load16(written(x) + size_t(at.row) * k + at.column()) : make_uint4(0, 0, 0, 0));
    pack_group(values, codes + size_t(at.row) * k + at.column(), scales + size_t(at.group) * padded + at.row, at.valid);
    widen_scales(first, second, each, weight_scales);
}

// Grid: as pack_activations. Gate and up may be columns of one matrix, whose rows are `pitch` elements apart.
extern "C" __global__ __launch_bounds__(kThreads) void pack_swiglu(
    const bf16 *gate, // [m, width], rows `pitch` elements apart
    const bf16 *up,
    uint8_t *codes,             // [m, width]
    float *scales,              // [width / 128, m]
    const uint8_t *down_scales, // [each], E8M0
    float *weight_scales,       // [each]
    uint32_t each, uint32_t m, uint32_t width, uint32_t pitch, float limit) {
    start_after_predecessor();
    GroupOf at(m, width);
    size_t from = size_t(at.row) * pitch + at.column();
    uint4 zero = make_uint4(0, 0, 0, 0);
    Eight g(at.valid ? load16(written(gate) + from) : zero), u(at.valid ? load16(written(up) + from) : zero), h;
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) {
        // As gate_up of experts/mma.cu has it.
        float a = fminf(g.v[i], limit), b = fminf(fmaxf(u.v[i], -limit), limit);
        h.v[i] = round_bf16(exact_silu(a) * b);
    }
    pack_group(h, codes + size_t(at.row) * width + at.column(), scales + size_t(at.group) * m + at.row, at.valid);
    widen_scales(down_scales, nullptr, each, weight_scales);
}

// Grid: elements / 16 over threads of a block. Rows of w from `first` on.
extern "C" __global__ __launch_bounds__(kThreads) void widen_e8m0(
    const uint8_t *codes,  // [n, k], k a multiple of 128
    const uint8_t *scales, // [n / 128, k / 128], rounded up
    bf16 *out,             // [rows, k]
    uint32_t first, uint32_t rows, uint32_t k) {
    release_successor();
    size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x;
    bool valid = i < size_t(rows) * k / 16;
    uint32_t row = valid ? i / (k / 16) : 0, column = valid ? (i - size_t(row) * (k / 16)) * 16 : 0;
    // Weights, which no kernel writes.
    uint4 from = stream16(reinterpret_cast<const bf16 *>(codes + size_t(first + row) * k + column)), wide[2];
    Codes<Format::kFp8>::widen(from, scales[size_t((first + row) / kGroup) * (k / kGroup) + column / kGroup], wide);
    wait_for_predecessor();
    if (!valid) return;
    uint4 *to = reinterpret_cast<uint4 *>(out + size_t(row) * k + column);
    to[0] = wide[0], to[1] = wide[1];
}
