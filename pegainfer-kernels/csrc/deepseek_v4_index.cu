// DeepSeek-V4's indexer: which k compressed entries a token attends to. For the entries that it sees, i < (position + 1) /
// ratio,
//
//   score[i] = Σ_h weights[h] relu(q[h] · entry[i])
//
// and of these the k largest, of equal ones the lower index; all of them if there are no more than k.
//
//   index_scores_bf16: heads x entries by mma.sync m16n8k16, a warp has 32 entries and all heads
//   index_scores_f32:  a warp has an entry and all heads
//   choose_entries:    one block a token: radix select of the k-th largest score, 8 bits a pass, then one pass that
//                      writes the chosen indices in order
//
// Scores go through the workspace, of as many tokens a launch as fit. A score depends on its token and entry alone, and its
// sum has one order for all grids. All GPUs. Bound by tensor cores at many tokens, by latency at few. Reference:
// src/cpu/deepseek_v4/index.rs.
#include "deepseek_v4_batch.cuh"
#include "frag.cuh"
#include "abi/deepseek_v4_index.h"

using namespace limits::deepseek_v4_attention;

constexpr uint32_t kColumns = 4;                   // accumulators of a warp
constexpr uint32_t kWarpEntries = 8 * kColumns;    // entries that it has at once
constexpr uint32_t kWarpsOfScores = kScoreThreads / 32;
constexpr uint32_t kWarpsOfChoice = kChooseThreads / 32;
constexpr uint32_t kBins = 256;                    // of a pass of the selection

// What a token of this launch sees.
struct Sight {
    Sequence sequence;
    uint32_t token, entries;
};

__device__ __forceinline__ Sight sight_of(const Batch &batch, uint32_t first_token, uint32_t ratio) {
    Sight sight;
    sight.token = first_token + blockIdx.x;
    sight.sequence = sequence_of(batch, sight.token, limits::kv_cache::kNoSlot);
    sight.entries = sight.sequence.pads() ? 0 : (batch.positions[sight.token] + 1) / ratio;
    return sight;
}

// Operands of the scores.
template <typename T> struct Scoring {
    const T *q;       // [tokens, heads, dim]
    const T *weights; // [tokens, heads]
    const T *entries; // [entry_pages, per_page, dim]
    float *scores;    // [gridDim.x, most]
    uint32_t heads, dim, ratio, entry_pages, first_token, k, most;
};

// Where entry `i` of a token begins; the last one in place of those that it does not see.
template <typename T>
__device__ __forceinline__ const T *entry_at(const Scoring<T> &x, const Batch &batch, const Sight &sight, uint32_t i) {
    uint32_t per_page = kPageTokens / x.ratio;
    return x.entries +
           entry_of(batch, sight.sequence.row, min(i, sight.entries - 1), per_page, x.entry_pages) * x.dim;
}

__device__ void score(const Scoring<bf16> &x, const Batch &batch) {
    Sight sight = sight_of(batch, x.first_token, x.ratio);
    if (sight.entries <= x.k) return; // nothing to choose
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    const bf16 *q = x.q + size_t(sight.token) * x.heads * x.dim + 8 * quad;
    const bf16 *weights = x.weights + size_t(sight.token) * x.heads;
    uint32_t step = gridDim.y * kWarpsOfScores * kWarpEntries;
    for (uint32_t e = (blockIdx.y * kWarpsOfScores + warp) * kWarpEntries; e < sight.entries; e += step) {
        const bf16 *entry[kColumns];
#pragma unroll
        for (uint32_t n = 0; n < kColumns; ++n) entry[n] = entry_at(x, batch, sight, e + 8 * n + group) + 8 * quad;
        float sum[kColumns][2] = {};
        for (uint32_t h = group; h < x.heads + group; h += 16) {
            // Rows of A beyond the heads repeat the last one, without weight.
            const bf16 *low = q + size_t(min(h, x.heads - 1)) * x.dim;
            const bf16 *high = q + size_t(min(h + 8, x.heads - 1)) * x.dim;
            float w[2] = {h < x.heads ? to_float(weights[h]) : 0.f,
                          h + 8 < x.heads ? to_float(weights[h + 8]) : 0.f};
            Accumulator dot[kColumns] = {};
#pragma unroll 4
            for (uint32_t c = 0; c < x.dim; c += 32) {
                uint4 a = load16(low + c), b = load16(high + c);
#pragma unroll
                for (uint32_t n = 0; n < kColumns; ++n) mma32(dot[n], a, b, load16(entry[n] + c));
            }
#pragma unroll
            for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
                for (uint32_t j = 0; j < 4; ++j) sum[n][j % 2] = fmaf(w[j / 2], fmaxf(dot[n][j], 0.f), sum[n][j % 2]);
        }
#pragma unroll
        for (uint32_t n = 0; n < kColumns; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                float total = reduce_column(sum[n][j], Add());
                uint32_t i = e + 8 * n + 2 * quad + j;
                if (group == 0 && i < sight.entries) x.scores[size_t(blockIdx.x) * x.most + i] = total;
            }
    }
}

