// Skinny GEMM by wgmma: out = x wᵀ for up to 96 rows of x, every weight read once.
//
// x: [m, k] bf16, w: [n, k] bf16, out: [m, n] bf16 or f32, [m, n / 2] bf16(silu(gate)) * up (gated: rows of the gate
// first), or f32 partials [splits, m, n] that csrc/norm.cu adds. Hopper (sm_90a); 1 to 96 rows, where it beats
// csrc/gemv_splitk.cu and cuBLASLt. Reference: src/cpu/linear/mod.rs.
//
// Techniques: swap-AB (the weight matrix is operand A: 64 output features a tile; all rows of x are operand B); split-K
// where a matrix has few rows; warp specialisation with one warp that fetches w and one that fetches x by TMA boxes;
// mbarrier rings; programmatic dependent launch with weights fetched ahead. Bound by memory: 25.2 us for the gate and
// up of Qwen3-4B (99.6 MB, 4.0 of 4.46 TB/s) at one row, 26.5 at 32, 32 at 96
// (docs/benchmarks/notes-h200-kernels.md).
//
// Each block has an even share of the rows of w, of a split of their columns, and deals it to its one or two warpgroups
// in tiles of at most 64 rows. Tiles need not be full: the tensor cores then multiply what lies behind, and nobody
// reads the result.
//
// The producers fetch 128 columns at a time: tiles of w from before the kernels that produce x are done, and x, which
// all warpgroups share. A step has as many columns as that because waiting for it and giving it back costs a warpgroup
// as much time as 128 columns of wgmma of 32 rows.
#include "hopper.cuh"
#include "math.cuh"
#include "warp.cuh"
#include "abi/skinny_wgmma.h"
#include "limits.h"

using namespace limits::skinny_wgmma;

enum Epilogue { kPlain, kGated, kLogits };


