// What skinny GEMMs by wgmma share (gemm/skinny_wgmma.cu, gemm/skinny_wgmma_fp8.cu, gemm/skinny_int4.cu): how rows of w
// are dealt to blocks, the producers, and the epilogues.
#pragma once
#include "common/hopper.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"
#include "common/weight_codes.cuh"
#include "limits.h"

using namespace limits::skinny_wgmma;

enum Epilogue { kPlain, kGated, kLogits };

struct SkinnyShape {
    uint32_t m, n, k;
    uint32_t pitch;   // of out
    uint32_t split;   // columns of a block, a multiple of those of a step; blockIdx.y says which
    uint32_t rows;    // of a tile
    uint32_t passes;  // over the columns, each with T tiles for every warpgroup (gated: with one, its two halves)
    uint32_t slots;   // steps of a tile of w in shared memory: a multiple of the warpgroups, at least two for each
    uint32_t x_slots; // steps of x in shared memory, at least two
    uint32_t ahead;   // of the slots, how many are filled before the kernels that produce x are done
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Columns of a box of w, 128 bytes of a row.
template <Format F> constexpr uint32_t kBoxColumns = F == Format::kInt4 ? 256 : F == Format::kFp8 ? 128 : 64;
// Boxes of w and of x in a step. With int4 weights, x is bf16: four boxes have the columns of one of w.
template <Format F> constexpr uint32_t kWeightBoxes = F == Format::kInt4 ? 1 : kBoxes;
template <Format F> constexpr uint32_t kInputBoxes = F == Format::kInt4 ? 4 : kBoxes;
// Bytes of the scales and zero points of a step of int4 weights: for each block of 128 columns, 80 scales and 96 zero
// points. Both begin at whole vectors before a tile's first row.
template <Format F> constexpr uint32_t kScaleBytes = F == Format::kInt4 ? 2 * (80 * 2 + 96) : 0;
// Columns of a step.
template <Format F> constexpr uint32_t kStep = kWeightBoxes<F> * kBoxColumns<F>;

// Shared memory, 1,024-byte aligned: w [slots][kWeightBoxes][rows rounded up to 8][128 bytes], x
// [x_slots][kInputBoxes][N][128 bytes], with FP8 the scales of x [x_slots][kBoxes][N], with int4
// those of w [slots][kScaleBytes], barriers.
template <int N, Format F> struct Rings {
    uint32_t w, x, w_box; // addresses, and bytes of a box of w
    float *x_scales;
    uint8_t *w_scales;
    uint64_t *w_full, *w_empty, *x_full, *x_empty;
    __device__ Rings(uint8_t *shared, const SkinnyShape &shape) {
        w_box = (shape.rows + 7) / 8 * 1024;
        w = shared_address(shared);
        x = w + shape.slots * kWeightBoxes<F> * w_box;
        x_scales = reinterpret_cast<float *>(shared + (x - w) + shape.x_slots * (kInputBoxes<F> * N * 128));
        w_scales = reinterpret_cast<uint8_t *>(x_scales + (F == Format::kFp8 ? shape.x_slots * kBoxes * N : 0));
        w_full = reinterpret_cast<uint64_t *>(w_scales + shape.slots * kScaleBytes<F>);
        w_empty = w_full + shape.slots;
        x_full = w_empty + shape.slots;
        x_empty = x_full + shape.x_slots;
        // Or the compiler computes them anew in every step, from the arguments.
        asm volatile("" : "+l"(w_full), "+l"(w_empty), "+l"(x_full), "+l"(x_empty));
    }
    // By all warps, because a warp initialises one at a time. Each warp of a warpgroup gives a slot back; `x_producers`
    // fill one of x.
    __device__ void init(const SkinnyShape &shape, uint32_t warpgroups, uint32_t x_producers = 1) {
        uint32_t of_w = 2 * shape.slots, of_x = 2 * shape.x_slots;
        for (uint32_t i = threadIdx.x / 32; i < of_w + of_x; i += blockDim.x / 32) {
            uint32_t back = i < of_w ? 4 : 4 * warpgroups;
            bool full = i < of_w ? i < shape.slots : i - of_w < shape.x_slots;
            uint32_t filled = i < of_w ? 1 : x_producers;
            if (threadIdx.x % 32 == 0) barrier_init(w_full + i, full ? filled : back);
        }
        if (threadIdx.x % 32 == 0) barriers_ready();
    }
};

// A block's work: rows from `first` to before `end`, if gated those of the gate.
template <int T, Epilogue E> struct SkinnyShare {
    uint32_t first, end, column, steps, warpgroups;
    // `step`: columns of a step.
    __device__ SkinnyShare(const SkinnyShape &shape, uint32_t step) {
        uint32_t rows = E == kGated ? shape.n / 2 : shape.n;
        // Logits come in whole sectors of 32 bytes: written in fragments, they keep the memory busy for longer.
        const uint32_t unit = E == kLogits ? 8 : 1;
        uint32_t each = rows / unit / gridDim.x, more = rows / unit % gridDim.x;
        first = (each * blockIdx.x + min(blockIdx.x, more)) * unit;
        end = first + (each + (blockIdx.x < more ? 1 : 0)) * unit;
        column = blockIdx.y * shape.split;
        steps = (min(shape.split, shape.k - column) + step - 1) / step;
        warpgroups = (blockDim.x - kFetchers) / 128;
    }
    // First row of a warpgroup's tile t in a pass.
    __device__ uint32_t tile_row(const SkinnyShape &shape, uint32_t pass, uint32_t t, uint32_t warpgroup) const {
        uint32_t tile = E == kGated ? pass : pass * T + t;
        return first + (tile * warpgroups + warpgroup) * shape.rows;
    }
    // Whether the last pass ends before tile t, for all warpgroups: with the rows of tiles rounded up, it may.
    __device__ bool is_past_end(const SkinnyShape &shape, uint32_t pass, uint32_t t) const {
        return E == kLogits && t > 0 && tile_row(shape, pass, t, 0) >= end;
    }
};

// Where box i of a step begins in a map of w, which has two codes of FP8 or four of int4 in an element.
template <Format F> __device__ __forceinline__ uint32_t map_column(uint32_t first, uint32_t step, uint32_t i) {
    return (first + step * kStep<F>) / (kBoxColumns<F> / 64) + 64 * i;
}

// The same in a map of x.
template <Format F> __device__ __forceinline__ uint32_t input_column(uint32_t first, uint32_t step, uint32_t i) {
    return F == Format::kInt4 ? first + step * kStep<F> + 64 * i : map_column<F>(first, step, i);
}

// Fetches nothing next to a step's weights.
struct NoScales {
    __device__ uint32_t bytes() const { return 0; }
    __device__ void fetch(uint32_t, uint32_t, uint8_t *, uint64_t *) const {}
};

// Rows behind the share, or behind w, may be fetched with its last tile. `scales` fetches as many bytes for the rows
// from one on and the columns from one on.
template <int N, int T, Epilogue E, Format F, typename S = NoScales>
__device__ void fetch_weights(const TensorMap &map, const SkinnyShape &shape, const SkinnyShare<T, E> &share,
                              const Rings<N, F> &rings, const S &scales = {}) {
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
                    arrive_expecting(full, kWeightBoxes<F> * shape.rows * 128 + scales.bytes());
                    scales.fetch(row, share.column + step * kStep<F>, rings.w_scales + place.index * kScaleBytes<F>,
                                 full);
#pragma unroll
                    for (int i = 0; i < kWeightBoxes<F>; ++i)
                        copy_box(rings.w + (place.index * kWeightBoxes<F> + i) * rings.w_box, map,
                                 map_column<F>(share.column, step, i), row, full);
                    place.advance(1, shape.slots);
                }
}

