// Seeded random weights (--load-format dummy), the same on every device: pegainfer-core/src/weights/dummy.rs.
//
// A counter-based generator on the finaliser of SplitMix64: element i depends on seed and i alone. All GPUs; bound by
// memory.
#include "common/base.cuh"
#include "common/random.cuh"
#include "abi/rows_dummy.h"

constexpr uint32_t kGroups = 1u << 14; // groups of a random stream: 65,536 elements

// One group of four elements a thread: 64 bits, 16 for each element from the low ones up, as a signed number over 32768
// times `limit`, rounded once by the multiplication and once to bf16.
extern "C" __global__ void uniform(bf16 *__restrict__ out, // [4 * groups]
                                   uint64_t seed, uint32_t groups, float limit) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= groups) return;
    uint64_t bits = mix(mix(seed ^ mix(i / kGroups)) + (i % kGroups + 1) * kGolden);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = float(int16_t(bits >> (16 * j))) / 32768.f * limit;
    *reinterpret_cast<uint2 *>(out + 4 * size_t(i)) = make_uint2(narrow(v[0], v[1]), narrow(v[2], v[3]));
}

// One word of eight bytes a thread, of which only the bits of `mask` are set, once for each byte.
extern "C" __global__ void random_bytes(uint8_t *__restrict__ out, // [8 * words]
                                        uint64_t seed, uint64_t words, uint32_t mask) {
    constexpr uint64_t kWords = 1u << 13; // words of a random stream: 65,536 bytes
    uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= words) return;
    uint64_t bits = mix(mix(seed ^ mix(i / kWords)) + (i % kWords + 1) * kGolden) & mask * 0x0101010101010101ull;
    *reinterpret_cast<uint2 *>(out + 8 * i) = make_uint2(uint32_t(bits), uint32_t(bits >> 32));
}
