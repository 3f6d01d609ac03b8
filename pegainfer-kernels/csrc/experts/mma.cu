// DeepSeek-V4's experts: tokens are grouped by expert on the device, and two grouped GEMMs (deepseek_v4/gemm.cuh) run
// over tiles of the groups. A pair is a token with one of its k experts: number token * k + i.
//
//   group_pairs: the pairs of each expert, and tiles of them
//   gate_up:     h = weight silu(min(w1 x, limit)) clamp(w3 x, ±limit)   rows of h are pairs; where it is asked for
//                also as FP8: the last of the blocks whose columns share a scale to arrive, by a counter, rounds them
//   down:        y = w2 h                                              rows of y are pairs
//   add_pairs:   the sum of a token's y, in the order of the experts, and of a row of the shared expert; rounded once
//
// Gate and up rows lie side by side in a tile: a warp's upper 8 rows are of w1, its lower 8 the same of w3, so that
// SwiGLU needs no exchange. All GPUs. Limit: memory, reading each chosen expert once for each tile of its tokens.
// Reference: src/cpu/deepseek_v4/experts.rs.
#include "deepseek_v4/rounding.cuh"
#include "deepseek_v4/gemm.cuh"
#include "moe/pairs.cuh"
#include "abi/experts_mma.h"

using namespace gemm;
using limits::moe::kGroupThreads, limits::moe::kMaxChosen;

// The tile of this block: from the list, or, without a list, of all tokens with the only expert. False where there is
// none.
template <int TOKENS>
__device__ __forceinline__ bool find_tile(const uint32_t *tiles, uint32_t tokens, PairTile &tile) {
    if (tiles) {
        if (blockIdx.y >= tiles[0]) return false;
        const uint32_t *at = tiles + 1 + 3 * blockIdx.y;
        tile = {at[0], at[1], at[2]};
    } else {
        tile = {0, blockIdx.y * TOKENS, min(uint32_t(TOKENS), tokens - blockIdx.y * TOKENS)};
    }
    return true;
}
__device__ __forceinline__ uint32_t pair_at(const uint32_t *pairs, uint32_t i) { return pairs ? pairs[i] : i; }

// Grid: one block, which lists the pairs of each expert and their tiles.
extern "C" __global__ __launch_bounds__(kGroupThreads) void group_pairs(
    const uint32_t *__restrict__ chosen, uint32_t *__restrict__ pairs, uint32_t *__restrict__ tiles, uint32_t count,
    uint32_t first, uint32_t experts,
    uint32_t tokens) { // see group_by_expert
    group_by_expert(chosen, pairs, tiles, count, first, experts, tokens);
}

// 128 columns of a tile's h, from `column` on, in FP8 as deepseek_v4/quant.cu has it. A warp has a row.
__device__ __forceinline__ void round_tile(const void *h, bf16 *low, const PairTile &tile, const uint32_t *pairs,
                                           uint32_t width, uint32_t column, uint32_t to_f32) {
    for (uint32_t i = threadIdx.x / 32; i < tile.count; i += kThreads / 32) {
        size_t at = size_t(pair_at(pairs, tile.first + i)) * width + column + 4 * (threadIdx.x % 32);
        float4 v;
        // From the L2, where other multiprocessors wrote them.
        if (to_f32) {
            v = __ldcg(reinterpret_cast<const float4 *>(static_cast<const float *>(h) + at));
        } else {
            uint2 two = __ldcg(reinterpret_cast<const uint2 *>(static_cast<const bf16 *>(h) + at));
            float2 low_pair = widen(two.x), high_pair = widen(two.y);
            v = make_float4(low_pair.x, low_pair.y, high_pair.x, high_pair.y);
        }
        float amax = largest4(v.x, v.y, v.z, v.w);
        amax = reduce_lanes(fmaxf(amax, kLeastAmax), 32, Max());
        put(low + at, quantize<E4M3>(v.x, amax), quantize<E4M3>(v.y, amax));
        put(low + at + 2, quantize<E4M3>(v.z, amax), quantize<E4M3>(v.w, amax));
    }
}

