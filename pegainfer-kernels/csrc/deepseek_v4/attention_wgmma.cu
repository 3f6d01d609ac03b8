// DeepSeek-V4's sparse attention at many tokens, on Hopper: that of deepseek_v4/attention.cu,
//
//   l[k] = q · key[k] / sqrt(dim);  out = Σ_k exp(l[k]) key[k] / (Σ_k exp(l[k]) + exp(sink))
//
// for 16 or 32 heads of 512 dimensions in bf16. A block has a token and all of its heads, one warpgroup multiplies, and
// one fetches; two blocks share a multiprocessor, so that one multiplies while the other one has its softmax. Keys are
// the rows of both GEMMs, in tiles of 64:
//
//   sᵀ[keys, heads] = key qᵀ, keys as operand A of wgmma, heads as columns
//   oᵀ[dims, heads] += keyᵀ pᵀ, the same tile as operand A with its columns for rows, weights p through shared memory
//
// A tile is eight slabs of 64 dimensions. Slabs go through a ring in shared memory: the second GEMM has done with a
// slab when its 64 dimensions are added, and the next tile's take its place. Four warps gather keys by cp.async, 128
// bytes of a key at a time.
//
// Softmax is online (arXiv 1805.02867), from tile to tile, and each head's maximum and sum are those of all four warps,
// in order: what a token gets depends on its list alone, but has other bits than by the kernels for few tokens. Weights
// are rounded to bf16 before the second GEMM, not in the denominator. Bound by reads of the L2 and of shared memory, 64
// and 256 KB a tile. Reference: src/cpu/deepseek_v4/attention.rs.
#include "deepseek_v4/attention.cuh"
#include "common/hopper.cuh"
#include "abi/deepseek_v4_attention_wgmma.h"

using namespace limits::deepseek_v4_attention_wgmma;

constexpr uint32_t kSlabs = kMaxDim / 64; // of a tile
constexpr uint32_t kWarps = 4;            // of a warpgroup
constexpr uint32_t kSlabBytes = kTileKeys * 128;
constexpr uint32_t kFetchers = 1;     // the warpgroup that fetches; the other one multiplies
constexpr uint32_t kWeightsReady = 1; // the named barrier of the consumers
// Of a thread after setmaxnreg: 128 * (48 + 208) for each of two blocks.
constexpr int kFetcherRegisters = 48, kConsumerRegisters = 208;

template <uint32_t Heads> struct ListShared {
    uint8_t q[kSlabs][Heads * 128]; // queries; at the end results
    uint8_t keys[kRing][kSlabBytes];
    uint8_t p[Heads * 128];        // weights of a tile's keys
    float of_warps[kWarps][Heads]; // maxima of a tile, or sums
    uint32_t codes[2][kTileKeys];  // of the keys of two tiles in turn
    uint64_t q_full, codes_full[2], full[kRing], empty[kRing];
};
static_assert(sizeof(ListShared<32>) <= kSharedBytes32 && sizeof(ListShared<16>) <= kSharedBytes16);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Tiles of a list.
__device__ __forceinline__ uint32_t tiles_of(const List<bf16> &list) { return (list.keys + kTileKeys - 1) / kTileKeys; }

// Gathers the keys of all tiles: a warp has 16 of each, a lane vectors of every fourth of these.
template <uint32_t Heads>
__device__ void fetch_keys(ListShared<Heads> &shared, const Lists<bf16> &lists, const List<bf16> &list) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps, tiles = tiles_of(list);
    const uint32_t own = warp * 16 + lane % 16; // the key of a tile that this lane looks up
    const uint32_t row = warp * 16 + lane / 8;  // the first one that it copies
    // Rows 4 further on have their vectors exchanged in pairs of four.
    const uint32_t place = row * 128 + (lane % 8 ^ row % 8) * 16;
    Ring<kRing> slot;
    uint32_t next = list.code(lists, own);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t code = next;
        if (tile + 1 < tiles) next = list.code(lists, (tile + 1) * kTileKeys + own);
        const bf16 *from[4];
        bool exists[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t of_row = __shfl_sync(kAll, code, lane / 8 + 4 * i);
            exists[i] = of_row != kNoKey;
            from[i] = lists.key(exists[i] ? of_row : kFresh) +
                      lane % 8 * kVector; // zeros take the place of keys that do not exist
        }
