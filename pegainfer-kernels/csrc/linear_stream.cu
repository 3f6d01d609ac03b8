// out = x wᵀ for few rows: every weight is read once, straight from memory into the tensor cores' registers.
//
// The 16 x 8 product of the tensor core takes 16 rows of w as its a and 8 rows of x as its b. A block owns 16 rows of
// w, or 8 where 16 would leave too few blocks to fill the GPU (the other half of a is then 0); its warps share the columns, 32 at a time in turn, so that a block reads 512 neighbouring bytes of each row, and
// add their sums in a fixed order. A row of out does not depend on how many there are.
#include "common.cuh"

constexpr int kWarps = 8;

template <typename T> __device__ __forceinline__ T rounded(float x);
template <> __device__ __forceinline__ float rounded<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 rounded<bf16>(float x) { return __float2bfloat16_rn(x); }

// ROWS: 8 or 16 rows of w. TILES: tiles of 8 rows of x. UNROLL: steps whose weights a warp has in flight.
template <int ROWS, int TILES, int UNROLL, typename T>
__device__ void stream(const bf16 *__restrict__ x, // [m, k], m <= 8 TILES
                       const bf16 *__restrict__ w, // [n, k]
                       T *__restrict__ out,        // [m, n]
                       uint32_t m, uint32_t n, uint32_t k) {
    __shared__ float sums[kWarps][ROWS][8 * TILES + 1];
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    uint32_t row = blockIdx.x * ROWS + group;
    // Rows beyond the end repeat the last one; what they give is not written.
    const bf16 *low = w + size_t(min(row, n - 1)) * k, *high = w + size_t(min(row + 8, n - 1)) * k;
    const bf16 *inputs[TILES];
    float acc[TILES][4] = {};
#pragma unroll
    for (int t = 0; t < TILES; ++t) inputs[t] = x + size_t(min(8 * t + group, m - 1)) * k;

    for (uint32_t first = warp * 32; first < k; first += kWarps * 32 * UNROLL) {
        uint32_t at[UNROLL];
        uint4 a[UNROLL][ROWS / 8];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            // Beyond the last column the loads repeat it, without a branch, and x counts as 0.
            at[u] = first + u * kWarps * 32 + quad * 8;
            uint32_t clamped = min(at[u], k - 8);
            a[u][0] = stream16(low + clamped);
            if (ROWS == 16) a[u][ROWS / 8 - 1] = stream16(high + clamped);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                uint4 b = load16(inputs[t] + min(at[u], k - 8));
                if (at[u] >= k) b = make_uint4(0, 0, 0, 0);
                mma32(acc[t], a[u][0], ROWS == 16 ? a[u][ROWS / 8 - 1] : make_uint4(0, 0, 0, 0), b);
            }
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

#define STREAM(name, rows, tiles, unroll, type)                                                                              \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void name(const bf16 *x, const bf16 *w, type *out,            \
                                                                   uint32_t m, uint32_t n, uint32_t k) {               \
        stream<rows, tiles, unroll, type>(x, w, out, m, n, k);                                                               \
    }
STREAM(stream8_bf16_8, 8, 1, 8, bf16)
STREAM(stream8_bf16_16, 8, 2, 6, bf16)
STREAM(stream8_bf16_32, 8, 4, 4, bf16)
STREAM(stream16_bf16_8, 16, 1, 5, bf16)
STREAM(stream16_bf16_16, 16, 2, 4, bf16)
STREAM(stream16_bf16_32, 16, 4, 2, bf16)
STREAM(stream16_f32_8, 16, 1, 5, float)
STREAM(stream16_f32_16, 16, 2, 4, float)
STREAM(stream16_f32_32, 16, 4, 2, float)
