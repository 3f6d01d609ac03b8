// Skinny GEMM by mma.sync: out = x wᵀ for up to 16 rows of x, every weight read once (GEMV, split-K where a matrix has
// few rows).
//
// x: [m, k] bf16, w: [n, k] bf16, out: [m, n] bf16 or f32, [m, n / 2] bf16(silu(gate)) * up (gated: rows of the gate
// first), or f32 partials [splits, m, n] that csrc/rows/norm.cu adds. All GPUs below Hopper, and Hopper where
// csrc/gemm/skinny_wgmma.cu is not taken. Reference: src/cpu/linear/mod.rs.
//
// Techniques: swap-AB (16 rows of w are operand A, 8 rows of x operand B); split-K; a cp.async ring for each warp
// without barriers; programmatic dependent launch with weights fetched ahead. Bound by memory: 4.1 of 4.46 TB/s in
// steady state on an H200; a decode step of Qwen3-4B takes 2.24 ms of GEMMs at one row, 1.86 at the plain read's rate
// (lab/gemm.md).
//
// Each warp has rows of w of its own, an even share of all there are, at most 16 at a time, and goes along its split of
// their columns, 128 a step. Weights wait in shared memory, kRing steps deep, where each lane reads back what it
// fetched itself: the warps wait for each other only for x, which they share. A row of out does not depend on how many
// rows there are.
//
// The first steps are fetched before the kernels that produce x are done, but for the last: what is in flight delays
// whatever those kernels wait for (a read from the L2 takes 0.2 us when the memory is idle, 2 with a full ring). A
// block leaves no space for a second one of its kernel on a multiprocessor: the launcher asks for more than half of the
// shared memory, because blocks that start while the kernel before ends would otherwise all start where it ended first.
#include "common/async.cuh"
#include "common/base.cuh"
#include "common/math.cuh"
#include "abi/gemm_gemv_splitk.h"
#include "limits.h"

using namespace limits::gemv_splitk;

constexpr int kAhead = 2; // of them before the kernels that produce x are done

enum Epilogue { kPlain, kGated };

struct GemvShape {
    uint32_t m, n, k;
    uint32_t pitch; // of out
    uint32_t split; // columns of a block, a multiple of kStep; blockIdx.y says which
    uint32_t slots; // chunks of x in shared memory: all of a split, or at least 3
};

// The rows of a warp, dealt out in tiles of at most 16 (gated: 8 pairs), and its columns.
template <Epilogue E> struct GemvShare {
    uint32_t first, end, tiles, column, width, steps; // steps of a tile
    __device__ GemvShare(const GemvShape &shape) {
        uint64_t rows = E == kGated ? shape.n / 2 : shape.n;
        uint32_t each = blockDim.x / 32, warps = gridDim.x * each, warp = blockIdx.x * each + threadIdx.x / 32;
        uint32_t most = (uint32_t(rows) + warps - 1) / warps, tile = E == kGated ? 8 : 16;
        first = uint32_t(rows * warp / warps);
        end = uint32_t(rows * (warp + 1) / warps);
        tiles = (most + tile - 1) / tile;
        column = blockIdx.y * shape.split;
        width = min(shape.split, shape.k - column);
        steps = (width + kStep - 1) / kStep;
    }
    __device__ uint32_t tile_row(uint32_t t) const { return first + (end - first) * t / tiles; }
};

