// DeepSeek-V4's compressors: `ratio` tokens become one entry, entries in bf16 or f32.
//
//   score' = score + bias[position % ratio]
//   entry[i, c] = Σ_j exp(score'[j, c]) value[j, c] / Σ_j exp(score'[j, c])
//
// over the tokens ratio i to ratio i + ratio - 1; with overlap (ratio 4, two halves of channels) also over the `ratio` tokens
// before those, which give their first half, and these their second. Then RMS norm, RoPE at position ratio i, and the
// low precision of keys: e4m3 in groups of 64 outside of the rotated part, or for the indexer the Hadamard turn and E2M1
// in groups of 32.
//
//   compress_entries: one block a token, one thread a channel; blocks of tokens that complete no entry end at once
//   compress_rings:   one block a token: adds the bias to the scores in place, and puts values and scores of the newest
//                     tokens into the rings, which compress_entries has to have read before
//
// All GPUs. Bound by latency. Every rounding is the reference's: exponentials, sines and the sum of squares are taken in f64
// and rounded once, and multiplications are not fused, because another last bit would move values by a whole step of the
// low precision. Reference: src/cpu/deepseek_v4/compress.rs, src/ops/deepseek_v4/compress.rs.
#include "deepseek_v4_batch.cuh"
#include "abi/deepseek_v4_compress.h"
#include <cfloat>

using namespace limits::deepseek_v4;
using limits::deepseek_v4_attention::kMaxDim;

// What an entry is pooled from. `width` is that of a token: dim, or 2 dim with overlap.
struct Tokens {
    const float *values, *scores;           // [tokens, width]; scores without bias
    const float *bias;                      // [ratio, width]
    const float *value_rings, *score_rings; // [slots, ring, width]; scores with bias
    uint32_t ratio, ring, width;
};

// Where a token of an entry has its values and scores; no bias: the score has it.
struct Source {
    const float *value, *score, *bias;
};

// The tokens of entry `i`, in order; returns how many. Ends with a barrier.
__device__ uint32_t find_tokens(const Tokens &tokens, const Sequence &s, uint32_t i, uint32_t dim, Source *found) {
    uint32_t own = i * tokens.ratio, half = tokens.width - dim; // 0 without overlap
    uint32_t first = half > 0 && i > 0 ? own - tokens.ratio : own, count = own + tokens.ratio - first;
    for (uint32_t j = threadIdx.x; j < count; j += blockDim.x) {
        uint32_t position = first + j, channel = position < own ? 0 : half;
        size_t at;
        bool fresh = is_fresh(s, position, tokens.ring, at);
        at = at * tokens.width + channel;
        found[j] = {(fresh ? tokens.values : tokens.value_rings) + at, (fresh ? tokens.scores : tokens.score_rings) + at,
                    fresh ? tokens.bias + position % tokens.ratio * tokens.width + channel : nullptr};
    }
    __syncthreads();
    return count;
}

__device__ __forceinline__ float score_of(const Source &token) {
    float score = token.score[threadIdx.x];
    return token.bias ? score + token.bias[threadIdx.x] : score;
}

// e^x for x <= 0, in f64 and rounded once: 2^k e^r with |r| <= ln 2 / 2, e^r by nine terms of its series.
__device__ __forceinline__ float exp_rounded(float x) {
    if (x < -200.f) x = -200.f; // 0 in f32
    double k = rint(double(x) * 1.4426950408889634), r = fma(k, -0.6931471805599453, double(x)), sum = 1. / 40320.;
    constexpr double kTerms[] = {1. / 5040., 1. / 720., 1. / 120., 1. / 24., 1. / 6., .5, 1., 1.};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fma(sum, r, kTerms[i]);
    return float(sum * __hiloint2double((int(k) + 1023) << 20, 0));
}

// The channel of this thread, weighted by the softmax of the scores.
__device__ float pooled(const Source *tokens, uint32_t count) {
    float most = -INFINITY, sum = 0.f, weighted = 0.f;
#pragma unroll 8
    for (uint32_t j = 0; j < count; ++j) most = fmaxf(most, score_of(tokens[j]));
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
        float weight = exp_rounded(score_of(tokens[j]) - most);
        sum = __fadd_rn(sum, weight);
        weighted = __fadd_rn(weighted, __fmul_rn(weight, tokens[j].value[threadIdx.x]));
    }
    return weighted / sum;
}

// 1 / sqrt(mean(x²) + eps) over the block, a channel a thread. `warps`: [32].
__device__ float inverse_rms_of_block(float x, uint32_t dim, float eps, double *warps) {
    double squares = reduce_lanes(double(x) * double(x), 32, Add());
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = reduce_lanes(threadIdx.x % 32 < blockDim.x / 32 ? warps[threadIdx.x % 32] : 0., 32, Add());
    return 1.f / sqrtf(float(squares / double(dim)) + eps);
}

// The channel, rotated with its neighbour if it is among the last 2 `pairs`.
__device__ float rotated(float x, uint32_t position, const float *__restrict__ frequencies, uint32_t dim,
                         uint32_t pairs) {
    float other = __shfl_xor_sync(kAll, x, 1);
    uint32_t first = dim - 2 * pairs;
    if (threadIdx.x < first) return x;
    double sine, cosine;
    sincos(double(__fmul_rn(float(position), frequencies[(threadIdx.x - first) / 2])), &sine, &cosine);
    float along = __fmul_rn(x, float(cosine)), across = __fmul_rn(other, float(sine));
    return threadIdx.x % 2 ? __fadd_rn(across, along) : __fsub_rn(along, across);
}

