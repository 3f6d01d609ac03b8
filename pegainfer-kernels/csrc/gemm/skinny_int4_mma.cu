// Skinny GEMM by mma.sync with weights of four bits: out = x wᵀ for up to 32 rows of x, every code of w read once.
//
// x: [m, k] bf16; w: [n, k] in four bits with a scale, and a zero point or 8, for each group of columns of a row
// (csrc/common/int4.cuh), the group a multiple of 128. out as in csrc/gemm/skinny_wgmma.cu. Hopper (sm_90a), where more
// rows of x run csrc/gemm/skinny_int4.cu. Reference: src/cpu/linear/mod.rs.
//
// Techniques: swap-AB (16 rows of w are operand A), codes in the order of that operand (Marlin, arXiv 2408.11743); one
// thread fetches codes, scales and x into a ring of slots by TMA; programmatic dependent launch with codes fetched
// ahead; split-K between blocks and between the warps of a block. Codes less zero points are exact in bf16: 128 columns
// are summed in f32 from zero, and the sum times the scale is added to the result. A wgmma of 8 columns takes as long
// as one of 32, mma.sync a quarter; and warps that do not wait for each other hide the instructions that widen codes.
//
// A slot has 256 columns of the rows of a tile, and x at these columns. Its rows are dealt to `strips` warps, 16 each
// (gated: 8 of the gate and 8 of up); `parts` such sets of warps take turns.
#include "common/async.cuh"
#include "common/int4.cuh"
#include "common/math.cuh"
#include "common/warp.cuh"
#include "gemm/strip.cuh"
#include "abi/gemm_skinny_int4_mma.h"
#include "limits.h"

using namespace limits::skinny_int4;

enum Epilogue { kPlain, kGated };

constexpr uint32_t kBlocks = kColumns / kInt4Block; // of 128 columns of a slot
constexpr uint32_t kInputBoxes = kColumns / 64;     // of x in a slot

