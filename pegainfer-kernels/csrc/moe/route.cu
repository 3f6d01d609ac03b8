// Routing of a mixture of experts: the experts with the largest logits of a token, and their softmax.
//
//   weights[e] = exp(logit[e] - max) / Σ exp(logit - max), the sum over the chosen experts or over all;
//   of a shared expert, which comes last: 1 / (1 + exp(-logit[experts]))
//
// logits: [tokens, rows] f32; `experts` columns are read, and one more if there is a shared expert. chosen, weights:
// [tokens, per_token] u32 and f32. A token chooses up to 32 experts. All GPUs.
//
// Experts are ordered by IEEE 754's total order of their logits, largest first, then by number: every device chooses
// alike, and the numbers are those of experts whatever the logits are. Technique: a warp a token, logits in registers,
// one reduction of the warp for each chosen expert. Limit: latency; not measured. Reference: src/cpu/moe/route.rs.
#include "common/math.cuh"
#include "common/warp.cuh"
#include "abi/moe_route.h"
#include "limits.h"

using namespace limits::moe_route;

// A float as an integer of the same order, the total order of IEEE 754: -0 is below 0.
__device__ __forceinline__ uint32_t total_order(float x) {
    uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The inverse of `total_order`.
__device__ __forceinline__ float logit_of(uint32_t order) {
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// The logits of a token: lane l of its warp has those of experts l, l + 32, ...
template <uint32_t OWN> struct OwnLogits {
    float logits[OWN];
    uint32_t left; // a bit for each that can be chosen

    __device__ __forceinline__ OwnLogits(const float *row, uint32_t experts) : left(0) {
#pragma unroll
        for (uint32_t i = 0; i < OWN; ++i) {
            const uint32_t e = 32 * i + threadIdx.x % 32;
            logits[i] = e < experts ? row[e] : 0.f;
            left |= uint32_t(e < experts) << i;
        }
    }

    // The key of the best expert that is left: its logit above, its number inverted below; 0 if none is left.
    __device__ __forceinline__ uint64_t best() const {
        uint64_t key = 0;
#pragma unroll
        for (uint32_t i = 0; i < OWN; ++i) {
            const uint64_t own = uint64_t(total_order(logits[i])) << 32 | ~(32 * i + threadIdx.x % 32);
            if (left >> i & 1) key = max(key, own);
        }
        return key;
    }

    // The sum of exp(logit - max) over the lane's experts.
    __device__ __forceinline__ float sum_of_exponentials(uint32_t experts, float max) const {
        float sum = 0.f;
#pragma unroll
        for (uint32_t i = 0; i < OWN; ++i)
            if (32 * i + threadIdx.x % 32 < experts) sum += expf(logits[i] - max);
        return sum;
    }
};

template <uint32_t OWN>
__device__ __forceinline__ void route(const float *logits, uint32_t *chosen, float *weights, uint32_t tokens,
                                      uint32_t rows, uint32_t experts, uint32_t k, uint32_t normalize,
                                      uint32_t shared) {
    start_after_predecessor();
    const uint32_t token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return; // the whole warp
    const float *row = written(logits) + size_t(token) * rows;
    OwnLogits<OWN> own(row, experts);
    uint64_t key = own.best();
    float max = 0.f, logit = 0.f; // of the best expert, and of chosen expert number `lane`
    uint32_t expert = 0;
    for (uint32_t i = 0; i < k; ++i) {
        const uint64_t best = largest_key(key);
        const uint32_t e = ~uint32_t(best);
        if (i == 0) max = logit_of(uint32_t(best >> 32));
        if (lane == i) expert = e, logit = logit_of(uint32_t(best >> 32));
        if (e % 32 == lane) own.left &= ~(1u << e / 32), key = own.best();
    }
    const float weight = lane < k ? expf(logit - max) : 0.f;
    float sum = 0.f;
    if (normalize) {
        for (uint32_t i = 0; i < k; ++i) sum += __shfl_sync(kAll, weight, i); // in order, as the reference adds
    } else {
        sum = warp_sum(own.sum_of_exponentials(experts, max));
    }
    const size_t to = size_t(token) * (k + shared);
    if (lane < k) chosen[to + lane] = expert, weights[to + lane] = weight / sum;
    if (shared && lane == 0) chosen[to + k] = experts, weights[to + k] = exact_sigmoid(row[experts]);
}

#define ROUTE(MOST)                                                                                                    \
    /* Grid: tokens, a warp each. */                                                                                   \
    extern "C" __global__ __launch_bounds__(kThreads) void moe_route_##MOST(                                           \
        const float *logits,                              /* [tokens, rows] */                                         \
        uint32_t *chosen,                                 /* [tokens, k + shared] */                                   \
        float *weights,                                   /* [tokens, k + shared] */                                   \
        uint32_t tokens, uint32_t rows, uint32_t experts, /* up to MOST */                                             \
        uint32_t k,                                       /* up to 32 and `experts` */                                 \
        uint32_t normalize,                               /* 1: the weights of the k experts sum up to 1 */            \
        uint32_t shared) {                                /* 1: there is a shared expert */                            \
        route<MOST / 32>(logits, chosen, weights, tokens, rows, experts, k, normalize, shared);                        \
    }
ROUTE(128)
ROUTE(256)
ROUTE(512)
ROUTE(1024)
