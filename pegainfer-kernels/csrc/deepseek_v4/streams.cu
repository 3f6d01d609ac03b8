// DeepSeek-V4's residual streams, of which each token has four, and copies of rows; activations in bf16 or f32:
//
//   embed:          out = table[id - first], zeros for ids of other ranks        one block a token
//   resolve_ids:    placeholder ids become what a sample drew                    one thread a token
//   expand_streams: every stream begins with the embedding                       one block a stream
//   pick_rows:      out = x[row]                                                 one block a row
//   mean_streams:   columns of out = mean of the four streams                    one block a token
//   add:            out += x, in f32                                             one thread an element
//   hyper_merge:    stream'[k] = post[k] f + Σ_j comb[j][k] stream[j]            one block a token, in place
//   hyper_head:     out = Σ_j (sigmoid(m[j] scale + base[j]) + eps) stream[j],   one block a token
//                   m = (function · x) * rsqrt(mean(x²) + norm_eps), x: all streams
//   hyper_mix:      the input of a block, and how its output goes back (Sinkhorn)   one block a token, f32 alone
//
// All GPUs. Bound by memory. Activations in bf16 are mixed by tilelang/hyper_mix.cu. Reference:
// src/cpu/deepseek_v4/hyper.rs, src/ops/deepseek_v4/{embed,pick_rows,mean_streams,add}.rs.
#include "deepseek_v4/rounding.cuh"
#include "abi/deepseek_v4_streams.h"
#include "limits.h"

using namespace limits::deepseek_v4;

constexpr uint32_t kStreams = 4;                                // of a token
constexpr uint32_t kMixes = 2 * kStreams + kStreams * kStreams; // mixing values of a token

template <typename T>
__device__ void embed_row(const uint32_t *__restrict__ ids, const bf16 *__restrict__ table, T *__restrict__ out,
                          uint32_t first, uint32_t rows, uint32_t hidden) {
    uint32_t row = ids[blockIdx.x] - first; // below `first` it wraps beyond all rows
    bool here = ids[blockIdx.x] >= first && row < rows;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x)
        put(out + size_t(blockIdx.x) * hidden + i, here ? to_float(table[size_t(row) * hidden + i]) : 0.f);
}

template <typename T>
__device__ __forceinline__ void copy_row(const T *__restrict__ from, T *__restrict__ to, uint32_t width) {
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}

// Merges the block's output f into the streams of a token.
template <typename T>
__device__ void merge_token(const T *__restrict__ f, const float *__restrict__ post, const float *__restrict__ comb,
                            T *__restrict__ streams, uint32_t hidden) {
    f += size_t(blockIdx.x) * hidden, streams += size_t(blockIdx.x) * kStreams * hidden;
    post += blockIdx.x * kStreams, comb += blockIdx.x * kStreams * kStreams;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float old[kStreams], block = to_float(f[i]);
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) old[j] = to_float(streams[j * hidden + i]);
#pragma unroll
        for (uint32_t k = 0; k < kStreams; ++k) {
            float mixed = 0.f;
#pragma unroll
            for (uint32_t j = 0; j < kStreams; ++j) mixed += comb[j * kStreams + k] * old[j];
            put(streams + k * hidden + i, post[k] * block + mixed);
        }
    }
}

// Mean of the streams of a token, rounded once, to the columns of its row of `out` from `column` on.
template <typename T>
__device__ void mean_token(const T *__restrict__ streams, T *__restrict__ out, uint32_t hidden, uint32_t pitch,
                           uint32_t column) {
    streams += size_t(blockIdx.x) * kStreams * hidden;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float sum = 0.f;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) sum += to_float(streams[j * hidden + i]);
        put(out + size_t(blockIdx.x) * pitch + column + i, sum * (1.f / kStreams));
    }
}

