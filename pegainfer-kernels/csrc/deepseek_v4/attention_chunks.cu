// DeepSeek-V4's sparse attention where tokens are few (formula and order of sums: deepseek_v4/attention.cu):
//
//   sparse_attention_chunks: a block for each chunk of 64 keys and 16 heads (FlashDecoding: split-KV); keys go from
//                          memory to registers, where movmatrix transposes them for the second GEMM
//   sparse_attention_merge:  merges its partial results and rotates them back by the token's position, packs them for
//                          the next GEMM (pack_split_rows of deepseek_v4/skinny.cu), and puts the keys of the step's
//                          tokens into the rings
//
// All GPUs. Bound by the latency of loads. Reference: src/cpu/deepseek_v4/{attention,rope,batch}.rs.
#include "deepseek_v4/attention.cuh"
#include "abi/deepseek_v4_attention_chunks.h"

struct MmaShared {
    const bf16 *keys[kChunk];
    float4 scores[2][kMostWarps][2][32]; // of two iterations in turn: each warp's part of two tiles of 8 keys
};

// 16 keys' vectors of a lane: the dimensions 32 c + 8 quad on of keys `group` and `group` + 8.
struct Keys {
    uint4 x[2][kSteps];
};

__device__ __forceinline__ Keys load_keys(const bf16 *const *keys, uint32_t first_dim, uint32_t steps) {
    uint32_t lane = threadIdx.x % 32;
    Keys out;
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
        const bf16 *key = keys[8 * n + lane / 4];
#pragma unroll
        for (uint32_t c = 0; c < kSteps; ++c)
            out.x[n][c] = key && c < steps ? load16(key + first_dim + 32 * c + 8 * (lane % 4)) : make_uint4(0, 0, 0, 0);
    }
    return out;
}

// The scores of 16 keys, all warps' parts added up.
__device__ __forceinline__ void score_tile(const Queries &q, const Keys &keys, float4 (&parts)[kMostWarps][2][32],
                                           Accumulator (&s)[2]) {
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
        Accumulator part = {};
#pragma unroll
        for (uint32_t c = 0; c < kSteps; ++c) mma32(part, q.low[c], q.high[c], keys.x[n][c]);
        parts[warp][n][lane] = make_float4(part[0], part[1], part[2], part[3]);
    }
    __syncthreads();
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
        float4 sum = parts[0][n][lane];
        for (uint32_t w = 1; w < warps; ++w) {
            float4 part = parts[w][n][lane];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        s[n] = {sum.x, sum.y, sum.z, sum.w};
    }
}

// Adds 16 keys to a softmax and its numerators.
__device__ __forceinline__ void add_tile(Accumulator (&s)[2], const Keys &keys, const bool (&present)[2][2],
                                         float scale, Softmax (&rows)[2], Accumulator (&o)[kAccumulators]) {
    float rescale[2];
    weigh_tile(s, present, scale, rows, rescale);
    rescale_rows(o, rescale);
    uint4 p = operand_a(s[0], s[1]);
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i) {
        const uint32_t *low = reinterpret_cast<const uint32_t *>(&keys.x[0][i / 4]);
        const uint32_t *high = reinterpret_cast<const uint32_t *>(&keys.x[1][i / 4]);
        mma(o[i], p, transposed(low[i % 4]), transposed(high[i % 4]));
    }
}

// Dimension, among the warp's, of the first of the two columns that a lane has in accumulator `i` of the output.
__device__ __forceinline__ uint32_t dimension(uint32_t i) { return i / 4 * 32 + threadIdx.x % 4 * 8 + i % 4 * 2; }

