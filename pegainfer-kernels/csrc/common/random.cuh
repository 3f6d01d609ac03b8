// The counter-based generator of dummy weights, SplitMix64: pegainfer-core/src/rng.rs.
#pragma once
#include <cstdint>

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull; // rng::GOLDEN

// The finaliser of SplitMix64: rng::mix.
__device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
