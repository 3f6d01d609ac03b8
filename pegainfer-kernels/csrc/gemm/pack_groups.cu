// Group-quantised weights from the layout of checkpoints (pegainfer-core/src/weights/grouped/format.rs) to that of the
// kernels (common/groups.cuh), and widened to bf16 from there: w = s v - o, rounded once to f32 and once to bf16.
//
// All GPUs, bound by memory. Reference: pegainfer-core/src/weights/grouped/row.rs.
#include "common/groups.cuh"
#include "abi/gemm_pack_groups.h"
#include "limits.h"

using namespace limits::pack_groups;

// Column of pair `i` of `j` of a block of 128.
__device__ __forceinline__ uint32_t pair_column(uint32_t j, uint32_t i, uint32_t quad) {
    return 32 * j + i / 2 * 16 + i % 2 * 8 + 2 * quad;
}

// Code of `column` of a row of a checkpoint; integers of 8 bits offset by 128.
__device__ uint32_t checkpoint_code(const uint8_t *row, uint32_t column, uint32_t bits, uint32_t k, uint32_t flip) {
    if (bits == 8) return row[column] ^ flip;
    const uint32_t run = column / 32, in = column % 32, high = k / 2;
    uint32_t code = row[run * 16 + in % 16] >> (in / 16 * 4) & 15;
    if (bits == 5) code |= (row[high + run * 4 + in / 8] >> in % 8 & 1) << 4;
    if (bits == 6) code |= (row[high + run * 8 + in % 8] >> in / 8 * 2 & 3) << 4;
    return code;
}

// Grid: a quad's codes of 128 columns over threads of a block. In place: lanes of one warp have all of a unit.
extern "C" __global__ __launch_bounds__(kThreads) void pack_codes(
    uint8_t *codes, // [n, k bits / 8], k a multiple of 256, or, of 4 bits, 128
    uint32_t n, uint32_t k, uint32_t bits, uint32_t is_integer) { // codes of 8 bits are integers
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    const bool inside = at < size_t(n) * (k / 32);
    const uint32_t row = inside ? at / (k / 32) : 0, rest = at - size_t(row) * (k / 32), block = rest / 4,
                   quad = at % 4;
    uint8_t *to = codes + size_t(row) * (k / 8 * bits);
    uint32_t low[4] = {}, bytes[4][2] = {}, high[2] = {};
    for (uint32_t j = 0; inside && j < 4; ++j)
        for (uint32_t e = 0; e < 8; ++e) {
            const uint32_t i = e / 2, half = e % 2;
            const uint32_t column = block * kInt4Block + pair_column(j, i, quad) + half;
            const uint32_t code = checkpoint_code(to, column, bits, k, is_integer ? 128 : 0);
            low[j] |= (code & 15) << (4 * i + 16 * half);
            bytes[j][i / 2] |= code << (8 * (i % 2) + 16 * half);
            if (bits == 5) high[0] |= code >> 4 << (4 * j + i + 16 * half);
            if (bits == 6) high[j / 2] |= code >> 4 << (8 * (j % 2) + 2 * i + 16 * half);
        }
    __syncwarp();
    if (!inside) return;
    if (bits == 8) {
        for (uint32_t j = 0; j < 4; ++j) {
            uint8_t *place = to + block / 2 * kUnit + (2 * (block % 2) + j / 2) * 64 + quad * 16 + j % 2 * 8;
            *reinterpret_cast<uint2 *>(place) = make_uint2(bytes[j][0], bytes[j][1]);
        }
        return;
    }
    *reinterpret_cast<uint4 *>(to + block * 64 + quad * 16) = make_uint4(low[0], low[1], low[2], low[3]);
    uint8_t *place = to + k / 2 + block / 2 * (bits == 5 ? 32 : 64) + quad * (bits == 5 ? 8 : 16);
    if (bits == 5) *reinterpret_cast<uint32_t *>(place + block % 2 * 4) = high[0];
    if (bits == 6) *reinterpret_cast<uint2 *>(place + block % 2 * 8) = make_uint2(high[0], high[1]);
}

// Six bits: scale j, or 8 + j minimum j, of the 12 bytes of a Q4_K block.
__device__ uint32_t six_bits(const uint8_t *packed, uint32_t i) {
    const uint32_t j = i % 8, is_min = i / 8;
    if (j < 4) return packed[j + 4 * is_min] & 63;
    return (packed[j + 4] >> 4 * is_min & 15) | packed[j - 4 * (1 - is_min)] >> 6 << 4;
}

