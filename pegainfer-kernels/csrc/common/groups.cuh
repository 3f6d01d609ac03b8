// Group-quantised weights as the GPU holds them, in units of 256 columns: w = s v - o. What codes and scales mean:
// pegainfer-core/src/weights/grouped/format.rs. gemm/pack_groups.cu packs them.
//
// Codes: [n, k bits / 8]. A lane quad (lane % 4) of a warp finds together what it multiplies: the 16 columns from 32 j
// on of a block of 128 that it holds in operand A of two steps of 16 columns (csrc/common/frag.cuh), as four pairs:
//   pair i of j: columns 32 j + 16 (i / 2) + 8 (i % 2) + 2 quad, + 1
// Of a row, the lower 4 bits come first, as csrc/common/int4.cuh describes; then, from byte k / 2 on,
//   5 bits: a unit has 32 bytes, 8 a quad, a word for each block: the fifth bits of pair i of j are bits 4 j + i and +
//   16 6 bits: a unit has 64 bytes, 16 a quad, two words for each block: those of j are at bits 8 (j % 2) + 2 i of word
//   j / 2 8 bits: a unit has 256 bytes. Quads find 16 bytes in each run of 64; run 2 block + j / 2 has two words for
//   each j,
//           of which word h has pair 2 h in bytes 0, 2 and pair 2 h + 1 in bytes 1, 3. Integers are offset by 128.
//
// Scales: records [k / 256, n] of 16 or 8 bytes, then, at byte `extra`, more [k / 256, n]:
//   kWide      groups of 128 2^shift columns: [k / group, n] numbers, then zero points [k / group, n] u8
//   kPlain32   8 numbers of 16 bits, bf16 or f16     kZero32  the same, then 8 zero points u8
//   kMin32     the same, then 8 minima               kXs      8 integers offset by 128; then f16 d
//   kK4        f16 d, f16 dmin, then 6 bits each of scales 0 to 7 and minima 0 to 7: see `scale` and `minima_pair`
//   kK6        16 integers offset by 128; then f16 d kE8m0    8 exponents
//   kE4m3      16 e4m3; then, of each row once, an f32
#pragma once
#include "common/int4.cuh"
#include <type_traits>

enum class Codes { kInt4, kInt5, kInt6, kInt8, kE2m1, kE4m3, kIq4 };
enum class Scales { kWide, kPlain32, kZero32, kMin32, kK4, kK6, kXs, kE4m3, kE8m0 };

constexpr uint32_t kUnit = 256; // columns

// A packed weight.
struct GroupWeights {
    const uint8_t *codes, *scales;
    uint64_t extra; // byte of `scales` where more begins; 0: there is none
    uint32_t n, k;
    uint32_t dtype;       // of numbers: 0 f16, 1 bf16, 2 f32 (kWide only)
    uint32_t group_shift; // kWide: a group has 2^group_shift blocks of 128 columns
};

template <Codes C> constexpr bool kBytes = C == Codes::kInt8 || C == Codes::kE4m3;
template <Codes C> constexpr uint32_t kCodeVectors = kBytes<C> ? 4 : 2; // of a lane and row of a unit
template <Codes C> constexpr uint32_t kHighWords = C == Codes::kInt5 ? 2 : C == Codes::kInt6 ? 4 : 0;
template <Codes C> constexpr uint32_t kRowBits = kBytes<C> ? 8 : C == Codes::kInt5 ? 5 : C == Codes::kInt6 ? 6 : 4;
template <Scales S>
constexpr uint32_t kGroup =
    S == Scales::kWide ? 128
    : S == Scales::kK6 || S == Scales::kE4m3
        ? 16
        : 32; // columns that share a scale, or more
template <Scales S> constexpr bool kHasMinima = S == Scales::kMin32 || S == Scales::kK4;
// Scales of a unit have a common factor.
template <Scales S>
constexpr bool kHasFactor = S == Scales::kK4 || S == Scales::kK6 || S == Scales::kXs || S == Scales::kE4m3;

// Calls `f` with each number as a constant.
template <uint32_t... I, typename F> __device__ __forceinline__ void for_each(F f) {
    (f(std::integral_constant<uint32_t, I>{}), ...);
}

// What a lane needs of a row for a unit.
template <Codes C, Scales S> struct Row {
    uint4 codes[kCodeVectors<C>];
    uint32_t high[kHighWords<C> ? kHighWords<C> : 1];
    uint4 record, extra;
};

template <typename T> __device__ __forceinline__ T load_once(const uint8_t *at) {
    return __ldg(reinterpret_cast<const T *>(at));
}

