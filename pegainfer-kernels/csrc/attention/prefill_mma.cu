// Causal attention over the paged KV cache for sequences of many queries (prefill), on every GPU but Hopper, which has
// csrc/attention/prefill_wgmma.cu, and on Hopper for a cache in FP8 that cannot be widened in the workspace.
//
//   out = softmax(q kᵀ scale) v over the tokens that each query sees; scale includes log2(e), for base 2
// q, out: [tokens, heads * D] bf16; k, v: csrc/attention/kv_cache.cuh, bf16 or FP8, which is widened to bf16, exactly;
// its scales multiply scores and weights in f32. Compute capability 8.0 and later, D of 64, 128 and 256, sequences of
// more than 16 matrix rows; the others of the batch are left to the decode kernels. At most 99 KB of shared memory a
// block. Reference: src/cpu/attention/mod.rs.
//
// Technique: FlashAttention-2 (arXiv 2307.08691): mma.sync, online softmax in f32, K and V by cp.async, V of a KV tile
// while its scores are computed, K of the next while V is multiplied. A block has a tile of 128 rows of queries
// (csrc/attention/query_tiles.cuh). A warp has 32 of them, so that each fragment of K and V serves two multiplications,
// and 16 of heads of 256. KV tiles go from the last, which causality masks, to the first. Bound by the tensor cores and
// by reads of fragments from shared memory: 327 TFLOP/s at 4k tokens and 360 at 16k on an H200 (32 heads of 128), of
// about 620 that mma.sync reaches there (lab/attention.md).
#include "attention/prefill_mma.cuh"
#include "attention/softmax.cuh"
#include "abi/attention_prefill_mma.h"

