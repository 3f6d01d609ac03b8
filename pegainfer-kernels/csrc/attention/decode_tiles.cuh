// The tiles of decode attention: KV blocks of 16 tokens that a warp gets through its own ring of stages in shared
// memory, and the online softmax over them.
//
// Technique: FlashAttention with the operands swapped, as swap-AB GEMMs do for few rows. S[16 tokens, 8 N] = k qᵀ,
// online softmax in f32 down the columns, O[D, 8 N] += vᵀ p: the 16 rows that a tensor core wants are tokens or
// dimensions, never idle queries. The running max follows only when a score exceeds it by more than 8,
// FlashAttention-4's lazy rescaling.
//
// A cache in FP8 comes as codes, which are widened to f16 in registers, exactly. Keys: a lane has 16 neighbouring
// dimensions of its two tokens, in the order of which the queries enter, too. Values: ldmatrix transposes pairs of
// codes, so that a lane has two neighbouring dimensions of two tokens; rows m and m + 8 of a tile of O are then
// dimensions 2 m and 2 m + 1. The scales multiply scores and weights in f32. f16 has five bits of exponent. So queries
// enter times a power of two for each column, and the running max is that of the weights times the scales of the
// values.
#pragma once
#include <cuda_fp16.h>
#include "common/async.cuh"
#include "attention/fp8_kv.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::attention;

#if __CUDA_ARCH__ >= 900
constexpr float kLazy = 8.f;       // excess over the running max, in powers of two, that does not rescale
constexpr uint32_t kQueryBits = 8; // exponent of the largest query of a column in f16

// Keys or values of one head in a block of the cache.
template <int D, typename T = bf16> using Slab = T[slab_size<T>(D)];
// Slabs of a stage: of a KV block the keys and the values. Of large heads in bf16 one of them, so that as many blocks
// of threads fit a multiprocessor.
template <int D, typename T = bf16> constexpr int kSlabs = D > kLargeHead && sizeof(T) == sizeof(bf16) ? 1 : 2;
template <int D, typename T = bf16> using Stage = Slab<D, T>[kSlabs<D, T>];

// The KV blocks of one warp, `count` of them, one in `Warps` of its row's, on their way through its stages.
template <int D, int S, uint32_t Warps, typename T = bf16> struct KvRing {
    static constexpr uint32_t kStages = 2 / kSlabs<D, T>; // of a KV block
    Stage<D, T> *stages;
    uint64_t *barriers;
    const T *k, *v; // this KV head's slabs of block 0
    size_t stride;  // elements from one block's slab to the next block's
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
        constexpr uint32_t kBytes = sizeof(Slab<D, T>);
        arrive_expecting(barriers + stage, kSlabs<D, T> * kBytes);
        copy_bulk(stages[stage][0], (n % kStages == 0 ? k : v) + id * stride, kBytes, barriers + stage);
        if constexpr (kStages == 1) copy_bulk(stages[stage][1], v + id * stride, kBytes, barriers + stage);
    }

    // What came with stage number n.
    __device__ Slab<D, T> *await(uint32_t n) {
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
    float unscale[N][2]; // FP8: what the scores of a column are multiplied by, because its queries are scaled
};

// The first element of a vector of a column of the matrix of queries, swizzled as the cache is.
template <int N> __device__ __forceinline__ uint32_t query_vector(uint32_t column, uint32_t vector) {
    return ((vector / 8 * 8 * N + column) * 8 + (vector % 8 ^ column % 8)) * 8;
}

// Codes 0 and 2 of a word, and codes 1 and 3, as f16, exactly. One conversion of the hardware takes the place of five
// integer instructions and a multiplication that give bf16.
__device__ __forceinline__ uint2 widen4_f16(uint32_t codes) {
    uint32_t even, odd;
    asm("{\n.reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(even), "=r"(odd)
        : "r"(__byte_perm(codes, 0, 0x3120)));
    return make_uint2(even, odd);
}

// Two f32 to a pair of f16, and a pair of bf16 times `factor`.
__device__ __forceinline__ uint32_t narrow_f16(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t &>(pair);
}
__device__ __forceinline__ uint32_t to_f16(uint32_t pair, float factor) {
    float2 x = widen(pair);
    return narrow_f16(x.x * factor, x.y * factor);
}

// log2 of a scale, at least -64: weights stay finite, whatever the scales are.
__device__ __forceinline__ float bounded_log2(float scale) { return fmaxf(log2_approx(scale), -64.f); }