struct Shape {
    uint32_t m, n, k;
    uint32_t pitch;  // of out
    uint32_t split;  // columns of a block, a multiple of kColumns; blockIdx.y says which
    uint32_t rows;   // of a tile, at most 256; gated: of the gate
    uint32_t passes; // over the columns, each with one tile
    uint32_t strips; // warps with the rows of a slot
    uint32_t parts;  // sets of such warps
    uint32_t slots;
    uint32_t ahead; // slots whose codes are fetched before the kernels that produce x are done
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Shared memory, 1,024-byte aligned: codes [slots][kBoxes][rows rounded up to 8][128 bytes], x [slots][kInputBoxes]
// [8 TILES][128 bytes], scales and zero points [slots][kBoxes][kBlocks][scale_bytes], sums, barriers.
template <int TILES, Epilogue E> struct Slots {
    static constexpr uint32_t kBoxes = E == kGated ? 2 : 1, kInputBytes = kInputBoxes * 8 * TILES * 128;
    uint32_t codes, x, box, code_bytes; // addresses; bytes of a box and of the codes of a slot
    uint32_t scale_vectors, zero_vectors;
    uint32_t scale_bytes; // of a block of 128 columns of a box: scales, then zero points
    uint8_t *scales;
    float *sums; // [warps][32 lanes][4 TILES]
    uint64_t *full, *empty;
    __device__ Slots(uint8_t *shared, const Shape &shape, const Int4Weights &of_w) {
        // Vectors of 16 bytes that hold the rows from any row on.
        scale_vectors = (shape.rows + 14) / 8, zero_vectors = of_w.zeros ? (shape.rows + 30) / 16 : 0;
        scale_bytes = (scale_vectors + zero_vectors) * 16;
        box = (shape.rows + 7) / 8 * 1024, code_bytes = kBoxes * box;
        codes = shared_address(shared), x = codes + shape.slots * code_bytes;
        scales = shared + shape.slots * (code_bytes + kInputBytes);
        sums = reinterpret_cast<float *>(scales + shape.slots * kBoxes * kBlocks * scale_bytes);
        full = reinterpret_cast<uint64_t *>(sums + (shape.parts > 1 ? shape.strips * shape.parts * 32 * 4 * TILES : 0));
        empty = full + shape.slots;
    }
};

// A block's work: rows from `first` to before `end`, if gated those of the gate.
template <Epilogue E> struct Share {
    uint32_t first, end, column, steps;
    __device__ Share(const Shape &shape) {
        uint32_t rows = E == kGated ? shape.n / 2 : shape.n, each = rows / gridDim.x, more = rows % gridDim.x;
        first = each * blockIdx.x + min(blockIdx.x, more);
        end = first + each + (blockIdx.x < more ? 1 : 0);
        column = blockIdx.y * shape.split;
        steps = (min(shape.split, shape.k - column) + kColumns - 1) / kColumns;
    }
};

// One thread fills the slots of all passes.
template <int TILES, Epilogue E>
__device__ void fetch(const TensorMap &x, const TensorMap &w, const Int4Weights &of_w, const Shape &shape,
                      const Share<E> &share, const Slots<TILES, E> &slots) {
    using S = Slots<TILES, E>;
    const uint32_t bytes = S::kBoxes * (shape.rows * 128 + kBlocks * slots.scale_bytes) + kInputBoxes * shape.m * 128;
    auto fetch_codes = [&](const RingCursor &place, uint32_t row, uint32_t column) {
        uint64_t *full = slots.full + place.index;
        arrive_expecting(full, bytes);
#pragma unroll
        for (uint32_t b = 0; b < S::kBoxes; ++b) {
            uint32_t first = row + b * (shape.n / 2);
            copy_box(slots.codes + place.index * slots.code_bytes + b * slots.box, w, column / 4, first, full);
#pragma unroll
            for (uint32_t i = 0; i < kBlocks; ++i) {
                uint32_t block = min(column / kInt4Block + i, of_w.blocks - 1);
                size_t at = size_t(block >> of_w.group_shift) * of_w.rows + first;
                uint8_t *to = slots.scales + ((place.index * S::kBoxes + b) * kBlocks + i) * slots.scale_bytes;
                copy_bulk(to, of_w.values + at / 8 * 8, slots.scale_vectors * 16, full);
                if (of_w.zeros)
                    copy_bulk(to + slots.scale_vectors * 16, of_w.zeros + at / 16 * 16, slots.zero_vectors * 16, full);
            }
        }
    };
    auto fetch_input = [&](const RingCursor &place, uint32_t column) {
#pragma unroll
        for (uint32_t i = 0; i < kInputBoxes; ++i)
            copy_box(slots.x + place.index * S::kInputBytes + i * (8 * TILES * 128), x, column + 64 * i, 0,
                     slots.full + place.index);
    };
    RingCursor place, late; // of codes, and of x
    uint32_t fetched = 0;
    auto catch_up = [&](uint32_t all) { // x of the slots that were filled ahead: all of the first pass
        wait_for_predecessor();
        for (uint32_t i = 0; i < all; ++i) {
            fetch_input(late, share.column + i % share.steps * kColumns);
            late.next(shape.slots);
        }
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass)
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(slots.empty + place.index, place.parity ^ 1);
            fetch_codes(place, share.first + pass * shape.rows, share.column + step * kColumns);
            ++fetched;
            if (fetched == shape.ahead) catch_up(fetched);
            else if (fetched > shape.ahead) fetch_input(place, share.column + step * kColumns);
            place.next(shape.slots);
        }
    if (fetched < shape.ahead) catch_up(fetched);
}