__device__ void score(const Scoring<float> &x, const Batch &batch) {
    Sight sight = sight_of(batch, x.first_token, x.ratio);
    if (sight.entries <= x.k) return; // nothing to choose
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float *weights = x.weights + size_t(sight.token) * x.heads;
    for (uint32_t i = blockIdx.y * kWarpsOfScores + warp; i < sight.entries; i += gridDim.y * kWarpsOfScores) {
        const float *entry = entry_at(x, batch, sight, i), *q = x.q + size_t(sight.token) * x.heads * x.dim;
        float total = 0.f;
        for (uint32_t h = 0; h < x.heads; ++h, q += x.dim) {
            float dot = 0.f;
            for (uint32_t c = lane; c < x.dim; c += 32) dot = fmaf(q[c], entry[c], dot);
            total = fmaf(weights[h], fmaxf(warp_sum(dot), 0.f), total);
        }
        if (lane == 0) x.scores[size_t(blockIdx.x) * x.most + i] = total;
    }
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens of the launch, parts of the entries. */                                                            \
    extern "C" __global__ __launch_bounds__(kScoreThreads) void index_scores_##SUFFIX(                                 \
        const T *q,                    /* [tokens, heads, dim] */                                                      \
        const T *weights,              /* [tokens, heads] */                                                           \
        const T *entries,              /* [entry_pages, 128 / ratio, dim] */                                           \
        const uint32_t *qo_indptr,     /* [rows + 1] */                                                                \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const uint32_t *slots,         /* [rows] */                                                                    \
        const uint32_t *page_tables,   /* [rows, pages] */                                                             \
        float *scores,                 /* [gridDim.x, most], of the tokens from first_token on */                      \
        uint32_t rows, uint32_t pages, uint32_t entry_pages, uint32_t ratio, uint32_t heads, uint32_t dim, uint32_t k, \
        uint32_t first_token, uint32_t most) {                                                                         \
        start_after_predecessor();                                                                                     \
        score(Scoring<T>{q, weights, entries, scores, heads, dim, ratio, entry_pages, first_token, k, most},           \
              {qo_indptr, positions, slots, page_tables, rows, pages});                                                \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)

// A radix selection in progress: keys that begin like `prefix` in the bits of `mask` are still candidates, and the
// `missing` largest of them belong to the chosen ones.
struct Selection {
    uint32_t prefix, mask, missing;
};

// Takes 8 more bits of the key of the last chosen score. `bins`: [kBins]; `found`: of the block.
__device__ void narrow_down(const float *__restrict__ scores, uint32_t n, uint32_t shift, uint32_t *bins,
                            Selection *found) {
    Selection s = *found;
    for (uint32_t i = threadIdx.x; i < kBins; i += kChooseThreads) bins[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < n; i += kChooseThreads) {
        uint32_t key = ordered(scores[i]);
        if ((key & s.mask) == s.prefix) atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        // Lane 0 has the eight highest bins.
        constexpr uint32_t kBinsOfLane = kBins / 32;
        uint32_t top = kBins - 1 - threadIdx.x * kBinsOfLane, own = 0;
        for (uint32_t i = 0; i < kBinsOfLane; ++i) own += bins[top - i];
        uint32_t before = inclusive_scan(own) - own;
        if (before < s.missing && s.missing <= before + own) {
            while (before + bins[top] < s.missing) before += bins[top--];
            *found = {s.prefix | top << shift, s.mask | (kBins - 1) << shift, s.missing - before};
        }
    }
    __syncthreads();
}

// Grid: tokens of the launch.
extern "C" __global__ __launch_bounds__(kChooseThreads) void choose_entries(
    const float *scores,         // [gridDim.x, most], of the tokens from first_token on
    const uint32_t *qo_indptr,   // [rows + 1]
    const uint32_t *positions,   // [tokens]
    const uint32_t *slots,       // [rows]
    const uint32_t *page_tables, // [rows, pages], not read
    uint32_t *chosen,            // [tokens, k]
    uint32_t rows, uint32_t pages, uint32_t ratio, uint32_t k, uint32_t first_token, uint32_t most) {
    start_after_predecessor();
    __shared__ uint32_t bins[kBins], larger[kWarpsOfChoice], equal[kWarpsOfChoice];
    __shared__ Selection found;
    Sight sight = sight_of({qo_indptr, positions, slots, page_tables, rows, pages}, first_token, ratio);
    uint32_t n = sight.entries;
    chosen += size_t(sight.token) * k, scores += size_t(blockIdx.x) * most;
    if (n <= k) {
        for (uint32_t i = threadIdx.x; i < k; i += kChooseThreads) chosen[i] = i < n ? i : kNoEntry;
        return;
    }
    if (threadIdx.x == 0) found = {0, 0, k};
    __syncthreads();
    for (int shift = 24; shift >= 0; shift -= 8) narrow_down(scores, n, shift, bins, &found);
    uint32_t last = found.prefix, ties = found.missing;

    // A warp has neighbouring entries, so that what it writes lies behind what the warps before it write.
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = (n + kChooseThreads - 1) / kChooseThreads * 32;
    uint32_t first = min(warp * share, n), end = min(first + share, n), more = 0, same = 0;
#pragma unroll 8
    for (uint32_t i = first + lane; i < end; i += 32) {
        uint32_t key = ordered(scores[i]);
        more += key > last, same += key == last;
    }
    more = reduce_lanes(more, 32, Add()), same = reduce_lanes(same, 32, Add());
    if (lane == 0) larger[warp] = more, equal[warp] = same;
    __syncthreads();
    more = same = 0;
    for (uint32_t w = 0; w < warp; ++w) more += larger[w], same += equal[w];
    uint32_t to = more + min(same, ties), before = (1u << lane) - 1;
#pragma unroll 4
    for (uint32_t i = first; i < end; i += 32) {
        uint32_t key = i + lane < end ? ordered(scores[i + lane]) : 0;
        bool inside = i + lane < end;
        uint32_t tied = __ballot_sync(kAll, inside && key == last);
        bool taken = inside && (key > last || (key == last && same + __popc(tied & before) < ties));
        uint32_t all = __ballot_sync(kAll, taken);
        if (taken) chosen[to + __popc(all & before)] = i + lane;
        to += __popc(all), same += __popc(tied);
    }
}
