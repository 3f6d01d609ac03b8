// Decode attention (csrc/attention/decode.cuh) of a projection with output gates, fused with what is around it: QK
// norms, partial rotary embedding, the write to the cache, attention, and its gate, in one launch.
//
//   out = softmax(q kᵀ scale) v * sigmoid(gate), with q, k = rope(norm(projection))
// Sequences of one query, heads of 256, at most 8 heads a KV head; compute capability 9.0 and 10.x. Four stages (keys
// or values of 16 tokens, in FP8 both) for each warp's ring where at most one pair of sequence and KV head falls on 32
// multiprocessors, else three. Bound by memory, as csrc/attention/decode.cuh; figures:
// docs/benchmarks/h200-qwen35-4b.md. Reference: src/cpu/gated_qkv.rs, src/cpu/attention/mod.rs, src/cpu/gate.rs.
#include "attention/decode.cuh"
#include "attention/gated_head.cuh"
#include "abi/attention_decode_gated.h"

// Of P times four elements.
template <int P> struct Gates {
    uint2 of[P];
    __device__ __forceinline__ uint2 apply(int p, uint2 x) const {
        return make_uint2(gated(x.x, of[p].x), gated(x.y, of[p].y));
    }
};

// projected: [tokens, (2 heads + 2 kv_heads) * D].
struct GatedProjection {
    const bf16 *projected;
    const float *q_norm, *k_norm;   // [D]
    const float *rope;              // [positions, rotary]: cosines, then sines
    const uint32_t *rope_positions; // [tokens]: of rotary embeddings, which images before a token move
    const uint32_t *slots;          // [tokens]: kNoSlot for a token that is in the cache already
    uint32_t positions, rotary;
    float eps;
#if __CUDA_ARCH__ >= 900
    static constexpr bool kFused = true;
    __device__ bool overlaps_prefill() const { return false; }
    template <int D> struct Early {
        Factors q, k;
    };
    template <int D> __device__ Early<D> early(const Pair &pair, uint32_t) const {
        static_assert(D == 256, "a head is one vector for each lane of a warp");
        uint32_t lane = threadIdx.x % 32, position = rope_positions[pair.token0];
        if (position >= positions) __trap();
        const Angles angles = {rope + size_t(position) * rotary};
        return {load_factors(q_norm, angles, lane, rotary), load_factors(k_norm, angles, lane, rotary)};
    }
    __device__ bool fresh(const Pair &pair) const { return slots[pair.token0] != kNoSlot; }

    // The projection of the pair's token, from its first query head on.
    template <int D> __device__ __forceinline__ const bf16 *token(const Pair &pair) const {
        return projected + size_t(pair.token0) * (2 * pair.group + 2) * pair.kv_heads * D;
    }
    template <int D, int P> __device__ Gates<P> gates(const Pair &pair, uint32_t column, uint32_t d) const {
        uint32_t head = pair.kv_head * pair.group + column;
        Gates<P> out;
#pragma unroll
        for (int p = 0; p < P; ++p)
            out.of[p] = *reinterpret_cast<const uint2 *>(token<D>(pair) + (2 * head + 1) * D + d + p * (D / P));
        return out;
    }

    template <int D, int N, int S, typename T>
    __device__ void stage(DecodeShared<D, N, S, T> &shared, const Pair &pair, bool fresh, const Early<D> &early) const {
        constexpr int kItems = (8 * N + kDecodeWarps) / kDecodeWarps; // heads of a warp: queries, then the key
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, items = pair.group + fresh;
        uint32_t heads = pair.kv_heads * pair.group;
        const bf16 *q = token<D>(pair) + size_t(2 * pair.kv_head * pair.group) * D + 8 * lane;
        const bf16 *k = token<D>(pair) + size_t(2 * heads + pair.kv_head) * D + 8 * lane;
        uint4 x[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) { // without branches, so that all loads go out together
            uint32_t item = min(warp + j * kDecodeWarps, items - 1);
            x[j] = load16(item < pair.group ? q + 2 * item * D : k);
        }
        if (fresh && warp == kDecodeWarps - 1)
            *reinterpret_cast<uint4 *>(shared.fresh[1] + 8 * lane) = load16(k + size_t(pair.kv_heads) * D);
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            uint32_t item = warp + j * kDecodeWarps;
            if (item >= items) break;
            bool query = item < pair.group;
            bf16 *to = query ? shared.q + query_vector<N>(item, lane) : shared.fresh[0] + 8 * lane;
            *reinterpret_cast<uint4 *>(to) =
                norm_rope(x[j], select(query, early.q, early.k), rotates_with(lane, rotary), 32, D, eps);
        }
    }
#endif
};

// Grid: rows + spare splits, kv_heads. S stages of 16 tokens' keys or values for each warp. A bad block id or position
// stops the kernel.
#define GATED_DECODE(SUFFIX, T, D, S)                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void gated_decode##SUFFIX##_##D##_##S(                  \
        const bf16 *projected,          /* [tokens, (2 heads + 2 kv_heads) * D], csrc/attention/gated_head.cuh */      \
        const float *q_norm,            /* [D] */                                                                      \
        const float *k_norm,            /* [D] */                                                                      \
        const float *rope,              /* [positions, rotary]: cosines, then sines */                                 \
        const uint32_t *rope_positions, /* [tokens] */                                                                 \
        const uint32_t *slots,          /* [tokens], or kNoSlot */                                                     \
        T *k, T *v,                     /* csrc/attention/kv_cache.cuh; the new token is written */                    \
        BATCH_POINTERS, void *out,      /* [tokens, heads * D], csrc/common/activation.cuh */                          \
        uint32_t padded, uint32_t heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks, uint32_t positions,      \
        uint32_t rotary, float eps, float scale, /* of the scores, with log2(e) */                                     \
        float *partials,                         /* [kv_heads, gridDim.x, 8, D + 4] */                                 \
        uint32_t *arrived) {                     /* [kv_heads, gridDim.x], zero between launches */                    \
        DECODE_BODY((decode<D, 1, S, T>(                                                                               \
            GatedProjection{projected, q_norm, k_norm, rope, rope_positions, slots, positions, rotary, eps}, k, v,     \
            {qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks}, {partials, arrived},                         \
            {out, padded, heads * D}, heads, scale)))                                                                  \
    }
GATED_DECODE(, bf16, 256, 3)
GATED_DECODE(, bf16, 256, 4)
GATED_DECODE(_fp8, fp8, 256, 3)
GATED_DECODE(_fp8, fp8, 256, 4)
