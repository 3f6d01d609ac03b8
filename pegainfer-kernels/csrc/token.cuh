// The order of tokens, and the first in it of those that a block writes.
#pragma once
#include "common.cuh"
#include "warp.cuh"

// Rises with the logit; -0 and 0 are equal, NaN comes before all.
__device__ __forceinline__ uint32_t ordered(float logit) {
    uint32_t bits = __float_as_uint(logit + 0.f);
    return isnan(logit) ? 0 : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The inverse of `ordered`.
__device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// The order of tokens: a larger key is the better one. Larger logit first, then the lower id.
__device__ __forceinline__ uint64_t token_key(float logit, uint32_t id) { return uint64_t(ordered(logit)) << 32 | ~id; }
__device__ __forceinline__ float key_logit(uint64_t key) { return logit_of(uint32_t(key >> 32)); }
__device__ __forceinline__ uint32_t key_id(uint64_t key) { return ~uint32_t(key); }

// The best token that a thread saw, if it sees them by id. NaN and -inf do not count.
struct Best {
    float logit = -INFINITY;
    uint32_t id = 0;
    __device__ __forceinline__ void see(float x, uint32_t at) {
        if (x > logit) logit = x, id = at;
    }
    __device__ __forceinline__ uint64_t key() const { return logit > -INFINITY ? token_key(logit, id) : 0; }
};

// Raises keys[m] to the keys of the best tokens of the block's first `warps` warps, at most WARPS; they all call it,
// and they have at least m threads. Entry 2 t + i of `best` is of row 8 t + 2 (lane % 4) + i of the logits, as columns
// lie in the d of `mma`.
template <int WARPS, int TILES>
__device__ __forceinline__ void raise_keys(const Best (&best)[2 * TILES], uint32_t warps, uint32_t m, uint64_t *keys) {
    __shared__ uint64_t found[WARPS][8 * TILES];
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 2 * TILES; ++j) {
        uint64_t key = reduce_column(best[j].key(), Max());
        if (lane < 4) found[threadIdx.x / 32][j / 2 * 8 + 2 * lane + j % 2] = key;
    }
    asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory");
    if (threadIdx.x >= m) return;
    uint64_t key = 0;
    for (uint32_t w = 0; w < warps; ++w) key = max(key, found[w][threadIdx.x]);
    atomicMax(reinterpret_cast<unsigned long long *>(keys + threadIdx.x), key);
}
