// Decode attention (csrc/attention/decode.cuh: formula, techniques, limit) of queries that lie ready, and fused with
// the QK norm, the rotary embedding and the cache write before it (decode_fused).
//
// decode_D_N: sequences of at most 8 N columns (queries times heads of a group); D of 64, 128 and 256. Two stages for
// each warp's ring, three of D = 256; of a cache in FP8 (decode_fp8_D_N) stages are half as large, and four, or of D =
// 256 three with both keys and values. decode_fused_D_S: sequences of one query, S stages; D of 64 and 128, at most 8
// heads a group. The launcher (src/cuda/attention_decode.rs) takes three stages where the pairs of sequence and KV head
// nearly fill one or two rounds of two blocks a multiprocessor, else two; of heads of 128 in FP8 always three, small
// ones, so that a multiprocessor holds four blocks. Reference: src/cpu/attention/mod.rs, src/cpu/qkv.rs.
#include "attention/decode.cuh"
#include "common/norm_rope.cuh"
#include "abi/attention_decode_bulk.h"

// q: [tokens, heads * D].
struct Queries {
    const bf16 *q;
    uint32_t overlapped; // with the kernel before this one: csrc/attention/prefill_wgmma.cu for the other rows
#if __CUDA_ARCH__ >= 900
    static constexpr bool kFused = false;
    __device__ bool overlaps_prefill() const { return overlapped; }
    template <int D> struct Early {};
    template <int D> __device__ Early<D> early(const Pair &, uint32_t) const { return {}; }
    __device__ bool fresh(const Pair &) const { return false; }
    template <int D, int P> __device__ Ungated gates(const Pair &, uint32_t, uint32_t) const { return {}; }

    template <int D, int N, int S, typename T>
    __device__ void stage(DecodeShared<D, N, S, T> &shared, const Pair &pair, bool, const Early<D> &) const {
        for (uint32_t i = threadIdx.x; i < pair.columns * (D / kVector); i += 32 * kDecodeWarps) {
            uint32_t column = i / (D / kVector), vector = i % (D / kVector);
            // Past the L1: without a wait, nothing says that it has forgotten the queries of the layer before.
            *reinterpret_cast<uint4 *>(shared.q + query_vector<N>(column, vector)) =
                __ldcg(reinterpret_cast<const uint4 *>(q + pair.head(column) * D + kVector * vector));
        }
    }
#endif
};

// qkv: [tokens, (heads + 2 kv_heads) * D].
struct Projection {
    const bf16 *qkv;
    const bf16 *q_norm, *k_norm; // [D]
    const float *rope;           // [positions, D]: cosines, then sines
    const uint32_t *slots;       // [tokens]: kNoSlot for a token that is in the cache already
    uint32_t positions;
    float eps;
#if __CUDA_ARCH__ >= 900
    static constexpr bool kFused = true;
    __device__ bool overlaps_prefill() const { return false; }
    template <int D> struct Early {
        Pairs<D> q_norm, k_norm, angles;
    };
    template <int D> __device__ Early<D> early(const Pair &, uint32_t newest) const {
        if (newest >= positions) __trap();
        return {load_pairs<D>(q_norm), load_pairs<D>(k_norm), load_pairs<D>(rope + size_t(newest) * D)};
    }
    __device__ bool fresh(const Pair &pair) const { return slots[pair.token0] != kNoSlot; }
    template <int D, int P> __device__ Ungated gates(const Pair &, uint32_t, uint32_t) const { return {}; }

