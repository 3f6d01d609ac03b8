// DeepSeek-V4's experts at few tokens on Hopper (deepseek_v4_skinny.cuh): the routed experts, with weights in FP4, and the shared one, in
// FP8, in the same launches. A pair is a token with one of its k experts and has the number token * k + i; behind these pairs, each token
// has one with the shared expert, number tokens * k + token.
//
//   experts_gate_up: h = weight silu(min(w1 x, limit)) clamp(w3 x, ±limit)   [pairs, width]; x: rounded activations
//   experts_down:    y = w2 h   [pairs, hidden]; h is rounded to e4m3 in groups of 128 columns as it is loaded
//   experts_add:     the sum of a token's y, in the order of the experts, the shared one last
//
// A block has a tile of up to N pairs of one expert. With more than 64 pairs the tiles are a list (deepseek_v4_experts.cu, group_pairs).
// Otherwise there is a block for each pair; the blocks of an expert's first pair, and of each N-th one behind it, take N pairs each, and
// the others end at once. The lower of a lane's two rows is a row of w1, the upper one the same row of w3. Bound by memory: each chosen
// expert is read once for each N of its pairs. Reference: src/cpu/deepseek_v4/experts.rs.
#include "deepseek_v4_skinny.cuh"
#include "abi/deepseek_v4_experts_skinny.h"
#include "limits.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using namespace skinny;

// Steps of a segment of k of gate and up: two warpgroups with two segments each, or four with one, add up to the same bits.
constexpr uint32_t kSegment = 8;

// The experts of this rank, and those that the tokens have chosen.
struct Choice {
    const uint32_t *chosen, *tiles, *pairs; // [tokens * k]; the lists of group_pairs, or null
    uint32_t tokens, k;                     // k: experts of a token
    uint32_t first, experts, shared;        // routed experts of this rank; whether it has the shared expert
};

// Some pairs of an expert: a run of the list, or the set bits of `mask`.
struct PairTile {
    uint32_t expert, count, first;
    const uint32_t *list;
    uint64_t mask;

    // The number of pair `t` of the tile, below `count`.
    __device__ __forceinline__ uint32_t pair(uint32_t t) const {
        if (list) return list[first + t];
        if (!mask) return first + t;
        uint64_t left = mask;
        for (uint32_t i = 0; i < t; ++i) left &= left - 1;
        return uint32_t(__ffsll(left)) - 1;
    }
};

// The tile of this block; false where there is none. Whole warps call it.
template <int N> __device__ __forceinline__ bool find_tile(const Choice &c, PairTile &tile) {
    const uint32_t all = c.tokens * c.k, lane = threadIdx.x % 32;
    const uint32_t routed = c.tiles ? c.tiles[0] : all;
    if (blockIdx.y >= routed) {
        // Tiles of the shared expert.
        const uint32_t token = (blockIdx.y - routed) * N;
        if (!c.shared || token >= c.tokens) return false;
        tile = {c.experts, min(uint32_t(N), c.tokens - token), all + token, nullptr, 0};
        return true;
    }
    if (c.tiles) {
        const uint32_t *at = c.tiles + 1 + 3 * blockIdx.y;
        tile = {at[0], at[2], at[1], c.pairs, 0};
        return true;
    }
    const uint32_t expert = c.chosen[blockIdx.y];
    if (expert - c.first >= c.experts) return false; // below `first` it wraps beyond all experts
    const bool low = lane < all && c.chosen[lane] == expert, high = lane + 32 < all && c.chosen[lane + 32] == expert;
    const uint64_t all_pairs = uint64_t(__ballot_sync(kAll, high)) << 32 | __ballot_sync(kAll, low);
    const uint64_t before = all_pairs & ((1ull << blockIdx.y) - 1), mask = all_pairs - before;
    tile = {expert - c.first, min(uint32_t(N), uint32_t(__popcll(mask))), 0, nullptr, mask};
    return __popcll(before) % N == 0; // else the block of an earlier pair has this one
}

// A matrix of all routed experts, one behind the other, and that of the shared expert.
struct Stack {
    const uint8_t *codes, *scales, *shared_codes, *shared_scales;
};

// Row `low` of one matrix of an expert and row `high` of another, of `rows` rows an expert each. FP4: a routed expert; FP8: the shared
// one.
template <Format F>
__device__ __forceinline__ Weight rows_of(const Stack &low_of, const Stack &high_of, uint32_t expert, uint32_t rows, uint32_t low,
                                          uint32_t high, uint32_t k) {
    constexpr bool kShared = F == Format::kFp8;
    const uint32_t first = kShared ? 0 : expert * rows;
    auto one = [&](const Stack &of) {
        return weight_of<F>(kShared ? of.shared_codes : of.codes, kShared ? of.shared_scales : of.scales, first + low, first + high, k);
    };
    const Weight a = one(low_of), b = one(high_of);
    return {a.low, b.high, a.low_scales, b.high_scales};
}