// The queries as `multiply_keys` takes them, from a matrix whose columns are queries times heads, swizzled as the cache
// is; for a cache in FP8 in f16, the largest of a column about 2^kQueryBits.
template <int D, int N, typename T>
__device__ __forceinline__ void load_columns(uint4 (&q)[N][D / 32], Partial<D, N> &part, const bf16 *columns) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < N; ++t) {
        if constexpr (sizeof(T) == sizeof(bf16)) {
#pragma unroll
            for (int c = 0; c < D / 32; ++c)
                q[t][c] = load_matrices(columns + query_vector<N>(8 * t + lane % 8, 4 * c + lane / 8));
        } else { // 16 neighbouring dimensions for each two vectors
            uint32_t largest = 0;
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {
                uint32_t vector = c / 2 * 8 + lane % 4 * 2 + c % 2;
                q[t][c] = *reinterpret_cast<const uint4 *>(columns + query_vector<N>(8 * t + lane / 4, vector));
                largest = max(largest, largest_bits(q[t][c]));
            }
            // 2^(kQueryBits - e) for an exponent e, and its inverse; both are normal numbers.
            uint32_t factor = min(kQueryBits + 254 - (reduce_lanes(largest, 4, MaxBits()) >> 7), 253u) << 23;
            uint32_t inverse = (254u << 23) - factor;
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {
                uint4 v = q[t][c];
                float by = __uint_as_float(factor);
                // Dimensions 0 and 2 of four, and 1 and 3, as `widen4_f16` gives codes.
                q[t][c] =
                    make_uint4(to_f16(__byte_perm(v.x, v.y, 0x5410), by), to_f16(__byte_perm(v.x, v.y, 0x7632), by),
                               to_f16(__byte_perm(v.z, v.w, 0x5410), by), to_f16(__byte_perm(v.z, v.w, 0x7632), by));
            }
#pragma unroll
            for (int j = 0; j < 2; ++j)
                part.unscale[t][j] = __shfl_sync(kAll, __uint_as_float(inverse), Accumulator::column(lane, j) * 4);
        }
    }
}

// s = k qᵀ of a tile, in two sums, so that each waits for every other mma only.
template <int D, int N>
__device__ __forceinline__ void multiply_keys(Accumulator (&s)[2][N], const uint4 (&q)[N][D / 32],
                                              const Slab<D> &keys) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
        uint4 a = load_matrices(keys + cache_vector(lane % 16, 2 * c + lane / 16));
#pragma unroll
        for (int t = 0; t < N; ++t) {
            const uint4 &b = q[t][c / 2];
            mma(s[c % 2][t], a, c % 2 ? b.z : b.x, c % 2 ? b.w : b.y);
        }
    }
}
template <int D, int N>
__device__ __forceinline__ void multiply_keys(Accumulator (&s)[2][N], const uint4 (&q)[N][D / 32],
                                              const Slab<D, fp8> &keys) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
        const fp8 *at = keys + cache_codes(lane / 4, 4 * c + lane % 4);
        // Eight tokens further, the swizzle is the same.
        uint4 low = *reinterpret_cast<const uint4 *>(at),
              high = *reinterpret_cast<const uint4 *>(at + 8 * kCacheColumn);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint2 upper = widen4_f16((&low.x)[i]), lower = widen4_f16((&high.x)[i]);
#pragma unroll
            for (int t = 0; t < N; ++t) {
                const uint4 &b = q[t][2 * c + i / 2];
                mma_f16(s[i % 2][t], make_uint4(upper.x, lower.x, upper.y, lower.y), i % 2 ? b.z : b.x,
                        i % 2 ? b.w : b.y);
            }
        }
    }
}

// The scales of a lane's two tokens of a tile.
template <int D> __device__ __forceinline__ float2 tile_scales(const Slab<D> &) { return make_float2(1.f, 1.f); }
template <int D> __device__ __forceinline__ float2 tile_scales(const Slab<D, fp8> &slab) {
    const float *scales = cache_scales(slab, D) + threadIdx.x % 32 / 4;
    return make_float2(scales[0], scales[8]);
}

// Scores of a tile that begins at `token`, times `scale`: x[t][i][j] for token 8 i + lane / 4 and column
// 8 t + Accumulator::column(lane, j). Those that the column does not see are -infinity.
template <int D, int N, typename T>
__device__ __forceinline__ void scores(float (&x)[N][2][2], const Partial<D, N> &part, const uint4 (&q)[N][D / 32],
                                       const T &keys, uint32_t token, bool masked, float scale) {
    uint32_t lane = threadIdx.x % 32;
    Accumulator s[2][N] = {};
    multiply_keys<D, N>(s, q, keys);
    float2 by = tile_scales<D>(keys);
    by.x *= scale, by.y *= scale;
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            bool seen = !masked || token + Accumulator::row(lane, j) <= part.last[t][j % 2];
            float sum = s[0][t][j] + s[1][t][j];
            if (sizeof(keys[0]) == sizeof(fp8)) sum *= part.unscale[t][j % 2];
            x[t][j / 2][j % 2] = seen ? sum * (j < 2 ? by.x : by.y) : -INFINITY;
        }
    }
}

