// The recurrent gated delta rule on some rows of a head's matrix, which stay in registers (ops::gated_delta_rule).
//
//   S' = decay S + beta (v - decay S k) kᵀ;  out = S' q, with q and k divided by their lengths, q also by sqrt(128)
//   decay = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b)
// Eight neighbouring lanes share R rows of 128 columns. Lane l of them has columns 4 l ... 4 l + 3 of each quarter of a
// row, so that every access to memory is of 16 bytes and eight lanes touch whole lines. Reference:
// src/cpu/gated_delta/recurrent.rs.
#pragma once
#include "common/math.cuh"
#include "delta_rule/segments.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::delta;

constexpr uint32_t kLanes = 8;                      // of a row
constexpr float kL2Eps = 1e-6f;                     // of the normalisation of queries and keys
constexpr float kQueryScale = 0.08838834764831845f; // kDim^-1/2

// Place of value head `head` in the layer's output: the heads of a group are `heads / group` apart, see
// DeltaShape::output_head.
__device__ __forceinline__ uint32_t output_head(uint32_t head, uint32_t heads, uint32_t group) {
    return head % group * (heads / group) + head / group;
}

// The columns of a lane.
struct Columns {
    float4 quarter[4];
};

__device__ __forceinline__ float dot(const float4 &a, const float4 &b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
}

__device__ __forceinline__ float dot(const Columns &a, const Columns &b) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum = dot(a.quarter[i], b.quarter[i], sum);
    return sum;
}

// The sum over the lanes of a row; each gets it.
__device__ __forceinline__ float row_sum(float x) { return reduce_lanes(x, kLanes, Add()); }

// Of a token and a head.
struct Gates {
    float decay, beta;
    Gates() = default;
    // a_log and dt_bias are the head's, b and a the token's.
    __device__ __forceinline__ Gates(float b, float a, float a_log, float dt_bias) {
        decay = expf(log_decay(a, a_log, dt_bias));
        beta = sigmoid(b);
    }
};

template <int R> struct Rows {
    Columns row[R];

    // `at`: the columns of this lane in its first row; nullptr for zeros.
    __device__ __forceinline__ void load(const float *at) {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
                row[r].quarter[i] = at ? *reinterpret_cast<const float4 *>(at + r * kDim + 32 * i) : zero;
            }
    }

    __device__ __forceinline__ void store(float *at) const {
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) *reinterpret_cast<float4 *>(at + r * kDim + 32 * i) = row[r].quarter[i];
    }

    // One token: decay, correct by the difference between the value and what the key reads, read by the query. `q` and
    // `k` are not normalised yet. With S' = decay S + delta k^T, S' q = decay S q + delta k·q: all sums are over what
    // is there before, so they are added up together.
    __device__ __forceinline__ void step(const Columns &q, const Columns &k, const float (&v)[R], Gates gates,
                                         float (&out)[R]) {
        float read[R], old[R];
#pragma unroll
        for (int r = 0; r < R; ++r) read[r] = row_sum(dot(row[r], k)), old[r] = row_sum(dot(row[r], q));
        float k_scale = rsqrtf(row_sum(dot(k, k)) + kL2Eps), kq = row_sum(dot(k, q)) * k_scale;
        float q_scale = rsqrtf(row_sum(dot(q, q)) + kL2Eps) * kQueryScale;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float delta = gates.beta * (v[r] - gates.decay * k_scale * read[r]);
            out[r] = q_scale * (gates.decay * old[r] + delta * kq);
            delta *= k_scale;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 &s = row[r].quarter[i];
                const float4 &c = k.quarter[i];
                s.x = fmaf(c.x, delta, gates.decay * s.x), s.y = fmaf(c.y, delta, gates.decay * s.y);
                s.z = fmaf(c.z, delta, gates.decay * s.z), s.w = fmaf(c.w, delta, gates.decay * s.w);
            }
        }
    }
};

// Element `i` of an array in registers.
template <int R> __device__ __forceinline__ float pick(const float (&x)[R], uint32_t i) {
    float value = x[0];
#pragma unroll
    for (int r = 1; r < R; ++r) value = i == r ? x[r] : value;
    return value;
}