template <typename T>
__device__ void head_token(const T *__restrict__ streams, const float *__restrict__ function,
                           const float *__restrict__ base, const float *__restrict__ scale, T *__restrict__ out,
                           uint32_t hidden, float eps, float norm_eps) {
    __shared__ float warps[kStreams + 1][32];
    const uint32_t width = kStreams * hidden;
    streams += size_t(blockIdx.x) * width;
    float squares = 0.f, m[kStreams] = {};
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        float x = to_float(streams[i]);
        squares += x * x;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) m[j] += function[size_t(j) * width + i] * x;
    }
    float rms = inverse_rms(block_sum(squares, warps[kStreams]), width, norm_eps);
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j) m[j] = sigmoid(block_sum(m[j], warps[j]) * rms * scale[0] + base[j]) + eps;
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float sum = 0.f;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) sum += m[j] * to_float(streams[j * hidden + i]);
        put(out + size_t(blockIdx.x) * hidden + i, sum);
    }
}

// `c[j][k]` made doubly stochastic by one thread: softmax over k, then columns and rows divided by their sums in turn.
__device__ void sinkhorn(float (&c)[kStreams][kStreams], uint32_t iters, float eps) {
    for (uint32_t j = 0; j < kStreams; ++j) {
        float max = fmaxf(fmaxf(c[j][0], c[j][1]), fmaxf(c[j][2], c[j][3])), sum = 0.f;
        for (uint32_t k = 0; k < kStreams; ++k) c[j][k] = expf(c[j][k] - max), sum += c[j][k];
        for (uint32_t k = 0; k < kStreams; ++k) c[j][k] = c[j][k] / sum + eps;
    }
    for (uint32_t i = 0; i < iters; ++i) {
        for (uint32_t j = 0; i > 0 && j < kStreams; ++j) {
            float sum = c[j][0] + c[j][1] + c[j][2] + c[j][3] + eps;
            for (uint32_t k = 0; k < kStreams; ++k) c[j][k] /= sum;
        }
        for (uint32_t k = 0; k < kStreams; ++k) {
            float sum = c[0][k] + c[1][k] + c[2][k] + c[3][k] + eps;
            for (uint32_t j = 0; j < kStreams; ++j) c[j][k] /= sum;
        }
    }
}

// Grid: tokens.
extern "C" __global__ __launch_bounds__(kRowThreads) void hyper_mix_f32(
    const float *streams,  // [tokens, 4, hidden]
    const float *function, // [24, 4 * hidden]
    const float *base,     // [24]
    const float *scale,    // [3]
    float *mixed,          // [tokens, hidden]
    float *post,           // [tokens, 4]
    float *comb,           // [tokens, 4, 4]
    uint32_t hidden, uint32_t iters, float eps, float norm_eps) {
    start_after_predecessor();
    __shared__ float warps[kMixes + 1][32], input[kStreams];
    const uint32_t width = kStreams * hidden;
    streams += size_t(blockIdx.x) * width;
    float squares = 0.f, m[kMixes] = {};
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) {
        float x = streams[i];
        squares += x * x;
#pragma unroll
        for (uint32_t j = 0; j < kMixes; ++j) m[j] += function[size_t(j) * width + i] * x;
    }
    float rms = inverse_rms(block_sum(squares, warps[kMixes]), width, norm_eps);
#pragma unroll
    for (uint32_t j = 0; j < kMixes; ++j) m[j] = block_sum(m[j], warps[j]) * rms;
    if (threadIdx.x == 0) {
        float c[kStreams][kStreams];
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) {
            input[j] = exact_sigmoid(m[j] * scale[0] + base[j]) + eps;
            float out = m[kStreams + j] * scale[1] + base[kStreams + j];
            post[blockIdx.x * kStreams + j] = 2.f / (1.f + expf(-out));
#pragma unroll
            for (uint32_t k = 0; k < kStreams; ++k) {
                uint32_t at = 2 * kStreams + j * kStreams + k;
                c[j][k] = m[at] * scale[2] + base[at];
            }
        }
        sinkhorn(c, iters, eps);
        for (uint32_t i = 0; i < kStreams * kStreams; ++i)
            comb[blockIdx.x * kStreams * kStreams + i] = c[i / kStreams][i % kStreams];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float sum = 0.f;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) sum += input[j] * streams[j * hidden + i];
        mixed[size_t(blockIdx.x) * hidden + i] = sum;
    }
}

