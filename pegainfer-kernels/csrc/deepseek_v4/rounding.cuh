// What the kernels of DeepSeek-V4's ops share. Activations are bf16 or f32, as their template parameter says: a
// kernel reads them to f32, computes in f32 and rounds once when it stores.
//
// These kernels are the plain first version: one block or warp a row, and no overlap with their neighbours.
#pragma once
#include "common/fp8_codes.cuh"
#include "common/norm_rope.cuh"
#include <cuda_fp16.h>

// x rounded to the dtype of activations.
template <typename T> __device__ __forceinline__ float rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ float rounded<bf16>(float x) { return round_bf16(x); }

// Stores a result whose type the launcher knows.
__device__ __forceinline__ void put_as(void *out, size_t to, float value, uint32_t to_f32) {
    if (to_f32) static_cast<float *>(out)[to] = value;
    else put(static_cast<bf16 *>(out) + to, value);
}

// The largest magnitude of four values.
__device__ __forceinline__ float largest4(float a, float b, float c, float d) {
    return fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
}

// A float as an integer of the same order, the total order of IEEE 754: -0 is below 0.
__device__ __forceinline__ uint32_t ordered(float x) {
    uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// N neighbouring elements, in vectors of up to 16 bytes.
template <typename T, uint32_t N> struct Elements {
    static constexpr uint32_t kEach = N * sizeof(T) < 16 ? N : 16 / sizeof(T); // of a vector
    struct alignas(kEach * sizeof(T)) Part {
        T x[kEach];
    };
    Part parts[N / kEach];

    __device__ __forceinline__ T &operator[](uint32_t i) { return parts[i / kEach].x[i % kEach]; }
    __device__ __forceinline__ const T &operator[](uint32_t i) const { return parts[i / kEach].x[i % kEach]; }
};

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

// Sine and cosine of an angle. Out of line: at few tokens each kernel runs its code once, and what it takes is how fast
// instructions come.
__device__ __noinline__ float2 sine_and_cosine(float angle) {
    float2 both;
    sincosf(angle, &both.x, &both.y);
    return both;
}

// Neighbouring values of a head, turned by an angle of this sine and cosine. All kernels round alike: the compiler does
// not choose what it fuses.
__device__ __forceinline__ void turn_by(float &a, float &b, float2 turn) {
    const float sine = turn.x, cosine = turn.y, first = a;
    a = __fmaf_rn(first, cosine, -__fmul_rn(b, sine)), b = __fmaf_rn(first, sine, __fmul_rn(b, cosine));
}

// Sine and cosine of position * frequency, or those that turn back.
__device__ __forceinline__ float2 turn_of(float position, float frequency, bool inverse) {
    const float2 both = sine_and_cosine(__fmul_rn(position, frequency));
    return make_float2(inverse ? -both.x : both.x, both.y);
}

constexpr uint32_t kGroup = 128;    // activations of a row that share an FP8 scale
constexpr float kLeastAmax = 1e-4f; // from which on the scale of values in FP8 follows their largest magnitude

// x rounded to the format times a power of two, the smallest with which the group's largest magnitude `amax` fits.
template <typename F> __device__ __forceinline__ float quantize(float x, float amax) {
    float scale = ceil_power_of_two(amax / F::kMax);
    return round_to<F>(x * power_of_two(-exponent(scale))) * scale;
}

// Bytes of a packed row: the e4m3 codes of `k` rounded activations, then an f32 scale for each 128 of them, a power of
// two, padded to a multiple of 16 bytes. The codes of each 128 columns have the order in which deepseek_v4/skinny.cuh
// multiplies them: column 32 q + 8 s + 4 h + i is at 32 s + 16 h + 4 q + i, where q, s and i are below 4 and h is below
// 2.
__host__ __device__ constexpr uint32_t packed_bytes(uint32_t k) { return (k + k / kGroup * 4 + 15) / 16 * 16; }

#if __CUDA_ARCH__ >= 890
// Two values rounded to e4m3, saturating: as round_to<E4M3>.
__device__ __forceinline__ float2 round_e4m3(float a, float b) {
    uint16_t codes;
    uint32_t halves;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    return __half22float2(reinterpret_cast<const __half2 &>(halves));
}

// The place of the codes of columns 4 lane to 4 lane + 3 among those of their 128 columns.
__device__ __forceinline__ uint32_t packed_place(uint32_t lane) {
    return 32 * (lane % 8 / 2) + 16 * (lane % 2) + 4 * (lane / 8);
}

// Writes columns 128 group to 128 group + 127 of a row of `k` columns to its packed row. A warp calls it: a lane has
// columns 4 lane to 4 lane + 3 of these in `v`. `amax`: the largest magnitude of all 128, at least kLeastAmax.
__device__ __forceinline__ void pack_group(uint8_t *row, uint32_t k, uint32_t group, float4 v, float amax) {
    const uint32_t lane = threadIdx.x % 32;
    const float scale = ceil_power_of_two(amax / E4M3::kMax), inverse = 1.f / scale; // exact
    *reinterpret_cast<uint32_t *>(row + group * kGroup + packed_place(lane)) =
        encode4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
    if (lane == 0) reinterpret_cast<float *>(row + k)[group] = scale;
}

// The same of values that are the sum of two e4m3 values, which is as exact as bf16: to the two packed rows from `rows`
// on, of which the second has what the first one loses.
__device__ __forceinline__ void pack_split_group(uint8_t *rows, uint32_t k, uint32_t group, float4 v) {
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
        const float own = largest4(v.x, v.y, v.z, v.w);
        const float amax = fmaxf(reduce_lanes(own, 32, Max()), kLeastAmax);
        pack_group(rows + part * packed_bytes(k), k, group, v, amax);
        v = make_float4(v.x - quantize<E4M3>(v.x, amax), v.y - quantize<E4M3>(v.y, amax),
                        v.z - quantize<E4M3>(v.z, amax), v.w - quantize<E4M3>(v.w, amax));
    }
}

// Writes the eight columns of this lane, from `column` on, to the packed row. `amax`: as above.
__device__ __forceinline__ void pack_eight(uint8_t *row, uint32_t k, uint32_t column, const float (&v)[8], float amax) {
    const float scale = ceil_power_of_two(amax / E4M3::kMax), inverse = 1.f / scale; // exact
    uint8_t *group = row + column / kGroup * kGroup;
#pragma unroll
    for (uint32_t i = 0; i < 8; i += 4)
        *reinterpret_cast<uint32_t *>(group + packed_place((column + i) % kGroup / 4)) =
            encode4(v[i] * inverse, v[i + 1] * inverse, v[i + 2] * inverse, v[i + 3] * inverse);
    if (column % kGroup == 0) reinterpret_cast<float *>(row + k)[column / kGroup] = scale;
}
#endif
