// Seeded random values of a part of a matrix, for dummy weights of the formats of DeepSeek-V4: element (row, column)
// depends on the seed and its place in the whole matrix alone, so that every number of ranks has the same model.
//
// Words of 64 random bits (SplitMix64, as csrc/rows/dummy.cu): eight bytes of codes, or four numbers of 16 bits each.
// One word a thread; all GPUs; bound by arithmetic. Reference: src/cpu/deepseek_v4/dummy.rs.
#include "common/base.cuh"
#include "common/random.cuh"
#include "abi/deepseek_v4_dummy.h"

// Calls `put(i, bits)` for EACH elements of the part from element EACH * thread on, with the bits of its lane of the
// word.
template <int EACH, typename Put>
__device__ __forceinline__ void fill(uint64_t seed, uint64_t elements, uint32_t width, uint64_t whole,
                                     uint64_t first_row, uint64_t first_column, Put put) {
    uint64_t i = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * EACH;
    if (i >= elements) return;
    uint64_t start = mix(seed + kGolden), place = (first_row + i / width) * whole + first_column + i % width;
    uint32_t column = i % width;
    uint64_t at = place / EACH, word = mix(start + (at + 1) * kGolden);
#pragma unroll
    for (int j = 0; j < EACH; ++j, ++i, ++place) {
        if (i >= elements) return;
        if (place / EACH != at) at = place / EACH, word = mix(start + (at + 1) * kGolden);
        put(i, word >> (64 / EACH * (place % EACH)));
        if (++column == width) column = 0, place += whole - width;
    }
}

// Grid: words of elements over threads of a block.
extern "C" __global__ void random_codes(
    uint8_t *__restrict__ out, // [elements / width, width]: rows and columns of a matrix of `whole` columns
    uint64_t seed, uint64_t elements, uint32_t width, uint64_t whole, uint64_t first_row, uint64_t first_column,
    uint32_t mask, uint32_t add) {
    fill<8>(seed, elements, width, whole, first_row, first_column,
            [&](uint64_t i, uint64_t bits) { out[i] = uint8_t((bits & mask) + add); });
}

#define NUMBERS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void random_numbers_##SUFFIX(                                                                \
        T *__restrict__ out, /* as above */                                                                            \
        uint64_t seed, uint64_t elements, uint32_t width, uint64_t whole, uint64_t first_row, uint64_t first_column,   \
        float limit) {                                                                                                 \
        fill<4>(seed, elements, width, whole, first_row, first_column,                                                 \
                [&](uint64_t i, uint64_t bits) { put(out + i, float(int16_t(bits)) / 32768.f * limit); });             \
    }
NUMBERS(bf16, bf16)
NUMBERS(f32, float)
