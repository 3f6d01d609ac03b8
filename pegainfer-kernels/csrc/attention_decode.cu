// Causal attention over the paged KV cache for rows of few queries (decode), on Hopper and later: one launch.
//
// The queries of a row that share a KV head are the columns of one matrix: column c is query c / group, head c % group
// of the group, at most 8 N. A warp walks KV blocks of 16 tokens: S[16 tokens, 8 N] = k qᵀ, online softmax in f32 down
// the columns, O[D, 8 N] += vᵀ p. So the 16 rows that a tensor core wants are tokens or dimensions, never idle queries.
// Each warp has its own ring of blocks in shared memory, filled by the copy engine; the cache has the order that
// ldmatrix reads without bank conflicts.
//
// A cluster shares a pair of row and KV head: its blocks take equal ranges of the row's KV blocks, their warps take
// turns within the range. At the end the warps of a block add up, and every block of the cluster gets a slice of the
// sums of all others through distributed shared memory and writes that slice of the output.
//
// Fused, for rows of one query: q comes straight from the QKV projection. The block normalises and rotates the queries;
// the one with the row's last KV block also its key, puts key and value into its copy of that KV block, and writes
// them to the cache. Nothing then has to wait for another kernel but the projection: KV blocks of earlier steps are
// copied while it runs.
#include "bulk.cuh"
#include "cluster.cuh"
#include "rope.cuh"

constexpr int kWarps = 4, kStages = 2;
constexpr int kTile = 2; // KV blocks of a stage
constexpr uint32_t kTokens = kTile * kBlock;

struct Batch {
    const uint32_t *qo_indptr;    // [rows + 1]
    const uint32_t *kv_lens;      // [rows]
    const uint32_t *block_tables; // [rows, max_blocks]
    uint32_t max_blocks, blocks;
};

// Where the queries come from: q [tokens, heads * D], or, fused, qkv [tokens, (heads + 2 kv_heads) * D] and the rest.
struct Source {
    const bf16 *q;
    const bf16 *q_norm, *k_norm; // [D]
    const float *rope;           // [positions, D]: cosines, then sines
    uint32_t positions;
    float eps;
};

#if __CUDA_ARCH__ >= 900
template <int D, int N> struct Shared {
    alignas(128) bf16 kv[kWarps][kStages][kTile][2][kBlock * D];
    bf16 q[8 * N * D];
    bf16 fresh[2][D];                  // fused: key and value of the new token
    float4 inbox[8 * N * D / 4];       // from each block of the cluster, its numerators of this block's slice
    float2 stats[kMaxCluster * 8 * N]; // from each block, maximum and sum of each column
    uint64_t barriers[kWarps][kStages];
};

// A cluster's pair of row and KV head.
struct Pair {
    uint32_t kv_head, kv_heads, group, token0, tokens, kv_len, columns;
    // Column of the heads of all tokens, in heads, of a column of the matrix.
    __device__ size_t head(uint32_t column) const {
        return size_t(token0 + column / group) * kv_heads * group + kv_head * group + column % group;
    }
};

