// The experts of a mixture for many rows of each, on Hopper: grouped GEMM by wgmma, in bf16 or FP8 by FP8.
//
//   moe_gate_up_wgmma: h[pair] = weight[pair] silu(bf16(gate x)) bf16(up x)   gate, up: the expert's rows of gate_up
//   moe_down_wgmma:    y[pair] = down h[pair]
//
// Shapes are those of moe/gemv.cu. FP8: weights are e4m3 codes with an f32 scale for each block of 128 x 128, x and h
// codes with one for each 128 columns of a row (W8A8), as csrc/gemm/fp8.cu rounds them: x by that kernel, h by this
// one. Sums of 128 columns are f32 from zero, times both scales.
//
// Technique: persistent blocks, one a multiprocessor, over items of 256 rows of weights and up to 128 pairs; swap-AB,
// so that the instruction is as wide as the tile has pairs, in steps of 16; warp specialisation with register
// reallocation: a producer warpgroup fetches weights by TMA and gathers rows of x by cp.async, ahead of the items, two
// consumers multiply. In FP8 the one scales its sums while the other has the tensor cores. Limit: tensor cores and
// reads of the L2. Reference: src/cpu/moe/experts.rs.
#include "moe/wgmma.cuh"
#include "abi/moe_wgmma.h"

using namespace moe;
using namespace limits::moe_wgmma;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Weights of a GEMM: where the two tiles of a warpgroup begin in part `part` of an expert.
struct GateUpRows {
    uint32_t width;
    __device__ __forceinline__ uint32_t parts() const { return (2 * width + kRows - 1) / kRows; }
    __device__ __forceinline__ uint32_t column(const Item &item, uint32_t warpgroup) const {
        return item.part * (kRows / 2) + warpgroup * 64;
    }
    __device__ __forceinline__ uint32_t row(const Item &item, uint32_t warpgroup, int t) const {
        return (2 * item.tile.expert + t) * width + column(item, warpgroup);
    }
    // Whether a tile of the warpgroup has rows of this expert.
    __device__ __forceinline__ bool has(const Item &item, uint32_t warpgroup, int) const {
        return column(item, warpgroup) < width;
    }
};
struct DownRows {
    Columns columns;
    __device__ __forceinline__ uint32_t parts() const { return (columns.count + kRows - 1) / kRows; }
    __device__ __forceinline__ uint32_t column(const Item &item, uint32_t warpgroup) const {
        return item.part * kRows + warpgroup * 128;
    }
    __device__ __forceinline__ uint32_t row(const Item &item, uint32_t warpgroup, int t) const {
        return item.tile.expert * columns.hidden + columns.first + column(item, warpgroup) + 64 * t;
    }
    __device__ __forceinline__ bool has(const Item &item, uint32_t warpgroup, int t) const {
        return column(item, warpgroup) + 64 * t < columns.count;
    }
};

