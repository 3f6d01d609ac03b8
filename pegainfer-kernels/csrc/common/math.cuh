// Scalar functions of more than one kernel: one formula and one rounding for all of them.
//
// Divisions are __fdividef and exponentials ex2.approx: 2 units in the last place of f32 each, a hundredth of the
// rounding to bf16 that follows. Reference: src/cpu/sigmoid.rs (both functions to 4e-7).
#pragma once
#include "common/base.cuh"

constexpr float kLog2E = 1.4426950408889634f;

// 2^x; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ float log2_approx(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// x sigmoid(z) = x / (1 + exp(-z)). At z < -88 the exponential overflows, and the result is 0.
__device__ __forceinline__ float times_sigmoid(float x, float z) { return __fdividef(x, 1.f + __expf(-z)); }
__device__ __forceinline__ float sigmoid(float z) { return times_sigmoid(1.f, z); }
__device__ __forceinline__ float silu(float z) { return times_sigmoid(z, z); }

// The same with expf and an exact division, for DeepSeek-V4's streams and experts. experts/wgmma.cu has `silu` instead:
// its warps wait for their own instructions, and h is rounded to bf16 and to e4m3 after it.
__device__ __forceinline__ float exact_sigmoid(float z) { return 1.f / (1.f + expf(-z)); }
__device__ __forceinline__ float exact_silu(float z) { return z / (1.f + expf(-z)); }

// SwiGLU: bf16(silu(gate)) up, of values that were bf16; the caller rounds the result.
__device__ __forceinline__ float silu_times(float gate, float up) { return round_bf16(silu(gate)) * up; }
// Of two elements, rounded.
__device__ __forceinline__ uint32_t silu_times2(uint32_t gate, uint32_t up) {
    float2 g = widen(gate), u = widen(up);
    g = widen(narrow(silu(g.x), silu(g.y)));
    return narrow(g.x * u.x, g.y * u.y);
}

// log(1 + exp(x)); beyond 20 it is x in f32.
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

// The gated delta rule's decay of a token and head, as a logarithm; `a_log` and `dt_bias` are the head's.
__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
    return -expf(a_log) * softplus(a + dt_bias);
}

// 1 / sqrt(mean(x²) + eps) of n elements with this sum of squares.
__device__ __forceinline__ float inverse_rms(float squares, uint32_t n, float eps) {
    return rsqrtf(squares / float(n) + eps);
}
