// Skinny GEMM by mma.sync with weights of four bits: out = x wᵀ for up to 16 rows of x, every code of w read once.
//
// x: [m, k] bf16; w: [n, k] in four bits with a scale, and a zero point or 8, for each group of columns of a row
// (csrc/common/int4.cuh), the group a multiple of 128. out: [m, n] bf16 or f32, [m, n / 2] bf16(silu(gate)) * up
// (gated: rows of the gate first), or f32 partials [splits, m, n] that csrc/rows/norm.cu adds. All GPUs. Reference:
// src/cpu/linear/mod.rs.
//
// Techniques: as csrc/gemm/gemv_splitk.cu, with codes in the order of operand A, the technique of Marlin (arXiv
// 2408.11743). Codes less zero points are exact in bf16: 128 columns are summed in f32 from zero, and the sum times the
// scale is added to the result. Several warps share the rows of a tile, each with every `parts`-th step of its columns,
// because a warp widens codes more slowly than the memory brings them. Bound by memory and by the instructions that
// widen codes.
#include "common/async.cuh"
#include "common/int4.cuh"
#include "common/math.cuh"
#include "gemm/strip.cuh"
#include "abi/gemm_gemv_int4.h"
#include "limits.h"

using namespace limits::gemv_int4;

constexpr int kAhead = 2;                           // steps before the kernels that produce x are done
constexpr uint32_t kBlocks = kStep / kInt4Block;    // blocks of 128 columns of a step
constexpr uint32_t kStepVectors = kBlocks * 2 * 32; // vectors of codes of a step of a warp
constexpr uint32_t kGroups = kStep / 32;            // groups of 32 columns of a step

enum Epilogue { kPlain, kGated };

struct Shape {
    uint32_t m, n, k;
    uint32_t pitch; // of out
    uint32_t split; // columns of a block, a multiple of kStep; blockIdx.y says which
    uint32_t parts; // warps that share a tile
    uint32_t slots; // chunks of x in shared memory, each with `parts` steps; at least 3
};

// The rows of a warp, dealt out in tiles of at most 16 (gated: 8 pairs), and its columns.
template <Epilogue E> struct Share {
    uint32_t first, end, tiles, part, column, width, rounds; // rounds of `parts` steps of a tile
    __device__ Share(const Shape &shape) {
        uint64_t rows = E == kGated ? shape.n / 2 : shape.n;
        uint32_t warp = threadIdx.x / 32, each = blockDim.x / 32 / shape.parts, strips = gridDim.x * each;
        uint32_t strip = blockIdx.x * each + warp / shape.parts, most = (uint32_t(rows) + strips - 1) / strips;
        uint32_t tile = E == kGated ? 8 : 16, chunk = shape.parts * kStep;
        part = warp % shape.parts;
        first = uint32_t(rows * strip / strips);
        end = uint32_t(rows * (strip + 1) / strips);
        tiles = (most + tile - 1) / tile;
        column = blockIdx.y * shape.split;
        width = min(shape.split, shape.k - column);
        rounds = (width + chunk - 1) / chunk;
    }
    __device__ uint32_t tile_row(uint32_t t) const { return first + (end - first) * t / tiles; }
};

// Int4Weights and biases of a step for the lane's two rows.
struct Rows {
    uint32_t scales[kBlocks], biases[kBlocks]; // of the lower row in the lower half, of the upper one in the upper half
};

// Goes through the steps of all tiles in order, starts the copies of one lane's codes, [kBlocks, 2, 32 lanes] a step,
// and loads scales.
template <Epilogue E> struct Codes4 {
    const uint8_t *w;
    const Int4Weights &scales;
    const Shape &shape;
    const Share<E> &share;
    uint32_t pitch, tile = 0, round = 0, low, high; // the next step to fetch; rows, ~0 for none

    __device__ Codes4(const uint8_t *w, const Int4Weights &scales, const Shape &shape, const Share<E> &share)
        : w(w), scales(scales), shape(shape), share(share), pitch(scales.blocks * 64) {
        enter();
    }
    __device__ void rows_of(uint32_t t, uint32_t &low, uint32_t &high) const {
        uint32_t row = share.tile_row(t) + threadIdx.x % 32 / 4, end = share.tile_row(t + 1);
        low = row < end ? row : ~0u;
        high = E == kGated ? (row < end ? row + shape.n / 2 : ~0u) : (row + 8 < end ? row + 8 : ~0u);
    }
    __device__ void enter() { rows_of(tile, low, high); }
    // First block of 128 columns of a step.
    __device__ uint32_t block(uint32_t round) const {
        return (share.column + (round * shape.parts + share.part) * kStep) / kInt4Block;
    }
    __device__ __forceinline__ void fetch(uint4 *to) {
        if (tile >= share.tiles) return;
        uint32_t first = block(round),
                 end = min((share.column + share.width + kInt4Block - 1) / kInt4Block, scales.blocks);
        const uint8_t *from = w + first * 64 + threadIdx.x % 4 * 16;
        const uint8_t *low_at = from + size_t(low) * pitch, *high_at = from + size_t(high) * pitch;
#pragma unroll
        for (uint32_t j = 0; j < kBlocks; ++j) {
            bool inside = first + j < end, has_low = inside && low != ~0u, has_high = inside && high != ~0u;
            stream16_or_zero(to + 64 * j, has_low ? low_at + 64 * j : w, has_low);
            stream16_or_zero(to + 64 * j + 32, has_high ? high_at + 64 * j : w, has_high);
        }
        if (++round == share.rounds) {
            round = 0;
            if (++tile < share.tiles) enter();
        }
    }
    // Int4Weights of a step; of what is not there, any that are numbers.
    __device__ __forceinline__ Rows load(uint32_t t, uint32_t round) const {
        Rows rows;
        uint32_t low, high, first = block(round);
        rows_of(min(t, share.tiles - 1), low, high);
        low = min(low, shape.n - 1), high = min(high, shape.n - 1);
#pragma unroll
        for (uint32_t j = 0; j < kBlocks; ++j) {
            size_t at = size_t(min(first + j, scales.blocks - 1) >> scales.group_shift) * scales.rows;
            rows.scales[j] = __ldg(scales.values + at + low) | uint32_t(__ldg(scales.values + at + high)) << 16;
            rows.biases[j] = 0x00080008;
            if (scales.zeros)
                rows.biases[j] = __ldg(scales.zeros + at + low) | uint32_t(__ldg(scales.zeros + at + high)) << 16;
        }
        return rows;
    }
};

