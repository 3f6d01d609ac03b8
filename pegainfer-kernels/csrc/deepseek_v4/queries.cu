// The queries of DeepSeek-V4's attention and of its indexer behind their GEMM, in place, activations in bf16 or f32,
// and what its compressors remember of a step's tokens, one launch for all:
//
//   queries: rope(x * rsqrt(mean(x²) + eps)), each step rounded                                     one warp a head
//   indexer: rope, then the Hadamard matrix / sqrt(dim), then groups of 32 to E2M1 times            one warp a head
//            2^ceil(log2(max(amax, 6 * 2^-126) / 6)); a lane has neighbouring elements: butterflies within lanes, then
//            by shuffles
//   rings:   values and scores of the newest tokens, after deepseek_v4/latents.cu has pooled them   one block a token
//
// All GPUs. Bound by latency at few tokens: 7 us with sines in line (H200), not yet measured without. Reference:
// src/cpu/deepseek_v4/{norm,rope,kv_quant,batch}.rs, src/ops/deepseek_v4/queries.rs.
#include "deepseek_v4/compress.cuh"
#include "deepseek_v4/norm.cuh"
#include "abi/deepseek_v4_queries.h"

// Norm and RoPE of a head of up to kMaxDim elements: a lane has each 32nd pair. Waits for the kernels before this one
// when it has computed an angle.
template <typename T>
__device__ __forceinline__ void norm_rope_head(T *head, float position, const float *frequencies, uint32_t dim,
                                               uint32_t pairs, float eps) {
    constexpr uint32_t kOwn = kMaxDim / 64;
    const uint32_t lane = threadIdx.x % 32, still = dim / 2 - pairs; // pairs that are not rotated
    using Pair = Elements<T, 2>;
    Pair x[kOwn];
    float squares = 0.f;
    // The lane's last pair: of the official shapes no other one is rotated.
    const uint32_t last = lane < dim / 2 ? lane + (dim / 2 - 1 - lane) / 32 * 32 : lane;
    float2 turn = {};
    if (last >= still && last < dim / 2) turn = turn_of(position, frequencies[last - still], false);
    wait_for_predecessor();
#pragma unroll
    for (uint32_t j = 0; j < kOwn; ++j) {
        const uint32_t i = lane + 32 * j;
        if (i < dim / 2) x[j] = reinterpret_cast<const Pair *>(head)[i];
    }
#pragma unroll
    for (uint32_t j = 0; j < kOwn; ++j) {
        if (lane + 32 * j >= dim / 2) break;
        const float a = to_float(x[j][0]), b = to_float(x[j][1]);
        squares = fmaf(a, a, fmaf(b, b, squares));
    }
    const float scale = inverse_rms(warp_sum(squares), dim, eps);
#pragma unroll
    for (uint32_t j = 0; j < kOwn; ++j) {
        const uint32_t i = lane + 32 * j;
        if (i >= dim / 2) break;
        float a = rounded<T>(to_float(x[j][0]) * scale), b = rounded<T>(to_float(x[j][1]) * scale);
        if (i >= still) turn_by(a, b, i == last ? turn : turn_of(position, frequencies[i - still], false));
        put(head + 2 * i, a, b);
    }
}

// Sine and cosine of an angle, each rounded once. Out of line as sine_and_cosine.
__device__ __noinline__ float2 exact_sine_and_cosine(float angle) {
    double sine, cosine;
    sincos(double(angle), &sine, &cosine);
    return make_float2(float(sine), float(cosine));
}

// Neighbouring values, turned by an angle of this sine and cosine with the reference's roundings: another last bit
// could become a whole step of E2M1.
__device__ __forceinline__ void turn_exactly(float &a, float &b, float2 turn) {
    const float first = a, s = turn.x, c = turn.y;
    a = __fsub_rn(__fmul_rn(first, c), __fmul_rn(b, s)), b = __fadd_rn(__fmul_rn(first, s), __fmul_rn(b, c));
}

// A head of the indexer, of 32 N elements: a lane has N neighbouring ones. `turns`: [pairs], of exact_sine_and_cosine.
// Waits for the kernels before this one.
template <typename T, uint32_t N>
__device__ __forceinline__ void turn_head(T *head, const float2 *turns, uint32_t pairs, bool low_precision) {
    const uint32_t lane = threadIdx.x % 32, still = 32 * N - 2 * pairs; // elements that are not rotated
    wait_for_predecessor();
    auto &at = reinterpret_cast<Elements<T, N> *>(head)[lane];
    Elements<T, N> x = at;
    float v[N], amax = E2M1::kMax * FLT_MIN;
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) v[i] = to_float(x[i]);
#pragma unroll
    for (uint32_t i = 0; i < N; i += 2) {
        const uint32_t column = N * lane + i;
        if (column < still) continue;
        turn_exactly(v[i], v[i + 1], turns[(column - still) / 2]);
        v[i] = rounded<T>(v[i]), v[i + 1] = rounded<T>(v[i + 1]);
    }
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
        const float sign = lane & step ? -1.f : 1.f; // of a pair: the lower one gets the sum
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

