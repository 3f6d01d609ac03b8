// Values rounded to FP8 (e4m3) with an f32 scale for each block of them:
//
//   scale = largest magnitude of the block / 448, or 1 if that is 0;  code = e4m3(x / scale), nearest, ties to even
#pragma once
#include "common/base.cuh"

// The larger magnitude of a pair, as bits of a bf16 number: NaN is the largest.
__device__ __forceinline__ uint32_t magnitude(uint32_t pair) { return max(pair & 0x7fff, pair >> 16 & 0x7fff); }

// A quotient rounded to nearest as `__fdiv_rn` does, from the divisor's inverse, rounded to nearest, by one Newton step
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990): three instructions instead of
// ten, as long as nothing on the way leaves the range of normal numbers.
__device__ __forceinline__ float quotient(float x, float divisor, float inverse) {
    float guess = x * inverse;
    return fmaf(fmaf(-guess, divisor, x), inverse, guess);
}

// The scale of a block whose largest magnitude this is: as a division by 448 rounds it, for all magnitudes of bf16.
__device__ __forceinline__ float amax_over_448(uint32_t largest) {
    float x = __uint_as_float(largest << 16);
    if (largest >= 0x7f80u || largest == 0) return largest == 0 ? 1.f : x; // infinity and NaN stay
    if (x < 0x1p-64f) return float(double(x) * (1. / 448.));               // down to subnormal numbers
    return quotient(x, 448.f, 1.f / 448.f);
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

// Four codes, the first in the lowest byte.
__device__ __forceinline__ uint32_t encode4(float a, float b, float c, float d) {
    return encode2(a, b) | encode2(c, d) << 16;
}

// Many quotients by one scale, which a power of two brings into the range of `quotient`.
struct Divisor {
    float scale, factor, value, inverse;
    __device__ __forceinline__ explicit Divisor(float scale) : scale(scale) {
        factor = scale < 0x1p-64f ? 0x1p100f : scale > 0x1p64f ? 0x1p-100f : 1.f;
        value = scale * factor;
        float guess;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(value));
        inverse = fmaf(guess, fmaf(-value, guess, 1.f), guess); // rounded to nearest, as __frcp_rn
    }
    // For |x| up to 2^20 scales.
    __device__ __forceinline__ float divide(float x) const {
        return copysignf(quotient(x * factor, value, inverse), x); // the sign of a zero
    }
    // Codes of a pair.
    __device__ __forceinline__ uint32_t encode2(uint32_t pair) const {
        float2 x = widen(pair);
        return ::encode2(divide(x.x), divide(x.y));
    }
    // Codes of four values.
    __device__ __forceinline__ uint32_t encode4(uint2 x) const { return encode2(x.x) | encode2(x.y) << 16; }
};

// Codes of four values.
__device__ __forceinline__ uint32_t encode4(uint2 x, float scale) { return Divisor(scale).encode4(x); }

// The larger of two bits of magnitudes.
struct MaxBits {
    __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

// The largest magnitude of 8 elements as the bits of a bf16, of which a NaN is the largest.
__device__ __forceinline__ uint32_t largest_bits(uint4 row) {
    const uint32_t *v = reinterpret_cast<const uint32_t *>(&row);
    uint32_t pair = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) pair = __vmaxu2(pair, v[j] & 0x7fff7fffu);
    return max(pair & 0xffffu, pair >> 16);
}

// Eight codes.
__device__ __forceinline__ uint2 encode8(uint4 row, float scale) {
    Divisor divisor(scale);
    return make_uint2(divisor.encode4(make_uint2(row.x, row.y)), divisor.encode4(make_uint2(row.z, row.w)));
}

// Two codes of a word as bf16, exactly; `bytes` selects them, each above a byte of zeros. The bits of a code, moved to
// their places in a bf16, are its value times 2^-120.
__device__ __forceinline__ uint32_t widen_codes(uint32_t codes, uint32_t bytes) {
    uint32_t high = __byte_perm(codes, 0, bytes), small = (high & 0x80008000u) | (high >> 4 & 0x07f007f0u);
    __nv_bfloat16 factor = __ushort_as_bfloat16(0x7b80); // 2^120
    __nv_bfloat162 pair = __hmul2(reinterpret_cast<__nv_bfloat162 &>(small), __nv_bfloat162(factor, factor));
    return reinterpret_cast<uint32_t &>(pair);
}

// Codes 0 and 1 of a word, and codes 2 and 3.
__device__ __forceinline__ uint2 widen4(uint32_t codes) {
    return make_uint2(widen_codes(codes, 0x1404), widen_codes(codes, 0x3424));
}
// Eight codes as a vector.
__device__ __forceinline__ uint4 widen8_codes(uint2 codes) {
    uint2 low = widen4(codes.x), high = widen4(codes.y);
    return make_uint4(low.x, low.y, high.x, high.y);
}
