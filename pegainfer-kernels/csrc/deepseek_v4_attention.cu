// DeepSeek-V4's sparse attention: every head of a token over one list of keys, which are the values, too, with a sink.
//
//   l[k] = q · key[k] / sqrt(dim);  out = Σ_k exp(l[k]) key[k] / (Σ_k exp(l[k]) + exp(sink))
//
// The list of a token: its window, oldest first, of this step or from the ring of its slot, which may be longer than the window; then
// the compressed entries that it sees, ascending: none, all complete ones, or the chosen ones.
//
//   sparse_attention_heads: FlashAttention-2 (arXiv 2307.08691) by mma.sync. A block has a token and 16 or 32 heads (M), a warp 128 of
//                          the dimensions. An iteration takes 16 keys: each warp copies its dimensions of them to shared memory once for
//                          all heads and both GEMMs (deepseek_v4_key_ring.cuh), and the warps add up their parts of the scores
//                          through shared memory, in order.
//   sparse_attention_chunks: the same with 16 heads and a block for each chunk of 128 keys, where tokens are few (FlashDecoding:
//                          split-KV); keys go from memory to registers, where movmatrix transposes them for the second GEMM
//   sparse_attention_merge:  merges its partial results
//   sparse_attention_f32:    a warp has a head, and a lane every 32nd dimension
//
// Keys are taken in chunks of 64 of the list. In bf16 each chunk has a softmax of its own, and the chunks are merged in order,
// by one block or by the second kernel, with the same bits: what a token gets depends on its list alone. Weights are rounded to
// bf16 before the second GEMM, not in the denominator. All GPUs. Bound by the latency of loads where tokens are few, then by
// shared memory and the issue of instructions. Reference: src/cpu/deepseek_v4/attention.rs.
#include "deepseek_v4_batch.cuh"
#include "deepseek_v4_key_ring.cuh"
#include "abi/deepseek_v4_attention.h"

using namespace limits::deepseek_v4_attention;

constexpr uint32_t kSteps = kWarpDim / 32;          // vectors of a key that a lane has
constexpr uint32_t kMostWarps = kMaxDim / kWarpDim; // of a block
constexpr uint32_t kAccumulators = kWarpDim / 8;    // of the output, of a warp
constexpr uint32_t kChunkTiles = kChunk / kTile;
constexpr uint32_t kRingTiles = 2; // tiles of keys in shared memory

// The code of a key: the tensor that has it in the upper two bits, and its row there.
constexpr uint32_t kFresh = 0u << 30, kKept = 1u << 30, kEntry = 2u << 30; // of this step, of a ring, compressed
constexpr uint32_t kNoKey = ~0u;

// Where the keys of tokens are.
template <typename T> struct Lists {
    Batch batch;
    const T *kv;            // [tokens, dim]
    const T *rings;         // [slot_count, ring, dim]
    const T *entries;       // [entry_pages, per_page, dim]; not read if per_page is 0
    const uint32_t *chosen; // [tokens, k]; not read if k is 0: all complete entries
    uint32_t dim, window, ring, slot_count, entry_pages, per_page, k;

    // The key with this code, which is not kNoKey.
    __device__ __forceinline__ const T *key(uint32_t code) const {
        const T *from = code < kKept ? kv : code < kEntry ? rings : entries;
        return from + size_t(code % kKept) * dim;
    }
};

__device__ __forceinline__ uint32_t code_of(uint32_t tensor, size_t row) {
    if (row >= kKept) __trap();
    return tensor | uint32_t(row);
}