__device__ __forceinline__ float exp2_approx(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// Four 8 x 8 matrices of bf16; each lane gives the address of a row of 16 bytes, 8 lanes a matrix.
template <bool kTransposed> __device__ __forceinline__ uint4 load_matrices(const bf16 *row) {
    uint4 v;
    if (kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(shared_address(row))
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(shared_address(row))
                     : "memory");
    return v;
}

__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// Element of the first of dimensions 8 piece ... of a column of the matrix of queries, swizzled as the cache is.
template <int N> __device__ __forceinline__ uint32_t query_piece(uint32_t column, uint32_t piece) {
    return ((piece / 8 * 8 * N + column) * 8 + (piece % 8 ^ column % 8)) * 8;
}

// A tile in shared memory: of each block the key slab, then the value slab.
template <int D> using Tile = bf16[kTile][2][kBlock * D];

// The tiles of one warp, `count` of them, on their way through its stages.
template <int D> struct Ring {
    Tile<D> *stages;
    uint64_t *barriers;
    const bf16 *k, *v; // this KV head's slabs of block 0
    size_t stride;     // elements from one block's slab to the next block's
    const uint32_t *table;
    uint32_t count, left, blocks; // left: blocks from the first of the first tile to the last of the last
    uint32_t ids, ahead;          // of the blocks of 32 / kTile tiles, one a lane, and of the tiles after them

    __device__ uint32_t load_id(uint32_t tile) const {
        uint32_t lane = threadIdx.x % 32, at = (tile + lane / kTile) * kWarps * kTile + lane % kTile;
        if (at >= left) return 0;
        uint32_t id = table[at];
        if (id >= blocks) __trap();
        return id;
    }

    // Starts the copies of tile n; called in order, by the whole warp.
    __device__ void fetch(uint32_t n) {
        constexpr uint32_t kAtOnce = 32 / kTile, kBytes = kBlock * D * sizeof(bf16);
        if (n % kAtOnce == 0) {
            ids = n == 0 ? load_id(0) : ahead;
            ahead = load_id(n + kAtOnce);
        }
        uint32_t present = min(left - n * kWarps * kTile, uint32_t(kTile)), stage = n % kStages;
        if (threadIdx.x % 32 == 0) arrive_expecting(barriers + stage, 2 * kBytes * present);
#pragma unroll
        for (uint32_t t = 0; t < kTile; ++t) {
            uint32_t id = __shfl_sync(kAll, ids, n % kAtOnce * kTile + t);
            if (threadIdx.x % 32 != 0 || t >= present) continue;
            copy_bulk(stages[stage][t][0], k + id * stride, kBytes, barriers + stage);
            copy_bulk(stages[stage][t][1], v + id * stride, kBytes, barriers + stage);
        }
    }
};

// A warp's part of the softmax: numerators and denominator relative to exp2(max), for columns 8 t + 2 (lane % 4), + 1.
template <int D, int N> struct Part {
    float o[N][D / 16][4]; // dimension 16 m + lane / 4 of both columns, then dimension + 8
    float max[N][2], sum[N][2];
    uint32_t last[N][2]; // the last token that a column sees
};

// Scores of a tile that begins at `token`, times `scale`: x[t][i][j] for token 8 i + lane / 4 and column 8 t + 2 (lane %
// 4) + j. Those that the column does not see are -infinity.
template <int D, int N>
__device__ __forceinline__ void scores(float (&x)[N][2 * kTile][2], const Part<D, N> &part, const uint4 (&q)[N][D / 32],
                                       const Tile<D> &tile, uint32_t token, bool masked, float scale) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
        float s[2][N][4] = {}; // two sums, so that each waits for every other product only
#pragma unroll
        for (int c = 0; c < D / 16; ++c) {
            uint4 a = load_matrices<false>(tile[i][0] + cache_piece(lane % 16, 2 * c + lane / 16));
#pragma unroll
            for (int t = 0; t < N; ++t) {
                const uint4 &b = q[t][c / 2];
                mma(s[c % 2][t], a.x, a.y, a.z, a.w, c % 2 ? b.z : b.x, c % 2 ? b.w : b.y);
            }
        }
#pragma unroll
        for (int t = 0; t < N; ++t) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                bool seen = !masked || token + kBlock * i + lane / 4 + j / 2 * 8 <= part.last[t][j % 2];
                x[t][2 * i + j / 2][j % 2] = seen ? (s[0][t][j] + s[1][t][j]) * scale : -INFINITY;
            }
        }
    }
}

// Raises the reference of the softmax to the largest score so far.
template <int D, int N>
__device__ __forceinline__ void raise(Part<D, N> &part, const float (&x)[N][2 * kTile][2]) {
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float top = part.max[t][j];
#pragma unroll
            for (int i = 0; i < 2 * kTile; ++i) top = fmaxf(top, x[t][i][j]);
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, step));
            float shrink = part.max[t][j] == top ? 1.f : exp2_approx(part.max[t][j] - top);
            part.max[t][j] = top;
            part.sum[t][j] *= shrink;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                part.o[t][m][j] *= shrink;
                part.o[t][m][j + 2] *= shrink;
            }
        }
    }
}

// Attends to a tile that begins at `token`.
template <int D, int N>
__device__ __forceinline__ void attend(Part<D, N> &part, const uint4 (&q)[N][D / 32], const Tile<D> &tile,
                                       uint32_t token, bool masked, float scale) {
    uint32_t lane = threadIdx.x % 32;
    float x[N][2 * kTile][2];
    scores<D, N>(x, part, q, tile, token, masked, scale);
    // Weights up to 2^8 do no harm in f32 and bf16, so that the reference seldom has to follow.
    bool above = false;
#pragma unroll
    for (int i = 0; i < N * 4 * kTile; ++i)
        above |= x[i / (4 * kTile)][i / 2 % (2 * kTile)][i % 2] > part.max[i / (4 * kTile)][i % 2] + 8.f;
    if (__any_sync(kAll, above)) raise<D, N>(part, x);
    uint32_t p[N][2 * kTile];
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int i = 0; i < 2 * kTile; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                // Nothing visible yet: all weights are 0. The sum takes the weights as the product does, so that
                // rounding does not tilt the mean.
                float zero = part.max[t][j] == -INFINITY ? 0.f : part.max[t][j];
                x[t][i][j] = round_bf16(exp2_approx(x[t][i][j] - zero));
                part.sum[t][j] += x[t][i][j];
            }
            p[t][i] = transposed(narrow(x[t][i][0], x[t][i][1]));
        }
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
#pragma unroll
        for (int m = 0; m < D / 16; ++m) {
            uint4 a = load_matrices<true>(tile[i][1] + cache_piece(lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
#pragma unroll
            for (int t = 0; t < N; ++t) mma(part.o[t][m], a.x, a.y, a.z, a.w, p[t][2 * i], p[t][2 * i + 1]);
        }
    }
}