#pragma unroll 1
        for (uint32_t slab = 0; slab < kSlabs; ++slab, slot.next()) {
            wait(&shared.empty[slot.index], slot.parity ^ 1);
            if (slab == 0) {
                // The tile two before this one was multiplied.
                if (lane < 16) shared.codes[tile % 2][own] = code;
                __syncwarp();
                if (lane == 0) arrive(&shared.codes_full[tile % 2]);
            }
            const uint32_t to = shared_address(shared.keys[slot.index]) + place;
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i)
                copy16_or_zero((to ^ i % 2 * 64) + i * 512, from[i] + slab * 64, exists[i]);
            arrive_after_copies(&shared.full[slot.index]);
        }
    }
}

// A barrier of the warpgroup that multiplies.
__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync %0, 128;" ::"n"(kWeightsReady) : "memory"); }

// What one lane of a warp holds of columns (heads): an accumulator of [64, Heads] has columns 8 i + 2 quad + j, i <
// Heads / 8, j < 2, in two rows. `Columns` values of a lane, that of i and j at 2 i + j.
template <uint32_t Heads> constexpr uint32_t kColumns = Heads / 4;

// Reduces each column over the eight lanes that have it, and gives lane group g that of 2 i + j = g % Columns.
template <uint32_t N, typename Op> __device__ __forceinline__ float reduce_columns(float (&x)[N], Op op) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t half = N / 2, step = 2 * N; half > 0; half /= 2, step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (uint32_t i = 0; i < half; ++i) {
            const float keep = upper ? x[i + half] : x[i], give = upper ? x[i] : x[i + half];
            x[i] = op(keep, __shfl_xor_sync(kAll, give, step));
        }
    }
    float all = x[0];
    if (N < 8) all = op(all, __shfl_xor_sync(kAll, all, 16));
    return all;
}

// The value of column `c` of this lane, from the lane that has it after `reduce_columns`.
__device__ __forceinline__ float of_column(float x, uint32_t c) {
    return __shfl_sync(kAll, x, 4 * c + threadIdx.x % 4);
}

// Stores an accumulator's transpose as bf16: row h of `to`, of 128 bytes with the swizzle, gets column h.
template <uint32_t Heads> __device__ __forceinline__ void store_transposed(const float (&d)[Heads / 2], uint32_t to) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kWarps;
    const uint32_t at = to + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (uint32_t i = 0; i < Heads / 8; i += 2) {
        const uint32_t pairs[4] = {narrow(d[4 * i], d[4 * i + 1]), narrow(d[4 * i + 2], d[4 * i + 3]),
                                   narrow(d[4 * i + 4], d[4 * i + 5]), narrow(d[4 * i + 6], d[4 * i + 7])};
        store_columns(at + i * 8 * 128, pairs);
    }
}

