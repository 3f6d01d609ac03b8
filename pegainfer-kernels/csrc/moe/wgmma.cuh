// What the grouped GEMMs by wgmma are made of (moe/wgmma.cu): the items of a persistent block, the ring in shared
// memory, the threads that fill it, and the warpgroups that multiply.
//
// An item is 256 rows of weights of an expert and a tile of its pairs. Each of two warpgroups has two tiles of 64 rows:
// the gates and the ups of the same columns of h, or neighbouring columns of y. A step is 128 bytes of each row: 64
// columns of bf16, 128 of FP8, of which it is also the block of a scale.
#pragma once
#include "moe/experts.cuh"
#include "common/fp8_codes.cuh"
#include "common/hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace moe {
using namespace limits::moe_wgmma;

constexpr uint32_t kConsumers = 256, kProducers = kThreads - kConsumers;
constexpr uint32_t kRowBytes = 128;             // of a step: the span of the swizzle
constexpr uint32_t kTileBytes = 64 * kRowBytes; // of 64 rows of weights
// Of a thread after setmaxnreg: 128 * 40 + 256 * 232 of the 65,536 of a multiprocessor.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <auto VALUE> struct Constant {
    static constexpr auto value = VALUE;
};

template <Format F> struct Shape {
    static constexpr bool kIsFp8 = F == Format::kFp8;
    static constexpr uint32_t kColumns = kIsFp8 ? kRowBytes : kRowBytes / sizeof(bf16); // of a step
};

template <Format F> struct Shared : Shape<F> {
    uint8_t weights[kStages][kRows * kRowBytes];
    uint8_t tokens[kStages][kTokens * kRowBytes];
    float scales[kStages][kTokens]; // of the tokens, FP8
    // Of the items by turns: the pairs, their weights, and the largest magnitudes of their columns of h.
    uint32_t pairs[2][kTokens];
    float factors[2][kTokens];
    uint32_t largest[2][kTokens];
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
static_assert(sizeof(Shared<Format::kBf16>) <= kSharedBytes && sizeof(Shared<Format::kFp8>) <= kSharedBytes);

struct Item {
    PairTile tile;
    uint32_t part; // of the expert's rows, 256 each
};

// The items of this block, every so many-th. The parts of a tile come one after the other: blocks that run at the same
// time read the same pairs.
struct Items {
    const uint32_t *tiles;
    uint32_t parts, count, at;
    __device__ __forceinline__ Items(const uint32_t *tiles, uint32_t parts)
        : tiles(tiles), parts(parts), count(tiles[0] * parts), at(blockIdx.x) {}
    __device__ __forceinline__ bool next(Item &item) {
        if (at >= count) return false;
        const uint32_t *tile = tiles + 1 + 3 * (at / parts);
        item = {{tile[0], tile[1], tile[2]}, at % parts};
        at += gridDim.x;
        return true;
    }
};

// Rows of x, [rows, k], and the scales of FP8, [k / 128, pitch].
struct Source {
    const uint8_t *rows;
    const float *scales;
    uint32_t row_bytes, pitch;
};

// The producers: weights by `boxes(item, step, stage, barrier)`, pairs by cp.async; `row_of(pair)` is a pair's row of
// x. Rows behind the tile's last pair hold what was there: each column of the sums depends on one row.
template <Format F, typename Boxes, typename RowOf>
__device__ __forceinline__ void fetch(Shared<F> &shared, const Grouped &groups, Items items, const Source &x,
                                      uint32_t steps, Boxes boxes, RowOf row_of) {
    using S = Shape<F>;
    constexpr uint32_t kVectors = kRowBytes / 16, kApart = kProducers / kVectors, kOwn = kTokens / kApart;
    constexpr uint32_t kLag = kStages - 2; // steps that a producer has under way
    const uint32_t producer = threadIdx.x - kConsumers, vector = producer % kVectors, first = producer / kVectors;
    // Offsets in x, in vectors; of the thread's pairs, and of the one whose scales it fetches.
    struct Rows {
        uint32_t own[kOwn], scaled;
    };
    auto rows_of = [&](const PairTile &tile) {
        Rows rows;
#pragma unroll
        for (uint32_t i = 0; i < kOwn; ++i) {
            const uint32_t t = first + i * kApart;
            rows.own[i] = t < tile.count ? row_of(groups.pairs[tile.first + t]) * (x.row_bytes / 16) + vector : ~0u;
        }
        if (S::kIsFp8) rows.scaled = producer < tile.count ? row_of(groups.pairs[tile.first + producer]) : ~0u;
        return rows;
    };
    Ring<kStages> slot, done;
    uint32_t pending = 0; // steps whose copies have begun, but are not announced
    auto announce = [&] {
        fence_shared_for_async(); // the consumers' wgmma reads them
        arrive(&shared.full[done.index]);
        done.next();
    };
    Item item, coming;
    bool more = items.next(item);
    Rows rows;
    if (more) rows = rows_of(item.tile);
    while (more) {
        const bool again = items.next(coming);
        Rows next;
        if (again) next = rows_of(coming.tile);
        for (uint32_t step = 0; step < steps; ++step, slot.next()) {
            if (pending == kLag) {
                copies_wait<int(kLag) - 1>();
                announce();
            } else {
                ++pending;
            }
            wait(&shared.empty[slot.index], slot.parity ^ 1);
            if (producer == 0) {
                arrive_expecting(&shared.full[slot.index], kRows * kRowBytes);
                boxes(item, step, shared_address(shared.weights[slot.index]), &shared.full[slot.index]);
            }
            const uint32_t to = shared_address(shared.tokens[slot.index]);
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                const uint32_t t = first + i * kApart;
                if (rows.own[i] != ~0u)
                    copy16(to + t * kRowBytes + (vector ^ t % 8) * 16,
                           x.rows + 16 * size_t(rows.own[i] + step * kVectors));
            }
            if (S::kIsFp8 && rows.scaled != ~0u)
                copy4(shared_address(&shared.scales[slot.index][producer]),
                      x.scales + size_t(step) * x.pitch + rows.scaled);
            copies_commit();
        }
        item = coming, rows = next, more = again;
    }
    copies_wait<0>();
    for (; pending > 0; --pending) announce();
}