// The list of one token.
template <typename T> struct List {
    Sequence sequence;
    const uint32_t *chosen;
    uint32_t oldest; // position of the first key
    uint32_t recent; // keys of the window
    uint32_t keys;   // all

    __device__ __forceinline__ List(const Lists<T> &x, uint32_t t) {
        sequence = sequence_of(x.batch, t, x.slot_count);
        keys = 0;
        if (sequence.pads()) return;
        uint32_t position = x.batch.positions[t];
        recent = min(position + 1, x.window), oldest = position + 1 - recent;
        uint32_t complete = x.per_page ? (position + 1) / (kPageTokens / x.per_page) : 0;
        keys = recent + (x.k ? min(complete, x.k) : complete);
        chosen = x.chosen + size_t(t) * x.k;
    }

    // The code of key `i`; kNoKey behind the end of the list.
    __device__ __forceinline__ uint32_t code(const Lists<T> &x, uint32_t i) const {
        if (i >= keys) return kNoKey;
        if (i < recent) {
            size_t at;
            bool fresh = is_fresh(sequence, oldest + i, x.ring, at);
            return code_of(fresh ? kFresh : kKept, at);
        }
        i -= recent;
        if (x.k) i = chosen[i];
        if (i == kNoEntry) return kNoKey;
        return code_of(kEntry, entry_of(x.batch, sequence.row, i, x.per_page, x.entry_pages));
    }

    // Key `i`; null behind the end of the list.
    __device__ __forceinline__ const T *key(const Lists<T> &x, uint32_t i) const {
        const uint32_t found = code(x, i);
        return found == kNoKey ? nullptr : x.key(found);
    }
};

// Puts the addresses of the chunk's keys where the block finds them; ends with a barrier.
template <typename T>
__device__ __forceinline__ void find_keys(const Lists<T> &x, const List<T> &list, uint32_t first, const T **found) {
    __syncthreads(); // the chunk before was read
    for (uint32_t i = threadIdx.x; i < kChunk; i += blockDim.x) found[i] = list.key(x, first + i);
    __syncthreads();
}

// A softmax over some keys, in powers of two: denominator, and as many numerators, relative to 2^max.
struct Softmax {
    float max = -INFINITY, sum = 0.f;

    // What scores are relative to; without any key so far all weights are 0.
    __device__ __forceinline__ float base() const { return max == -INFINITY ? 0.f : max; }
    // 2^x relative to 2^max.
    __device__ __forceinline__ float relative(float x) const { return exp2_approx(x - base()); }

    // Adds another one. Numerators, too, become before times themselves plus `own` times the other's.
    __device__ __forceinline__ void merge(const Softmax &other, float &before, float &own) {
        float old = max;
        max = fmaxf(max, other.max);
        before = relative(old), own = relative(other.max);
        sum = fmaf(sum, before, other.sum * own);
    }

    // Adds the sink, a score without a value. Numerators times `before` over `sum` are the result.
    __device__ __forceinline__ void finish(float sink, float &before) {
        float own;
        merge({sink * kLog2E, 1.f}, before, own);
    }
};

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

// This warp's dimensions of 16 heads as operand A.
struct Queries {
    uint4 low[kSteps], high[kSteps];
};

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

// Adds the scores of 16 keys to a softmax and replaces them by weights. `present`: for this lane's four columns, those of both tiles,
// whether there is a key. `rescale`: by what numerators so far are multiplied.
__device__ __forceinline__ void weigh_tile(Accumulator (&s)[2], const bool (&present)[2][2], float scale, Softmax (&rows)[2],
                                           float (&rescale)[2]) {
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        float before = rows[r].max, most = before;
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                float &x = s[n][2 * r + j];
                x = present[n][j] ? __fmul_rn(x, scale) : -INFINITY; // not fused: two kernels give the same bits
                most = fmaxf(most, x);
            }
        rows[r].max = reduce_quad(most, Max());
        const float base = rows[r].base();
        rescale[r] = exp2_approx(before - base);
        rows[r].sum = __fmul_rn(rows[r].sum, rescale[r]);
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                float &x = s[n][2 * r + j];
                x = exp2_approx(x - base);
                rows[r].sum += x; // as it is; operand A is rounded
            }
    }
}

__device__ __forceinline__ void rescale_rows(Accumulator (&o)[kAccumulators], const float (&rescale)[2]) {
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) o[i][j] *= rescale[j / 2];
}

