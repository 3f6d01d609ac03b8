// The low precision of DeepSeek-V4's activations and of its indexer's keys, simulated in place: values are rounded to FP8 or FP4
// and stored as numbers.
//
//   round_activation: groups of 128 to e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448)); one warp a group
//   quantize_index:   heads of [heads, dim] times the Hadamard matrix / sqrt(dim), then groups of 32 to E2M1 times
//                     2^ceil(log2(max(amax, 6 * 2^-126) / 6)); one warp a head, a lane neighbouring elements: butterflies
//                     within lanes, then by shuffles
//
// All GPUs. Bound by memory. Bit for bit as the reference, src/cpu/deepseek_v4/{kv_quant,formats}.rs.
#include "deepseek_v4.cuh"
#include "abi/deepseek_v4_quant.h"
#include "limits.h"
#include <cfloat>

using namespace limits::deepseek_v4;

template <typename T> __device__ void round_groups(T *__restrict__ x, uint32_t groups) {
    uint32_t group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (group >= groups) return;
    x += size_t(group) * kGroup + threadIdx.x % 32;
    float v[kGroup / 32], amax = kLeastAmax;
#pragma unroll
    for (uint32_t i = 0; i < kGroup / 32; ++i) v[i] = to_float(x[32 * i]), amax = fmaxf(amax, fabsf(v[i]));
    amax = reduce_lanes(amax, 32, Max());
#pragma unroll
    for (uint32_t i = 0; i < kGroup / 32; ++i) put(x + 32 * i, quantize<E4M3>(v[i], amax));
}

// N neighbouring elements, in vectors of up to 16 bytes.
template <typename T, uint32_t N> struct Elements {
    static constexpr uint32_t kEach = N * sizeof(T) < 16 ? N : 16 / sizeof(T); // of a vector
    struct alignas(kEach * sizeof(T)) Part { T x[kEach]; };
    Part parts[N / kEach];

    __device__ __forceinline__ T &operator[](uint32_t i) { return parts[i / kEach].x[i % kEach]; }
};

// The head of this warp, of 32 N elements: a lane has N.
template <typename T, uint32_t N> __device__ __forceinline__ void turn_head(T *head, bool low_precision) {
    const uint32_t lane = threadIdx.x % 32;
    auto &at = reinterpret_cast<Elements<T, N> *>(head)[lane];
    Elements<T, N> x = at;
    float v[N], amax = E2M1::kMax * FLT_MIN;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) v[i] = to_float(x[i]);
#pragma unroll
    for (uint32_t half = 1; half < N; half *= 2)
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) {
            if (i & half) continue;
            const float a = v[i], b = v[i + half];
            v[i] = a + b, v[i + half] = a - b;
        }
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) {
        const float sign = lane & step ? -1.f : 1.f; // the lower one of a pair gets the sum, the upper one the difference
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(kAll, v[i], step));
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        v[i] = rounded<T>(v[i] * (1.f / sqrtf(32.f * N)));
        amax = fmaxf(amax, fabsf(v[i]));
    }
    if (low_precision) {
        amax = reduce_lanes(amax, 32 / N, Max()); // of 32 elements
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) v[i] = quantize<E2M1>(v[i], amax);
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) put(&x[i], v[i]);
    at = x;
}

// Calls turn_head for heads of `dim` elements, a power of two from 32 N to kMaxIndexDim.
template <typename T, uint32_t N = 1>
__device__ __forceinline__ void turn_heads(T *x, uint32_t heads, uint32_t dim, bool low_precision) {
    if constexpr (32 * N < kMaxIndexDim)
        if (dim != 32 * N) return turn_heads<T, 2 * N>(x, heads, dim, low_precision);
    const uint32_t head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head < heads) turn_head<T, N>(x + size_t(head) * dim, low_precision);
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: groups over warps of a block. */                                                                          \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void round_activation_##SUFFIX(                              \
        T *x,                          /* [groups, 128], in place */                                                   \
        uint32_t groups) {                                                                                             \
        start_after_predecessor();                                                                                     \
        round_groups(x, groups);                                                                                       \
    }                                                                                                                  \
    /* Grid: heads over warps of a block. */                                                                           \
    extern "C" __global__ __launch_bounds__(kHeadThreads, 12) void quantize_index_##SUFFIX(                            \
        T *x,                          /* [heads, dim], in place */                                                    \
        uint32_t heads, uint32_t dim, uint32_t low_precision) {                                                        \
        start_after_predecessor();                                                                                     \
        turn_heads(x, heads, dim, low_precision);                                                                      \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
