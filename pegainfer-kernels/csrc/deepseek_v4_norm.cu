// DeepSeek-V4's norm of rows and rotary embedding, activations in bf16 or f32:
//
//   norm:         out = x * rsqrt(mean(x²) + eps) * weight      one block a row of [rows, hidden], rounded once; where it is
//                 asked for also as FP8, 128 values e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448))
//   rope:         (a, b) = (a cos - b sin, a sin + b cos)       one warp a head, neighbouring values of the last dimensions
//
// All GPUs. Bound by memory at many rows, by latency at few. Angles are multiplied in f32, their sine and cosine accurate at
// every position. Reference: src/cpu/deepseek_v4/{norm,rope}.rs.
#include "deepseek_v4_norm.cuh"
#include "abi/deepseek_v4_norm.h"

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
        uint8_t *packed,               /* [rows, packed row of hidden] (deepseek_v4.cuh), of `low`; null: none */      \
        uint32_t hidden, float eps) {                                                                                  \
        start_after_predecessor();                                                                                     \
        norm_row(x, weight, Normed<T>{out, low, packed}, blockIdx.x, hidden, eps);                                     \
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
