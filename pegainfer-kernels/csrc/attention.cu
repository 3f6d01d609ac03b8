// Causal attention over the paged KV cache, for rows of few queries.
//
// The warps of a block, and several blocks (splits), share the KV blocks of one matrix of queries, and `combine` adds
// the parts. Rows of more queries are left to csrc/attention_prefill.cu, or attention_prefill_mma.cu.
#include "attention_mma.cuh"

constexpr int kDecodeWarps = 4;

// Grid: splits, kv_heads, rows of the batch; each block takes an equal share of the row's KV blocks and its warps take
// turns. With one split it writes `out`, else its part: D numerators, the maximum and the sum of each matrix row.
template <int D>
__device__ void decode(const bf16 *q, const bf16 *k, const bf16 *v, Batch batch, bf16 *out,
                       float *parts, // [batch, kv_heads, splits, max_rows, D + 2]
                       uint32_t heads, uint32_t max_rows, float scale) {
    extern __shared__ float shared[]; // [kDecodeWarps, max_rows, D + 2]
    uint32_t splits = gridDim.x, kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = batch.qo_indptr[b], tokens = batch.qo_indptr[b + 1] - token0, kv_len = batch.kv_lens[b];
    uint32_t rows = tokens * group, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (rows == 0 || rows > 16) return;
    uint32_t total = (kv_len + kBlock - 1) / kBlock, share = (total + splits - 1) / splits;
    uint32_t first = min(blockIdx.x * share, total), end = min(first + share, total);
    Queries<D> queries = load_queries<D>(q, token0, tokens, kv_len, 0, heads, kv_head * group, group);
    const uint32_t *table = batch.block_tables + size_t(b) * batch.max_blocks;
    Part<D> part = attend<D>(queries, k, v, table, batch.blocks, kv_heads, kv_head, kv_len, first + warp, end,
                             kDecodeWarps, scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t row = Accumulator::row(lane, 2 * r);
        if (row >= rows) continue;
        float *to = shared + (warp * max_rows + row) * (D + 2);
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            to[dimension(t)] = part.o[t][2 * r];
            to[dimension(t) + 1] = part.o[t][2 * r + 1];
        }
        if (lane % 4 == 0) {
            to[D] = part.max[r];
            to[D + 1] = part.sum[r];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows * D; i += blockDim.x) {
        uint32_t row = i / D, d = i % D;
        float top = -INFINITY, sum = 0.f, o = 0.f;
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) top = fmaxf(top, shared[(w * max_rows + row) * (D + 2) + D]);
#pragma unroll
        for (int w = 0; w < kDecodeWarps; ++w) {
            const float *from = shared + (w * max_rows + row) * (D + 2);
            float weight = from[D] == -INFINITY ? 0.f : exp2_approx(from[D] - top);
            sum += weight * from[D + 1];
            o += weight * from[d];
        }
        if (splits == 1) {
            out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] =
                __float2bfloat16_rn(sum == 0.f ? 0.f : o / sum);
            continue;
        }
        float *to = parts + (((size_t(b) * kv_heads + kv_head) * splits + blockIdx.x) * max_rows + row) * (D + 2);
        to[d] = o;
        if (d == 0) {
            to[D] = top;
            to[D + 1] = sum;
        }
    }
}

// Adds the splits of `decode`. Grid: matrix rows, kv_heads, rows of the batch; D threads.
template <int D>
__device__ void combine(const float *parts, // [batch, kv_heads, splits, max_rows, D + 2]
                        const uint32_t *qo_indptr, bf16 *out, uint32_t heads, uint32_t splits) {
    uint32_t row = blockIdx.x, kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = qo_indptr[b], tokens = qo_indptr[b + 1] - token0, d = threadIdx.x;
    if (tokens * group > 16 || row >= tokens * group) return;
    const size_t stride = size_t(gridDim.x) * (D + 2);
    const float *from = parts + (size_t(b) * kv_heads + kv_head) * splits * stride + row * (D + 2);
    float top = -INFINITY, sum = 0.f, o = 0.f;
    for (uint32_t s = 0; s < splits; ++s) top = fmaxf(top, from[s * stride + D]);
    for (uint32_t s = 0; s < splits; ++s) {
        float max = from[s * stride + D], weight = max == -INFINITY ? 0.f : exp2_approx(max - top);
        sum += weight * from[s * stride + D + 1];
        o += weight * from[s * stride + d];
    }
    out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] =
        __float2bfloat16_rn(sum == 0.f ? 0.f : o / sum);
}

// q, out: [tokens, heads * D]; scale includes log2(e).
#define ATTENTION(D)                                                                                                   \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void decode_##D(                                        \
        const bf16 *q, const bf16 *k, const bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens,               \
        const uint32_t *block_tables, bf16 *out, uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale,    \
        float *parts, uint32_t max_rows) {                                                                             \
        release_successor();                                                                                           \
        wait_for_predecessor();                                                                                        \
        decode<D>(q, k, v, {qo_indptr, kv_lens, block_tables, gridDim.z, max_blocks, blocks}, out, parts, heads, max_rows,        \
                  scale);                                                                                              \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(D) void combine_##D(const float *parts, const uint32_t *qo_indptr,         \
                                                                bf16 *out, uint32_t heads, uint32_t splits) {          \
        release_successor();                                                                                           \
        wait_for_predecessor();                                                                                        \
        combine<D>(parts, qo_indptr, out, heads, splits);                                                              \
    }
ATTENTION(64)
ATTENTION(128)
ATTENTION(256)
