// Causal attention over the paged KV cache for sequences of many queries (prefill), on Hopper.
//
//   out = softmax(q kᵀ scale) v over the tokens that each query sees; scale includes log2(e), for base 2
// q, out: [tokens, heads * D] bf16; k, v: csrc/attention/kv_cache.cuh; prefill_widened: keys and values of some KV
// heads of a cache in FP8, which csrc/attention/widen_kv.cu has widened to bf16. Compute capability 9.0 (sm_90a), D of
// 64, 128 and 256, sequences of more than 16 matrix rows; the others of the batch are left to
// csrc/attention/decode_bulk.cu. Reference: src/cpu/attention/mod.rs. Other GPUs: csrc/attention/prefill_mma.cu.
//
// Techniques: FlashAttention-3 (arXiv 2407.08608): warp specialisation with register reallocation, wgmma, the softmax
// of one KV tile overlapped with the GEMM of the one before; bulk copies by the copy engine (TMA); persistent blocks
// that draw tiles from a counter, the longest first. Bound by the tensor cores: 635 TFLOP/s at 4k tokens, 681 at 8k, on
// an H200 with 700 W (lab/attention.md), of about 800 that large GEMMs reach.
//
// The queries of a sequence that share a KV head are one matrix: row r of it is query r / group, head r % group of the
// group, so that K and V are read once for the whole group. A tile is 128 such rows, 64 for each of two consumer
// warpgroups; a third warpgroup, the producer, fetches (csrc/attention/prefill_wgmma.cuh) and leaves its registers to
// the others. What the consumers do: csrc/attention/prefill_consumer.cuh.
#include "common/activation.cuh"
#include "attention/prefill_consumer.cuh"
#include "abi/attention_prefill_wgmma.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Transposes the half words of four lanes, in two words: eight bytes that lie side by side.
__device__ __forceinline__ uint2 transpose_quad(uint2 w, uint32_t quad) {
    uint32_t other = __shfl_xor_sync(kAll, quad & 2 ? w.x : w.y, 2), own = quad & 2 ? w.y : w.x;
    uint32_t low = quad & 2 ? other : own, high = quad & 2 ? own : other; // of lanes quad & 1 and (quad & 1) + 2
    uint32_t keep = __byte_perm(low, high, quad & 1 ? 0x7632 : 0x5410),
             give = __byte_perm(low, high, quad & 1 ? 0x5410 : 0x7632);
    uint32_t got = __shfl_xor_sync(kAll, give, 1);
    uint32_t even = quad & 1 ? got : keep, odd = quad & 1 ? keep : got;
    return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// Writes o / sum. The lanes of a quad exchange what they hold so that each writes eight neighbouring elements.
template <int D> struct Writer {
    ActivationOut out;

    __device__ void operator()(AttentionConsumer<D> &c, const PrefillBatch &batch, const QueryTile &tile,
                               uint32_t row0) const {
        using Size = Sizes<D>;
        uint32_t group = batch.heads / batch.kv_heads, quad = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float inverse = 1.f / reduce_quad(c.softmax.sum[r], Add());
            uint32_t row = row0 + 8 * r, token = tile.token0 + row / group;
            uint32_t column = (tile.kv_head * group + row % group) * D + 8 * quad;
            bool inside = row < tile.rows;
            auto pair = [&](int t) { // of columns 8 t + 2 quad
                const float *from = &c.o[t * 4 / Size::kPart][t * 4 % Size::kPart + 2 * r];
                return narrow(from[0] * inverse, from[1] * inverse);
            };
            if (D >= 128 && out.rounds()) {
#pragma unroll
                for (int block = 0; block < D / 128; ++block) {
                    uint32_t w[16], largest = 0;
#pragma unroll
                    for (int t = 0; t < 16; ++t)
                        w[t] = pair(16 * block + t), largest = __vmaxu2(largest, w[t] & 0x7fff7fffu);
                    Divisor by(amax_over_448(reduce_quad(max(largest & 0xffffu, largest >> 16), MaxBits())));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        uint2 codes = transpose_quad(make_uint2(by.encode4(make_uint2(w[4 * i], w[4 * i + 1])),
                                                                by.encode4(make_uint2(w[4 * i + 2], w[4 * i + 3]))),
                                                     quad);
                        if (inside) *reinterpret_cast<uint2 *>(out.codes(token, column + 128 * block + 32 * i)) = codes;
                    }
                    if (inside && quad == 0) *out.scale(token, column + 128 * block) = by.scale;
                }
                continue;
            }
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                uint32_t w[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) w[t] = pair(4 * i + t);
                transpose_quad(w, quad);
                if (inside)
                    *reinterpret_cast<uint4 *>(out.values(token, column + 32 * i)) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
};

#define BODY(D)                                                                                                        \
    prefill<D>(q, k, v, PrefillBatch{{qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks}, heads, kv_heads},   \
               Writer<D>{{out, padded, heads * D}}, scale)
#define WIDENED_BODY(D)                                                                                                \
    prefill<D>(                                                                                                        \
        q, k, v,                                                                                                       \
        WidenedBatch{{{qo_indptr, kv_lens, nullptr, rows, 0, 0}, heads, kv_heads}, first_head, heads_here, capacity},  \
        Writer<D>{{out, padded, heads * D}}, scale)
#else
#define WIDENED_BODY(D) __trap()
#define BODY(D) __trap() // the launcher takes csrc/attention/prefill_mma.cu
#endif

// Grid: as many blocks as multiprocessors, fewer where decode attention is overlapped. A bad block id stops the kernel.
#define PREFILL(D)                                                                                                     \
    extern "C" __global__ __launch_bounds__((1 + kConsumers) * kWarpgroup, 1) void prefill_##D(                        \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        const bf16 *k,             /* [blocks, kv_heads, D / 64, 16, 64], csrc/attention/kv_cache.cuh */               \
        const bf16 *v,             /* as k */                                                                          \
        BATCH_POINTERS, void *out, /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks,       \
        float scale) { /* of the scores, with log2(e) */                                                               \
        BODY(D);                                                                                                       \
    }
PREFILL(64)
PREFILL(128)
PREFILL(256)

// The same over `heads_here` KV heads from `first_head` on.
#define PREFILL_WIDENED(D)                                                                                             \
    extern "C" __global__ __launch_bounds__((1 + kConsumers) * kWarpgroup, 1) void prefill_widened_##D(                \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        const bf16 *k,             /* [capacity, heads_here, D / 64, 16, 64], csrc/attention/kv_cache.cuh */           \
        const bf16 *v,             /* as k */                                                                          \
        const uint32_t *qo_indptr, /* [rows + 1] */                                                                    \
        const uint32_t *kv_lens,   /* [rows] */                                                                        \
        void *out,                 /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t first_head, uint32_t heads_here,   \
        uint32_t capacity, float scale) { /* of the scores, with log2(e) */                                            \
        WIDENED_BODY(D);                                                                                               \
    }
PREFILL_WIDENED(64)
PREFILL_WIDENED(128)
PREFILL_WIDENED(256)
