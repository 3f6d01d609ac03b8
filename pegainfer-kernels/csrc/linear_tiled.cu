// out = x wᵀ for many rows: tiles in shared memory, filled by asynchronous copies kStages - 1 steps ahead.
#include "common.cuh"

constexpr int kDepth = 32; // columns of a step: 64 bytes of a row
constexpr int kStages = 4;
constexpr int kThreads = 256; // 2 warps along the rows of x, 4 along those of w

// Byte offset of the 16-byte piece `piece` (0..3) of row `row`. Eight rows at one piece meet every bank once.
__device__ __forceinline__ uint32_t place(uint32_t row, uint32_t piece) {
    return row * 64 + ((piece ^ (row / 2 % 4)) * 16);
}

__device__ __forceinline__ void copy16(uint32_t to, const bf16 *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}

__device__ __forceinline__ void put(bf16 *at, float a, float b) { *reinterpret_cast<uint32_t *>(at) = narrow(a, b); }
__device__ __forceinline__ void put(float *at, float a, float b) { *reinterpret_cast<float2 *>(at) = make_float2(a, b); }

// Starts the copies of `ROWS` rows x kDepth columns to shared memory; what lies outside becomes 0.
template <int ROWS>
__device__ __forceinline__ void fetch(uint32_t to, const bf16 *from, uint32_t first, uint32_t rows, uint32_t k,
                                      uint32_t column) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * 4; i += kThreads) {
        uint32_t row = i / 4, at = column + i % 4 * 8;
        bool inside = first + row < rows && at < k;
        copy16(to + place(row, i % 4), inside ? from + size_t(first + row) * k + at : from, inside);
    }
}

// A block computes ROWS rows of x times COLS rows of w.
template <int ROWS, int COLS, typename T>
__device__ void tiled(const bf16 *__restrict__ x, // [m, k]
                      const bf16 *__restrict__ w, // [n, k]
                      T *__restrict__ out,        // [m, n]
                      uint32_t m, uint32_t n, uint32_t k) {
    constexpr int kM = ROWS / 2 / 16, kN = COLS / 4 / 8; // 16 x 8 products of a warp
    constexpr uint32_t kStage = (ROWS + COLS) * 64;
    extern __shared__ __align__(128) uint8_t shared[];
    uint32_t base = uint32_t(__cvta_generic_to_shared(shared));
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t row0 = warp / 4 * (ROWS / 2), col0 = warp % 4 * (COLS / 4);
    uint32_t first_row = blockIdx.x * ROWS, first_col = blockIdx.y * COLS;
    uint32_t steps = (k + kDepth - 1) / kDepth;
    float acc[kM][kN][4] = {};

    auto start = [&](uint32_t step) {
        if (step < steps) {
            uint32_t to = base + step % kStages * kStage;
            fetch<ROWS>(to, x, first_row, m, k, step * kDepth);
            fetch<COLS>(to + ROWS * 64, w, first_col, n, k, step * kDepth);
        }
        asm volatile("cp.async.commit_group;");
    };
    for (int s = 0; s < kStages - 1; ++s) start(s);
    for (uint32_t step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
        __syncthreads(); // this step is there for all, and nobody reads the stage that is filled next
        start(step + kStages - 1);
        uint32_t xs = base + step % kStages * kStage, ws = xs + ROWS * 64;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t a[kM][4], b[kN / 2][4];
#pragma unroll
            for (int i = 0; i < kM; ++i) load_matrix(a[i], xs + place(row0 + 16 * i + lane % 16, 2 * half + lane / 16));
#pragma unroll
            for (int j = 0; j < kN / 2; ++j) {
                uint32_t row = col0 + 16 * j + lane % 8 + lane / 16 * 8;
                load_matrix(b[j], ws + place(row, 2 * half + lane / 8 % 2));
            }
#pragma unroll
            for (int i = 0; i < kM; ++i)
#pragma unroll
                for (int j = 0; j < kN; ++j)
                    mma(acc[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    uint32_t group = lane / 4, quad = lane % 4;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
            uint32_t row = first_row + row0 + 16 * i + group, col = first_col + col0 + 8 * j + 2 * quad;
            if (col >= n) continue;
            if (row < m) put(out + size_t(row) * n + col, acc[i][j][0], acc[i][j][1]);
            if (row + 8 < m) put(out + size_t(row + 8) * n + col, acc[i][j][2], acc[i][j][3]);
        }
    }
}

#define TILED(name, rows, cols, type)                                                                                  \
    extern "C" __global__ __launch_bounds__(kThreads) void name(const bf16 *x, const bf16 *w, type *out, uint32_t m,   \
                                                                uint32_t n, uint32_t k) {                              \
        tiled<rows, cols, type>(x, w, out, m, n, k);                                                                   \
    }
TILED(tiled_bf16_64, 64, 64, bf16)
TILED(tiled_bf16_128, 128, 128, bf16)
TILED(tiled_f32_64, 64, 64, float)
TILED(tiled_f32_128, 128, 128, float)
