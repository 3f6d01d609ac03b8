// DeepSeek-V4's compressors: `ratio` tokens become one entry, entries in bf16 or f32.
//
//   score' = score + bias[position % ratio]
//   entry[i, c] = Σ_j exp(score'[j, c]) value[j, c] / Σ_j exp(score'[j, c])
//
// over the tokens ratio i to ratio i + ratio - 1; with overlap (ratio 4, two halves of channels) also over the `ratio`
// tokens before those, which give their first half, and these their second. Then RMS norm, RoPE at position ratio i,
// and the low precision of keys: e4m3 in groups of 64 outside of the rotated part, or for the indexer the Hadamard turn
// and E2M1 in groups of 32.
//
// A block has a token, a thread a channel of the entry that the token completes; entries of 128 tokens are pooled by
// several blocks. Every rounding is the reference's: exponentials, sines and the sum of squares are taken in f64 and
// rounded once, sums over tokens have the tokens' order, and multiplications are not fused, because another last bit
// would move values by a whole step of the low precision. Reference: src/cpu/deepseek_v4/compress.rs,
// src/ops/deepseek_v4/compress.rs.
#pragma once
#include "deepseek_v4/batch.cuh"
#include <cfloat>

using namespace limits::deepseek_v4;
using limits::deepseek_v4_attention::kMaxDim;
using limits::deepseek_v4_attention::kPoolBlocks;

constexpr uint32_t kSlice = kMaxDim / kPoolBlocks; // channels of a block that pools an entry of many tokens
static_assert(kSlice == 32, "a lane has a channel of the slice");

// What an entry is pooled from. `width` is that of a token: dim, or 2 dim with overlap.
struct Tokens {
    const float *values, *scores;           // [tokens, width]; scores without bias
    const float *bias;                      // [ratio, width]
    const float *value_rings, *score_rings; // [slots, ring, width]; scores with bias
    uint32_t ratio, ring, width;
};

// A bias of zeros.
__device__ const float kNoBias[kMaxDim] = {};

// Where a token of an entry has its values, its scores, and the bias of these: of zeros where the score has it.
struct Source {
    const float *value, *score, *bias;
};

// A barrier of the threads that have a channel.
__device__ __forceinline__ void sync_channels(uint32_t dim) { asm volatile("bar.sync 1, %0;" ::"r"(dim) : "memory"); }

// Writes the tokens of entry `i`, in order, and returns how many there are. `threads` threads call it.
__device__ uint32_t find_tokens(const Tokens &tokens, const Sequence &s, uint32_t i, uint32_t dim, uint32_t threads,
                                Source *found) {
    uint32_t own = i * tokens.ratio, half = tokens.width - dim; // 0 without overlap
    uint32_t first = half > 0 && i > 0 ? own - tokens.ratio : own, count = own + tokens.ratio - first;
    for (uint32_t j = threadIdx.x; j < count; j += threads) {
        uint32_t position = first + j, channel = position < own ? 0 : half;
        size_t at;
        bool fresh = is_fresh(s, position, tokens.ring, at);
        at = at * tokens.width + channel;
        found[j] = {(fresh ? tokens.values : tokens.value_rings) + at,
                    (fresh ? tokens.scores : tokens.score_rings) + at,
                    fresh ? tokens.bias + position % tokens.ratio * tokens.width + channel : kNoBias};
    }
    return count;
}

__device__ __forceinline__ float score_of(const Source &token, uint32_t channel) {
    return token.score[channel] + token.bias[channel];
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
    for (uint32_t j = 0; j < count; ++j) most = fmaxf(most, score_of(tokens[j], threadIdx.x));
#pragma unroll 4
    for (uint32_t j = 0; j < count; ++j) {
        float weight = exp_rounded(score_of(tokens[j], threadIdx.x) - most);
        sum = __fadd_rn(sum, weight);
        weighted = __fadd_rn(weighted, __fmul_rn(weight, tokens[j].value[threadIdx.x]));
    }
    return weighted / sum;
}

// What pools a slice of the channels of an entry: a warp has the weights of every 16th of its tokens.
struct Slice {
    float weights[kPageTokens][kSlice], weighted[kPageTokens][kSlice], largest[kPoolBlocks][kSlice];

