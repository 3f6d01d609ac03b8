// Skinny GEMM by wgmma with weights of four bits: out = x wᵀ for 33 to 128 rows of x, every code of w read once.
//
// x: [m, k] bf16; w: [n, k] in four bits with a scale, and a zero point or 8, for each group of columns of a row
// (csrc/common/int4.cuh), the group a multiple of 128. out as in csrc/gemm/skinny_wgmma.cu. Hopper (sm_90a).
// Reference: src/cpu/linear/mod.rs.
//
// Techniques: as csrc/gemm/skinny_wgmma.cu, with w as operand A in registers. The codes are stored in the order of that
// operand, the technique of Marlin (arXiv 2408.11743), but rows stay rows, so that tiles begin at any row. Codes less
// zero points are exact in bf16: 128 columns are summed in f32 from zero, and the sum times the scale is added to the
// result. Two groups of registers alternate, so that codes are widened while the tensor cores work. Bound by memory.
#include "common/int4.cuh"
#include "gemm/skinny_wgmma.cuh"
#include "abi/gemm_skinny_int4.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr Format kInt4 = Format::kInt4;
constexpr uint32_t kHalves = kStep<kInt4> / kInt4Block; // blocks of 128 columns of a step
constexpr uint32_t kSteps = kInt4Block / 16;            // steps of wgmma of such a block
static_assert(kHalves == 2, "registers of two blocks alternate");

// The scales and zero points of w in memory, and what a step has of them in shared memory: for each of its blocks of
// 128 columns kScaleRows scales, and behind all of them kZeroRows zero points.
constexpr uint32_t kScaleRows = 80, kZeroRows = 96;
static_assert(kScaleBytes<kInt4> == kHalves * (kScaleRows * 2 + kZeroRows), "bytes of a step");

struct Int4Scales {
    const uint16_t *values; // [groups, rows], rows a multiple of 16
    const uint8_t *zeros;   // [groups, rows], or null: 8
    uint32_t rows, blocks;  // of w; of 128 columns
    uint32_t group_shift;   // a group has 2^group_shift blocks
    uint32_t tile_rows;     // of w
    bool is_f16;

    // Vectors of 16 bytes that hold `tile_rows` elements from any one on, of `each` in a vector.
    __device__ uint32_t vectors(uint32_t each) const { return (tile_rows + 2 * each - 2) / each; }
    __device__ uint32_t bytes() const { return kHalves * 16 * (vectors(8) + (zeros ? vectors(16) : 0)); }
    __device__ void fetch(uint32_t row, uint32_t column, uint8_t *to, uint64_t *full) const {
#pragma unroll
        for (uint32_t i = 0; i < kHalves; ++i) {
            uint32_t block = min(column / kInt4Block + i, blocks - 1);
            size_t at = size_t(block >> group_shift) * rows + row;
            copy_bulk(to + i * kScaleRows * 2, values + at / 8 * 8, vectors(8) * 16, full);
            if (zeros)
                copy_bulk(to + kHalves * kScaleRows * 2 + i * kZeroRows, zeros + at / 16 * 16, vectors(16) * 16, full);
        }
    }
};

