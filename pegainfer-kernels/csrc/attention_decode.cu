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
// them to the cache, unless they are there. Nothing then has to wait for another kernel but the projection: KV blocks of earlier steps are
// copied while it runs.
constexpr int kWarps = 4;
#include "decode_parts.cuh"
#include "rope.cuh"

// Where the queries come from: q [tokens, heads * D], or, fused, qkv [tokens, (heads + 2 kv_heads) * D] and the rest.
struct Source {
    const bf16 *q;
    const bf16 *q_norm, *k_norm; // [D]
    const float *rope;           // [positions, D]: cosines, then sines
    const uint32_t *slots;       // [tokens]: kNoSlot for a token that is in the cache already
    uint32_t positions;
    float eps;
};

#if __CUDA_ARCH__ >= 900
// Normalises and rotates the pair's queries into shared memory; with `owner` also the new key, and copies the value.
template <int D, int N, int S>
__device__ void stage_fused(Shared<D, N, S> &shared, const Source &from, const Pair &pair, bool owner,
                            const Pairs<D> &q_norm, const Pairs<D> &k_norm, const Pairs<D> &angles) {
    constexpr int kItems = (8 * N + kWarps) / kWarps; // heads of a warp: queries, then the key
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, items = pair.group + owner;
    uint32_t heads = pair.kv_heads * pair.group;
    const bf16 *token = from.q + size_t(pair.token0) * (heads + 2 * pair.kv_heads) * D;
    const bf16 *q = token + size_t(pair.kv_head * pair.group) * D, *k = token + size_t(heads + pair.kv_head) * D;
    Pairs<D> x[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) { // without branches, so that all loads go out together
        uint32_t item = min(warp + j * kWarps, items - 1);
        x[j] = load_pairs<D>(item < pair.group ? q + item * D : k);
    }
    if (owner && warp == kWarps - 1 && lane < D / 8)
        *reinterpret_cast<uint4 *>(shared.fresh[1] + 8 * lane) = load16(k + size_t(pair.kv_heads) * D + 8 * lane);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        uint32_t item = warp + j * kWarps;
        if (item >= items) break;
        bool query = item < pair.group;
        Pairs<D> y = norm_rope<D>(x[j], select(query, q_norm, k_norm), angles, from.eps);
        bf16 *to = query ? shared.q : shared.fresh[0];
#pragma unroll
        for (int p = 0; p < D / 64; ++p) {
            uint32_t low = lane + 32 * p, high = low + D / 2;
            to[query ? query_piece<N>(item, low / 8) + low % 8 : low] = __float2bfloat16_rn(y.low[p]);
            to[query ? query_piece<N>(item, high / 8) + high % 8 : high] = __float2bfloat16_rn(y.high[p]);
        }
    }
}

// Copies the pair's queries to shared memory.
template <int D, int N, int S>
__device__ void stage_queries(Shared<D, N, S> &shared, const bf16 *q, const Pair &pair) {
    for (uint32_t i = threadIdx.x; i < pair.columns * (D / 8); i += 32 * kWarps) {
        uint32_t column = i / (D / 8), piece = i % (D / 8);
        *reinterpret_cast<uint4 *>(shared.q + query_piece<N>(column, piece)) =
            load16(q + pair.head(column) * D + 8 * piece);
    }
}

