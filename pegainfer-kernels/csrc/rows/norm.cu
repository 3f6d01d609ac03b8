// RMS norm of rows, alone and fused with the residual add before it: one block a row, which stays in registers.
//
// The result is bf16, or rounded to FP8 (csrc/common/activation.cuh).
//   residual += x (or the sum of split-K partials);  out = bf16(bf16(residual * rsqrt(mean(residual²) + eps)) * weight)
// With weights in f32 the result is rounded once: csrc/common/norm_rope.cuh. All GPUs, rows up to 16,384 wide, bf16.
// Bound by memory at many rows, by latency at few. Reference: src/cpu/norm.rs.
#include "common/activation.cuh"
#include "common/norm_rope.cuh"
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
    uint4 r = load16(residual + at);
    uint32_t *v = reinterpret_cast<uint32_t *>(&row), *rv = reinterpret_cast<uint32_t *>(&r);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]), b = widen(rv[j]);
        v[j] = narrow(a.x + b.x, a.y + b.y);
    }
    return row;
}

// Eight weights. With those in bf16 the normalised value is rounded before the multiplication, with those in f32 it is
// not.
template <typename W> struct Weights;
template <> struct Weights<bf16> {
    uint4 w;
    __device__ void load(const bf16 *from) { w = load16(from); }
    __device__ uint4 times(uint4 row, float scale) const { return scaled(row, scale, w); }
};
template <> struct Weights<float> {
    float4 low, high;
    __device__ void load(const float *from) {
        low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
    }
    __device__ uint4 times(uint4 row, float scale) const {
        float2 a = widen(row.x), b = widen(row.y), c = widen(row.z), d = widen(row.w);
        return make_uint4(
            narrow(a.x * scale * low.x, a.y * scale * low.y), narrow(b.x * scale * low.z, b.y * scale * low.w),
            narrow(c.x * scale * high.x, c.y * scale * high.y), narrow(d.x * scale * high.z, d.y * scale * high.w));
    }
};

template <Source S, typename W>
__device__ void norm(const void *__restrict__ x,   // [rows, hidden] bf16, or [count, rows, hidden] f32
                     bf16 *__restrict__ residual,  // [rows, hidden], unless S is kNone
                     const W *__restrict__ weight, // [hidden]
                     const ActivationOut &out,     // [rows, hidden]
                     uint32_t hidden, float eps, uint32_t count) {
    __shared__ float warps[32];
    size_t first = size_t(blockIdx.x) * hidden;
    uint4 row[kVectors];
    Weights<W> scales[kVectors];
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
