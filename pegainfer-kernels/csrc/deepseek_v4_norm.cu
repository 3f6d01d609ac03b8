// DeepSeek-V4's norms and rotary embedding, activations in bf16 or f32:
//
//   norm:         out = x * rsqrt(mean(x²) + eps) * weight      one block a row of [rows, hidden], rounded once; where it is
//                 asked for also as FP8, 128 values e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448))
//   rope:         (a, b) = (a cos - b sin, a sin + b cos)       one warp a head, neighbouring values of the last dimensions
//   norm_rope_q:  rope(x * rsqrt(mean(x²) + eps))               one warp a head of [tokens, heads, dim], in place
//   norm_rope_kv: rope(norm(x)); values that are not rotated in FP8 where it is asked for, 64 with a scale; one block a key
//
// The steps of the last two round as kernels of their own would.
// All GPUs. Bound by memory at many rows, by latency at few. Angles are multiplied in f32, their sine and cosine accurate at
// every position. Reference: src/cpu/deepseek_v4/{norm,rope}.rs.
#include "deepseek_v4.cuh"
#include "abi/deepseek_v4_norm.h"
#include "limits.h"

using namespace limits::deepseek_v4;

// rsqrt(mean(x²) + eps) of the block's row. `warps`: [32] in shared memory.
template <typename T>
__device__ __forceinline__ float row_scale(const T *__restrict__ x, uint32_t hidden, float eps, float *warps) {
    float squares = 0.f;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = to_float(x[i]);
        squares += v * v;
    }
    return inverse_rms(block_sum(squares, warps), hidden, eps);
}

template <typename T>
__device__ void norm_row(const T *__restrict__ x, const bf16 *__restrict__ weight, T *__restrict__ out,
                         T *__restrict__ low, uint32_t hidden, float eps) {
    __shared__ float warps[32];
    const size_t row = size_t(blockIdx.x) * hidden;
    x += row, out += row;
    const float scale = row_scale(x, hidden, eps, warps);
    // A warp has the values of an FP8 scale.
    for (uint32_t first = threadIdx.x / 32 * kGroup; first < hidden; first += blockDim.x / 32 * kGroup) {
        float v[kGroup / 32], amax = kLeastAmax;
#pragma unroll
        for (uint32_t i = 0; i < kGroup / 32; ++i) {
            uint32_t at = first + 32 * i + threadIdx.x % 32;
            v[i] = at < hidden ? rounded<T>(to_float(x[at]) * scale * to_float(weight[at])) : 0.f;
            if (at < hidden) put(out + at, v[i]);
            amax = fmaxf(amax, fabsf(v[i]));
        }
        if (!low) continue;
        amax = reduce_lanes(amax, 32, Max());
#pragma unroll
        for (uint32_t i = 0; i < kGroup / 32; ++i) {
            uint32_t at = first + 32 * i + threadIdx.x % 32;
            if (at < hidden) put(low + row + at, quantize<E4M3>(v[i], amax));
        }
    }
}

// The head of this warp; `dim` is its width.
template <typename T> __device__ __forceinline__ T *head_of_warp(T *x, uint32_t heads, uint32_t dim, bool &inside) {
    uint32_t head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    inside = head < heads;
    return x + size_t(head) * dim;
}

__device__ __forceinline__ float position_of_warp(const uint32_t *positions, uint32_t heads_of_token) {
    return float(positions[(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) / heads_of_token]);
}

template <typename T>
__device__ void norm_rope_head(T *__restrict__ x, const uint32_t *__restrict__ positions,
                               const float *__restrict__ frequencies, uint32_t heads, uint32_t heads_of_token,
                               uint32_t dim, uint32_t pairs, float eps) {
    bool inside;
    T *head = head_of_warp(x, heads, dim, inside);
    if (!inside) return;
    float squares = 0.f;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) {
        float v = to_float(head[i]);
        squares += v * v;
    }
    const float scale = inverse_rms(warp_sum(squares), dim, eps), position = position_of_warp(positions, heads_of_token);
    const uint32_t still = dim / 2 - pairs; // pairs that are not rotated
    for (uint32_t i = threadIdx.x % 32; i < dim / 2; i += 32) {
        float a = rounded<T>(to_float(head[2 * i]) * scale), b = rounded<T>(to_float(head[2 * i + 1]) * scale);
        if (i >= still) turn_pair(a, b, position, frequencies[i - still], false);
        put(head + 2 * i, a, b);
    }
}

