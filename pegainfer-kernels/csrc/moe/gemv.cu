// The experts of a mixture for few rows of each: grouped GEMV, tiles of up to 8 pairs.
//
//   moe_gate_up_gemv: h[pair] = weight[pair] silu(bf16(gate x)) bf16(up x)   gate, up: the expert's rows of gate_up
//   moe_down_gemv:    y[pair] = down h[pair]
//
// x: [tokens, k]; gate_up: [experts * 2 * width, k], of each expert the rows of its gate, then those of up; h: [pairs,
// width]; down: [experts * hidden, width]; y: [pairs, hidden]. Activations are bf16, weights bf16 or e4m3 codes with an
// f32 scale for each block of 128 x 128. All GPUs. Chosen for up to four rows of an expert (src/choice/experts.rs).
//
// Technique: swap-AB mma.sync with weights straight from memory to registers, eight kilobytes of loads of a
// warp (bf16) under way at once. A block has some row tiles of 16 rows of weights, and `splits` warps share the columns
// of each (split-K in the block, sums in shared memory, added in the order of the warps): no atomics, and 768 blocks
// for gate and up of one token of Qwen3-30B-A3B, so that all multiprocessors stay busy. moe_down_gemv has its first
// weights in registers before moe_gate_up_gemv ends (programmatic dependent launch). Limit: memory, one read of each
// chosen expert; not measured. Reference: src/cpu/moe/experts.rs.
#include "moe/experts.cuh"
#include "abi/moe_gemv.h"

using namespace moe;
using namespace limits::moe_gemv;

constexpr uint32_t kWarps = kThreads / 32;

// 16 rows x 128 columns of weights: the vectors of 16 bytes of a lane's two rows.
template <Format F> struct Unit {
    static constexpr uint32_t kValues = Codes<F>::kValues, kStep = 4 * kValues, kSteps = kBlock / kStep;
    uint4 upper[kSteps], lower[kSteps];
    float2 scale; // of the upper row and of the lower one

    // First of the columns that a lane has in a step of unit `unit`.
    static __device__ __forceinline__ uint32_t column(uint32_t unit, uint32_t step) {
        return unit * kBlock + step * kStep + threadIdx.x % 4 * kValues;
    }

    __device__ __forceinline__ void load(const void *w, const float *scales, const Rows &rows, uint32_t k,
                                         uint32_t unit) {
        const uint8_t *codes = static_cast<const uint8_t *>(w);
        auto vector = [&](uint32_t row, uint32_t at, bool is_there) {
            if (!is_there || at >= k) return make_uint4(0, 0, 0, 0);
            return stream16(reinterpret_cast<const bf16 *>(codes + (size_t(row) * k + at) * 16 / kValues));
        };
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s) {
            upper[s] = vector(rows.upper, column(unit, s), rows.has_upper);
            lower[s] = vector(rows.lower, column(unit, s), rows.has_lower);
        }
        scale = scales_of<F>(scales, rows, unit, (k + kBlock - 1) / kBlock);
    }
};

// The warp's place: its row tile in the block, and its share of the columns.
struct Share {
    uint32_t tile, split, splits;
    __device__ __forceinline__ explicit Share(uint32_t splits)
        : tile(threadIdx.x / 32 / splits), split(threadIdx.x / 32 % splits), splits(splits) {}
    // Row tiles of a block.
    __device__ __forceinline__ uint32_t tiles() const { return blockDim.x / 32 / splits; }
};

// Sums of 16 rows of w and up to 8 pairs, over units `split`, `split + splits`, ... of 128 columns, then over the warps
// that share the row tile: complete in the warps of split 0. `before_x` is called when the first weights are under way;
// `token(t)` then points to the row of x of the tile's pair t.
template <Format F, typename Before, typename Token>
__device__ __forceinline__ Accumulator sums_of_tile(const void *w, const float *scales, const Rows &rows, uint32_t k,
                                                    uint32_t count, const Share &share, Before before_x, Token token) {
    using Weights = Unit<F>;
    __shared__ Accumulator parts[kWarps][32];
    const uint32_t lane = threadIdx.x % 32, units = (k + kBlock - 1) / kBlock;
    Accumulator total = {};
    const bf16 *x = nullptr;
    bool is_first = true;
    for (uint32_t unit = share.split; is_first || unit < units; unit += kUnits * share.splits) {
        Weights weights[kUnits];
#pragma unroll
        for (uint32_t i = 0; i < kUnits; ++i) weights[i].load(w, scales, rows, k, unit + i * share.splits);
        if (is_first) {
            before_x();
            if (lane / 4 < count) x = token(lane / 4);
            is_first = false;
        }
#pragma unroll
        for (uint32_t i = 0; i < kUnits; ++i) {
            const uint32_t at = unit + i * share.splits;
            if (at >= units) break;
            Accumulator sums = {};
#pragma unroll
            for (uint32_t s = 0; s < Weights::kSteps; ++s) {
                uint4 upper[Codes<F>::kVectors], lower[Codes<F>::kVectors];
                Codes<F>::widen(weights[i].upper[s], kUnscaled, upper);
                Codes<F>::widen(weights[i].lower[s], kUnscaled, lower);
#pragma unroll
                for (uint32_t j = 0; j < Codes<F>::kVectors; ++j) {
                    const uint32_t column = Weights::column(at, s) + j * kVector;
                    const uint4 b = x && column < k ? load16(x + column) : make_uint4(0, 0, 0, 0);
                    mma32(sums, upper[j], lower[j], b);
                }
            }
            add_scaled(total, sums, weights[i].scale);
        }
    }
    parts[threadIdx.x / 32][lane] = total;
    __syncthreads();
    if (share.split > 0) return total;
    for (uint32_t i = 1; i < share.splits; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] += parts[threadIdx.x / 32 + i][lane][j];
    return total;
}

