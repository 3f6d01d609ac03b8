// The experts of a mixture for many rows of each, in bf16 on Hopper: grouped GEMM by wgmma.
//
//   moe_gate_up_wgmma: h[pair] = weight[pair] silu(bf16(gate x)) bf16(up x)   gate, up: the expert's rows of gate_up
//   moe_down_wgmma:    y[pair] = down h[pair]
//
// Shapes are those of moe/gemv.cu. A block has 128 rows of weights of an expert, 64 in each of two warpgroups, and a
// tile of 64 or 128 of its pairs. Of gate_up, groups of eight rows are gates and the ups of the same columns by turns,
// so that a lane has the gate and the up of a column of h. Technique: swap-AB wgmma with both operands in shared
// memory, warp specialisation: two producer warps fetch weights by TMA and gather rows of x by cp.async, kStages steps
// of 64 columns ahead; two blocks a multiprocessor: one multiplies while the other begins or ends. Limit:
// tensor cores and reads of the L2; not measured. Reference: src/cpu/moe/experts.rs.
#include "moe/experts.cuh"
#include "common/hopper.cuh"
#include "abi/moe_wgmma.h"

using namespace moe;
using namespace limits::moe_wgmma;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr uint32_t kConsumers = 256, kProducers = kThreads - kConsumers;
constexpr uint32_t kRowBytes = kDepth * sizeof(bf16); // of a stage: the span of the swizzle
constexpr uint32_t kGroupRows = 8;                    // rows of a box of gates or ups
constexpr uint32_t kLag = kStages - 1;                // steps that a producer has under way

template <bool VALUE> struct Constant {
    static constexpr bool value = VALUE;
};

template <int TOKENS> struct Shared {
    uint8_t weights[kStages][kRows * kRowBytes];
    uint8_t tokens[kStages][TOKENS * kRowBytes];
    uint64_t full[kStages], empty[kStages];

    // Called by all threads.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(&full[i], kProducers + 1);
                barrier_init(&empty[i], kConsumers / 32);
            }
            barriers_ready();
        }
        __syncthreads();
    }
};
static_assert(sizeof(Shared<64>) == kSharedBytes64 && sizeof(Shared<128>) == kSharedBytes128);

// The producers. `boxes(column, stage, barrier)` fetches the weights of a step, `token(t)` points to the row of x of
// the tile's pair t.
template <int TOKENS, typename Boxes, typename Token>
__device__ __forceinline__ void fetch(Shared<TOKENS> &shared, const bf16 *x, uint32_t count, uint32_t k, Boxes boxes,
                                      Token token) {
    constexpr uint32_t kVectors = kDepth / kVector, kOwn = TOKENS * kVectors / kProducers;
    const uint32_t producer = threadIdx.x - kConsumers, vector = producer % kVectors, steps = (k + kDepth - 1) / kDepth;
    const bf16 *rows[kOwn];
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
        const uint32_t t = (i * kProducers + producer) / kVectors;
        rows[i] = t < count ? token(t) + vector * kVector : nullptr;
    }
    Ring<kStages> slot, done;
    for (uint32_t step = 0; step < steps + kLag; ++step) {
        // Before the wait below, which ends when the consumers have begun this step.
        if (step >= kLag) {
            copies_wait<int(kLag) - 1>();
            fence_shared_for_async(); // the consumers' wgmma reads them
            arrive(&shared.full[done.index]);
            done.next();
        }
        if (step < steps) {
            const uint32_t column = step * kDepth, to = shared_address(shared.tokens[slot.index]);
            wait(&shared.empty[slot.index], slot.parity ^ 1);
            if (producer == 0) {
                arrive_expecting(&shared.full[slot.index], kRows * kRowBytes);
                boxes(column, shared_address(shared.weights[slot.index]), &shared.full[slot.index]);
            }
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                const uint32_t t = (i * kProducers + producer) / kVectors;
                const bool is_there = rows[i] && column + vector * kVector < k;
                copy16_or_zero(to + t * kRowBytes + (vector ^ t % 8) * 16, is_there ? rows[i] + column : x, is_there);
            }
            slot.next();
        }
        copies_commit();
    }
}

// A consumer warpgroup: the sums of its 64 rows of weights and the tile's pairs.
template <int TOKENS>
__device__ __forceinline__ void multiply(Shared<TOKENS> &shared, uint32_t warpgroup, uint32_t steps,
                                         float (&sums)[TOKENS / 2]) {
    Ring<kStages> slot;
    auto begin = [&](auto is_first) {
        constexpr bool kFirst = decltype(is_first)::value;
        const uint64_t a = descriptor(shared_address(shared.weights[slot.index]) + warpgroup * 64 * kRowBytes, 0, 1024);
        const uint64_t b = descriptor(shared_address(shared.tokens[slot.index]), 0, 1024);
        wait(&shared.full[slot.index], slot.parity);
        wgmma_fence();
        wgmma<kFirst>(sums, a, b);
#pragma unroll
        for (int i = 1; i < 4; ++i) wgmma<false>(sums, a + 2 * i, b + 2 * i);
        wgmma_commit();
        slot.next();
    };
    // The step before the last that began is multiplied: its stage can be filled.
    auto leave = [&] {
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[(slot.index + kStages - 2) % kStages]);
    };
    begin(Constant<true>());
    for (uint32_t step = 1; step < steps; ++step) {
        begin(Constant<false>());
        wgmma_wait<1>();
        leave();
    }
    wgmma_wait<0>();
}

