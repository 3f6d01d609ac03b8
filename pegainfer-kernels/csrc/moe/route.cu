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
// one reduction of the warp for each chosen expert. Limit: latency. Reference: src/cpu/moe/route.rs.
#include "moe/unit.cuh"
#include "abi/moe_route.h"

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
            logits[i] = e < experts ? __ldcg(row + e) : 0.f; // perhaps of other blocks of this kernel
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

// Chooses the experts of the warp's token. `row`: its logits.
template <uint32_t OWN>
__device__ __forceinline__ void choose(const float *row, uint32_t *chosen, float *weights, uint32_t experts, uint32_t k,
                                       uint32_t normalize, uint32_t shared) {
    const uint32_t lane = threadIdx.x % 32;
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
    if (lane < k) chosen[lane] = expert, weights[lane] = weight / sum;
    if (shared && lane == 0) chosen[k] = experts, weights[k] = exact_sigmoid(__ldcg(row + experts));
}

// The router's logits of 16 experts and 8 tokens a block, split-K between its warps; the last block of the tokens then
// chooses their experts, a warp each.
template <uint32_t OWN>
__device__ __forceinline__ void router(const bf16 *x, const bf16 *w, float *logits, uint32_t *chosen, float *weights,
                                       uint32_t *counters, uint32_t tokens, uint32_t columns, uint32_t rows,
                                       uint32_t experts, uint32_t k, uint32_t normalize, uint32_t shared) {
    constexpr uint32_t kWarps = kRouterThreads / 32;
    release_successor();
    __shared__ Accumulator parts[kWarps][32];
    __shared__ bool last;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * 16, upper = first + lane / 4;
    const uint32_t token = blockIdx.y * 8 + lane / 4;
    parts[warp][lane] = moe::sums_of_warp<Format::kBf16>(
        w, nullptr, {upper, upper + 8, upper < rows, upper + 8 < rows}, columns, warp, kWarps, [&] {
            wait_for_predecessor();
            return token < tokens ? written(x) + size_t(token) * columns : nullptr;
        });
    __syncthreads();
    if (threadIdx.x < 128) {
        const uint32_t from = threadIdx.x / 4, i = threadIdx.x % 4;
        float sum = 0.f;
#pragma unroll
        for (uint32_t j = 0; j < kWarps; ++j) sum += parts[j][from][i];
        const uint32_t row = first + Accumulator::row(from, i), t = blockIdx.y * 8 + Accumulator::column(from, i);
        if (row < rows && t < tokens) logits[size_t(t) * rows + row] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) last = arrive_last(counters + blockIdx.y, gridDim.x);
    __syncthreads();
    const uint32_t own = blockIdx.y * 8 + warp;
    if (!last || own >= tokens) return;
    const size_t to = size_t(own) * (k + shared);
    choose<OWN>(logits + size_t(own) * rows, chosen + to, weights + to, experts, k, normalize, shared);
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
        start_after_predecessor();                                                                                     \
        const uint32_t token = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;                                        \
        if (token >= tokens) return; /* the whole warp */                                                              \
        const size_t to = size_t(token) * (k + shared);                                                                \
        choose<MOST / 32>(written(logits) + size_t(token) * rows, chosen + to, weights + to, experts, k, normalize,    \
                          shared);                                                                                     \
    }                                                                                                                  \
    /* Grid: tiles of 16 of the router's rows, tiles of 8 tokens. */                                                   \
    extern "C" __global__ __launch_bounds__(kRouterThreads) void moe_router_##MOST(                                    \
        const bf16 *x,                                   /* [tokens, columns] */                                       \
        const bf16 *w,                                   /* [rows, columns] */                                         \
        float *logits, uint32_t *chosen, float *weights, /* as above, all written */                                   \
        uint32_t *counters,                              /* for each tile of tokens, zero */                           \
        uint32_t tokens, uint32_t columns,               /* a multiple of 8 */                                         \
        uint32_t rows, uint32_t experts, uint32_t k, uint32_t normalize, uint32_t shared) {                            \
        router<MOST / 32>(x, w, logits, chosen, weights, counters, tokens, columns, rows, experts, k, normalize,       \
                          shared);                                                                                     \
    }
ROUTE(128)
ROUTE(256)
ROUTE(512)
ROUTE(1024)
