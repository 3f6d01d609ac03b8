// The experts of a mixture for many rows of each, on any GPU: grouped GEMM by mma.sync.
//
//   moe_gate_up_mma: h[pair] = weight[pair] silu(bf16(gate x)) bf16(up x)   gate, up: the expert's rows of gate_up
//   moe_down_mma:    y[pair] = down h[pair]
//
// Shapes and formats are those of moe/gemv.cu. A block has 64 rows of weights of an expert and a tile of 16, 32 or 64
// of its pairs; each of its four warps has 16 of the rows and all pairs. Technique: swap-AB mma.sync, a cp.async ring
// of kStages steps of 64 columns in shared memory, gathered rows of x, FP8 widened to bf16 in registers; sums in the
// order of the columns, so that a row's bits depend on nothing but the row. Limit: memory at few rows of an expert,
// reads of shared memory at many. Reference: src/cpu/moe/experts.rs.
#include "moe/experts.cuh"
#include "abi/moe_mma.h"

using namespace moe;
using namespace limits::moe_mma;

constexpr uint32_t kPitch = 2 * kDepth + 64;                    // bytes of a row of x in a stage
constexpr uint32_t kStepsOfBlock = kBlock / kDepth;             // steps that share a scale
constexpr uint32_t kNoRow = ~0u;                                // a row that is all zeros
template <int TOKENS> using TileSums = Accumulator[TOKENS / 8]; // of a warp: its 16 rows, all pairs of the tile

// The ring: of each stage the rows of weights, then those of x.
template <Format F, int TOKENS> struct Stage {
    static constexpr uint32_t kChunks = kDepth / Codes<F>::kValues; // vectors of a row of weights
    static constexpr uint32_t kVectors = kDepth / kVector;          // of a row of x
    static constexpr uint32_t kTokens = kRows * kChunks * 16;       // where x begins
    static constexpr uint32_t kBytes = kTokens + TOKENS * kPitch;

    // Byte offset of a vector. Two neighbouring rows of weights, four vectors each, lie in different banks, and so do
    // two of x. Of the vectors of x, those that a quad reads together are neighbours.
    static __device__ __forceinline__ uint32_t weight(uint32_t row, uint32_t chunk) {
        return (row * kChunks + (kChunks > 4 ? chunk ^ row % 2 * 4 : chunk)) * 16;
    }
    static __device__ __forceinline__ uint32_t token(uint32_t t, uint32_t vector) {
        constexpr uint32_t kEach = Codes<F>::kVectors; // of a lane
        const uint32_t place = (vector / (4 * kEach) * kEach + vector % kEach) * 4 + vector / kEach % 4;
        return kTokens + t * kPitch + place * 16;
    }
};

// What a thread copies in each step: vectors of some rows, all at the same column. A row that is null is all zeros.
template <uint32_t N> struct Copies {
    const uint8_t *from[N]; // at column 0
    uint32_t to[N];         // offset in a stage
};