struct Shape {
    uint32_t m, n, k;
    uint32_t split;   // columns of a block, a multiple of those of a step; blockIdx.y says which
    uint32_t rows;    // of a tile
    uint32_t passes;  // over the columns, each with T tiles for every warpgroup (gated: with one, its two halves)
    uint32_t slots;   // steps of a tile of w in shared memory: a multiple of the warpgroups, at least two for each
    uint32_t x_slots; // steps of x in shared memory, at least two
    uint32_t ahead;   // of the slots, how many are filled before the kernels that produce x are done
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr uint32_t kStep = 64 * kBoxes;

// Shared memory, 1,024-byte aligned: w [slots][kBoxes][rows rounded up to 8][64], x [x_slots][kBoxes][N][64], barriers.
template <int N> struct Rings {
    uint32_t w, x, w_box; // addresses, and bytes of a box of w
    uint64_t *w_full, *w_empty, *x_full, *x_empty;
    __device__ Rings(uint8_t *shared, const Shape &shape) {
        w_box = (shape.rows + 7) / 8 * 1024;
        w = shared_address(shared);
        x = w + shape.slots * kBoxes * w_box;
        w_full = reinterpret_cast<uint64_t *>(shared + (x - w) + shape.x_slots * (kBoxes * N * 128));
        w_empty = w_full + shape.slots;
        x_full = w_empty + shape.slots;
        x_empty = x_full + shape.x_slots;
        // Or the compiler computes them anew in every step, from the arguments.
        asm volatile("" : "+l"(w_full), "+l"(w_empty), "+l"(x_full), "+l"(x_empty));
    }
    // By all warps, because a warp initialises one at a time. Each warp of a warpgroup gives a slot back.
    __device__ void init(const Shape &shape, uint32_t warpgroups) {
        uint32_t of_w = 2 * shape.slots, of_x = 2 * shape.x_slots;
        for (uint32_t i = threadIdx.x / 32; i < of_w + of_x; i += blockDim.x / 32) {
            uint32_t back = i < of_w ? 4 : 4 * warpgroups;
            bool full = i < of_w ? i < shape.slots : i - of_w < shape.x_slots;
            if (threadIdx.x % 32 == 0) barrier_init(w_full + i, full ? 1 : back);
        }
        if (threadIdx.x % 32 == 0) barriers_ready();
    }
};

// A block's work: rows from `first` to before `end`, if gated those of the gate.
template <int T, Epilogue E> struct Share {
    uint32_t first, end, column, steps, warpgroups;
    __device__ Share(const Shape &shape) {
        uint32_t rows = E == kGated ? shape.n / 2 : shape.n;
        // Logits come in whole sectors of 32 bytes: written in fragments, they keep the memory busy for longer.
        const uint32_t unit = E == kLogits ? 8 : 1;
        uint32_t each = rows / unit / gridDim.x, more = rows / unit % gridDim.x;
        first = (each * blockIdx.x + min(blockIdx.x, more)) * unit;
        end = first + (each + (blockIdx.x < more ? 1 : 0)) * unit;
        column = blockIdx.y * shape.split;
        steps = (min(shape.split, shape.k - column) + kStep - 1) / kStep;
        warpgroups = (blockDim.x - kFetchers) / 128;
    }
    // First row of a warpgroup's tile t in a pass.
    __device__ uint32_t tile_row(const Shape &shape, uint32_t pass, uint32_t t, uint32_t warpgroup) const {
        uint32_t tile = E == kGated ? pass : pass * T + t;
        return first + (tile * warpgroups + warpgroup) * shape.rows;
    }
    // Whether the last pass ends before tile t, for all warpgroups: with the rows of tiles rounded up, it may.
    __device__ bool is_past_end(const Shape &shape, uint32_t pass, uint32_t t) const {
        return E == kLogits && t > 0 && tile_row(shape, pass, t, 0) >= end;
    }
};

// Rows behind the share, or behind w, may be fetched with its last tile.
template <int N, int T, Epilogue E>
__device__ void fetch_weights(const TensorMap &map, const Shape &shape, const Share<T, E> &share,
                              const Rings<N> &rings) {
    RingCursor place{0};
    uint32_t fetched = 0;
    for (uint32_t pass = 0; pass < shape.passes; ++pass)
        for (uint32_t step = 0; step < share.steps; ++step)
#pragma unroll
            for (int t = 0; t < T; ++t)
                for (uint32_t g = 0; g < share.warpgroups && !share.is_past_end(shape, pass, t); ++g) {
                    if (fetched++ == shape.ahead) wait_for_predecessor();
                    uint32_t row = share.tile_row(shape, pass, t, g) + (E == kGated && t > 0 ? shape.n / 2 : 0);
                    uint64_t *full = rings.w_full + place.index;
                    wait(rings.w_empty + place.index, place.parity ^ 1);
                    arrive_expecting(full, kBoxes * shape.rows * 128);
#pragma unroll
                    for (int i = 0; i < kBoxes; ++i)
                        copy_box(rings.w + (place.index * kBoxes + i) * rings.w_box, map,
                                 share.column + step * kStep + 64 * i, row, full);
                    place.advance(1, shape.slots);
                }
}

// A box has as many rows as x. What is behind them in a slot goes to columns of the accumulators that nobody reads.
template <int N, int T, Epilogue E>
__device__ void fetch_inputs(const TensorMap &map, const Shape &shape, const Share<T, E> &share,
                             const Rings<N> &rings) {
    RingCursor place{0};
    wait_for_predecessor();
    for (uint32_t pass = 0; pass < shape.passes; ++pass)
        for (uint32_t step = 0; step < share.steps; ++step) {
            uint64_t *full = rings.x_full + place.index;
            wait(rings.x_empty + place.index, place.parity ^ 1);
            arrive_expecting(full, kBoxes * shape.m * 128);
#pragma unroll
            for (int i = 0; i < kBoxes; ++i)
                copy_box(rings.x + (place.index * kBoxes + i) * (N * 128), map, share.column + step * kStep + 64 * i, 0,
                         full);
            place.advance(1, shape.x_slots);
        }
}

// Writes a tile whose rows are `row` to before `end`, at most 64; `other`: the accumulators of the up rows, if gated.
template <int N, Epilogue E, typename O>
__device__ __forceinline__ void write(const float (&acc)[N / 2], const float (&other)[N / 2], const Shape &shape,
                                      uint32_t row, uint32_t end, O *out) {
    uint32_t lane = threadIdx.x % 32, width = E == kGated ? shape.n / 2 : shape.n;
    row += threadIdx.x % 128 / 32 * 16 + Accumulator::row(lane, 0);
    uint32_t token = Accumulator::column(lane, 0);
    out += size_t(token) * width + row;
    bool low = row < end, high = row + 8 < end;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int at = 4 * j + i;
            auto value = [&](int a) {
                return E == kGated ? silu_times(round_bf16(acc[a]), round_bf16(other[a])) : acc[a];
            };
            if (token + i < shape.m && low) put(out, value(at));
            if (token + i < shape.m && high) put(out + 8, value(at + 2));
            out += width;
        }
        token += 8, out += 6 * size_t(width);
    }
}

