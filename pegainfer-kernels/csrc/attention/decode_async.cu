// Causal attention over the paged KV cache, for sequences of few queries (decode), on GPUs without
// csrc/attention/decode_bulk.cu.
//
// Formula and layouts: csrc/attention/mma.cuh. Serves compute capability 8.0 to 8.9 and 12.x, head sizes 64, 128 and
// 256, sequences with at most 16 matrix rows (queries times heads of a group); the others of the batch are left to
// csrc/attention/prefill_mma.cu. Reference: src/cpu/attention/mod.rs. Technique: FlashDecoding split-KV (Dao et al.
// 2023): the KV blocks of a sequence are shared by the warps of a block and by several blocks (splits), whose partial
// softmaxes `combine` merges in a second launch. Bound by memory: K and V are read once for each KV head.
#include "attention/mma.cuh"
#include "abi/attention_decode_async.h"
#include "limits.h"

using namespace limits::attention;

// Grid: splits, kv_heads, rows of the batch; each block takes an equal share of the row's KV blocks, its warps every
// fourth. With one split it writes `out`, else its partial softmax: D numerators, the maximum and the sum of each
// matrix row.
template <int D, typename T>
__device__ void decode(const bf16 *q, const T *k, const T *v, Batch batch, bf16 *out,
                       float *partials, // [batch, kv_heads, splits, max_rows, D + 2]
                       uint32_t heads, uint32_t max_rows, float scale) {
    extern __shared__ float shared[]; // [kDecodeWarps, max_rows, D + 2]
    uint32_t splits = gridDim.x, kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = batch.qo_indptr[b], tokens = batch.qo_indptr[b + 1] - token0, kv_len = batch.kv_lens[b];
    uint32_t rows = tokens * group, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (rows == 0 || rows > kDecodeRows) return;
    uint32_t total = (kv_len + kBlock - 1) / kBlock, share = (total + splits - 1) / splits;
    uint32_t first = min(blockIdx.x * share, total), end = min(first + share, total);
    Queries<D> queries = load_queries<D>(q, token0, tokens, kv_len, 0, heads, kv_head * group, group);
    const uint32_t *table = batch.block_tables + size_t(b) * batch.max_blocks;
    Partial<D> partial = attend<D, T>(
        queries, k, v, table, batch.blocks, kv_heads, kv_head, kv_len, first + warp, end, kDecodeWarps, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t row = Accumulator::row(lane, 2 * r);
        if (row >= rows) continue;
        float *to = shared + (warp * max_rows + row) * (D + 2);
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            to[dimension(t)] = partial.o[t][2 * r];
            to[dimension(t) + 1] = partial.o[t][2 * r + 1];
        }
        if (lane % 4 == 0) {
            to[D] = partial.max[r];
            to[D + 1] = partial.sum[r];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows * D; i += blockDim.x) {
        uint32_t row = i / D, d = i % D;
        float new_max = -INFINITY, sum = 0.f, o = 0.f;
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) new_max = fmaxf(new_max, shared[(w * max_rows + row) * (D + 2) + D]);
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) {
            const float *from = shared + (w * max_rows + row) * (D + 2);
            float weight = from[D] == -INFINITY ? 0.f : exp2_approx(from[D] - new_max);
            sum += weight * from[D + 1];
            o += weight * from[d];
        }
        if (splits == 1) {
            out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] =
                __float2bfloat16_rn(sum == 0.f ? 0.f : o / sum);
            continue;
        }
        float *to = partials + (((size_t(b) * kv_heads + kv_head) * splits + blockIdx.x) * max_rows + row) * (D + 2);
        to[d] = o;
        if (d == 0) {
            to[D] = new_max;
            to[D + 1] = sum;
        }
    }
}

// Merges the splits of `decode`. Grid: matrix rows, kv_heads, rows of the batch; D threads.
template <int D>
__device__ void combine(const float *partials, // [batch, kv_heads, splits, max_rows, D + 2]
                        const uint32_t *qo_indptr, bf16 *out, uint32_t heads, uint32_t splits) {
    uint32_t row = blockIdx.x, kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = qo_indptr[b], tokens = qo_indptr[b + 1] - token0, d = threadIdx.x;
    if (tokens * group > kDecodeRows || row >= tokens * group) return;
    const size_t stride = size_t(gridDim.x) * (D + 2);
    const float *from = partials + (size_t(b) * kv_heads + kv_head) * splits * stride + row * (D + 2);
    float new_max = -INFINITY, sum = 0.f, o = 0.f;
    for (uint32_t s = 0; s < splits; ++s) new_max = fmaxf(new_max, from[s * stride + D]);
    for (uint32_t s = 0; s < splits; ++s) {
        float max = from[s * stride + D], weight = max == -INFINITY ? 0.f : exp2_approx(max - new_max);
        sum += weight * from[s * stride + D + 1];
        o += weight * from[s * stride + d];
    }
    out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] =
        __float2bfloat16_rn(sum == 0.f ? 0.f : o / sum);
}

#define DECODE(SUFFIX, D, T)                                                                                           \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void decode##SUFFIX##_##D(                              \
        const bf16 *q,                                                     /* [tokens, heads * D] */                   \
        const T *k,                                                        /* csrc/attention/kv_cache.cuh */           \
        const T *v,                                                        /* as k */                                  \
        BATCH_POINTERS, bf16 *out,                                         /* [tokens, heads * D] */                   \
        uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale, /* of the scores, with log2(e) */           \
        float *partials, /* [gridDim.z, kv_heads, splits, max_rows, D + 2] */                                          \
        uint32_t max_rows) {                                                                                           \
        start_after_predecessor();                                                                                     \
        decode<D, T>(q, k, v, {qo_indptr, kv_lens, block_tables, gridDim.z, max_blocks, blocks}, out, partials, heads, \
                     max_rows, scale);                                                                                 \
    }
#define COMBINE(D)                                                                                                     \
    extern "C" __global__ __launch_bounds__(D) void combine_##D(                                                       \
        const float *partials,     /* as above, gridDim.x is max_rows */                                               \
        const uint32_t *qo_indptr, /* [gridDim.z + 1] */                                                               \
        bf16 *out,                 /* [tokens, heads * D] */                                                           \
        uint32_t heads, uint32_t splits) {                                                                             \
        start_after_predecessor();                                                                                     \
        combine<D>(partials, qo_indptr, out, heads, splits);                                                           \
    }
DECODE(, 64, bf16)
DECODE(, 128, bf16)
DECODE(, 256, bf16)
DECODE(_fp8, 64, fp8)
DECODE(_fp8, 128, fp8)
DECODE(_fp8, 256, fp8)
COMBINE(64)
COMBINE(128)
COMBINE(256)
