// Values rounded to FP8 (e4m3) with an f32 scale for each block of them:
//
//   scale = largest magnitude of the block / 448, or 1 if that is 0;  code = e4m3(x / scale), nearest, ties to even
#pragma once
#include "common.cuh"

// The larger magnitude of a pair, as bits of a bf16 number: NaN is the largest.
__device__ __forceinline__ uint32_t magnitude(uint32_t pair) { return max(pair & 0x7fff, pair >> 16 & 0x7fff); }

__device__ __forceinline__ float scale_of(uint32_t largest) {
    return largest == 0 ? 1.f : __fdiv_rn(__uint_as_float(largest << 16), 448.f);
}

#if __CUDA_ARCH__ < 890
// One code, without the instruction: as `encode_e4m3` of src/cpu/formats.rs.
__device__ __forceinline__ uint32_t encode1(float x) {
    float magnitude = fminf(fabsf(x), 448.f);
    uint32_t bits = __float_as_uint(magnitude);
    uint32_t normal = ((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t subnormal = __float_as_uint(magnitude + 16384.f) & 0xffu;
    return (magnitude < 0.015625f ? subnormal : normal) | (__float_as_uint(x) >> 24 & 0x80u);
}
#endif

// Two codes, the first in the lower byte.
__device__ __forceinline__ uint32_t encode2(float low, float high) {
#if __CUDA_ARCH__ >= 890
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return encode1(low) | encode1(high) << 8;
#endif
}

// Many quotients by one divisor, each rounded to nearest as `__fdiv_rn` does. With the divisor's inverse, rounded to nearest, one
// Newton step gives that quotient (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990), in four
// instructions instead of ten, as long as nothing on the way leaves the range of normal numbers.
struct Divisor {
    float value, inverse;
    bool in_range;
    __device__ __forceinline__ explicit Divisor(float value)
        : value(value), inverse(__frcp_rn(value)), in_range(value > 0x1p-64f && value < 0x1p64f) {}
    // For divisors in range, and |x| up to 2^20 of them.
    __device__ __forceinline__ float fast(float x) const {
        float quotient = x * inverse;
        return copysignf(fmaf(fmaf(-quotient, value, x), inverse, quotient), x); // the sign of a zero
    }
    // Codes of four values.
    __device__ __forceinline__ uint32_t encode4(uint2 x) const {
        float2 a = widen(x.x), b = widen(x.y);
        if (in_range) return encode2(fast(a.x), fast(a.y)) | encode2(fast(b.x), fast(b.y)) << 16;
        return encode2(__fdiv_rn(a.x, value), __fdiv_rn(a.y, value)) |
               encode2(__fdiv_rn(b.x, value), __fdiv_rn(b.y, value)) << 16;
    }
};

// Codes of four values.
__device__ __forceinline__ uint32_t encode4(uint2 x, float scale) { return Divisor(scale).encode4(x); }