template <int N, int T, Epilogue E, typename O>
__device__ void multiply(const Shape &shape, const Share<T, E> &share, const Rings<N> &rings, O *out) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0); // the compiler then knows that it is the warp's
    RingCursor place{warpgroup}, x_place{0};
    uint64_t *w_held = nullptr, *x_held = nullptr; // barriers of the slots that unfinished wgmma read
    const uint64_t a0 = descriptor(rings.w, 0, 1024), b0 = descriptor(rings.x, 0, 1024);
    const uint32_t a_box = rings.w_box / 16, b_box = N * 128 / 16; // of operands
    auto release = [](uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        float acc[T][N / 2];
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[t][i] = 0.f;
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(rings.x_full + x_place.index, x_place.parity);
            uint64_t b = b0 + x_place.index * (kBoxes * b_box);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                if (share.is_past_end(shape, pass, t)) continue;
                wait(rings.w_full + place.index, place.parity);
                uint64_t a = a0 + place.index * (kBoxes * a_box);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4 * kBoxes; ++i)
                    wgmma<false>(acc[t], a + i / 4 * a_box + i % 4 * 2, b + i / 4 * b_box + i % 4 * 2);
                wgmma_commit();
                if (step > 0 || t > 0) {
                    wgmma_wait<1>();
                    release(w_held);
                    if (t == 0) release(x_held);
                }
                w_held = rings.w_empty + place.index;
                place.advance(share.warpgroups, shape.slots);
            }
            x_held = rings.x_empty + x_place.index;
            x_place.advance(1, shape.x_slots);
        }
        wgmma_wait<0>();
        release(w_held);
        release(x_held);
#pragma unroll
        for (int t = 0; t < (E == kGated ? 1 : T); ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup), end = min(row + shape.rows, share.end);
            write<N, E>(acc[t], acc[E == kGated ? T - 1 : t], shape, row, end, out);
        }
    }
}

// out: [m, n], gated [m, n / 2], or, of O float, one such matrix for each split of the columns.
template <int N, int T, Epilogue E, typename O>
__device__ void wide(const TensorMap &x, const TensorMap &w, O *out, const Shape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Share<T, E> share(shape);
    Rings<N> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, out);
    else if (warp == fetcher && elected()) fetch_weights<N, T, E>(w, shape, share, rings);
    else if (warp == fetcher + 1 && elected()) fetch_inputs<N, T, E>(x, shape, share, rings);
}
#define BODY(...) wide<__VA_ARGS__>(x, w, out, {m, n, k, split, rows, passes, slots, x_slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#endif

// Grid: blocks, splits. For up to N rows of x; the parameters after k are those of `Shape`.
#define WIDE(name, N, T, E, O)                                                                                         \
    extern "C" __global__ __launch_bounds__(kMaxWarpgroups * 128 + kFetchers, 1) void name##_##N(                      \
        const __grid_constant__ TensorMap x, /* [m, k] in boxes of m rows */                                           \
        const __grid_constant__ TensorMap w, /* [n, k] in boxes of `rows` rows */                                      \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n] */                     \
        uint32_t m, uint32_t n, uint32_t k, uint32_t split, uint32_t rows, uint32_t passes, uint32_t slots,            \
        uint32_t x_slots, uint32_t ahead) {                                                                            \
        BODY(N, T, E, O);                                                                                              \
    }
// Logits have many rows of w: LONG tiles at once.
#define KERNELS(N, LONG)                                                                                               \
    WIDE(skinny_wgmma_bf16, N, 1, kPlain, bf16)                                                                        \
    WIDE(skinny_wgmma_f32, N, 1, kPlain, float)                                                                        \
    WIDE(skinny_wgmma_gated, N, 2, kGated, bf16)                                                                       \
    WIDE(skinny_wgmma_logits, N, LONG, kLogits, float)
KERNELS(32, 4)
KERNELS(64, 2)
KERNELS(96, 2)
