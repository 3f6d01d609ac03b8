// Eight neighbouring elements in f32: a vector of bf16, widened.
#pragma once
#include "common/base.cuh"

struct Vec8 {
    float x[kVector];
};

__device__ __forceinline__ Vec8 widen8(uint4 vector) {
    const uint32_t *v = reinterpret_cast<const uint32_t *>(&vector);
    Vec8 out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 pair = widen(v[j]);
        out.x[2 * j] = pair.x, out.x[2 * j + 1] = pair.y;
    }
    return out;
}

__device__ __forceinline__ uint4 narrow8(const Vec8 &v) {
    return make_uint4(narrow(v.x[0], v.x[1]), narrow(v.x[2], v.x[3]), narrow(v.x[4], v.x[5]), narrow(v.x[6], v.x[7]));
}

__device__ __forceinline__ Vec8 load8(const float *from) {
    Vec8 out;
    *reinterpret_cast<float4 *>(out.x) = reinterpret_cast<const float4 *>(from)[0];
    *reinterpret_cast<float4 *>(out.x + 4) = reinterpret_cast<const float4 *>(from)[1];
    return out;
}
