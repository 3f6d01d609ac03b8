// Pairs of a token and one of its experts, grouped by expert on the device. A pair is number token * k + i.
#pragma once
#include "common/warp.cuh"
#include "limits.h"

// A tile: some pairs of an expert, `pairs[first]` to `pairs[first + count - 1]`.
struct PairTile {
    uint32_t expert, first, count;
};

// Lists the pairs of each expert, and tiles of at most `tokens` of them: an expert's tiles have about the same size, a
// multiple of 16 (or `tokens`, where that is less) but for the last. Called by blocks of kGroupThreads, each of which
// counts all pairs. `tiles`: their number, then 3 words each.
__device__ __forceinline__ void group_by_expert(
    const uint32_t *__restrict__ chosen,                                            // [count], experts of all ranks
    uint32_t *__restrict__ pairs,                                                   // [count], by expert
    uint32_t *__restrict__ tiles, uint32_t count, uint32_t first, uint32_t experts, // those that are here
    uint32_t tokens,                                                                // of a tile, at most
    uint32_t align = 1,                        // an expert's list begins at a multiple of it
    uint32_t *__restrict__ places = nullptr,   // [count] or null: of a pair in the lists
    uint32_t block = 0, uint32_t blocks = 1) { // each lists the pairs of some experts
    constexpr uint32_t kThreads = limits::moe::kGroupThreads;
    __shared__ uint32_t counts[limits::moe::kMaxExperts], starts[limits::moe::kMaxExperts];
    for (uint32_t e = threadIdx.x; e < experts; e += kThreads) counts[e] = 0;
    __syncthreads();
    // Calls `each` with the pairs of experts that are here, and the experts; several loads are under way at once.
    auto for_pairs = [&](auto each) {
        constexpr uint32_t kLoads = 8;
        for (uint32_t from = threadIdx.x; from < count; from += kThreads * kLoads) {
            uint32_t own[kLoads];
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {
                uint32_t p = from + i * kThreads;
                own[i] = p < count ? chosen[p] - first : experts; // below `first` it wraps beyond all experts
            }
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i)
                if (own[i] < experts) each(from + i * kThreads, own[i]);
        }
    };
    for_pairs([&](uint32_t, uint32_t e) { atomicAdd(&counts[e], 1); });
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint32_t unit = min(tokens, 16u);
        uint32_t pairs_before = 0, tiles_before = 0;
        for (uint32_t at = 0; at < experts; at += 32) {
            uint32_t e = at + threadIdx.x, own = e < experts ? counts[e] : 0, parts = (own + tokens - 1) / tokens;
            uint32_t size = own == 0 ? unit : ((own + parts - 1) / parts + unit - 1) / unit * unit;
            uint32_t own_tiles = (own + size - 1) / size;
            uint32_t aligned = (own + align - 1) / align * align;
            uint32_t pairs_to = inclusive_scan(aligned), tiles_to = inclusive_scan(own_tiles);
            if (e < experts) {
                starts[e] = pairs_before + pairs_to - aligned;
                uint32_t *tile = tiles + 1 + 3 * (tiles_before + tiles_to - own_tiles);
                for (uint32_t i = 0; i < own_tiles && block == 0; ++i, tile += 3)
                    tile[0] = e, tile[1] = starts[e] + i * size, tile[2] = min(size, own - i * size);
            }
            pairs_before += __shfl_sync(kAll, pairs_to, 31), tiles_before += __shfl_sync(kAll, tiles_to, 31);
        }
        if (threadIdx.x == 0 && block == 0) tiles[0] = tiles_before;
    }
    __syncthreads();
    // The order of an expert's pairs does not matter: a row's bits depend on the row alone.
    for_pairs([&](uint32_t p, uint32_t e) {
        if (e % blocks != block) return;
        const uint32_t place = atomicAdd(&starts[e], 1);
        pairs[place] = p;
        if (places) places[p] = place;
    });
}