// The softmax of one chunk of the list, of two rows of heads.
__device__ __forceinline__ void attend_chunk(const Queries &q, MmaShared &shared, uint32_t keys, uint32_t first_dim,
                                             uint32_t steps, float scale, Softmax (&rows)[2],
                                             Accumulator (&o)[kAccumulators]) {
    uint32_t quad = threadIdx.x % 4;
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i) o[i] = {};
    Keys next = load_keys(shared.keys, first_dim, steps);
    for (uint32_t first = 0; first < keys; first += kTile) {
        Keys tile = next;
        bool present[2][2];
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) present[n][j] = shared.keys[first + 8 * n + 2 * quad + j] != nullptr;
        if (first + kTile < keys) next = load_keys(shared.keys + first + kTile, first_dim, steps);
        Accumulator s[2];
        score_tile(q, tile, shared.scores[first / kTile % 2], s);
        add_tile(s, tile, present, scale, rows, o);
    }
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) rows[r].sum = reduce_quad(rows[r].sum, Add());
}

// Where the partial results of a chunk begin: its numerators [heads, dim], and its softmaxes [heads] behind those of
// all. `chunks`: of a token, at most.
struct Partials {
    float *numerators;
    Softmax *softmaxes;

    __device__ __forceinline__ Partials(float *all, uint32_t tokens, uint32_t chunks, uint32_t chunk, uint32_t heads,
                                        uint32_t dim) {
        size_t at = (size_t(blockIdx.x) * chunks + chunk) * heads;
        numerators = all + at * dim;
        softmaxes = reinterpret_cast<Softmax *>(all + size_t(tokens) * chunks * heads * dim) + at;
    }
};

// Grid: tokens, groups of 16 heads, chunks; a warp each 128 dimensions.
extern "C" __global__ __launch_bounds__(
    32 * kMaxDim / kWarpDim,
    2) void sparse_attention_chunks(const bf16 *q, // [tokens, heads, dim]
                                    LISTS_POINTERS(bf16), RAGGED_BATCH_POINTERS,
                                    float *partials, // see Partials
                                    LISTS_NUMBERS, uint32_t heads, uint32_t dim, float scale) {
    release_successor();
    __shared__ MmaShared shared;
    Lists<bf16> lists = LISTS(bf16, dim);
    List<bf16> list(lists, blockIdx.x);
    uint32_t first = blockIdx.z * kChunk;
    if (first >= list.keys) return wait_for_predecessor();
    Part part(heads, dim);
    // Where keys are depends on the step's inputs alone, unless they were chosen.
    if (k == 0) find_keys(lists, list, first, shared.keys);
    wait_for_predecessor();
    Queries queries = part.load_queries(written(q));
    Accumulator o[kAccumulators];
    Softmax chunk[2];
    list.chosen = written(list.chosen);
    if (k > 0) find_keys(lists, list, first, shared.keys);
    attend_chunk(queries, shared, min(list.keys - first, kChunk), part.first_dim, part.steps, scale * kLog2E, chunk, o);
    Partials to(partials, gridDim.x, gridDim.z, blockIdx.z, heads, dim);
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        uint32_t head = part.head[r];
        if (head >= heads) continue;
        if (threadIdx.x < 32 && threadIdx.x % 4 == 0) to.softmaxes[head] = chunk[r];
#pragma unroll
        for (uint32_t i = 0; i < kAccumulators; ++i)
            if (i / 4 < part.steps)
                put(to.numerators + size_t(head) * dim + part.first_dim + dimension(i), o[i][2 * r], o[i][2 * r + 1]);
    }
}

constexpr uint32_t kMergeColumns = 4; // of a lane