template <Codes C, Scales S>
__device__ __forceinline__ void load(Row<C, S> &out, const GroupWeights &w, uint32_t row, uint32_t unit,
                                     uint32_t quad) {
    const uint8_t *codes = w.codes + size_t(row) * (w.k / 8 * kRowBits<C>), *low = codes + unit * kCodeVectors<C> * 64;
#pragma unroll
    for (uint32_t i = 0; i < kCodeVectors<C>; ++i)
        out.codes[i] = stream16(reinterpret_cast<const bf16 *>(low + i * 64 + quad * 16));
    const uint8_t *high = codes + w.k / 2 + (unit * 4 + quad) * kHighWords<C> * 4;
    if constexpr (C == Codes::kInt5) {
        const uint2 v = load_once<uint2>(high);
        out.high[0] = v.x, out.high[1] = v.y;
    }
    if constexpr (C == Codes::kInt6) {
        const uint4 v = load_once<uint4>(high);
        out.high[0] = v.x, out.high[1] = v.y, out.high[2] = v.z, out.high[3] = v.w;
    }
    const size_t at = size_t(unit) * w.n + row;
    const uint8_t *extra = w.scales + w.extra;
    if constexpr (S == Scales::kWide) {
#pragma unroll
        for (uint32_t b = 0; b < 2; ++b) {
            const size_t place = size_t((unit * 2 + b) >> w.group_shift) * w.n + row;
            const uint32_t value = w.dtype == 2 ? load_once<uint32_t>(w.scales + place * 4)
                                                : uint32_t(load_once<uint16_t>(w.scales + place * 2));
            const uint32_t zero = w.extra ? extra[place] : 8;
            (b ? out.record.y : out.record.x) = value, (b ? out.record.w : out.record.z) = zero;
        }
    } else if constexpr (S == Scales::kE8m0 || S == Scales::kXs) {
        const uint2 v = load_once<uint2>(w.scales + at * 8);
        out.record.x = v.x, out.record.y = v.y;
    } else out.record = load_once<uint4>(w.scales + at * 16);
    if constexpr (S == Scales::kMin32) out.extra = load_once<uint4>(extra + at * 16);
    if constexpr (S == Scales::kZero32) {
        const uint2 v = load_once<uint2>(extra + at * 8);
        out.extra.x = v.x, out.extra.y = v.y;
    }
    if constexpr (S == Scales::kK6 || S == Scales::kXs) out.extra.x = load_once<uint16_t>(extra + at * 2);
    if constexpr (S == Scales::kE4m3) out.extra.x = load_once<uint32_t>(extra + size_t(row) * 4);
}

// (a & b) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
// A pair times a factor, which has to be a power of two or 1, plus a pair.
__device__ __forceinline__ uint32_t pair_fma(uint32_t pair, uint32_t factor, uint32_t add) {
    uint32_t out;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(pair), "r"(factor), "r"(add));
    return out;
}
constexpr uint32_t kOnes = 0x3f803f80u, kMinusZeros = 0x80008000u;

// Bytes 0 and 2 of a word, unsigned, less 128.
__device__ __forceinline__ uint32_t byte_pair(uint32_t word) {
    uint32_t bias; // -256, or -128 if the upper bit is set
    asm("lop3.b32 %0, %1, 0x00800080, 0xc380c380, 0x6a;" : "=r"(bias) : "r"(word)); // (a & b) ^ c
    return pair_fma(and_or(word, 0x007f007fu, 0x43004300u), kOnes, bias);
}

// IQ4_VALUES of nibbles 0, 1, 4 and 5 of the lower 24 bits of a word, offset by 128, as bytes.
__device__ __forceinline__ uint32_t iq4_bytes(uint32_t word) {
    const uint32_t nibbles = __byte_perm(word, 0, 0x4420); // bytes 0 and 2
    const uint32_t low = __byte_perm(0x3f2d1801u, 0x766a5d4fu, nibbles & 0x7777);
    const uint32_t high = __byte_perm(0xa6998d81u, 0xf1d9c5b5u, nibbles & 0x7777);
    const uint32_t upper = __byte_perm(0x0000ff00u, 0, nibbles >> 3 & 0x1111); // bytes of all ones where `high` counts
    return (low & ~upper) | (high & upper);
}

