// out = x wᵀ for few rows: every weight is read once and goes to the tensor cores as it lies in memory.
//
// The 16 x 8 product of the tensor core takes 16 rows of w as its a and 8 rows of x as its b. A block owns 16 rows of
// w, or 8 where 16 would leave too few blocks to fill the GPU (the other half of a is then 0); its warps share the columns, 32 at a time in turn, so that a block reads 512 neighbouring bytes of each row, and
// add their sums in a fixed order. A row of out does not depend on how many there are.
#include "common.cuh"

constexpr int kWarps = 8;

template <typename T> __device__ __forceinline__ T rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 rounded<bf16>(float x) { return __float2bfloat16_rn(x); }

// Steps of 32 columns that a warp has in flight. They wait in shared memory, because the compiler sinks plain loads to
// their use, one or two in flight. Each lane reads back what it fetched itself, so nobody waits for another.
constexpr uint32_t kStages = 8;

__device__ __forceinline__ void fetch16(uint4 *to, const bf16 *from) {
    uint32_t at = uint32_t(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// ROWS: 8 or 16 rows of w. TILES: tiles of 8 rows of x.
template <int ROWS, int TILES, typename T>
__device__ void stream(const bf16 *__restrict__ x, // [m, k], m <= 8 TILES
                       const bf16 *__restrict__ w, // [n, k]
                       T *__restrict__ out,        // [m, n]
                       uint32_t m, uint32_t n, uint32_t k) {
    __shared__ float sums[kWarps][ROWS][8 * TILES + 1];
    extern __shared__ uint4 ring[]; // [kStages, ROWS / 8, threads]
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    uint32_t row = blockIdx.x * ROWS + group;
    // Rows beyond the end repeat the last one; what they give is not written.
    const bf16 *low = w + size_t(min(row, n - 1)) * k, *high = w + size_t(min(row + 8, n - 1)) * k;
    const bf16 *inputs[TILES];
    float acc[TILES][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) inputs[t] = x + size_t(min(8 * t + group, m - 1)) * k;

    // Beyond the last column the loads repeat it, and x counts as 0.
    auto column = [&](uint32_t step) { return (step * kWarps + warp) * 32 + quad * 8; };
    uint32_t steps = (k + 32 * kWarps - 1) / (32 * kWarps);
    auto start = [&](uint32_t step) {
        if (step < steps) {
            uint4 *to = ring + step % kStages * (ROWS / 8) * (32 * kWarps) + threadIdx.x;
            uint32_t at = min(column(step), k - 8);
            fetch16(to, low + at);
            if (ROWS == 16) fetch16(to + 32 * kWarps, high + at);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    for (uint32_t s = 0; s < kStages - 1; ++s) start(s);
    for (uint32_t step = 0; step < steps; ++step) {
        start(step + kStages - 1);
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
        const uint4 *from = ring + step % kStages * (ROWS / 8) * (32 * kWarps) + threadIdx.x;
        uint4 a = from[0], c = ROWS == 16 ? from[32 * kWarps] : make_uint4(0, 0, 0, 0);
        uint32_t at = column(step);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            // Through the L1: with few rows of x many lanes read the same bytes, and asynchronous copies of those
            // cost double the whole step (measured).
            uint4 b = load16(inputs[t] + min(at, k - 8));
            if (at >= k) b = make_uint4(0, 0, 0, 0);
            mma32(acc[t], a, c, b);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) sums[warp][group + 8 * (i / 2)][8 * t + 2 * quad + i % 2] = acc[t][i];
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < ROWS * m; i += blockDim.x) {
        uint32_t r = i % ROWS, token = i / ROWS;
        float sum = 0.f;
#pragma unroll
        for (int s = 0; s < kWarps; ++s) sum += sums[s][r][token];
        if (blockIdx.x * ROWS + r < n) out[size_t(token) * n + blockIdx.x * ROWS + r] = rounded<T>(sum);
    }
}

#define STREAM(name, rows, tiles, type)                                                                                \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void name(const bf16 *x, const bf16 *w, type *out,            \
                                                                   uint32_t m, uint32_t n, uint32_t k) {               \
        stream<rows, tiles, type>(x, w, out, m, n, k);                                                                 \
    }
STREAM(stream8_bf16_8, 8, 1, bf16)
STREAM(stream8_bf16_16, 8, 2, bf16)
STREAM(stream8_bf16_32, 8, 4, bf16)
STREAM(stream16_bf16_8, 16, 1, bf16)
STREAM(stream16_bf16_16, 16, 2, bf16)
STREAM(stream16_bf16_32, 16, 4, bf16)
STREAM(stream16_f32_8, 16, 1, float)
STREAM(stream16_f32_16, 16, 2, float)
STREAM(stream16_f32_32, 16, 4, float)
