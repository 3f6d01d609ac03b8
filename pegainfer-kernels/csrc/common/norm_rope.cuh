// RMS norm (of rows, and of attention heads: QK norm) and rotary embedding: the arithmetic that all kernels share, and
// the layout in which one warp has one head.
//
//   y = bf16(bf16(x * rsqrt(mean(x²) + eps)) * weight);  low' = low cos - high sin, high' = high cos + low sin
// Users: csrc/rows/norm.cu (rows), attention/qkv.cu (vectors), attention/decode.cuh and layers/attention.cuh (`Pairs`).
// Sums of squares are added in each layout's order, everything else rounds the same way. Reference: src/cpu/norm.rs,
// src/cpu/qkv.rs.
#pragma once
#include "common/math.cuh"
#include "common/warp.cuh"

__device__ __forceinline__ float sum_squares(uint4 row) {
    const uint32_t *v = reinterpret_cast<const uint32_t *>(&row);
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]);
        squares += a.x * a.x + a.y * a.y;
    }
    return squares;
}

// Two elements of a norm: scaled, rounded, multiplied by the weight, and rounded. The multiplication of two bf16 is
// exact in f32, so rounding it is one instruction with the multiplication.
__device__ __forceinline__ uint32_t norm2(uint32_t pair, float scale, uint32_t weight) {
    float2 a = widen(pair);
    uint32_t rounded = narrow(a.x * scale, a.y * scale);
    __nv_bfloat162 scaled =
        __hmul2(reinterpret_cast<__nv_bfloat162 &>(rounded), reinterpret_cast<__nv_bfloat162 &>(weight));
    return reinterpret_cast<uint32_t &>(scaled);
}
// One of them.
__device__ __forceinline__ float norm1(float x, float scale, float weight) {
    return round_bf16(round_bf16(x * scale) * weight);
}

// Rotary embedding of two elements D / 2 apart, `low` first: one term of each sum is rounded, the other is fused.
__device__ __forceinline__ float2 rotate(float low, float high, float cosine, float sine) {
    return make_float2(fmaf(low, cosine, -__fmul_rn(high, sine)), fmaf(high, cosine, __fmul_rn(low, sine)));
}

// Eight elements of a norm.
__device__ __forceinline__ uint4 scaled(uint4 row, float scale, uint4 weight) {
    uint32_t *v = reinterpret_cast<uint32_t *>(&row), *w = reinterpret_cast<uint32_t *>(&weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = norm2(v[j], scale, w[j]);
    return row;
}

// The elements of a head of D that a lane has: pairs that rotate together, dimensions lane + 32 p and D / 2 further.
template <int D> struct Pairs {
    float low[D / 64], high[D / 64];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <int D, typename T> __device__ __forceinline__ Pairs<D> load_pairs(const T *from) {
    Pairs<D> out;
#pragma unroll
    for (int p = 0; p < D / 64; ++p) {
        out.low[p] = to_float(from[threadIdx.x % 32 + 32 * p]);
        out.high[p] = to_float(from[threadIdx.x % 32 + 32 * p + D / 2]);
    }
    return out;
}

// Of registers, so that neither side goes to memory.
template <int D> __device__ __forceinline__ Pairs<D> select(bool first, const Pairs<D> &a, const Pairs<D> &b) {
    Pairs<D> out;
#pragma unroll
    for (int p = 0; p < D / 64; ++p) {
        out.low[p] = first ? a.low[p] : b.low[p];
        out.high[p] = first ? a.high[p] : b.high[p];
    }
    return out;
}

// x / rms(x) * weight, rounded after each factor, then rotated: `angles` has cosines below and sines above.
template <int D>
__device__ __forceinline__ Pairs<D> norm_rope(const Pairs<D> &x, const Pairs<D> &weight, const Pairs<D> &angles,
                                              float eps) {
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < D / 64; ++p) squares += x.low[p] * x.low[p] + x.high[p] * x.high[p];
    float scale = inverse_rms(warp_sum(squares), D, eps);
    Pairs<D> out;
#pragma unroll
    for (int p = 0; p < D / 64; ++p) {
        float a = norm1(x.low[p], scale, weight.low[p]);
        float b = norm1(x.high[p], scale, weight.high[p]);
        float2 rotated = rotate(a, b, angles.low[p], angles.high[p]);
        out.low[p] = rotated.x, out.high[p] = rotated.y;
    }
    return out;
}