    // Writes the channels from `first` on to `out`, the same bits as `pooled`. kMaxDim threads call it; ends with a
    // barrier.
    __device__ void pool(const Source *tokens, uint32_t count, uint32_t first, float *out) {
        constexpr uint32_t kWarps = kMaxDim / 32, kEach = kPageTokens / kWarps;
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = first + lane;
        float scores[kEach], values[kEach], most = -INFINITY;
#pragma unroll
        for (uint32_t k = 0; k < kEach; ++k) {
            const uint32_t j = warp + kWarps * k;
            scores[k] = j < count ? score_of(tokens[j], channel) : -INFINITY;
            values[k] = j < count ? tokens[j].value[channel] : 0.f;
            most = fmaxf(most, scores[k]);
        }
        largest[warp][lane] = most;
        __syncthreads();
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w][lane]);
#pragma unroll
        for (uint32_t k = 0; k < kEach; ++k) {
            const float weight = exp_rounded(scores[k] - most);
            weights[warp + kWarps * k][lane] = weight;
            weighted[warp + kWarps * k][lane] = __fmul_rn(weight, values[k]);
        }
        __syncthreads();
        float sum = 0.f; // of weights in warp 0, of weighted values in warp 1
        const float (*terms)[kSlice] = warp == 0 ? weights : weighted;
#pragma unroll 16
        for (uint32_t j = 0; warp < 2 && j < count; ++j) sum = __fadd_rn(sum, terms[j][lane]);
        if (warp == 1) largest[0][lane] = sum;
        __syncthreads();
        if (warp == 0) out[channel] = largest[0][lane] / sum;
        __syncthreads();
    }
};
static_assert(kMaxDim / 32 == kPoolBlocks, "a row of `largest` a warp");

// 1 / sqrt(mean(x²) + eps) over the channels, one a thread. `warps`: [32].
__device__ float inverse_rms_of_entry(float x, uint32_t dim, float eps, double *warps) {
    double squares = reduce_lanes(double(x) * double(x), 32, Add());
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = squares;
    sync_channels(dim);
    squares = reduce_lanes(threadIdx.x % 32 < dim / 32 ? warps[threadIdx.x % 32] : 0., 32, Add());
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
        sync_channels(dim);
        float other = values[threadIdx.x ^ half];
        x = threadIdx.x & half ? other - x : x + other;
        sync_channels(dim);
    }
    return x * (1.f / sqrtf(float(dim)));
}

// The channel in e4m3, groups of 64 channels; those from `first` on stay. `warps`: [32].
__device__ float quantized_key(float x, uint32_t first, uint32_t dim, float *warps) {
    float amax = reduce_lanes(fmaxf(fabsf(x), 1e-4f), 32, Max());
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
    sync_channels(dim);
    if (threadIdx.x >= first) return x;
    return quantize<E4M3>(x, fmaxf(amax, warps[threadIdx.x / 32 ^ 1]));
}

// A compressor: its tokens, small weights, and entries. Null values: there is none.
template <typename T> struct Compressor {
    Tokens tokens;
    const bf16 *norm; // [dim]
    T *entries;       // [entry_pages, 128 / ratio, dim]
    uint32_t entry_pages, dim;
    bool index; // the indexer's
};

// What an op needs of a step for its compressors.
struct CompressorStep {
    RaggedBatch batch;
    const float *frequencies;
    uint32_t slots, pairs;
    bool low_precision;
    float eps;
};

// Normalises, rotates, rounds and stores entry `i` of a sequence. `v`: the thread's channel as it was pooled; the first
// `dim` threads call it.
template <typename T>
__device__ __forceinline__ void finish_entry(const Compressor<T> &x, const CompressorStep &step, const Sequence &s,
                                             uint32_t i, float v) {
    __shared__ double squares[32];
    __shared__ float values[kMaxDim];
    const uint32_t dim = x.dim, ratio = x.tokens.ratio;
    v = rounded<T>(v);
    const float scale = inverse_rms_of_entry(v, dim, step.eps, squares);
    v = rounded<T>(__fmul_rn(__fmul_rn(v, scale), to_float(x.norm[threadIdx.x])));
    v = rounded<T>(rotated(v, i * ratio, step.frequencies, dim, step.pairs));
    if (x.index) {
        v = rounded<T>(turned(v, dim, values));
        if (step.low_precision) v = quantize<E2M1>(v, reduce_lanes(fmaxf(fabsf(v), E2M1::kMax * FLT_MIN), 32, Max()));
    } else if (step.low_precision) {
        v = quantized_key(v, dim - 2 * step.pairs, dim, values);
    }
    const size_t at = entry_of(step.batch, s.row, i, kPageTokens / ratio, x.entry_pages);
    put(x.entries + at * dim + threadIdx.x, v);
}

// The tokens of this step, as the kernels before this one wrote them.
__device__ __forceinline__ Tokens written(Tokens tokens) {
    tokens.values = written(tokens.values), tokens.scores = written(tokens.scores);
    return tokens;
}