// A consumer warpgroup's place in the ring, and its sums of two tiles of 64 rows.
template <Format F> struct Consumer {
    using S = Shape<F>;
    Shared<F> &shared;
    uint32_t warpgroup;
    Ring<kStages> slot;

    // Begins tile `t` of the present step: 32 bytes of the rows at a time.
    template <bool First, int N> __device__ __forceinline__ void begin(float (&sums)[N / 2], int t) {
        const uint32_t rows = shared_address(shared.weights[slot.index]) + (2 * warpgroup + t) * kTileBytes;
        const uint64_t a = descriptor(rows, 0, 1024);
        const uint64_t b = descriptor(shared_address(shared.tokens[slot.index]), 0, 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (S::kIsFp8) {
                if (i == 0) wgmma_fp8<true>(sums, a, b);
                else wgmma_fp8<false>(sums, a + 2 * i, b + 2 * i);
            } else {
                if (First && i == 0) wgmma<true>(sums, a, b);
                else wgmma<false>(sums, a + 2 * i, b + 2 * i);
            }
        }
    }

    // Lets stage `index` be filled again.
    __device__ __forceinline__ void release(uint32_t index) {
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[index]);
    }

    // bf16: the step before the last one that began is done when this begins the next.
    template <int N> __device__ __forceinline__ void multiply_bf16(float (&sums)[2][N / 2], uint32_t steps) {
        auto step = [&](auto is_first) {
            constexpr bool kFirst = decltype(is_first)::value;
            wait(&shared.full[slot.index], slot.parity);
            wgmma_fence();
            begin<kFirst, N>(sums[0], 0);
            begin<kFirst, N>(sums[1], 1);
            wgmma_commit();
            slot.next();
        };
        step(Constant<true>());
        for (uint32_t i = 1; i < steps; ++i) {
            step(Constant<false>());
            wgmma_wait<1>();
            release((slot.index + kStages - 2) % kStages);
        }
        wgmma_wait<0>();
        release((slot.index + kStages - 1) % kStages);
    }

    // FP8: sums of a step start at zero, and are scaled and added while the other warpgroup multiplies. `scale(t,
    // step)`: the scale of tile t's block of weights.
    template <int N, typename Scale>
    __device__ __forceinline__ void multiply_fp8(float (&total)[2][N / 2], uint32_t steps, Scale scale) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[0][i] = total[1][i] = 0.f;
        float next[2] = {scale(0, 0), scale(1, 0)};
        for (uint32_t step = 0; step < steps; ++step) {
            const float factors[2] = {next[0], next[1]};
            if (step + 1 < steps) next[0] = scale(0, step + 1), next[1] = scale(1, step + 1);
            wait(&shared.full[slot.index], slot.parity);
            const float *tokens = shared.scales[slot.index] + Accumulator::column(threadIdx.x % 32, 0);
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                float sums[N / 2];
                wgmma_fence();
                begin<true, N>(sums, t);
                wgmma_commit();
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < N / 8; ++i) {
                    const float2 token = *reinterpret_cast<const float2 *>(tokens + 8 * i);
                    const float low = factors[t] * token.x, high = factors[t] * token.y;
                    total[t][4 * i] += low * sums[4 * i], total[t][4 * i + 1] += high * sums[4 * i + 1];
                    total[t][4 * i + 2] += low * sums[4 * i + 2], total[t][4 * i + 3] += high * sums[4 * i + 3];
                }
            }
            release(slot.index);
            slot.next();
        }
    }

    // Waits for the 256 threads of both.
    static __device__ __forceinline__ void sync() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
};
} // namespace moe
#endif
