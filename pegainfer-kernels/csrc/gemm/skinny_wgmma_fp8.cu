// Skinny GEMM by wgmma, FP8 by FP8: out = x wᵀ for up to 64 rows of x, of split-K 128, every code of w read once.
//
// x: [m, k] e4m3, with an f32 scale for each 128 columns of a row; w: [n, k] e4m3, with an f32 scale for each block of
// 128 x 128: value = code * scale. Activations are rounded first (W8A8): by csrc/gemm/fp8.cu, or, of one row, by four
// warps of each block, which spares a launch in front (skinny_rounding_*: x is [1, k] bf16). Both give the same codes.
// out as in csrc/gemm/skinny_wgmma.cu. Hopper (sm_90a); k a multiple of 128. Reference: src/cpu/linear/mod.rs.
//
// Techniques: as csrc/gemm/skinny_wgmma.cu. The tensor cores sum 128 columns in f32 from zero; the sum times both
// scales is added to the result. Bound by memory (lab/fp8.md).
#include "common/fp8_codes.cuh"
#include "gemm/skinny_wgmma.cuh"
#include "abi/gemm_skinny_wgmma_fp8.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr Format kFp8 = Format::kFp8;

struct WeightScales {
    const float *values; // [n / 128, columns]
    uint32_t columns;    // k / 128
};

// Scales of a step for the lane's rows of a tile, those of the accumulators.
struct RowScales {
    float low[kBoxes], high[kBoxes];
};

template <int N, int T, Epilogue E, typename O>
__device__ void multiply(const SkinnyShape &shape, const SkinnyShare<T, E> &share, const Rings<N, kFp8> &rings,
                         const WeightScales &scales, O *out) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0); // the compiler then knows that it is the warp's
    RingCursor place{warpgroup}, x_place{0};
    const uint64_t a0 = descriptor(rings.w, 0, 1024), b0 = descriptor(rings.x, 0, 1024);
    const uint32_t a_box = rings.w_box / 16, b_box = N * 128 / 16; // of operands
    const uint32_t first_block = share.column / kBoxColumns<kFp8>;
    auto release = [](uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        float total[T][N / 2];
        const float *low[T], *high[T];
#pragma unroll
        for (int t = 0; t < T; ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup) + (E == kGated && t > 0 ? shape.n / 2 : 0);
            row += threadIdx.x % 128 / 32 * 16 + Accumulator::row(threadIdx.x % 32, 0);
            auto of = [&](uint32_t r) {
                return scales.values + size_t(min(r, shape.n - 1) / kBoxColumns<kFp8>) * scales.columns;
            };
            low[t] = of(row), high[t] = of(row + 8);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) total[t][i] = 0.f;
        }
        auto load = [&](uint32_t step, int t) {
            RowScales next;
#pragma unroll
            for (int i = 0; i < kBoxes; ++i) {
                uint32_t block = min(first_block + step * kBoxes + i, scales.columns - 1);
                next.low[i] = __ldg(low[t] + block), next.high[i] = __ldg(high[t] + block);
            }
            return next;
        };
        RowScales next = load(0, 0);
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(rings.x_full + x_place.index, x_place.parity);
            uint64_t b = b0 + x_place.index * (kBoxes * b_box);
            const float *x_scales = rings.x_scales + x_place.index * (kBoxes * N) + threadIdx.x % 4 * 2;
#pragma unroll
            for (int t = 0; t < T; ++t) {
                wait(rings.w_full + place.index, place.parity);
                uint64_t a = a0 + place.index * (kBoxes * a_box);
                float sums[kBoxes][N / 2];
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBoxes; ++i) {
                    wgmma_fp8<true>(sums[i], a + i * a_box, b + i * b_box);
#pragma unroll
                    for (int j = 1; j < 4; ++j) wgmma_fp8<false>(sums[i], a + i * a_box + 2 * j, b + i * b_box + 2 * j);
                    wgmma_commit();
                }
                RowScales now = next;
                if (t + 1 < T || step + 1 < share.steps) next = load(step + (t + 1) / T, (t + 1) % T);
                static_assert(kBoxes == 2);
                auto add = [&](int i) {
#pragma unroll
                    for (int j = 0; j < N / 8; ++j) {
                        float2 x = *reinterpret_cast<const float2 *>(x_scales + i * N + 8 * j);
                        total[t][4 * j] += sums[i][4 * j] * (now.low[i] * x.x);
                        total[t][4 * j + 1] += sums[i][4 * j + 1] * (now.low[i] * x.y);
                        total[t][4 * j + 2] += sums[i][4 * j + 2] * (now.high[i] * x.x);
                        total[t][4 * j + 3] += sums[i][4 * j + 3] * (now.high[i] * x.y);
                    }
                };
                wgmma_wait<1>();
                add(0);
                wgmma_wait<0>();
                release(rings.w_empty + place.index);
                place.advance(share.warpgroups, shape.slots);
                add(1);
            }
            __syncwarp(); // all lanes have read the scales
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