// Normalises and rotates the pair's queries into shared memory; with `owner` also the new key, and copies the value.
template <int D, int N>
__device__ void stage_fused(Shared<D, N> &shared, const Source &from, const Pair &pair, bool owner,
                            const Pairs<D> &q_norm, const Pairs<D> &k_norm, const Pairs<D> &angles) {
    constexpr int kItems = (8 * N + 2 + kWarps - 1) / kWarps; // heads of a warp: queries, key, value
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = pair.kv_heads * pair.group;
    uint32_t items = pair.group + 2 * owner;
    Pairs<D> x[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        uint32_t item = min(warp + j * kWarps, items - 1); // without a branch the loads of all go out together
        uint32_t head = item < pair.group ? pair.kv_head * pair.group + item
                                          : heads + (item - pair.group) * pair.kv_heads + pair.kv_head;
        x[j] = load_pairs<D>(from.q + (size_t(pair.token0) * (heads + 2 * pair.kv_heads) + head) * D);
    }
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
        uint32_t item = warp + j * kWarps;
        if (item >= items) break;
        bool query = item < pair.group, value = item == pair.group + 1;
        Pairs<D> y = value ? x[j] : norm_rope<D>(x[j], select(query, q_norm, k_norm), angles, from.eps);
#pragma unroll
        for (int p = 0; p < D / 64; ++p) {
            uint32_t low = lane + 32 * p, high = low + D / 2;
            bf16 *to = query ? shared.q : shared.fresh[value];
            to[query ? query_piece<N>(item, low / 8) + low % 8 : low] = __float2bfloat16_rn(y.low[p]);
            to[query ? query_piece<N>(item, high / 8) + high % 8 : high] = __float2bfloat16_rn(y.high[p]);
        }
    }
}

// Copies the pair's queries to shared memory.
template <int D, int N> __device__ void stage_queries(Shared<D, N> &shared, const bf16 *q, const Pair &pair) {
    for (uint32_t i = threadIdx.x; i < pair.columns * (D / 8); i += 32 * kWarps) {
        uint32_t column = i / (D / 8), piece = i % (D / 8);
        *reinterpret_cast<uint4 *>(shared.q + query_piece<N>(column, piece)) =
            load16(q + pair.head(column) * D + 8 * piece);
    }
}

// The row's last tile, in which the row ends with token `end`: clears the values behind it, which may be anything, and
// 0 * NaN is NaN. With `fresh`, token `end` comes from there, and goes to the slabs of its block in the cache too.
template <int D>
__device__ void complete_tile(Tile<D> &tile, uint32_t end, const bf16 (*fresh)[D], bf16 *k, bf16 *v) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = (end + 1) * (D / 8) + lane; i < kTokens * (D / 8); i += 32) {
        uint32_t token = i / (D / 8), at = cache_piece(token % kBlock, i % (D / 8));
        *reinterpret_cast<uint4 *>(tile[token / kBlock][1] + at) = make_uint4(0, 0, 0, 0);
    }
    for (uint32_t i = lane; fresh && i < 2 * (D / 8); i += 32) {
        uint32_t value = i / (D / 8), piece = i % (D / 8), at = cache_piece(end % kBlock, piece);
        uint4 x = *reinterpret_cast<const uint4 *>(fresh[value] + 8 * piece);
        *reinterpret_cast<uint4 *>(tile[end / kBlock][value] + at) = x;
        *reinterpret_cast<uint4 *>((value ? v : k) + at) = x;
    }
    __syncwarp();
}

// Writes a warp's part to shared memory: of each column D numerators, the maximum and the sum.
template <int D, int N> __device__ void store_part(Part<D, N> &part, float *to, uint32_t columns) {
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < N; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = part.sum[t][j];
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
            uint32_t column = 8 * t + lane % 4 * 2 + j;
            if (column >= columns) continue;
            float *row = to + column * (D + 4);
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                row[16 * m + lane / 4] = part.o[t][m][j];
                row[16 * m + lane / 4 + 8] = part.o[t][m][j + 2];
            }
            if (lane < 4) *reinterpret_cast<float2 *>(row + D) = make_float2(part.max[t][j], sum);
        }
    }
}

