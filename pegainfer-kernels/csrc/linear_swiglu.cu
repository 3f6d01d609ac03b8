// out = silu(x gateᵀ) * (x upᵀ) for many rows, on Hopper's warpgroup products.
//
// A tile is 128 rows of x against 128 rows of the gate and the 128 rows of up that belong to them: 128 columns of out.
// Two warpgroups multiply, 64 rows of x each, so that a thread has the products of the gate and of up for the same
// elements; a third fetches and leaves its registers to them.
//
// The tensor cores have no pause between tiles: a warpgroup rounds its products to bf16, which frees the accumulators,
// begins the next tile, and activates a part of what it rounded after each of the first steps of that one.
#include "hopper.cuh"

constexpr uint32_t kRows = 128, kColumns = 128; // of out, a tile
constexpr uint32_t kBox = 64;                   // columns of a box: 128 bytes, what the swizzle spans
constexpr uint32_t kBoxRows = 64;               // of a box of w, whose columns of out are a box, too
constexpr uint32_t kBoxBytes = kBoxRows * 128;
constexpr uint32_t kStoreRows = 16; // of a box of out: those of a warp
constexpr int kStages = 4;          // steps of kBox columns of x and w in shared memory
constexpr int kParts = 8;           // in which a tile is activated
constexpr int kConsumers = 2;       // warpgroups that multiply
constexpr uint32_t kWarps = 4 * kConsumers;

struct Shape {
    uint32_t m, width, k;
    uint32_t group; // tiles along the rows that are done before the next columns
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct Shared {
    uint8_t x[kStages][kRows * 128];
    uint8_t w[kStages][2 * kColumns * 128]; // the gate, then up
    uint8_t out[kWarps][kColumns / kBox][kStoreRows * 128];
    uint64_t full[kStages], empty[kStages];
};

// The tiles of this block: every so many-th. If the last round has work for at most half of the blocks, all of it is
// dealt in halves, of half the columns.
struct Tiles {
    uint32_t rows, columns, group, whole, count, at;
    uint32_t row, column; // of the present tile, of out
    bool half;
    __device__ Tiles(const Shape &shape) {
        rows = (shape.m + kRows - 1) / kRows;
        columns = (shape.width + kColumns - 1) / kColumns;
        group = shape.group;
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
        column = i / high * kColumns + (half ? (at - whole) % 2 * (kColumns / 2) : 0);
        at += gridDim.x;
        return true;
    }
};

__device__ void fetch(const TensorMap &x, const TensorMap &w, const Shape &shape, Shared &shared) {
    Tiles tiles(shape);
    Ring<kStages> slot;
    while (tiles.next()) {
        uint32_t boxes = tiles.half ? 1 : kColumns / kBoxRows; // of the gate, and of up
        for (uint32_t k = 0; k < shape.k; k += kBox) {
            uint64_t *full = &shared.full[slot.index];
            uint32_t to = shared_address(shared.w[slot.index]);
            wait(&shared.empty[slot.index], slot.parity ^ 1);
            arrive_expecting(full, kRows * 128 + 2 * boxes * kBoxBytes);
            copy_box(shared_address(shared.x[slot.index]), x, k, tiles.row, full);
            for (uint32_t up = 0; up < 2; ++up)
                for (uint32_t i = 0; i < boxes; ++i)
                    copy_box(to + (up * boxes + i) * kBoxBytes, w, k,
                             up * shape.width + tiles.column + i * kBoxRows, full);
            slot.next();
        }
    }
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// A consumer: one warpgroup, 64 rows of each tile.
struct Consumer {
    Shared &shared;
    const TensorMap &out;
    uint32_t m, warpgroup, steps;
    Ring<kStages> slot;
    uint64_t *held;              // barrier of the slot that an unfinished product reads
    float acc[kColumns];         // columns of the gate, then those of up
    uint32_t gate[32], up[32];   // rounded: for each 8 columns two words, of a lane's rows as in the d of `mma`
    uint32_t row, column, boxes; // of what is rounded, for this warp

    __device__ __forceinline__ void release() {
        if (threadIdx.x % 32 == 0) arrive(held);
    }

    // Begins a step, and waits for the one before it.
    template <bool First, bool Half> __device__ __forceinline__ void multiply() {
        uint64_t a = operand(shared_address(shared.x[slot.index]) + warpgroup * (64 * 128), 0, 1024);
        uint64_t b = operand(shared_address(shared.w[slot.index]), 0, 1024);
        auto &d = reinterpret_cast<float(&)[Half ? kColumns / 2 : kColumns]>(acc);
        wait(&shared.full[slot.index], slot.parity);
        wgmma_fence();
        wgmma<First>(d, a, b);
#pragma unroll
        for (int i = 1; i < 4; ++i) wgmma<false>(d, a + 2 * i, b + 2 * i);
        wgmma_commit();
        if (!First) {
            wgmma_wait<1>();
            release();
        }
        held = &shared.empty[slot.index];
        slot.next();
    }

    // 16 columns of what is rounded, and with the last of a box, the box.
    __device__ __forceinline__ void activate(int part) {
        constexpr int kPerBox = kBox / 16;
        uint32_t lane = threadIdx.x % 32, words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float2 g = widen(gate[4 * part + i]), u = widen(up[4 * part + i]);
            g = widen(narrow(silu(g.x), silu(g.y)));
            words[i] = narrow(g.x * u.x, g.y * u.y);
        }
        if (part == 0) {
            if (lane == 0) stores_wait<false>();
            __syncwarp();
        }
        uint32_t box = shared_address(shared.out[warpgroup * 4 + threadIdx.x / 32 % 4][part / kPerBox]);
        uint32_t at = lane % 16, piece = part % kPerBox * 2 + lane / 16;
        store_matrices(box + at * 128 + (piece ^ at % 8) * 16, words);
        if (part % kPerBox == kPerBox - 1) {
            fence_shared_for_async();
            __syncwarp();
            if (lane == 0 && row < m && part / kPerBox < boxes)
                store_box(out, column + part / kPerBox * kBox, row, box);
        }
    }

    // Multiplies this tile and activates the one before. Half: its first kColumns / 2 columns.
    template <bool Half> __device__ __forceinline__ void run(const Tiles &tile) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (part == 0) multiply<true, Half>();
            else multiply<false, Half>();
            activate(part);
        }
        for (uint32_t step = kParts; step < steps; ++step) multiply<false, Half>();
        wgmma_wait<0>();
        release();
        constexpr int kWords = Half ? 16 : 32;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            gate[i] = narrow(acc[2 * i], acc[2 * i + 1]);
            up[i] = narrow(acc[2 * kWords + 2 * i], acc[2 * kWords + 2 * i + 1]);
        }
        row = tile.row + (warpgroup * 4 + threadIdx.x / 32 % 4) * kStoreRows;
        column = tile.column;
        boxes = Half ? 1 : kColumns / kBox;
    }

    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int part = 0; part < kParts; ++part) activate(part);
        if (threadIdx.x % 32 == 0) stores_wait<true>();
    }
};