// Pair I of J of a block: v as two bf16, exact, less what `bias` takes from codes of 4 to 6 bits.
template <Codes C, uint32_t J, uint32_t I, Scales S>
__device__ __forceinline__ uint32_t code_pair(const Row<C, S> &row, uint32_t block, uint32_t bias) {
    if constexpr (kBytes<C>) {
        const uint32_t word = int4_word(row.codes[2 * block + J / 2], 2 * (J % 2) + I / 2);
        if constexpr (C == Codes::kInt8) return byte_pair(word >> 8 * (I % 2));
        // e4m3: exponent and fraction in place of bf16's, times 2^120.
        const uint32_t magnitude = (I % 2 ? word >> 4 : word << 4) & 0x07f007f0u;
        return pair_fma(and_or(I % 2 ? word : word << 8, 0x80008000u, magnitude), 0x7b807b80u, kMinusZeros);
    } else {
        const uint32_t word = int4_word(row.codes[block], J);
        if constexpr (C == Codes::kIq4) return byte_pair(iq4_bytes(I < 2 ? word : word >> 8) >> 8 * (I % 2));
        if constexpr (C == Codes::kE2m1) { // the same, times 2^126
            const uint32_t magnitude = (I < 2 ? word << (6 - 4 * I) % 32 : word >> (4 * I - 6) % 32) & 0x01c001c0u;
            return pair_fma(and_or(word << (12 - 4 * I), 0x80008000u, magnitude), 0x7e807e80u, kMinusZeros);
        }
        uint32_t pair = and_or(word >> 4 * I, 0x000f000fu, 0x43004300u); // 128 + q
        if constexpr (kHighWords<C> > 0) {                               // the upper bits, moved to bit 4
            constexpr int bits = C == Codes::kInt5 ? 1 : 2;
            constexpr int right = (C == Codes::kInt5 ? 4 * J + I : 8 * (J % 2) + 2 * I) - 4;
            const uint32_t high = row.high[C == Codes::kInt5 ? block : 2 * block + J / 2];
            pair = and_or(right >= 0 ? high >> (right & 31) : high << (-right & 31),
                          bits == 1 ? 0x00100010u : 0x00300030u, pair);
        }
        return pair_fma(pair, kOnes, bias);
    }
}

// Bias of J of a block: a pair of -(128 + zero point).
template <Codes C, Scales S>
__device__ __forceinline__ uint32_t code_bias(const Row<C, S> &row, uint32_t block, uint32_t j) {
    if constexpr (S == Scales::kWide) return int4_bias(block ? row.record.w : row.record.z);
    if constexpr (S == Scales::kZero32) return int4_bias((block ? row.extra.y : row.extra.x) >> 8 * j & 255);
    if constexpr (kHasMinima<S>) return int4_bias(0);
    return int4_bias(1 << (kRowBits<C> - 1));
}

__device__ __forceinline__ float f16_value(uint32_t bits) { return __half2float(__ushort_as_half(uint16_t(bits))); }
// The bits of `shifted` that `mask`, below 2^23, leaves.
__device__ __forceinline__ float integer(uint32_t shifted, uint32_t mask) {
    return __uint_as_float(and_or(shifted, mask, 0x4b000000u)) - 8388608.f;
}
// Number i of 16 bits of a vector.
__device__ __forceinline__ float number(const uint4 &v, uint32_t i, uint32_t dtype) {
    const uint32_t word = int4_word(v, i / 2);
    if (dtype == 0) return f16_value(word >> 16 * (i % 2));
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
}

// Scale of group `g` of the unit, without the factor.
template <Codes C, Scales S> __device__ __forceinline__ float scale(const Row<C, S> &row, uint32_t g, uint32_t dtype) {
    const uint4 &r = row.record;
    if constexpr (S == Scales::kWide) {
        const uint32_t bits = g ? r.y : r.x;
        return dtype == 2 ? __uint_as_float(bits) : widen_scale(uint16_t(bits), dtype == 0);
    }
    if constexpr (S == Scales::kPlain32 || S == Scales::kZero32 || S == Scales::kMin32) return number(r, g, dtype);
    if constexpr (S == Scales::kK4) { // the upper two bits of words, and upper four bits of halves, are of 5, 6 and 7
        if (g < 5) return integer(r.y >> 6 * g, 63);
        if (g == 7) return integer(r.y >> 30 << 4 | r.z >> 30 << 2 | r.w >> 30, 63);
        const uint32_t word = g == 5 ? r.z : r.w;
        return integer((word >> 12 & 15) | (word >> 24 & 0x30), 63);
    }
    if constexpr (S == Scales::kK6 || S == Scales::kXs) return integer(int4_word(r, g / 4) >> 8 * (g % 4), 255) - 128.f;
    const uint32_t byte = int4_word(r, g / 4) >> 8 * (g % 4);
    if constexpr (S == Scales::kE4m3) return f16_value((byte & 0x80) << 8 | (byte & 0x7f) << 7); // times 2^-8
    const uint32_t exponent = byte & 255; // 2^(e - 127), subnormal of 0
    return __uint_as_float(exponent ? exponent << 23 : 1u << 22);
}
template <Codes C, Scales S> __device__ __forceinline__ float factor(const Row<C, S> &row) {
    if constexpr (S == Scales::kK4) return f16_value(row.record.x);
    if constexpr (S == Scales::kK6 || S == Scales::kXs) return f16_value(row.extra.x);
    if constexpr (S == Scales::kE4m3) return __uint_as_float(row.extra.x) * 256.f;
    return 1.f;
}

// Minima of groups 2 quad and 2 quad + 1 of kK4, without dmin: integers, two bf16.
template <Codes C> __device__ __forceinline__ uint32_t minima_pair(const Row<C, Scales::kK4> &row, uint32_t quad) {
    const uint32_t word = (quad < 2 ? row.record.z : row.record.w) >> 6 * (quad % 2);
    return pair_fma(and_or(word, 0x003f003fu, 0x43004300u), kOnes, int4_bias(0));
}