// Adds 16 keys to a softmax and its numerators.
__device__ __forceinline__ void add_tile(Accumulator (&s)[2], const Keys &keys, const bool (&present)[2][2], float scale,
                                         Softmax (&rows)[2], Accumulator (&o)[kAccumulators]) {
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

// What a block of the kernels by mma.sync has: a token, 16 heads, and of each warp its dimensions.
struct Part {
    uint32_t heads, dim, head[2]; // head of each row of this lane's accumulators
    uint32_t first_dim, steps;    // vectors of its dimensions

    // `group`: of 16 heads.
    __device__ __forceinline__ Part(uint32_t heads, uint32_t dim, uint32_t group = blockIdx.y) : heads(heads), dim(dim) {
        first_dim = threadIdx.x / 32 * kWarpDim, steps = min(dim - first_dim, kWarpDim) / 32;
        head[0] = group * kMmaHeads + threadIdx.x % 32 / 4, head[1] = head[0] + 8;
    }

    // Where the warp's dimensions of a row begin in [tokens, heads, dim]; heads beyond the end repeat the last one.
    __device__ __forceinline__ size_t row(uint32_t r) const {
        return (size_t(blockIdx.x) * heads + min(head[r], heads - 1)) * dim + first_dim;
    }

    __device__ __forceinline__ Queries load_queries(const bf16 *q) const {
        Queries out;
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
            for (uint32_t c = 0; c < kSteps; ++c)
                (r ? out.high : out.low)[c] =
                    c < steps ? load16(q + row(r) + 32 * c + threadIdx.x % 4 * 8) : make_uint4(0, 0, 0, 0);
        return out;
    }
};

// What a block of the kernels for whole lists has in shared memory: of 16 `Groups` heads.
template <uint32_t Groups> struct HeadsShared {
    uint8_t ring[kRingTiles][kTile][kKeyBytes];              // of keys; at the end of results
    float total[Groups][4 * kAccumulators][32 * kMostWarps]; // the merged chunks' numerators, each thread's own
    float4 scores[2][kMostWarps][Groups][2][32];             // of two iterations in turn: each warp's part of two tiles of 8 keys
    uint32_t keys[2][kChunk];                                // codes of two chunks in turn
};
static_assert(sizeof(HeadsShared<1>) == kOneGroupBytes && sizeof(HeadsShared<2>) == kTwoGroupBytes, "what launchers ask for");

// A softmax of 16 heads and its numerators of the warp's dimensions.
struct HeadsSoftmax {
    Softmax rows[2];
    Accumulator o[kAccumulators] = {}; // columns of i: dimensions 8 i to 8 i + 7

    // Adds a chunk, of which each lane has its columns, to the merged ones before it.
    __device__ __forceinline__ void merge_into(Softmax (&all)[2], float (&total)[4 * kAccumulators][32 * kMostWarps]) {
        float before[2], own[2];
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            rows[r].sum = reduce_quad(rows[r].sum, Add());
            all[r].merge(rows[r], before[r], own[r]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kAccumulators; ++i)
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
                float &numerator = total[4 * i + j][threadIdx.x];
                numerator = fmaf(numerator, before[j / 2], o[i][j] * own[j / 2]);
            }
    }
};

// The scores of 16 keys, all warps' parts added up; has a barrier.
template <uint32_t Groups>
__device__ __forceinline__ void score_tile(const Queries (&q)[Groups], const KeyTile &tile,
                                           float4 (&parts)[kMostWarps][Groups][2][32], Accumulator (&s)[Groups][2]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g) s[g][0] = {}, s[g][1] = {};
#pragma unroll
    for (uint32_t c = 0; c < kSteps; ++c)
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n) {
            const uint4 keys = tile.row(n, c);
#pragma unroll
            for (uint32_t g = 0; g < Groups; ++g) mma32(s[g][n], q[g].low[c], q[g].high[c], keys);
        }
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g)
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
            parts[warp][g][n][lane] = make_float4(s[g][n][0], s[g][n][1], s[g][n][2], s[g][n][3]);
    __syncthreads();
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g)
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n) {
            float4 sum = parts[0][g][n][lane];
#pragma unroll
            for (uint32_t w = 1; w < kMostWarps; ++w) {
                if (w >= warps) break;
                float4 part = parts[w][g][n][lane];
                sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
            }
            s[g][n] = {sum.x, sum.y, sum.z, sum.w};
        }
}

// Adds 16 keys with these codes to the softmaxes of a chunk.
template <uint32_t Groups>
__device__ __forceinline__ void add_tile(Accumulator (&s)[Groups][2], const KeyTile &tile, const uint32_t *codes, float scale,
                                         HeadsSoftmax (&chunk)[Groups]) {
    bool present[2][2];
#pragma unroll
    for (uint32_t n = 0; n < 2; ++n) {
        const uint2 pair = *reinterpret_cast<const uint2 *>(codes + 8 * n + threadIdx.x % 4 * 2);
        present[n][0] = pair.x != kNoKey, present[n][1] = pair.y != kNoKey;
    }
    uint4 p[Groups];
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g) {
        float rescale[2];
        weigh_tile(s[g], present, scale, chunk[g].rows, rescale);
        rescale_rows(chunk[g].o, rescale);
        p[g] = operand_a(s[g][0], s[g][1]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; i += 2) {
        const uint4 keys = tile.columns(i / 2);
#pragma unroll
        for (uint32_t g = 0; g < Groups; ++g) {
            mma(chunk[g].o[i], p[g], keys.x, keys.y);
            mma(chunk[g].o[i + 1], p[g], keys.z, keys.w);
        }
    }
}

