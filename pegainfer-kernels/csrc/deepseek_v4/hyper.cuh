// The boundary between two blocks of DeepSeek-V4 (manifold-constrained hyper-connections, mHC), activations in bf16:
// the arithmetic of csrc/deepseek_v4/hyper.cu.
//
//   merge:  stream'[k] = post[k] f + Σ_j comb[j][k] stream[j], with the block's output f in bf16 or as the ranks' f32
//           sum, which is rounded to bf16 first
//   mix:    m = (function · x) * rsqrt(mean(x²) + eps) of all streams x of a token, 24 values;
//           pre[j] = sigmoid(m[j] scale[0] + base[j]) + eps, post[j] = 2 sigmoid(m[4+j] scale[1] + base[4+j]),
//           comb = m[8..24] scale[2] + base[8..24] made doubly stochastic (Sinkhorn); y = bf16(Σ_j pre[j] stream[j])
//   norm:   out = bf16(y * rsqrt(mean(y²) + eps) * weight), and where it is asked for `low`: 128 values of out e4m3
//           times 2^ceil(log2(max(amax, 1e-4) / 448))
//
// The GEMM is exact in its factors on tensor cores: streams are bf16, and an f32 of the function is the sum of three
// bf16 (8 bits each; Ozaki's splitting), so mma.sync multiplies without rounding and sums in f32. Sums run over mma, 16
// columns of all streams; four such, 64 columns (a split); four splits, 256 columns; and these in ascending order.
// Reference: src/cpu/deepseek_v4/{hyper,norm,kv_quant}.rs.
#pragma once
#include "common/async.cuh"
#include "deepseek_v4/rounding.cuh"
#include "limits.h"

using namespace limits::deepseek_v4_hyper;

constexpr uint32_t kStreams = 4;                                // of a token
constexpr uint32_t kMixes = 2 * kStreams + kStreams * kStreams; // mixing values of a token
constexpr uint32_t kSlice = 16;                                 // columns of an mma
constexpr uint32_t kPitch = kStride + 8;                        // no bank conflicts between rows of a tile
constexpr uint32_t kTiles = kMixes / 8;                         // of operand B
static_assert(kColumns == 4 * kSlice && kNormWarpColumns == 4 * kColumns, "the order of sums");

// Four neighbouring f32 as three summands in bf16: two pairs each.
struct Summands {
    uint2 part[3];
    __device__ __forceinline__ explicit Summands(float4 rest) {
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            part[i] = make_uint2(narrow(rest.x, rest.y), narrow(rest.z, rest.w));
            float2 a = widen(part[i].x), b = widen(part[i].y);
            rest.x -= a.x, rest.y -= a.y, rest.z -= b.x, rest.w -= b.y;
        }
    }
    Summands() = default;
    __device__ __forceinline__ uint32_t digest() const {
        return part[0].x ^ part[0].y ^ part[1].x ^ part[1].y ^ part[2].x ^ part[2].y;
    }
};

// Loads of weights that stay before the wait for the predecessor (PDL): ptxas moves loads through the read-only path
// behind it.
__device__ __forceinline__ float4 early4(const float *at) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ float early(const float *at) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}
constexpr uint32_t kUnlikelyDigest = 0x9e3779b9; // any constant: what follows from it computes nothing
// Ends the part of a kernel before its wait once `digest` is known: without the branch, which does nothing, ptxas
// computes what the digest is made of behind the wait.
__device__ __forceinline__ void settle(uint32_t digest) {
    if (digest == kUnlikelyDigest) asm volatile("nanosleep.u32 0;");
}

// How a block's output goes back to the streams of a token.
struct Mixing {
    float4 post, comb[kStreams]; // weight of the output in each new stream; of old stream j in each new one

    __device__ __forceinline__ Mixing(const float *post_at, const float *comb_at) {
        post = *reinterpret_cast<const float4 *>(post_at);
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) comb[j] = reinterpret_cast<const float4 *>(comb_at)[j];
    }
};

// Four columns of a token: its block's output, and its streams before and after the merge.
struct Columns {
    uint2 output, stream[kStreams];

    // Replaces the streams by the merged ones, and returns the sum of their squares.
    __device__ __forceinline__ float merge(const Mixing &mixing) {
        const float2 left = widen(output.x), right = widen(output.y);
        const float f[4] = {left.x, left.y, right.x, right.y};
        float value[kStreams][4], squares = 0.f;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) {
            float2 a = widen(stream[j].x), b = widen(stream[j].y);
            value[j][0] = a.x, value[j][1] = a.y, value[j][2] = b.x, value[j][3] = b.y;
        }
#pragma unroll
        for (uint32_t k = 0; k < kStreams; ++k) {
            float merged[4];
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                float mixed = 0.f;
#pragma unroll
                for (uint32_t j = 0; j < kStreams; ++j)
                    mixed = fmaf(reinterpret_cast<const float *>(&mixing.comb[j])[k], value[j][i], mixed);
                merged[i] = fmaf(reinterpret_cast<const float *>(&mixing.post)[k], f[i], mixed);
            }
            stream[k] = make_uint2(narrow(merged[0], merged[1]), narrow(merged[2], merged[3]));
            float2 a = widen(stream[k].x), b = widen(stream[k].y);
            squares = fmaf(a.x, a.x, fmaf(a.y, a.y, fmaf(b.x, b.x, fmaf(b.y, b.y, squares))));
        }
        return squares;
    }

    __device__ __forceinline__ void store(bf16 *streams, uint32_t hidden) const {
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) *reinterpret_cast<uint2 *>(streams + j * hidden) = stream[j];
    }
};

