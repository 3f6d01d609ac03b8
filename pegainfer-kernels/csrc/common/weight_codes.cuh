// Weights as operands of the tensor cores: bf16, FP8 or FP4 in memory, bf16 in registers.
//
// A code becomes the bf16 number with the same exponent and mantissa bits, which a multiplication by a power of two
// moves to its value: both steps are exact, as long as the value is a bf16 number.
#pragma once
#include "common/frag.cuh"

enum class Format { kBf16, kFp8, kFp4, kInt4 };

// Two pairs, multiplied; subnormal operands count.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
    return out;
}

// A pair of 2^(field - 127), 0 < field < 255.
__device__ __forceinline__ uint32_t pair_of_powers(uint32_t field) { return field * 0x00800080u; }

// What makes numbers of codes times an E8M0 scale: 2^(BIAS + scale - 127), in one or two factors that are bf16 numbers.
template <uint32_t BIAS> struct Factor {
    uint32_t first, second;
    bool two;
    __device__ __forceinline__ explicit Factor(uint32_t scale) {
        uint32_t field = min(BIAS + scale, 254u);
        first = pair_of_powers(field), second = pair_of_powers(BIAS + scale - field + 127), two = BIAS + scale > 254;
    }
    __device__ __forceinline__ uint32_t operator()(uint32_t pair) const {
        pair = multiply_pairs(pair, first);
        return two ? multiply_pairs(pair, second) : pair;
    }
};

// How 16 bytes of a weight's row become `kVectors` vectors of 8 bf16 in the order of the columns.
template <Format F> struct Codes;

template <> struct Codes<Format::kBf16> {
    static constexpr uint32_t kVectors = 1, kValues = 8;
    static __device__ __forceinline__ void widen(const uint4 &codes, uint32_t, uint4 (&out)[kVectors]) {
        out[0] = codes;
    }
};

// e4m3: sign, 4 bits of exponent with a bias of 7, 3 of mantissa.
template <> struct Codes<Format::kFp8> {
    static constexpr uint32_t kVectors = 2, kValues = 16;
    // The two bytes of `codes` that `bytes` selects, each above a byte of zeros.
    static __device__ __forceinline__ uint32_t pair(uint32_t codes, uint32_t bytes) {
        uint32_t high = __byte_perm(codes, 0, bytes);
        return (high & 0x80008000u) | (high >> 4 & 0x07f007f0u);
    }
    static __device__ __forceinline__ void widen(const uint4 &codes, uint32_t scale, uint4 (&out)[kVectors]) {
        Factor<127 - 7> factor(scale);
        out[0] = make_uint4(factor(pair(codes.x, 0x1404)), factor(pair(codes.x, 0x3424)), factor(pair(codes.y, 0x1404)),
                            factor(pair(codes.y, 0x3424)));
        out[1] = make_uint4(factor(pair(codes.z, 0x1404)), factor(pair(codes.z, 0x3424)), factor(pair(codes.w, 0x1404)),
                            factor(pair(codes.w, 0x3424)));
    }
};

// E2M1: sign, 2 bits of exponent with a bias of 1, 1 of mantissa; the even column in the low nibble.
template <> struct Codes<Format::kFp4> {
    static constexpr uint32_t kVectors = 4, kValues = 32;
    // The two codes of byte I: each at the top of its half.
    template <uint32_t I> static __device__ __forceinline__ uint32_t pair(uint32_t codes) {
        uint32_t high = __byte_perm(codes << 4, codes, (4 + I) << 12 | I << 4);
        return (high & 0x80008000u) | (high >> 6 & 0x01c001c0u);
    }
    static __device__ __forceinline__ void widen(const uint4 &codes, uint32_t scale, uint4 (&out)[kVectors]) {
        Factor<127 - 1> factor(scale);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            out[i] = make_uint4(factor(pair<0>(words[i])), factor(pair<1>(words[i])), factor(pair<2>(words[i])),
                                factor(pair<3>(words[i])));
    }
};