// Sums of the block's 64 rows of w and a tile's pairs. `row_of(r)` is row r's number in w, kNoRow if it is all zeros;
// `token(t)` points to the row of x of the tile's pair t; `rows` are this lane's.
template <Format F, int TOKENS, typename RowOf, typename Token>
__device__ __forceinline__ void multiply(TileSums<TOKENS> &total, const void *w, const float *scales, RowOf row_of,
                                         const Rows &rows, uint32_t count, Token token, uint32_t k) {
    using Place = Stage<F, TOKENS>;
    constexpr uint32_t kChunks = Place::kChunks, kValues = Codes<F>::kValues;
    constexpr uint32_t kWeights = kRows * kChunks / kThreads, kXs = TOKENS * Place::kVectors / kThreads;
    static_assert(kRows * kChunks % kThreads == 0 && TOKENS * Place::kVectors % kThreads == 0, "whole vectors");
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
    const uint32_t steps = (k + kDepth - 1) / kDepth, blocks = (k + kBlock - 1) / kBlock;

    Copies<kWeights> weights;
    Copies<kXs> xs;
    const uint32_t chunk = threadIdx.x % kChunks, vector = threadIdx.x % Place::kVectors;
#pragma unroll
    for (uint32_t i = 0; i < kWeights; ++i) {
        const uint32_t r = (i * kThreads + threadIdx.x) / kChunks, row = row_of(r);
        const size_t at = (size_t(row) * k + chunk * kValues) * 16 / kValues;
        weights.from[i] = row == kNoRow ? nullptr : static_cast<const uint8_t *>(w) + at;
        weights.to[i] = Place::weight(r, chunk);
    }
#pragma unroll
    for (uint32_t i = 0; i < kXs; ++i) {
        const uint32_t t = (i * kThreads + threadIdx.x) / Place::kVectors;
        xs.from[i] = t < count ? reinterpret_cast<const uint8_t *>(token(t) + vector * kVector) : nullptr;
        xs.to[i] = Place::token(t, vector);
    }
    auto start = [&](uint32_t step) {
        if (step < steps) {
            const uint32_t to = base + step % kStages * Place::kBytes, column = step * kDepth;
#pragma unroll
            for (uint32_t i = 0; i < kWeights; ++i) {
                const bool is_there = weights.from[i] && column + chunk * kValues < k;
                const uint8_t *from = weights.from[i] + column * 16 / kValues;
                stream16_or_zero(to + weights.to[i], is_there ? from : static_cast<const uint8_t *>(w), is_there);
            }
#pragma unroll
            for (uint32_t i = 0; i < kXs; ++i) {
                const bool is_there = xs.from[i] && column + vector * kVector < k;
                const void *from = is_there ? xs.from[i] + column * sizeof(bf16) : w;
                copy16_or_zero(to + xs.to[i], from, is_there);
            }
        }
        copies_commit();
    };

    TileSums<TOKENS> sums = {};
    float2 scale = scales_of<F>(scales, rows, 0, blocks);
    for (int s = 0; s < kStages - 1; ++s) start(s);
    for (uint32_t step = 0; step < steps; ++step) {
        copies_wait<kStages - 2>();
        __syncthreads(); // this step is there for all, and nobody reads the stage that is filled next
        start(step + kStages - 1);
        const uint8_t *stage = shared + step % kStages * Place::kBytes;
        const uint32_t upper = 16 * warp + lane / 4;
#pragma unroll
        for (uint32_t part = 0; part < kChunks / 4; ++part) {
            uint4 a[2][Codes<F>::kVectors];
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                const uint8_t *at = stage + Place::weight(upper + 8 * i, 4 * part + quad);
                Codes<F>::widen(*reinterpret_cast<const uint4 *>(at), kUnscaled, a[i]);
            }
#pragma unroll
            for (uint32_t j = 0; j < Codes<F>::kVectors; ++j)
#pragma unroll
                for (uint32_t t = 0; t < TOKENS / 8; ++t) {
                    const uint32_t at = (4 * part + quad) * Codes<F>::kVectors + j;
                    const uint4 b = *reinterpret_cast<const uint4 *>(stage + Place::token(8 * t + lane / 4, at));
                    mma32(sums[t], a[0][j], a[1][j], b);
                }
        }
        if constexpr (F == Format::kFp8) {
            if (step % kStepsOfBlock + 1 < kStepsOfBlock && step + 1 < steps) continue;
#pragma unroll
            for (uint32_t t = 0; t < TOKENS / 8; ++t) add_scaled(total[t], sums[t], scale), sums[t] = {};
            scale = scales_of<F>(scales, rows, step / kStepsOfBlock + 1, blocks);
        }
    }
    copies_wait_all();
    if constexpr (F != Format::kFp8) {
#pragma unroll
        for (uint32_t t = 0; t < TOKENS / 8; ++t) total[t] = sums[t];
    }
}

