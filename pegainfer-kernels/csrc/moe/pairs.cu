// The steps of a mixture of experts around its GEMMs. A pair is a token with one of its k experts: number token * k +
// i.
//
//   moe_group_pairs: lists the pairs of each expert, and tiles of them (moe/pairs.cuh)
//   moe_add_pairs:   out[token] = Σ y[pair] over the token's pairs, in the order of the expert numbers, in f32, rounded
//                    once; pairs of experts that are not here do not count
//
// All GPUs. Limit: latency of the lists, memory of the sums. Reference: src/ops/moe/experts.rs.
#include "common/vec8.cuh"
#include "moe/order.cuh"
#include "moe/pairs.cuh"
#include "abi/moe_pairs.h"

using limits::moe::kGroupThreads, limits::moe::kSumThreads;

// Grid: blocks, each with every so many-th expert's pairs: many pairs are stored by several multiprocessors.
extern "C" __global__ __launch_bounds__(kGroupThreads) void moe_group_pairs(
    const uint32_t *chosen, // [count]
    uint32_t *pairs,        // [count], by expert
    uint32_t *tiles,        // their number, then expert, first of `pairs`, and number of pairs of each
    uint32_t count, uint32_t first, uint32_t experts, uint32_t tokens) { // see group_by_expert
    start_after_predecessor();
    group_by_expert(written(chosen), pairs, tiles, count, first, experts, tokens, 1, nullptr, blockIdx.x, gridDim.x);
}

// Grid: tokens, columns over threads of a block with eight each.
extern "C" __global__ __launch_bounds__(kSumThreads) void moe_add_pairs(
    const bf16 *y,          // [tokens * k, columns]
    const uint32_t *chosen, // [tokens, k], experts first to first + experts - 1 are here
    bf16 *out,              // [tokens, hidden], `columns` from `from` on, in multiples of 8
    uint32_t hidden, uint32_t from, uint32_t columns, uint32_t k, uint32_t first, uint32_t experts) {
    __shared__ moe::ExpertOrder order;
    start_after_predecessor();
    y = written(y), chosen = written(chosen);
    const uint32_t token = blockIdx.x;
    order.sort(chosen + size_t(token) * k, k);
    const uint32_t column = (blockIdx.y * kSumThreads + threadIdx.x) * kVector;
    if (column >= columns) return;
    Vec8 sum = {};
    for (uint32_t at = 0; at < k; ++at) {
        const uint32_t pair = order.place[at];
        if (order.experts[pair] - first >= experts) continue; // below `first` it wraps beyond all experts
        const Vec8 v = widen8(load16(y + (size_t(token) * k + pair) * columns + column));
#pragma unroll
        for (uint32_t j = 0; j < kVector; ++j) sum.x[j] += v.x[j];
    }
    *reinterpret_cast<uint4 *>(out + size_t(token) * hidden + from + column) = narrow8(sum);
}
