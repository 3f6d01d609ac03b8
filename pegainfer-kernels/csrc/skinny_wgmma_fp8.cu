// Skinny GEMM by wgmma with FP8 weights: out = x wᵀ for up to 64 rows of x, every code read once.
//
// x: [m, k] bf16; w: [n, k] e4m3, with an f32 scale for each block of 128 x 128: w = code * scale. out as in
// csrc/skinny_wgmma.cu. Hopper (sm_90a); k a multiple of 16. Reference: src/cpu/linear/mod.rs.
//
// Techniques: as csrc/skinny_wgmma.cu, but the weight is operand A in registers. A step of 128 columns has one scale a
// row: each lane reads its codes from shared memory, widens them to bf16, which is exact, and gives the slot back; the
// tensor cores sum the step in f32 from zero, while the lane widens the codes of the next one; the sum times the scale is
// added to the result. So activations are not rounded (W8A16). Bound by memory (docs/benchmarks/notes-h200-kernels.md).
#include "skinny_wgmma.cuh"
#include "abi/skinny_wgmma_fp8.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr uint32_t kScaleBlock = 128;   // edge of a block
constexpr int kSlices = kStep / 16;     // of 16 columns, in a step

struct BlockScales {
    const float *values; // [n / 128, columns]
    uint32_t columns;    // k / 128, rounded up
};

// A tile of a step in registers.
struct WideTile {
    uint4 a[kSlices];
    float low, high; // scales of the lane's rows, those of the accumulators
};

__device__ __forceinline__ uint32_t load_codes(uint32_t from) {
    uint16_t codes;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(from) : "memory");
    return codes;
}

// The two codes in the low half of `codes`, exact in bf16.
__device__ __forceinline__ uint32_t widen_pair(uint32_t codes) {
    constexpr uint32_t kPower = 127 - 7 + 127; // 2^120: the difference of the biases
    return multiply_pairs(Codes<Format::kFp8>::pair(codes, 0x1404), pair_of_powers(kPower));
}

// Reads the lane's part of the tile at `slot`, whose rows of 128 bytes have the 128-byte swizzle.
__device__ __forceinline__ void load_tile(WideTile &tile, uint32_t slot) {
    uint32_t lane = threadIdx.x % 32, group = lane / 4;
    uint32_t row = slot + (threadIdx.x % 128 / 32 * 16 + group) * 128 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kSlices; ++j) {
        uint32_t at = row + (uint32_t(j) ^ group) * 16; // the rows of a lane are the same modulo 8
        tile.a[j] = make_uint4(widen_pair(load_codes(at)), widen_pair(load_codes(at + 8 * 128)),
                               widen_pair(load_codes(at + 8)), widen_pair(load_codes(at + 8 * 128 + 8)));
    }
}

template <int N, int T, Epilogue E, typename O>
__device__ void multiply(const Shape &shape, const Share<T, E> &share, const Rings<N, Format::kFp8> &rings,
                         const BlockScales &scales, O *out) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0); // the compiler then knows that it is the warp's
    RingCursor place{warpgroup}, x_place{0};
    const uint64_t b0 = descriptor(rings.x, 0, 1024);
    constexpr uint32_t kInputBox = N * 128 / 16; // of operand B
    auto release = [](uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        float total[T][N / 2];
        const float *low[T], *high[T]; // scales of the lane's rows
#pragma unroll
        for (int t = 0; t < T; ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup) + (E == kGated && t > 0 ? shape.n / 2 : 0);
            row += threadIdx.x % 128 / 32 * 16 + Accumulator::row(threadIdx.x % 32, 0);
            auto of = [&](uint32_t r) {
                return scales.values + size_t(min(r, shape.n - 1) / kScaleBlock) * scales.columns + share.column / kScaleBlock;
            };
            low[t] = of(row), high[t] = of(row + 8);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) total[t][i] = 0.f;
        }
        auto load = [&](WideTile &tile, uint32_t step, int t) {
            tile.low = __ldg(low[t] + step), tile.high = __ldg(high[t] + step);
            wait(rings.w_full + place.index, place.parity);
            load_tile(tile, rings.w + place.index * rings.w_box);
            __syncwarp();
            release(rings.w_empty + place.index);
            place.advance(share.warpgroups, shape.slots);
        };
        WideTile tile;
        load(tile, 0, 0);
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(rings.x_full + x_place.index, x_place.parity);
            uint64_t b = b0 + x_place.index * (kBoxes * kInputBox);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                float sums[N / 2];
                wgmma_fence();
                wgmma<true>(sums, tile.a[0], b);
#pragma unroll
                for (int j = 1; j < kSlices; ++j) wgmma<false>(sums, tile.a[j], b + j / 4 * kInputBox + j % 4 * 2);
                wgmma_commit();
                WideTile next;
                bool last = t + 1 == T && step + 1 == share.steps;
                if (!last) load(next, step + (t + 1) / T, (t + 1) % T);
                wgmma_wait<0>();
#pragma unroll
                for (int i = 0; i < N / 2; ++i) total[t][i] += sums[i] * (i % 4 < 2 ? tile.low : tile.high);
                if (!last) tile = next;
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
__device__ void wide(const TensorMap &x, const TensorMap &w, const BlockScales &scales, O *out, const Shape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Share<T, E> share(shape);
    Rings<N, Format::kFp8> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, scales, out);
    else if (warp == fetcher && elected()) fetch_weights<N, T, E>(w, shape, share, rings);
    else if (warp == fetcher + 1 && elected()) fetch_inputs<N, T, E>(x, shape, share, rings);
}
#define BODY(...)                                                                                                      \
    wide<__VA_ARGS__>(x, w, {scales, (k + kScaleBlock - 1) / kScaleBlock}, out,                                        \
                      {m, n, k, pitch, split, rows, passes, slots, x_slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#endif

// Grid: blocks, splits. For up to N rows of x; the parameters after k are those of `Shape`.
#define WIDE(name, N, T, E, O)                                                                                         \
    extern "C" __global__ __launch_bounds__(kMaxWarpgroups * 128 + kFetchers, 1) void name##_##N(                      \
        const __grid_constant__ TensorMap x, /* [m, k] in boxes of m rows */                                           \
        const __grid_constant__ TensorMap w, /* [n, k / 2] pairs of codes in boxes of `rows` rows */                   \
        const float *scales,                 /* [n / 128, k / 128], rounded up */                                      \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
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