template <int D, int N, int S, bool kFused>
__device__ void decode(const Source &source, bf16 *k, bf16 *v, const Batch &batch, const Workspace &workspace,
                       bf16 *out, uint32_t heads, float scale) {
    static_assert(sizeof(Shared<D, N, S>) ==
                      (kWarps * S * (64 * D + 8) + 16 * N * D + 4 * D + 8 + 127) / 128 * 128,
                  "as the launcher computes it");
    extern __shared__ __align__(128) uint8_t raw[];
    Shared<D, N, S> &shared = *reinterpret_cast<Shared<D, N, S> *>(raw);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    release_successor();
    // From the end: blocks that find nothing come first and make room while the kernel before this one still runs.
    const Place place = {gridDim.x - 1 - blockIdx.x, gridDim.x, blockIdx.y, gridDim.y};
    const Pair pair = find_pair(batch, place, heads / gridDim.y, 8 * N);
    if (pair.parts == 0) {
        // The next kernel takes the end of this one for the end of all before it, so one block has to see that.
        if (blockIdx.x == 0) wait_for_predecessor();
        return;
    }
    uint32_t total = (pair.kv_len + kBlock - 1) / kBlock, newest = pair.kv_len - 1;
    uint32_t first = pair.part * total / pair.parts + warp, end = (pair.part + 1) * total / pair.parts;
    const uint32_t *table = batch.block_tables + size_t(pair.row) * batch.max_blocks;
    size_t stride = size_t(pair.kv_heads) * kBlock * D, slab = size_t(pair.kv_head) * kBlock * D;
    Ring<D, S> ring = {shared.kv[warp], shared.barriers[warp], k + slab, v + slab, stride};
    ring.table = table + first;
    ring.count = first < end ? (end - first + kWarps - 1) / kWarps : 0;
    ring.blocks = batch.blocks;
    ring.load_ids();
    if (lane < S) barrier_init(ring.barriers + lane, 1);
    barriers_ready();
    __syncwarp();

    // Blocks without a token of this step can come now. Fused, the new token's place is overwritten on arrival.
    bool last = end == total; // the row's last KV block is here
    bool fresh = kFused && last && source.slots[pair.token0] != kNoSlot;
    uint32_t old = kFused ? total : (pair.kv_len - pair.tokens) / kBlock, n = 0;
    for (; n < S && n < ring.count && first + n * kWarps < old; ++n) ring.fetch(n);
    Pairs<D> q_norm, k_norm, angles;
    size_t at = last ? table[newest / kBlock] * stride + slab : 0; // where that is in the cache
    if (kFused) {
        if (newest >= source.positions || pair.tokens != 1) __trap();
        q_norm = load_pairs<D>(source.q_norm);
        k_norm = load_pairs<D>(source.k_norm);
        angles = load_pairs<D>(source.rope + size_t(newest) * D);
    }
    wait_for_predecessor();
    for (; n < S && n < ring.count; ++n) ring.fetch(n);
    if (kFused) stage_fused<D, N, S>(shared, source, pair, fresh, q_norm, k_norm, angles);
    else stage_queries<D, N, S>(shared, source.q, pair);
    __syncthreads();

    uint4 q[N][D / 32];
    Part<D, N> part = {};
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
            q[t][c] = load_matrices<false>(shared.q + query_piece<N>(8 * t + lane % 8, 4 * c + lane / 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            part.max[t][j] = -INFINITY;
            part.last[t][j] = pair.kv_len - pair.tokens + pair.token(8 * t + lane % 4 * 2 + j);
        }
    }
    for (n = 0; n < ring.count; ++n) {
        uint32_t stage = n % S, token = (first + n * kWarps) * kBlock;
        wait(ring.barriers + stage, n / S % 2);
        if (token + kBlock >= pair.kv_len)
            complete_tile<D>(ring.stages[stage], newest - token, fresh ? shared.fresh : nullptr, k + at, v + at);
        attend<D, N>(part, q, ring.stages[stage], token, token + kBlock > pair.kv_len - pair.tokens, scale);
        __syncwarp(); // all lanes have read the stage
        if (n + S < ring.count) ring.fetch(n + S);
    }
    store_part<D, N>(part, reinterpret_cast<float *>(shared.kv[warp]), pair.columns);
    __syncthreads();
    finish<D, N, S>(shared, pair, workspace, out);
}
#endif

// Grid: rows + spare parts, kv_heads. k, v: the cache of common.cuh; out: [tokens, heads * D]; scale includes log2(e).
// Rows without queries or context, and rows of more than 8 N columns, are left alone.
#define DECODE(D, N)                                                                                                   \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void decode_##D##_##N(                                        \
        const bf16 *q, bf16 *k, bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens,                           \
        const uint32_t *block_tables, bf16 *out, uint32_t heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks,  \
        float scale, float *parts, uint32_t *arrived) {                                                                \
        DECODE_BODY((decode<D, N, 2, false>({q}, k, v, {qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks},   \
                                         {parts, arrived}, out, heads, scale)))                                        \
    }
// As above for rows of one query; qkv: [tokens, (heads + 2 kv_heads) * D].
#define DECODE_FUSED(D, S)                                                                                             \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void decode_fused_##D##_##S(                                  \
        const bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, const float *rope, const uint32_t *slots, bf16 *k,    \
        bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens, const uint32_t *block_tables, bf16 *out,          \
        uint32_t heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks, uint32_t positions, float eps,            \
        float scale, float *parts, uint32_t *arrived) {                                                                \
        DECODE_BODY((decode<D, 1, S, true>({qkv, q_norm, k_norm, rope, slots, positions, eps}, k, v,                   \
                                        {qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks},                  \
                                        {parts, arrived}, out, heads, scale)))                                         \
    }
#if __CUDA_ARCH__ >= 900
#define DECODE_BODY(CALL) CALL;
#else
#define DECODE_BODY(CALL)
#endif
DECODE(64, 1)
DECODE(64, 2)
DECODE(128, 1)
DECODE(128, 2)
DECODE_FUSED(64, 2)
DECODE_FUSED(128, 2)
DECODE_FUSED(128, 3)
