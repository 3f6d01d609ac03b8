// The GEMM of DeepSeek-V4: out = x wᵀ, weights in bf16, FP8 or FP4, widened to bf16 in registers; activations in bf16
// planes that are added (one plane of bf16 or of rounded values, three of f32: see deepseek_v4/gemm.cu).
//
// All GPUs. Technique: mma.sync with the weights as operand A (swap-AB), so that a step of one token wastes few
// columns; a block has 64 rows of w and a tile of tokens, and a cp.async ring of kStages steps of 128 columns. Every
// sum has the same order whatever else is in the tile: 128 columns after another within a segment, then the segments. A
// row's bits depend on nothing but the row.
#pragma once
#include "common/async.cuh"
#include "common/weight_codes.cuh"
#include "limits.h"

namespace gemm {
using namespace limits::deepseek_v4_gemm;

constexpr uint32_t kVectors = kDepth / kVector; // vectors of a row of x in a step
constexpr uint32_t kPitch = 2 * kDepth + 64;    // bytes of a row of x in shared memory: two rows have different banks
constexpr uint32_t kScaleBlock = 128;           // edge of a block of FP8 weights
constexpr uint32_t kScaleGroup = 32;            // columns of a group of FP4 weights

template <Format F> constexpr uint32_t kRowBytes = kDepth * 16 / Codes<F>::kValues; // of w in a step
template <Format F> constexpr uint32_t kScaleBytes = F == Format::kFp4 ? kRows * kDepth / kScaleGroup : 0;
template <Format F, int TOKENS>
constexpr uint32_t kStageBytes = kRows * kRowBytes<F> + TOKENS * kPitch + kScaleBytes<F>;

// A row of a weight: the matrix' first codes and scales, and the number of the row, `kNoRow` for one that is all zeros.
struct Row {
    const uint8_t *codes, *scales;
    uint32_t row;
};
constexpr uint32_t kNoRow = ~0u;

// Which steps a block computes: `count` segments of `steps` steps of all planes, from segment `first` on.
struct Segments {
    uint32_t first, count, steps;
};

// The sums of a warp: rows 16 warp to 16 warp + 15 of the tile, all its tokens.
template <int TOKENS> using TileSums = Accumulator[TOKENS / 8];

// The tile's GEMM. `weight(r)` is the `Row` of the tile's row r; `token(t)` points to the row of x of the tile's token
// t, null for zeros; `x` is an address that may be read. Rows have `k` elements, plane p of x is `plane` elements
// behind plane p - 1.
template <Format F, int TOKENS, typename Weight, typename Token>
__device__ __forceinline__ void multiply(TileSums<TOKENS> &total, Weight weight, const bf16 *x, Token token, uint32_t k,
                                         uint32_t planes, uint64_t plane, Segments segments) {
    using Code = Codes<F>;
    constexpr uint32_t kStage = kStageBytes<F, TOKENS>, kChunks = kRowBytes<F> / 16, kXs = kRows * kRowBytes<F>;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t all = (k + kDepth - 1) / kDepth, begin = segments.first * segments.steps;
    const uint32_t end = min(all, begin + segments.count * segments.steps), steps = (end - begin) * planes;

    auto start = [&](uint32_t step) {
        if (step < steps) {
            uint32_t to = base + step % kStages * kStage, column = (begin + step / planes) * kDepth;
#pragma unroll
            for (uint32_t i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
                uint32_t row = i / kChunks, chunk = i % kChunks;
                Row from = weight(row);
                bool inside = from.row != kNoRow && column + chunk * Code::kValues < k;
                size_t at = (size_t(from.row) * k + column) * 16 / Code::kValues + chunk * 16;
                uint32_t place = chunk ^ (kChunks > 4 ? row % 2 * 4 : 0);
                stream16_or_zero(to + row * kRowBytes<F> + place * 16, from.codes + (inside ? at : 0), inside);
            }
            if (F == Format::kFp4 && threadIdx.x < kRows) {
                Row from = weight(threadIdx.x);
                size_t at = from.row == kNoRow ? 0 : (size_t(from.row) * k + column) / kScaleGroup;
                copy4(to + kXs + TOKENS * kPitch + threadIdx.x * 4, from.scales + at);
            }
#pragma unroll
            for (uint32_t i = threadIdx.x; i < TOKENS * kVectors; i += kThreads) {
                uint32_t t = i / kVectors, vector = i % kVectors, at = column + vector * kVector;
                const bf16 *row = token(t);
                bool inside = row && at < k;
                // The vectors that the lanes of a quad read together lie side by side.
                constexpr uint32_t kEach = Code::kVectors;
                uint32_t place = (vector / (4 * kEach) * kEach + vector % kEach) * 4 + vector / kEach % 4;
                const bf16 *from = row + step % planes * plane + at;
                copy16_or_zero(to + kXs + t * kPitch + place * 16, inside ? from : x, inside);
            }
        }
        copies_commit();
    };

    TileSums<TOKENS> acc = {};
    uint32_t left = segments.steps * planes; // steps of this segment
    for (int s = 0; s < kStages - 1; ++s) start(s);
    for (uint32_t step = 0; step < steps; ++step) {
        copies_wait<kStages - 2>();
        __syncthreads(); // this step is there for all, and nobody reads the stage that is filled next
        start(step + kStages - 1);
        const uint8_t *ws = shared + step % kStages * kStage, *xs = ws + kXs;
        const uint32_t low = 16 * warp + lane / 4, high = low + 8, quad = lane % 4;
#pragma unroll
        for (uint32_t h = 0; h < kChunks / 4; ++h) {
            uint4 a[2][Code::kVectors];
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i) {
                uint32_t row = i ? high : low, chunk = 4 * h + quad;
                uint32_t place = chunk ^ (kChunks > 4 ? row % 2 * 4 : 0);
                uint4 codes = *reinterpret_cast<const uint4 *>(ws + row * kRowBytes<F> + place * 16);
                uint32_t scale = 0;
                if (F == Format::kFp4) scale = xs[TOKENS * kPitch + row * 4 + quad];
                if (F == Format::kFp8) {
                    Row from = weight(row);
                    size_t at = size_t(from.row / kScaleBlock) * all + begin + step / planes;
                    if (from.row != kNoRow) scale = __ldg(from.scales + at);
                }
                Code::widen(codes, scale, a[i]);
            }
#pragma unroll
            for (uint32_t j = 0; j < Code::kVectors; ++j)
#pragma unroll
                for (uint32_t t = 0; t < TOKENS / 8; ++t) {
                    uint32_t at = (8 * t + lane / 4) * kPitch + ((h * Code::kVectors + j) * 4 + quad) * 16;
                    mma32(acc[t], a[0][j], a[1][j], *reinterpret_cast<const uint4 *>(xs + at));
                }
        }
        if (--left > 0 && step + 1 < steps) continue;
        left = segments.steps * planes;
#pragma unroll
        for (uint32_t t = 0; t < TOKENS / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[t][i] += acc[t][i], acc[t][i] = 0.f;
    }
    copies_wait_all();
}
} // namespace gemm
