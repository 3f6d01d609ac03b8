// DeepSeek-V4's routing: g = sqrt(softplus(logit)); k experts of a token, their weights g / (Σ g + 1e-20) * scale.
//
//   route_learned: the k largest g + bias, largest first, of equal ones the lower expert
//   route_hash:    the experts that a table has for the token's id
//
// One block a token, whose first warp chooses; all GPUs; bound by latency. The gates are taken in f64 and rounded once, as
// in the reference, so that every device chooses the same experts. Reference: src/cpu/deepseek_v4/route.rs.
#include "deepseek_v4.cuh"
#include "abi/deepseek_v4_route.h"
#include "limits.h"

using namespace limits::deepseek_v4;

__device__ __forceinline__ float gate(float x) {
    if (x > 20.f) return float(sqrt(double(x)));
    return float(sqrt(log1p(exp(double(x)))));
}

// Divides the weights of a token, which lane 0 wrote, by their sum: in order, by one lane, so that all devices add alike.
__device__ __forceinline__ void normalize(float *weights, uint32_t k, float scale) {
    if (threadIdx.x) return;
    float sum = 0.f;
    for (uint32_t i = 0; i < k; ++i) sum += weights[i];
    sum += 1e-20f;
    for (uint32_t i = 0; i < k; ++i) weights[i] = weights[i] / sum * scale;
}

extern "C" __global__ __launch_bounds__(kRouteThreads) void route_learned(
    const float *logits, // [tokens, count]
    const float *bias,   // [count]
    uint32_t *experts,   // [tokens, k]
    float *weights,      // [tokens, k]
    uint32_t count, uint32_t k, float scale) {
    start_after_predecessor();
    __shared__ float gates[kMaxExperts];
    __shared__ uint64_t keys[kMaxExperts]; // gate and bias above, the inverted expert below; 0 once it is chosen
    logits += size_t(blockIdx.x) * count, experts += size_t(blockIdx.x) * k, weights += size_t(blockIdx.x) * k;
    for (uint32_t e = threadIdx.x; e < count; e += kRouteThreads) {
        gates[e] = gate(logits[e]);
        keys[e] = uint64_t(ordered(gates[e] + bias[e])) << 32 | uint32_t(~e);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    for (uint32_t i = 0; i < k; ++i) {
        uint64_t best = 0;
        for (uint32_t e = threadIdx.x; e < count; e += 32) best = max(best, keys[e]);
        best = reduce_lanes(best, 32, Max());
        uint32_t expert = ~uint32_t(best);
        if (threadIdx.x == 0) experts[i] = expert, weights[i] = gates[expert], keys[expert] = 0;
        __syncwarp();
    }
    normalize(weights, k, scale);
}

extern "C" __global__ __launch_bounds__(32) void route_hash(
    const float *logits,   // [tokens, count]
    const uint32_t *table, // [vocab, k]
    const uint32_t *ids,   // [tokens]
    uint32_t *experts,     // [tokens, k]
    float *weights,        // [tokens, k]
    uint32_t vocab, uint32_t count, uint32_t k, float scale) {
    start_after_predecessor();
    if (threadIdx.x) return;
    logits += size_t(blockIdx.x) * count, experts += size_t(blockIdx.x) * k, weights += size_t(blockIdx.x) * k;
    if (ids[blockIdx.x] >= vocab) __trap();
    for (uint32_t i = 0; i < k; ++i) {
        uint32_t expert = table[size_t(ids[blockIdx.x]) * k + i];
        if (expert >= count) __trap();
        experts[i] = expert, weights[i] = gate(logits[expert]);
    }
    normalize(weights, k, scale);
}
