// Causal attention over the paged KV cache, for rows of any length.
//
// The queries of a row that share a KV head are one matrix: row r of it is query r / group, head r % group of the group.
// A warp takes 16 such rows and walks KV blocks of 16 tokens: S[16, 16] = q kᵀ, online softmax in f32, O[16, D] += p v.
// K and V go from memory straight to the tensor cores' registers, 16 bytes a load (the layout is in common.cuh); the
// columns of S stand for tokens in an order that makes the registers of p what the second product wants: columns 2j,
// 2j + 1 of tile 0 are tokens 4j, 4j + 1, those of tile 1 are tokens 4j + 2, 4j + 3. The second product wants V by
// columns: the tensor core transposes 8 x 8 pieces, whose columns 2j, 2j + 1 are then dimensions 8j + 2i, 8j + 2i + 1 of
// 32, for piece i of 4.
//
// Few queries (decode): the warps of a block, and several blocks (splits), share the KV blocks of one matrix, and
// `combine` adds the parts. Many (prefill): each warp has its own 16 rows, and the block's warps read the same KV.
#include "common.cuh"

struct Batch {
    const uint32_t *qo_indptr;    // [rows + 1]
    const uint32_t *kv_lens;      // [rows]
    const uint32_t *block_tables; // [rows, max_blocks]
    uint32_t max_blocks, blocks;
};

// Part of a softmax: numerator and denominator relative to exp2(max), for rows lane / 4 and lane / 4 + 8.
template <int D> struct Part {
    float o[D / 8][4]; // dimensions dimension(t), + 1 of the first row, then of the second
    float max[2], sum[2];
};

// Dimension of the first of the two columns that a lane has in tile t of the output.
__device__ __forceinline__ uint32_t dimension(int t) { return t / 4 * 32 + threadIdx.x % 4 * 8 + t % 4 * 2; }

__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Queries of 16 rows as the tensor core's a, 32 columns a piece.
template <int D> struct Queries {
    uint4 low[D / 32], high[D / 32];
    uint32_t last[2]; // the last token that each row sees
};

template <int D>
__device__ Queries<D> load_queries(const bf16 *q, uint32_t token0, uint32_t tokens, uint32_t kv_len, uint32_t row0,
                                   uint32_t heads, uint32_t head0, uint32_t group) {
    Queries<D> out;
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // Rows beyond the end repeat the last one; what they give is not written.
        uint32_t row = min(row0 + lane / 4 + 8 * i, tokens * group - 1), token = row / group;
        const bf16 *from = q + (size_t(token0 + token) * heads + head0 + row % group) * D + lane % 4 * 8;
        out.last[i] = kv_len - tokens + token;
#pragma unroll
        for (int c = 0; c < D / 32; ++c) (i ? out.high : out.low)[c] = load16(from + 32 * c);
    }
    return out;
}

// Attends to KV blocks first, first + step, ... below end.
template <int D>
__device__ Part<D> attend(const Queries<D> &q, const bf16 *k, const bf16 *v, const uint32_t *table, uint32_t blocks,
                          uint32_t kv_heads, uint32_t kv_head, uint32_t kv_len, uint32_t first, uint32_t end,
                          uint32_t step, float scale) {
    Part<D> part = {};
    part.max[0] = part.max[1] = -INFINITY;
    uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    uint32_t row = 4 * (group / 2) + group % 2; // token of a block whose key this lane loads first
    for (uint32_t i = first; i < end; i += step) {
        uint32_t id = table[i];
        if (id >= blocks) __trap();
        size_t base = (size_t(id) * kv_heads + kv_head) * kBlock * D;
        uint4 key[2][D / 32], value[2][D / 32];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {
                key[r][c] = load16(k + base + cache_piece(row + 2 * r, 4 * c + quad));
                value[r][c] = load16(v + base + cache_piece(row + 2 * r, 4 * c + quad));
            }
            // Beyond the end the cache may hold anything, and 0 * NaN is NaN.
            if (i * kBlock + row + 2 * r >= kv_len) {
#pragma unroll
                for (int c = 0; c < D / 32; ++c) value[r][c] = make_uint4(0, 0, 0, 0);
            }
        }
        float s[2][4] = {};
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            mma32(s[0], q.low[c], q.high[c], key[0][c]);
            mma32(s[1], q.low[c], q.high[c], key[1][c]);
        }
        uint32_t token = i * kBlock + 4 * quad;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float p[4];
            float top = part.max[r];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                p[j] = token + j <= q.last[r] ? s[j / 2][2 * r + j % 2] * scale : -INFINITY;
                top = fmaxf(top, p[j]);
            }
            top = fmaxf(top, __shfl_xor_sync(kAll, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
            float zero = top == -INFINITY ? 0.f : top; // nothing visible yet: all weights are 0
            float shrink = exp2f(part.max[r] - zero);
            part.max[r] = top;
            part.sum[r] *= shrink;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // The sum takes the weight as the product does, so that rounding does not tilt the mean.
                p[j] = round_bf16(exp2f(p[j] - zero));
                part.sum[r] += p[j];
                s[j / 2][2 * r + j % 2] = p[j];
            }
#pragma unroll
            for (int t = 0; t < D / 8; ++t) {
                part.o[t][2 * r] *= shrink;
                part.o[t][2 * r + 1] *= shrink;
            }
        }
        uint32_t a0 = narrow(s[0][0], s[0][1]), a1 = narrow(s[0][2], s[0][3]);
        uint32_t a2 = narrow(s[1][0], s[1][1]), a3 = narrow(s[1][2], s[1][3]);
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            const uint32_t *first = reinterpret_cast<const uint32_t *>(&value[0][t / 4]);
            const uint32_t *second = reinterpret_cast<const uint32_t *>(&value[1][t / 4]);
            mma(part.o[t], a0, a1, a2, a3, transposed(first[t % 4]), transposed(second[t % 4]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        part.sum[r] += __shfl_xor_sync(kAll, part.sum[r], 1);
        part.sum[r] += __shfl_xor_sync(kAll, part.sum[r], 2);
    }
    return part;
}