// Writes the results of 16 heads. `staging`: [16] rows in shared memory, of which the warp uses its dimensions, as of a tile.
__device__ __forceinline__ void store_heads(const Part &part, Softmax (&all)[2], const float *sink,
                                            const float (&total)[4 * kAccumulators][32 * kMostWarps], const void *staging,
                                            bf16 *out) {
    const KeyTile rows(staging);
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        float rescale;
        all[r].finish(sink[min(part.head[r], part.heads - 1)], rescale);
        const uint32_t to = rows.address(lane / 4 + 8 * r, 0) + lane % 4 * 4;
#pragma unroll
        for (uint32_t i = 0; i < kAccumulators; ++i)
            store_pair(KeyTile::further(to, i), narrow(total[4 * i + 2 * r][threadIdx.x] * rescale / all[r].sum,
                                                       total[4 * i + 2 * r + 1][threadIdx.x] * rescale / all[r].sum));
    }
    __syncwarp();
    const uint32_t first_head = part.head[0] - lane / 4, dim = lane % 16 * kVector;
#pragma unroll
    for (uint32_t i = 0; i < kMmaHeads; i += 2) {
        const uint32_t row = i + lane / 16, head = first_head + row;
        if (head < part.heads && dim < 32 * part.steps)
            *reinterpret_cast<uint4 *>(out + (size_t(blockIdx.x) * part.heads + head) * part.dim + part.first_dim + dim) =
                load_vector(rows.address(row, lane % 8) + lane % 16 / 8 * 128);
    }
}

// All keys of a token and 16 `Groups` heads.
template <uint32_t Groups>
__device__ __forceinline__ void attend_list(const Lists<bf16> &lists, const bf16 *q, const float *sink, bf16 *out, uint32_t heads,
                                            float scale) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &shared = *reinterpret_cast<HeadsShared<Groups> *>(memory);
    const List<bf16> list(lists, blockIdx.x);
    const uint32_t tiles = (list.keys + kTile - 1) / kTile;
    // Finds the keys of a chunk, if there is one: two chunks are known at a time.
    auto find_chunk = [&](uint32_t chunk) {
        if (chunk * kChunk >= list.keys) return;
        for (uint32_t i = threadIdx.x; i < kChunk; i += blockDim.x) shared.keys[chunk % 2][i] = list.code(lists, chunk * kChunk + i);
        __syncwarp();
    };
    auto codes = [&](uint32_t tile) { return shared.keys[tile / kChunkTiles % 2] + tile % kChunkTiles * kTile; };
    auto fetch_tile = [&](uint32_t tile) {
        const uint32_t *from = codes(tile);
        // Zeros take the place of a key that does not exist; the first one of this step lends its address.
        auto key = [&](uint32_t i, bool &exists) {
            exists = from[i] != kNoKey;
            return lists.key(exists ? from[i] : kFresh);
        };
        if (tile < tiles) KeyTile(shared.ring[tile % kRingTiles]).copy(key, lists.dim);
        copies_commit();
    };
    find_chunk(0);
    __syncthreads();
    fetch_tile(0), fetch_tile(1);
    Queries queries[Groups];
    Softmax all[Groups][2];
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g) {
        queries[g] = Part(heads, lists.dim, blockIdx.y * Groups + g).load_queries(q);
#pragma unroll
        for (uint32_t i = 0; i < 4 * kAccumulators; ++i) shared.total[g][i][threadIdx.x] = 0.f;
    }
    for (uint32_t tile = 0; tile < tiles;) {
        HeadsSoftmax chunk[Groups];
        const uint32_t first = tile, end = min(tiles, first + kChunkTiles);
        for (; tile < end; ++tile) {
            const KeyTile keys(shared.ring[tile % kRingTiles]);
            Accumulator s[Groups][2];
            copies_wait<kRingTiles - 1>();
            __syncwarp();
            score_tile(queries, keys, shared.scores[tile % 2], s);
            // The block has left the chunk before, whose place the next one takes.
            if (tile == first) find_chunk(first / kChunkTiles + 1);
            add_tile(s, keys, codes(tile), scale * kLog2E, chunk);
            __syncwarp();
            fetch_tile(tile + kRingTiles);
        }
#pragma unroll
        for (uint32_t g = 0; g < Groups; ++g) chunk[g].merge_into(all[g], shared.total[g]);
    }
    copies_wait_all();
    __syncwarp();