template <int TILES, Epilogue E, typename O>
__device__ void multiply(const Int4Weights &of_w, const Shape &shape, const Share<E> &share,
                         const Slots<TILES, E> &slots, O *out) {
    using S = Slots<TILES, E>;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, strip = warp % shape.strips,
                   part = warp / shape.strips;
    // The lane's two rows of a tile: of the box, and if gated the same of both boxes.
    const uint32_t low_row = strip * (E == kGated ? 8 : 16) + lane / 4, high_row = E == kGated ? low_row : low_row + 8;
    const uint32_t chunk = (lane % 4 ^ low_row % 8) * 16; // of the first block; of the second 64 on or back
    const uint32_t low_at = low_row * 128 + chunk, high_at = high_row * 128 + chunk + (E == kGated ? slots.box : 0);
    const uint32_t x_at = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16; // of the first 32 columns of a box
    RingCursor place{part};
    uint32_t fetched = part; // the part's next slot, counted over all passes
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        const uint32_t row = share.first + pass * shape.rows, second = row + (E == kGated ? shape.n / 2 : 0);
        Accumulator acc[TILES] = {};
        for (; fetched < (pass + 1) * share.steps; fetched += shape.parts) {
            wait(slots.full + place.index, place.parity);
            const uint32_t codes = slots.codes + place.index * slots.code_bytes;
            const uint32_t input = slots.x + place.index * S::kInputBytes + x_at;
            const uint8_t *scales = slots.scales + place.index * (S::kBoxes * kBlocks) * slots.scale_bytes;
            uint4 low[kBlocks], high[kBlocks];
            float low_scale[kBlocks], high_scale[kBlocks];
            uint32_t low_bias[kBlocks], high_bias[kBlocks];
#pragma unroll
            for (uint32_t i = 0; i < kBlocks; ++i) {
                low[i] = load_codes(codes + (low_at ^ 64 * i)), high[i] = load_codes(codes + (high_at ^ 64 * i));
                const uint8_t *of_low = scales + i * slots.scale_bytes;
                const uint8_t *of_high = of_low + (E == kGated ? kBlocks * slots.scale_bytes : 0);
                auto scale = [&](const uint8_t *from, uint32_t first, uint32_t row) {
                    return widen_scale(reinterpret_cast<const uint16_t *>(from)[first % 8 + row], of_w.is_f16);
                };
                auto bias = [&](const uint8_t *from, uint32_t first, uint32_t row) {
                    return int4_bias(of_w.zeros ? from[slots.scale_vectors * 16 + first % 16 + row] : 8);
                };
                low_scale[i] = scale(of_low, row, low_row), high_scale[i] = scale(of_high, second, high_row);
                low_bias[i] = bias(of_low, row, low_row), high_bias[i] = bias(of_high, second, high_row);
            }
            Accumulator sums[kBlocks][TILES] = {};
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j)
#pragma unroll
                for (uint32_t i = 0; i < kBlocks; ++i) { // the blocks take turns: their sums do not wait for each other
                    uint32_t lower = int4_word(low[i], j), upper = int4_word(high[i], j);
                    uint4 b[TILES];
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
                        b[t] = load_matrices((input + ((2 * i + j / 2) * TILES + t) * 1024) ^ j % 2 * 64);
                    uint4 first = make_uint4(int4_pair<0>(lower, low_bias[i]), int4_pair<0>(upper, high_bias[i]),
                                             int4_pair<1>(lower, low_bias[i]), int4_pair<1>(upper, high_bias[i]));
                    uint4 next = make_uint4(int4_pair<2>(lower, low_bias[i]), int4_pair<2>(upper, high_bias[i]),
                                            int4_pair<3>(lower, low_bias[i]), int4_pair<3>(upper, high_bias[i]));
#pragma unroll
                    for (int t = 0; t < TILES; ++t) mma(sums[i][t], first, b[t].x, b[t].y);
#pragma unroll
                    for (int t = 0; t < TILES; ++t) mma(sums[i][t], next, b[t].z, b[t].w);
                }
            __syncwarp(); // all lanes have read the slot
            if (lane == 0) arrive(slots.empty + place.index);
            place.advance(shape.parts, shape.slots);
#pragma unroll
            for (uint32_t i = 0; i < kBlocks; ++i)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    acc[t][0] += sums[i][t][0] * low_scale[i], acc[t][1] += sums[i][t][1] * low_scale[i];
                    acc[t][2] += sums[i][t][2] * high_scale[i], acc[t][3] += sums[i][t][3] * high_scale[i];
                }
        }
        if (shape.parts > 1) {
            auto sync = [&] { asm volatile("bar.sync 1, %0;" ::"r"(shape.strips * shape.parts * 32) : "memory"); };
            float *own = slots.sums + (warp * 32 + lane) * (4 * TILES);
            sync(); // the sums of the pass before are read
#pragma unroll
            for (int i = 0; i < 4 * TILES; ++i) own[i] = acc[i / 4][i % 4];
            sync();
            for (uint32_t p = 1; part == 0 && p < shape.parts; ++p)
#pragma unroll
                for (int i = 0; i < 4 * TILES; ++i) acc[i / 4][i % 4] += own[p * shape.strips * 32 * 4 * TILES + i];
        }
        const uint32_t at = row + strip * (E == kGated ? 8 : 16);
        if (part == 0) write_strip<E == kGated>(acc, shape.m, shape.pitch, at, min(row + shape.rows, share.end), out);
    }
}