// Multiplies the tokens that `fill` puts into shared memory with the weight, and calls `put` with the sums.
template <Format F, int N, uint32_t SEGMENT, typename Fill, typename Put>
__device__ __forceinline__ void run(const Share &share, const Weight &weight, const uint2 *tables, Fill fill, Put put) {
    extern __shared__ __align__(1024) uint8_t memory_of_block[];
    Stored<F> stored[kAhead<F>];
    read_ahead(stored, weight, share);
    // Tokens are in FP8, whichever format the weights have.
    const Memory<Format::kFp8, N> tokens(memory_of_block, share);
    fill(tokens);
    const Memory<F, N> memory(memory_of_block, share);
    put(multiply_share<F, N, false, SEGMENT>(memory, share, stored, weight, tables));
}

template <int N>
__device__ void gate_up(const Choice &choice, const uint8_t *x, const Stack &gate, const Stack &up, const float *weights, bf16 *h,
                        uint32_t width, uint32_t k, float limit, uint32_t splits) {
    __shared__ uint2 tables[kEntries];
    constexpr uint32_t kColumns = kTileRows / 2; // of h of a tile
    release_successor();
    fill_tables(tables);
    const Share share(k, splits);
    share.begin();
    wait_for_predecessor();
    PairTile tile;
    if (!find_tile<N>(choice, tile)) return;
    const uint32_t all = choice.tokens * choice.k;
    auto fill = [&](const Memory<Format::kFp8, N> &memory) {
        copy_tokens(memory, share, k, [&](uint32_t t) -> const uint8_t * {
            if (t >= tile.count) return nullptr;
            const uint32_t pair = tile.pair(t);
            return x + size_t(pair < all ? pair / choice.k : pair - all) * packed_bytes(k);
        });
    };
    // Rows of the tile by the lane: 16 w + g is column 8 w + g of w1, 16 w + g + 8 the same of w3.
    const uint32_t column = (share.first_tile + share.tile) * kColumns + threadIdx.x % 128 / 32 * 8 + threadIdx.x % 32 / 4;
    const bool routed = tile.expert < choice.experts;
    auto store = [&](const auto &sums) {
        // Gate and up of an element are 8 rows apart.
        for (uint32_t i = sums.begin() + 2 * (threadIdx.x / 8 * 8) + threadIdx.x % 8; i < sums.end(); i += 2 * blockDim.x) {
            const uint32_t t = i / kTileRows % N, r = i % kTileRows;
            const uint32_t to = (share.first_tile + i / sums.kElements) * kColumns + r / 16 * 8 + r % 8;
            if (t >= tile.count || to >= width) continue;
            const float g = fminf(round_bf16(sums[i]), limit), u = fminf(fmaxf(round_bf16(sums[i + 8]), -limit), limit);
            const uint32_t pair = tile.pair(t);
            put(h + size_t(pair) * width + to, (pair < all ? weights[pair] : 1.f) * (g / (1.f + expf(-g))) * u);
        }
    };
    const uint32_t row = min(column, width - 1);
    if (routed) {
        const Weight w = rows_of<Format::kFp4>(gate, up, tile.expert, width, row, row, k);
        run<Format::kFp4, N, kSegment>(share, w, tables, fill, store);
    } else {
        const Weight w = rows_of<Format::kFp8>(gate, up, tile.expert, width, row, row, k);
        run<Format::kFp8, N, kSegment>(share, w, tables, fill, store);
    }
}

template <int N>
__device__ void down(const Choice &choice, const bf16 *h, const Stack &w2, bf16 *y, uint32_t hidden, uint32_t k, uint32_t splits) {
    __shared__ uint2 tables[kEntries];
    release_successor();
    fill_tables(tables);
    const Share share(k, splits);
    share.begin();
    wait_for_predecessor();
    PairTile tile;
    if (!find_tile<N>(choice, tile)) return;
    auto fill = [&](const Memory<Format::kFp8, N> &memory) {
        put_tokens<Format::kFp8, N, false>(memory, share, [&](uint32_t t) -> const bf16 * {
            return t < tile.count ? h + size_t(tile.pair(t)) * k : nullptr;
        });
    };
    const uint32_t first_row = share.first_tile * kTileRows;
    auto store = [&](const auto &sums) {
        for (uint32_t i = sums.begin() + threadIdx.x; i < sums.end(); i += blockDim.x) {
            const uint32_t t = i / kTileRows % N, row = first_row + i / sums.kElements * kTileRows + i % kTileRows;
            if (row < hidden && t < tile.count) put(y + size_t(tile.pair(t)) * hidden + row, sums[i]);
        }
    };
    const uint32_t low = min(first_row + share.row(), hidden - 1), high = min(first_row + share.row() + 8, hidden - 1);
    if (tile.expert < choice.experts) {
        const Weight w = rows_of<Format::kFp4>(w2, w2, tile.expert, hidden, low, high, k);
        run<Format::kFp4, N, 0>(share, w, tables, fill, store);
    } else {
        const Weight w = rows_of<Format::kFp8>(w2, w2, tile.expert, hidden, low, high, k);
        run<Format::kFp8, N, 0>(share, w, tables, fill, store);
    }
}
#define GATE_UP(N)                                                                                                     \
    gate_up<N>({chosen, tiles, pairs, tokens, experts_of_token, first, experts, shared_gate != nullptr}, x,            \
               {gate, gate_scales, shared_gate, shared_gate_scales}, {up, up_scales, shared_up, shared_up_scales},     \
               weights, h, width, k, limit, splits)