template <Format F, int TOKENS, typename W>
__device__ void gate_up_tile(
    const bf16 *__restrict__ x, const W *__restrict__ gate, const W *__restrict__ up,
    const uint8_t *__restrict__ gate_scales, const uint8_t *__restrict__ up_scales, const uint32_t *__restrict__ tiles,
    const uint32_t *__restrict__ pairs, const float *__restrict__ weights, void *out, bf16 *low, uint32_t *counters,
    uint32_t tokens, uint32_t experts_of_token, uint32_t width, uint32_t k, uint32_t planes, uint64_t plane,
    float limit, uint32_t to_f32) {
    PairTile tile;
    if (!find_tile<TOKENS>(tiles, tokens, tile)) return;
    const uint32_t first_column = blockIdx.x * (kRows / 2);
    auto weight = [&](uint32_t r) {
        uint32_t column = first_column + r / 16 * 8 + r % 8;
        bool is_up = r % 16 >= 8;
        return Row{reinterpret_cast<const uint8_t *>(is_up ? up : gate), is_up ? up_scales : gate_scales,
                   column < width ? tile.expert * width + column : kNoRow};
    };
    auto token = [&](uint32_t t) -> const bf16 * {
        if (t >= tile.count) return nullptr;
        return x + size_t(pair_at(pairs, tile.first + t) / experts_of_token) * k;
    };
    TileSums<TOKENS> sums = {};
    multiply<F, TOKENS>(sums, weight, x, token, k, planes, plane, Segments{0, 1, (k + kDepth - 1) / kDepth});
    auto round = [&](float v) { return to_f32 ? v : round_bf16(v); };
    const uint32_t lane = threadIdx.x % 32, column = first_column + threadIdx.x / 32 * 8 + lane / 4;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t at = 8 * t + Accumulator::column(lane, i);
            if (column >= width || at >= tile.count) continue;
            uint32_t pair = pair_at(pairs, tile.first + at);
            float g = fminf(round(sums[t][i]), limit), u = fminf(fmaxf(round(sums[t][i + 2]), -limit), limit);
            float h = (weights ? weights[pair] : 1.f) * exact_silu(g) * u;
            size_t to = size_t(pair) * width + column;
            put_as(out, to, h, to_f32);
        }
    if (!low) return;
    constexpr uint32_t kBlocks = kGroup / (kRows / 2); // whose columns share a scale
    __syncthreads();                                   // the block's columns are written before it arrives
    uint32_t *counter = counters + blockIdx.y * (gridDim.x / kBlocks) + blockIdx.x / kBlocks;
    bool last = threadIdx.x == 0 && arrive_last(counter, kBlocks);
    if (__syncthreads_or(last)) round_tile(out, low, tile, pairs, width, blockIdx.x / kBlocks * kGroup, to_f32);
}

template <Format F, int TOKENS, typename W>
__device__ void down_tile(const bf16 *__restrict__ h, const W *__restrict__ w, const uint8_t *__restrict__ scales,
                          const uint32_t *__restrict__ tiles, const uint32_t *__restrict__ pairs, void *out,
                          uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t planes, uint64_t plane,
                          uint32_t to_f32) {
    PairTile tile;
    if (!find_tile<TOKENS>(tiles, tokens, tile)) return;
    const uint32_t first_row = blockIdx.x * kRows;
    auto weight = [&](uint32_t r) {
        return Row{reinterpret_cast<const uint8_t *>(w), scales,
                   first_row + r < hidden ? tile.expert * hidden + first_row + r : kNoRow};
    };
    auto token = [&](uint32_t t) { return t < tile.count ? h + size_t(pair_at(pairs, tile.first + t)) * k : nullptr; };
    TileSums<TOKENS> sums = {};
    multiply<F, TOKENS>(sums, weight, h, token, k, planes, plane, Segments{0, 1, (k + kDepth - 1) / kDepth});
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t row = first_row + threadIdx.x / 32 * 16 + Accumulator::row(lane, i);
            uint32_t at = 8 * t + Accumulator::column(lane, i);
            if (row >= hidden || at >= tile.count) continue;
            size_t to = size_t(pair_at(pairs, tile.first + at)) * hidden + row;
            put_as(out, to, sums[t][i], to_f32);
        }
}