// Adds parts of a softmax: maxima and sums at `stats`, numerators at `from`, both `stride` further for each part.
__device__ __forceinline__ float4 add_parts(const float *stats, uint32_t stats_stride, const float *from,
                                            uint32_t stride, uint32_t parts, float2 &total) {
    total = make_float2(-INFINITY, 0.f);
    for (uint32_t i = 0; i < parts; ++i) total.x = fmaxf(total.x, stats[i * stats_stride]);
    float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
    for (uint32_t i = 0; i < parts; ++i) {
        float2 part = *reinterpret_cast<const float2 *>(stats + i * stats_stride);
        float4 x = *reinterpret_cast<const float4 *>(from + i * stride);
        float weight = part.x == -INFINITY ? 0.f : exp2_approx(part.x - total.x);
        total.y += weight * part.y;
        o.x += weight * x.x, o.y += weight * x.y, o.z += weight * x.z, o.w += weight * x.w;
    }
    return o;
}

__device__ __forceinline__ void store_output(bf16 *to, float4 o, float sum) {
    float inverse = 1.f / sum;
    *reinterpret_cast<uint2 *>(to) =
        make_uint2(narrow(o.x * inverse, o.y * inverse), narrow(o.z * inverse, o.w * inverse));
}

// Adds the parts of the block's warps, then of the cluster's blocks, and writes the output. Pieces are 4 dimensions.
template <int D, int N> __device__ void finish(Shared<D, N> &shared, const Pair &pair, bf16 *out) {
    constexpr uint32_t kPieces = D / 4, kStride = sizeof(shared.kv[0]) / sizeof(float);
    static_assert(8 * N * (D + 4) <= kStride, "a warp's part fits its ring");
    const float *parts = reinterpret_cast<const float *>(shared.kv);
    uint32_t splits = gridDim.x, rank = blockIdx.x, slice = pair.columns * kPieces / splits;
    if (splits > 1) cluster_wait(); // all blocks have started
    for (uint32_t i = threadIdx.x; i < pair.columns * kPieces; i += 32 * kWarps) {
        uint32_t column = i / kPieces, piece = i % kPieces;
        const float *from = parts + column * (D + 4);
        float2 total;
        float4 o = add_parts(from + D, kStride, from + 4 * piece, kStride, kWarps, total);
        if (splits == 1) {
            store_output(out + pair.head(column) * D + 4 * piece, o, total.y);
            continue;
        }
        store_cluster(cluster_address(shared.inbox + rank * slice + i % slice, i / slice), o);
        if (piece < splits) store_cluster(cluster_address(shared.stats + rank * pair.columns + column, piece), total);
    }
    if (splits == 1) return;
    cluster_arrive();
    cluster_wait();
    for (uint32_t i = threadIdx.x; i < slice; i += 32 * kWarps) {
        uint32_t column = (rank * slice + i) / kPieces, piece = (rank * slice + i) % kPieces;
        float2 total;
        float4 o = add_parts(reinterpret_cast<const float *>(shared.stats + column), 2 * pair.columns,
                             reinterpret_cast<const float *>(shared.inbox + i), 4 * slice, splits, total);
        store_output(out + pair.head(column) * D + 4 * piece, o, total.y);
    }
}

