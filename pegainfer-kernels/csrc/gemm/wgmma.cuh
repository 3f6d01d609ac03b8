// Large-M GEMM by wgmma with a fused epilogue, on Hopper: the main loop of csrc/gemm/wgmma_swiglu.cu and
// wgmma_bias.cu.
//
// x: [m, k], w: [n, k] bf16, tiles of 128 rows of x against 256 rows of w, f32 sums. Techniques: persistent blocks,
// warp specialisation with register reallocation (a producer warpgroup that fetches by TMA, two consumers of 64 rows
// each), grouped tile order for the L2, programmatic dependent launch with weights fetched ahead. Bound by the tensor
// cores: 1,036 cycles a step of 64 columns, limit 1,024.
//
// The tensor cores have no pause between tiles: a warpgroup rounds its accumulators to bf16, which frees them, begins
// the next tile, and does a part of the epilogue after each of the first steps of that one.
#pragma once
#include "common/hopper.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::gemm_wgmma;

constexpr uint32_t kBoxBytes = kBox * 128; // of 64 rows
// Of a thread after setmaxnreg: 128 * 40 + 256 * 232 of the 65,536 of a multiprocessor.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct GemmShared {
    uint8_t x[kStages][kRows * 128];
    uint8_t w[kStages][kWeights * 128];
    uint8_t out[kWarps][2][kStoreRows * 128]; // results, two boxes a warp
    uint64_t full[kStages], empty[kStages];
    // Called by all threads.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < kStages; ++i) {
                barrier_init(&full[i], 1);
                barrier_init(&empty[i], kWarps);
            }
            barriers_ready();
        }
        __syncthreads();
    }
};
static_assert(sizeof(GemmShared) == kSharedBytes);

// The tiles of this block, of `Columns` columns of results: every so many-th. If the last round has work for at most
// half of the blocks, all of it is dealt in halves, of half the columns.
template <uint32_t Columns> struct Tiles {
    uint32_t rows, columns, group, whole, count, at;
    uint32_t row, column; // of the present tile's results
    bool half;
    // Of [m, width] results; `high`: tiles along the rows that are done before the next columns.
    __device__ Tiles(uint32_t m, uint32_t width, uint32_t high) {
        rows = (m + kRows - 1) / kRows;
        columns = (width + Columns - 1) / Columns;
        group = high;
        uint32_t tiles = rows * columns, last = tiles % gridDim.x;
        whole = 2 * last <= gridDim.x ? tiles - last : tiles;
        count = 2 * tiles - whole;
        at = blockIdx.x;
    }
    // The next tile, if there is one. Those in a group of rows come column by column: the group's rows of x stay in the
    // L2, and weights while all of the group use them.
    __device__ __forceinline__ bool next() {
        if (at >= count) return false;
        half = at >= whole;
        uint32_t tile = half ? whole + (at - whole) / 2 : at;
        uint32_t first = tile / (group * columns) * group, high = min(group, rows - first);
        uint32_t i = tile - first * columns;
        row = (first + i % high) * kRows;
        column = i / high * Columns + (half ? (at - whole) % 2 * (Columns / 2) : 0);
        at += gridDim.x;
        return true;
    }
};

// Fetches the steps of all tiles, w in boxes of 64 rows; box i of a tile begins at row `place(tiles, i)`. Weights need
// not wait for the kernel before.
template <uint32_t Columns, typename Place>
__device__ void fetch(const TensorMap &x, const TensorMap &w, Tiles<Columns> tiles, uint32_t columns,
                      GemmShared &shared, Place place) {
    auto begin = [&](uint32_t slot, uint32_t k) {
        uint32_t boxes = (tiles.half ? kWeights / 2 : kWeights) / kBox, to = shared_address(shared.w[slot]);
        arrive_expecting(&shared.full[slot], kRows * 128 + boxes * kBoxBytes);
        for (uint32_t i = 0; i < boxes; ++i) copy_box(to + i * kBoxBytes, w, k, place(tiles, i), &shared.full[slot]);
    };
    uint32_t begun = 0;
    bool more = tiles.next();
    if (more)
        for (; begun < kStages && begun * kBox < columns; ++begun) begin(begun, begun * kBox);
    wait_for_predecessor();
    for (Ring<kStages> slot; more; more = tiles.next()) {
        for (uint32_t k = 0; k < columns; k += kBox, slot.next()) {
            if (begun > 0) {
                --begun;
            } else {
                wait(&shared.empty[slot.index], slot.parity ^ 1);
                begin(slot.index, k);
            }
            copy_box(shared_address(shared.x[slot.index]), x, k, tiles.row, &shared.full[slot.index]);
        }
    }
}

// threadIdx.x, read anew: what is computed from it holds no registers from one part to the next.
__device__ __forceinline__ uint32_t thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// A consumer: one warpgroup, 64 rows of each tile.
struct GemmConsumer {
    GemmShared &shared;
    uint32_t warpgroup, steps;
    Ring<kStages> slot;
    float acc[kWeights / 2];

    // Begins a step. Half: only the first half of the rows of w.
    template <bool First, bool Half> __device__ __forceinline__ void begin() {
        uint64_t a = descriptor(shared_address(shared.x[slot.index]) + warpgroup * (64 * 128), 0, 1024);
        uint64_t b = descriptor(shared_address(shared.w[slot.index]), 0, 1024);
        auto &d = reinterpret_cast<float (&)[Half ? kWeights / 4 : kWeights / 2]>(acc);
        wait(&shared.full[slot.index], slot.parity);
        wgmma_fence();
        wgmma<First>(d, a, b);
#pragma unroll
        for (int i = 1; i < 4; ++i) wgmma<false>(d, a + 2 * i, b + 2 * i);
        wgmma_commit();
        slot.next();
    }

    // Waits until at most `Left` steps are unfinished, and leaves the last of the others to be fetched over.
    template <uint32_t Left> __device__ __forceinline__ void end() {
        wgmma_wait<int(Left)>();
        if (thread() % 32 == 0) arrive(&shared.empty[(slot.index + kStages - 1 - Left) % kStages]);
    }

    // A tile, with `part(i)` while each of the first `Parts` steps is multiplied. Fresh: the sums begin at 0.
    template <bool Half, int Parts, bool Fresh = true, typename Part> __device__ __forceinline__ void tile(Part part) {
        begin<Fresh, Half>();
        part(0);
#pragma unroll
        for (int i = 1; i < Parts; ++i) {
            begin<false, Half>();
            end<1>();
            part(i);
        }
        for (uint32_t step = Parts; step < steps; ++step) {
            begin<false, Half>();
            end<1>();
        }
        end<0>();
    }

    // First row of this warp in a tile.
    __device__ __forceinline__ uint32_t first_row() const { return (thread() / 32 - 4) * kStoreRows; }
    // Where this warp's results go on their way to memory.
    __device__ __forceinline__ uint32_t box(int i) const { return shared_address(shared.out[thread() / 32 - 4][i]); }
};

// Address of a vector of a row, of 16 rows and 64 columns in shared memory with the swizzle.
__device__ __forceinline__ uint32_t vector_at(uint32_t box, uint32_t row, uint32_t vector) {
    return box + row * 128 + (vector ^ row % 8) * 16;
}
#endif
