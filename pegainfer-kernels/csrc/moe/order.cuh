// The order in which a token's experts are added: that of their numbers, as the reference adds.
#pragma once
#include "common/base.cuh"
#include "limits.h"

namespace moe {
// In shared memory.
struct ExpertOrder {
    uint32_t experts[limits::moe::kMaxChosen]; // as chosen
    uint32_t place[limits::moe::kMaxChosen];   // of the i-th in order, among those chosen

    // Called by all threads of a block, of at least `k`.
    __device__ __forceinline__ void sort(const uint32_t *chosen, uint32_t k) {
        const uint32_t i = threadIdx.x;
        if (i < k) experts[i] = chosen[i];
        __syncthreads();
        if (i < k) {
            uint32_t before = 0;
            for (uint32_t j = 0; j < k; ++j) before += experts[j] < experts[i] || (experts[j] == experts[i] && j < i);
            place[before] = i;
        }
        __syncthreads();
    }
};
} // namespace moe
