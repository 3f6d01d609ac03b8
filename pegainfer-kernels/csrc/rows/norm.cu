// RMS norm of rows, alone and fused with the residual add before it: one block a row, which stays in registers.
//
// The result is bf16, or rounded to FP8 (csrc/common/activation.cuh).
//   residual += x (or the sum of split-K partials);  out = bf16(bf16(residual * rsqrt(mean(residual²) + eps)) * weight)
// With weights in f32 the result is rounded once: csrc/common/norm_rope.cuh. All GPUs, rows up to 16,384 wide, bf16.
// Bound by memory at many rows, by latency at few. Reference: src/cpu/norm.rs.
#include "common/activation.cuh"
#include "common/row_norm.cuh"
#include "abi/rows_norm.h"
#include "limits.h"

using namespace limits::norm;

// What is added to the residual stream: nothing, one matrix, or the split-K partials of a GEMM.
enum Source { kNone, kMatrix, kPartials };

// Eight elements of the residual stream plus those of `count` split-K partials, `stride` apart. The GEMM's sum is
// rounded once, then the residual.
__device__ __forceinline__ uint4 add_partials(uint4 residual, const float *partials, uint32_t count, size_t stride) {
    float sum[8] = {};
#pragma unroll 4
    for (uint32_t s = 0; s < count; ++s) {
        float4 a = reinterpret_cast<const float4 *>(partials + s * stride)[0];
        float4 b = reinterpret_cast<const float4 *>(partials + s * stride)[1];
        sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
        sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    }
    uint32_t *v = reinterpret_cast<uint32_t *>(&residual);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 r = widen(v[j]), d = widen(narrow(sum[2 * j], sum[2 * j + 1]));
        v[j] = narrow(r.x + d.x, r.y + d.y);
    }
    return residual;
}

template <Source S>
__device__ __forceinline__ uint4 load_row(const void *x, const bf16 *residual, size_t at, uint32_t count,
                                          size_t stride) {
    if (S == kPartials) return add_partials(load16(residual + at), static_cast<const float *>(x) + at, count, stride);
    uint4 row = load16(static_cast<const bf16 *>(x) + at);
    if (S == kNone) return row;
    return add8(row, load16(residual + at));
}

template <Source S, typename W>
__device__ void norm(const void *__restrict__ x,   // [rows, hidden] bf16, or [count, rows, hidden] f32
                     bf16 *__restrict__ residual,  // [rows, hidden], unless S is kNone
                     const W *__restrict__ weight, // [hidden]
                     const ActivationOut &out,     // [rows, hidden]
                     uint32_t hidden, float eps, uint32_t count) {
    __shared__ float warps[32];
    size_t first = size_t(blockIdx.x) * hidden;
    uint4 row[kVectors];
    NormWeights<W> scales[kVectors];
    float squares = 0.f;
    release_successor();
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * blockDim.x);
        if (i < hidden) scales[p].load(weight + i);
    }
    wait_for_predecessor();
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * blockDim.x);
        if (i >= hidden) break;
        row[p] = load_row<S>(x, residual, first + i, count, size_t(gridDim.x) * hidden);
        squares += sum_squares(row[p]);
        if (S != kNone) *reinterpret_cast<uint4 *>(residual + first + i) = row[p];
    }
    float scale = inverse_rms(block_sum(squares, warps), hidden, eps);
#pragma unroll
    for (int p = 0; p < kVectors; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * blockDim.x);
        bool inside = i < hidden;
        out.store8(blockIdx.x, i, inside ? scales[p].times(row[p], scale) : make_uint4(0, 0, 0, 0), inside);
    }
}

// Grid: rows. SUFFIX _f32: weights in f32.
#define NORMS(SUFFIX, W)                                                                                               \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void rms_norm##SUFFIX(                                        \
        const bf16 *x,   /* [rows, hidden] */                                                                          \
        const W *weight, /* [hidden] */                                                                                \
        void *out,       /* [rows, hidden], csrc/common/activation.cuh */                                              \
        uint32_t padded, uint32_t hidden, float eps) {                                                                 \
        norm<kNone>(x, nullptr, weight, {out, padded, hidden}, hidden, eps, 0);                                        \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void add_rms_norm##SUFFIX(                                    \
        const bf16 *x,   /* [rows, hidden] */                                                                          \
        bf16 *residual,  /* [rows, hidden], in place */                                                                \
        const W *weight, /* [hidden] */                                                                                \
        void *out,       /* [rows, hidden], csrc/common/activation.cuh */                                              \
        uint32_t padded, uint32_t hidden, float eps) {                                                                 \
        norm<kMatrix>(x, residual, weight, {out, padded, hidden}, hidden, eps, 0);                                     \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void add_slices_rms_norm##SUFFIX(                             \
        const float *partials, /* [count, rows, hidden] */                                                             \
        bf16 *residual,        /* [rows, hidden], in place */                                                          \
        const W *weight,       /* [hidden] */                                                                          \
        void *out,             /* [rows, hidden], csrc/common/activation.cuh */                                        \
        uint32_t padded, uint32_t hidden, float eps, uint32_t count) {                                                 \
        norm<kPartials>(partials, residual, weight, {out, padded, hidden}, hidden, eps, count);                        \
    }
NORMS(, bf16)
NORMS(_f32, float)