// The rows of a warp: scores, weights and output of its strips.
template <int D, typename T> struct WarpAttention {
    using Size = PrefillSizes<D, T>;
    static constexpr int kStrips = Size::kStrips;
    Accumulator o[kStrips][D / 8], s[kStrips][kTokens / 8];
    uint4 q[Size::kKeepsQueries ? D / 16 : 1];
    Softmax softmax[kStrips];
    int last[kStrips][2];           // the last token that each row sees, less the columns before the lane's first
    uint32_t queries, keys, values; // the lane's places in the tiles

    __device__ __forceinline__ WarpAttention(uint32_t shared, const QueryTile &tile, uint32_t group) {
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, r = lane % 8;
        uint32_t row = warp * (16 * kStrips) + matrix % 2 * 8 + r;
        queries = shared + row * 128 + (matrix / 2 ^ r) * 16;
        keys = shared + Size::kKeysAt + (matrix / 2 * 8 + r) * 128 + (matrix % 2 ^ r) * 16;
        values = shared + Size::kValuesAt + (matrix % 2 * 8 + r) * 128 + (matrix / 2 ^ r) * 16;
#pragma unroll
        for (int m = 0; m < kStrips; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t at = tile.row0 + warp * (16 * kStrips) + 16 * m + Accumulator::row(lane, 2 * i);
                last[m][i] = int(tile.first + min(at, tile.rows - 1) / group) - int(Accumulator::column(lane, 0));
            }
#pragma unroll
            for (int t = 0; t < D / 8; ++t) o[m][t] = Accumulator{};
        }
    }

    // Operand A of 16 dimensions from 16 i on, of a strip.
    __device__ __forceinline__ uint4 load_query(int i, int strip) const {
        return load_matrices((queries ^ i % 4 * 32) + i / 4 * (kRows * 128) + strip * (16 * 128));
    }
    __device__ __forceinline__ void load_queries() {
#pragma unroll
        for (int i = 0; i < D / 16 && Size::kKeepsQueries; ++i) q[i] = load_query(i, 0);
    }

    // s = q kᵀ
    __device__ __forceinline__ void scores() {
#pragma unroll
        for (int m = 0; m < kStrips; ++m)
#pragma unroll
            for (int t = 0; t < int(kTokens) / 8; ++t) s[m][t] = Accumulator{};
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            uint4 a[kStrips];
#pragma unroll
            for (int m = 0; m < kStrips; ++m) a[m] = Size::kKeepsQueries ? q[i] : load_query(i, m);
#pragma unroll
            for (int b = 0; b < int(Size::kKvBlocks); ++b) {
                uint4 k = load_matrices((keys ^ i % 4 * 32) + i / 4 * (kBlock * 128) + b * Size::kSlab);
#pragma unroll
                for (int m = 0; m < kStrips; ++m) {
                    mma(s[m][2 * b], a[m], k.x, k.y);
                    mma(s[m][2 * b + 1], a[m], k.z, k.w);
                }
            }
        }
    }

    // Multiplies scores, or weights, by the scales of a cache in FP8.
    __device__ __forceinline__ void multiply(const float *scales) {
#pragma unroll
        for (int t = 0; t < int(kTokens) / 8; ++t) {
            float2 by = reinterpret_cast<const float2 *>(scales)[4 * t + threadIdx.x % 4];
#pragma unroll
            for (int m = 0; m < kStrips; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][t][i] *= i % 2 ? by.y : by.x;
        }
    }

    // From scores of KV tile `kv` to weights; rescales what is there of the output.
    template <bool Masked> __device__ __forceinline__ void weigh(uint32_t kv, float scale) {
#pragma unroll
        for (int m = 0; m < kStrips; ++m) {
            const int limits[2] = {last[m][0] - int(kv * kTokens), last[m][1] - int(kv * kTokens)};
            auto &scores = reinterpret_cast<float (&)[kTokens / 2]>(s[m]);
            float2 by = softmax[m].template apply<Masked>(scores, limits, scale);
#pragma unroll
            for (int t = 0; t < D / 8; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][t][i] *= i < 2 ? by.x : by.y;
        }
    }

    // o += p v
    __device__ __forceinline__ void add_values() {
#pragma unroll
        for (int b = 0; b < int(Size::kKvBlocks); ++b) {
            uint4 p[kStrips];
#pragma unroll
            for (int m = 0; m < kStrips; ++m) p[m] = operand_a(s[m][2 * b], s[m][2 * b + 1]);
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                uint4 v = load_matrices<true>((values ^ i % 4 * 32) + i / 4 * (kBlock * 128) + b * Size::kSlab);
#pragma unroll
                for (int m = 0; m < kStrips; ++m) {
                    mma(o[m][2 * i], p[m], v.x, v.y);
                    mma(o[m][2 * i + 1], p[m], v.z, v.w);
                }
            }
        }
    }

    // Writes o / sum. The lanes of a quad exchange what they hold so that each writes eight neighbouring elements.
    __device__ __forceinline__ void write(bf16 *out, const QueryTile &tile, uint32_t heads, uint32_t group) {
        uint32_t quad = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
        for (int j = 0; j < 2 * kStrips; ++j) {
            int m = j / 2, r = j % 2;
            float inverse = 1.f / reduce_quad(softmax[m].sum[r], Add());
            uint32_t row = tile.row0 + warp * (16 * kStrips) + 16 * m + Accumulator::row(threadIdx.x % 32, 2 * r);
            bf16 *to = out + (size_t(tile.token0 + row / group) * heads + tile.kv_head * group + row % group) * D;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                uint32_t w[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const Accumulator &from = o[m][4 * i + t];
                    w[t] = narrow(from[2 * r] * inverse, from[2 * r + 1] * inverse);
                }
                transpose_quad(w, quad);
                if (row < tile.rows)
                    *reinterpret_cast<uint4 *>(to + 32 * i + 8 * quad) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
};

template <int D, typename T>
__device__ void prefill(const bf16 *q, const T *k, const T *v, const PrefillBatch &batch, bf16 *out, float scale) {
    using Size = PrefillSizes<D, T>;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t group = batch.heads / batch.kv_heads;
    const QueryTile tile = find_tile<kRows, kTokens>(batch, blockIdx.x);
    if (tile.rows == 0) return;
    KvFetcher<D, T> fetcher(batch, tile, shared);
    uint32_t kv = tile.kv_tiles - 1;
    fetcher.look_up(kv);
    fetch_queries<D>(shared, q, tile, batch.heads, group);
    WarpAttention<D, T> warp(shared_address(shared), tile, group);
    if (Size::kKeepsQueries) {
        copies_wait_all();
        __syncthreads();
        warp.load_queries();
        __syncthreads();
    }
    fetcher.fetch(k, false);
    // KV tiles that all rows of the tile see whole.
    const uint32_t clear = (tile.first + tile.row0 / group + 1) / kTokens;
    for (;; --kv) {
        copies_wait<0>();
        if (Size::kFp8) fetcher.widen(false);
        __syncthreads(); // the keys are there, and the values before are done with
        fetcher.fetch(v, true);
        if (kv > 0) fetcher.look_up(kv - 1);
        warp.scores();
        if (Size::kFp8) warp.multiply(fetcher.scales(false));
        copies_wait<0>();
        if (Size::kFp8) fetcher.widen(true);
        __syncthreads(); // the values are there, and the keys are done with
        if (kv > 0) fetcher.fetch(k, false);
        if (kv >= clear) warp.template weigh<true>(kv, scale);
        else warp.template weigh<false>(kv, scale);
        if (Size::kFp8) warp.multiply(fetcher.scales(true));
        warp.add_values();
        if (kv == 0) break;
    }
    warp.write(out, tile, batch.heads, group);
}

// Grid: tiles of 128 rows times KV heads; blocks beyond them have nothing to do.
#define PREFILL(SUFFIX, D, T)                                                                                          \
    extern "C" __global__ __launch_bounds__(32 * PrefillSizes<D, T>::kWarps, D > kLargeHead ? 1 : 2) void              \
    prefill_mma##SUFFIX##_##D(                                                                                         \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        const T *k,                /* csrc/attention/kv_cache.cuh */                                                   \
        const T *v,                /* as k */                                                                          \
        BATCH_POINTERS, bf16 *out, /* [tokens, heads * D] */                                                           \
        uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks,                        \
        float scale) { /* of the scores, with log2(e) */                                                               \
        start_after_predecessor();                                                                                     \
        const PrefillBatch batch{{qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks}, heads, kv_heads};       \
        prefill<D, T>(q, k, v, batch, out, scale);                                                                     \
    }
PREFILL(, 64, bf16)
PREFILL(, 128, bf16)
PREFILL(, 256, bf16)
PREFILL(_fp8, 64, fp8)
PREFILL(_fp8, 128, fp8)
PREFILL(_fp8, 256, fp8)
