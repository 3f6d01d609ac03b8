// How blocks of threads share decode attention (FlashDecoding split-KV): which sequence, KV head and split of the
// context a block takes, and how the partial softmaxes of the splits are merged.
#pragma once
#include "common/activation.cuh"
#include "attention/decode_tiles.cuh"
#include "limits.h"

using namespace limits::attention;

// Where blocks that share a pair leave their partial softmaxes.
struct Workspace {
    float *partials;   // [kv_heads, gridDim.x, 8 N, D + 4]
    uint32_t *arrived; // [kv_heads, gridDim.x], base between launches
};

#if __CUDA_ARCH__ >= 900
template <int D, int N, int S, typename T> struct DecodeShared {
    alignas(128) Stage<D, T> kv[kDecodeWarps][S];
    bf16 q[8 * N * D];
    bf16 fresh[2][D]; // fused: key and value of the new token
    uint32_t arrived;
    uint64_t barriers[kDecodeWarps][S];
};

// What a block works on.
struct Pair {
    uint32_t row, kv_head, kv_heads, group, token0, tokens, kv_len, columns;
    uint32_t split, splits; // of the row's KV blocks, in equal shares; 0 splits: nothing to do

    __device__ uint32_t token(uint32_t column) const { return tokens == 1 ? 0 : column / group; }
    // Head of the matrix column among all heads of all tokens.
    __device__ size_t head(uint32_t column) const {
        uint32_t t = token(column);
        return (size_t(token0 + t) * kv_heads + kv_head) * group + column - t * group;
    }
};

// KV blocks of a row, none if it is not for this kernel.
__device__ __forceinline__ uint32_t row_blocks(const Batch &batch, uint32_t row, uint32_t group, uint32_t most) {
    uint32_t i = min(row, batch.rows - 1), len = batch.kv_lens[i]; // not after a branch: the loads go out together
    uint32_t columns = (batch.qo_indptr[i + 1] - batch.qo_indptr[i]) * group;
    return row >= batch.rows || columns == 0 || columns > most ? 0 : (len + kBlock - 1) / kBlock;
}

// A block of threads among all that attend for a KV head.
struct Place {
    uint32_t item, items, kv_head, kv_heads;
};

// Finds the row and split of the block's item: each row has one split, and those that the grid has beyond the number of
// rows go to the rows by their share of all KV blocks, as long as every warp gets one. Splits are 0 if there is no
// item.
template <uint32_t Warps>
__device__ Pair find_pair(const Batch &batch, const Place &place, uint32_t group, uint32_t most) {
    uint32_t lane = threadIdx.x % 32, item = place.item, spare = place.items - batch.rows, total = 0;
    Pair pair = {0, place.kv_head, place.kv_heads, group};
#pragma unroll 4
    for (uint32_t first = 0; first < batch.rows; first += 32) total += row_blocks(batch, first + lane, group, most);
    total = __reduce_add_sync(kAll, total);
    for (uint32_t first = 0; first < batch.rows; first += 32) {
        uint32_t blocks = row_blocks(batch, first + lane, group, most);
        uint32_t splits = blocks ? min(1 + blocks * spare / total, (blocks + Warps - 1) / Warps) : 0;
        uint32_t sum = __reduce_add_sync(kAll, splits);
        if (item >= sum) {
            item -= sum;
            continue;
        }
        uint32_t end = inclusive_scan(splits);
        uint32_t source = __ffs(__ballot_sync(kAll, end > item)) - 1;
        pair.row = first + source;
        pair.splits = __shfl_sync(kAll, splits, source);
        pair.split = item + pair.splits - __shfl_sync(kAll, end, source);
        pair.token0 = batch.qo_indptr[pair.row];
        pair.tokens = batch.qo_indptr[pair.row + 1] - pair.token0;
        pair.kv_len = batch.kv_lens[pair.row];
        pair.columns = pair.tokens * group;
        break;
    }
    return pair;
}

// Adds to a counter; what the block wrote before is visible to whoever sees the sum, and the other way round.
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t *counter, uint32_t x) {
    uint32_t out;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(out) : "l"(counter), "r"(x) : "memory");
    return out;
}

// Writes a warp's partial softmax to shared memory: of each column D numerators, the maximum and the sum.
template <int D, int N, typename T = bf16>
__device__ void store_partial(Partial<D, N> &partial, float *to, uint32_t columns) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = reduce_column(partial.sum[t][j], Add());
            uint32_t column = 8 * t + Accumulator::column(lane, j);
            if (column >= columns) continue;
            float *row = to + column * (D + 4);
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                row[output_dimension<T>(m, 0)] = partial.o[t][m][j];
                row[output_dimension<T>(m, 2)] = partial.o[t][m][j + 2];
            }
            if (lane < 4) *reinterpret_cast<float2 *>(row + D) = make_float2(partial.max[t][j], sum);
        }
    }
}