// Runs `epilogue(sums, item, slot, column)` for each item of this block, in the consumers. `weights` may be null.
template <Format F, typename Rows, typename RowOf, typename Epilogue>
__device__ __forceinline__ void for_items(const TensorMap &w, const float *scales, const Grouped &groups,
                                          const float *weights, const Source &x, uint32_t k, Rows rows, RowOf row_of,
                                          Epilogue epilogue) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared<F> &shared = *reinterpret_cast<Shared<F> *>(bytes);
    shared.init();
    start_after_predecessor();
    constexpr uint32_t kColumns = Shape<F>::kColumns;
    const uint32_t steps = (k + kColumns - 1) / kColumns;
    Items items(written(groups.tiles), rows.parts());
    if (threadIdx.x >= kConsumers) {
        registers_lower<kProducerRegisters>();
        auto boxes = [&](const Item &item, uint32_t step, uint32_t to, uint64_t *barrier) {
#pragma unroll
            for (uint32_t i = 0; i < kRows / 64; ++i)
                copy_box(to + i * kTileBytes, w, step * (kRowBytes / 2), rows.row(item, i / 2, i % 2), barrier);
        };
        fetch<F>(shared, groups, items, x, steps, boxes, row_of);
        return;
    }
    registers_raise<kConsumerRegisters>();
    const uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0);
    Consumer<F> consumer{shared, warpgroup};
    auto pair_of = [&](const Item &item) {
        return threadIdx.x < item.tile.count ? groups.pairs[item.tile.first + threadIdx.x] : 0;
    };
    // What an item needs is read during the item before: the next item's pairs, and the item after it.
    Item item, next, after;
    bool more = items.next(item), again = more && items.next(next);
    uint32_t pair = more ? pair_of(item) : 0;
    for (uint32_t slot = 0; more; slot ^= 1) {
        const uint32_t count = item.tile.count, column = rows.column(item, warpgroup);
        const bool listed = threadIdx.x < count;
        const float factor = listed && weights ? weights[pair] : 0.f;
        const uint32_t next_pair = again ? pair_of(next) : 0;
        const bool has_after = again && items.next(after);
        auto lists = [&] {
            if (listed) {
                shared.pairs[slot][threadIdx.x] = pair;
                shared.factors[slot][threadIdx.x] = factor;
                shared.largest[slot][threadIdx.x] = 0;
            }
            Consumer<F>::sync();
        };
        auto run = [&](auto width) {
            constexpr int N = decltype(width)::value;
            float sums[2][N / 2];
            if constexpr (F == Format::kFp8) {
                consumer.template multiply_fp8<N>(sums, steps, [&](int t, uint32_t step) {
                    return rows.has(item, warpgroup, t)
                               ? __ldg(scales + size_t(rows.row(item, warpgroup, t) / kBlock) * steps + step)
                               : 0.f;
                });
            } else {
                consumer.template multiply_bf16<N>(sums, steps);
            }
            lists();
            epilogue(shared, sums, item, slot, column);
        };
        if (count <= 16) run(Constant<16>());
        else if (count <= 32) run(Constant<32>());
        else if (count <= 64) run(Constant<64>());
        else if (count <= 80) run(Constant<80>());
        else if (count <= 96) run(Constant<96>());
        else if (count <= 112) run(Constant<112>());
        else run(Constant<128>());
        item = next, next = after, pair = next_pair, more = again, again = has_after;
    }
}

// Two columns of each half of a lane's 16, of one pair, from accumulators: columns `2 q` and `2 q + 1`, and from 8 on.
struct Quad {
    uint32_t low, high;
};

// A warp's first column of 16 in a tile of 64.
__device__ __forceinline__ uint32_t warp_column() { return threadIdx.x % 128 / 32 * 16; }

// h of eight pairs, lane 4 g + q: of pair g.
template <int N>
__device__ __forceinline__ Quad gated(const float (&gates)[N], const float (&ups)[N], int i, const float *factors) {
    const float2 factor = *reinterpret_cast<const float2 *>(&factors[8 * i + Accumulator::column(threadIdx.x % 32, 0)]);
    auto value = [&](int j, float factor) {
        return factor * silu(round_bf16(gates[4 * i + j])) * round_bf16(ups[4 * i + j]);
    };
    return {transposed(narrow(value(0, factor.x), value(1, factor.y))),
            transposed(narrow(value(2, factor.x), value(3, factor.y)))};
}

// Calls `store(pair of the list, i)` for the lane's pair of each eight.
template <int N, typename Store> __device__ __forceinline__ void for_pairs(uint32_t count, Store store) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) store(8 * i + threadIdx.x % 32 / 4, i, 8 * i + threadIdx.x % 32 / 4 < count);
}