// Computes the entry that token `t` completes, if it does. All threads of the block call it, at least `dim`; those
// behind end. Waits for the kernels before this one, unless there is nothing to compute.
template <typename T>
__device__ __forceinline__ void complete_entry(const Compressor<T> &x, const CompressorStep &step, uint32_t t) {
    __shared__ Source sources[kPageTokens];
    const uint32_t dim = x.dim, ratio = x.tokens.ratio, position = step.batch.positions[t], i = position / ratio;
    if (position % ratio != ratio - 1 || threadIdx.x >= dim) return;
    const Sequence s = sequence_of(step.batch, t, step.slots);
    wait_for_predecessor();
    if (s.pads()) return;
    const uint32_t count = find_tokens(written(x.tokens), s, i, dim, dim, sources);
    sync_channels(dim);
    finish_entry(x, step, s, i, pooled(sources, count));
}

// The same where entries have so many tokens that one block would take long: kPoolBlocks neighbouring blocks share the
// entries that as many neighbouring tokens, of `tokens`, complete. Each pools a slice of their channels, and the last
// of them to be done with an entry finishes it. `channels`: [entries, dim]; `arrived`: [entries], all 0. No two entries
// of a step have the same sum of their row and of their last token over 128, which is their place in both.
template <typename T>
__device__ __forceinline__ void complete_long_entries(const Compressor<T> &x, const CompressorStep &step,
                                                      uint32_t tokens, float *channels, uint32_t *arrived) {
    __shared__ Source sources[kPageTokens];
    __shared__ Slice slice;
    const uint32_t dim = x.dim, ratio = x.tokens.ratio, sharers = dim / kSlice;
    const uint32_t number = blockIdx.x % kPoolBlocks, first = blockIdx.x - number, own = first + threadIdx.x % 32;
    const bool completes = own < min(first + kPoolBlocks, tokens) && step.batch.positions[own] % ratio == ratio - 1;
    uint32_t left = __ballot_sync(kAll, completes); // the same in all warps
    if (left == 0 || number >= sharers) return;
    wait_for_predecessor();
    for (; left != 0; left &= left - 1) {
        const uint32_t t = first + __ffs(left) - 1, i = step.batch.positions[t] / ratio;
        const Sequence s = sequence_of(step.batch, t, step.slots);
        if (s.pads()) continue;
        const uint32_t place = s.row + t / kPageTokens,
                       count = find_tokens(written(x.tokens), s, i, dim, kMaxDim, sources);
        __syncthreads();
        slice.pool(sources, count, number * kSlice, channels + size_t(place) * dim);
        const bool last = threadIdx.x == 0 && arrive_last(arrived + place, sharers);
        if (__syncthreads_or(last) && threadIdx.x < dim)
            finish_entry(x, step, s, i, __ldcg(channels + size_t(place) * dim + threadIdx.x));
    }
}

// A compressor's memory of recent tokens.
struct CompressorRings {
    const float *values, *scores, *bias; // [tokens, width], scores without bias; [ratio, width]
    float *value_rings, *score_rings;    // [slots, ring, width], scores with bias
    uint32_t ratio, ring, width;         // width: a multiple of four
};

// Puts the values and scores of token `t` into the rings. A block calls it. Waits for the kernels before this one.
__device__ __forceinline__ void keep_token(const CompressorRings &x, const RaggedBatch &batch, uint32_t t,
                                           uint32_t slots) {
    const Sequence s = sequence_of(batch, t, slots);
    wait_for_predecessor();
    // An older token would have its row overwritten by a newer one of this step.
    if (s.pads() || t + x.ring < s.end) return;
    const uint32_t position = s.start + (t - s.first);
    const size_t from = size_t(t) * x.width, to = (size_t(s.slot) * x.ring + position % x.ring) * x.width;
    const float *bias = x.bias + size_t(position % x.ratio) * x.width;
    for (uint32_t i = 4 * threadIdx.x; i < x.width; i += 4 * blockDim.x) {
        const float4 value = *reinterpret_cast<const float4 *>(x.values + from + i);
        float4 score = *reinterpret_cast<const float4 *>(x.scores + from + i);
        const float4 add = *reinterpret_cast<const float4 *>(bias + i);
        score.x += add.x, score.y += add.y, score.z += add.z, score.w += add.w;
        *reinterpret_cast<float4 *>(x.value_rings + to + i) = value;
        *reinterpret_cast<float4 *>(x.score_rings + to + i) = score;
    }
}
