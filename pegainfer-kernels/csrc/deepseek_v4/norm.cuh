// DeepSeek-V4's RMS norms of rows (formulas: deepseek_v4/norm.cu, deepseek_v4/latents.cu), a block a row.
#pragma once
#include "deepseek_v4/rounding.cuh"
#include "limits.h"
#include <type_traits>

using namespace limits::deepseek_v4;

// Where a norm writes a row: as it is, and rounded to FP8; packed row by packed row (deepseek_v4/rounding.cuh). The
// last two may be null.
template <typename T> struct Normed {
    T *exact, *low;  // [rows, hidden]
    uint8_t *packed; // [rows, packed row of hidden]
};

// The norm of row `row`. A warp has the 128 values of an FP8 scale, a lane four neighbouring ones of these. `hidden`: a
// multiple of four.
template <typename T>
__device__ void norm_row(const T *__restrict__ x, const bf16 *__restrict__ weight, const Normed<T> &out, uint32_t row,
                         uint32_t hidden, float eps) {
    constexpr uint32_t kOwn = kGroup / 32;
    __shared__ float warps[32];
    const size_t first = size_t(row) * hidden;
    x += first;
    auto at = [](auto *values, uint32_t column) -> auto & {
        using Value = std::remove_cv_t<std::remove_pointer_t<decltype(values)>>;
        using Own = Elements<Value, kOwn>;
        return *reinterpret_cast<
            std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(values)>>, const Own, Own> *>(
            values + column);
    };
    float squares = 0.f;
    for (uint32_t column = kOwn * threadIdx.x; column < hidden; column += kOwn * blockDim.x) {
        const Elements<T, kOwn> own = at(x, column);
#pragma unroll
        for (uint32_t i = 0; i < kOwn; ++i) squares = fmaf(to_float(own[i]), to_float(own[i]), squares);
    }
    const float scale = inverse_rms(block_sum(squares, warps), hidden, eps);
    for (uint32_t group = threadIdx.x / 32; group * kGroup < hidden; group += blockDim.x / 32) {
        const uint32_t column = group * kGroup + kOwn * (threadIdx.x % 32);
        const bool inside = column < hidden;
        float v[kOwn] = {}, amax = kLeastAmax;
        if (inside) {
            const Elements<T, kOwn> own = at(x, column);
            const Elements<bf16, kOwn> factors = at(weight, column);
            Elements<T, kOwn> exact;
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                v[i] = rounded<T>(to_float(own[i]) * scale * to_float(factors[i]));
                put(&exact[i], v[i]), amax = fmaxf(amax, fabsf(v[i]));
            }
            at(out.exact + first, column) = exact;
        }
        if (!out.low) continue;
        amax = reduce_lanes(amax, 32, Max());
        Elements<T, kOwn> low;
#pragma unroll
        for (uint32_t i = 0; i < kOwn; ++i) put(&low[i], quantize<E4M3>(v[i], amax));
        if (inside) at(out.low + first, column) = low;
#if __CUDA_ARCH__ >= 890
        if (out.packed)
            pack_group(out.packed + size_t(row) * packed_bytes(hidden), hidden, group,
                       make_float4(v[0], v[1], v[2], v[3]), amax);
#endif
    }
}

// rsqrt(mean(x²) + eps) of a row. `warps`: [32] in shared memory.
template <typename T> __device__ __forceinline__ float row_scale(const T *x, uint32_t hidden, float eps, float *warps) {
    float squares = 0.f;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = to_float(x[i]);
        squares += v * v;
    }
    return inverse_rms(block_sum(squares, warps), hidden, eps);
}

// The key of row `row`: norm, RoPE, and the low precision of what is not rotated. A warp has the values of an FP8
// scale, a lane a pair: a block has a thread for each pair at least. Waits for the kernels before this one when all
// angles are computed.
template <typename T>
__device__ void norm_rope_key(const T *x, const bf16 *__restrict__ weight, uint32_t row, float position,
                              const float *__restrict__ frequencies, T *out, uint32_t dim, uint32_t pairs,
                              bool low_precision, float eps) {
    __shared__ float warps[32];
    x += size_t(row) * dim, out += size_t(row) * dim;
    const uint32_t still = dim - 2 * pairs,
                   at = 2 * threadIdx.x; // values that are not rotated; the thread's first value
    float2 turn = {};
    if (at >= still && at < dim) turn = turn_of(position, frequencies[(at - still) / 2], false);
    wait_for_predecessor();
    x = written(x);
    const float scale = row_scale(x, dim, eps, warps);
    float a = 0.f, b = 0.f;
    if (at < dim) {
        a = rounded<T>(to_float(x[at]) * scale * to_float(weight[at]));
        b = rounded<T>(to_float(x[at + 1]) * scale * to_float(weight[at + 1]));
    }
    const float amax = reduce_lanes(at < still ? fmaxf(fmaxf(fabsf(a), fabsf(b)), kLeastAmax) : kLeastAmax, 32, Max());
    if (at >= dim) return;
    if (at >= still) turn_by(a, b, turn);
    else if (low_precision) a = quantize<E4M3>(a, amax), b = quantize<E4M3>(b, amax);
    put(out + at, a, b);
}