// The warpgroup that multiplies. Of a lane: its columns' sums, and maximum and base of the column that `reduce_columns`
// gives it.
template <uint32_t Heads> struct Attention {
    ListShared<Heads> &shared;
    float o[kSlabs][Heads / 2] = {};
    float sums[kColumns<Heads>] = {};
    float most = -INFINITY; // in powers of two
    Ring<kRing> slot;

    __device__ __forceinline__ explicit Attention(ListShared<Heads> &shared) : shared(shared) {}

    // The head of the column that `reduce_columns` gives this lane.
    static __device__ __forceinline__ uint32_t head() {
        const uint32_t c = threadIdx.x / 4 % kColumns<Heads>;
        return c / 2 * 8 + threadIdx.x % 4 * 2 + c % 2;
    }

    // A value of each warp for the head of this lane, `x` of its own, combined in order. Has a barrier.
    template <typename Op> __device__ __forceinline__ float exchange(float x, Op op) {
        shared.of_warps[threadIdx.x / 32 % kWarps][head()] = x;
        consumers_meet();
        float all = shared.of_warps[0][head()];
#pragma unroll
        for (uint32_t w = 1; w < kWarps; ++w) all = op(all, shared.of_warps[w][head()]);
        return all;
    }

    // Scores of a tile's keys, before the softmax.
    __device__ __forceinline__ void score(float (&s)[Heads / 2]) {
        Ring<kRing> at = slot;
#pragma unroll
        for (uint32_t slab = 0; slab < kSlabs; ++slab, at.next()) {
            wait(&shared.full[at.index], at.parity);
            fence_shared_for_async(); // of what was copied by cp.async
            const uint64_t a = descriptor(shared_address(shared.keys[at.index]), 0, 1024);
            const uint64_t b = descriptor(shared_address(shared.q[slab]), 0, 1024);
            wgmma_fence();
            if (slab == 0) wgmma<true>(s, a, b);
            else wgmma<false>(s, a, b);
#pragma unroll
            for (uint32_t i = 1; i < 4; ++i) wgmma<false>(s, a + 2 * i, b + 2 * i);
            wgmma_commit();
        }
        wgmma_wait<0>();
    }

    // Replaces scores by weights, of which the bf16 go to shared memory. `codes`: of the tile's keys.
    __device__ __forceinline__ void weigh(float (&s)[Heads / 2], const uint32_t *codes, float scale) {
        constexpr uint32_t N = kColumns<Heads>;
        const uint32_t row = threadIdx.x / 32 % kWarps * 16 + threadIdx.x % 32 / 4;
        const bool present[2] = {codes[row] != kNoKey, codes[row + 8] != kNoKey};
        float top[N];
#pragma unroll
        for (uint32_t c = 0; c < N; ++c) {
            float &low = s[c / 2 * 4 + c % 2], &high = s[c / 2 * 4 + 2 + c % 2];
            low = present[0] ? low * scale : -INFINITY, high = present[1] ? high * scale : -INFINITY;
            top[c] = fmaxf(low, high);
        }
        const float largest = fmaxf(most, exchange(reduce_columns(top, Max()), Max()));
        const float base = largest == -INFINITY ? 0.f : largest, rescale = exp2_approx(most - base);
        const bool changed = __any_sync(kAll, most != largest);
        most = largest;
        if (changed) {
#pragma unroll
            for (uint32_t c = 0; c < N; ++c) {
                const float factor = of_column(rescale, c);
                sums[c] *= factor;
#pragma unroll
                for (uint32_t slab = 0; slab < kSlabs; ++slab)
                    o[slab][c / 2 * 4 + c % 2] *= factor, o[slab][c / 2 * 4 + 2 + c % 2] *= factor;
            }
        }
#pragma unroll
        for (uint32_t c = 0; c < N; ++c) {
            float &low = s[c / 2 * 4 + c % 2], &high = s[c / 2 * 4 + 2 + c % 2];
            const float own = of_column(base, c);
            low = exp2_approx(low - own), high = exp2_approx(high - own);
            sums[c] += low + high;
        }
        store_transposed<Heads>(s, shared_address(shared.p));
        fence_shared_for_async();
        consumers_meet();
    }

    // Adds the weighted keys, and gives their slabs back.
    __device__ __forceinline__ void add() {
        const uint64_t b = descriptor(shared_address(shared.p), 0, 1024);
        Ring<kRing> at = slot;
        wgmma_fence();
#pragma unroll
        for (uint32_t slab = 0; slab < kSlabs; ++slab, at.next()) {
            const uint64_t a = descriptor(shared_address(shared.keys[at.index]), 1024, 1024);
#pragma unroll
            for (uint32_t i = 0; i < kTileKeys / 16; ++i) wgmma_of_columns(o[slab], a + i * (16 * 128 / 16), b + 2 * i);
            wgmma_commit();
        }
        give_back<kSlabs - 1>();
    }

    // Gives back a slab that all but the last `Left` groups of wgmma were for, then those of these.
    template <int Left> __device__ __forceinline__ void give_back() {
        wgmma_wait<Left>();
        if (threadIdx.x % 32 == 0) arrive(&shared.empty[slot.index]);
        slot.next();
        if constexpr (Left > 0) give_back<Left - 1>();
    }

    // Divides by the sums with the sink, and leaves the results in place of the queries.
    __device__ __forceinline__ void finish(float sink) {
        const float sum = exchange(reduce_columns(sums, Add()), Add());
        const float of_sink = sink * kLog2E, base = fmaxf(most, of_sink), own = exp2_approx(most - base);
        const float factor = own / fmaf(sum, own, exp2_approx(of_sink - base));
#pragma unroll
        for (uint32_t c = 0; c < kColumns<Heads>; ++c) {
            const float of_head = of_column(factor, c);
#pragma unroll
            for (uint32_t slab = 0; slab < kSlabs; ++slab)
                o[slab][c / 2 * 4 + c % 2] *= of_head, o[slab][c / 2 * 4 + 2 + c % 2] *= of_head;
        }
#pragma unroll
        for (uint32_t slab = 0; slab < kSlabs; ++slab) store_transposed<Heads>(o[slab], shared_address(shared.q[slab]));
        fence_shared_for_async();
        consumers_meet();
    }
};