// The 24 mixing sums of 16 tokens over 16 columns of all streams: `high` of the first summand of the function, `low` of
// the others.
struct MixSums {
    Accumulator high[kTiles] = {}, low[kTiles] = {};

    __device__ __forceinline__ void add(const uint4 &a, const Summands (&function)[kTiles]) {
#pragma unroll
        for (uint32_t n = 0; n < kTiles; ++n) {
            const uint2(&b)[3] = function[n].part;
            mma(high[n], a, b[0].x, b[0].y);
            mma(low[n], a, b[2].x, b[2].y);
            mma(low[n], a, b[1].x, b[1].y);
        }
    }

    // Writes the sums of token lane / 4 + 8 half, and behind them its sum of squares (`squares`: over this lane's
    // columns), to `row`.
    __device__ __forceinline__ void store(float *row, uint32_t half, float squares) const {
#pragma unroll
        for (uint32_t n = 0; n < kTiles; ++n) {
            const int i = 2 * half;
            *reinterpret_cast<float2 *>(row + 8 * n + threadIdx.x % 4 * 2) =
                make_float2(high[n][i] + low[n][i], high[n][i + 1] + low[n][i + 1]);
        }
        squares = reduce_quad(squares, Add());
        if (threadIdx.x % 4 == 0) *reinterpret_cast<float4 *>(row + kMixes) = make_float4(squares, 0.f, 0.f, 0.f);
    }
};

// 1 / x to a unit in the last place, for normal x.
__device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Σ_j c[j] / d[j] + add, with two reciprocals: c0 / d0 + c1 / d1 = (c0 d1 + c1 d0) / (d0 d1).
struct Divisors {
    float d[kStreams], low, high; // low: 1 / (d0 d1); high: 1 / (d2 d3)

    __device__ __forceinline__ void update() { low = reciprocal(d[0] * d[1]), high = reciprocal(d[2] * d[3]); }
    __device__ __forceinline__ float sum(float c0, float c1, float c2, float c3, float add) const {
        return fmaf(fmaf(c0, d[1], c1 * d[0]), low, fmaf(fmaf(c2, d[3], c3 * d[2]), high, add));
    }
    __device__ __forceinline__ float inverse(uint32_t i) const { return d[i ^ 1] * (i < 2 ? low : high); }
};

// `c[j][k]`, a softmax over k, made doubly stochastic by each thread: columns and rows are divided by their sums in
// turn, columns `iters` times and last. With the divisors of all iterations in `row` and `column`, c[j][k] / (row[j]
// column[k]), a half step is row'[j] = Σ_k c[j][k] / column[k] + eps row[j]: it has the latency of one reciprocal and
// four FMAs.
__device__ __forceinline__ void sinkhorn(float (&c)[kStreams][kStreams], uint32_t iters, float eps) {
    Divisors row = {{1.f, 1.f, 1.f, 1.f}, 1.f, 1.f}, column = row;
    for (uint32_t i = 0; i < iters; ++i) {
        if (i > 0) {
#pragma unroll
            for (uint32_t j = 0; j < kStreams; ++j)
                row.d[j] = column.sum(c[j][0], c[j][1], c[j][2], c[j][3], eps * row.d[j]);
            row.update();
        }
#pragma unroll
        for (uint32_t k = 0; k < kStreams; ++k)
            column.d[k] = row.sum(c[0][k], c[1][k], c[2][k], c[3][k], eps * column.d[k]);
        column.update();
    }
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j)
#pragma unroll
        for (uint32_t k = 0; k < kStreams; ++k) c[j][k] *= row.inverse(j) * column.inverse(k);
}

// Writes `post` of a token, and returns what Sinkhorn's iteration begins with. One warp calls it; lane i has mixing
// value i in `m`, lane 8 + 4 j + k gets c[j][k].
__device__ __forceinline__ float begin_mixing(float m, float *post, float eps) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane / kStreams == 1) post[lane % kStreams] = 2.f * exact_sigmoid(m);
    m = expf(m - reduce_quad(m, Max())); // a row of the mixing is a quad
    return m / reduce_quad(m, Add()) + eps;
}

// Writes `post` and `comb` of a token. One warp calls it; lane i has mixing value i in `m`.
__device__ __forceinline__ void output_mixing(float m, float *post, float *comb, uint32_t iters, float eps) {
    const uint32_t lane = threadIdx.x % 32;
    m = begin_mixing(m, post, eps);
    float c[kStreams][kStreams];
#pragma unroll
    for (uint32_t i = 0; i < kStreams * kStreams; ++i)
        c[i / kStreams][i % kStreams] = __shfl_sync(kAll, m, 2 * kStreams + i);
    sinkhorn(c, iters, eps);
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j)
        if (lane == j) reinterpret_cast<float4 *>(comb)[j] = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
}

// The sum of the squares of four values.
__device__ __forceinline__ float square4(const float *v) {
    return fmaf(v[3], v[3], fmaf(v[2], v[2], fmaf(v[1], v[1], v[0] * v[0])));
}
// The sum over a warp, neighbouring lanes first.
__device__ __forceinline__ float near_sum(float x) {
#pragma unroll
    for (uint32_t step = 1; step < 32; step *= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
}

// The mixing value of a sum over `width` columns, whose squares add up to `squares`.
__device__ __forceinline__ float mixing_value(float sum, float squares, uint32_t width, float eps, float scale,
                                              float base) {
    return sum * inverse_rms(squares, width, eps) * scale + base;
}
