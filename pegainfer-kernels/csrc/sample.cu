// Greedy sampling.
#include "common.cuh"

// Order in which a larger key is the better token: larger logit first, then the lower id. NaN counts as -inf.
__device__ __forceinline__ uint64_t key(float logit, uint32_t id) {
    uint32_t bits = __float_as_uint(isnan(logit) ? -INFINITY : logit + 0.f); // -0 and 0 are a tie
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | ~id;
}

// One block a row: the id of the largest logit, the lowest one on a tie.
extern "C" __global__ __launch_bounds__(1024) void argmax(const float *__restrict__ logits, // [gridDim.x, vocab]
                                                          uint32_t *__restrict__ out,       // [gridDim.x]
                                                          uint32_t vocab) {
    __shared__ uint64_t parts[32];
    release_successor();
    wait_for_predecessor();
    const float *row = logits + size_t(blockIdx.x) * vocab;
    uint64_t best = 0;
    for (uint32_t id = threadIdx.x; id < vocab; id += 1024) best = max(best, key(row[id], id));
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAll, best, step));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = parts[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAll, best, step));
    if (threadIdx.x == 0) out[blockIdx.x] = ~uint32_t(best);
}