// A warp has the values of an FP8 scale, a lane a pair.
template <typename T>
__device__ void norm_rope_key(const T *__restrict__ x, const bf16 *__restrict__ weight,
                              const uint32_t *__restrict__ positions, const float *__restrict__ frequencies,
                              T *__restrict__ out, uint32_t dim, uint32_t pairs, uint32_t low_precision, float eps) {
    __shared__ float warps[32];
    x += size_t(blockIdx.x) * dim, out += size_t(blockIdx.x) * dim;
    const float scale = row_scale(x, dim, eps, warps), position = float(positions[blockIdx.x]);
    const uint32_t still = dim - 2 * pairs; // values that are not rotated
    for (uint32_t first = threadIdx.x / 32 * kKeyGroup; first < dim; first += blockDim.x / 32 * kKeyGroup) {
        uint32_t at = first + 2 * (threadIdx.x % 32);
        float a = 0.f, b = 0.f;
        if (at < dim) {
            a = rounded<T>(to_float(x[at]) * scale * to_float(weight[at]));
            b = rounded<T>(to_float(x[at + 1]) * scale * to_float(weight[at + 1]));
        }
        float amax = reduce_lanes(at < still ? fmaxf(fmaxf(fabsf(a), fabsf(b)), kLeastAmax) : kLeastAmax, 32, Max());
        if (at >= dim) continue;
        if (at >= still) turn_pair(a, b, position, frequencies[(at - still) / 2], false);
        else if (low_precision) a = quantize<E4M3>(a, amax), b = quantize<E4M3>(b, amax);
        put(out + at, a, b);
    }
}

template <typename T>
__device__ void interleaved_rope(T *__restrict__ x, const uint32_t *__restrict__ positions,
                                 const float *__restrict__ frequencies, uint32_t heads, uint32_t heads_of_token,
                                 uint32_t dim, uint32_t pairs, uint32_t inverse) {
    bool inside;
    T *head = head_of_warp(x, heads, dim, inside);
    if (!inside) return;
    const float position = position_of_warp(positions, heads_of_token);
    for (uint32_t i = threadIdx.x % 32; i < pairs; i += 32) {
        T *pair = head + dim - 2 * pairs + 2 * i;
        float a = to_float(pair[0]), b = to_float(pair[1]);
        turn_pair(a, b, position, frequencies[i], inverse);
        put(pair, a, b);
    }
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: rows. */                                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads) void dsv4_norm_##SUFFIX(                                      \
        const T *x,                    /* [rows, hidden] */                                                            \
        const bf16 *weight,            /* [hidden] */                                                                  \
        T *out,                        /* [rows, hidden] */                                                            \
        T *low,                        /* [rows, hidden], `out` rounded to FP8; null: none */                          \
        uint32_t hidden, float eps) {                                                                                  \
        start_after_predecessor();                                                                                     \
        norm_row(x, weight, out, low, hidden, eps);                                                                    \
    }                                                                                                                  \
    /* Grid: heads of all tokens over warps of a block. */                                                             \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void norm_rope_q_##SUFFIX(                                   \
        T *x,                          /* [tokens, heads_of_token, dim], in place */                                   \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const float *frequencies,      /* [pairs] */                                                                   \
        uint32_t heads, uint32_t heads_of_token, uint32_t dim, uint32_t pairs, float eps) {                            \
        start_after_predecessor();                                                                                     \
        norm_rope_head(x, positions, frequencies, heads, heads_of_token, dim, pairs, eps);                             \
    }                                                                                                                  \
    /* Grid: keys. */                                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads) void norm_rope_kv_##SUFFIX(                                   \
        const T *x,                    /* [tokens, dim] */                                                             \
        const bf16 *weight,            /* [dim] */                                                                     \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const float *frequencies,      /* [pairs] */                                                                   \
        T *out,                        /* [tokens, dim] */                                                             \
        uint32_t dim, uint32_t pairs, uint32_t low_precision, float eps) {                                             \
        start_after_predecessor();                                                                                     \
        norm_rope_key(x, weight, positions, frequencies, out, dim, pairs, low_precision, eps);                         \
    }                                                                                                                  \
    /* Grid: heads of all tokens over warps of a block. */                                                             \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void interleaved_rope_##SUFFIX(                              \
        T *x,                          /* [tokens, heads_of_token, dim], in place */                                   \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const float *frequencies,      /* [pairs] */                                                                   \
        uint32_t heads, uint32_t heads_of_token, uint32_t dim, uint32_t pairs, uint32_t inverse) {                     \
        start_after_predecessor();                                                                                     \
        interleaved_rope(x, positions, frequencies, heads, heads_of_token, dim, pairs, inverse);                       \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
