// Scalar functions of more than one kernel, each with one rounding for all kernels.
#pragma once
#include "common.cuh"

// 2^x to 2 units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