// Stores a quad's columns of a row in bf16; `column`: the lane's first.
__device__ __forceinline__ void put(bf16 *row, uint32_t column, uint32_t columns, const Quad &quad) {
    if (column < columns) *reinterpret_cast<uint32_t *>(row + column) = quad.low;
    if (column + 8 < columns) *reinterpret_cast<uint32_t *>(row + column + 8) = quad.high;
}

__device__ __forceinline__ uint32_t lane_column() { return warp_column() + threadIdx.x % 4 * 2; }

__device__ __forceinline__ void gate_up_bf16(const TensorMap &w, const bf16 *x, const Grouped &groups,
                                             const float *weights, bf16 *h, uint32_t experts_of_token, uint32_t width,
                                             uint32_t k) {
    const Source source{reinterpret_cast<const uint8_t *>(x), nullptr, uint32_t(k * sizeof(bf16)), 0};
    auto epilogue = [&](const auto &shared, auto &sums, const Item &item, uint32_t slot, uint32_t column) {
        constexpr int N = sizeof(sums[0]) / sizeof(float);
        for_pairs<N>(item.tile.count, [&](uint32_t t, int i, bool is_there) {
            const Quad quad = gated(sums[0], sums[1], i, shared.factors[slot]);
            if (is_there) put(h + size_t(shared.pairs[slot][t]) * width, column + lane_column(), width, quad);
        });
    };
    for_items<Format::kBf16>(
        w, nullptr, groups, weights, source, k, GateUpRows{width},
        [=](uint32_t pair) { return pair / experts_of_token; }, epilogue);
}

__device__ __forceinline__ void gate_up_fp8(
    const TensorMap &w, const float *scales, const uint8_t *x, const float *x_scales, uint32_t padded,
    const Grouped &groups, const float *weights, uint8_t *h, float *h_scales, uint32_t pitch, uint32_t experts_of_token,
    uint32_t width, uint32_t k) {
    auto epilogue = [&](auto &shared, auto &sums, const Item &item, uint32_t slot, uint32_t column) {
        constexpr int N = sizeof(sums[0]) / sizeof(float);
        Quad quads[N / 4];
        for_pairs<N>(item.tile.count, [&](uint32_t t, int i, bool is_there) {
            quads[i] = gated(sums[0], sums[1], i, shared.factors[slot]);
            const uint32_t own = max(magnitude(quads[i].low), magnitude(quads[i].high));
            const uint32_t largest = reduce_lanes(own, 4, MaxBits());
            if (is_there && threadIdx.x % 4 == 0) atomicMax(&shared.largest[slot][t], largest);
        });
        Consumer<Format::kFp8>::sync();
        for_pairs<N>(item.tile.count, [&](uint32_t t, int i, bool is_there) {
            if (!is_there) return;
            const Divisor divisor(amax_over_448(shared.largest[slot][t]));
            uint8_t *row = h + size_t(shared.pairs[slot][t]) * width + column + lane_column();
            *reinterpret_cast<uint16_t *>(row) = divisor.encode2(quads[i].low);
            *reinterpret_cast<uint16_t *>(row + 8) = divisor.encode2(quads[i].high);
        });
        if (threadIdx.x < item.tile.count)
            h_scales[size_t(item.part) * pitch + shared.pairs[slot][threadIdx.x]] =
                amax_over_448(shared.largest[slot][threadIdx.x]);
    };
    for_items<Format::kFp8>(
        w, scales, groups, weights, {x, x_scales, k, padded}, k, GateUpRows{width},
        [=](uint32_t pair) { return pair / experts_of_token; }, epilogue);
}

