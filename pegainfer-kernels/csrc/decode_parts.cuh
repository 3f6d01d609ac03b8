// How blocks of threads share decode attention: which row, KV head and part of the context a block takes, and how the
// parts come together.
#pragma once
#include "decode_tiles.cuh"

// Where blocks that share a pair leave their parts.
struct Workspace {
    float *parts;      // [kv_heads, gridDim.x, 8 N, D + 4]
    uint32_t *arrived; // [kv_heads, gridDim.x], zero between launches
};

#if __CUDA_ARCH__ >= 900
template <int D, int N, int S> struct Shared {
    alignas(128) Stage<D> kv[kWarps][S];
    bf16 q[8 * N * D];
    bf16 fresh[2][D];                  // fused: key and value of the new token
    uint32_t arrived;
    uint64_t barriers[kWarps][S];
};

// What a block works on.
struct Pair {
    uint32_t row, kv_head, kv_heads, group, token0, tokens, kv_len, columns;
    uint32_t part, parts; // of the row's KV blocks, in equal parts

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

// Finds the row and part of the block's item: each row has one part, and those that the grid has beyond the number of
// rows go to the rows by their share of all blocks, as long as every warp gets one. Parts are 0 if there is no item.
__device__ Pair find_pair(const Batch &batch, const Place &place, uint32_t group, uint32_t most) {
    uint32_t lane = threadIdx.x % 32, item = place.item, spare = place.items - batch.rows, total = 0;
    Pair pair = {0, place.kv_head, place.kv_heads, group};
#pragma unroll 4
    for (uint32_t first = 0; first < batch.rows; first += 32) total += row_blocks(batch, first + lane, group, most);
    total = __reduce_add_sync(kAll, total);
    for (uint32_t first = 0; first < batch.rows; first += 32) {
        uint32_t blocks = row_blocks(batch, first + lane, group, most);
        uint32_t parts = blocks ? min(1 + blocks * spare / total, (blocks + kWarps - 1) / kWarps) : 0;
        uint32_t sum = __reduce_add_sync(kAll, parts);
        if (item >= sum) {
            item -= sum;
            continue;
        }
        uint32_t end = inclusive_scan(parts);
        uint32_t source = __ffs(__ballot_sync(kAll, end > item)) - 1;
        pair.row = first + source;
        pair.parts = __shfl_sync(kAll, parts, source);
        pair.part = item + pair.parts - __shfl_sync(kAll, end, source);
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

// Element of the first of dimensions 8 piece ... of a column of the matrix of queries, swizzled as the cache is.
template <int N> __device__ __forceinline__ uint32_t query_vector(uint32_t column, uint32_t piece) {
    return ((piece / 8 * 8 * N + column) * 8 + (piece % 8 ^ column % 8)) * 8;
}

// Writes a warp's part to shared memory: of each column D numerators, the maximum and the sum.
template <int D, int N> __device__ void store_part(Part<D, N> &part, float *to, uint32_t columns) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = reduce_column(part.sum[t][j], Add());
            uint32_t column = 8 * t + Accumulator::column(lane, j);
            if (column >= columns) continue;
            float *row = to + column * (D + 4);
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                row[16 * m + Accumulator::row(lane, 0)] = part.o[t][m][j];
                row[16 * m + Accumulator::row(lane, 2)] = part.o[t][m][j + 2];
            }
            if (lane < 4) *reinterpret_cast<float2 *>(row + D) = make_float2(part.max[t][j], sum);
        }
    }
}

// Adds parts of a softmax: maxima and sums at `stats`, numerators of P pieces of 4 dimensions from `from` on, `apart`
// elements apart, all `stride` further for each part. Loads go out in groups, to wait for memory once a group.
template <uint32_t kGroup, int P>
__device__ __forceinline__ float2 add_parts(float4 (&o)[P], const float *stats, uint32_t stats_stride,
                                            const float *from, uint32_t apart, uint32_t stride, uint32_t parts) {
    float2 total = make_float2(-INFINITY, 0.f);
#pragma unroll
    for (int p = 0; p < P; ++p) o[p] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (uint32_t first = 0; first < parts; first += kGroup) {
        float2 part[kGroup];
        float4 x[kGroup][P];
        float top = total.x;
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) {
            uint32_t i = min(first + j, parts - 1);
            part[j] = *reinterpret_cast<const float2 *>(stats + i * stats_stride);
#pragma unroll
            for (int p = 0; p < P; ++p) x[j][p] = *reinterpret_cast<const float4 *>(from + i * stride + p * apart);
            if (first + j >= parts) part[j].x = -INFINITY;
        }
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) top = fmaxf(top, part[j].x);
        float zero = top == -INFINITY ? 0.f : top, shrink = exp2_approx(total.x - zero);
        total = make_float2(top, total.y * shrink);
