// The paged KV cache, and which of it a step reads and writes.
//
// K and V of one layer are [blocks, kv_heads, D / 64, 16, 64] bf16: for each KV block (PagedAttention, arXiv
// 2309.06180) and KV head a slab of 16 tokens, in columns of 64 dimensions. A row of a column is 128 bytes, in which
// vector p of token t lies at p ^ t % 8. So a plain copy of 2 KB gives the 128-byte swizzle that wgmma wants in shared
// memory, and that ldmatrix reads without bank conflicts.
//
// In FP8 a slab is [D / 64, 16, 64] e4m3 codes, then the 16 scales of its tokens, f32 (src/heads.rs: the format). A row
// of a column is 64 bytes, in which the 16 codes number p of token t lie at p ^ t / 2 % 4, so that ldmatrix, which
// takes pairs of codes for elements, reads without bank conflicts, too.
#pragma once
#include "common/base.cuh"
#include "limits.h"

using namespace limits::kv_cache;

constexpr uint32_t kCacheVectors = kCacheColumn / kVector; // of a row of a column

// The first element of a vector of a token, relative to the slab of its KV block and head.
__device__ __forceinline__ uint32_t cache_vector(uint32_t token, uint32_t vector) {
    uint32_t row = vector / kCacheVectors * kBlock + token;
    return (row * kCacheVectors + (vector % kCacheVectors ^ token % kCacheVectors)) * kVector;
}

// An element of the cache in FP8: a code, or a byte of a scale.
using fp8 = uint8_t;

// Elements of a slab.
template <typename T> __host__ __device__ constexpr uint32_t slab_size(uint32_t head_dim) {
    return kBlock * (head_dim + (sizeof(T) == sizeof(fp8) ? uint32_t(sizeof(float)) : 0u));
}

// The first of 16 codes of a token, dimensions 16 vector and on, relative to the slab.
__device__ __forceinline__ uint32_t cache_codes(uint32_t token, uint32_t vector) {
    return (vector / 4 * kBlock + token) * kCacheColumn + (vector % 4 ^ token / 2 % 4) * 16;
}

// The scales of a slab in FP8.
__device__ __forceinline__ float *cache_scales(fp8 *slab, uint32_t head_dim) {
    return reinterpret_cast<float *>(slab + kBlock * head_dim);
}
__device__ __forceinline__ const float *cache_scales(const fp8 *slab, uint32_t head_dim) {
    return reinterpret_cast<const float *>(slab + kBlock * head_dim);
}

// The sequences of a step: row b has the queries of tokens qo_indptr[b] to before qo_indptr[b + 1], and they are the
// last of its kv_lens[b] tokens.
struct Batch {
    const uint32_t *qo_indptr;    // [rows + 1]
    const uint32_t *kv_lens;      // [rows]
    const uint32_t *block_tables; // [rows, max_blocks]: ids of KV blocks
    uint32_t rows, max_blocks;
    uint32_t blocks; // of the cache; a larger id stops the kernel
};
// The parameters of a kernel that are its batch, besides the numbers.
#define BATCH_POINTERS const uint32_t *qo_indptr, const uint32_t *kv_lens, const uint32_t *block_tables