template <Format F>
__device__ __forceinline__ void down(const TensorMap &w, const float *scales, const Source &h, const Grouped &groups,
                                     bf16 *y, const Columns &of_y, uint32_t k) {
    const uint32_t columns = of_y.count;
    auto epilogue = [&](const auto &shared, auto &sums, const Item &item, uint32_t slot, uint32_t column) {
        constexpr int N = sizeof(sums[0]) / sizeof(float);
        for_pairs<N>(item.tile.count, [&](uint32_t t, int i, bool is_there) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float *four = &sums[half][4 * i];
                const Quad quad{transposed(narrow(four[0], four[1])), transposed(narrow(four[2], four[3]))};
                if (is_there)
                    put(y + size_t(shared.pairs[slot][t]) * columns, column + 64 * half + lane_column(), columns, quad);
            }
        });
    };
    for_items<F>(w, scales, groups, nullptr, h, k, DownRows{of_y}, [](uint32_t pair) { return pair; }, epilogue);
}
#define HOPPER(...) __VA_ARGS__
#else
#define HOPPER(...) __trap() // the launcher takes moe/mma.cu
#endif

// Grid: blocks, each with every so many-th item, of 256 rows of weights and a tile of pairs. kThreads threads.
extern "C" __global__ __launch_bounds__(kThreads, 1) void moe_gate_up_wgmma_bf16(
    const __grid_constant__ TensorMap w,                     // [experts * 2 * width, k] in boxes of 64 rows
    const bf16 *x,                                           // [tokens, k]
    const uint32_t *tiles, const uint32_t *pairs,            // of moe_group_pairs, tiles of up to kTokens
    const float *weights,                                    // [pairs]
    bf16 *h,                                                 // [pairs, width]
    uint32_t experts_of_token, uint32_t width, uint32_t k) { // multiples of 8
    HOPPER(gate_up_bf16(w, x, {tiles, pairs}, weights, h, experts_of_token, width, k));
}

extern "C" __global__ __launch_bounds__(kThreads, 1) void moe_gate_up_wgmma_fp8(
    const __grid_constant__ TensorMap w,          // [experts * 2 * width, k] codes
    const float *scales,                          // [experts * 2 * width / 128, k / 128]
    const uint8_t *x, const float *x_scales,      // [tokens, k] codes, [k / 128, padded]
    const uint32_t *tiles, const uint32_t *pairs, // as above, tiles of up to kTokens
    const float *weights,                         // [pairs]
    uint8_t *h, float *h_scales,                  // [pairs, width] codes, [width / 128, pitch]
    uint32_t padded, uint32_t pitch, uint32_t experts_of_token, uint32_t width, uint32_t k) { // multiples of 128
    HOPPER(gate_up_fp8(w, scales, x, x_scales, padded, {tiles, pairs}, weights, h, h_scales, pitch, experts_of_token,
                       width, k));
}

extern "C" __global__ __launch_bounds__(kThreads, 1) void moe_down_wgmma_bf16(
    const __grid_constant__ TensorMap w,                            // [experts * hidden, k] in boxes of 64 rows
    const bf16 *h,                                                  // [pairs, k]
    const uint32_t *tiles, const uint32_t *pairs, bf16 *y,          // [pairs, columns]: those of y
    uint32_t hidden, uint32_t from, uint32_t columns, uint32_t k) { // from `from` on
    HOPPER(down<Format::kBf16>(w, nullptr, {reinterpret_cast<const uint8_t *>(h), nullptr, k * 2, 0}, {tiles, pairs}, y,
                               {hidden, from, columns}, k));
}

extern "C" __global__ __launch_bounds__(kThreads, 1) void moe_down_wgmma_fp8(
    const __grid_constant__ TensorMap w,                   // [experts * hidden, k] codes
    const float *scales,                                   // [experts * hidden / 128, k / 128]
    const uint8_t *h, const float *h_scales,               // [pairs, k] codes, [k / 128, pitch]
    const uint32_t *tiles, const uint32_t *pairs, bf16 *y, // [pairs, columns]
    uint32_t pitch, uint32_t hidden, uint32_t from, uint32_t columns, uint32_t k) { // multiples of 128
    HOPPER(down<Format::kFp8>(w, scales, {h, h_scales, k, pitch}, {tiles, pairs}, y, {hidden, from, columns}, k));
}
