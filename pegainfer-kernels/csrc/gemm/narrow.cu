// GEMM with a weight of few rows: out = x wᵀ, bf16, f32 sums.
//
// x: [m, k], w: [n, k], out: [m, n], rows `pitch` apart; n a multiple of 8, k of 32. For weights whose rows do not fill
// the GPU and steps of few tokens, as the gates of a gated delta rule layer beside its FP8 projection: what counts is
// latency. Chosen on Hopper (src/choice/gemm.rs), where csrc/gemm/skinny_wgmma.cu takes 9 us for 64 rows of 2,560, one
// step of 128 columns behind the other. Reference: src/cpu/linear/mod.rs.
//
// Technique: a block has 16 rows of x and 8 rows of w, which its warps share by columns (split-K within the block,
// mma.sync, sums in shared memory in the order of the warps). A warp's first weights are in registers before the
// kernels that produce x are done (programmatic dependent launch).
#include "common/frag.cuh"
#include "abi/gemm_narrow.h"
#include "limits.h"

using namespace limits::narrow_gemm;

constexpr uint32_t kDepth = 32; // columns of a step: a vector of each lane of a quad
constexpr uint32_t kSteps = 10; // of a warp in registers at a time

// Grid: n / 8, m / 16 rounded up; kThreads threads.
extern "C" __global__ __launch_bounds__(kThreads) void narrow_gemm(
    const bf16 *__restrict__ x, // [m, k]
    const bf16 *__restrict__ w, // [n, k]
    bf16 *__restrict__ out,     // [m, n], rows `pitch` apart
    uint32_t m, uint32_t k, uint32_t pitch) {
    constexpr uint32_t kWarps = kThreads / 32;
    __shared__ Accumulator sums[kWarps][32];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = k / kDepth;
    uint32_t row0 = blockIdx.y * 16, column0 = blockIdx.x * 8;
    release_successor();
    // Steps `warp`, `warp` + kWarps, ...; behind the last one zeros.
    uint32_t low = min(row0 + lane / 4, m - 1), high = min(row0 + lane / 4 + 8, m - 1);
    auto vector = [&](const bf16 *from, uint32_t row, uint32_t step) {
        return load16(from + size_t(row) * k + step * kDepth + lane % 4 * kVector);
    };
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    Accumulator sum = {};
    for (uint32_t first = warp; first < steps; first += kSteps * kWarps) {
        uint4 b[kSteps], a[kSteps][2];
#pragma unroll
        for (uint32_t i = 0; i < kSteps; ++i) {
            uint32_t step = first + i * kWarps;
            b[i] = step < steps ? vector(w, column0 + lane / 4, step) : zeros;
        }
        if (first == warp) {
            wait_for_predecessor();
            x = written(x);
        }
#pragma unroll
        for (uint32_t i = 0; i < kSteps; ++i) {
            uint32_t step = min(first + i * kWarps, steps - 1); // times zeros of w
            a[i][0] = vector(x, low, step), a[i][1] = vector(x, high, step);
        }
#pragma unroll
        for (uint32_t i = 0; i < kSteps; ++i)
            if (first + i * kWarps < steps) mma32(sum, a[i][0], a[i][1], b[i]);
    }
    if (warp >= steps) wait_for_predecessor();
    sums[warp][lane] = sum;
    __syncthreads();
    // An element of the tile each, those of a lane's accumulator neighbours.
    if (threadIdx.x >= 128) return;
    uint32_t from = threadIdx.x / 4, i = threadIdx.x % 4;
    uint32_t row = row0 + Accumulator::row(from, i), column = column0 + Accumulator::column(from, i);
    float total = 0.f;
#pragma unroll
    for (uint32_t j = 0; j < kWarps; ++j) total += sums[j][from][i];
    if (row < m) put(out + size_t(row) * pitch + column, total);
}