// Grid: elements over threads.
extern "C" __global__ __launch_bounds__(kRowThreads) void add_f32(const float *x, // [elements]
                                                                  float *out,     // [elements], in place
                                                                  uint32_t elements) {
    start_after_predecessor();
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < elements) out[i] += x[i];
}

// Grid: tokens over threads of a block.
extern "C" __global__ __launch_bounds__(kRowThreads) void resolve_ids(const uint32_t *previous, // [samples]
                                                                      uint32_t *ids,            // [count], in place
                                                                      uint32_t samples, uint32_t count) {
    start_after_predecessor();
    using limits::gather::kPlaceholder;
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count || !(ids[i] & kPlaceholder)) return;
    uint32_t sample = ids[i] ^ kPlaceholder;
    ids[i] = sample < samples ? previous[sample] : ~0u;
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRowThreads) void dsv4_embed_##SUFFIX(                                     \
        const uint32_t *ids, /* [tokens] */                                                                            \
        const bf16 *table,   /* [rows, hidden], of the ids from `first` on */                                          \
        T *out,              /* [tokens, hidden] */                                                                    \
        uint32_t first, uint32_t rows, uint32_t hidden) {                                                              \
        start_after_predecessor();                                                                                     \
        embed_row(ids, table, out, first, rows, hidden);                                                               \
    }                                                                                                                  \
    /* Grid: tokens, streams. */                                                                                       \
    extern "C" __global__ __launch_bounds__(kRowThreads) void expand_streams_##SUFFIX(                                 \
        const T *x, /* [tokens, hidden] */                                                                             \
        T *streams, /* [tokens, 4, hidden] */                                                                          \
        uint32_t hidden) {                                                                                             \
        start_after_predecessor();                                                                                     \
        copy_row(x + size_t(blockIdx.x) * hidden, streams + (size_t(blockIdx.x) * gridDim.y + blockIdx.y) * hidden,    \
                 hidden);                                                                                              \
    }                                                                                                                  \
    /* Grid: rows. */                                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads) void pick_rows_##SUFFIX(                                      \
        const T *x,           /* [tokens, width] */                                                                    \
        const uint32_t *rows, /* [gridDim.x], each below `tokens` */                                                   \
        T *out,               /* [gridDim.x, width] */                                                                 \
        uint32_t tokens, uint32_t width) {                                                                             \
        start_after_predecessor();                                                                                     \
        if (rows[blockIdx.x] >= tokens) __trap();                                                                      \
        copy_row(x + size_t(rows[blockIdx.x]) * width, out + size_t(blockIdx.x) * width, width);                       \
    }                                                                                                                  \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRowThreads) void mean_streams_##SUFFIX(                                   \
        const T *streams, /* [tokens, 4, hidden] */                                                                    \
        T *out,           /* [tokens, pitch], the columns from `column` on */                                          \
        uint32_t hidden, uint32_t pitch, uint32_t column) {                                                            \
        start_after_predecessor();                                                                                     \
        mean_token(streams, out, hidden, pitch, column);                                                               \
    }                                                                                                                  \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRowThreads) void hyper_merge_##SUFFIX(                                    \
        const T *f,        /* [tokens, hidden] */                                                                      \
        const float *post, /* [tokens, 4] */                                                                           \
        const float *comb, /* [tokens, 4, 4] */                                                                        \
        T *streams,        /* [tokens, 4, hidden], in place */                                                         \
        uint32_t hidden) {                                                                                             \
        start_after_predecessor();                                                                                     \
        merge_token(f, post, comb, streams, hidden);                                                                   \
    }                                                                                                                  \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRowThreads) void hyper_head_##SUFFIX(                                     \
        const T *streams,      /* [tokens, 4, hidden] */                                                               \
        const float *function, /* [4, 4 hidden] */                                                                     \
        const float *base,     /* [4] */                                                                               \
        const float *scale,    /* [1] */                                                                               \
        T *out,                /* [tokens, hidden] */                                                                  \
        uint32_t hidden, float eps, float norm_eps) {                                                                  \
        start_after_predecessor();                                                                                     \
        head_token(streams, function, base, scale, out, hidden, eps, norm_eps);                                        \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
