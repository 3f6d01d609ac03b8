// RMS norm and rotary embedding of one head by one warp.
#pragma once
#include "common.cuh"
#include "warp.cuh"

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

// Vec8 elements of a norm: scaled, rounded, and multiplied by the weight.
__device__ __forceinline__ uint4 scaled(uint4 row, float scale, uint4 weight) {
    uint32_t *v = reinterpret_cast<uint32_t *>(&row), *w = reinterpret_cast<uint32_t *>(&weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]), b = widen(w[j]);
        v[j] = narrow(round_bf16(a.x * scale) * b.x, round_bf16(a.y * scale) * b.y);
    }
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
    float scale = rsqrtf(warp_sum(squares) / float(D) + eps);
    Pairs<D> out;
#pragma unroll
    for (int p = 0; p < D / 64; ++p) {
        float a = round_bf16(round_bf16(x.low[p] * scale) * weight.low[p]);
        float b = round_bf16(round_bf16(x.high[p] * scale) * weight.high[p]);
        out.low[p] = a * angles.low[p] - b * angles.high[p];
        out.high[p] = b * angles.low[p] + a * angles.high[p];
    }
    return out;
}