// Starts the copies of chunk `chunk` of x, [groups of 32 columns, TILES, 4 vectors, 8 rows] vectors: an 8 x 8 matrix is
// 128 bytes, for ldmatrix. Rows and columns beyond the end become 0.
template <int TILES, Epilogue E>
__device__ __forceinline__ void fetch_input(const bf16 *x, const Shape &shape, const Share<E> &share, uint32_t chunk,
                                            uint4 *to) {
    const uint32_t groups = shape.parts * kGroups;
    for (uint32_t i = threadIdx.x; i < groups * TILES * 32; i += blockDim.x) {
        uint32_t in = i % 32, row = i / 32 % TILES * 8 + in / 4,
                 at = (chunk * groups + i / (32 * TILES)) * 32 + in % 4 * 8;
        bool inside = row < shape.m && at < share.width;
        copy16_or_zero(to + i - in + in % 4 * 8 + in / 4, inside ? x + size_t(row) * shape.k + share.column + at : x,
                       inside);
    }
}

// Adds what a step gives. Its blocks take turns, so that the tensor cores work on several sums that do not wait for
// each other.
template <int TILES>
__device__ __forceinline__ void add_step(Accumulator (&acc)[TILES], const uint4 (&low)[kBlocks],
                                         const uint4 (&high)[kBlocks], const Rows &rows, bool is_f16,
                                         const uint4 *input) {
    Accumulator sums[kBlocks][TILES] = {};
    const uint4 *vectors = input + threadIdx.x % 32;
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        uint4 b[kBlocks][TILES];
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i)
#pragma unroll
            for (int t = 0; t < TILES; ++t) b[i][t] = load_matrices(vectors + ((4 * i + j) * TILES + t) * 32);
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) {
            uint32_t lower = int4_word(low[i], j), upper = int4_word(high[i], j);
            uint32_t low_bias = int4_bias(rows.biases[i] & 0xffff), high_bias = int4_bias(rows.biases[i] >> 16);
            uint4 first = make_uint4(int4_pair<0>(lower, low_bias), int4_pair<0>(upper, high_bias),
                                     int4_pair<1>(lower, low_bias), int4_pair<1>(upper, high_bias));
            uint4 second = make_uint4(int4_pair<2>(lower, low_bias), int4_pair<2>(upper, high_bias),
                                      int4_pair<3>(lower, low_bias), int4_pair<3>(upper, high_bias));
#pragma unroll
            for (int t = 0; t < TILES; ++t) mma(sums[i][t], first, b[i][t].x, b[i][t].y);
#pragma unroll
            for (int t = 0; t < TILES; ++t) mma(sums[i][t], second, b[i][t].z, b[i][t].w);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
        const float low_scale = widen_scale(rows.scales[i] & 0xffff, is_f16);
        const float high_scale = widen_scale(rows.scales[i] >> 16, is_f16);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            acc[t][0] += sums[i][t][0] * low_scale, acc[t][1] += sums[i][t][1] * low_scale;
            acc[t][2] += sums[i][t][2] * high_scale, acc[t][3] += sums[i][t][3] * high_scale;
        }
    }
}

