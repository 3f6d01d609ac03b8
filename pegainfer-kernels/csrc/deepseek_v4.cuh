// What the kernels of DeepSeek-V4's ops share. Activations are bf16 or f32, as their template parameter says: a
// kernel reads them to f32, computes in f32 and rounds once when it stores.
//
// These kernels are the plain first version: one block or warp a row, and no overlap with their neighbours.
#pragma once
#include "norm_rope.cuh"

// x rounded to the dtype of activations.
template <typename T> __device__ __forceinline__ float rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ float rounded<bf16>(float x) { return round_bf16(x); }

// A float as an integer of the same order, the total order of IEEE 754: -0 is below 0.
__device__ __forceinline__ uint32_t ordered(float x) {
    uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// 2^n for normal results.
__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float(uint32_t(n + 127) << 23); }

__device__ __forceinline__ int exponent(float x) { return int(__float_as_uint(x) >> 23 & 255) - 127; }

// The smallest power of two that is at least x, for positive normal x.
__device__ __forceinline__ float ceil_power_of_two(float x) {
    uint32_t bits = __float_as_uint(x);
    return __uint_as_float(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
}

// A floating-point format by the largest value, the smallest exponent of a normal value, and the bits of its mantissa.
struct E4M3 {
    static constexpr float kMax = 448.f;
    static constexpr int kMinExponent = -6, kMantissa = 3;
};
struct E2M1 {
    static constexpr float kMax = 6.f;
    static constexpr int kMinExponent = 0, kMantissa = 1;
};

// x rounded to the nearest value of the format, ties to even, saturating. NaN stays NaN.
template <typename F> __device__ __forceinline__ float round_to(float x) {
    if (x > F::kMax) x = F::kMax;
    if (x < -F::kMax) x = -F::kMax;
    int spacing = max(exponent(x), F::kMinExponent) - F::kMantissa;
    return rintf(x * power_of_two(-spacing)) * power_of_two(spacing);
}

// Neighbouring values of a head, turned by the angle position * frequency, or back.
__device__ __forceinline__ void turn_pair(float &a, float &b, float position, float frequency, bool inverse) {
    float sine, cosine, first = a;
    sincosf(__fmul_rn(position, frequency), &sine, &cosine);
    if (inverse) sine = -sine;
    a = first * cosine - b * sine, b = first * sine + b * cosine;
}

constexpr uint32_t kGroup = 128;      // activations of a row that share an FP8 scale
constexpr uint32_t kKeyGroup = 64;    // values of a key that share one
constexpr float kLeastAmax = 1e-4f;   // from which on the scale of values in FP8 follows their largest magnitude

// x rounded to the format times a power of two, the smallest with which the group's largest magnitude `amax` fits.
template <typename F> __device__ __forceinline__ float quantize(float x, float amax) {
    float scale = ceil_power_of_two(amax / F::kMax);
    return round_to<F>(x * power_of_two(-exponent(scale))) * scale;
}
