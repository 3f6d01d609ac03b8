// What DeepSeek-V4's experts at many tokens (experts/wgmma.cu) are made of: the tiles of a block, its shared memory,
// and the threads that fill it.
//
// Two rings, because they are filled from different places: weights come from memory, by one thread that runs ahead of
// the GEMM by the length of the ring; tokens come from the L2, each block's half of them for both blocks of its cluster
// (multicast), which needs a free stage in both. A third group of threads fetches what a tile needs once: the scales of
// its rows, and the numbers or the weights of its pairs.
#pragma once
#include "common/cluster.cuh"
#include "experts/w4a8.cuh"
#include "limits.h"

namespace {
using namespace limits::deepseek_v4_experts_wgmma;

constexpr uint32_t kProducers = 128;   // threads that fetch: one the weights, one the tokens,
constexpr uint32_t kListThreads = 64;  // and these the lists
constexpr uint32_t kSlots = 2;         // tiles whose lists are in shared memory
constexpr uint32_t kStagedTokens = 32; // of the output that are staged at once
constexpr uint32_t kPadding = 16; // bytes behind each row of scales and of the staged output, against bank conflicts

// Some pairs of an expert (`count` from place `first` of the list on), and the first row of its weights (gate_up: first
// column of h).
struct ExpertTile {
    uint32_t expert, first, count, row;
};

// A block whose tiles have at most TOKENS tokens: its warpgroups that multiply, each with 64 rows of a tile of weights.
// With few tokens a warpgroup waits more than it computes, and has few sums: there are four of them.
template <int TOKENS> struct Block {
    static constexpr uint32_t kGroups = TOKENS == 48 ? 4 : 2;
    static constexpr uint32_t kConsumers = 128 * kGroups, kThreads = kConsumers + kProducers;
    static constexpr uint32_t kRows = 64 * kGroups, kHalfRows = kRows / 2; // of gate, and as many of up
};

// The shared memory of such a block.
template <int TOKENS> struct BlockShared : Block<TOKENS> {
    using Block<TOKENS>::kGroups, Block<TOKENS>::kRows;
    static constexpr int kTokenStages = TOKENS == 48 ? 5 : 6;
    static constexpr int kWeightStages = TOKENS == 48 ? 6 : 8;
    static constexpr uint32_t kScaleStride = kMaxDepth / w4a8::kScaled + kPadding;
    uint8_t tokens[kTokenStages][TOKENS * w4a8::kStep];
    uint8_t weights[kWeightStages][kRows * w4a8::kRowBytes];
    float scales[kTokenStages][TOKENS];
    uint8_t row_scales[kSlots][kRows * kScaleStride];
    uint8_t staged[kGroups][(TOKENS < kStagedTokens ? TOKENS : kStagedTokens) * (128 + kPadding)];
    uint2 table[w4a8::kTable];
    uint32_t rows[kSlots][TOKENS]; // of y (down)
    float factors[kSlots][TOKENS]; // weights of the pairs (gate_up)
    uint64_t weights_full[kWeightStages], weights_empty[kWeightStages], tokens_full[kTokenStages],
        tokens_empty[kTokenStages];
    uint64_t lists_full[kSlots], lists_empty[kSlots];
};
template <int TOKENS>
constexpr bool kFits = sizeof(BlockShared<TOKENS>) + 1024 <= limits::deepseek_v4_experts_wgmma::kSharedBytes;
static_assert(Block<48>::kThreads == kFewThreads && Block<96>::kThreads == kThreads && Block<128>::kThreads == kThreads,
              "threads of a block");
static_assert(kFits<48> && kFits<96> && kFits<128>, "shared memory of a block");

// A GEMM of all tiles of pairs.
struct Problem {
    const TensorMap *x;    // [places, k] codes, permuted
    const float *x_scales; // [k / 128, pitch]
    const TensorMap *w[2]; // gate and up, or down twice: [experts * rows_of_expert, k / 2]
    const uint8_t *w_scales[2];
    const uint32_t *tiles, *pairs;
    const float *weights;
    bf16 *out;
    uint32_t k, rows_of_expert, pitch;
    uint32_t first_row, row_tiles; // of this launch
    uint32_t out_width;
    float limit;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tiles of a block, one after another. The blocks of a cluster have the same pairs.
template <bool GATE_UP, int TOKENS> struct Schedule {
    const Problem &p;
    const uint32_t end;
    uint32_t at, number = 0; // of the cluster's tiles
    __device__ __forceinline__ Schedule(const Problem &p)
        : p(p), end(p.tiles[0] * (p.row_tiles / kBlocks)), at(blockIdx.x / kBlocks) {}
    __device__ __forceinline__ bool any() const { return at < end; }
    __device__ __forceinline__ void next() { at += gridDim.x / kBlocks, ++number; }
    __device__ __forceinline__ uint32_t slot() const { return number % kSlots; }
    __device__ __forceinline__ uint32_t parity() const { return number / kSlots % 2; }
    __device__ __forceinline__ ExpertTile tile() const {
        const uint32_t each = p.row_tiles / kBlocks, *from = p.tiles + 1 + 3 * (at / each);
        const uint32_t row_tile = at % each * kBlocks + block_rank();
        return {from[0], from[1], from[2],
                p.first_row + row_tile * (GATE_UP ? Block<TOKENS>::kHalfRows : Block<TOKENS>::kRows)};
    }
};

// The thread that fetches the weights of all steps.
template <bool GATE_UP, int TOKENS>
__device__ __forceinline__ void fetch_weights(BlockShared<TOKENS> &s, const Problem &p) {
    using S = BlockShared<TOKENS>;
    Ring<S::kWeightStages> ring;
    const uint32_t columns = p.k / 4; // pairs of bytes
    for (Schedule<GATE_UP, TOKENS> schedule(p); schedule.any(); schedule.next()) {
        const ExpertTile tile = schedule.tile();
        const uint32_t first_row = tile.expert * p.rows_of_expert + tile.row;
        for (uint32_t column = 0; column < columns; column += w4a8::kRowBytes / 2) {
            wait(&s.weights_empty[ring.index], ring.parity ^ 1);
            uint64_t *full = &s.weights_full[ring.index];
            arrive_expecting(full, sizeof(s.weights[0]));
            const uint32_t to = shared_address(s.weights[ring.index]);
#pragma unroll
            for (uint32_t row = 0; row < S::kRows; row += kBoxRows)
                copy_box(to + row * w4a8::kRowBytes, *p.w[row / S::kHalfRows], column,
                         first_row + (GATE_UP ? row % S::kHalfRows : row), full);
            ring.next();
        }
    }
}

// The thread that fetches the tokens of all steps: each block of a cluster a part of them, for all blocks.
template <bool GATE_UP, int TOKENS>
__device__ __forceinline__ void fetch_tokens(BlockShared<TOKENS> &s, const Problem &p) {
    Ring<BlockShared<TOKENS>::kTokenStages> ring;
    const uint32_t columns = p.k / 2, rank = block_rank();
    for (Schedule<GATE_UP, TOKENS> schedule(p); schedule.any(); schedule.next()) {
        const ExpertTile tile = schedule.tile();
        const uint32_t boxes = (tile.count + kBoxTokens - 1) / kBoxTokens;
        const float *scales = p.x_scales + tile.first;
        for (uint32_t column = 0; column < columns; column += w4a8::kStep / 2, scales += p.pitch) {
            wait(&s.tokens_empty[ring.index], ring.parity ^ 1);
            uint64_t *full = &s.tokens_full[ring.index];
            arrive_expecting(full, boxes * kBoxTokens * (w4a8::kStep + 4));
            const uint32_t to = shared_address(s.tokens[ring.index]);
#pragma unroll 1
            for (uint32_t box = rank; box < boxes; box += kBlocks)
                copy_box_to_blocks(to + box * (kBoxTokens * w4a8::kStep), *p.x, column, tile.first + box * kBoxTokens,
                                   full, (1 << kBlocks) - 1);
            copy_bulk(s.scales[ring.index], scales, boxes * (kBoxTokens * 4), full);
            ring.next();
        }
    }
}

// A thread of those that fetch the scales of a tile's rows, and what its pairs need.
template <bool GATE_UP, int TOKENS>
__device__ __forceinline__ void fetch_lists(BlockShared<TOKENS> &s, const Problem &p, uint32_t thread) {
    using S = BlockShared<TOKENS>;
    const uint32_t bytes = p.k / w4a8::kScaled;
    for (Schedule<GATE_UP, TOKENS> schedule(p); schedule.any(); schedule.next()) {
        const ExpertTile tile = schedule.tile();
        const uint32_t slot = schedule.slot();
        wait(&s.lists_empty[slot], schedule.parity() ^ 1);
        for (uint32_t row = thread; row < S::kRows; row += kListThreads) {
            const uint8_t *from = GATE_UP && row >= S::kHalfRows ? p.w_scales[1] : p.w_scales[0];
            from += (size_t(tile.expert) * p.rows_of_expert + tile.row + (GATE_UP ? row % S::kHalfRows : row)) * bytes;
            const uint32_t to = shared_address(s.row_scales[slot]) + row * S::kScaleStride;
            if (bytes % 16 == 0)
                for (uint32_t i = 0; i < bytes; i += 16) copy16(to + i, from + i);
            else
                for (uint32_t i = 0; i < bytes; i += 4) copy4(to + i, from + i);
        }
        for (uint32_t i = thread; i < tile.count; i += kListThreads) {
            const uint32_t pair = p.pairs[tile.first + i];
            if (GATE_UP) s.factors[slot][i] = p.weights[pair];
            else s.rows[slot][i] = pair;
        }
        copies_wait_all();
        arrive(&s.lists_full[slot]);
    }
}
#endif
} // namespace