#pragma unroll
    for (uint32_t g = 0; g < Groups; ++g)
        store_heads(Part(heads, lists.dim, blockIdx.y * Groups + g), all[g], sink, shared.total[g], shared.ring[g], out);
}

#define HEADS_KERNEL(NAME, GROUPS, BLOCKS)                                                                             \
    /* Grid: tokens, groups of so many heads; a warp each 128 dimensions. */                                           \
    extern "C" __global__ __launch_bounds__(32 * kMostWarps, BLOCKS) void NAME(                                        \
        const bf16 *q,               /* [tokens, heads, dim] */                                                        \
        const bf16 *kv,              /* [tokens, dim] */                                                               \
        const bf16 *rings,           /* [slot_count, ring, dim] */                                                     \
        const bf16 *entries,         /* [entry_pages, per_page, dim]; not read if per_page is 0 */                     \
        const uint32_t *chosen,      /* [tokens, k]; not read if k is 0 */                                             \
        const float *sink,           /* [heads] */                                                                     \
        const uint32_t *qo_indptr,   /* [rows + 1] */                                                                  \
        const uint32_t *positions,   /* [tokens] */                                                                    \
        const uint32_t *slots,       /* [rows] */                                                                      \
        const uint32_t *page_tables, /* [rows, pages] */                                                               \
        bf16 *out,                   /* [tokens, heads, dim] */                                                        \
        uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t window, uint32_t ring, uint32_t entry_pages,      \
        uint32_t per_page, uint32_t k, uint32_t heads, uint32_t dim, float scale) {                                    \
        start_after_predecessor();                                                                                     \
        const Lists<bf16> lists = {{qo_indptr, positions, slots, page_tables, rows, pages},                            \
                                   kv, rings, entries, chosen, dim, window, ring, slot_count, entry_pages, per_page, k}; \
        attend_list<GROUPS>(lists, q, sink, out, heads, scale);                                                        \
    }
HEADS_KERNEL(sparse_attention_heads_16, 1, 3)
HEADS_KERNEL(sparse_attention_heads_32, 2, 2)

