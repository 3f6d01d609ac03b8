// Skinny GEMM with group-quantised weights: out = x wᵀ for up to 32 rows of x, every code of w read once.
//
// Techniques: swap-AB (16 rows of w are operand A of mma.sync, gated: 8 of the gate and 8 of up); codes packed in the
// order of that operand, so that a lane loads 16 bytes for itself, one unit ahead, straight into registers; the units
// of a block's rows are dealt evenly to its warps, which leave sums in shared memory. Values of codes are exact in
// bf16: the columns of a group are summed in f32 from zero, and the sum times the scale is added to the result.
//
// Minima: o times the sum of x over its group is one more step of 16 columns, 8 groups with the sums as two bf16 each
// (they lose 2^-17).
#pragma once
#include "common/async.cuh"
#include "common/groups.cuh"
#include "gemm/strip.cuh"
#include "limits.h"

// Output as in csrc/gemm/skinny_wgmma.cu.
enum : uint32_t { kToBf16, kToF32, kGatedToBf16 };

struct GroupShape {
    uint32_t m, pitch; // rows of x; elements from a row of out to the next
    uint32_t split;    // columns of a block, a multiple of 256; blockIdx.y says which
    uint32_t chunk;    // columns of x in shared memory at a time, a multiple of 256
    uint32_t slots;    // of sums for each warp: tiles of which it may have a part
    uint32_t output;
};

template <int TILES>
constexpr uint32_t kGroupWarps =
    TILES == 1   ? limits::skinny_groups::kWarps8
    : TILES == 2 ? limits::skinny_groups::kWarps16
                 : limits::skinny_groups::kWarps32;

// acc += w x of a unit.
template <Codes C, Scales S, int TILES>
__device__ __forceinline__ void multiply_unit(Accumulator (&acc)[TILES], const Row<C, S> &low, const Row<C, S> &high,
                                              const uint32_t (&x)[TILES], uint32_t dtype) {
    Accumulator own[TILES] = {}, sums[2][TILES] = {}; // without the unit's factor; without the scale, of each block
    Accumulator(&to)[TILES] = kHasFactor<S> ? own : acc;
    auto scaled = [&](Accumulator(&from)[TILES], uint32_t g) {
        const float upper = scale(low, g, dtype), lower = scale(high, g, dtype);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            to[t][0] += from[t][0] * upper, to[t][1] += from[t][1] * upper;
            to[t][2] += from[t][2] * lower, to[t][3] += from[t][3] * lower;
            from[t] = {};
        }
    };
    auto columns32 = [&](auto index) {
        constexpr uint32_t b = decltype(index)::value / 4, j = decltype(index)::value % 4;
        const uint32_t upper = code_bias(low, b, j), lower = code_bias(high, b, j);
        uint4 v[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) v[t] = load_matrices(x[t] + (4 * b + j) * 64);
        const uint4 first = make_uint4(code_pair<C, j, 0>(low, b, upper), code_pair<C, j, 0>(high, b, lower),
                                       code_pair<C, j, 1>(low, b, upper), code_pair<C, j, 1>(high, b, lower));
        const uint4 next = make_uint4(code_pair<C, j, 2>(low, b, upper), code_pair<C, j, 2>(high, b, lower),
                                      code_pair<C, j, 3>(low, b, upper), code_pair<C, j, 3>(high, b, lower));
        auto &second = sums[kGroup<S> == 16 ? b ^ 1 : b];
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma(sums[b][t], first, v[t].x, v[t].y);
#pragma unroll
        for (int t = 0; t < TILES; ++t) mma(second[t], next, v[t].z, v[t].w);
        if constexpr (kGroup<S> == 16) scaled(sums[b], 8 * b + 2 * j), scaled(second, 8 * b + 2 * j + 1);
        if constexpr (kGroup<S> == 32) scaled(sums[b], 4 * b + j);
        if constexpr (kGroup<S> == 128 && j == 3) scaled(sums[b], b);
    };
    // The blocks take turns: their sums do not wait for each other.
    for_each<0, 4, 1, 5, 2, 6, 3, 7>(columns32);
    if constexpr (kHasFactor<S>) {
        const float upper = factor(low), lower = factor(high);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            acc[t][0] += own[t][0] * upper, acc[t][1] += own[t][1] * upper;
            acc[t][2] += own[t][2] * lower, acc[t][3] += own[t][3] * lower;
        }
    }
}