// Grid: tokens; heads, and one block more, which writes the rings. A warp has 128 dimensions.
extern "C" __global__ __launch_bounds__(kMergeThreads) void sparse_attention_merge(
    const float *partials,     // see Partials
    const float *sink,         // [heads]
    const float *frequencies,  // [pairs]
    const bf16 *kv,            // [tokens, dim]
    const uint32_t *qo_indptr, // [rows + 1]
    const uint32_t *positions, // [tokens]
    const uint32_t *slots,     // [rows]
    bf16 *out,                 // [tokens, heads, dim]
    uint8_t *packed,           // [tokens, groups, 2, packed row of `group` columns]; null: none
    bf16 *rings,               // [slot_count, ring, dim]
    uint32_t rows, uint32_t slot_count, uint32_t window, uint32_t ring, uint32_t per_page, uint32_t k, uint32_t heads,
    uint32_t dim, uint32_t chunks, uint32_t pairs,
    uint32_t group) { // columns of whole heads, a multiple of 128 and of `dim`
    release_successor();
    Lists<bf16> lists = {};
    lists.batch = {qo_indptr, positions, slots, nullptr, rows, 0};
    lists.window = window, lists.slot_count = slot_count, lists.per_page = per_page, lists.k = k;
    List<bf16> list(lists, blockIdx.x);
    const uint32_t head = blockIdx.y, i = kMergeColumns * threadIdx.x;
    using Own = Elements<bf16, kMergeColumns>;
    if (head == heads) {
        wait_for_predecessor();
        const Sequence &s = list.sequence;
        // An older token would have its row overwritten by a newer one of this step.
        if (s.pads() || blockIdx.x + ring < s.end || i >= dim) return;
        const uint32_t position = s.start + (blockIdx.x - s.first);
        *reinterpret_cast<Own *>(rings + (size_t(s.slot) * ring + position % ring) * dim + i) =
            *reinterpret_cast<const Own *>(written(kv) + size_t(blockIdx.x) * dim + i);
        return;
    }
    const uint32_t still = dim - 2 * pairs; // dimensions that are not rotated
    const float position = float(positions[blockIdx.x]), of_sink = sink[head];
    float2 turn[kMergeColumns / 2] = {};
#pragma unroll
    for (uint32_t j = 0; j < kMergeColumns / 2; ++j) {
        const uint32_t column = i + 2 * j;
        if (column >= still && column < dim) turn[j] = turn_of(position, frequencies[(column - still) / 2], true);
    }
    wait_for_predecessor();
    partials = written(partials);
    Softmax all;
    float numerator[kMergeColumns] = {}, before, own;
#pragma unroll 4
    for (uint32_t c = 0; c < (list.keys + kChunk - 1) / kChunk; ++c) {
        const Partials from(const_cast<float *>(partials), gridDim.x, chunks, c, heads, dim);
        const float4 part = i < dim ? *reinterpret_cast<const float4 *>(from.numerators + size_t(head) * dim + i)
                                    : make_float4(0.f, 0.f, 0.f, 0.f);
        all.merge(from.softmaxes[head], before, own);
        numerator[0] = fmaf(numerator[0], before, part.x * own),
        numerator[1] = fmaf(numerator[1], before, part.y * own);
        numerator[2] = fmaf(numerator[2], before, part.z * own),
        numerator[3] = fmaf(numerator[3], before, part.w * own);
    }
    all.finish(of_sink, before);
    Own result;
    float v[kMergeColumns];
#pragma unroll
    for (uint32_t j = 0; j < kMergeColumns; j += 2) {
        v[j] = round_bf16(numerator[j] * before / all.sum), v[j + 1] = round_bf16(numerator[j + 1] * before / all.sum);
        if (i + j >= still) turn_by(v[j], v[j + 1], turn[j / 2]);
        put(&result[j], v[j], v[j + 1]);
        v[j] = to_float(result[j]), v[j + 1] = to_float(result[j + 1]);
    }
    if (i < dim) *reinterpret_cast<Own *>(out + (size_t(blockIdx.x) * heads + head) * dim + i) = result;
#if __CUDA_ARCH__ >= 890
    if (!packed || i >= dim) return; // whole warps: `dim` is a multiple of 128 then
    const uint32_t groups = heads * dim / group, column = head * dim % group + i / kGroup * kGroup;
    uint8_t *to = packed + (size_t(blockIdx.x) * groups + head * dim / group) * 2 * packed_bytes(group);
    pack_split_group(to, group, column / kGroup, make_float4(v[0], v[1], v[2], v[3]));
#endif
}
