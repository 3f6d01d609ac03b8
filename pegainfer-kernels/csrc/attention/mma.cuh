// FlashAttention of one warp over the paged KV cache by mma.sync, for the kernels without Hopper's wgmma.
//
// With scale including log2(e), for each of 16 rows r of a matrix of queries and the tokens t that r sees:
//   S = q kᵀ scale;  p = 2^(S - max S);  out = sum_t p_t v_t / sum_t p_t
// Technique: FlashAttention-2 (arXiv 2307.08691): S[16, 16] = q kᵀ, online softmax in f32 with a running max (arXiv
// 1805.02867), O[16, D] += p v, one KV block of 16 tokens an iteration. Grouped-query attention: the queries of a
// sequence that share a KV head are one matrix; row r of it is query r / group, head r % group of the group, so that K
// and V are read once for the group.
//
// A cache in FP8 is widened to bf16, exactly; its scales multiply scores and weights in f32.
//
// K and V go from memory straight to the tensor cores' registers, a vector a load (layout:
// csrc/attention/kv_cache.cuh). The columns of S stand for tokens in an order that makes the accumulators of S the
// operand A of the second GEMM: columns 2 j, 2 j + 1 of tile 0 are tokens 4 j, 4 j + 1, those of tile 1 are tokens 4 j
// + 2, 4 j + 3. The second GEMM wants V by columns: movmatrix transposes 8 x 8 matrices, whose columns 2 j, 2 j + 1 are
// then dimensions 8 j + 2 i, 8 j + 2 i + 1 of 32, for matrix i of 4.
#pragma once
#include "common/frag.cuh"
#include "attention/fp8_kv.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"

// A partial softmax: numerators and denominators relative to 2^max, for the two rows of an accumulator.
template <int D> struct Partial {
    Accumulator o[D / 8]; // dimensions dimension(t), + 1 of the first row, then of the second
    float max[2], sum[2];
};

// Dimension of the first of the two columns that a lane has in tile t of the output.
__device__ __forceinline__ uint32_t dimension(int t) { return t / 4 * 32 + threadIdx.x % 4 * 8 + t % 4 * 2; }

// 16 rows of queries as operand A of `mma32`, 32 columns a vector of each lane.
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

// Attends to KV blocks first, first + step, ... below end of `table`, the block ids of the sequence.
template <int D, typename T>
__device__ Partial<D> attend(const Queries<D> &q, const T *k, const T *v, const uint32_t *table, uint32_t blocks,
                             uint32_t kv_heads, uint32_t kv_head, uint32_t kv_len, uint32_t first, uint32_t end,
                             uint32_t step, float scale) {
    constexpr bool kScaled = sizeof(T) == sizeof(fp8);
    constexpr bool kAhead = D <= 128; // registers for the loads of a whole block
    Partial<D> partial = {};
    partial.max[0] = partial.max[1] = -INFINITY;
    uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    uint32_t row = 4 * (group / 2) + group % 2; // token of a block whose key this lane loads first
    for (uint32_t i = first; i < end; i += step) {
        uint32_t id = table[i];
        if (id >= blocks) __trap();
        size_t slab = (size_t(id) * kv_heads + kv_head) * slab_size<T>(D);
        auto load_key = [&](int r, int c) { return load_row(k + slab, row + 2 * r, 4 * c + quad); };
        auto load_value = [&](int r, int c) {
            uint4 x = load_row(v + slab, row + 2 * r, 4 * c + quad);
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
        uint32_t token = i * kBlock + 4 * quad; // of the lane's first column
        float4 key_scales = load_scales(k + slab, D, 4 * quad), value_scales = load_scales(v + slab, D, 4 * quad);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float p[4];
            float new_max = partial.max[r];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float score = s[j / 2][2 * r + j % 2] * scale;
                if (kScaled) score *= (&key_scales.x)[j];
                p[j] = token + j <= q.last[r] ? score : -INFINITY;
                new_max = fmaxf(new_max, p[j]);
            }
            new_max = reduce_quad(new_max, Max());
            float base = new_max == -INFINITY ? 0.f : new_max; // no token seen yet: all weights are 0
            float rescale = exp2_approx(partial.max[r] - base);
            partial.max[r] = new_max;
            partial.sum[r] *= rescale;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // The sum takes the weight as the GEMM does, so that rounding does not tilt the mean.
                p[j] = exp2_approx(p[j] - base);
                if (!kScaled) p[j] = round_bf16(p[j]);
                partial.sum[r] += p[j];
                // Scales beyond the end may be anything, too.
                if (kScaled) p[j] = token + j < kv_len ? p[j] * (&value_scales.x)[j] : 0.f;
                s[j / 2][2 * r + j % 2] = p[j];
            }
#pragma unroll
            for (int t = 0; t < D / 8; ++t) {
                partial.o[t][2 * r] *= rescale;
                partial.o[t][2 * r + 1] *= rescale;
            }
        }
        uint4 p = operand_a(s[0], s[1]);
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            if (!kAhead && t % 4 == 0) value[0][t / 4] = load_value(0, t / 4), value[1][t / 4] = load_value(1, t / 4);
            const uint32_t *first = reinterpret_cast<const uint32_t *>(&value[0][t / 4]);
            const uint32_t *second = reinterpret_cast<const uint32_t *>(&value[1][t / 4]);
            mma(partial.o[t], p, transposed(first[t % 4]), transposed(second[t % 4]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) partial.sum[r] = reduce_quad(partial.sum[r], Add());
    return partial;
}