// Where the partial results of a chunk begin: its numerators [heads, dim], and its softmaxes [heads] behind those of all.
// `chunks`: of a token, at most.
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
extern "C" __global__ __launch_bounds__(32 * kMaxDim / kWarpDim, 2) void sparse_attention_chunks(
    const bf16 *q,               // [tokens, heads, dim]
    const bf16 *kv,              // [tokens, dim]
    const bf16 *rings,           // [slot_count, ring, dim]
    const bf16 *entries,         // [entry_pages, per_page, dim]; not read if per_page is 0
    const uint32_t *chosen,      // [tokens, k]; not read if k is 0
    const uint32_t *qo_indptr,   // [rows + 1]
    const uint32_t *positions,   // [tokens]
    const uint32_t *slots,       // [rows]
    const uint32_t *page_tables, // [rows, pages]
    float *partials,             // see Partials
    uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t window, uint32_t ring, uint32_t entry_pages,
    uint32_t per_page, uint32_t k, uint32_t heads, uint32_t dim, float scale) {
    start_after_predecessor();
    __shared__ MmaShared shared;
    Lists<bf16> lists = {{qo_indptr, positions, slots, page_tables, rows, pages},
                         kv, rings, entries, chosen, dim, window, ring, slot_count, entry_pages, per_page, k};
    List<bf16> list(lists, blockIdx.x);
    uint32_t first = blockIdx.z * kChunk;
    if (first >= list.keys) return;
    Part part(heads, dim);
    Queries queries = part.load_queries(q);
    Accumulator o[kAccumulators];
    Softmax chunk[2];
    find_keys(lists, list, first, shared.keys);
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

// Grid: tokens, heads.
extern "C" __global__ __launch_bounds__(kMergeThreads) void sparse_attention_merge(
    const float *partials,     // see Partials
    const float *sink,         // [heads]
    const uint32_t *qo_indptr, // [rows + 1]
    const uint32_t *positions, // [tokens]
    const uint32_t *slots,     // [rows]
    bf16 *out,                 // [tokens, heads, dim]
    uint32_t rows, uint32_t slot_count, uint32_t window, uint32_t per_page, uint32_t k, uint32_t heads, uint32_t dim,
    uint32_t chunks) {
    start_after_predecessor();
    Lists<bf16> lists = {};
    lists.batch = {qo_indptr, positions, slots, nullptr, rows, 0};
    lists.window = window, lists.slot_count = slot_count, lists.per_page = per_page, lists.k = k;
    List<bf16> list(lists, blockIdx.x);
    uint32_t head = blockIdx.y;
    for (uint32_t i = threadIdx.x; i < dim; i += blockDim.x) {
        Softmax all;
        float numerator = 0.f, before, own;
#pragma unroll 4
        for (uint32_t c = 0; c < (list.keys + kChunk - 1) / kChunk; ++c) {
            Partials from(const_cast<float *>(partials), gridDim.x, chunks, c, heads, dim);
            all.merge(from.softmaxes[head], before, own);
            numerator = fmaf(numerator, before, from.numerators[size_t(head) * dim + i] * own);
        }
        all.finish(sink[head], before);
        put(out + (size_t(blockIdx.x) * heads + head) * dim + i, numerator * before / all.sum);
    }
}

// Grid: tokens, groups of heads, one a warp.
extern "C" __global__ __launch_bounds__(kF32Threads) void sparse_attention_f32(
    const float *q,              // [tokens, heads, dim]
    const float *kv,             // [tokens, dim]
    const float *rings,          // [slot_count, ring, dim]
    const float *entries,        // [entry_pages, per_page, dim]; not read if per_page is 0
    const uint32_t *chosen,      // [tokens, k]; not read if k is 0
    const float *sink,           // [heads]
    const uint32_t *qo_indptr,   // [rows + 1]
    const uint32_t *positions,   // [tokens]
    const uint32_t *slots,       // [rows]
    const uint32_t *page_tables, // [rows, pages]
    float *out,                  // [tokens, heads, dim]
    uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t window, uint32_t ring, uint32_t entry_pages,
    uint32_t per_page, uint32_t k, uint32_t heads, uint32_t dim, float scale) {
    start_after_predecessor();
    __shared__ const float *keys[kChunk];
    constexpr uint32_t kOwn = kMaxDim / 32; // dimensions of a lane, at most
    Lists<float> lists = {{qo_indptr, positions, slots, page_tables, rows, pages},
                          kv, rings, entries, chosen, dim, window, ring, slot_count, entry_pages, per_page, k};
    List<float> list(lists, blockIdx.x);
    uint32_t lane = threadIdx.x % 32, steps = dim / 32, head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    size_t at = (size_t(blockIdx.x) * heads + min(head, heads - 1)) * dim + lane;
    float query[kOwn], o[kOwn] = {}, most = sink[min(head, heads - 1)], sum = 1.f; // begins with the sink
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) query[i] = i < steps ? q[at + 32 * i] : 0.f;
    for (uint32_t first = 0; first < list.keys; first += kChunk) {
        find_keys(lists, list, first, keys);
        for (uint32_t j = 0; j < min(list.keys - first, kChunk); ++j) {
            if (!keys[j]) continue;
            float key[kOwn], dot = 0.f;
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) {
                key[i] = i < steps ? keys[j][lane + 32 * i] : 0.f;
                dot = fmaf(query[i], key[i], dot);
            }
            float l = warp_sum(dot) * scale, larger = fmaxf(most, l);
            float rescale = expf(most - larger), p = expf(l - larger);
            most = larger, sum = fmaf(sum, rescale, p);
#pragma unroll
            for (uint32_t i = 0; i < kOwn; ++i) o[i] = fmaf(o[i], rescale, p * key[i]);
        }
    }
    if (head >= heads) return;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i)
        if (i < steps) out[at + 32 * i] = o[i] / sum;
}