template <int D, int N, bool kFused>
__device__ void decode(const Source &source, bf16 *k, bf16 *v, const Batch &batch, bf16 *out, uint32_t heads,
                       float scale) {
    extern __shared__ __align__(128) uint8_t raw[];
    Shared<D, N> &shared = *reinterpret_cast<Shared<D, N> *>(raw);
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, splits = gridDim.x, b = blockIdx.z;
    release_successor();
    Pair pair = {blockIdx.y, gridDim.y, heads / gridDim.y, batch.qo_indptr[b]};
    pair.tokens = batch.qo_indptr[b + 1] - pair.token0;
    pair.kv_len = batch.kv_lens[b];
    pair.columns = pair.tokens * pair.group;
    if (pair.columns == 0 || pair.columns > 8 * N || pair.kv_len == 0) {
        wait_for_predecessor(); // even so: the next kernel takes the end of this one for the end of all before it
        return;
    }
    if (splits > 1) cluster_arrive();
    uint32_t tiles = (pair.kv_len + kTokens - 1) / kTokens;
    uint32_t first = blockIdx.x * tiles / splits + warp, end = (blockIdx.x + 1) * tiles / splits;
    uint32_t blocks = min(end * kTile, (pair.kv_len + kBlock - 1) / kBlock);
    const uint32_t *table = batch.block_tables + size_t(b) * batch.max_blocks;
    size_t stride = size_t(pair.kv_heads) * kBlock * D, slab = size_t(pair.kv_head) * kBlock * D;
    Ring<D> ring = {shared.kv[warp], shared.barriers[warp], k + slab, v + slab, stride};
    ring.table = table + first * kTile;
    ring.count = first < end ? (end - first + kWarps - 1) / kWarps : 0;
    ring.left = first < end ? blocks - first * kTile : 0;
    ring.blocks = batch.blocks;
    if (lane < kStages) barrier_init(ring.barriers + lane, 1);
    barriers_ready();
    __syncwarp();

    // Tiles without a token of this step can come now. Fused, the new token's place is overwritten on arrival.
    uint32_t old = kFused ? tiles : (pair.kv_len - pair.tokens) / kTokens, n = 0;
    for (; n < kStages && n < ring.count && first + n * kWarps < old; ++n) ring.fetch(n);
    Pairs<D> q_norm, k_norm, angles;
    if (kFused) {
        if (pair.kv_len > source.positions || pair.tokens != 1) __trap();
        q_norm = load_pairs<D>(source.q_norm);
        k_norm = load_pairs<D>(source.k_norm);
        angles = load_pairs<D>(source.rope + size_t(pair.kv_len - 1) * D);
    }
    wait_for_predecessor();
    for (; n < kStages && n < ring.count; ++n) ring.fetch(n);
    if (kFused) stage_fused<D, N>(shared, source, pair, blockIdx.x == splits - 1, q_norm, k_norm, angles);
    else stage_queries<D, N>(shared, source.q, pair);
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
            part.last[t][j] = pair.kv_len - pair.tokens + (8 * t + lane % 4 * 2 + j) / pair.group;
        }
    }
    for (n = 0; n < ring.count; ++n) {
        uint32_t stage = n % kStages, token = (first + n * kWarps) * kTokens;
        wait(ring.barriers + stage, n / kStages % 2);
        if (token + kTokens >= pair.kv_len) {
            uint32_t newest = pair.kv_len - 1;
            size_t at = table[newest / kBlock] * stride + slab;
            complete_tile<D>(ring.stages[stage], newest - token, kFused ? shared.fresh : nullptr, k + at, v + at);
        }
        attend<D, N>(part, q, ring.stages[stage], token, token + kTokens > pair.kv_len - pair.tokens, scale);
        __syncwarp(); // all lanes have read the stage
        if (n + kStages < ring.count) ring.fetch(n + kStages);
    }
    store_part<D, N>(part, reinterpret_cast<float *>(shared.kv[warp]), pair.columns);
    __syncthreads();
    finish<D, N>(shared, pair, out);
}
#endif

// Grid: splits (a cluster), kv_heads, rows of the batch. k, v: the cache of common.cuh; out: [tokens, heads * D]; scale
// includes log2(e). Rows without queries or context, and rows of more than 8 N columns, are left alone.
#define DECODE(D, N)                                                                                                   \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void decode_##D##_##N(                                        \
        const bf16 *q, bf16 *k, bf16 *v, const uint32_t *qo_indptr, const uint32_t *kv_lens,                           \
        const uint32_t *block_tables, bf16 *out, uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale) {  \
        DECODE_BODY((decode<D, N, false>({q}, k, v, {qo_indptr, kv_lens, block_tables, max_blocks, blocks}, out,       \
                                         heads, scale)))                                                               \
    }
// As above for rows of one query; qkv: [tokens, (heads + 2 kv_heads) * D].
#define DECODE_FUSED(D)                                                                                                \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void decode_fused_##D(                                        \
        const bf16 *qkv, const bf16 *q_norm, const bf16 *k_norm, const float *rope, bf16 *k, bf16 *v,                  \
        const uint32_t *qo_indptr, const uint32_t *kv_lens, const uint32_t *block_tables, bf16 *out, uint32_t heads,   \
        uint32_t max_blocks, uint32_t blocks, uint32_t positions, float eps, float scale) {                            \
        DECODE_BODY((decode<D, 1, true>({qkv, q_norm, k_norm, rope, positions, eps}, k, v,                             \
                                        {qo_indptr, kv_lens, block_tables, max_blocks, blocks}, out, heads, scale)))   \
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
DECODE_FUSED(64)
DECODE_FUSED(128)