    template <int D, int N, int S, typename T>
    __device__ void stage(DecodeShared<D, N, S, T> &shared, const Pair &pair, bool fresh, const Early<D> &early) const {
        constexpr int kItems = (8 * N + kDecodeWarps) / kDecodeWarps; // heads of a warp: queries, then the key
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, items = pair.group + fresh;
        uint32_t heads = pair.kv_heads * pair.group;
        const bf16 *token = qkv + size_t(pair.token0) * (heads + 2 * pair.kv_heads) * D;
        const bf16 *q = token + size_t(pair.kv_head * pair.group) * D, *k = token + size_t(heads + pair.kv_head) * D;
        Pairs<D> x[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) { // without branches, so that all loads go out together
            uint32_t item = min(warp + j * kDecodeWarps, items - 1);
            x[j] = load_pairs<D>(item < pair.group ? q + item * D : k);
        }
        if (fresh && warp == kDecodeWarps - 1 && lane < D / 8)
            *reinterpret_cast<uint4 *>(shared.fresh[1] + 8 * lane) = load16(k + size_t(pair.kv_heads) * D + 8 * lane);
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            uint32_t item = warp + j * kDecodeWarps;
            if (item >= items) break;
            bool query = item < pair.group;
            Pairs<D> y = norm_rope<D>(x[j], select(query, early.q_norm, early.k_norm), early.angles, eps);
            bf16 *to = query ? shared.q : shared.fresh[0];
#pragma unroll
            for (int p = 0; p < D / 64; ++p) {
                uint32_t low = lane + 32 * p, high = low + D / 2;
                to[query ? query_vector<N>(item, low / 8) + low % 8 : low] = __float2bfloat16_rn(y.low[p]);
                to[query ? query_vector<N>(item, high / 8) + high % 8 : high] = __float2bfloat16_rn(y.high[p]);
            }
        }
    }
#endif
};

// Grid: rows + spare splits, kv_heads. Sequences without queries or context, and those of more than 8 N columns, are
// left alone. A bad block id, and fused a bad position, stops the kernel.
#define DECODE(SUFFIX, T, D, N, S)                                                                                     \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void decode##SUFFIX##_##D##_##N(                        \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        T *k, T *v,                /* csrc/attention/kv_cache.cuh */                                                   \
        BATCH_POINTERS, void *out, /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks,                          \
        uint32_t overlapped, /* 1: with prefill attention, see `Queries` */                                            \
        float scale,         /* of the scores, with log2(e) */                                                         \
        float *partials,     /* [kv_heads, gridDim.x, 8 N, D + 4] */                                                   \
        uint32_t *arrived) { /* [kv_heads, gridDim.x], zero between launches */                                        \
        DECODE_BODY((decode<D, N, S, T>(                                                                               \
            Queries{q, overlapped}, k, v, {qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks},                \
            {partials, arrived}, {out, padded, heads * D}, heads, scale)))                                             \
    }
#define DECODE_FUSED(SUFFIX, T, D, S)                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void decode_fused##SUFFIX##_##D##_##S(                  \
        const bf16 *qkv,           /* [tokens, (heads + 2 kv_heads) * D] */                                            \
        const bf16 *q_norm,        /* [D] */                                                                           \
        const bf16 *k_norm,        /* [D] */                                                                           \
        const float *rope,         /* [positions, D]: cosines, then sines */                                           \
        const uint32_t *slots,     /* [tokens], or kNoSlot */                                                          \
        T *k, T *v,                /* as above; the new token is written */                                            \
        BATCH_POINTERS, void *out, /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks, uint32_t positions,      \
        float eps, float scale, /* of the scores, with log2(e) */                                                      \
        float *partials,        /* [kv_heads, gridDim.x, 8, D + 4] */                                                  \
        uint32_t *arrived) {    /* [kv_heads, gridDim.x], zero between launches */                                     \
        DECODE_BODY((decode<D, 1, S, T>(Projection{qkv, q_norm, k_norm, rope, slots, positions, eps}, k, v,            \
                                        {qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks},                  \
                                        {partials, arrived}, {out, padded, heads * D}, heads, scale)))                 \
    }
DECODE(, bf16, 64, 1, 2)
DECODE(, bf16, 64, 2, 2)
DECODE(, bf16, 128, 1, 2)
DECODE(, bf16, 128, 2, 2)
DECODE(, bf16, 256, 1, 3)
DECODE(, bf16, 256, 2, 3)
DECODE_FUSED(, bf16, 64, 2)
DECODE_FUSED(, bf16, 128, 2)
DECODE_FUSED(, bf16, 128, 3)
DECODE(_fp8, fp8, 64, 1, 4)
DECODE(_fp8, fp8, 64, 2, 4)
DECODE(_fp8, fp8, 128, 1, 4)
DECODE(_fp8, fp8, 128, 2, 4)
DECODE(_fp8, fp8, 256, 1, 3)
DECODE(_fp8, fp8, 256, 2, 3)
DECODE_FUSED(_fp8, fp8, 64, 4)
DECODE_FUSED(_fp8, fp8, 128, 3)