// Raises the running max to the largest score so far, each plus `more` of its token, and rescales what was summed
// relative to the old one.
template <int D, int N>
__device__ __forceinline__ void raise(Partial<D, N> &part, const float (&x)[N][2][2], float2 more) {
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float new_max = fmaxf(part.max[t][j], fmaxf(x[t][0][j] + more.x, x[t][1][j] + more.y));
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

// The weights of a tile that begins at `token`, as operand B of the GEMM with the values, whose scales are `by`: they
// are times these, which the running max takes into account.
template <int D, int N, typename T>
__device__ __forceinline__ void weigh(uint32_t (&p)[N][2], Partial<D, N> &part, const uint4 (&q)[N][D / 32],
                                      const T &keys, uint32_t token, bool masked, float scale,
                                      float2 by = make_float2(1.f, 1.f)) {
    constexpr bool kScaled = sizeof(keys[0]) == sizeof(fp8);
    float x[N][2][2];
    scores<D, N>(x, part, q, keys, token, masked, scale);
    float2 more = kScaled ? make_float2(bounded_log2(by.x), bounded_log2(by.y)) : make_float2(0.f, 0.f);
    // Weights up to 2^kLazy do no harm in f32, bf16 and f16, so that the running max seldom has to follow.
    bool above = false;
#pragma unroll
    for (int i = 0; i < 4 * N; ++i)
        above |= x[i / 4][i / 2 % 2][i % 2] + (i / 2 % 2 ? more.y : more.x) > part.max[i / 4][i % 2] + kLazy;
    if (__any_sync(kAll, above)) raise<D, N>(part, x, more);
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // No token seen yet: all weights are 0. The sum takes the weights rounded as the GEMM does, so that
                // rounding does not tilt the mean.
                float base = part.max[t][j] == -INFINITY ? 0.f : part.max[t][j];
                x[t][i][j] = exp2_approx(x[t][i][j] - base);
                if (!kScaled) x[t][i][j] = round_bf16(x[t][i][j]);
                part.sum[t][j] += x[t][i][j];
                if (kScaled) x[t][i][j] *= i ? by.y : by.x;
            }
            p[t][i] = transposed(kScaled ? narrow_f16(x[t][i][0], x[t][i][1]) : narrow(x[t][i][0], x[t][i][1]));
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
template <int D, int N>
__device__ __forceinline__ void add_values(Partial<D, N> &part, const uint32_t (&p)[N][2], const Slab<D, fp8> &values) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < D / 16; m += 2) {
        // Of dimensions 16 m to 16 m + 15 the two halves of the tokens, and of the next 16 dimensions.
        uint4 codes = load_matrices<true>(values + cache_codes(lane / 8 % 2 * 8 + lane % 8, m + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint2 first = widen4_f16(i ? codes.z : codes.x), second = widen4_f16(i ? codes.w : codes.y);
#pragma unroll
            for (int t = 0; t < N; ++t)
                mma_f16(part.o[t][m + i], make_uint4(first.x, first.y, second.x, second.y), p[t][0], p[t][1]);
        }
    }
}

// Dimension of row `i` of accumulator number m of the output, of a cache of this format: see `add_values`.
template <typename T> __device__ __forceinline__ uint32_t output_dimension(int m, int i) {
    uint32_t lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == sizeof(fp8)) return 16 * m + lane / 4 * 2 + i / 2;
    return 16 * m + Accumulator::row(lane, i);
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

// The same of a stage with codes of both keys and values.
template <int D, int, int>
__device__ void complete_tile(Slab<D, fp8> *stage, uint32_t end, const bf16 (*fresh)[D], fp8 *k, fp8 *v) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = (end + 1) * (D / 16) + lane; i < kBlock * (D / 16); i += 32)
        *reinterpret_cast<uint4 *>(stage[1] + cache_codes(i / (D / 16), i % (D / 16))) = make_uint4(0, 0, 0, 0);
    if (lane > end && lane < kBlock) cache_scales(stage[1], D)[lane] = 0.f;
    if (fresh) {
        // A lane has 16 dimensions of the key, or of the value.
        constexpr uint32_t kLanes = D / 16;
        uint32_t value = lane / kLanes % 2, vector = lane % kLanes, at = cache_codes(end, vector);
        const uint4 *row = reinterpret_cast<const uint4 *>(fresh[value] + 16 * vector);
        uint4 low = row[0], high = row[1];
        float scale = row_scale<fp8>(low, high, true, kLanes);
        uint2 first = encode8(low, scale), second = encode8(high, scale);
        if (lane < 2 * kLanes) {
            uint4 codes = make_uint4(first.x, first.y, second.x, second.y);
            fp8 *slab = value ? v : k;
            *reinterpret_cast<uint4 *>(stage[value] + at) = codes;
            *reinterpret_cast<uint4 *>(slab + at) = codes;
            if (vector == 0) cache_scales(stage[value], D)[end] = cache_scales(slab, D)[end] = scale;
        }
    }
    __syncwarp();
}
#endif
