// Causal attention over the paged KV cache for sequences of few queries (decode), on Hopper and later, in one launch.
//
//   out = softmax(q kᵀ scale) v over the tokens that each query sees; scale includes log2(e), for base 2
// q, out: [tokens, heads * D] bf16; k, v: csrc/attention/kv_cache.cuh. Compute capability 9.0 and 10.x, D of 64, 128
// and 256, at most 8 N columns: queries of a sequence times heads of a KV head's group. Reference:
// src/cpu/attention/mod.rs.
//
// Techniques: FlashDecoding split-KV with the merge in the same launch; online softmax with lazy rescaling
// (FlashAttention-4); swap-AB tiles (csrc/attention/decode_tiles.cuh); bulk copies by the copy engine (TMA) into a ring
// for each warp; programmatic dependent launch. Bound by memory: at 4.46 TB/s read on an H200, 95 % for 128 sequences
// of 1,100 tokens, 72 % for 32, 65 % for 8 and for one of 16k, 19 % for one of 1,100 (lab/attention.md).
//
// The queries of a sequence that share a KV head are the columns of one matrix: column c is query c / group, head c %
// group of the group. A pair of sequence and KV head is taken by one block of threads, or split among several if it is
// long compared with the others: the grid is the same for all contexts, and each block finds its split from kv_lens.
// The partial softmaxes meet in global memory, where the last block to arrive merges them. (A cluster would merge them
// through shared memory, but clusters fill the GPU's processing clusters unevenly: one sequence of 16k tokens took 25
// us instead of 20.)
//
// Fused, for sequences of one query: q comes straight from the QKV projection. The block normalises and rotates the
// queries; the one with the sequence's last KV block also its key, puts key and value into its copy of that KV block,
// and writes them to the cache, unless they are there. Nothing then has to wait for another kernel but the projection:
// KV blocks of earlier steps are copied while it runs.
#pragma once
#include "attention/decode_partials.cuh"

#if __CUDA_ARCH__ >= 900
// Of an output without gates.
struct Ungated {
    __device__ __forceinline__ uint2 apply(int, uint2 x) const { return x; }
};