// acc -= o times sums of x, of a unit's groups. sums: shared address, for the lane's token and quad, of two pairs: the
// upper parts of two groups, the lower parts.
template <Codes C, Scales S, int TILES>
__device__ __forceinline__ void add_minima(Accumulator (&acc)[TILES], const Row<C, S> &low, const Row<C, S> &high,
                                           const uint32_t (&sums)[TILES], uint32_t dtype) {
    const uint32_t quad = threadIdx.x % 4;
    uint2 b[TILES];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(b[t].x), "=r"(b[t].y) : "r"(sums[t]));
    if constexpr (S == Scales::kK4) {
        const uint32_t l = minima_pair(low, quad), h = minima_pair(high, quad);
        const float upper = f16_value(low.record.x >> 16), lower = f16_value(high.record.x >> 16);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            Accumulator sum = {};
            mma(sum, make_uint4(l, h, l, h), b[t].x, b[t].y);
            acc[t][0] -= sum[0] * upper, acc[t][1] -= sum[1] * upper;
            acc[t][2] -= sum[2] * lower, acc[t][3] -= sum[3] * lower;
        }
    } else { // numbers of up to 11 bits are two bf16
        auto split = [&](const Row<C, S> &row, uint32_t &upper, uint32_t &lower) {
            const uint32_t word = quad < 2 ? quad ? row.extra.y : row.extra.x : quad == 2 ? row.extra.z : row.extra.w;
            const float first = dtype ? __uint_as_float(word << 16) : f16_value(word);
            const float second = dtype ? __uint_as_float(word & 0xffff0000u) : f16_value(word >> 16);
            upper = narrow(first, second);
            const float2 rounded = widen(upper);
            lower = narrow(first - rounded.x, second - rounded.y);
        };
        uint32_t l, h, low_rest, high_rest;
        split(low, l, low_rest), split(high, h, high_rest);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            mma(acc[t], make_uint4(l, h, l, h), b[t].x, b[t].y);
            mma(acc[t], make_uint4(low_rest, high_rest, low_rest, high_rest), b[t].x, b[t].y);
        }
    }
}

// Sums of x over groups of 32 columns, as pairs of bf16 of which the second holds what the first loses.
// x: [m][pitch bytes]; to: [m][columns / 256][4 pairs of groups][2 parts][2 groups] bf16.
__device__ __forceinline__ void sum_groups(const uint8_t *x, uint32_t pitch, uint32_t m, uint32_t columns, uint8_t *to,
                                           uint32_t to_pitch) {
    const uint32_t vectors = columns / 8; // whole warps of them
    for (uint32_t i = threadIdx.x; i < m * vectors; i += blockDim.x) {
        const uint32_t row = i / vectors, at = i - row * vectors;
        const uint4 v = *reinterpret_cast<const uint4 *>(x + row * pitch + at * 16);
        float sum = 0;
#pragma unroll
        for (uint32_t e = 0; e < 4; ++e) {
            const float2 pair = widen(int4_word(v, e));
            sum += pair.x + pair.y;
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const uint32_t group = at / 4;
        bf16 *place = reinterpret_cast<bf16 *>(to + row * to_pitch + group / 8 * 32) + group % 8 / 2 * 4 + group % 2;
        const float upper = round_bf16(sum);
        if (at % 4 == 0) put(place, upper), put(place + 2, sum - upper);
    }
}

// A block's tiles of 16 rows, if gated 8 of the gate and 8 of up, and its columns.
struct GroupShare {
    uint32_t first, tiles, column, columns;
    __device__ GroupShare(const GroupWeights &w, const GroupShape &shape) {
        const uint32_t all = w.n / 16, each = all / gridDim.x, more = all % gridDim.x;
        first = each * blockIdx.x + min(blockIdx.x, more), tiles = each + (blockIdx.x < more ? 1 : 0);
        column = blockIdx.y * shape.split, columns = min(shape.split, w.k - column);
    }
};

// Adds the sums of the warps, tile by tile, and writes.
template <int TILES>
__device__ void add_parts(const float4 *parts, const GroupWeights &w, const GroupShape &shape, const GroupShare &share,
                          uint32_t steps, void *out) {
    constexpr uint32_t warps = kGroupWarps<TILES>;
    const uint32_t units = share.tiles * steps;
    for (uint32_t tile = threadIdx.x / 32; tile < share.tiles; tile += warps) {
        Accumulator acc[TILES] = {};
        // Warp p has the units from p units / warps on.
        const uint32_t first = ((tile * steps + 1) * warps - 1) / units,
                       last = ((tile + 1) * steps * warps - 1) / units;
        for (uint32_t p = first; p <= last; ++p) {
            const uint32_t begin = p * units / warps;
            if (begin == (p + 1) * units / warps) continue; // fewer units than warps: this one has none
            const uint32_t slot = tile - begin / steps;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                const float4 v = parts[((p * shape.slots + slot) * TILES + t) * 32 + threadIdx.x % 32];
                acc[t][0] += v.x, acc[t][1] += v.y, acc[t][2] += v.z, acc[t][3] += v.w;
            }
        }
        const uint32_t place = share.first + tile;
        float *sums = static_cast<float *>(out) + size_t(blockIdx.y) * shape.m * w.n;
        if (shape.output == kToBf16)
            write_strip<false>(acc, shape.m, shape.pitch, place * 16, w.n, static_cast<bf16 *>(out));
        else if (shape.output == kToF32) write_strip<false>(acc, shape.m, shape.pitch, place * 16, w.n, sums);
        else write_strip<true>(acc, shape.m, shape.pitch, place * 8, w.n / 2, static_cast<bf16 *>(out));
    }
}