// out: [m, n], gated [m, n / 2], or, of T float, one such matrix for each split of the columns.
template <int TILES, Epilogue E, typename T>
__device__ void stream(const bf16 *__restrict__ x, const uint8_t *__restrict__ w, const Int4Weights &scales,
                       T *__restrict__ out, const Shape &shape) {
    extern __shared__ uint4 shared[];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const uint32_t chunk_vectors = shape.parts * kGroups * TILES * 32;
    uint4 *inputs = shared; // [slots, chunk_vectors]
    uint4 *ring = shared + shape.slots * chunk_vectors + warp * (kRing * kStepVectors) + lane;
    float *sums = reinterpret_cast<float *>(shared + shape.slots * chunk_vectors + warps * (kRing * kStepVectors));
    release_successor();
    const Share<E> share(shape);
    Codes4<E> codes(w, scales, shape, share);
    auto fill = [&](int first, int end) {
        for (int s = first; s < end; ++s) {
            codes.fetch(ring + s * kStepVectors);
            copies_commit();
        }
    };
    fill(0, kAhead);
    Rows next = codes.load(0, 0);
    const uint32_t all_chunks = share.rounds * share.tiles;
    auto next_input = [&](uint32_t c) {
        if (c < all_chunks)
            fetch_input<TILES>(x, shape, share, c % share.rounds, inputs + c % shape.slots * chunk_vectors);
    };
    wait_for_predecessor();
    for (uint32_t c = 0; c + 1 < shape.slots; ++c) next_input(c);
    copies_commit();
    fill(kAhead, kRing);
    if (sizeof(T) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;

    uint32_t chunk = 0;
    Ring<kRing> slot;
    for (uint32_t tile = 0; tile < share.tiles; ++tile) {
        Accumulator acc[TILES] = {};
        for (uint32_t round = 0; round < share.rounds; ++round) {
            // The copies of this chunk are older than those of the newest codes.
            if (chunk == 0) copies_wait<kRing - kAhead>();
            else copies_wait<kRing - 1>();
            __syncthreads(); // everybody's part of the chunk is there, and the one before is done with
            const uint4 *input = inputs + chunk % shape.slots * chunk_vectors + share.part * (kGroups * TILES * 32);
            next_input(chunk + shape.slots - 1);
            ++chunk;
            Rows now = next;
            next = round + 1 < share.rounds ? codes.load(tile, round + 1) : codes.load(tile + 1, 0);
            uint4 *at = ring + slot.index * kStepVectors, low[kBlocks], high[kBlocks];
#pragma unroll
            for (uint32_t j = 0; j < kBlocks; ++j) low[j] = at[64 * j], high[j] = at[64 * j + 32];
            codes.fetch(at);
            copies_commit();
            add_step<TILES>(acc, low, high, now, scales.is_f16, input);
            slot.next();
        }
        if (shape.parts > 1) {
            float *own = sums + (warp * 32 + lane) * (4 * TILES);
            __syncthreads(); // the sums of the tile before are read
#pragma unroll
            for (int i = 0; i < 4 * TILES; ++i) own[i] = acc[i / 4][i % 4];
            __syncthreads();
            for (uint32_t p = 1; share.part == 0 && p < shape.parts; ++p)
#pragma unroll
                for (int i = 0; i < 4 * TILES; ++i) acc[i / 4][i % 4] += own[p * 32 * 4 * TILES + i];
        }
        if (share.part == 0)
            write_strip<E == kGated>(acc, shape.m, shape.pitch, share.tile_row(tile), share.tile_row(tile + 1), out);
    }
}

// Grid: blocks, splits; 32 threads a warp, the warps a multiple of `parts`. gated: n is twice the width of `out`.
#define STREAM(name, tiles, epilogue, type)                                                                            \
    extern "C" __global__ __launch_bounds__(32 * (tiles == 1 ? kMaxWarps : 16)) void name(                             \
        const bf16 *x,         /* [m, k] */                                                                            \
        const uint8_t *w,      /* [n, k / 2] */                                                                        \
        const uint8_t *scales, /* [k / group, rows] of two bytes, then zero points [k / group, rows] */                \
        type *out,             /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */               \
        uint64_t zeros,        /* byte of `scales` where zero points begin; 0: they are 8 */                           \
        uint32_t group_shift,  /* a group has 2^group_shift blocks of 128 columns */                                   \
        uint32_t f16,          /* scales are f16, not bf16 */                                                          \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t parts, uint32_t slots) {          \
        const Int4Weights of_w{                                                                                        \
            reinterpret_cast<const uint16_t *>(scales),                                                                \
            zeros ? scales + zeros : nullptr,                                                                          \
            n,                                                                                                         \
            k / kInt4Block,                                                                                            \
            group_shift,                                                                                               \
            f16 != 0};                                                                                                 \
        stream<tiles, epilogue, type>(x, w, of_w, out, {m, n, k, pitch, split, parts, slots});                         \
    }
#define KERNELS(rows, tiles)                                                                                           \
    STREAM(gemv_int4_bf16_##rows, tiles, kPlain, bf16)                                                                 \
    STREAM(gemv_int4_f32_##rows, tiles, kPlain, float)                                                                 \
    STREAM(gemv_int4_gated_##rows, tiles, kGated, bf16)
KERNELS(8, 1)
KERNELS(16, 2)