// The channel of the block's row times the Hadamard matrix, over sqrt(dim). `values`: [dim].
__device__ float turned(float x, uint32_t dim, float *values) {
    for (uint32_t half = 1; half < dim; half *= 2) {
        values[threadIdx.x] = x;
        __syncthreads();
        float other = values[threadIdx.x ^ half];
        x = threadIdx.x & half ? other - x : x + other;
        __syncthreads();
    }
    return x * (1.f / sqrtf(float(dim)));
}

// The channel in e4m3, groups of 64 channels; those from `first` on stay. `warps`: [32].
__device__ float quantized_key(float x, uint32_t first, float *warps) {
    float amax = reduce_lanes(fmaxf(fabsf(x), 1e-4f), 32, Max());
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x >= first) return x;
    return quantize<E4M3>(x, fmaxf(amax, warps[threadIdx.x / 32 ^ 1]));
}

template <typename T>
__device__ void complete_entry(const Tokens &tokens, const Batch &batch, const bf16 *__restrict__ norm,
                               const float *__restrict__ frequencies, T *__restrict__ entries, uint32_t slots,
                               uint32_t entry_pages, uint32_t dim, uint32_t pairs, uint32_t index,
                               uint32_t low_precision, float eps) {
    __shared__ Source sources[kPageTokens];
    __shared__ double squares[32];
    __shared__ float values[kMaxDim];
    uint32_t position = batch.positions[blockIdx.x], i = position / tokens.ratio;
    if (position % tokens.ratio != tokens.ratio - 1) return;
    Sequence s = sequence_of(batch, blockIdx.x, slots);
    if (s.pads()) return;
    float x = rounded<T>(pooled(sources, find_tokens(tokens, s, i, dim, sources)));
    float scale = inverse_rms_of_block(x, dim, eps, squares);
    x = rounded<T>(__fmul_rn(__fmul_rn(x, scale), to_float(norm[threadIdx.x])));
    x = rounded<T>(rotated(x, i * tokens.ratio, frequencies, dim, pairs));
    if (index) {
        x = rounded<T>(turned(x, dim, values));
        if (low_precision) x = quantize<E2M1>(x, reduce_lanes(fmaxf(fabsf(x), E2M1::kMax * FLT_MIN), 32, Max()));
    } else if (low_precision) {
        x = quantized_key(x, dim - 2 * pairs, values);
    }
    size_t at = entry_of(batch, s.row, i, kPageTokens / tokens.ratio, entry_pages);
    put(entries + at * dim + threadIdx.x, x);
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens; a thread a channel of an entry. */                                                                \
    extern "C" __global__ __launch_bounds__(kMaxDim) void compress_entries_##SUFFIX(                                   \
        const float *values,           /* [tokens, width] */                                                           \
        const float *scores,           /* [tokens, width], without bias */                                             \
        const float *bias,             /* [ratio, width] */                                                            \
        const bf16 *norm,              /* [dim] */                                                                     \
        const float *frequencies,      /* [pairs] */                                                                   \
        const float *value_rings,      /* [slot_count, ring, width] */                                                 \
        const float *score_rings,      /* [slot_count, ring, width] */                                                 \
        const uint32_t *qo_indptr,     /* [rows + 1] */                                                                \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const uint32_t *slots,         /* [rows] */                                                                    \
        const uint32_t *page_tables,   /* [rows, pages] */                                                             \
        T *entries,                    /* [entry_pages, 128 / ratio, dim] */                                           \
        uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t entry_pages, uint32_t ratio, uint32_t ring,       \
        uint32_t width, uint32_t dim, uint32_t pairs, uint32_t index, uint32_t low_precision, float eps) {             \
        start_after_predecessor();                                                                                     \
        complete_entry(Tokens{values, scores, bias, value_rings, score_rings, ratio, ring, width},                     \
                       {qo_indptr, positions, slots, page_tables, rows, pages}, norm, frequencies, entries,            \
                       slot_count, entry_pages, dim, pairs, index, low_precision, eps);                                \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)

// Grid: tokens.
extern "C" __global__ __launch_bounds__(kRowThreads) void compress_rings(
    const float *values,       // [tokens, width]
    const float *bias,         // [ratio, width]
    const uint32_t *qo_indptr, // [rows + 1]
    const uint32_t *positions, // [tokens]
    const uint32_t *slots,     // [rows]
    float *scores,             // [tokens, width], in place
    float *value_rings,        // [slot_count, ring, width]
    float *score_rings,        // [slot_count, ring, width]
    uint32_t rows, uint32_t slot_count, uint32_t ratio, uint32_t ring, uint32_t width) {
    start_after_predecessor();
    uint32_t t = blockIdx.x, position = positions[t];
    Sequence s = sequence_of({qo_indptr, positions, slots, nullptr, rows, 0}, t, slot_count);
    // An older token would have its row overwritten by a newer one of this step.
    bool kept = !s.pads() && t + ring >= s.end;
    size_t from = size_t(t) * width, to = kept ? (size_t(s.slot) * ring + position % ring) * width : 0;
    bias += size_t(position % ratio) * width;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        float score = scores[from + i] + bias[i];
        scores[from + i] = score;
        if (kept) value_rings[to + i] = values[from + i], score_rings[to + i] = score;
    }
}
