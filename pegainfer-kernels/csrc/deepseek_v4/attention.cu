// DeepSeek-V4's sparse attention: every head of a token over one list of keys, which are the values, too, with a sink.
//
//   l[k] = q · key[k] / sqrt(dim);  out = Σ_k exp(l[k]) key[k] / (Σ_k exp(l[k]) + exp(sink))
//
// The list of a token: its window, oldest first, of this step or from the ring of its slot, which may be longer than
// the window; then the compressed entries that it sees, ascending: none, all complete ones, or the chosen ones.
//
//   sparse_attention_heads: FlashAttention-2 (arXiv 2307.08691) by mma.sync. A block has a token and 16 or 32 heads
//                          (M), a warp 128 of the dimensions. An iteration takes 16 keys: each warp copies its
//                          dimensions of them to shared memory once for all heads and both GEMMs
//                          (deepseek_v4/key_ring.cuh), and the warps add up their parts of the scores through shared
//                          memory, in order.
//   sparse_attention_f32:    a warp has a head, and a lane every 32nd dimension
//
// Keys are taken in chunks of 64 of the list. In bf16 each chunk has a softmax of its own, and the chunks are merged in
// order, by one block or by the kernels for few tokens (deepseek_v4/attention_chunks.cu), with the same bits: what a
// token gets depends on its list alone. Weights are rounded to bf16 before the second GEMM, not in the denominator. All
// GPUs. Bound by shared memory and the issue of instructions. Reference: src/cpu/deepseek_v4/attention.rs.
#include "deepseek_v4/attention.cuh"
#include "abi/deepseek_v4_attention.h"

constexpr uint32_t kChunkTiles = kChunk / kTile;
constexpr uint32_t kRingTiles = 2; // tiles of keys in shared memory

// What a block of the kernels for whole lists has in shared memory: of 16 `Groups` heads.
template <uint32_t Groups> struct HeadsShared {
    uint8_t ring[kRingTiles][kTile][kKeyBytes];              // of keys; at the end of results
    float total[Groups][4 * kAccumulators][32 * kMostWarps]; // the merged chunks' numerators, each thread's own
    float4 scores[2][kMostWarps][Groups][2][32]; // of two iterations in turn: each warp's part of two tiles of 8 keys
    uint32_t keys[2][kChunk];                    // codes of two chunks in turn
};
static_assert(sizeof(HeadsShared<1>) == kOneGroupBytes && sizeof(HeadsShared<2>) == kTwoGroupBytes,
              "what launchers ask for");

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
__device__ __forceinline__ void add_tile(Accumulator (&s)[Groups][2], const KeyTile &tile, const uint32_t *codes,
                                         float scale, HeadsSoftmax (&chunk)[Groups]) {
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

// Writes the results of 16 heads. `staging`: [16] rows in shared memory, of which the warp uses its dimensions, as of a
// tile.
__device__ __forceinline__ void store_heads(const Part &part, Softmax (&all)[2], const float *sink,
                                            const float (&total)[4 * kAccumulators][32 * kMostWarps],
                                            const void *staging, bf16 *out) {
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
            *reinterpret_cast<uint4 *>(out + (size_t(blockIdx.x) * part.heads + head) * part.dim + part.first_dim +
                                       dim) = load_vector(rows.address(row, lane % 8) + lane % 16 / 8 * 128);
    }
}

// All keys of a token and 16 `Groups` heads.
template <uint32_t Groups>
__device__ __forceinline__ void attend_list(const Lists<bf16> &lists, const bf16 *q, const float *sink, bf16 *out,
                                            uint32_t heads, float scale) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &shared = *reinterpret_cast<HeadsShared<Groups> *>(memory);
    const List<bf16> list(lists, blockIdx.x);
    const uint32_t tiles = (list.keys + kTile - 1) / kTile;
    // Finds the keys of a chunk, if there is one: two chunks are known at a time.
    auto find_chunk = [&](uint32_t chunk) {
        if (chunk * kChunk >= list.keys) return;
        for (uint32_t i = threadIdx.x; i < kChunk; i += blockDim.x)
            shared.keys[chunk % 2][i] = list.code(lists, chunk * kChunk + i);
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
        store_heads(Part(heads, lists.dim, blockIdx.y * Groups + g), all[g], sink, shared.total[g], shared.ring[g],
                    out);
}

#define HEADS_KERNEL(NAME, GROUPS, BLOCKS)                                                                             \
    /* Grid: tokens, groups of so many heads; a warp each 128 dimensions. */                                           \
    extern "C" __global__ __launch_bounds__(32 * kMostWarps, BLOCKS) void NAME(                                        \
        const bf16 *q,                           /* [tokens, heads, dim] */                                            \
        LISTS_POINTERS(bf16), const float *sink, /* [heads] */                                                         \
        RAGGED_BATCH_POINTERS, bf16 *out,        /* [tokens, heads, dim] */                                            \
        LISTS_NUMBERS, uint32_t heads, uint32_t dim, float scale) {                                                    \
        start_after_predecessor();                                                                                     \
        const Lists<bf16> lists = LISTS(bf16, dim);                                                                    \
        attend_list<GROUPS>(lists, q, sink, out, heads, scale);                                                        \
    }
HEADS_KERNEL(sparse_attention_heads_16, 1, 3)
HEADS_KERNEL(sparse_attention_heads_32, 2, 2)

// Grid: tokens, groups of heads, one a warp.
extern "C" __global__ __launch_bounds__(kF32Threads) void sparse_attention_f32(
    const float *q, // [tokens, heads, dim]
    LISTS_POINTERS(float),
    const float *sink, // [heads]
    RAGGED_BATCH_POINTERS,
    float *out, // [tokens, heads, dim]
    LISTS_NUMBERS, uint32_t heads, uint32_t dim, float scale) {
    start_after_predecessor();
    __shared__ const float *keys[kChunk];
    constexpr uint32_t kOwn = kMaxDim / 32; // dimensions of a lane, at most
    Lists<float> lists = LISTS(float, dim);
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
