// One row of logits on a thread block cluster, for sampling and log-probabilities.
//
// Each warp owns a range of ids, and each pass over the row is one call of `Row::each`: the first comes from memory,
// the others from the L1, where the share of a block fits. Weights are whole numbers (fixed point), with the same steps
// to them as in src/cpu/sampling/weight.rs, so that sums do not depend on their order: every grid, and the CPU, cuts
// and draws the same.
#pragma once
#include "common/cluster.cuh"
#include "common/base.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::sampling;

constexpr uint32_t kWarps = kThreads / 32;

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

// Below the key of every token with a logit of at least `floor`, above all others.
__device__ __forceinline__ uint64_t floor_key(float floor) { return uint64_t(ordered(floor)) << 32; }

constexpr float kNegligible = -42.f; // exponents, to base 2, of weights that are 0

// 2^e for e <= 0 in units of 2^-40, to nearest; no contraction and no approximation, so equal to the CPU's bit by bit.
__device__ __forceinline__ uint64_t units(float e) {
    constexpr float kRound = 12582912.f;        // 1.5 * 2^23: adding it rounds to whole numbers
    constexpr float kHigh = 12.f;               // to multiples of 2^-20
    constexpr float kLow = 1.1444091796875e-5f; // 1.5 * 2^-17: to multiples of 2^-40
    constexpr float kPoly[7] = {
        1.5594677e-4f, 1.3406644e-3f, 9.617693e-3f, 5.5503106e-2f, 2.4022653e-1f, 6.931472e-1f, 1.f};
    if (!(e > kNegligible)) return 0;
    float t = __fadd_rn(e, kRound), f = __fsub_rn(e, __fsub_rn(t, kRound)), p = kPoly[0];
#pragma unroll
    for (int i = 1; i < 7; ++i) p = __fadd_rn(__fmul_rn(p, f), kPoly[i]);
    float w = __uint_as_float(__float_as_uint(p) + (__float_as_uint(t) << 23));
    float high = __fadd_rn(w, kHigh);
    float low = __fadd_rn(__fsub_rn(w, __fsub_rn(high, kHigh)), kLow);
    uint32_t whole = __float_as_uint(high) - __float_as_uint(kHigh);
    return (uint64_t(whole) << 20) + int64_t(int32_t(__float_as_uint(low) - __float_as_uint(kLow)));
}

// exp((x - max) / temperature), with scale = log2(e) / temperature.
struct Weight {
    float max, scale;
    __device__ __forceinline__ uint64_t of(float x) const {
        return units(x == max ? 0.f : __fmul_rn(__fsub_rn(x, max), scale));
    }
};

struct Row {
    const float *logits;
    uint32_t first, end; // the ids of this warp

    // `vocab` and so `first` and `end` are multiples of 4.
    __device__ Row(const float *__restrict__ all, uint32_t vocab) {
        uint32_t blocks = cluster_blocks();
        uint32_t share = (vocab + blocks * kWarps - 1) / (blocks * kWarps);
        share = (share + 31) / 32 * 32; // whole cache lines
        logits = all + size_t(blockIdx.x / blocks) * vocab;
        first = min(vocab, (block_rank() * kWarps + threadIdx.x / 32) * share);
        end = min(vocab, first + share);
    }

    __device__ __forceinline__ float4 load(uint32_t id) const {
        return __ldg(reinterpret_cast<const float4 *>(logits + id));
    }

    // Calls f(logit, id) for the tokens of this thread, by id.
    template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll 4
        for (uint32_t id = first + threadIdx.x % 32 * 4; id < end; id += 128) {
            float4 x = load(id);
            f(x.x, id), f(x.y, id + 1), f(x.z, id + 2), f(x.w, id + 3);
        }
    }
};

// Sums and maxima over a cluster. Two sets of slots, so that one exchange can begin while another block still reads
// what came in the one before.
struct Exchange {
    uint64_t warps[kWarps];
    uint64_t slots[2][kMaxBlocks];
};

// The reduction of `v` over the block; all threads of the first warp get it. `warps` keeps each warp's own.
template <typename Op> __device__ uint64_t block_reduce(Exchange &shared, uint64_t v, Op op) {
    v = reduce_lanes(v, 32, op);
    if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x >= 32) return v;
    return reduce_lanes(shared.warps[threadIdx.x % kWarps], kWarps, op);
}

// Each block's reduction of `v`, by rank. `exchanges` counts the exchanges so far: two sets of slots are used
// alternately.
template <typename Op> __device__ const uint64_t *exchange(Exchange &shared, uint32_t &exchanges, uint64_t v, Op op) {
    uint64_t *slots = shared.slots[exchanges++ % 2];
    v = block_reduce(shared, v, op);
    if (threadIdx.x < cluster_blocks()) *in_block(slots + block_rank(), threadIdx.x) = v;
    cluster_sync();
    return slots;
}

// The reduction of `v` over the cluster; every thread gets it.
template <typename Op> __device__ uint64_t reduce(Exchange &shared, uint32_t &exchanges, uint64_t v, Op op) {
    const uint64_t *slots = exchange(shared, exchanges, v, op);
    v = slots[0];
    for (uint32_t i = 1; i < cluster_blocks(); ++i) v = op(v, slots[i]);
    return v;
}

// The best token and the smallest finite logit of a row.
struct Extent {
    uint64_t best;
    float least;
};

__device__ __forceinline__ Extent own_extent(const Row &row) {
    Extent own = {0, INFINITY};
    row.each([&](float x, uint32_t id) {
        own.best = max(own.best, token_key(x, id));
        if (x > -INFINITY) own.least = fminf(own.least, x);
    });
    return own;
}