#define DOWN(N)                                                                                                        \
    down<N>({chosen, tiles, pairs, tokens, experts_of_token, first, experts, shared_w != nullptr}, h,                  \
            {w, scales, shared_w, shared_scales}, y, hidden, k, splits)
#else
#define GATE_UP(N) __trap() // the launcher takes another kernel
#define DOWN(N) __trap()
#endif

#define KERNELS(N)                                                                                                     \
    /* Grid: tiles of 32 columns of h over those of a block, tiles of pairs. */                                        \
    extern "C" __global__ __launch_bounds__(512, 1) void experts_gate_up_##N(                                          \
        const uint8_t *x,                                     /* [tokens, packed row of k] */                          \
        const uint8_t *gate, const uint8_t *gate_scales,      /* [experts * width, k] FP4 */                           \
        const uint8_t *up, const uint8_t *up_scales,                                                                   \
        const uint8_t *shared_gate, const uint8_t *shared_gate_scales, /* [width, k] FP8; null: no shared expert */    \
        const uint8_t *shared_up, const uint8_t *shared_up_scales,                                                     \
        const uint32_t *chosen,                               /* [tokens, experts_of_token] */                         \
        const float *weights,                                 /* the same of the pairs */                              \
        const uint32_t *tiles, const uint32_t *pairs,         /* of group_pairs; null: none */                         \
        bf16 *h,                                              /* [pairs, width] */                                     \
        uint32_t tokens, uint32_t experts_of_token, uint32_t first, uint32_t experts, uint32_t width, uint32_t k,      \
        uint32_t splits,                                      /* segments of k of a block */                           \
        float limit) {                                                                                                 \
        GATE_UP(N);                                                                                                    \
    }                                                                                                                  \
    /* Grid: tiles of 64 columns of y over those of a block, tiles of pairs. */                                        \
    extern "C" __global__ __launch_bounds__(512, 1) void experts_down_##N(                                             \
        const bf16 *h,                                        /* [pairs, k] */                                         \
        const uint8_t *w, const uint8_t *scales,              /* [experts * hidden, k] FP4 */                          \
        const uint8_t *shared_w, const uint8_t *shared_scales, /* [hidden, k] FP8; null: no shared expert */           \
        const uint32_t *chosen, const uint32_t *tiles, const uint32_t *pairs,                                          \
        bf16 *y,                                              /* [pairs, hidden] */                                    \
        uint32_t tokens, uint32_t experts_of_token, uint32_t first, uint32_t experts, uint32_t hidden, uint32_t k,     \
        uint32_t splits) {                                                                                             \
        DOWN(N);                                                                                                       \
    }
KERNELS(8)

constexpr uint32_t kMostChosen = limits::deepseek_v4_gemm::kMaxChosen;

// Grid: tokens, columns over threads of a block.
extern "C" __global__ __launch_bounds__(128) void experts_add(
    const bf16 *y,          // [pairs, hidden]
    const uint32_t *chosen, // [tokens, k]
    void *out,              // [tokens, hidden] bf16 or f32, see `to_f32`
    uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts,
    uint32_t shared,        // whether the tokens have pairs with the shared expert
    uint32_t to_f32) {
    __shared__ uint32_t keys[kMostChosen], order[kMostChosen];
    release_successor();
    wait_for_predecessor();
    const uint32_t t = blockIdx.x, c = 2 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (threadIdx.x < k) keys[threadIdx.x] = chosen[size_t(t) * k + threadIdx.x];
    __syncthreads();
    if (threadIdx.x < k) {
        uint32_t before = 0;
        for (uint32_t j = 0; j < k; ++j) // a table of hash routing may name an expert twice
            before += keys[j] < keys[threadIdx.x] || (keys[j] == keys[threadIdx.x] && j < threadIdx.x);
        order[before] = threadIdx.x;
    }
    __syncthreads();
    if (c >= hidden) return;
    float2 sum = make_float2(0.f, 0.f);
    auto read = [&](uint32_t pair) { return widen(__ldcg(reinterpret_cast<const uint32_t *>(y + size_t(pair) * hidden + c))); };
#pragma unroll 8
    for (uint32_t i = 0; i < k; ++i) {
        if (keys[order[i]] - first >= experts) continue;
        const float2 v = read(t * k + order[i]);
        sum.x += v.x, sum.y += v.y;
    }
    if (shared) {
        const float2 v = read(tokens * k + t);
        sum = make_float2(v.x + sum.x, v.y + sum.y);
    }
    const size_t to = size_t(t) * hidden + c;
    if (to_f32) put(static_cast<float *>(out) + to, sum.x, sum.y);
    else put(static_cast<bf16 *>(out) + to, sum.x, sum.y);
}