// Calls turn_head for a head of `dim` elements, a power of two from 32 N to kMaxIndexDim.
template <typename T, uint32_t N = 2>
__device__ __forceinline__ void turn_head_of(uint32_t dim, T *head, const float2 *turns, uint32_t pairs,
                                             bool low_precision) {
    if constexpr (32 * N < kMaxIndexDim)
        if (dim != 32 * N) return turn_head_of<T, 2 * N>(dim, head, turns, pairs, low_precision);
    turn_head<T, N>(head, turns, pairs, low_precision);
}

constexpr uint32_t kHeadsOfBlock = kHeadThreads / 32;

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens; heads over warps of a block, heads of the indexer over warps, rings of attention's compressor, */ \
    /* those of the indexer's. The operands of what is not there are null. */                                          \
    extern "C" __global__ __launch_bounds__(kHeadThreads, 8) void attention_queries_##SUFFIX(                          \
        T *q,                      /* [tokens, heads, dim], in place */                                                \
        T *index_q,                /* [tokens, index_heads, index_dim], in place */                                    \
        const float *frequencies,  /* [pairs] */                                                                       \
        const uint32_t *qo_indptr, /* [rows + 1] */                                                                    \
        const uint32_t *positions, /* [tokens] */                                                                      \
        const uint32_t *slots,     /* [rows] */                                                                        \
        const float *values,       /* [tokens, width] */                                                               \
        const float *scores,       /* [tokens, width], without bias */                                                 \
        const float *bias,         /* [ratio, width] */                                                                \
        float *value_rings,        /* [slot_count, ring, width] */                                                     \
        float *score_rings,        /* [slot_count, ring, width], with bias */                                          \
        const float *index_values, /* the same of the indexer */                                                       \
        const float *index_scores, const float *index_bias, float *index_value_rings, float *index_score_rings,        \
        uint32_t heads, uint32_t dim, uint32_t index_heads, uint32_t index_dim, uint32_t pairs, uint32_t rows,         \
        uint32_t slot_count, uint32_t ratio, uint32_t ring, uint32_t width, uint32_t index_ratio, uint32_t index_ring, \
        uint32_t index_width, uint32_t low_precision, float eps) {                                                     \
        release_successor();                                                                                           \
        const uint32_t t = blockIdx.x, warp = threadIdx.x / 32;                                                        \
        uint32_t part = blockIdx.y;                                                                                    \
        const uint32_t parts = (heads + kHeadsOfBlock - 1) / kHeadsOfBlock;                                            \
        const uint32_t index_parts = (index_heads + kHeadsOfBlock - 1) / kHeadsOfBlock;                                \
        if (part < parts) {                                                                                            \
            const uint32_t head = part * kHeadsOfBlock + warp;                                                         \
            if (head < heads)                                                                                          \
                norm_rope_head(q + (size_t(t) * heads + head) * dim, float(positions[t]), frequencies, dim, pairs,     \
                               eps);                                                                                   \
            return;                                                                                                    \
        }                                                                                                              \
        part -= parts;                                                                                                 \
        if (part < index_parts) {                                                                                      \
            /* The same for all heads: each in f64 takes 100 instructions. */                                          \
            __shared__ float2 turns[kMaxIndexDim / 2];                                                                 \
            for (uint32_t i = threadIdx.x; i < pairs; i += kHeadThreads)                                               \
                turns[i] = exact_sine_and_cosine(__fmul_rn(float(positions[t]), frequencies[i]));                      \
            __syncthreads();                                                                                           \
            const uint32_t head = part * kHeadsOfBlock + warp;                                                         \
            if (head < index_heads)                                                                                    \
                turn_head_of(index_dim, index_q + (size_t(t) * index_heads + head) * index_dim, turns, pairs,          \
                             low_precision != 0);                                                                      \
            return;                                                                                                    \
        }                                                                                                              \
        const CompressorRings rings =                                                                                  \
            part == index_parts                                                                                        \
                ? CompressorRings{values, scores, bias, value_rings, score_rings, ratio, ring, width}                  \
                : CompressorRings{index_values,      index_scores, index_bias, index_value_rings,                      \
                                  index_score_rings, index_ratio,  index_ring, index_width};                           \
        keep_token(rings, RaggedBatch{qo_indptr, positions, slots, nullptr, rows, 0}, t, slot_count);                  \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