#pragma unroll
        for (int p = 0; p < P; ++p) o[p].x *= shrink, o[p].y *= shrink, o[p].z *= shrink, o[p].w *= shrink;
#pragma unroll
        for (uint32_t j = 0; j < kGroup; ++j) {
            float weight = exp2_approx(part[j].x - zero);
            total.y += weight * part[j].y;
#pragma unroll
            for (int p = 0; p < P; ++p) {
                o[p].x += weight * x[j][p].x, o[p].y += weight * x[j][p].y;
                o[p].z += weight * x[j][p].z, o[p].w += weight * x[j][p].w;
            }
        }
    }
    return total;
}

// Four elements of the output, for which the source has gates number p.
template <typename Gates>
__device__ __forceinline__ void store_output(bf16 *to, float4 o, float sum, const Gates &gates, int p) {
    float inverse = __fdividef(1.f, sum);
    *reinterpret_cast<uint2 *>(to) =
        gates.apply(p, make_uint2(narrow(o.x * inverse, o.y * inverse), narrow(o.z * inverse, o.w * inverse)));
}

// Adds the parts of the block's warps; if the pair is shared, its last block to come here adds those of all. Pieces are
// 4 dimensions; a thread has as many of them as keep the loads of few threads together. `first`: item of the first part.
template <int D, int N, int S, typename Source>
__device__ void finish(Shared<D, N, S> &shared, const Source &source, const Pair &pair, uint32_t first,
                       const Workspace &workspace, bf16 *out) {
    constexpr uint32_t kStride = sizeof(shared.kv[0]) / sizeof(float);
    constexpr int kEach = D > 32 * kWarps ? D / (32 * kWarps) : 1;
    constexpr uint32_t kPieces = D / 4 / kEach, kApart = D / kEach; // pieces of a column for different threads
    static_assert(8 * N * (D + 4) <= kStride, "a warp's part fits its ring");
    const float *warps = reinterpret_cast<const float *>(shared.kv);
    size_t index = size_t(pair.kv_head) * gridDim.x + first; // items of a pair are neighbours
    uint32_t *arrived = workspace.arrived + index;
    const uint32_t size = 8 * N * (D + 4);
    float *parts = workspace.parts + index * size;
    float4 o[kEach];
    for (uint32_t i = threadIdx.x; i < pair.columns * kPieces; i += 32 * kWarps) {
        uint32_t column = i / kPieces, d = i % kPieces * 4;
        const float *from = warps + column * (D + 4);
        if (pair.parts == 1) {
            auto gates = source.template gates<D, kEach>(pair, column, d);
            float2 total = add_parts<kWarps>(o, from + D, kStride, from + d, kApart, kStride, kWarps);
#pragma unroll
            for (int p = 0; p < kEach; ++p)
                store_output(out + pair.head(column) * D + d + p * kApart, o[p], total.y, gates, p);
            continue;
        }
        float2 total = add_parts<kWarps>(o, from + D, kStride, from + d, kApart, kStride, kWarps);
        float *to = parts + pair.part * size + column * (D + 4);
#pragma unroll
        for (int p = 0; p < kEach; ++p) *reinterpret_cast<float4 *>(to + d + p * kApart) = o[p];
        if (d == 0) *reinterpret_cast<float2 *>(to + D) = total;
    }
    if (pair.parts == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) shared.arrived = add_acq_rel(arrived, 1);
    __syncthreads();
    if (shared.arrived != pair.parts - 1) return;
    if (threadIdx.x == 0) *arrived = 0; // for the next launch
    for (uint32_t i = threadIdx.x; i < pair.columns * kPieces; i += 32 * kWarps) {
        uint32_t column = i / kPieces, d = i % kPieces * 4;
        const float *from = parts + column * (D + 4);
        auto gates = source.template gates<D, kEach>(pair, column, d);
        constexpr uint32_t kGroup = kEach == 1 ? 16 : 12;
        float2 total = add_parts<kGroup>(o, from + D, size, from + d, kApart, size, pair.parts);
#pragma unroll
        for (int p = 0; p < kEach; ++p)
            store_output(out + pair.head(column) * D + d + p * kApart, o[p], total.y, gates, p);
    }
}
#endif
