// The low precision of DeepSeek-V4's activations, simulated in place: values are rounded to FP8 and stored as numbers.
//
//   round_activation: groups of 128 to e4m3 times 2^ceil(log2(max(amax, 1e-4) / 448)); one warp a group
//
// All GPUs. Bound by memory. Bit for bit as the reference, src/cpu/deepseek_v4/{kv_quant,formats}.rs.
#include "deepseek_v4/rounding.cuh"
#include "abi/deepseek_v4_quant.h"
#include "limits.h"

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

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: groups over warps of a block. */                                                                          \
    extern "C" __global__ __launch_bounds__(kHeadThreads) void round_activation_##SUFFIX(                              \
        T *x, /* [groups, 128], in place */                                                                            \
        uint32_t groups) {                                                                                             \
        start_after_predecessor();                                                                                     \
        round_groups(x, groups);                                                                                       \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
