// RMS norm of a row with a vector of eight elements a thread, and the residual add before it.
//
//   out = bf16(bf16(x * rsqrt(mean(x²) + eps)) * weight); with weights in f32 only the result is rounded.
// Users: csrc/rows/norm.cu, collectives/add_norm.cu. Reference: src/cpu/norm.rs.
#pragma once
#include "common/norm_rope.cuh"

// The sum of eight elements of bf16, rounded.
__device__ __forceinline__ uint4 add8(uint4 a, uint4 b) {
    uint32_t *v = reinterpret_cast<uint32_t *>(&a);
    const uint32_t *w = reinterpret_cast<const uint32_t *>(&b);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 x = widen(v[j]), y = widen(w[j]);
        v[j] = narrow(x.x + y.x, x.y + y.y);
    }
    return a;
}

// Eight weights. With those in bf16 the normalised value is rounded before the multiplication, with those in f32 it is
// not.
template <typename W> struct NormWeights;
template <> struct NormWeights<bf16> {
    uint4 w;
    __device__ void load(const bf16 *from) { w = load16(from); }
    __device__ uint4 times(uint4 row, float scale) const { return scaled(row, scale, w); }
};
template <> struct NormWeights<float> {
    float4 low, high;
    __device__ void load(const float *from) {
        low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    }
    __device__ uint4 times(uint4 row, float scale) const {
        float2 a = widen(row.x), b = widen(row.y), c = widen(row.z), d = widen(row.w);
        return make_uint4(
            narrow(a.x * scale * low.x, a.y * scale * low.y), narrow(b.x * scale * low.z, b.y * scale * low.w),
            narrow(c.x * scale * high.x, c.y * scale * high.y), narrow(d.x * scale * high.z, d.y * scale * high.w));
    }
};