// out: [m, n], gated [m, n / 2], or, of O float, one such matrix for each split of the columns.
template <int TILES, Epilogue E, typename O>
__device__ void stream(const TensorMap &x, const TensorMap &w, const Int4Weights &of_w, O *out, const Shape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Share<E> share(shape);
    const Slots<TILES, E> slots(shared, shape, of_w);
    const uint32_t warp = threadIdx.x / 32, fetcher = shape.strips * shape.parts;
    release_successor();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < shape.slots; ++i)
            barrier_init(slots.full + i, 1), barrier_init(slots.empty + i, shape.strips);
        barriers_ready();
    }
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<TILES, E>(of_w, shape, share, slots, out);
    else if (threadIdx.x % 32 == 0) fetch<TILES, E>(x, w, of_w, shape, share, slots);
}
#define BODY(...)                                                                                                      \
    stream<__VA_ARGS__>(x, w,                                                                                          \
                        {reinterpret_cast<const uint16_t *>(scales), zeros ? scales + zeros : nullptr, n,              \
                         k / kInt4Block, group_shift, f16 != 0},                                                       \
                        out, {m, n, k, pitch, split, rows, passes, strips, parts, slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#endif

// Grid: blocks, splits. For up to 8 TILES rows of x; the parameters after f16 are those of `Shape`.
#define STREAM(name, TILES, E, O)                                                                                      \
    extern "C" __global__ __launch_bounds__(32 * (kMmaWarps + 1), 1) void name(                                        \
        const __grid_constant__ TensorMap x, /* [m, k] in boxes of m rows */                                           \
        const __grid_constant__ TensorMap w, /* [n, k / 4] fours of codes in boxes of `rows` rows */                   \
        const uint8_t *scales,               /* [k / group, n] of two bytes, then zero points [k / group, n] */        \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
        uint64_t zeros,                      /* byte of `scales` where zero points begin; 0: they are 8 */             \
        uint32_t group_shift,                /* a group has 2^group_shift blocks of 128 columns */                     \
        uint32_t f16,                        /* scales are f16, not bf16 */                                            \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t rows, uint32_t passes,            \
        uint32_t strips, uint32_t parts, uint32_t slots, uint32_t ahead) {                                             \
        BODY(TILES, E, O);                                                                                             \
    }
#define KERNELS(ROWS, TILES)                                                                                           \
    STREAM(skinny_int4_mma_bf16_##ROWS, TILES, kPlain, bf16)                                                           \
    STREAM(skinny_int4_mma_f32_##ROWS, TILES, kPlain, float)                                                           \
    STREAM(skinny_int4_mma_gated_##ROWS, TILES, kGated, bf16)
KERNELS(8, 1)
KERNELS(16, 2)
KERNELS(32, 4)
