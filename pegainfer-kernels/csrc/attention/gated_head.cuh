// Heads of attention with output gates (Qwen3.5): RMS norm with f32 weights and one rounding, and rotary embedding of
// the leading `rotary` elements.
//
//   x = (x w cos ± x' w' sin) / rms(x), rounded once to bf16; x' is the element that x rotates with, rotary / 2 away
// The columns of the projection are, for each head, its query and its gate; then keys; then values. Lane l has vector l
// of a head, 8 elements, and gets the ones that they rotate with from another lane. Reference: src/cpu/gated_qkv.rs.
#pragma once
#include "common/norm_rope.cuh"
#include "common/vec8.cuh"

// The lane that has what the elements of `lane` rotate with, among `rotary`; itself, if they don't.
__device__ __forceinline__ uint32_t rotates_with(uint32_t lane, uint32_t rotary) {
    uint32_t far = rotary / 16;
    return lane < far ? lane + far : lane < 2 * far ? lane - far : lane;
}

// By what a lane's elements, and those that they rotate with, enter the result: the norm's weights, times cosines, and
// sines with their sign.
struct Factors {
    Vec8 own, other;
};

// Angles of a token with one position.
struct Angles {
    const float *row; // of the table: cosines, then sines, of `rotary` elements, a multiple of 32
    __device__ __forceinline__ Vec8 load(uint32_t, uint32_t at) const { return load8(row + at); }
};

// Angles of a token with three, time, row and column, which the frequencies take one after the other (M-RoPE).
struct GridAngles {
    const float *rows[3];
    __device__ __forceinline__ Vec8 load(uint32_t frequency, uint32_t at) const {
        Vec8 out;
#pragma unroll
        for (int j = 0; j < 8; ++j) out.x[j] = rows[(frequency + j) % 3][at + j];
        return out;
    }
};

template <typename A>
__device__ __forceinline__ Factors load_factors(const float *weight, const A &angles, uint32_t lane, uint32_t rotary) {
    uint32_t d = 8 * lane, half = rotary / 2, frequency = d % half;
    Factors out = {load8(weight + d), {}};
    if (d >= rotary) return out;
    Vec8 other = load8(weight + 8 * rotates_with(lane, rotary));
    Vec8 cosine = angles.load(frequency, frequency), sine = angles.load(frequency, half + frequency);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        out.own.x[j] *= cosine.x[j];
        out.other.x[j] = other.x[j] * (d < half ? -sine.x[j] : sine.x[j]);
    }
    return out;
}

// Of registers, so that neither side goes to memory.
__device__ __forceinline__ Factors select(bool first, const Factors &a, const Factors &b) {
    Factors out;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        out.own.x[j] = first ? a.own.x[j] : b.own.x[j];
        out.other.x[j] = first ? a.other.x[j] : b.other.x[j];
    }
    return out;
}

// Normalises and rotates a head of which `lanes` neighbours, a power of two, have a vector each; those behind its end
// have zeros. All lanes of the warp take part.
__device__ __forceinline__ uint4 norm_rope(uint4 vector, const Factors &by, uint32_t other, uint32_t lanes,
                                           uint32_t head_dim, float eps) {
    float squares = reduce_lanes(sum_squares(vector), lanes, Add());
    float scale = inverse_rms(squares, head_dim, eps);
    uint4 far = make_uint4(__shfl_sync(kAll, vector.x, other, lanes), __shfl_sync(kAll, vector.y, other, lanes),
                           __shfl_sync(kAll, vector.z, other, lanes), __shfl_sync(kAll, vector.w, other, lanes));
    Vec8 x = widen8(vector), y = widen8(far);
#pragma unroll
    for (int j = 0; j < 8; ++j) x.x[j] = (x.x[j] * by.own.x[j] + y.x[j] * by.other.x[j]) * scale;
    return narrow8(x);
}

// x * sigmoid(gate), rounded once, of two elements each.
__device__ __forceinline__ uint32_t gated(uint32_t x, uint32_t gate) {
    float2 a = widen(x), g = widen(gate);
    return narrow(times_sigmoid(a.x, g.x), times_sigmoid(a.y, g.y));
}
