// Attention of one warp over the paged KV cache, for the kernels without Hopper's warpgroup products.
//
// The queries of a row that share a KV head are one matrix: row r of it is query r / group, head r % group of the
// group. A warp takes 16 such rows and walks KV blocks of 16 tokens: S[16, 16] = q kᵀ, online softmax in f32,
// O[16, D] += p v. K and V go from memory straight to the tensor cores' registers, 16 bytes a load (the layout is in
// common.cuh); the columns of S stand for tokens in an order that makes the registers of p what the second product
// wants: columns 2j, 2j + 1 of tile 0 are tokens 4j, 4j + 1, those of tile 1 are tokens 4j + 2, 4j + 3. The second
// product wants V by columns: the tensor core transposes 8 x 8 pieces, whose columns 2j, 2j + 1 are then dimensions
// 8j + 2i, 8j + 2i + 1 of 32, for piece i of 4.
#pragma once
#include "frag.cuh"
#include "kv_cache.cuh"
#include "math.cuh"
#include "warp.cuh"

// Part of a softmax: numerator and denominator relative to exp2(max), for rows lane / 4 and lane / 4 + 8.
template <int D> struct Part {
    Accumulator o[D / 8]; // dimensions dimension(t), + 1 of the first row, then of the second
    float max[2], sum[2];
};

// Dimension of the first of the two columns that a lane has in tile t of the output.
__device__ __forceinline__ uint32_t dimension(int t) { return t / 4 * 32 + threadIdx.x % 4 * 8 + t % 4 * 2; }

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
        uint32_t row = min(row0 + Accumulator::row(lane, 2 * i), tokens * group - 1), token = row / group;
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
    constexpr bool kAhead = D <= 128; // registers for the loads of a whole block
    Part<D> part = {};
    part.max[0] = part.max[1] = -INFINITY;
    uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    uint32_t row = 4 * (group / 2) + group % 2; // token of a block whose key this lane loads first
    for (uint32_t i = first; i < end; i += step) {
        uint32_t id = table[i];
        if (id >= blocks) __trap();
        size_t base = (size_t(id) * kv_heads + kv_head) * kBlock * D;
        auto load_key = [&](int r, int c) { return load16(k + base + cache_vector(row + 2 * r, 4 * c + quad)); };
        auto load_value = [&](int r, int c) {
            uint4 x = load16(v + base + cache_vector(row + 2 * r, 4 * c + quad));
            // Beyond the end the cache may hold anything, and 0 * NaN is NaN.
            return i * kBlock + row + 2 * r < kv_len ? x : make_uint4(0, 0, 0, 0);
        };
        uint4 key[2][D / 32], value[2][D / 32];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int c = 0; c < D / 32 && kAhead; ++c) key[r][c] = load_key(r, c), value[r][c] = load_value(r, c);
        }
        Accumulator s[2] = {};
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
#pragma unroll
            for (int r = 0; r < 2; ++r) mma32(s[r], q.low[c], q.high[c], kAhead ? key[r][c] : load_key(r, c));
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
            top = reduce_quad(top, Max());
            float zero = top == -INFINITY ? 0.f : top; // nothing visible yet: all weights are 0
            float shrink = exp2_approx(part.max[r] - zero);
            part.max[r] = top;
            part.sum[r] *= shrink;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // The sum takes the weight as the product does, so that rounding does not tilt the mean.
                p[j] = round_bf16(exp2_approx(p[j] - zero));
                part.sum[r] += p[j];
                s[j / 2][2 * r + j % 2] = p[j];
            }
#pragma unroll
            for (int t = 0; t < D / 8; ++t) {
                part.o[t][2 * r] *= shrink;
                part.o[t][2 * r + 1] *= shrink;
            }
        }
        uint4 p = operand_a(s[0], s[1]);
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            if (!kAhead && t % 4 == 0) value[0][t / 4] = load_value(0, t / 4), value[1][t / 4] = load_value(1, t / 4);
            const uint32_t *first = reinterpret_cast<const uint32_t *>(&value[0][t / 4]);
            const uint32_t *second = reinterpret_cast<const uint32_t *>(&value[1][t / 4]);
            mma(part.o[t], p, transposed(first[t % 4]), transposed(second[t % 4]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) part.sum[r] = reduce_quad(part.sum[r], Add());
    return part;
}