constexpr int kPrefillWarps = 4;

// Grid: tiles of 64 matrix rows (the last ones first: they see most), kv_heads, rows of the batch. Rows of the batch
// with at most 16 matrix rows are left to `decode`.
template <int D>
__device__ void prefill(const bf16 *q, const bf16 *k, const bf16 *v, Batch batch, bf16 *out, uint32_t heads,
                        float scale) {
    uint32_t kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = batch.qo_indptr[b], tokens = batch.qo_indptr[b + 1] - token0, kv_len = batch.kv_lens[b];
    uint32_t row0 = (gridDim.x - 1 - blockIdx.x) * 16 * kPrefillWarps + threadIdx.x / 32 * 16;
    uint32_t rows = tokens * group;
    if (rows <= 16 || row0 >= rows) return;
    Queries<D> queries = load_queries<D>(q, token0, tokens, kv_len, row0, heads, kv_head * group, group);
    uint32_t end = (kv_len - tokens + min(row0 + 15, rows - 1) / group) / kBlock + 1;
    const uint32_t *table = batch.block_tables + size_t(b) * batch.max_blocks;
    Part<D> part = attend<D>(queries, k, v, table, batch.blocks, kv_heads, kv_head, kv_len, 0, end, 1, scale);
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t row = row0 + lane / 4 + 8 * r;
        if (row >= rows) continue;
        bf16 *to = out + (size_t(token0 + row / group) * heads + kv_head * group + row % group) * D;
        float inverse = 1.f / part.sum[r];
#pragma unroll
        for (int t = 0; t < D / 8; ++t)
            *reinterpret_cast<uint32_t *>(to + dimension(t)) = narrow(part.o[t][2 * r] * inverse, part.o[t][2 * r + 1] * inverse);
    }
}

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
        uint32_t row = lane / 4 + 8 * r;
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
            float weight = from[D] == -INFINITY ? 0.f : exp2f(from[D] - top);
            sum += weight * from[D + 1];
            o += weight * from[d];
        }
        if (splits == 1) {
            out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] =
                __float2bfloat16_rn(o / sum);
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
        float max = from[s * stride + D], weight = max == -INFINITY ? 0.f : exp2f(max - top);
        sum += weight * from[s * stride + D + 1];
        o += weight * from[s * stride + d];
    }
    out[(size_t(token0 + row / group) * heads + kv_head * group + row % group) * D + d] = __float2bfloat16_rn(o / sum);
}

// q, out: [tokens, heads * D]; scale includes log2(e).
#define ATTENTION(D)                                                                                                   \
    extern "C" __global__ __launch_bounds__(32 * kPrefillWarps) void prefill_##D(                                      \
        const bf16 *q, const bf16 *k, const bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens,               \
        const uint32_t *block_tables, bf16 *out, uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale) {  \
        release_successor();                                                                                           \
        wait_for_predecessor();                                                                                        \
        prefill<D>(q, k, v, {qo_indptr, kv_lens, block_tables, max_blocks, blocks}, out, heads, scale);                \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(32 * kDecodeWarps) void decode_##D(                                        \
        const bf16 *q, const bf16 *k, const bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens,               \
        const uint32_t *block_tables, bf16 *out, uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale,    \
        float *parts, uint32_t max_rows) {                                                                             \
        release_successor();                                                                                           \
        wait_for_predecessor();                                                                                        \
        decode<D>(q, k, v, {qo_indptr, kv_lens, block_tables, max_blocks, blocks}, out, parts, heads, max_rows,        \
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
