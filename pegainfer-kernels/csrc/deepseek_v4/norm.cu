// DeepSeek-V4's norm of rows and rotary embedding, activations in bf16 or f32:
//
//   norm:         out = x * rsqrt(mean(x²) + eps) * weight      one block a row of [rows, hidden], rounded once; where
//                 it is asked for also as FP8, 128 values e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448))
//   rope:         (a, b) = (a cos - b sin, a sin + b cos)       one block a token, neighbouring values of the last
//                 dimensions of each head
//
// All GPUs. Bound by memory at many rows, by latency at few. Angles are multiplied in f32, their sine and cosine
// accurate at every position. Reference: src/cpu/deepseek_v4/{norm,rope}.rs.
#include "deepseek_v4/norm.cuh"
#include "abi/deepseek_v4_norm.h"

// The heads of token blockIdx.x, in place. Sines are computed once for all of them; a lane has a pair, and pairs of
// kBatch heads at once.
template <typename T>
__device__ void interleaved_rope(T *__restrict__ x, float position, const float *__restrict__ frequencies,
                                 uint32_t heads, uint32_t dim, uint32_t pairs, bool inverse) {
    using Pair = Elements<T, 2>;
    constexpr uint32_t kBatch = 4;
    __shared__ float2 turns[kMaxPairs];
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) turns[i] = turn_of(position, frequencies[i], inverse);
    __syncthreads();
    const uint32_t warps = blockDim.x / 32;
    for (uint32_t first = threadIdx.x / 32; first < heads; first += kBatch * warps)
        for (uint32_t i = threadIdx.x % 32; i < pairs; i += 32) {
            auto pair_of = [&](uint32_t j) {
                return reinterpret_cast<Pair *>(
                           x + (size_t(blockIdx.x) * heads + first + j * warps) * dim + dim - 2 * pairs) +
                       i;
            };
            Pair own[kBatch];
#pragma unroll
            for (uint32_t j = 0; j < kBatch; ++j)
                if (first + j * warps < heads) own[j] = *pair_of(j);
#pragma unroll
            for (uint32_t j = 0; j < kBatch; ++j) {
                if (first + j * warps >= heads) break;
                float a = to_float(own[j][0]), b = to_float(own[j][1]);
                turn_by(a, b, turns[i]);
                put(&own[j][0], a), put(&own[j][1], b);
                *pair_of(j) = own[j];
            }
        }
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: rows. */                                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads) void dsv4_norm_##SUFFIX(                                      \
        const T *x,         /* [rows, hidden] */                                                                       \
        const bf16 *weight, /* [hidden] */                                                                             \
        T *out,             /* [rows, hidden] */                                                                       \
        T *low,             /* [rows, hidden], `out` rounded to FP8; null: none */                                     \
        uint8_t *packed,    /* [rows, packed row of hidden] (deepseek_v4/rounding.cuh), of `low`; null: none */        \
        uint32_t hidden, float eps) {                                                                                  \
        start_after_predecessor();                                                                                     \
        norm_row(x, weight, Normed<T>{out, low, packed}, blockIdx.x, hidden, eps);                                     \
    }                                                                                                                  \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRopeThreads) void interleaved_rope_##SUFFIX(                              \
        T *x,                      /* [tokens, heads, dim], in place */                                                \
        const uint32_t *positions, /* [tokens] */                                                                      \
        const float *frequencies,  /* [pairs] */                                                                       \
        uint32_t heads, uint32_t dim, uint32_t pairs, uint32_t inverse) {                                              \
        start_after_predecessor();                                                                                     \
        interleaved_rope(x, float(positions[blockIdx.x]), frequencies, heads, dim, pairs, inverse != 0);               \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