// Goes through the steps of all tiles in order and starts the copies of one lane's weights, [kGroups, 2, 32 lanes] a
// step.
template <Epilogue E> struct Weights {
    const bf16 *w, *low, *high; // the lane's next columns of its two rows of the tile
    bool has_low, has_high;
    int32_t left; // columns of the tile from there on, of this lane
    uint32_t tile;
    const GemvShape &shape;
    const GemvShare<E> &share;

    __device__ Weights(const bf16 *w, const GemvShape &shape, const GemvShare<E> &share)
        : w(w), tile(0), shape(shape), share(share) {
        enter();
    }

    __device__ void enter() {
        uint32_t group = threadIdx.x % 32 / 4, row = share.tile_row(tile) + group, end = share.tile_row(tile + 1);
        uint32_t column = threadIdx.x % 4 * 8, second = E == kGated ? shape.n / 2 : 8;
        has_low = row < end;
        has_high = E == kGated ? has_low : row + 8 < end;
        low = has_low ? w + size_t(row) * shape.k + share.column + column : w;
        high = has_high ? w + size_t(row + second) * shape.k + share.column + column : w;
        left = int32_t(share.width - column);
    }

    __device__ __forceinline__ void fetch(uint4 *to) {
        if (tile >= share.tiles) return;
#pragma unroll
        for (int j = 0; j < int(kGroups); ++j) {
            bool inside = 32 * j < left;
            stream16_or_zero(to + 64 * j, inside ? low + 32 * j : w, has_low && inside);
            stream16_or_zero(to + 64 * j + 32, inside ? high + 32 * j : w, has_high && inside);
        }
        low += kStep, high += kStep, left -= kStep;
        if (left <= 0 && ++tile < share.tiles) enter();
    }
};

// Starts the copies of chunk `chunk` of x, [kChunk, kGroups, TILES, 32 lanes] vectors in the order of
// operand B. Rows and columns beyond the end become 0.
template <int TILES, Epilogue E>
__device__ __forceinline__ void fetch_input(const bf16 *x, const GemvShape &shape, const GemvShare<E> &share,
                                            uint32_t chunk, uint4 *to) {
    for (uint32_t i = threadIdx.x; i < kChunk * kGroups * TILES * 32; i += blockDim.x) {
        uint32_t lane = i % 32, row = i / 32 % TILES * 8 + lane / 4;
        uint32_t at = (chunk * kChunk * kGroups + i / (32 * TILES)) * 32 + lane % 4 * 8;
        bool inside = row < shape.m && at < share.width;
        copy16_or_zero(to + i, inside ? x + size_t(row) * shape.k + share.column + at : x, inside);
    }
}

// Clears what `fetch_all` does not write: rows of x beyond the end, and columns beyond the split.
template <int TILES, Epilogue E>
__device__ void clear_input(const GemvShape &shape, const GemvShare<E> &share, uint4 *inputs) {
    if (shape.m == 8 * TILES && share.width % kStep == 0) return;
    for (uint32_t i = threadIdx.x; i < share.steps * kGroups * TILES * 32; i += blockDim.x)
        inputs[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
}

// Starts the copies of all of the split of x, in the same order.
template <int TILES, Epilogue E>
__device__ void fetch_all(const bf16 *x, const GemvShape &shape, const GemvShare<E> &share, uint4 *inputs) {
    const bf16 *from = x + share.column;
    for (uint32_t row = 0; row < shape.m; ++row, from += shape.k) {
        uint4 *to = inputs + row / 8 * 32 + row % 8 * 4;
#pragma unroll 4
        for (uint32_t i = threadIdx.x; i < share.width / 8; i += blockDim.x)
            copy16_or_zero(to + i / 4 * (TILES * 32) + i % 4, from + 8 * i, true);
    }
}

template <int TILES, Epilogue E, typename T>
__device__ __forceinline__ void write(const Accumulator (&acc)[TILES], const GemvShape &shape, uint32_t row,
                                      uint32_t end, T *out) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t token = 8 * t + Accumulator::column(lane, i), at = row + Accumulator::row(lane, 0);
            if (token >= shape.m) continue;
            if (E == kGated) {
                if (at < end)
                    put(out + size_t(token) * shape.pitch + at,
                        silu_times(round_bf16(acc[t][i]), round_bf16(acc[t][2 + i])));
            } else {
                if (at < end) put(out + size_t(token) * shape.pitch + at, acc[t][i]);
                if (at + 8 < end) put(out + size_t(token) * shape.pitch + at + 8, acc[t][2 + i]);
            }
        }
}