template <Format F>
__device__ __forceinline__ void gate_up(const bf16 *x, const void *w, const float *scales, Grouped groups,
                                        const float *weights, bf16 *h, uint32_t experts_of_token, uint32_t width,
                                        uint32_t k, uint32_t splits) {
    wait_for_predecessor();
    release_successor(); // so late that the next kernel may read the tiles before it waits
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) return;
    const Share share(splits);
    const uint32_t column = (blockIdx.x * share.tiles() + share.tile) * 8 + threadIdx.x % 32 / 4;
    auto token = [&](uint32_t t) { return x + size_t(groups.pair(tile.first + t) / experts_of_token) * k; };
    const Accumulator sums =
        sums_of_tile<F>(w, scales, gate_and_up(tile.expert, width, column), k, tile.count, share, [] {}, token);
    if (share.split == 0) store_gated(sums, groups, tile, 0, weights, h, width, column);
}

template <Format F>
__device__ __forceinline__ void down(const bf16 *h, const void *w, const float *scales, Grouped groups, bf16 *y,
                                     uint32_t hidden, uint32_t k, uint32_t splits) {
    release_successor();
    // The tiles are there: moe_gate_up_gemv has waited for them before it let this kernel start. h is not.
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) {
        wait_for_predecessor(); // later kernels rely on it
        return;
    }
    const Share share(splits);
    const uint32_t column = (blockIdx.x * share.tiles() + share.tile) * 16 + threadIdx.x % 32 / 4;
    auto token = [&](uint32_t t) { return written(h) + size_t(groups.pair(tile.first + t)) * k; };
    const Accumulator sums = sums_of_tile<F>(
        w, scales, of_down(tile.expert, hidden, column), k, tile.count, share, [] { wait_for_predecessor(); }, token);
    if (share.split == 0) store_down(sums, groups, tile, 0, y, hidden, column);
}

#define BY_WEIGHT(SUFFIX, FORMAT, W)                                                                                   \
    /* Grid: row tiles of 8 columns of h, as many a block as it has warps for; tiles of pairs. */                      \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void moe_gate_up_gemv_##SUFFIX(                               \
        const bf16 *x,          /* [tokens, k] */                                                                      \
        const W *w,             /* [experts * 2 * width, k] */                                                         \
        const float *scales,    /* [experts * 2 * width / 128, k / 128], rounded up; null for bf16 */                  \
        const uint32_t *chosen, /* [pairs] */                                                                          \
        const uint32_t *tiles, const uint32_t *pairs, /* of moe_group_pairs; null: each pair is a tile */              \
        const float *weights,                         /* [pairs] */                                                    \
        bf16 *h,                                      /* [pairs, width] */                                             \
        uint32_t experts_of_token, uint32_t first, uint32_t experts, /* of w */                                        \
        uint32_t width, uint32_t k,                                  /* multiples of 8, of 16 for FP8 */               \
        uint32_t splits) {                                           /* warps that share a row tile */                 \
        gate_up<Format::FORMAT>(                                                                                       \
            x, w, scales, {tiles, pairs, chosen, first, experts}, weights, h, experts_of_token, width, k, splits);     \
    }                                                                                                                  \
    /* Grid: row tiles of 16 columns of y, likewise; tiles of pairs. */                                                \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void moe_down_gemv_##SUFFIX(                                  \
        const bf16 *h, /* [pairs, k] */                                                                                \
        const W *w,    /* [experts * hidden, k] */                                                                     \
        const float *scales, const uint32_t *chosen, const uint32_t *tiles, const uint32_t *pairs, /* as above */      \
        bf16 *y, /* [pairs, hidden] */                                                                                 \
        uint32_t first, uint32_t experts, uint32_t hidden, uint32_t k, uint32_t splits) {                              \
        down<Format::FORMAT>(h, w, scales, {tiles, pairs, chosen, first, experts}, y, hidden, k, splits);              \
    }
BY_WEIGHT(bf16, kBf16, bf16)
BY_WEIGHT(fp8, kFp8, uint8_t)
