// The tiles of decode attention: KV blocks of 16 tokens that a warp gets through its own ring of stages in shared
// memory, and the online softmax over them.
//
// Technique: FlashAttention with the operands swapped, as swap-AB GEMMs do for few rows. S[16 tokens, 8 N] = k qᵀ,
// online softmax in f32 down the columns, O[D, 8 N] += vᵀ p: the 16 rows that a tensor core wants are tokens or
// dimensions, never idle queries. The running max follows only when a score exceeds it by more than 8,
// FlashAttention-4's lazy rescaling.
#pragma once
#include "async.cuh"
#include "kv_cache.cuh"
#include "math.cuh"
#include "warp.cuh"
#include "limits.h"

using namespace limits::attention;

#if __CUDA_ARCH__ >= 900
constexpr float kLazy = 8.f; // excess over the running max, in powers of two, that does not rescale

// Keys or values of one head in a block of the cache.
template <int D> using Slab = bf16[kBlock * D];
// Slabs of a stage: of a KV block the keys and the values. Of large heads one of them, so that as many blocks of
// threads fit a multiprocessor.
template <int D> constexpr int kSlabs = D > kLargeHead ? 1 : 2;
template <int D> using Stage = Slab<D>[kSlabs<D>];

// The KV blocks of one warp, `count` of them, one in `Warps` of its row's, on their way through its stages.
template <int D, int S, uint32_t Warps> struct KvRing {
    static constexpr uint32_t kStages = 2 / kSlabs<D>; // of a KV block
    Stage<D> *stages;
    uint64_t *barriers;
    const bf16 *k, *v; // this KV head's slabs of block 0
    size_t stride;     // elements from one block's slab to the next block's
    const uint32_t *table;
    uint32_t count, blocks;
    uint32_t ids, ahead; // of 32 blocks, one a lane, and of the 32 after them

    __device__ uint32_t load_id(uint32_t n) const {
        n += threadIdx.x % 32;
        if (n >= count) return 0;
        uint32_t id = table[n * Warps];
        if (id >= blocks) __trap();
        return id;
    }

    // Before the first copies.
    __device__ void load_ids() { ids = load_id(0), ahead = load_id(32); }

    // Starts the copies that fill stage number n; called in order, by the whole warp.
    __device__ void fetch(uint32_t n) {
        uint32_t block = n / kStages;
        if (n > 0 && n % (32 * kStages) == 0) {
            ids = ahead;
            ahead = load_id(block + 32);
        }
        uint32_t id = __shfl_sync(kAll, ids, block % 32), stage = n % S;
        if (threadIdx.x % 32 != 0) return;
        constexpr uint32_t kBytes = kBlock * D * sizeof(bf16);
        arrive_expecting(barriers + stage, kSlabs<D> * kBytes);
        copy_bulk(stages[stage][0], (n % kStages == 0 ? k : v) + id * stride, kBytes, barriers + stage);
        if constexpr (kStages == 1) copy_bulk(stages[stage][1], v + id * stride, kBytes, barriers + stage);
    }

    // What came with stage number n.
    __device__ Slab<D> *await(uint32_t n) {
        wait(barriers + n % S, n / S % 2);
        return stages[n % S];
    }

    // Gives stage number n to the next copies.
    __device__ void refill(uint32_t n) {
        __syncwarp(); // all lanes have read it
        if (n + S < count * kStages) fetch(n + S);
    }
};

// A warp's partial softmax: numerators and denominators relative to 2^max, for columns 8 t + Accumulator::column.
template <int D, int N> struct Partial {
    Accumulator o[N][D / 16]; // dimensions 16 m + Accumulator::row of both columns
    float max[N][2], sum[N][2];
    uint32_t last[N][2]; // the last token that a column sees
};

