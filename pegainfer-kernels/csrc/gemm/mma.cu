// Large-M GEMM by mma.sync: out = x wᵀ, where cuBLASLt is missing.
//
// x: [m, k] bf16, w: [n, k] bf16, out: [m, n] bf16 or f32. All GPUs. Technique: tiles of 64 x 64 or 128 x 128 in shared
// memory with an XOR swizzle, a cp.async ring of kStages stages. Not tuned: the fallback. Reference:
// src/cpu/linear/mod.rs.
#include "common/async.cuh"
#include "abi/gemm_mma.h"
#include "limits.h"

using namespace limits::gemm_mma;

// Byte offset of the 16-byte vector `vector` (0..3) of row `row`. Vec8 rows at one vector meet every bank once.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t vector) {
    return row * 64 + ((vector ^ (row / 2 % 4)) * 16);
}

// Starts the copies of `ROWS` rows x kDepth columns to shared memory; what lies outside becomes 0.
template <int ROWS>
__device__ __forceinline__ void fetch(uint32_t to, const bf16 *from, uint32_t first, uint32_t rows, uint32_t k,
                                      uint32_t column) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * 4; i += kThreads) {
        uint32_t row = i / 4, at = column + i % 4 * 8;
        bool inside = first + row < rows && at < k;
        copy16_or_zero(to + place(row, i % 4), inside ? from + size_t(first + row) * k + at : from, inside);
    }
}

// A block computes ROWS rows of x times COLS rows of w.
template <int ROWS, int COLS, typename T>
__device__ void tiled(const bf16 *__restrict__ x, // [m, k]
                      const bf16 *__restrict__ w, // [n, k]
                      T *__restrict__ out,        // [m, n], rows `pitch` apart
                      uint32_t m, uint32_t n, uint32_t k, uint32_t pitch) {
    constexpr int kM = ROWS / 2 / 16, kN = COLS / 4 / 8; // accumulators of a warp
    constexpr uint32_t kStage = (ROWS + COLS) * 64;
    extern __shared__ __align__(128) uint8_t shared[];
    uint32_t base = shared_address(shared);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t row0 = warp / 4 * (ROWS / 2), col0 = warp % 4 * (COLS / 4);
    uint32_t first_row = blockIdx.x * ROWS, first_col = blockIdx.y * COLS;
    uint32_t steps = (k + kDepth - 1) / kDepth;
    Accumulator acc[kM][kN] = {};

    auto start = [&](uint32_t step) {
        if (step < steps) {
            uint32_t to = base + step % kStages * kStage;
            fetch<ROWS>(to, x, first_row, m, k, step * kDepth);
            fetch<COLS>(to + ROWS * 64, w, first_col, n, k, step * kDepth);
        }
        copies_commit();
    };
    for (int s = 0; s < kStages - 1; ++s) start(s);
    for (uint32_t step = 0; step < steps; ++step) {
        copies_wait<kStages - 2>();
        __syncthreads(); // this step is there for all, and nobody reads the stage that is filled next
        start(step + kStages - 1);
        uint32_t xs = base + step % kStages * kStage, ws = xs + ROWS * 64;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 a[kM], b[kN / 2];
#pragma unroll
            for (int i = 0; i < kM; ++i)
                a[i] = load_matrices(xs + place(row0 + 16 * i + lane % 16, 2 * half + lane / 16));
#pragma unroll
            for (int j = 0; j < kN / 2; ++j) {
                uint32_t row = col0 + 16 * j + lane % 8 + lane / 16 * 8;
                b[j] = load_matrices(ws + place(row, 2 * half + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < kM; ++i)
#pragma unroll
                for (int j = 0; j < kN; ++j)
                    mma(acc[i][j], a[i], j % 2 ? b[j / 2].z : b[j / 2].x, j % 2 ? b[j / 2].w : b[j / 2].y);
        }
    }
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
            uint32_t row = first_row + row0 + 16 * i + Accumulator::row(lane, 0);
            uint32_t col = first_col + col0 + 8 * j + Accumulator::column(lane, 0);
            if (col >= n) continue;
            if (row < m) put(out + size_t(row) * pitch + col, acc[i][j][0], acc[i][j][1]);
            if (row + 8 < m) put(out + size_t(row + 8) * pitch + col, acc[i][j][2], acc[i][j][3]);
        }
    }
}

#define TILED(name, rows, cols, type)                                                                                  \
    extern "C" __global__ __launch_bounds__(kThreads) void name(                                                       \
        const bf16 *x, /* [m, k] */                                                                                    \
        const bf16 *w, /* [n, k] */                                                                                    \
        type *out,     /* [m, n], rows `pitch` apart */                                                                \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch) {                                                          \
        tiled<rows, cols, type>(x, w, out, m, n, k, pitch);                                                            \
    }
TILED(gemm_mma_bf16_64, 64, 64, bf16)
TILED(gemm_mma_bf16_128, 128, 128, bf16)
TILED(gemm_mma_f32_64, 64, 64, float)
TILED(gemm_mma_f32_128, 128, 128, float)