// Shared memory: x [m][chunk + 8] bf16; with minima its sums [m][chunk / 256] of 32 bytes; sums of the warps
// [warps][slots][TILES][32 lanes] of 16 bytes.
template <Codes C, Scales S, int TILES>
__device__ void stream_groups(const bf16 *x, const GroupWeights &w, void *out, const GroupShape &shape) {
    extern __shared__ __align__(16) uint8_t shared[];
    constexpr uint32_t warps = kGroupWarps<TILES>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
    const bool gated = shape.output == kGatedToBf16;
    const GroupShare share(w, shape);
    const uint32_t chunks = (share.columns + shape.chunk - 1) / shape.chunk, steps = shape.chunk / kUnit;
    const uint32_t units = share.tiles * steps, begin = warp * units / warps, end = (warp + 1) * units / warps;
    const uint32_t pitch = shape.chunk * 2 + 16, sums_pitch = steps * 32, sums = shape.m * pitch;
    float4 *parts = reinterpret_cast<float4 *>(shared + sums + (kHasMinima<S> ? shape.m * sums_pitch : 0));
    float4 *own = parts + warp * shape.slots * TILES * 32 + lane;
    uint32_t x_at[TILES], sums_at[TILES]; // rows beyond the last repeat it
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        x_at[t] = shared_address(shared) + min(8 * t + lane % 8, shape.m - 1) * pitch + lane / 8 * 16;
        sums_at[t] = shared_address(shared) + sums + min(8 * t + lane / 4, shape.m - 1) * sums_pitch + quad * 8;
    }
    release_successor();
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const uint32_t column = share.column + chunk * shape.chunk;
        const uint32_t real = min(shape.chunk, share.column + share.columns - column) / kUnit; // steps of the chunk
        auto fetch = [&](Row<C, S> &low, Row<C, S> &high, uint32_t tile, uint32_t step) {
            const uint32_t row = (share.first + tile) * (gated ? 8 : 16) + lane / 4;
            const uint32_t unit = column / kUnit + min(step, real - 1);
            load(low, w, row, unit, quad), load(high, w, row + (gated ? w.n / 2 : 8), unit, quad);
        };
        uint32_t tile = begin / steps, step = begin - tile * steps, slot = 0;
        Row<C, S> low, high;
        if (begin < end) fetch(low, high, tile, step);
        if (chunk == 0) wait_for_predecessor();
        else __syncthreads(); // x is multiplied
        const uint32_t vectors = real * (kUnit / kVector);
        for (uint32_t i = threadIdx.x; i < shape.m * vectors; i += blockDim.x) {
            const uint32_t row = i / vectors, at = i - row * vectors;
            copy16(shared + row * pitch + at * 16, x + size_t(row) * w.k + column + at * kVector);
        }
        copies_wait_all();
        __syncthreads();
        if constexpr (kHasMinima<S>) {
            sum_groups(shared, pitch, shape.m, real * kUnit, shared + sums, sums_pitch);
            __syncthreads();
        }
        Accumulator acc[TILES] = {};
        for (uint32_t unit = begin; unit < end; ++unit) {
            const bool last = step + 1 == steps;
            Row<C, S> next_low, next_high;
            if (unit + 1 < end) fetch(next_low, next_high, tile + last, last ? 0 : step + 1);
            if (step < real) {
                uint32_t from[TILES], of_sums[TILES];
#pragma unroll
                for (int t = 0; t < TILES; ++t)
                    from[t] = x_at[t] + step * (kUnit * 2), of_sums[t] = sums_at[t] + step * 32;
                multiply_unit(acc, low, high, from, w.dtype);
                if constexpr (kHasMinima<S>) add_minima(acc, low, high, of_sums, w.dtype);
            }
            if (last || unit + 1 == end) {
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    float4 *to = own + (slot * TILES + t) * 32;
                    const float4 before = chunk ? *to : make_float4(0, 0, 0, 0);
                    *to = make_float4(before.x + acc[t][0], before.y + acc[t][1], before.z + acc[t][2],
                                      before.w + acc[t][3]);
                    acc[t] = {};
                }
                ++slot;
            }
            low = next_low, high = next_high;
            tile += last, step = last ? 0 : step + 1;
        }
    }
    __syncthreads();
    add_parts<TILES>(parts, w, shape, share, steps, out);
}