template <uint32_t Heads> __device__ __forceinline__ void init_barriers(ListShared<Heads> &shared) {
    if (threadIdx.x == 0) {
        barrier_init(&shared.q_full, 1);
        for (uint32_t i = 0; i < 2; ++i) barrier_init(&shared.codes_full[i], kWarps);
        for (uint32_t i = 0; i < kRing; ++i) barrier_init(&shared.full[i], 128), barrier_init(&shared.empty[i], kWarps);
        barriers_ready();
    }
    __syncthreads();
}

template <uint32_t Heads>
__device__ __forceinline__ void attend(const TensorMap &q, const TensorMap &out, const Lists<bf16> &lists,
                                       const float *sink, float scale) {
    extern __shared__ __align__(1024) uint8_t memory[];
    auto &shared = *reinterpret_cast<ListShared<Heads> *>(memory);
    init_barriers(shared);
    start_after_predecessor();
    const uint32_t token = blockIdx.x;
    if (threadIdx.x / 128 == kFetchers) {
        registers_lower<kFetcherRegisters>();
        if (threadIdx.x % 128 == 0) {
            arrive_expecting(&shared.q_full, sizeof shared.q);
            for (uint32_t slab = 0; slab < kSlabs; ++slab)
                copy_box(shared_address(shared.q[slab]), q, slab * 64, token * Heads, &shared.q_full);
        }
        __syncwarp();
        const List<bf16> list(lists, token);
        fetch_keys(shared, lists, list);
        return;
    }
    registers_raise<kConsumerRegisters>();
    const uint32_t tiles = tiles_of(List<bf16>(lists, token));
    Attention<Heads> attention(shared);
    wait(&shared.q_full, 0);
    for (uint32_t tile = 0; tile < tiles; ++tile) {
        float s[Heads / 2];
        attention.score(s);
        wait(&shared.codes_full[tile % 2], tile / 2 % 2);
        attention.weigh(s, shared.codes[tile % 2], scale * kLog2E);
        attention.add();
    }
    attention.finish(sink[Attention<Heads>::head()]);
    if (threadIdx.x == 0) {
        for (uint32_t slab = 0; slab < kSlabs; ++slab)
            store_box(out, slab * 64, token * Heads, shared_address(shared.q[slab]));
        stores_wait<true>();
    }
}
#endif

#define ATTENTION_KERNEL(NAME, HEADS)                                                                                  \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kThreads, 2) void NAME(                                                    \
        const __grid_constant__ TensorMap q,     /* [tokens * heads, dim], boxes of all heads */                       \
        const __grid_constant__ TensorMap out,   /* the same */                                                        \
        LISTS_POINTERS(bf16), const float *sink, /* [heads] */                                                         \
        RAGGED_BATCH_POINTERS, LISTS_NUMBERS, float scale) {                                                           \
        ATTEND(HEADS)                                                                                                  \
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ATTEND(HEADS)                                                                                                  \
    const Lists<bf16> lists = LISTS(bf16, kMaxDim);                                                                    \
    attend<HEADS>(q, out, lists, sink, scale);
#else
#define ATTEND(HEADS)
#endif
ATTENTION_KERNEL(sparse_attention_wgmma_16, 16)
ATTENTION_KERNEL(sparse_attention_wgmma_32, 32)