// Sums of 8 pairs as an accumulator.
template <int N> __device__ __forceinline__ Accumulator accumulator(const float (&sums)[N], uint32_t t) {
    return {{sums[4 * t], sums[4 * t + 1], sums[4 * t + 2], sums[4 * t + 3]}};
}

template <int TOKENS>
__device__ __forceinline__ void gate_up(const TensorMap &w, const bf16 *x, Grouped groups, const float *weights,
                                        bf16 *h, uint32_t experts_of_token, uint32_t width, uint32_t k) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared<TOKENS> &shared = *reinterpret_cast<Shared<TOKENS> *>(bytes);
    shared.init();
    start_after_predecessor();
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) return;
    const uint32_t first = blockIdx.x * (kRows / 2), row = tile.expert * 2 * width + first;
    if (threadIdx.x >= kConsumers) {
        auto boxes = [&](uint32_t column, uint32_t to, uint64_t *barrier) {
            for (uint32_t i = 0; i < kRows / 2; i += kGroupRows) {
                copy_box(to + 2 * i * kRowBytes, w, column, row + i, barrier);
                copy_box(to + (2 * i + kGroupRows) * kRowBytes, w, column, row + width + i, barrier);
            }
        };
        auto token = [&](uint32_t t) { return x + size_t(groups.pair(tile.first + t) / experts_of_token) * k; };
        fetch<TOKENS>(shared, x, tile.count, k, boxes, token);
        return;
    }
    const uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0);
    float sums[TOKENS / 2];
    multiply<TOKENS>(shared, warpgroup, (k + kDepth - 1) / kDepth, sums);
    const uint32_t column = first + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t t = 0; t < TOKENS / 8; ++t)
        store_gated(accumulator(sums, t), groups, tile, t, weights, h, width, column);
}

template <int TOKENS>
__device__ __forceinline__ void down(const TensorMap &w, const bf16 *h, Grouped groups, bf16 *y, uint32_t hidden,
                                     uint32_t k) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared<TOKENS> &shared = *reinterpret_cast<Shared<TOKENS> *>(bytes);
    shared.init();
    start_after_predecessor();
    const PairTile tile = tile_of_block(groups, blockIdx.y);
    if (tile.count == 0) return;
    const uint32_t first = blockIdx.x * kRows, row = tile.expert * hidden + first;
    if (threadIdx.x >= kConsumers) {
        auto boxes = [&](uint32_t column, uint32_t to, uint64_t *barrier) {
            copy_box(to, w, column, row, barrier);
            copy_box(to + 64 * kRowBytes, w, column, row + 64, barrier);
        };
        auto token = [&](uint32_t t) { return h + size_t(groups.pair(tile.first + t)) * k; };
        fetch<TOKENS>(shared, h, tile.count, k, boxes, token);
        return;
    }
    const uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0);
    float sums[TOKENS / 2];
    multiply<TOKENS>(shared, warpgroup, (k + kDepth - 1) / kDepth, sums);
    const uint32_t column = first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (uint32_t t = 0; t < TOKENS / 8; ++t) store_down(accumulator(sums, t), groups, tile, t, y, hidden, column);
}
#define GATE_UP(TOKENS) gate_up<TOKENS>(w, x, {tiles, pairs, nullptr, 0, 0}, weights, h, experts_of_token, width, k)
#define DOWN(TOKENS) down<TOKENS>(w, h, {tiles, pairs, nullptr, 0, 0}, y, hidden, k)
#else
#define GATE_UP(TOKENS) __trap() // the launcher takes moe/mma.cu
#define DOWN(TOKENS) __trap()
#endif

#define BY_TILE(TOKENS)                                                                                                \
    /* Grid: tiles of 64 columns of h, tiles of pairs. */                                                              \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void moe_gate_up_wgmma_##TOKENS(                              \
        const __grid_constant__ TensorMap w,                     /* [experts * 2 * width, k] in boxes of 8 rows */     \
        const bf16 *x,                                           /* [tokens, k] */                                     \
        const uint32_t *tiles, const uint32_t *pairs,            /* of moe_group_pairs */                              \
        const float *weights,                                    /* [pairs] */                                         \
        bf16 *h,                                                 /* [pairs, width] */                                  \
        uint32_t experts_of_token, uint32_t width, uint32_t k) { /* multiples of 8 */                                  \
        GATE_UP(TOKENS);                                                                                               \
    }                                                                                                                  \
    /* Grid: tiles of 128 columns of y, tiles of pairs. */                                                             \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void moe_down_wgmma_##TOKENS(                                 \
        const __grid_constant__ TensorMap w,                   /* [experts * hidden, k] in boxes of 64 rows */         \
        const bf16 *h,                                         /* [pairs, k] */                                        \
        const uint32_t *tiles, const uint32_t *pairs, bf16 *y, /* [pairs, hidden] */                                   \
        uint32_t hidden, uint32_t k) {                                                                                 \
        DOWN(TOKENS);                                                                                                  \
    }
BY_TILE(64)
BY_TILE(128)
