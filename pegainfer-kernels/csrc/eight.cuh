// Eight neighbouring elements, 16 bytes of bf16, as f32.
#pragma once
#include "common.cuh"

struct Eight {
    float x[8];
};

__device__ __forceinline__ Eight widen8(uint4 piece) {
    const uint32_t *v = reinterpret_cast<const uint32_t *>(&piece);
    Eight out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 pair = widen(v[j]);
        out.x[2 * j] = pair.x, out.x[2 * j + 1] = pair.y;
    }
    return out;
}

__device__ __forceinline__ uint4 narrow8(const Eight &v) {
    return make_uint4(narrow(v.x[0], v.x[1]), narrow(v.x[2], v.x[3]), narrow(v.x[4], v.x[5]), narrow(v.x[6], v.x[7]));
}

__device__ __forceinline__ Eight load8(const float *from) {
    Eight out;
    *reinterpret_cast<float4 *>(out.x) = reinterpret_cast<const float4 *>(from)[0];
    *reinterpret_cast<float4 *>(out.x + 4) = reinterpret_cast<const float4 *>(from)[1];
    return out;
}
