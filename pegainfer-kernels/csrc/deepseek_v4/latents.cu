// What the latents of DeepSeek-V4's attention become, activations in bf16 or f32, one launch for all:
//
//   queries:     norm of the low rank, x * rsqrt(mean(x²) + eps) * weight, rounded once, also to FP8 and to packed rows
//   keys:        rope(norm(x)); values that are not rotated in FP8 where it is asked for, 64 with a scale
//   compressors: the entries that tokens complete (deepseek_v4/compress.cuh), of attention's and of the indexer's
//
// A block has a token of one of these four; entries of 128 tokens are shared by kPoolBlocks blocks. All GPUs. Bound by
// latency at few tokens: 2.4 us at one (H200). Reference: src/cpu/deepseek_v4/{norm,rope,compress}.rs,
// src/ops/deepseek_v4/latents.rs.
#include "deepseek_v4/compress.cuh"
#include "deepseek_v4/norm.cuh"
#include "abi/deepseek_v4_latents.h"

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens, if entries have 128 tokens rounded up to kPoolBlocks; queries, keys, compressors. The operands    \
       of a compressor that is not there are null. */                                                                  \
    extern "C" __global__ __launch_bounds__(kMaxDim) void attention_latents_##SUFFIX(                                  \
        const T *x,             /* [tokens, hidden] */                                                                 \
        const bf16 *weight,     /* [hidden] */                                                                         \
        T *out,                 /* [tokens, hidden] */                                                                 \
        T *low,                 /* [tokens, hidden], `out` rounded to FP8; null: none */                               \
        uint8_t *packed,        /* [tokens, packed row of hidden] (deepseek_v4/rounding.cuh), of `low`; null: none */  \
        const T *keys,          /* [tokens, dim] */                                                                    \
        const bf16 *key_weight, /* [dim] */                                                                            \
        T *kv,                  /* [tokens, dim] */                                                                    \
        const float *frequencies,                   /* [pairs] */                                                      \
        RAGGED_BATCH_POINTERS, const float *values, /* [tokens, width] */                                              \
        const float *scores,                        /* [tokens, width], without bias */                                \
        const float *bias,                          /* [ratio, width] */                                               \
        const bf16 *entry_norm,                     /* [dim] */                                                        \
        const float *value_rings,                   /* [slot_count, ring, width] */                                    \
        const float *score_rings,                   /* [slot_count, ring, width] */                                    \
        T *entries,                                 /* [entry_pages, 128 / ratio, dim] */                              \
        const float *index_values,                  /* the same of the indexer */                                      \
        const float *index_scores, const float *index_bias, const bf16 *index_norm, const float *index_value_rings,    \
        const float *index_score_rings, T *index_entries,                                                              \
        float *channels,   /* [entries, dim], see `complete_long_entries` */                                           \
        uint32_t *arrived, /* [entries], all 0 */                                                                      \
        uint32_t tokens, uint32_t hidden, uint32_t dim, uint32_t pairs, uint32_t rows, uint32_t pages,                 \
        uint32_t slot_count, uint32_t entry_pages, uint32_t ratio, uint32_t ring, uint32_t width,                      \
        uint32_t index_pages, uint32_t index_ratio, uint32_t index_ring, uint32_t index_width, uint32_t index_dim,     \
        uint32_t low_precision, float eps) {                                                                           \
        release_successor();                                                                                           \
        const uint32_t t = blockIdx.x, part = blockIdx.y;                                                              \
        if (part < 2 && t >= tokens) return;                                                                           \
        if (part == 0) wait_for_predecessor();                                                                         \
        if (part == 0) return norm_row(x, weight, Normed<T>{out, low, packed}, t, hidden, eps);                        \
        if (part == 1)                                                                                                 \
            return norm_rope_key(keys, key_weight, t, float(positions[t]), frequencies, kv, dim, pairs,                \
                                 low_precision != 0, eps);                                                             \
        const RaggedBatch batch = RAGGED_BATCH;                                                                        \
        const CompressorStep step = {batch, frequencies, slot_count, pairs, low_precision != 0, eps};                  \
        const Tokens own = {values, scores, bias, value_rings, score_rings, ratio, ring, width};                       \
        const Tokens index = {index_values,      index_scores, index_bias, index_value_rings,                          \
                              index_score_rings, index_ratio,  index_ring, index_width};                               \
        const Compressor<T> compressor =                                                                               \
            part == 2 ? Compressor<T>{own, entry_norm, entries, entry_pages, dim, false}                               \
                      : Compressor<T>{index, index_norm, index_entries, index_pages, index_dim, true};                 \
        if (compressor.tokens.ratio == kPageTokens)                                                                    \
            return complete_long_entries(compressor, step, tokens, channels, arrived);                                 \
        complete_entry(compressor, step, t);                                                                           \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