// out: [m, n], gated [m, n / 2], or, of T float, one such matrix for each split of the columns.
template <int TILES, Epilogue E, typename T>
__device__ void stream(const bf16 *__restrict__ x, // [m, k], m <= 8 TILES
                       const bf16 *__restrict__ w, // [n, k]
                       T *__restrict__ out, const GemvShape &shape) {
    constexpr uint32_t kInput = kChunk * kGroups * TILES * 32; // vectors of a chunk of x
    constexpr int kSets = TILES == 1 ? 2 : 1;                  // of sums: mma that do not wait for each other
    extern __shared__ uint4 shared[];
    uint4 *inputs = shared; // [slots, kInput]
    uint4 *ring = shared + shape.slots * kInput + threadIdx.x / 32 * (kRing * kGroups * 64) + threadIdx.x % 32;
    release_successor();
    const GemvShare<E> share(shape);
    Weights<E> weights(w, shape, share);
    auto fill = [&](int first, int end) {
        for (int s = first; s < end; ++s) {
            weights.fetch(ring + s * kGroups * 64);
            copies_commit();
        }
    };
    fill(0, kAhead);
    const uint32_t chunks = (share.steps + kChunk - 1) / kChunk, all_chunks = chunks * share.tiles;
    const bool resident = shape.slots >= chunks;
    auto next_input = [&](uint32_t c) {
        if (c < all_chunks) fetch_input<TILES>(x, shape, share, c % chunks, inputs + c % shape.slots * kInput);
    };
    if (resident) clear_input<TILES>(shape, share, inputs);
    wait_for_predecessor();
    if (resident) fetch_all<TILES>(x, shape, share, inputs);
    for (uint32_t c = 0; !resident && c + 1 < shape.slots; ++c) next_input(c);
    copies_commit();
    fill(kAhead, kRing);
    if (sizeof(T) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;

    uint32_t chunk = 0;
    Ring<kRing> slot;
    for (uint32_t tile = 0; tile < share.tiles; ++tile) {
        Accumulator acc[kSets][TILES] = {};
        const uint4 *input = inputs + threadIdx.x % 32;
        for (uint32_t step = 0; step < share.steps; ++step) {
            if (step % kChunk == 0 && (chunk == 0 || !resident)) {
                // The copies of this chunk are older than those of the weights, unless chunks are single steps.
                if (chunk == 0) copies_wait<kRing - kAhead>();
                else if (share.steps > 1) copies_wait<kRing - 1>();
                else copies_wait<0>();
                __syncthreads(); // everybody's part of the chunk is there, and the one before is done with
                if (!resident) {
                    input = inputs + chunk % shape.slots * kInput + threadIdx.x % 32;
                    next_input(chunk + shape.slots - 1);
                }
                ++chunk;
            } else {
                copies_wait<kRing - 1>();
            }
            uint4 *at = ring + slot.index * kGroups * 64, low[kGroups], high[kGroups];
#pragma unroll
            for (int j = 0; j < int(kGroups); ++j) low[j] = at[64 * j], high[j] = at[64 * j + 32];
            weights.fetch(at);
            copies_commit();
            slot.next();
#pragma unroll
            for (int j = 0; j < int(kGroups); ++j)
#pragma unroll
                for (int t = 0; t < TILES; ++t) mma32(acc[j % kSets][t], low[j], high[j], input[(j * TILES + t) * 32]);
            input += kGroups * TILES * 32;
        }
#pragma unroll
        for (int t = 0; t < TILES && kSets > 1; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[0][t][i] += acc[kSets - 1][t][i];
        write<TILES, E>(acc[0], shape, share.tile_row(tile), share.tile_row(tile + 1), out);
    }
}

// Grid: blocks, splits; 32 threads a warp. gated: n is twice the width of `out`, the rows of the gate first.
#define STREAM(name, tiles, epilogue, type)                                                                            \
    extern "C" __global__ __launch_bounds__(32 * kMaxWarps) void name(                                                 \
        const bf16 *x, /* [m, k] */                                                                                    \
        const bf16 *w, /* [n, k] */                                                                                    \
        type *out,     /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */                       \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, /* columns of a split */                   \
        uint32_t slots) {                                                   /* see `GemvShape` */                      \
        stream<tiles, epilogue, type>(x, w, out, {m, n, k, pitch, split, slots});                                      \
    }
#define KERNELS(rows, tiles)                                                                                           \
    STREAM(gemv_splitk_bf16_##rows, tiles, kPlain, bf16)                                                               \
    STREAM(gemv_splitk_f32_##rows, tiles, kPlain, float)                                                               \
    STREAM(gemv_splitk_gated_##rows, tiles, kGated, bf16)
KERNELS(8, 1)
KERNELS(16, 2)