// Grid: units over threads of a block, a unit's rows after each other. Scales but those of kWide.
extern "C" __global__ __launch_bounds__(kThreads) void pack_scales(
    const uint8_t *from, // [n, pitch]
    uint8_t *to,         // records, then `extra`
    uint64_t extra, uint32_t kind, uint32_t n, uint32_t k, uint32_t pitch, uint32_t group) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(n) * (k / kUnit)) return;
    const uint32_t unit = at / n, row = at - size_t(unit) * n;
    const uint8_t *of_row = from + size_t(row) * pitch;
    const Scales s = Scales(kind);
    uint8_t *record = to + at * (s == Scales::kXs || s == Scales::kE8m0 ? 8 : 16), *more = to + extra;
    auto copy = [&](uint8_t *place, const uint8_t *source, uint32_t bytes) {
        for (uint32_t i = 0; i < bytes; ++i) place[i] = source[i];
    };
    if (s == Scales::kPlain32 || s == Scales::kZero32 || s == Scales::kMin32) {
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t g = (unit * kUnit + i * 32) / group, groups = k / group;
            copy(record + i * 2, of_row + g * 2, 2);
            if (s == Scales::kMin32) copy(more + at * 16 + i * 2, of_row + (groups + g) * 2, 2);
            if (s == Scales::kZero32) more[at * 8 + i] = of_row[groups * 2 + g];
        }
    } else if (s == Scales::kK4) {
        const uint8_t *block = of_row + unit * 16;
        auto scale = [&](uint32_t i) { return six_bits(block + 4, i); };
        auto minimum = [&](uint32_t i) { return six_bits(block + 4, 8 + i); };
        uint32_t *words = reinterpret_cast<uint32_t *>(record);
        words[0] = block[0] | block[1] << 8 | block[2] << 16 | uint32_t(block[3]) << 24;
        words[1] = scale(7) >> 4 << 30;
        for (uint32_t i = 0; i < 5; ++i) words[1] |= scale(i) << 6 * i;
        for (uint32_t h = 0; h < 2; ++h)
            words[2 + h] =
                minimum(4 * h) | minimum(4 * h + 2) << 6 | minimum(4 * h + 1) << 16 | minimum(4 * h + 3) << 22 |
                (scale(5 + h) & 15) << 12 | scale(5 + h) >> 4 << 28 | (scale(7) >> (h ? 0 : 2) & 3) << 30;
    } else if (s == Scales::kK6) {
        for (uint32_t i = 0; i < 16; ++i) record[i] = of_row[unit * 18 + i] ^ 128;
        copy(more + at * 2, of_row + unit * 18 + 16, 2);
    } else if (s == Scales::kXs) {
        const uint8_t *block = of_row + unit * 8;
        for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t high = (block[2] | block[3] << 8) >> 2 * i & 3;
            record[i] = (block[4 + i / 2] >> i % 2 * 4 & 15) + high * 16 + (128 - 32);
        }
        copy(more + at * 2, block, 2);
    } else if (s == Scales::kE4m3) {
        copy(record, of_row + 4 + unit * 16, 16);
        if (unit == 0) copy(more + size_t(row) * 4, of_row, 4);
    } else copy(record, of_row + unit * 8, 8);
}

// Grid: elements over threads of a block. Elements of `bytes` bytes, transposed.
extern "C" __global__ __launch_bounds__(kThreads) void transpose_scales(
    const uint8_t *from, // [n, pitch] bytes, the elements of a row from `first` on
    uint8_t *to,         // from byte to_first on: [groups, n] elements
    uint64_t to_first, uint32_t n, uint32_t groups, uint32_t pitch, uint32_t first, uint32_t bytes) {
    size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(n) * groups) return;
    uint32_t group = at / n, row = at - size_t(group) * n;
    const uint8_t *element = from + size_t(row) * pitch + first + group * bytes;
    for (uint32_t i = 0; i < bytes; ++i) to[to_first + at * bytes + i] = element[i];
}

// Grid: numbers over threads of a block. Scales of blocks of 128 x 128, for each row: kWide, f32.
extern "C" __global__ __launch_bounds__(kThreads) void expand_scales(const float *from, // [n / 128 rounded up, blocks]
                                                                     uint8_t *to,       // [blocks, n] f32
                                                                     uint32_t n, uint32_t blocks) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x;
    if (at >= size_t(n) * blocks) return;
    const uint32_t block = at / n, row = at - size_t(block) * n;
    reinterpret_cast<float *>(to)[at] = from[size_t(row / kInt4Block) * blocks + block];
}

