// DeepSeek-V4's norms and rotary embedding, activations in bf16 or f32:
//
//   norm:      out = x * rsqrt(mean(x²) + eps) * weight         one block a row of [rows, hidden], rounded once; where it is
//              asked for also as FP8, 128 values e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448))
//   head_norm: x = x * rsqrt(mean(x²) + eps)                    one warp a head of [tokens, heads, dim], in place
//   rope:      (a, b) = (a cos - b sin, a sin + b cos)          one warp a head, neighbouring values of the last dimensions
//
// All GPUs. Bound by memory at many rows, by latency at few. Angles are multiplied in f32, their sine and cosine accurate at
// every position. Reference: src/cpu/deepseek_v4/{norm,rope}.rs.
#include "deepseek_v4.cuh"
#include "abi/deepseek_v4_norm.h"
#include "limits.h"

using namespace limits::deepseek_v4;

template <typename T>
__device__ void norm_row(const T *__restrict__ x, const bf16 *__restrict__ weight, T *__restrict__ out,
                         T *__restrict__ low, uint32_t hidden, float eps) {
    __shared__ float warps[32];
    const size_t row = size_t(blockIdx.x) * hidden;
    x += row, out += row;
    float squares = 0.f;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = to_float(x[i]);
        squares += v * v;
    }
    float scale = inverse_rms(block_sum(squares, warps), hidden, eps);
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

template <typename T> __device__ void head_norm(T *__restrict__ x, uint32_t heads, uint32_t dim, float eps) {
    bool inside;
    T *head = head_of_warp(x, heads, dim, inside);
    if (!inside) return;
    float squares = 0.f;
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) {
        float v = to_float(head[i]);
        squares += v * v;
    }
    float scale = inverse_rms(warp_sum(squares), dim, eps);
    for (uint32_t i = threadIdx.x % 32; i < dim; i += 32) put(head + i, to_float(head[i]) * scale);
}

template <typename T>
__device__ void interleaved_rope(T *__restrict__ x, const uint32_t *__restrict__ positions,
                                 const float *__restrict__ frequencies, uint32_t heads, uint32_t heads_of_token,
                                 uint32_t dim, uint32_t pairs, uint32_t inverse) {
    bool inside;
    T *head = head_of_warp(x, heads, dim, inside);
    if (!inside) return;
    float position = float(positions[(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) / heads_of_token]);
    for (uint32_t i = threadIdx.x % 32; i < pairs; i += 32) {
        float sine, cosine;
        sincosf(__fmul_rn(position, frequencies[i]), &sine, &cosine);
        if (inverse) sine = -sine;
        T *pair = head + dim - 2 * pairs + 2 * i;
        float a = to_float(pair[0]), b = to_float(pair[1]);
        put(pair, a * cosine - b * sine, a * sine + b * cosine);
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
        norm_row(x, weight, out, low, hidden, eps);                                                                    \
    }                                                                                                                  \
    /* Grid: heads of all tokens over warps of a block. */                                                             \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void head_norm_##SUFFIX(                                     \
        T *x,                          /* [heads, dim], in place */                                                    \
        uint32_t heads, uint32_t dim, float eps) {                                                                     \
        head_norm(x, heads, dim, eps);                                                                                 \
    }                                                                                                                  \
    /* The same grid. */                                                                                               \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void interleaved_rope_##SUFFIX(                              \
        T *x,                          /* [tokens, heads_of_token, dim], in place */                                   \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const float *frequencies,      /* [pairs] */                                                                   \
        uint32_t heads, uint32_t heads_of_token, uint32_t dim, uint32_t pairs, uint32_t inverse) {                     \
        interleaved_rope(x, positions, frequencies, heads, heads_of_token, dim, pairs, inverse);                       \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
