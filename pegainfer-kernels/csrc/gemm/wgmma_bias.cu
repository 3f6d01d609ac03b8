// GEMM with a bias and what follows it in the epilogue, for many rows, on Hopper: out = after(bf16(x wᵀ + bias)).
//
//   after: the sum; out + the sum; gelu of the sum, by tanh or by the error function. Each is rounded to bf16 once
//   more.
// From 512 rows on; main loop and techniques: csrc/gemm/wgmma.cuh. The sums begin at the bias, so the epilogue of a
// tile, done while the next one is multiplied, has no bias to add. Reference: src/cpu/linear/mod.rs,
// src/cpu/vision/bias.rs.
#include "gemm/wgmma.cuh"
#include "common/gelu.cuh"
#include "abi/gemm_wgmma_bias.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kParts = kBiasParts; // in which a tile is finished, of 32 columns
constexpr int kPerBox = kBox / 32;

template <bool Reads, typename After> struct BiasConsumer : GemmConsumer {
    const TensorMap &out;
    const bf16 *values; // of out, [m, width]
    const float *bias;
    uint32_t m, width;
    uint32_t words[64];          // rounded: for each 8 columns two words, of a lane's rows as in the d of `mma`
    uint32_t before[8];          // of the part that is next
    uint32_t row, column, boxes; // of what is rounded, for this warp
    After after;

    // Row and column of the first of two neighbours, word i of 8 of a part.
    __device__ __forceinline__ uint2 place(int part, int i) const {
        uint32_t lane = threadIdx.x % 32;
        return {row + lane / 4 + i % 2 * 8, column + part * 32 + i / 2 * 8 + lane % 4 * 2};
    }

    // Begins to load what is there before, of a part that is finished a step later.
    __device__ __forceinline__ void load(int part) {
        if constexpr (Reads) {
            if (part == kParts || part / kPerBox >= int(boxes)) return;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                uint2 at = place(part, i);
                before[i] = 0;
                if (at.x < m && at.y < width)
                    before[i] = *reinterpret_cast<const uint32_t *>(values + size_t(at.x) * width + at.y);
            }
        }
    }

    // 32 columns of what is rounded, and with the last of a box, the box.
    __device__ __forceinline__ void finish(int part) {
        if (part / kPerBox >= int(boxes)) return;
        uint32_t lane = threadIdx.x % 32, to = box(part / kPerBox % 2);
        if (part % (2 * kPerBox) == 0) { // both boxes are stored
            if (lane == 0) stores_wait<false>();
            __syncwarp();
        }
        uint32_t done[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float2 x = widen(words[8 * part + i]), y = widen(Reads ? before[i] : 0);
            done[i / 4][i % 4] = narrow(after(x.x, y.x), after(x.y, y.y));
        }
        load(part + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            store_matrices(vector_at(to, lane % 16, (part % kPerBox * 2 + h) * 2 + lane / 16), done[h]);
        if (part % kPerBox == kPerBox - 1) {
            fence_shared_for_async();
            __syncwarp();
            if (lane == 0 && row < m) store_box(out, column + part / kPerBox * kBox, row, to);
        }
    }

    // The main loop of this tile, with the end of the one before.
    template <bool Half> __device__ __forceinline__ void run(const Tiles<kWeights> &next) {
        constexpr int kGroups = Half ? kWeights / 16 : kWeights / 8; // of 8 columns
        uint32_t first = next.column + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            float2 b = {0.f, 0.f};
            if (first + 8 * j < width) b = *reinterpret_cast<const float2 *>(bias + first + 8 * j);
            acc[4 * j] = acc[4 * j + 2] = b.x, acc[4 * j + 1] = acc[4 * j + 3] = b.y;
        }
        tile<Half, kParts, false>([&](int part) { finish(part); });
#pragma unroll
        for (int i = 0; i < 2 * kGroups; ++i) words[i] = narrow(acc[2 * i], acc[2 * i + 1]);
        row = next.row + first_row();
        column = next.column;
        boxes = (Half ? kWeights / 2 : kWeights) / kBox;
        load(0);
    }

    __device__ __forceinline__ void finish_last() {
#pragma unroll
        for (int part = 0; part < kParts; ++part) finish(part);
        if (threadIdx.x % 32 == 0) stores_wait<true>();
    }
};

template <bool Reads, typename After>
__device__ void linear_bias(const TensorMap &x, const TensorMap &w, const TensorMap &out, const bf16 *values,
                            const float *bias, uint32_t m, uint32_t width, uint32_t k, uint32_t group) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    GemmShared &shared = *reinterpret_cast<GemmShared *>(bytes);
    release_successor();
    shared.init();
    Tiles<kWeights> tiles(m, width, group);
    if (threadIdx.x < 128) {
        registers_lower<kProducerRegisters>();
        auto place = [](const Tiles<kWeights> &tile, uint32_t i) { return tile.column + i * kBox; };
        if (threadIdx.x < 32 && elected()) fetch(x, w, tiles, k, shared, place);
        return;
    }
    wait_for_predecessor();
    registers_raise<kConsumerRegisters>();
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the warp's
    BiasConsumer<Reads, After> c = {{shared, warpgroup, (k + kBox - 1) / kBox}, out, values, bias, m, width};
#pragma unroll
    for (int i = 0; i < 64; ++i) c.words[i] = 0;
    c.boxes = 0; // before the first tile there is none
    while (tiles.next()) {
        if (tiles.half) c.template run<true>(tiles);
        else c.template run<false>(tiles);
    }
    c.finish_last();
}
#define BODY(READS, AFTER) linear_bias<READS, AFTER>(x, w, out, values, bias, m, width, k, group)
#else
#define BODY(READS, AFTER) __trap() // the launcher takes a GEMM and csrc/vision/rows.cu
#endif

// Grid: as many blocks as multiprocessors, whatever the shape. k: at least kParts steps.
#define LINEAR_BIAS(NAME, READS, AFTER)                                                                                \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void NAME(                                                    \
        const __grid_constant__ TensorMap x,   /* [m, k] in boxes of 128 rows */                                       \
        const __grid_constant__ TensorMap w,   /* [width, k] in boxes of 64 rows */                                    \
        const __grid_constant__ TensorMap out, /* [m, width] in boxes of 16 rows */                                    \
        const bf16 *values,                    /* the same memory */                                                   \
        const float *bias,                     /* [width] */                                                           \
        uint32_t m, uint32_t width, uint32_t k,                                                                        \
        uint32_t group) { /* tiles along the rows that are done before the next columns */                             \
        BODY(READS, AFTER);                                                                                            \
    }
LINEAR_BIAS(linear_bias, false, Store)
LINEAR_BIAS(linear_bias_residual, true, AddTo)
LINEAR_BIAS(linear_bias_gelu_tanh, false, GeluTanh)
LINEAR_BIAS(linear_bias_gelu_erf, false, GeluErf)