// A column a thread: the pairs of a token whose experts are here, in the order of the experts, then `shared` unless it
// is null.
template <typename T>
__device__ void sum_pairs(const T *__restrict__ y, const uint32_t *__restrict__ chosen, const T *__restrict__ shared,
                          T *__restrict__ out, uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts) {
    __shared__ uint32_t order[kMaxChosen], keys[kMaxChosen], count;
    if (threadIdx.x < k) keys[threadIdx.x] = chosen[size_t(blockIdx.x) * k + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        count = 0;
        for (uint32_t i = 0; i < k; ++i) {
            if (keys[i] - first >= experts) continue;
            uint32_t at = count++;
            for (; at > 0 && keys[order[at - 1]] > keys[i]; --at) order[at] = order[at - 1];
            order[at] = i;
        }
    }
    __syncthreads();
    uint32_t c = blockIdx.y * blockDim.x + threadIdx.x;
    if (c >= hidden) return;
    float sum = 0.f;
    for (uint32_t i = 0; i < count; ++i) sum += to_float(y[(size_t(blockIdx.x) * k + order[i]) * hidden + c]);
    const size_t to = size_t(blockIdx.x) * hidden + c;
    if (shared) sum += to_float(shared[to]);
    put(out + to, sum);
}

#define BY_ACTIVATION(SUFFIX, T)                                                                                       \
    /* Grid: tokens, columns over threads of a block. */                                                               \
    extern "C" __global__ __launch_bounds__(kThreads) void add_pairs_##SUFFIX(                                         \
        const T *y,             /* [tokens * k, hidden] */                                                             \
        const uint32_t *chosen, /* [tokens, k] */                                                                      \
        const T *shared,        /* [tokens, hidden], of the shared expert; null: none */                               \
        T *out,                 /* [tokens, hidden] */                                                                 \
        uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts) {                                               \
        sum_pairs(y, chosen, shared, out, hidden, k, first, experts);                                                  \
    }
BY_ACTIVATION(bf16, bf16)
BY_ACTIVATION(f32, float)

#define BY_WEIGHT(SUFFIX, FORMAT, W, TOKENS)                                                                           \
    /* Grid: tiles of 32 columns of h, tiles of pairs. */                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void gate_up_##SUFFIX##_##TOKENS(                                \
        const bf16 *x,                                        /* [planes, tokens, k], `plane` elements apart */        \
        const W *gate, const W *up,                           /* [experts * width, k] */                               \
        const uint8_t *gate_scales, const uint8_t *up_scales, /* as deepseek_v4/gemm.cu has them */                    \
        const uint32_t *tiles, const uint32_t *pairs,         /* of group_pairs; null: all tokens with one expert */   \
        const float *weights,                                 /* of the pairs; null: 1 */                              \
        void *out,                                            /* [pairs, width] bf16 or f32 */                         \
        bf16 *low,          /* [pairs, width], `out` rounded to FP8; null: none. With it width is a multiple of 128 */ \
        uint32_t *counters, /* [tiles of pairs, width / 128], zero between launches */                                 \
        uint32_t tokens, uint32_t experts_of_token, uint32_t width, uint32_t k, uint32_t planes, uint64_t plane,       \
        float limit, uint32_t to_f32) {                                                                                \
        gate_up_tile<Format::FORMAT, TOKENS>(                                                                          \
            x, gate, up, gate_scales, up_scales, tiles, pairs, weights, out, low, counters, tokens, experts_of_token,  \
            width, k, planes, plane, limit, to_f32);                                                                   \
    }                                                                                                                  \
    /* Grid: tiles of 64 columns of y, tiles of pairs. */                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void down_##SUFFIX##_##TOKENS(                                   \
        const bf16 *h, /* [planes, pairs, k], `plane` elements apart */                                                \
        const W *w,    /* [experts * hidden, k] */                                                                     \
        const uint8_t *scales, const uint32_t *tiles, const uint32_t *pairs,                                           \
        void *out, /* [pairs, hidden] bf16 or f32 */                                                                   \
        uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t planes, uint64_t plane, uint32_t to_f32) {              \
        down_tile<Format::FORMAT, TOKENS>(h, w, scales, tiles, pairs, out, tokens, hidden, k, planes, plane, to_f32);  \
    }
#define BY_TOKENS(SUFFIX, FORMAT, W)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 8)                                                                                    \
    BY_WEIGHT(SUFFIX, FORMAT, W, 16)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 32)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 64)
BY_TOKENS(bf16, kBf16, bf16)
BY_TOKENS(fp8, kFp8, uint8_t)
BY_TOKENS(fp4, kFp4, uint8_t)
