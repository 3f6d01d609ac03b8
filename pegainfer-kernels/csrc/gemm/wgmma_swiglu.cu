// Gate and up projections with SwiGLU in the epilogue, for many rows, on Hopper: out = bf16(silu(x gateᵀ)) * (x upᵀ),
// both GEMMs rounded to bf16 first.
//
// From 512 rows on; main loop and techniques: csrc/gemm/wgmma.cuh. 708 TFLOP/s at 2,048 rows of Qwen3-4B on an H200,
// 720 at 4,096; cuBLASLt and csrc/rows/swiglu.cu take 8 % longer (lab/gemm.md).
// Reference: src/cpu/linear/mod.rs, src/cpu/swiglu.rs.
//
// A tile has 128 rows of the gate and the 128 rows of up that belong to them: 128 columns of out. So a thread has the
// sums of the gate and of up for the same elements.
#include "gemm/wgmma.cuh"
#include "common/math.cuh"
#include "abi/gemm_wgmma_swiglu.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr uint32_t kColumns = kWeights / 2; // of out, a tile
constexpr int kParts = kSwigluParts;        // in which a tile is activated

struct SwigluConsumer : GemmConsumer {
    const TensorMap &out;
    uint32_t m;
    uint32_t gate[32], up[32];   // rounded: for each 8 columns two words, of a lane's rows as in the d of `mma`
    uint32_t row, column, boxes; // of what is rounded, for this warp

    // 16 columns of what is rounded, and with the last of a box, the box.
    __device__ __forceinline__ void activate(int part) {
        constexpr int kPerBox = kBox / 16;
        uint32_t lane = threadIdx.x % 32, words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = silu_times2(gate[4 * part + i], up[4 * part + i]);
        if (part == 0) {
            if (lane == 0) stores_wait<false>();
            __syncwarp();
        }
        uint32_t to = box(part / kPerBox);
        store_matrices(vector_at(to, lane % 16, part % kPerBox * 2 + lane / 16), words);
        if (part % kPerBox == kPerBox - 1) {
            fence_shared_for_async();
            __syncwarp();
            if (lane == 0 && row < m && part / kPerBox < boxes) store_box(out, column + part / kPerBox * kBox, row, to);
        }
    }

    // The main loop of this tile, with the activation of the one before. Half: its first kColumns / 2 columns.
    template <bool Half> __device__ __forceinline__ void run(const Tiles<kColumns> &next) {
        tile<Half, kParts>([&](int part) { activate(part); });
        constexpr int kWords = Half ? 16 : 32;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            gate[i] = narrow(acc[2 * i], acc[2 * i + 1]);
            up[i] = narrow(acc[2 * kWords + 2 * i], acc[2 * kWords + 2 * i + 1]);
        }
        row = next.row + first_row();
        column = next.column;
        boxes = Half ? 1 : kColumns / kBox;
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int part = 0; part < kParts; ++part) activate(part);
        if (threadIdx.x % 32 == 0) stores_wait<true>();
    }
};

__device__ void consume(const TensorMap &out, uint32_t m, uint32_t k, Tiles<kColumns> tiles, GemmShared &shared) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the warp's
    SwigluConsumer c = {{shared, warpgroup, (k + kBox - 1) / kBox}, out, m};
#pragma unroll
    for (int i = 0; i < 32; ++i) c.gate[i] = c.up[i] = 0;
    c.boxes = 0; // before the first tile there is none
    while (tiles.next()) {
        if (tiles.half) c.run<true>(tiles);
        else c.run<false>(tiles);
    }
    c.finish();
}

__device__ void linear_swiglu(const TensorMap &x, const TensorMap &w, const TensorMap &out, uint32_t m, uint32_t width,
                              uint32_t k, uint32_t group) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    GemmShared &shared = *reinterpret_cast<GemmShared *>(bytes);
    release_successor();
    shared.init();
    Tiles<kColumns> tiles(m, width, group);
    if (threadIdx.x < 128) {
        registers_lower<kProducerRegisters>();
        // The boxes of the gate, then as many of up.
        auto place = [width](const Tiles<kColumns> &tile, uint32_t i) {
            uint32_t each = tile.half ? 1 : 2;
            return (i < each ? tile.column : width + tile.column - each * kBox) + i * kBox;
        };
        if (threadIdx.x < 32 && elected()) fetch(x, w, tiles, k, shared, place);
    } else {
        wait_for_predecessor();
        registers_raise<kConsumerRegisters>();
        consume(out, m, k, tiles, shared);
    }
}
#define BODY() linear_swiglu(x, w, out, m, width, k, group)
#else
#define BODY() __trap() // the launcher takes a GEMM and csrc/rows/swiglu.cu
#endif

// Grid: as many blocks as multiprocessors, whatever the shape. k: at least kParts steps.
extern "C" __global__ __launch_bounds__(kThreads, 1) void gemm_wgmma_swiglu(
    const __grid_constant__ TensorMap x,   // [m, k] in boxes of 128 rows
    const __grid_constant__ TensorMap w,   // [2 * width, k], the rows of the gate first, in boxes of 64 rows
    const __grid_constant__ TensorMap out, // [m, width] in boxes of 16 rows
    uint32_t m, uint32_t width, uint32_t k,
    uint32_t group) { // tiles along the rows that are done before the next columns
    BODY();
}