__device__ void consume(const TensorMap &out, const Shape &shape, Shared &shared) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the warp's
    Consumer c = {shared, out, shape.m, warpgroup, (shape.k + kBox - 1) / kBox};
#pragma unroll
    for (int i = 0; i < 32; ++i) c.gate[i] = c.up[i] = 0;
    c.boxes = 0; // before the first tile there is none
    Tiles tiles(shape);
    while (tiles.next()) {
        if (tiles.half) c.run<true>(tiles);
        else c.run<false>(tiles);
    }
    c.finish();
}

__device__ void linear_swiglu(const TensorMap &x, const TensorMap &w, const TensorMap &out, const Shape &shape) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared &shared = *reinterpret_cast<Shared *>(bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], kWarps);
        }
        barriers_ready();
    }
    release_successor();
    __syncthreads();
    wait_for_predecessor();
    if (threadIdx.x < 128) {
        registers_lower<40>();
        if (threadIdx.x < 32 && elected()) fetch(x, w, shape, shared);
    } else {
        registers_raise<232>();
        consume(out, shape, shared);
    }
}
#define BODY() linear_swiglu(x, w, out, {m, width, k, group})
#else
#define BODY() __trap() // the launcher takes a product and csrc/swiglu.cu
#endif

// Grid: as many blocks as multiprocessors, whatever the shape. x: [m, k] in boxes of 128 rows, w: [2 * width, k], the
// rows of the gate first, in boxes of 64 rows, out: [m, width] in boxes of 16 rows. k: at least kParts steps.
extern "C" __global__ __launch_bounds__((1 + kConsumers) * 128, 1) void linear_swiglu_many(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap out,
    uint32_t m, uint32_t width, uint32_t k, uint32_t group) {
    BODY();
}