template <Format F, int TOKENS>
__device__ __forceinline__ void gate_up(const bf16 *x, const void *w, const float *scales, Grouped groups,
                                        const float *weights, bf16 *h, uint32_t experts_of_token, uint32_t width,
                                        uint32_t k) {
    start_after_predecessor();
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) return;
    const uint32_t first = blockIdx.x * (kRows / 2); // column of h
    // Row r of the tile: of 16, 8 gates and their ups.
    auto row_of = [&](uint32_t r) {
        const uint32_t column = first + r / 16 * 8 + r % 8;
        const Rows rows = gate_and_up(tile.expert, width, column);
        return column < width ? (r % 16 < 8 ? rows.upper : rows.lower) : kNoRow;
    };
    const uint32_t column = first + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
    auto token = [&](uint32_t t) { return x + size_t(groups.pairs[tile.first + t] / experts_of_token) * k; };
    TileSums<TOKENS> sums = {};
    multiply<F, TOKENS>(sums, w, scales, row_of, gate_and_up(tile.expert, width, column), tile.count, token, k);
#pragma unroll
    for (uint32_t t = 0; t < TOKENS / 8; ++t) store_gated(sums[t], groups, tile, t, weights, h, width, column);
}

template <Format F, int TOKENS>
__device__ __forceinline__ void down(const bf16 *h, const void *w, const float *scales, Grouped groups, bf16 *y,
                                     const Columns &columns, uint32_t k) {
    start_after_predecessor();
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) return;
    const uint32_t first = blockIdx.x * kRows; // column of y
    auto row_of = [&](uint32_t r) {
        return first + r < columns.count ? tile.expert * columns.hidden + columns.first + first + r : kNoRow;
    };
    const uint32_t column = first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    auto token = [&](uint32_t t) { return h + size_t(groups.pairs[tile.first + t]) * k; };
    TileSums<TOKENS> sums = {};
    multiply<F, TOKENS>(sums, w, scales, row_of, of_down(tile.expert, columns, column), tile.count, token, k);
#pragma unroll
    for (uint32_t t = 0; t < TOKENS / 8; ++t) store_down(sums[t], groups, tile, t, y, columns.count, column);
}

#define BY_WEIGHT(SUFFIX, FORMAT, W, TOKENS)                                                                           \
    /* Grid: tiles of 32 columns of h, tiles of pairs. */                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void moe_gate_up_mma_##SUFFIX##_##TOKENS(                        \
        const bf16 *x,       /* [tokens, k] */                                                                         \
        const W *w,          /* [experts * 2 * width, k] */                                                            \
        const float *scales, /* [experts * 2 * width / 128, k / 128], rounded up; null for bf16 */                     \
        const uint32_t *tiles, const uint32_t *pairs,            /* of moe_group_pairs */                              \
        const float *weights,                                    /* [pairs] */                                         \
        bf16 *h,                                                 /* [pairs, width] */                                  \
        uint32_t experts_of_token, uint32_t width, uint32_t k) { /* multiples of 8, of 16 for FP8 */                   \
        gate_up<Format::FORMAT, TOKENS>(x, w, scales, {tiles, pairs}, weights, h, experts_of_token, width, k);         \
    }                                                                                                                  \
    /* Grid: tiles of 64 columns of y, tiles of pairs. */                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void moe_down_mma_##SUFFIX##_##TOKENS(                           \
        const bf16 *h,                                                     /* [pairs, k] */                            \
        const W *w,                                                        /* [experts * hidden, k] */                 \
        const float *scales, const uint32_t *tiles, const uint32_t *pairs, /* as above */                              \
        bf16 *y, /* [pairs, columns]: those of y from `from` on */                                                     \
        uint32_t hidden, uint32_t from, uint32_t columns, uint32_t k) {                                                \
        down<Format::FORMAT, TOKENS>(h, w, scales, {tiles, pairs}, y, {hidden, from, columns}, k);                     \
    }
#define BY_TILE(TOKENS)                                                                                                \
    BY_WEIGHT(bf16, kBf16, bf16, TOKENS)                                                                               \
    BY_WEIGHT(fp8, kFp8, uint8_t, TOKENS)
BY_TILE(16)
BY_TILE(32)
BY_TILE(64)
