// The experts of a mixture for few tokens: a GEMV for each pair.
//
//   moe_gate_up_gemv: h[pair] = weight[pair] silu(bf16(gate x)) bf16(up x)   gate, up: the expert's rows of gate_up
//   moe_down_gemv:    out[token] = sum of down h[pair] over the token's pairs, in the order of the experts' numbers
//
// x: [tokens, k]; gate_up: [experts * 2 * width, k], of each expert the rows of its gate, then those of up; h: [pairs,
// width]; down: [experts * hidden, width]; out: [tokens, hidden]. Activations are bf16, weights bf16 or e4m3 codes with
// an f32 scale for each block of 128 x 128. All GPUs. Chosen for so few pairs that hardly two have the same expert
// (src/choice/experts.rs).
//
// Technique: swap-AB mma.sync with weights straight from memory to registers, eight kilobytes of loads of a warp (bf16)
// under way at once. moe_gate_up_gemv: a block has some row tiles of 16 rows of weights, and `splits` warps share the
// columns of each (split-K in the block, sums in shared memory, added in the order of the warps): no atomics, and 768
// blocks for one token of Qwen3-30B-A3B, so that all multiprocessors stay busy. moe_down_gemv: a block has 16 columns
// of a token, a warp an expert, which has its first weights in registers before moe_gate_up_gemv ends (programmatic
// dependent launch). Limit: memory, one read of each chosen expert. Reference: src/cpu/moe/experts.rs.
#include "moe/order.cuh"
#include "moe/unit.cuh"
#include "abi/moe_gemv.h"

using namespace moe;
using namespace limits::moe_gemv;

template <Format F>
__device__ __forceinline__ void gate_up(const bf16 *x, const void *w, const float *scales, const uint32_t *chosen,
                                        const float *weights, bf16 *h, uint32_t experts_of_token, uint32_t width,
                                        uint32_t k, uint32_t splits) {
    wait_for_predecessor();
    release_successor();                       // so late that the next kernel may read `chosen` before it waits
    __shared__ float2 parts[kThreads / 32][8]; // gates and ups of the columns
    const uint32_t pair = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = warp % splits;
    const uint32_t tile = blockIdx.x * (blockDim.x / 32 / splits) + warp / splits, column = tile * 8 + lane / 4;
    const Rows rows = gate_and_up(chosen[pair], width, column);
    const Accumulator sums = sums_of_warp<F>(w, scales, rows, k, split, splits, [&] {
        return lane < 4 ? x + size_t(pair / experts_of_token) * k : nullptr;
    });
    if (lane % 4 == 0) parts[warp][lane / 4] = make_float2(sums[0], sums[2]);
    __syncthreads();
    if (split > 0 || lane % 4 > 0 || column >= width) return;
    float2 total = parts[warp][lane / 4];
    for (uint32_t i = 1; i < splits; ++i)
        total.x += parts[warp + i][lane / 4].x, total.y += parts[warp + i][lane / 4].y;
    put(h + size_t(pair) * width + column, weights[pair] * silu(round_bf16(total.x)) * round_bf16(total.y));
}

template <Format F>
__device__ __forceinline__ void down(const bf16 *h, const void *w, const float *scales, const uint32_t *chosen,
                                     bf16 *out, uint32_t experts_of_token, uint32_t hidden, uint32_t k) {
    release_successor();
    // `chosen` is there: moe_gate_up_gemv has waited for it before it let this kernel start. h is not.
    __shared__ float y[limits::moe::kMaxChosen][16];
    __shared__ ExpertOrder order;
    const uint32_t token = blockIdx.y, lane = threadIdx.x % 32, first = blockIdx.x * 16, column = first + lane / 4;
    chosen += size_t(token) * experts_of_token;
    for (uint32_t i = threadIdx.x / 32; i < experts_of_token; i += blockDim.x / 32) {
        const Rows rows = of_down(chosen[i], {hidden, 0, hidden}, column);
        const Accumulator sums = sums_of_warp<F>(w, scales, rows, k, 0, 1, [&] {
            wait_for_predecessor();
            return lane < 4 ? written(h) + (size_t(token) * experts_of_token + i) * k : nullptr;
        });
        if (lane % 4 == 0) y[i][lane / 4] = sums[0], y[i][lane / 4 + 8] = sums[2];
    }
    order.sort(chosen, experts_of_token);
    if (threadIdx.x >= 16 || first + threadIdx.x >= hidden) return;
    float sum = 0.f;
    for (uint32_t at = 0; at < experts_of_token; ++at) sum += round_bf16(y[order.place[at]][threadIdx.x]);
    put(out + size_t(token) * hidden + first + threadIdx.x, sum);
}

#define BY_WEIGHT(SUFFIX, FORMAT, W)                                                                                   \
    /* Grid: row tiles of 8 columns of h, as many a block as it has warps for; pairs. */                               \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void moe_gate_up_gemv_##SUFFIX(                               \
        const bf16 *x,          /* [tokens, k] */                                                                      \
        const W *w,             /* [experts * 2 * width, k] */                                                         \
        const float *scales,    /* [experts * 2 * width / 128, k / 128], rounded up; null for bf16 */                  \
        const uint32_t *chosen, /* [pairs] */                                                                          \
        const float *weights,   /* [pairs] */                                                                          \
        bf16 *h,                /* [pairs, width] */                                                                   \
        uint32_t experts_of_token, uint32_t width, uint32_t k, /* multiples of 8, of 16 for FP8 */                     \
        uint32_t splits) {                                     /* warps that share a row tile */                       \
        gate_up<Format::FORMAT>(x, w, scales, chosen, weights, h, experts_of_token, width, k, splits);                 \
    }                                                                                                                  \
    /* Grid: tiles of 16 columns, tokens; a warp for each of a token's experts, up to kDownThreads / 32. */            \
    extern "C" __global__ __launch_bounds__(kDownThreads, 1) void moe_down_gemv_##SUFFIX(                              \
        const bf16 *h,                               /* [tokens * experts_of_token, k] */                              \
        const W *w,                                  /* [experts * hidden, k] */                                       \
        const float *scales, const uint32_t *chosen, /* as above */                                                    \
        bf16 *out,                                   /* [tokens, hidden] */                                            \
        uint32_t experts_of_token, uint32_t hidden, uint32_t k) {                                                      \
        down<Format::FORMAT>(h, w, scales, chosen, out, experts_of_token, hidden, k);                                  \
    }
BY_WEIGHT(bf16, kBf16, bf16)
BY_WEIGHT(fp8, kFp8, uint8_t)
