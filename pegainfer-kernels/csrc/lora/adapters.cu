// Low-rank adapters: each row of a step may add the output of two thin GEMMs to that of a projection.
//
//   lora_shrink: sums[split, i] = x[i] a[slot of i]^T     over the columns of the split
//   lora_expand: out[i, c] += sum of t[j] b[slot of i, c, j] over the ranks j of c's segment; t: the splits, added in
//   order
//
// x: [rows, k] bf16; a: [slots, segments * rank, k] bf16; sums: [splits, rows, segments * rank] f32; b: [slots, width,
// rank] bf16; slots: [rows], the number of no slot for a row without adapter; out: [rows, width] bf16, the output of
// the GEMM with the base weight, rounded once more. rank and k are multiples of 8. All GPUs.
//
// Technique: a block has the rows of one adapter among 128 neighbours, which it lists by ballots: no sorting, no lists
// in memory, and the adapters of a step may change while a CUDA graph stays. mma.sync with weights straight from memory
// to registers, the first of them before the kernel waits (programmatic dependent launch). Shrinking cuts k into splits
// by k alone, so that few rows occupy many multiprocessors and the bits of a row depend on no other; expanding adds the
// splits, which needs neither atomics nor a launch of its own. t enters the tensor cores as the sum of two bf16, exact
// to 16 bits. Limit: latency at few rows, then the memory that reads and writes out. Reference: src/cpu/lora.rs.
#include "common/async.cuh"
#include "common/vec8.cuh"
#include "limits.h"
#include "abi/lora_adapters.h"

using namespace limits::lora;

static_assert(kShrinkRows == 16, "rows of operand A of mma.m16n8k16");

constexpr uint32_t kWarpRows = kRows / 32; // warps that list rows

// Rows of a tile that use the adapter of one slot, in order.
struct Members {
    uint32_t counts[kWarpRows];
    uint32_t rows[kRows];

    // All threads of a block of at least kRows threads. Returns the number of rows.
    __device__ __forceinline__ uint32_t list(const uint32_t *slots, uint32_t first, uint32_t end, uint32_t slot) {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = first + threadIdx.x;
        const bool is_member = threadIdx.x < kRows && row < end && slots[row] == slot;
        const uint32_t members = __ballot_sync(0xffffffffu, is_member);
        if (warp < kWarpRows && lane == 0) counts[warp] = __popc(members);
        __syncthreads();
        uint32_t before = 0, all = 0;
#pragma unroll
        for (uint32_t i = 0; i < kWarpRows; ++i) {
            if (i < warp) before += counts[i];
            all += counts[i];
        }
        if (is_member) rows[before + __popc(members & ((1u << lane) - 1))] = row;
        __syncthreads();
        return all;
    }
};

// The end of a block without rows. One block waits all the same, so that this kernel ends after those before it.
__device__ __forceinline__ void leave() {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_predecessor();
}

constexpr uint32_t kSteps = kUnit / 32; // instructions' columns of a unit
constexpr uint32_t kTokens = 8;         // rows of x of an instruction
constexpr uint32_t kTiles = 4;          // such tiles that a warp has at once
constexpr uint32_t kShrinkWarps = kShrinkThreads / 32;

// 16 rows of a by kUnit columns: the vectors of a lane's two rows.
struct Weights {
    uint4 low[kSteps], high[kSteps];

    static __device__ __forceinline__ uint32_t column(uint32_t first, uint32_t step) {
        return first + step * 32 + threadIdx.x % 4 * kVector;
    }

    // Columns `first` to `end` of rows `row` and row + 8 of `rows`.
    __device__ __forceinline__ void load(const bf16 *a, uint32_t row, uint32_t rows, uint32_t k, uint32_t first,
                                         uint32_t end) {
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s) {
            const uint32_t at = column(first, s);
            const bool is_there = at < end;
            low[s] = is_there && row < rows ? load16(a + size_t(row) * k + at) : make_uint4(0, 0, 0, 0);
            high[s] = is_there && row + 8 < rows ? load16(a + size_t(row + 8) * k + at) : make_uint4(0, 0, 0, 0);
        }
    }
};

