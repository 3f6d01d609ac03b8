// Group-quantised weights of all formats, widened to bf16 in the workspace, in the layout of checkpoints
// (pegainfer-core/src/weights/grouped/format.rs): w = s v - o, rounded once to f32 and once to bf16.
//
// All GPUs; bound by memory. Reference: pegainfer-core/src/weights/grouped/row.rs.
#include "common/base.cuh"
#include "abi/gemm_groups.h"
#include "limits.h"
#include <cuda_fp16.h>
#include <cuda_fp8.h>

using namespace limits::groups;

constexpr uint32_t kSuperBlock = 256;

__constant__ int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

__device__ __forceinline__ float f16_at(const uint8_t *at) {
    return __half2float(__ushort_as_half(uint16_t(at[0] | at[1] << 8)));
}
__device__ __forceinline__ uint32_t word_at(const uint8_t *at) {
    return at[0] | at[1] << 8 | at[2] << 16 | uint32_t(at[3]) << 24;
}
__device__ __forceinline__ float e4m3(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ __forceinline__ float e2m1(uint32_t code) {
    const float magnitude = code & 4 ? (code & 2 ? 4.f : 2.f) * (code & 1 ? 1.5f : 1.f) : (code & 3) * 0.5f;
    return code & 8 ? -magnitude : magnitude;
}

// Number `i` of a plain layout.
__device__ __forceinline__ float number(const uint8_t *at, uint32_t kind, uint32_t i) {
    switch (kind & 3) {
    case kPlainF16: return f16_at(at + 2 * i);
    case kPlainBf16: return __uint_as_float(uint32_t(at[2 * i] | at[2 * i + 1] << 8) << 16);
    default: return __uint_as_float(word_at(at + 4 * i));
    }
}

// s and o of the group of `column`; `at`: scales of the row.
__device__ float2 scale_of(const uint8_t *at, uint32_t kind, uint32_t group, uint32_t column, uint32_t k) {
    if (kind < kK4) {
        const uint32_t i = column / group, groups = k / group, size = (kind & 3) == kPlainF32 ? 4 : 2;
        const float s = number(at, kind, i);
        const uint8_t *offsets = at + groups * size;
        return make_float2(s, kind & kWithZero ? s * offsets[i] : kind & kWithMin ? -number(offsets, kind, i) : 0.f);
    }
    const uint32_t block = column / kSuperBlock, in = column % kSuperBlock;
    if (kind == kK4) { // d, dmin, then 8 scales and 8 minima of 6 bits
        const uint8_t *of = at + block * 16, *packed = of + 4;
        const uint32_t j = in / 32;
        uint32_t scale, min;
        if (j < 4) scale = packed[j] & 63, min = packed[j + 4] & 63;
        else scale = (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4, min = packed[j + 4] >> 4 | packed[j] >> 6 << 4;
        return make_float2(f16_at(of) * scale, f16_at(of + 2) * min);
    }
    if (kind == kK6) { // 16 scales, then d
        const uint8_t *of = at + block * 18;
        return make_float2(f16_at(of + 16) * int8_t(of[in / 16]), 0.f);
    }
    if (kind == kXs) { // d, upper 2 bits of 8 scales, lower 4 bits
        const uint8_t *of = at + block * 8;
        const uint32_t j = in / 32, high = (of[2] | of[3] << 8) >> 2 * j & 3, low = of[4 + j / 2] >> j % 2 * 4 & 15;
        return make_float2(f16_at(of) * (int(low | high << 4) - 32), 0.f);
    }
    if (kind == kE4m3) return make_float2(__uint_as_float(word_at(at)) * e4m3(at[4 + column / 16]), 0.f);
    const uint32_t e = at[column / 32]; // 2^(e - 127), subnormal of 0
    return make_float2(e ? __uint_as_float(e << 23) : __uint_as_float(1u << 22), 0.f);
}

// Grid: 8 columns over threads of a block. Rows of w from `first` on.
extern "C" __global__ __launch_bounds__(kThreads) void widen_groups(
    const uint8_t *codes,  // [n, code_pitch]
    const uint8_t *scales, // [n, scale_pitch]
    bf16 *out,             // [rows, k], k a multiple of 32
    uint32_t values, uint32_t bits, uint32_t kind, uint32_t group, uint32_t k, uint32_t code_pitch,
    uint32_t scale_pitch, uint32_t first, uint32_t rows) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(rows) * (k / 8)) return;
    const uint32_t row = at / (k / 8), column = (at - size_t(row) * (k / 8)) * 8, run = column / 32, in = column % 32;
    const uint8_t *of_row = codes + size_t(first + row) * code_pitch;
    const float2 of_group = scale_of(scales + size_t(first + row) * scale_pitch, kind, group, column, k);
    float v[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        uint32_t code;
        if (bits == 8) code = of_row[column + i];
        else code = of_row[run * 16 + in % 16 + i] >> in / 16 * 4 & 15;
        if (bits == 5) code |= (word_at(of_row + k / 2 + run * 4) >> (in + i) & 1) << 4;
        if (bits == 6) code |= (of_row[k / 2 + run * 8 + i] >> in / 8 * 2 & 3) << 4;
        float value;
        if (values == kCodeE4m3) value = e4m3(code);
        else if (values == kIq4) value = kIq4Values[code];
        else if (values == kE2m1) value = e2m1(code);
        else if (bits == 8) value = int8_t(code);
        else value = float(int(code) - (values == kCentred ? 1 << (bits - 1) : 0));
        v[i] = __fadd_rn(__fmul_rn(of_group.x, value), -of_group.y);
    }
    *reinterpret_cast<uint4 *>(out + size_t(row) * k + column) =
        make_uint4(narrow(v[0], v[1]), narrow(v[2], v[3]), narrow(v[4], v[5]), narrow(v[6], v[7]));
}
