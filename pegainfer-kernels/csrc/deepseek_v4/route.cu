// DeepSeek-V4's routing: g = sqrt(softplus(logit)); k experts of a token, their weights g / (Σ g + 1e-20) * scale.
//
//   route_learned: the k largest g + bias, largest first, of equal ones the lower expert
//   route_hash:    the experts that a table has for the token's id
//
// One block a token, whose first warp chooses; all GPUs; bound by latency. The gates are taken in f64 and rounded once,
// as in the reference, so that every device chooses the same experts. Reference: src/cpu/deepseek_v4/route.rs.
#include "deepseek_v4/rounding.cuh"
#include "abi/deepseek_v4_route.h"
#include "limits.h"

using namespace limits::deepseek_v4;
using limits::moe::kMaxExperts;

__device__ __forceinline__ float gate(float x) {
    if (x > 20.f) return float(sqrt(double(x)));
    return float(sqrt(log1p(exp(double(x)))));
}

// Writes the k experts of a token and their weights, which the lanes of a warp have: lane i has expert i, and its gate.
// The gates are added in order, so that all devices add alike.
__device__ __forceinline__ void write_choice(uint32_t expert, float gate, uint32_t *experts, float *weights, uint32_t k,
                                             float scale) {
    const uint32_t lane = threadIdx.x;
    float sum = 0.f;
    for (uint32_t i = 0; i < k; ++i) sum += __shfl_sync(kAll, gate, i);
    sum += 1e-20f;
    if (lane < k) experts[lane] = expert, weights[lane] = gate / sum * scale;
}

extern "C" __global__ __launch_bounds__(kRouteThreads) void route_learned(
    const float *logits, // [tokens, count]
    const float *bias,   // [count]
    uint32_t *experts,   // [tokens, k], k up to 32
    float *weights,      // [tokens, k]
    uint32_t count, uint32_t k, float scale) {
    constexpr uint32_t kOwn = kMaxExperts / kRouteThreads;
    __shared__ float gates[kMaxExperts];
    __shared__ uint64_t keys[kMaxExperts]; // gate and bias above, the inverted expert below; 0 once it is chosen
    release_successor();
    float own_bias[kOwn];
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
        const uint32_t e = i * kRouteThreads + threadIdx.x;
        own_bias[i] = e < count ? bias[e] : 0.f;
    }
    wait_for_predecessor();
    logits += size_t(blockIdx.x) * count, experts += size_t(blockIdx.x) * k, weights += size_t(blockIdx.x) * k;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
        const uint32_t e = i * kRouteThreads + threadIdx.x;
        if (e >= count) break;
        const float own = gate(*written(logits + e));
        gates[e] = own, keys[e] = uint64_t(ordered(own + own_bias[i])) << 32 | uint32_t(~e);
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    // A lane keeps the largest key of its experts, each 32nd, and looks for the next one when that is chosen.
    auto largest_own = [&] {
        uint64_t best = 0;
#pragma unroll 8
        for (uint32_t e = threadIdx.x; e < count; e += 32) best = max(best, keys[e]);
        return best;
    };
    uint64_t own = largest_own();
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < k; ++i) {
        const uint64_t best = largest_key(own);
        const uint32_t expert = ~uint32_t(best);
        if (threadIdx.x == i) chosen = expert;
        if (own == best) keys[expert] = 0, own = largest_own();
        __syncwarp();
    }
    write_choice(chosen, gates[chosen], experts, weights, k, scale);
}

extern "C" __global__ __launch_bounds__(32) void route_hash(
    const float *logits,   // [tokens, count]
    const uint32_t *table, // [vocab, k]
    const uint32_t *ids,   // [tokens]
    uint32_t *experts,     // [tokens, k]
    float *weights,        // [tokens, k]
    uint32_t vocab, uint32_t count, uint32_t k, float scale) {
    start_after_predecessor();
    logits += size_t(blockIdx.x) * count, experts += size_t(blockIdx.x) * k, weights += size_t(blockIdx.x) * k;
    const uint32_t id = ids[blockIdx.x];
    if (id >= vocab) __trap();
    const uint32_t expert = threadIdx.x < k ? table[size_t(id) * k + threadIdx.x] : 0;
    if (expert >= count) __trap();
    write_choice(expert, threadIdx.x < k ? gate(logits[expert]) : 0.f, experts, weights, k, scale);
}