// The scales of x in memory, for each 128 columns those of all rows: [columns, rows], rows in multiples of four.
struct InputScales {
    const float *values;
    uint32_t columns, rows;
};

// A box has as many rows as x. What is behind them in a slot goes to columns of the accumulators that nobody reads.
template <int N, int T, Epilogue E, Format F>
__device__ void fetch_inputs(const TensorMap &map, const SkinnyShape &shape, const SkinnyShare<T, E> &share,
                             const Rings<N, F> &rings, InputScales scales = {}) {
    RingCursor place{0};
    wait_for_predecessor();
    for (uint32_t pass = 0; pass < shape.passes; ++pass)
        for (uint32_t step = 0; step < share.steps; ++step) {
            uint64_t *full = rings.x_full + place.index;
            wait(rings.x_empty + place.index, place.parity ^ 1);
            arrive_expecting(full, kInputBoxes<F> * (shape.m * 128 + scales.rows * sizeof(float)));
#pragma unroll
            for (int i = 0; i < kInputBoxes<F>; ++i) {
                copy_box(rings.x + (place.index * kInputBoxes<F> + i) * (N * 128), map,
                         input_column<F>(share.column, step, i), 0, full);
                if (F != Format::kFp8) continue;
                // Behind the last columns, codes are zeros: any scale is right that is a number.
                uint32_t block = min(share.column / kBoxColumns<F> + step * kBoxes + i, scales.columns - 1);
                copy_bulk(rings.x_scales + (place.index * kBoxes + i) * N, scales.values + size_t(block) * scales.rows,
                          scales.rows * sizeof(float), full);
            }
            place.advance(1, shape.x_slots);
        }
}

// Writes a tile whose rows are `row` to before `end`, at most 64; `other`: the accumulators of the up rows, if gated.
template <int N, Epilogue E, typename O>
__device__ __forceinline__ void write(const float (&acc)[N / 2], const float (&other)[N / 2], const SkinnyShape &shape,
                                      uint32_t row, uint32_t end, O *out) {
    uint32_t lane = threadIdx.x % 32, width = shape.pitch;
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
#endif