// The codes of a block of 128 columns of two rows as operand A of its eight steps.
__device__ __forceinline__ void widen_block(const uint4 &low, const uint4 &high, uint32_t low_bias, uint32_t high_bias,
                                            uint32_t (&a)[kSteps][4]) {
    const uint32_t of_low[4] = {low.x, low.y, low.z, low.w}, of_high[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (uint32_t j = 0; j < kSteps / 2; ++j) {
        a[2 * j][0] = int4_pair<0>(of_low[j], low_bias), a[2 * j][1] = int4_pair<0>(of_high[j], high_bias);
        a[2 * j][2] = int4_pair<1>(of_low[j], low_bias), a[2 * j][3] = int4_pair<1>(of_high[j], high_bias);
        a[2 * j + 1][0] = int4_pair<2>(of_low[j], low_bias), a[2 * j + 1][1] = int4_pair<2>(of_high[j], high_bias);
        a[2 * j + 1][2] = int4_pair<3>(of_low[j], low_bias), a[2 * j + 1][3] = int4_pair<3>(of_high[j], high_bias);
    }
}

template <int N, int T, Epilogue E, typename O>
__device__ void multiply(const SkinnyShape &shape, const SkinnyShare<T, E> &share, const Rings<N, kInt4> &rings,
                         const Int4Scales &scales, O *out) {
    constexpr bool kOverlap = T * N <= 32; // there are registers to widen a block while the other is multiplied
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0); // the compiler then knows that it is the warp's
    RingCursor place{warpgroup}, x_place{0};
    const uint32_t lane = threadIdx.x % 32, own_row = threadIdx.x % 128 / 32 * 16 + Accumulator::row(lane, 0);
    const uint64_t b0 = descriptor(rings.x, 0, 1024);
    const uint32_t b_box = N * 128 / 16; // of operands
    auto release = [](uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        float total[T][N / 2];
        uint32_t rows[T];
#pragma unroll
        for (int t = 0; t < T; ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup) + (E == kGated && t > 0 ? shape.n / 2 : 0);
            rows[t] = row;
#pragma unroll
            for (int i = 0; i < N / 2; ++i) total[t][i] = 0.f;
        }
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(rings.x_full + x_place.index, x_place.parity);
            uint64_t b = b0 + x_place.index * (kInputBoxes<kInt4> * b_box);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                wait(rings.w_full + place.index, place.parity);
                uint32_t codes = rings.w + place.index * rings.w_box + own_row * 128;
                float sums[kHalves][N / 2];
                uint32_t a[kHalves][kSteps][4];
                uint4 low[kHalves], high[kHalves];
#pragma unroll
                for (int i = 0; i < kHalves; ++i) {
                    uint32_t at = codes + ((4 * i + lane % 4) ^ (own_row % 8)) * 16;
                    low[i] = load_codes(at), high[i] = load_codes(at + 8 * 128);
                }
                const uint8_t *of_step = rings.w_scales + place.index * kScaleBytes<kInt4>;
                uint32_t biases[kHalves][2];
                float factors[kHalves][2];
#pragma unroll
                for (int i = 0; i < kHalves; ++i)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        uint32_t row = own_row + 8 * r;
                        const uint8_t *zeros = of_step + kHalves * kScaleRows * 2 + i * kZeroRows;
                        uint16_t scale =
                            reinterpret_cast<const uint16_t *>(of_step)[i * kScaleRows + rows[t] % 8 + row];
                        factors[i][r] = widen_scale(scale, scales.is_f16);
                        biases[i][r] = int4_bias(scales.zeros ? zeros[rows[t] % 16 + row] : 8);
                    }
                __syncwarp(); // all lanes have read the step
                release(rings.w_empty + place.index);
                place.advance(share.warpgroups, shape.slots);
                auto start = [&](int i) {
                    widen_block(low[i], high[i], biases[i][0], biases[i][1], a[i]);
                    wgmma_fence();
                    wgmma<true>(sums[i], a[i][0], b + 2 * i * b_box);
#pragma unroll
                    for (int j = 1; j < kSteps; ++j)
                        wgmma<false>(sums[i], a[i][j], b + (2 * i + j / 4) * b_box + j % 4 * 2);
                    wgmma_commit();
                };
                auto add = [&](int i) {
                    float low = factors[i][0], high = factors[i][1];
#pragma unroll
                    for (int j = 0; j < N / 8; ++j) {
                        total[t][4 * j] += sums[i][4 * j] * low;
                        total[t][4 * j + 1] += sums[i][4 * j + 1] * low;
                        total[t][4 * j + 2] += sums[i][4 * j + 2] * high;
                        total[t][4 * j + 3] += sums[i][4 * j + 3] * high;
                    }
                };
                start(0);
                if (kOverlap) {
                    start(1);
                    wgmma_wait<1>();
                    add(0);
                } else {
                    wgmma_wait<0>();
                    add(0);
                    start(1);
                }
                wgmma_wait<0>();
                add(1);
            }
            release(rings.x_empty + x_place.index);
            x_place.advance(1, shape.x_slots);
        }
        constexpr int kWritten = E == kGated ? 1 : T;
#pragma unroll
        for (int t = 0; t < kWritten; ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup), end = min(row + shape.rows, share.end);
            write<N, E>(total[t], total[E == kGated ? T - 1 : t], shape, row, end, out);
        }
    }
}

// out: [m, n], gated [m, n / 2], or, of O float, one such matrix for each split of the columns.
template <int N, int T, Epilogue E, typename O>
__device__ void wide(const TensorMap &x, const TensorMap &w, const Int4Scales &scales, O *out,
                     const SkinnyShape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const SkinnyShare<T, E> share(shape, kStep<kInt4>);
    Rings<N, kInt4> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, scales, out);
    else if (warp == fetcher && elected()) fetch_weights<N, T, E>(w, shape, share, rings, scales);
    else if (warp == fetcher + 1 && elected()) fetch_inputs<N, T, E>(x, shape, share, rings);
}
#define BODY(...)                                                                                                      \
    wide<__VA_ARGS__>(x, w,                                                                                            \
                      {reinterpret_cast<const uint16_t *>(scales), zeros ? scales + zeros : nullptr, n,                \
                       k / kInt4Block, group_shift, rows, f16 != 0},                                                   \
                      out, {m, n, k, pitch, split, rows, passes, slots, x_slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#endif

// The most warpgroups of a block: one, if two do not have the registers for so many sums.
constexpr int warpgroups(int n, Epilogue e) { return n > 64 || (e == kGated && n > 32) ? 1 : kMaxWarpgroups; }

// Grid: blocks, splits. For up to N rows of x; the parameters after f16 are those of `SkinnyShape`.
#define WIDE(name, N, T, E, O)                                                                                         \
    extern "C" __global__ __launch_bounds__(warpgroups(N, E) * 128 + kFetchers, 1) void name##_##N(                    \
        const __grid_constant__ TensorMap x, /* [m, k] in boxes of m rows */                                           \
        const __grid_constant__ TensorMap w, /* [n, k / 4] fours of codes in boxes of `rows` rows */                   \
        const uint8_t *scales,               /* [k / group, n] of two bytes, then zero points [k / group, n] */        \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
        uint64_t zeros,                      /* byte of `scales` where zero points begin; 0: they are 8 */             \
        uint32_t group_shift,                /* a group has 2^group_shift blocks of 128 columns */                     \
        uint32_t f16,                        /* scales are f16, not bf16 */                                            \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t rows, uint32_t passes,            \
        uint32_t slots, uint32_t x_slots, uint32_t ahead) {                                                            \
        BODY(N, T, E, O);                                                                                              \
    }
#define KERNELS(N)                                                                                                     \
    WIDE(skinny_int4_bf16, N, 1, kPlain, bf16)                                                                         \
    WIDE(skinny_int4_f32, N, 1, kPlain, float)                                                                         \
    WIDE(skinny_int4_gated, N, 2, kGated, bf16)
KERNELS(64)
WIDE(skinny_int4_bf16, 128, 1, kPlain, bf16)
WIDE(skinny_int4_f32, 128, 1, kPlain, float)
