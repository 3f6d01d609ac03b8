// Causal attention over the paged KV cache for rows of few queries (decode), on Hopper and later: one launch.
//
// The queries of a row that share a KV head are the columns of one matrix: column c is query c / group, head c % group
// of the group, at most 8 N. A warp walks KV blocks of 16 tokens: S[16 tokens, 8 N] = k qᵀ, online softmax in f32 down
// the columns, O[D, 8 N] += vᵀ p. So the 16 rows that a tensor core wants are tokens or dimensions, never idle queries.
// Each warp has its own ring of blocks in shared memory, filled by the copy engine; the cache has the order that
// ldmatrix reads without bank conflicts.
//
// A pair of row and KV head is taken by one block, or shared by several if it is long beside the others: the grid is the
// same for all contexts, and each block finds its part from kv_lens. The parts meet in global memory, where the last
// block to come adds them. (A cluster would add them through shared memory, but clusters crowd the GPU's processing
// clusters unevenly: one row of 16k tokens took 25 us instead of 20.)
//
// Fused, for rows of one query: q comes straight from the QKV projection. The block normalises and rotates the queries;
// the one with the row's last KV block also its key, puts key and value into its copy of that KV block, and writes
// them to the cache, unless they are there. Nothing then has to wait for another kernel but the projection: KV blocks of
// earlier steps are copied while it runs.
#pragma once
constexpr int kWarps = 4;
#include "decode_parts.cuh"

#if __CUDA_ARCH__ >= 900
// Of an output without gates.
struct Ungated {
    __device__ __forceinline__ uint2 apply(int, uint2 x) const { return x; }
};

// `Source` says where the queries come from, and whether new keys and values come with them (kFused):
//   Early<D> early<D>(newest)               loads what no kernel of the step writes, for the token at position `newest`
//   bool fresh(pair)                        whether the row's newest token is not in the cache yet
//   stage(shared, pair, fresh, early)       puts queries, and with `fresh` the new key and value, into shared memory
//   bool beside()                           whether the kernel before this one has released it only once all before that
//                                           were complete, and writes nothing that this one reads: they run together
//   gates<D, P>(pair, column, d)            of P times four elements of the output, from dimension d on, D / P apart;
//                                           uint2 apply(p, uint2) gates four of them
template <int D, int N, int S, typename Source>
__device__ void decode(const Source &source, bf16 *k, bf16 *v, const Batch &batch, const Workspace &workspace,
                       bf16 *out, uint32_t heads, float scale) {
    static_assert(sizeof(Shared<D, N, S>) ==
                      (kWarps * S * (kSlabs<D> * 32 * D + 8) + 16 * N * D + 4 * D + 8 + 127) / 128 * 128,
                  "as the launcher computes it");
    constexpr bool kFused = Source::kFused;
    constexpr uint32_t kStages = KvRing<D, S>::kStages;
    extern __shared__ __align__(128) uint8_t raw[];
    Shared<D, N, S> &shared = *reinterpret_cast<Shared<D, N, S> *>(raw);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    release_successor();
    // From the end: blocks that find nothing come first and make room while the kernel before this one still runs. Beside
    // it they come last, when there is room.
    Place place = {gridDim.x - 1 - blockIdx.x, gridDim.x, blockIdx.y, gridDim.y};
    if (source.beside()) {
        uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
        place.item = block / gridDim.y, place.kv_head = block % gridDim.y;
    }
    const Pair pair = find_pair(batch, place, heads / gridDim.y, 8 * N);
    // The next kernel takes the end of this one for the end of all before it, so one block has to see that: the last,
    // whose place no other waits for.
    bool closes = blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1;
    if (pair.parts == 0) {
        if (closes) wait_for_predecessor();
        return;
    }
    uint32_t total = (pair.kv_len + kBlock - 1) / kBlock, newest = pair.kv_len - 1;
    uint32_t first = pair.part * total / pair.parts + warp, end = (pair.part + 1) * total / pair.parts;
    const uint32_t *table = batch.block_tables + size_t(pair.row) * batch.max_blocks;
    size_t stride = size_t(pair.kv_heads) * kBlock * D, slab = size_t(pair.kv_head) * kBlock * D;
    KvRing<D, S> ring = {shared.kv[warp], shared.barriers[warp], k + slab, v + slab, stride};
    ring.table = table + first;
    ring.count = first < end ? (end - first + kWarps - 1) / kWarps : 0;
    ring.blocks = batch.blocks;
    ring.load_ids();
    if (lane < S) barrier_init(ring.barriers + lane, 1);
    barriers_ready();
    __syncwarp();

    // Blocks without a token of this step can come now. Fused, the new token's place is overwritten on arrival.
    bool last = end == total; // the row's last KV block is here
    bool fresh = kFused && last && source.fresh(pair);
    uint32_t old = kFused ? total : (pair.kv_len - pair.tokens) / kBlock, n = 0;
    for (; n < S && n < ring.count * kStages && first + n / kStages * kWarps < old; ++n) ring.fetch(n);
    size_t at = last ? table[newest / kBlock] * stride + slab : 0; // where that is in the cache
    if (kFused && pair.tokens != 1) __trap();
    // Columns without a query: what they score must not depend on what lay here before, because all columns change the
    // reference of their softmax together.
    for (uint32_t i = pair.columns * (D / 8) + threadIdx.x; i < N * D; i += 32 * kWarps)
        *reinterpret_cast<uint4 *>(shared.q + query_vector<N>(i / (D / 8), i % (D / 8))) = make_uint4(0, 0, 0, 0);
    typename Source::template Early<D> early = source.template early<D>(newest);
    // Beside another kernel, the one that wrote what comes now is complete already, and the end has to wait instead.
    if (!source.beside()) wait_for_predecessor();
    for (; n < S && n < ring.count * kStages; ++n) ring.fetch(n);
    source.stage(shared, pair, fresh, early);
    __syncthreads();

    uint4 q[N][D / 32];
    Part<D, N> part = {};
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
            q[t][c] = load_matrices(shared.q + query_vector<N>(8 * t + lane % 8, 4 * c + lane / 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            part.max[t][j] = -INFINITY;
            part.last[t][j] = pair.kv_len - pair.tokens + pair.token(8 * t + Accumulator::column(lane, j));
        }
    }
    const bf16(*added)[D] = fresh ? shared.fresh : nullptr;
    for (n = 0; n < ring.count; ++n) {
        uint32_t token = (first + n * kWarps) * kBlock, p[N][2];
        bool ends = token + kBlock >= pair.kv_len, masked = token + kBlock > pair.kv_len - pair.tokens;
        Slab<D> *stage = ring.await(n * kStages);
        if (ends) complete_tile<D, 0, kSlabs<D> - 1>(stage, newest - token, added, k + at, v + at);
        weigh<D, N>(p, part, q, stage[0], token, masked, scale);
        if constexpr (kStages == 2) {
            ring.refill(2 * n);
            stage = ring.await(2 * n + 1);
            if (ends) complete_tile<D, 1, 1>(stage, newest - token, added, k + at, v + at);
        }
        add_values<D, N>(part, p, stage[kSlabs<D> - 1]);
        ring.refill((n + 1) * kStages - 1);
    }
    store_part<D, N>(part, reinterpret_cast<float *>(shared.kv[warp]), pair.columns);
    __syncthreads();
    finish<D, N, S>(shared, source, pair, place.item - pair.part, workspace, out);
    if (source.beside() && closes) wait_for_predecessor();
}
#endif