// Grid: tiles of 16 rows of a, splits, tiles of kRows rows times slots. kShrinkThreads threads.
extern "C" __global__ __launch_bounds__(kShrinkThreads) void lora_shrink(
    const bf16 *x,                                                       // [rows, k]
    const bf16 *a,                                                       // [slots, n, k]
    const uint32_t *slots,                                               // [rows]
    float *sums,                                                         // [splits, end - begin, n]
    uint32_t begin, uint32_t end,                                        // rows of this launch
    uint32_t k, uint32_t n, uint32_t adapters, uint32_t split_columns) { // a multiple of kUnit
    release_successor();
    __shared__ Members members;
    __shared__ float parts[kShrinkWarps][kTiles][16][kTokens];
    const uint32_t slot = blockIdx.z % adapters, first_row = begin + blockIdx.z / adapters * kRows;
    // The host uploaded the slots before the step.
    const uint32_t count = members.list(slots, first_row, min(first_row + kRows, end), slot);
    if (count == 0) return leave();

    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4;
    const uint32_t split = blockIdx.y * split_columns, last = min(split + split_columns, k);
    const uint32_t row = blockIdx.x * 16 + group, first = split + warp * kUnit;
    const bf16 *own = a + size_t(slot) * n * k;
    Weights weights;
    weights.load(own, row, n, k, first, last);
    wait_for_predecessor();
    x = written(x);
    for (uint32_t pass = 0; pass < count; pass += kTiles * kTokens) {
        Accumulator totals[kTiles] = {};
        for (uint32_t unit = first; unit == first || unit < last; unit += kShrinkWarps * kUnit) {
            // Splits of one unit a warp keep their weights.
            if (unit != first || (pass > 0 && split_columns > kShrinkWarps * kUnit))
                weights.load(own, row, n, k, unit, last);
#pragma unroll
            for (uint32_t tile = 0; tile < kTiles; ++tile) {
                const uint32_t at = pass + tile * kTokens + group;
                if (pass + tile * kTokens >= count) break;
                const bf16 *from = at < count ? x + size_t(members.rows[at]) * k : nullptr;
#pragma unroll
                for (uint32_t s = 0; s < kSteps; ++s) {
                    const uint32_t column = Weights::column(unit, s);
                    const uint4 token = from && column < last ? load16(from + column) : make_uint4(0, 0, 0, 0);
                    mma32(totals[tile], weights.low[s], weights.high[s], token);
                }
            }
        }
#pragma unroll
        for (uint32_t tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                parts[warp][tile][Accumulator::row(lane, i)][Accumulator::column(lane, i)] = totals[tile][i];
        __syncthreads();
        // Neighbouring threads have neighbouring rows of a.
        for (uint32_t i = threadIdx.x; i < kTiles * kTokens * 16; i += kShrinkThreads) {
            const uint32_t token = i / 16, at = pass + token, column = blockIdx.x * 16 + i % 16;
            if (at >= count || column >= n) continue;
            float sum = 0.f;
#pragma unroll
            for (uint32_t w = 0; w < kShrinkWarps; ++w) sum += parts[w][token / kTokens][i % 16][token % kTokens];
            sums[(size_t(blockIdx.y) * (end - begin) + members.rows[at] - begin) * n + column] = sum;
        }
        __syncthreads();
    }
}

constexpr uint32_t kWarpColumns = 32;
constexpr uint32_t kColumnTiles = kWarpColumns / 8;
static_assert(kExpandThreads / 32 * kWarpColumns == kColumns);

// b of a warp's 32 columns and 16 ranks: a lane has four neighbouring ranks, 4 quad on, of one column of each tile. The
// columns of a tile are so spread that a lane's sums of all tiles are of eight neighbours.
struct Factors {
    uint2 b[kColumnTiles];

    // Zeros for columns outside `begin` to `end` and for ranks that there are none of.
    __device__ __forceinline__ void load(const bf16 *from, uint32_t first, uint32_t begin, uint32_t end, uint32_t rank,
                                         uint32_t chunk) {
        const uint32_t group = threadIdx.x % 32 / 4, at = chunk * 16 + threadIdx.x % 4 * 4;
#pragma unroll
        for (uint32_t tile = 0; tile < kColumnTiles; ++tile) {
            const uint32_t column = first + group / 2 * 8 + tile * 2 + group % 2;
            const bool is_there = at < rank && column >= begin && column < end;
            b[tile] = is_there ? *reinterpret_cast<const uint2 *>(from + size_t(column) * rank + at) : make_uint2(0, 0);
        }
    }
};

// t of four neighbouring ranks of a row, as the sum of two bf16 each.
struct Split4 {
    uint2 high, low;

    __device__ __forceinline__ void set(float4 t) {
        high = make_uint2(narrow(t.x, t.y), narrow(t.z, t.w));
        const float2 xy = widen(high.x), zw = widen(high.y);
        low = make_uint2(narrow(t.x - xy.x, t.y - xy.y), narrow(t.z - zw.x, t.w - zw.y));
    }
};

// The sums of a row's splits, from column `at` of n; zeros for a row that there is none of.
__device__ __forceinline__ float4 added(const float *sums, uint32_t splits, uint32_t rows, uint32_t n, uint32_t row,
                                        uint32_t at, bool is_there) {
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!is_there) return total;
#pragma unroll 4
    for (uint32_t split = 0; split < splits; ++split) {
        const float4 part = *reinterpret_cast<const float4 *>(sums + (size_t(split) * rows + row) * n + at);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
}

// Grid: tiles of kColumns columns, tiles of kRows rows times slots. kExpandThreads threads.
extern "C" __global__ __launch_bounds__(kExpandThreads) void lora_expand(
    const float *sums,                    // [splits, end_row - begin_row, segments * rank]
    const bf16 *b,                        // [slots, width, rank]
    const uint32_t *slots,                // [rows]
    bf16 *out,                            // [rows, width]
    uint32_t begin_row, uint32_t end_row, // rows of this launch
    uint32_t width, uint32_t rank, uint32_t adapters, uint32_t splits, uint32_t segments, uint32_t end0, uint32_t end1,
    uint32_t end2, uint32_t end3) { // columns at which the segments end
    release_successor();
    __shared__ Members members;
    const uint32_t slot = blockIdx.y % adapters, first_row = begin_row + blockIdx.y / adapters * kRows;
    const uint32_t count = members.list(slots, first_row, min(first_row + kRows, end_row), slot);
    if (count == 0) return leave();

    const uint32_t ends[kMaxSegments] = {end0, end1, end2, end3}, n = segments * rank, chunks = (rank + 15) / 16;
    const uint32_t rows = end_row - begin_row;
    const uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const uint32_t first = blockIdx.x * kColumns + threadIdx.x / 32 * kWarpColumns;
    b += size_t(slot) * width * rank;
    bool waits = true;
    for (uint32_t segment = 0, begin = 0; segment < segments; begin = ends[segment++]) {
        const uint32_t end = ends[segment];
        if (end <= first || begin >= first + kWarpColumns) continue;
        Factors factors;
        factors.load(b, first, begin, end, rank, 0);
        if (waits) wait_for_predecessor();
        waits = false;
        const float *t = written(sums) + segment * rank + quad * 4;
        for (uint32_t tile = 0; tile < count; tile += 16) {
            const bool has_low = tile + group < count, has_high = tile + group + 8 < count;
            const uint32_t low = has_low ? members.rows[tile + group] : 0;
            const uint32_t high = has_high ? members.rows[tile + group + 8] : 0;
            const uint32_t column = first + quad * kVector;
            // Columns of other segments get nothing here.
            const bool is_own = column < end && column + kVector > begin;
            bf16 *at[2] = {out + size_t(low) * width + column, out + size_t(high) * width + column};
            const bool stores[2] = {is_own && has_low, is_own && has_high};
            uint4 base[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (stores[half]) base[half] = load16(at[half]);
            Accumulator totals[kColumnTiles] = {};
            for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
                if (chunks > 1) factors.load(b, first, begin, end, rank, chunk);
                const bool has_rank = chunk * 16 + quad * 4 < rank;
                Split4 upper, lower;
                upper.set(added(t, splits, rows, n, low - begin_row, chunk * 16, has_low && has_rank));
                lower.set(added(t, splits, rows, n, high - begin_row, chunk * 16, has_high && has_rank));
#pragma unroll
                for (uint32_t j = 0; j < kColumnTiles; ++j) {
                    const uint2 column = factors.b[j];
                    mma(totals[j], make_uint4(upper.low.x, lower.low.x, upper.low.y, lower.low.y), column.x, column.y);
                    mma(totals[j], make_uint4(upper.high.x, lower.high.x, upper.high.y, lower.high.y), column.x,
                        column.y);
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!stores[half]) continue;
                Vec8 values = widen8(base[half]);
#pragma unroll
                for (uint32_t j = 0; j < kColumnTiles; ++j)
                    values.x[2 * j] += totals[j][2 * half], values.x[2 * j + 1] += totals[j][2 * half + 1];
                *reinterpret_cast<uint4 *>(at[half]) = narrow8(values);
            }
        }
    }
}