// Minimum of group `g` of the unit.
template <Codes C, Scales S>
__device__ __forceinline__ float minimum(const Row<C, S> &row, uint32_t g, uint32_t dtype) {
    if constexpr (S == Scales::kMin32) return number(row.extra, g, dtype);
    if constexpr (S == Scales::kK4) {
        const uint32_t pair = minima_pair(row, g / 2);
        return -(f16_value(row.record.x >> 16) * (g % 2 ? widen(pair).y : widen(pair).x));
    }
    return 0.f;
}

// A quad's columns of a unit of a row of w, to out [rows, k].
template <Codes C, Scales S>
__device__ void widen_unit(const GroupWeights &w, bf16 *out, uint32_t first, uint32_t rows) {
    const size_t at = size_t(blockIdx.x) * kThreads + threadIdx.x, units = w.k / kUnit;
    const bool inside = at / 4 < rows * units;
    const size_t place = inside ? at / 4 : 0;
    const uint32_t row = place / units, unit = place - row * units, lane = threadIdx.x % 32, quad = lane % 4;
    Row<C, S> packed;
    load(packed, w, first + row, unit, quad);
    const float common = factor(packed);
    bf16 *to = out + size_t(row) * w.k + unit * kUnit + 8 * quad;
    // Pair i of every lane belongs to the eight columns of lane i: transposes the 4 x 4 matrix of pairs.
    auto exchange = [&](uint32_t &low, uint32_t &high, uint32_t distance) {
        const bool upper = lane & distance;
        const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, distance);
        (upper ? low : high) = other;
    };
    auto columns32 = [&](auto index) {
        constexpr uint32_t b = decltype(index)::value / 4, j = decltype(index)::value % 4;
        const uint32_t bias = code_bias(packed, b, j);
        auto value = [&](uint32_t pair, uint32_t half) { // of columns 16 `half` on
            const uint32_t g = kGroup<S> == 128 ? b : kGroup<S> == 32 ? 4 * b + j : 8 * b + 2 * j + half;
            const float s = common * scale(packed, g, w.dtype), m = minimum(packed, g, w.dtype);
            const float2 v = widen(pair);
            return narrow(__fadd_rn(__fmul_rn(s, v.x), m), __fadd_rn(__fmul_rn(s, v.y), m));
        };
        uint32_t v[4] = {value(code_pair<C, j, 0>(packed, b, bias), 0), value(code_pair<C, j, 1>(packed, b, bias), 0),
                         value(code_pair<C, j, 2>(packed, b, bias), 1), value(code_pair<C, j, 3>(packed, b, bias), 1)};
        exchange(v[0], v[1], 1), exchange(v[2], v[3], 1);
        exchange(v[0], v[2], 2), exchange(v[1], v[3], 2);
        if (inside) *reinterpret_cast<uint4 *>(to + b * kInt4Block + 32 * j) = make_uint4(v[0], v[1], v[2], v[3]);
    };
    for_each<0, 1, 2, 3, 4, 5, 6, 7>(columns32);
}

// Grid: quads of units over threads of a block. Rows of w from `first` on.
#define WIDEN(name, C, S)                                                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void widen_##name(                                               \
        const uint8_t *codes, const uint8_t *scales, /* common/groups.cuh */                                           \
        bf16 *out,                                   /* [rows, k] */                                                   \
        uint64_t extra, uint32_t dtype, uint32_t group_shift, uint32_t n, uint32_t k, uint32_t first, uint32_t rows) { \
        widen_unit<Codes::C, Scales::S>({codes, scales, extra, n, k, dtype, group_shift}, out, first, rows);           \
    }
WIDEN(int4_plain, kInt4, kPlain32)
WIDEN(int4_zero, kInt4, kZero32)
WIDEN(int4_min, kInt4, kMin32)
WIDEN(int4_k, kInt4, kK4)
WIDEN(int5_plain, kInt5, kPlain32)
WIDEN(int5_min, kInt5, kMin32)
WIDEN(int5_k, kInt5, kK4)
WIDEN(int6_k, kInt6, kK6)
WIDEN(int8_plain, kInt8, kPlain32)
WIDEN(iq4_plain, kIq4, kPlain32)
WIDEN(iq4_xs, kIq4, kXs)
WIDEN(e2m1_e4m3, kE2m1, kE4m3)
WIDEN(e2m1_e8m0, kE2m1, kE8m0)
WIDEN(e4m3_wide, kE4m3, kWide)
