// DeepSeek-V4's GEMM (deepseek_v4/gemm.cuh) of all tokens with one weight, and what goes before it:
//
//   planes: activations in f32 as planes of bf16 that add up to them
//   gemm:   out = x wᵀ; rows of w in groups, each with columns of x of its own. At few tokens the segments of a tile
//           are blocks (split-K): the last of them to arrive, by a counter, adds their sums in the order of the
//           segments
//
// All GPUs. FP8 and FP4 values times their scales are bf16 numbers, as are rounded activations, so that multiplications
// are exact and sums are those of the reference in another order. Limit: memory at few tokens, shared memory at many;
// not tuned. Reference: src/cpu/deepseek_v4/matmul.rs.
#include "deepseek_v4/rounding.cuh"
#include "deepseek_v4/gemm.cuh"
#include "abi/deepseek_v4_gemm.h"

using namespace gemm;

// The sums of a tile's segments, in their order, by the last of its blocks: rows of w from `first_row` on, of all `m`
// tokens.
__device__ void add_segments(const float *partials, void *out, uint32_t first_row, uint32_t m, uint32_t n,
                             uint32_t segments, uint32_t to_f32) {
    for (uint32_t i = threadIdx.x; i < kRows * m; i += kThreads) {
        uint32_t row = first_row + i % kRows;
        if (row >= n) continue;
        size_t to = size_t(i / kRows) * n + row;
        float parts[kMaxSegments], sum = 0.f;
        // From the L2, where other multiprocessors wrote them; all loads before the first sum.
#pragma unroll
        for (uint32_t s = 0; s < kMaxSegments; ++s)
            parts[s] = s < segments ? __ldcg(partials + size_t(s) * m * n + to) : 0.f;
#pragma unroll
        for (uint32_t s = 0; s < kMaxSegments; ++s)
            if (s < segments) sum += parts[s];
        put_as(out, to, sum, to_f32);
    }
}

// The tile's rows of w: blockIdx.x; its tokens: blockIdx.y; its segment where there are several blocks of them:
// blockIdx.z.
template <Format F, int TOKENS, typename W>
__device__ void tile_gemm(const bf16 *__restrict__ x, const W *__restrict__ w, const uint8_t *__restrict__ scales,
                          void *out, float *partials, uint32_t *counters, uint32_t m, uint32_t n, uint32_t k,
                          uint32_t stride, uint32_t group_rows, uint32_t planes, uint64_t plane, uint32_t segments,
                          uint32_t steps, uint32_t to_f32) {
    const uint32_t first_row = blockIdx.x * kRows, first_token = blockIdx.y * TOKENS;
    const bf16 *columns = x + size_t(first_row / group_rows) * k;
    auto weight = [&](uint32_t r) {
        return Row{reinterpret_cast<const uint8_t *>(w), scales, first_row + r < n ? first_row + r : kNoRow};
    };
    auto token = [&](uint32_t t) { return first_token + t < m ? columns + size_t(first_token + t) * stride : nullptr; };
    const bool split = gridDim.z > 1;
    TileSums<TOKENS> sums = {};
    multiply<F, TOKENS>(sums, weight, x, token, k, planes, plane, Segments{blockIdx.z, split ? 1 : segments, steps});
    const size_t segment = size_t(blockIdx.z) * m * n;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int t = 0; t < TOKENS / 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t row = first_row + 16 * warp + Accumulator::row(lane, i);
            uint32_t at = first_token + 8 * t + Accumulator::column(lane, i);
            if (row >= n || at >= m) continue;
            size_t to = size_t(at) * n + row;
            if (split) partials[segment + to] = sums[t][i];
            else put_as(out, to, sums[t][i], to_f32);
        }
    if (!split) return;
    __syncthreads(); // the block's sums are written before it arrives
    bool last = threadIdx.x == 0 && arrive_last(counters + blockIdx.x, gridDim.z);
    if (__syncthreads_or(last)) add_segments(partials, out, first_row, m, n, gridDim.z, to_f32);
}

// Grid: elements over threads of a block.
extern "C" __global__ __launch_bounds__(kThreads) void planes(
    const float *__restrict__ x, // [elements]
    bf16 *__restrict__ out,      // [planes, elements], planes `plane` elements apart
    uint32_t elements, uint64_t plane, uint32_t planes) {
    uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    if (i >= elements) return;
    float left = x[i];
    for (uint32_t p = 0; p < planes; ++p) {
        float part = round_bf16(left);
        put(out + p * plane + i, part);
        left -= part;
    }
}

#define BY_WEIGHT(SUFFIX, FORMAT, W, TOKENS)                                                                           \
    /* Grid: tiles of rows, tiles of tokens, 1 or segments. */                                                         \
    extern "C" __global__ __launch_bounds__(kThreads) void dsv4_gemm_##SUFFIX##_##TOKENS(                              \
        const bf16 *x,         /* [planes, m, stride], `plane` elements apart; columns of group g from g k on */       \
        const W *w,            /* [n, k] */                                                                            \
        const uint8_t *scales, /* FP8: [n / 128, k / 128]; FP4: [n, k / 32]; bf16: none */                             \
        void *out,             /* [m, n] bf16 or f32, see `to_f32` */                                                  \
        float *partials,       /* [segments, m, n], of a split GEMM */                                                 \
        uint32_t *counters,    /* [tiles of rows], of a split GEMM; zero between launches */                           \
        uint32_t m, uint32_t n, uint32_t k, uint32_t stride,                                                           \
        uint32_t group_rows, /* of w with the same columns of x, a multiple of 64 or n */                              \
        uint32_t planes, uint64_t plane, uint32_t segments, uint32_t steps, /* of 128 columns of a segment */          \
        uint32_t to_f32) {                                                                                             \
        tile_gemm<Format::FORMAT, TOKENS>(x, w, scales, out, partials, counters, m, n, k, stride, group_rows, planes,  \
                                          plane, segments, steps, to_f32);                                             \
    }
#define BY_TOKENS(SUFFIX, FORMAT, W)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 8)                                                                                    \
    BY_WEIGHT(SUFFIX, FORMAT, W, 16)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 32)                                                                                   \
    BY_WEIGHT(SUFFIX, FORMAT, W, 64)
BY_TOKENS(bf16, kBf16, bf16)
BY_TOKENS(fp8, kFp8, uint8_t)
BY_TOKENS(fp4, kFp4, uint8_t)