// Rounds an x of one row to codes and scales in shared memory, by kRounders warps, of which this is number `warp`. Each
// takes one box of every second step, and has loads for the next ones on their way.
template <int N, int T, Epilogue E>
__device__ void round_input(const bf16 *x, const SkinnyShape &shape, const SkinnyShare<T, E> &share,
                            const Rings<N, kFp8> &rings, uint32_t warp) {
    constexpr uint32_t kEvery = kRounders / kBoxes, kLoads = 6;
    const uint32_t lane = threadIdx.x % 32, box = warp % kBoxes, first = warp / kBoxes,
                   all = shape.passes * share.steps;
    auto load = [&](uint32_t step) {
        uint32_t column = share.column + step % share.steps * kStep<kFp8> + box * kBoxColumns<kFp8> + 4 * lane;
        if (step >= all || column >= shape.k) return make_uint2(0, 0);
        return *reinterpret_cast<const uint2 *>(x + column);
    };
    RingCursor place{first};
    wait_for_predecessor();
    uint2 loaded[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) loaded[i] = load(first + i * kEvery);
    for (uint32_t step = first; step < all; step += kEvery) {
        uint2 v = loaded[0];
#pragma unroll
        for (uint32_t i = 1; i < kLoads; ++i) loaded[i - 1] = loaded[i];
        loaded[kLoads - 1] = load(step + kLoads * kEvery);
        float scale = amax_over_448(__reduce_max_sync(kAll, max(magnitude(v.x), magnitude(v.y))));
        uint32_t codes = encode4(v, scale), at = place.index * kBoxes + box;
        wait(rings.x_empty + place.index, place.parity ^ 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(rings.x + at * (N * 128) + 4 * lane), "r"(codes) : "memory");
        if (lane == 0) rings.x_scales[at * N] = scale;
        fence_shared_for_async();
        __syncwarp();
        if (lane == 0) arrive(rings.x_full + place.index);
        place.advance(kEvery, shape.x_slots);
    }
}

// out: [m, n], gated [m, n / 2], or, of O float, one such matrix for each split of the columns.
template <int N, int T, Epilogue E, typename O>
__device__ void rounding(const bf16 *x, const TensorMap &w, const WeightScales &scales, O *out,
                         const SkinnyShape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const SkinnyShare<T, E> share(shape, kStep<kFp8>);
    Rings<N, kFp8> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups, kBoxes);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, scales, out);
    else if (warp > fetcher) round_input<N, T, E>(x, shape, share, rings, warp - fetcher - 1);
    else if (elected()) fetch_weights<N, T, E>(w, shape, share, rings);
}

// The same of an x that is rounded.
template <int N, int T, Epilogue E, typename O>
__device__ void wide(const TensorMap &x, const TensorMap &w, InputScales x_scales, const WeightScales &scales, O *out,
                     const SkinnyShape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const SkinnyShare<T, E> share(shape, kStep<kFp8>);
    Rings<N, kFp8> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, scales, out);
    else if (warp == fetcher && elected()) fetch_weights<N, T, E>(w, shape, share, rings);
    else if (warp == fetcher + 1 && elected()) fetch_inputs<N, T, E>(x, shape, share, rings, x_scales);
}
#define BODY(...)                                                                                                      \
    wide<__VA_ARGS__>(x, w, {x_scales, k / kBoxColumns<kFp8>, scale_rows}, {scales, k / kBoxColumns<kFp8>}, out,       \
                      {m, n, k, pitch, split, rows, passes, slots, x_slots, ahead})
#define ROUNDING_BODY(...)                                                                                             \
    rounding<__VA_ARGS__>(x, w, {scales, k / kBoxColumns<kFp8>}, out,                                                  \
                          {m, n, k, pitch, split, rows, passes, slots, x_slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#define ROUNDING_BODY(...) __trap()
#endif

// Grid: blocks, splits. For up to N rows of x; the parameters after scale_rows are those of `SkinnyShape`.
#define WIDE(name, N, T, E, O)                                                                                         \
    extern "C" __global__ __launch_bounds__((N > 64 ? 1 : kMaxWarpgroups) * 128 + kFetchers, 1) void name##_##N(       \
        const __grid_constant__ TensorMap x, /* [m, k / 2] pairs of codes in boxes of m rows */                        \
        const __grid_constant__ TensorMap w, /* [n, k / 2] pairs of codes in boxes of `rows` rows */                   \
        const float *x_scales,               /* [k / 128, scale_rows] */                                               \
        const float *scales,                 /* [n / 128, k / 128], rounded up */                                      \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
        uint32_t scale_rows,                 /* m, rounded up to a multiple of four */                                 \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t rows, uint32_t passes,            \
        uint32_t slots, uint32_t x_slots, uint32_t ahead) {                                                            \
        BODY(N, T, E, O);                                                                                              \
    }
#define KERNELS(N)                                                                                                     \
    WIDE(skinny_fp8_bf16, N, 1, kPlain, bf16)                                                                          \
    WIDE(skinny_fp8_f32, N, 1, kPlain, float)                                                                          \
    WIDE(skinny_fp8_gated, N, 2, kGated, bf16)
KERNELS(32)
KERNELS(64)
// One warpgroup, which then has the registers for so many sums.
WIDE(skinny_fp8_f32, 96, 1, kPlain, float)
WIDE(skinny_fp8_f32, 128, 1, kPlain, float)

// Of one row in bf16: m is 1.
#define ROUNDING(name, N, T, E, O)                                                                                     \
    extern "C" __global__ __launch_bounds__(kMaxWarpgroups * 128 + 32 + 32 * kRounders, 1) void name##_##N(            \
        const __grid_constant__ TensorMap w, /* [n, k / 2] pairs of codes in boxes of `rows` rows */                   \
        const bf16 *x,                       /* [1, k] */                                                              \
        const float *scales,                 /* [n / 128, k / 128], rounded up */                                      \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t rows, uint32_t passes,            \
        uint32_t slots, uint32_t x_slots, uint32_t ahead) {                                                            \
        ROUNDING_BODY(N, T, E, O);                                                                                     \
    }
ROUNDING(skinny_rounding_bf16, 32, 1, kPlain, bf16)
ROUNDING(skinny_rounding_f32, 32, 1, kPlain, float)
ROUNDING(skinny_rounding_gated, 32, 2, kGated, bf16)
