// The grouped GEMMs of a mixture of experts: tiles of pairs, weights in bf16 or FP8, and the gate.
//
// A pair is a token with one of its k experts: number token * k + i. Weights are operand A of the tensor cores
// (swap-AB), pairs are operand B. Of a matrix of gates and ups, the 16 rows of an operand A are 8 rows of gates, then
// the rows of ups of the same columns, so that a lane has the gate and the up of a column of h. FP8 codes are widened
// to bf16, which is exact, and the sums of each 128 columns are multiplied by the scale of their block.
#pragma once
#include "common/async.cuh"
#include "common/math.cuh"
#include "common/weight_codes.cuh"
#include "moe/pairs.cuh"

namespace moe {
constexpr uint32_t kBlock = 128;    // edge of a block of FP8 weights that share a scale
constexpr uint32_t kUnscaled = 127; // the E8M0 scale 1

// Lists of group_by_expert.
struct Grouped {
    const uint32_t *tiles, *pairs;
};

// The tile of this block; its count is 0 if there is none.
__device__ __forceinline__ PairTile tile_of_block(const Grouped &groups, uint32_t tile) {
    if (tile >= groups.tiles[0]) return {0, 0, 0};
    const uint32_t *at = groups.tiles + 1 + 3 * tile;
    return {at[0], at[1], at[2]};
}

// The rows of a matrix that a lane has in operand A: an upper and a lower one. Rows that are not there are zeros.
struct Rows {
    uint32_t upper, lower;
    bool has_upper, has_lower;
};

// Of [experts * 2 * width, k]: column `column` of h.
__device__ __forceinline__ Rows gate_and_up(uint32_t expert, uint32_t width, uint32_t column) {
    const uint32_t row = expert * 2 * width + column;
    return {row, row + width, column < width, column < width};
}

// The columns of y, of `hidden`, that a launch computes: y is [pairs, count].
struct Columns {
    uint32_t hidden, first, count;
};

// Of [experts * hidden, k]: columns `column` and `column + 8` of y.
__device__ __forceinline__ Rows of_down(uint32_t expert, const Columns &columns, uint32_t column) {
    const uint32_t row = expert * columns.hidden + columns.first + column;
    return {row, row + 8, column < columns.count, column + 8 < columns.count};
}

// The scales of the lane's rows for the columns of block `block`, of `blocks`; 0 where there is none. Those of bf16
// are 1.
template <Format F>
__device__ __forceinline__ float2 scales_of(const float *scales, const Rows &rows, uint32_t block, uint32_t blocks) {
    if (F != Format::kFp8) return make_float2(1.f, 1.f);
    auto scale = [&](uint32_t row, bool is_there) {
        return is_there && block < blocks ? __ldg(scales + size_t(row / kBlock) * blocks + block) : 0.f;
    };
    return make_float2(scale(rows.upper, rows.has_upper), scale(rows.lower, rows.has_lower));
}

// total += scales * sums, upper rows and lower ones.
__device__ __forceinline__ void add_scaled(Accumulator &total, const Accumulator &sums, float2 scales) {
    total[0] += scales.x * sums[0], total[1] += scales.x * sums[1];
    total[2] += scales.y * sums[2], total[3] += scales.y * sums[3];
}

// Stores h[pair][column] of the tile's pairs 8 t to 8 t + 7. The sums are their gates and ups.
__device__ __forceinline__ void store_gated(const Accumulator &sums, const Grouped &groups, const PairTile &tile,
                                            uint32_t t, const float *weights, bf16 *h, uint32_t width,
                                            uint32_t column) {
    if (column >= width) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t at = 8 * t + Accumulator::column(threadIdx.x % 32, i);
        if (at >= tile.count) continue;
        const uint32_t pair = groups.pairs[tile.first + at];
        const float gate = round_bf16(sums[i]), up = round_bf16(sums[i + 2]);
        put(h + size_t(pair) * width + column, weights[pair] * silu(gate) * up);
    }
}

// Columns `column` and `column + 8` of y of the same pairs.
__device__ __forceinline__ void store_down(const Accumulator &sums, const Grouped &groups, const PairTile &tile,
                                           uint32_t t, bf16 *y, uint32_t columns, uint32_t column) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t at = 8 * t + Accumulator::column(threadIdx.x % 32, i);
        if (at >= tile.count) continue;
        bf16 *row = y + size_t(groups.pairs[tile.first + at]) * columns;
        if (column < columns) put(row + column, sums[i]);
        if (column + 8 < columns) put(row + column + 8, sums[i + 2]);
    }
}
} // namespace moe