// Merges partial softmaxes: maxima and sums at `stats`, numerators of P vectors of 4 dimensions from `from` on,
// `spacing` elements apart, all `stride` further for each partial. Loads go out in groups, to wait for memory once a
// group.
template <uint32_t kGroup, int P>
__device__ __forceinline__ float2 merge_partials(float4 (&o)[P], const float *stats, uint32_t stats_stride,
                                                 const float *from, uint32_t spacing, uint32_t stride,
                                                 uint32_t partials) {
    float2 total = make_float2(-INFINITY, 0.f);
#pragma unroll
    for (int p = 0; p < P; ++p) o[p] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (uint32_t first = 0; first < partials; first += kGroup) {
        float2 partial[kGroup];
        float4 x[kGroup][P];
        float new_max = total.x;
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) {
            uint32_t i = min(first + j, partials - 1);
            partial[j] = *reinterpret_cast<const float2 *>(stats + i * stats_stride);
#pragma unroll
            for (int p = 0; p < P; ++p) x[j][p] = *reinterpret_cast<const float4 *>(from + i * stride + p * spacing);
            if (first + j >= partials) partial[j].x = -INFINITY;
        }
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) new_max = fmaxf(new_max, partial[j].x);
        float base = new_max == -INFINITY ? 0.f : new_max, rescale = exp2_approx(total.x - base);
        total = make_float2(new_max, total.y * rescale);
#pragma unroll
        for (int p = 0; p < P; ++p) o[p].x *= rescale, o[p].y *= rescale, o[p].z *= rescale, o[p].w *= rescale;
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) {
            float weight = exp2_approx(partial[j].x - base);
            total.y += weight * partial[j].y;
#pragma unroll
            for (int p = 0; p < P; ++p) {
                o[p].x += weight * x[j][p].x, o[p].y += weight * x[j][p].y;
                o[p].z += weight * x[j][p].z, o[p].w += weight * x[j][p].w;
            }
        }
    }
    return total;
}

// Four elements of the output, the first of them element `at` of all, for which the source has gates number p. A warp
// has 128 neighbouring ones if heads are that large; only then they are rounded.
template <int D, typename Gates>
__device__ __forceinline__ void store_output(const ActivationOut &out, size_t at, float4 o, float sum,
                                             const Gates &gates, int p) {
    float inverse = __fdividef(1.f, sum);
    uint2 four = gates.apply(p, make_uint2(narrow(o.x * inverse, o.y * inverse), narrow(o.z * inverse, o.w * inverse)));
    if (D < 128 || !out.rounds()) *reinterpret_cast<uint2 *>(out.values(0, 0) + at) = four;
    else out.store4(at / out.k, at % out.k, four);
}

// Merges the partials of the block's warps; if the pair is split, its last block to arrive merges those of all. Vectors
// are 4 dimensions; a thread has as many of them as keep the loads of few threads together. `first`: item of the first
// partial.
template <int D, int N, int S, typename T, typename Source>
__device__ void finish(DecodeShared<D, N, S, T> &shared, const Source &source, const Pair &pair, uint32_t first,
                       const Workspace &workspace, const ActivationOut &out) {
    constexpr uint32_t kStride = sizeof(shared.kv[0]) / sizeof(float);
    constexpr int kEach = D > 32 * kDecodeWarps ? D / (32 * kDecodeWarps) : 1;
    constexpr uint32_t kVectors = D / 4 / kEach, kSpacing = D / kEach; // vectors of a column for different threads
    static_assert(8 * N * (D + 4) <= kStride, "a warp's partial fits its ring");
    const float *warps = reinterpret_cast<const float *>(shared.kv);
    size_t index = size_t(pair.kv_head) * gridDim.x + first; // items of a pair are neighbours
    uint32_t *arrived = workspace.arrived + index;
    const uint32_t size = 8 * N * (D + 4);
    float *partials = workspace.partials + index * size;
    float4 o[kEach];
    for (uint32_t i = threadIdx.x; i < pair.columns * kVectors; i += 32 * kDecodeWarps) {
        uint32_t column = i / kVectors, d = i % kVectors * 4;
        const float *from = warps + column * (D + 4);
        if (pair.splits == 1) {
            auto gates = source.template gates<D, kEach>(pair, column, d);
            float2 total =
                merge_partials<kDecodeWarps>(o, from + D, kStride, from + d, kSpacing, kStride, kDecodeWarps);
#pragma unroll
            for (int p = 0; p < kEach; ++p)
                store_output<D>(out, pair.head(column) * D + d + p * kSpacing, o[p], total.y, gates, p);
            continue;
        }
        float2 total = merge_partials<kDecodeWarps>(o, from + D, kStride, from + d, kSpacing, kStride, kDecodeWarps);
        float *to = partials + pair.split * size + column * (D + 4);
#pragma unroll
        for (int p = 0; p < kEach; ++p) *reinterpret_cast<float4 *>(to + d + p * kSpacing) = o[p];
        if (d == 0) *reinterpret_cast<float2 *>(to + D) = total;
    }
    if (pair.splits == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) shared.arrived = add_acq_rel(arrived, 1);
    __syncthreads();
    if (shared.arrived != pair.splits - 1) return;
    if (threadIdx.x == 0) *arrived = 0; // for the next launch
    for (uint32_t i = threadIdx.x; i < pair.columns * kVectors; i += 32 * kDecodeWarps) {
        uint32_t column = i / kVectors, d = i % kVectors * 4;
        const float *from = partials + column * (D + 4);
        auto gates = source.template gates<D, kEach>(pair, column, d);
        constexpr uint32_t kGroup = kEach == 1 ? 16 : 12;
        float2 total = merge_partials<kGroup>(o, from + D, size, from + d, kSpacing, size, pair.splits);
#pragma unroll
        for (int p = 0; p < kEach; ++p)
            store_output<D>(out, pair.head(column) * D + d + p * kSpacing, o[p], total.y, gates, p);
    }
}
#endif