// Scores of a tile that begins at `token`, times `scale`: x[t][i][j] for token 8 i + lane / 4 and column
// 8 t + Accumulator::column(lane, j). Those that the column does not see are -infinity.
template <int D, int N>
__device__ __forceinline__ void scores(float (&x)[N][2][2], const Partial<D, N> &part, const uint4 (&q)[N][D / 32],
                                       const Slab<D> &keys, uint32_t token, bool masked, float scale) {
    uint32_t lane = threadIdx.x % 32;
    Accumulator s[2][N] = {}; // two sums, so that each waits for every other mma only
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
        uint4 a = load_matrices(keys + cache_vector(lane % 16, 2 * c + lane / 16));
#pragma unroll
        for (int t = 0; t < N; ++t) {
            const uint4 &b = q[t][c / 2];
            mma(s[c % 2][t], a, c % 2 ? b.z : b.x, c % 2 ? b.w : b.y);
        }
    }
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            bool seen = !masked || token + Accumulator::row(lane, j) <= part.last[t][j % 2];
            x[t][j / 2][j % 2] = seen ? (s[0][t][j] + s[1][t][j]) * scale : -INFINITY;
        }
    }
}

// Raises the running max to the largest score so far, and rescales what was summed relative to the old one.
template <int D, int N> __device__ __forceinline__ void raise(Partial<D, N> &part, const float (&x)[N][2][2]) {
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float new_max = fmaxf(part.max[t][j], fmaxf(x[t][0][j], x[t][1][j]));
            new_max = reduce_column(new_max, Max());
            float rescale = part.max[t][j] == new_max ? 1.f : exp2_approx(part.max[t][j] - new_max);
            part.max[t][j] = new_max;
            part.sum[t][j] *= rescale;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                part.o[t][m][j] *= rescale;
                part.o[t][m][j + 2] *= rescale;
            }
        }
    }
}

// The weights of a tile that begins at `token`, as operand B of the GEMM with the values.
template <int D, int N>
__device__ __forceinline__ void weigh(uint32_t (&p)[N][2], Partial<D, N> &part, const uint4 (&q)[N][D / 32],
                                      const Slab<D> &keys, uint32_t token, bool masked, float scale) {
    float x[N][2][2];
    scores<D, N>(x, part, q, keys, token, masked, scale);
    // Weights up to 2^kLazy do no harm in f32 and bf16, so that the running max seldom has to follow.
    bool above = false;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) above |= x[i / 4][i / 2 % 2][i % 2] > part.max[i / 4][i % 2] + kLazy;
    if (__any_sync(kAll, above)) raise<D, N>(part, x);
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // No token seen yet: all weights are 0. The sum takes the weights rounded as the GEMM does, so that
                // rounding does not tilt the mean.
                float base = part.max[t][j] == -INFINITY ? 0.f : part.max[t][j];
                x[t][i][j] = round_bf16(exp2_approx(x[t][i][j] - base));
                part.sum[t][j] += x[t][i][j];
            }
            p[t][i] = transposed(narrow(x[t][i][0], x[t][i][1]));
        }
    }
}

// Adds the values of a tile by their weights.
template <int D, int N>
__device__ __forceinline__ void add_values(Partial<D, N> &part, const uint32_t (&p)[N][2], const Slab<D> &values) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < D / 16; ++m) {
        uint4 a = load_matrices<true>(values + cache_vector(lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
#pragma unroll
        for (int t = 0; t < N; ++t) mma(part.o[t][m], a, p[t][0], p[t][1]);
    }
}

// The row's last tile, in which the row ends with token `end`: clears the values behind it, which may be anything, and
// 0 * NaN is NaN. With `fresh`, token `end` comes from there, and goes to the slabs of its block in the cache too. Of
// keys (0) and values (1), the stage has those from First to Last.
template <int D, int First, int Last>
__device__ void complete_tile(Slab<D> *stage, uint32_t end, const bf16 (*fresh)[D], bf16 *k, bf16 *v) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = (end + 1) * (D / 8) + lane; Last == 1 && i < kBlock * (D / 8); i += 32)
        *reinterpret_cast<uint4 *>(stage[1 - First] + cache_vector(i / (D / 8), i % (D / 8))) = make_uint4(0, 0, 0, 0);
    for (uint32_t i = lane; fresh && i < (Last - First + 1) * (D / 8); i += 32) {
        uint32_t value = First + i / (D / 8), vector = i % (D / 8), at = cache_vector(end, vector);
        uint4 x = *reinterpret_cast<const uint4 *>(fresh[value] + 8 * vector);
        *reinterpret_cast<uint4 *>(stage[value - First] + at) = x;
        *reinterpret_cast<uint4 *>((value ? v : k) + at) = x;
    }
    __syncwarp();
}
#endif