// `Source` says where the queries come from, and whether new keys and values come with them (kFused):
//   Early<D> early<D>(pair, newest)         loads what no kernel of the step writes, for the pair's token, whose place
//                                           in its sequence is `newest`
//   bool fresh(pair)                        whether the row's newest token is not in the cache yet
//   stage(shared, pair, fresh, early)       puts queries, and with `fresh` the new key and value, into shared memory
//   bool overlaps_prefill()                 whether this kernel runs together with the one before it, prefill
//   attention,
//                                           which has released this one only once all kernels before it were complete,
//                                           and writes nothing that this one reads
//   gates<D, P>(pair, column, d)            of P times four elements of the output, from dimension d on, D / P apart;
//                                           uint2 apply(p, uint2) gates four of them
template <int D, int N, int S, typename T, typename Source>
__device__ void decode(const Source &source, T *k, T *v, const Batch &batch, const Workspace &workspace,
                       const ActivationOut &out, uint32_t heads, float scale) {
    using Shared = DecodeShared<D, N, S, T>;
    static_assert(
        sizeof(Shared) == (kDecodeWarps * S * (sizeof(Stage<D, T>) + 8) + 16 * N * D + 4 * D + 8 + 127) / 128 * 128,
        "cuda/attention_decode.rs computes it");
    constexpr bool kFused = Source::kFused;
    constexpr uint32_t kStages = KvRing<D, S, kDecodeWarps, T>::kStages;
    extern __shared__ __align__(128) uint8_t raw[];
    Shared &shared = *reinterpret_cast<Shared *>(raw);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    release_successor();
    // From the end: blocks that find nothing come first and are gone while the kernel before this one still runs.
    // Overlapped with it they come last, when it has left multiprocessors.
    Place place = {gridDim.x - 1 - blockIdx.x, gridDim.x, blockIdx.y, gridDim.y};
    if (source.overlaps_prefill()) {
        uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
        place.item = block / gridDim.y, place.kv_head = block % gridDim.y;
    }
    const Pair pair = find_pair<kDecodeWarps>(batch, place, heads / gridDim.y, 8 * N);
    // The next kernel takes the end of this one for the end of all before it, so one block has to see that: the last,
    // whose place no other waits for.
    bool closes = blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1;
    if (pair.splits == 0) {
        if (closes) wait_for_predecessor();
        return;
    }
    uint32_t total = (pair.kv_len + kBlock - 1) / kBlock, newest = pair.kv_len - 1;
    uint32_t first = pair.split * total / pair.splits + warp, end = (pair.split + 1) * total / pair.splits;
    const uint32_t *table = batch.block_tables + size_t(pair.row) * batch.max_blocks;
    size_t stride = size_t(pair.kv_heads) * slab_size<T>(D), slab = size_t(pair.kv_head) * slab_size<T>(D);
    KvRing<D, S, kDecodeWarps, T> ring = {shared.kv[warp], shared.barriers[warp], k + slab, v + slab, stride};
    ring.table = table + first;
    ring.count = first < end ? (end - first + kDecodeWarps - 1) / kDecodeWarps : 0;
    ring.blocks = batch.blocks;
    ring.load_ids();
    if (lane < S) barrier_init(ring.barriers + lane, 1);
    barriers_ready();
    __syncwarp();

    // Blocks without a token of this step can come now. Fused, the new token's place is overwritten on arrival.
    bool last = end == total; // the row's last KV block is here
    bool fresh = kFused && last && source.fresh(pair);
    uint32_t old = kFused ? total : (pair.kv_len - pair.tokens) / kBlock, n = 0;
    for (; n < S && n < ring.count * kStages && first + n / kStages * kDecodeWarps < old; ++n) ring.fetch(n);
    size_t at = last ? table[newest / kBlock] * stride + slab : 0; // where that is in the cache
    if (kFused && pair.tokens != 1) __trap();
    // Columns without a query: what they score must not depend on what lay here before, because all columns raise their
    // running max together.
    for (uint32_t i = pair.columns * (D / 8) + threadIdx.x; i < N * D; i += 32 * kDecodeWarps)
        *reinterpret_cast<uint4 *>(shared.q + query_vector<N>(i / (D / 8), i % (D / 8))) = make_uint4(0, 0, 0, 0);
    typename Source::template Early<D> early = source.template early<D>(pair, newest);
    // Overlapped with prefill, the kernel that wrote what comes now is complete already, and the end waits instead.
    if (!source.overlaps_prefill()) wait_for_predecessor();
    for (; n < S && n < ring.count * kStages; ++n) ring.fetch(n);
    source.stage(shared, pair, fresh, early);
    __syncthreads();

    uint4 q[N][D / 32];
    Partial<D, N> part = {};
    load_columns<D, N, T>(q, part, shared.q);
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            part.max[t][j] = -INFINITY;
            part.last[t][j] = pair.kv_len - pair.tokens + pair.token(8 * t + Accumulator::column(lane, j));
        }
    }
    const bf16(*added)[D] = fresh ? shared.fresh : nullptr;
    for (n = 0; n < ring.count; ++n) {
        uint32_t token = (first + n * kDecodeWarps) * kBlock, p[N][2];
        bool ends = token + kBlock >= pair.kv_len, masked = token + kBlock > pair.kv_len - pair.tokens;
        Slab<D, T> *stage = ring.await(n * kStages);
        if (ends) complete_tile<D, 0, kSlabs<D, T> - 1>(stage, newest - token, added, k + at, v + at);
        // Large heads in bf16, whose values are not there yet, have no scales.
        float2 by = tile_scales<D>(stage[kSlabs<D, T> - 1]);
        weigh<D, N>(p, part, q, stage[0], token, masked, scale, by);
        if constexpr (kStages == 2) {
            ring.refill(2 * n);
            stage = ring.await(2 * n + 1);
            if (ends) complete_tile<D, 1, 1>(stage, newest - token, added, k + at, v + at);
        }
        add_values<D, N>(part, p, stage[kSlabs<D, T> - 1]);
        ring.refill((n + 1) * kStages - 1);
    }
    store_partial<D, N, T>(part, reinterpret_cast<float *>(shared.kv[warp]), pair.columns);
    __syncthreads();
    finish<D, N, S, T>(shared, source, pair, place.item - pair.split, workspace, out);
    if (source.overlaps_prefill() && closes) wait_for_predecessor();
}
#endif

// The body of a kernel. Before 9.0 the launcher takes csrc/attention/decode_async.cu.
#if __CUDA_ARCH__ >= 900
#define DECODE_BODY(CALL) CALL;
#else
#define DECODE_BODY(CALL)
#endif
