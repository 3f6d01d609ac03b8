// DeepSeek-V4's indexer: which k compressed entries a token attends to. For the entries that it sees, i < (position +
// 1) / ratio,
//
//   score[i] = Σ_h weights[h] relu(q[h] · entry[i])
//
// and of these the k largest, of equal ones the lower index; all of them if there are no more than k.
//
//   index_scores_bf16: heads x entries by mma.sync m16n8k16, a warp has 32 entries and all heads
//   index_scores_f32:  a warp has an entry and all heads
//   choose_entries:    one block a token: radix select of the k-th largest score, then one pass that writes the chosen
//                      indices in order. Named with a number, scores are read once and stay in registers
//
// Many tokens on Hopper have their scores by deepseek_v4/index_wgmma.cu. Scores go through the workspace, of as many
// tokens a launch as fit. A score depends on its token and entry alone, and its sum has one order for all grids. All
// GPUs. Bound by tensor cores at many tokens, by latency at few; the choice by its passes over registers, 25 us a block
// at 33,000 entries. Reference: src/cpu/deepseek_v4/index.rs.
//
// The selection goes by distances from the largest score's key, 11 bits first. Digits of the scores themselves, from
// the highest on, would have most scores in a few bins, and additions to one bin follow each other.
#include "deepseek_v4/index.cuh"
#include "common/frag.cuh"
#include "abi/deepseek_v4_index.h"
#include <type_traits>

constexpr uint32_t kColumns = 4;                // accumulators of a warp
constexpr uint32_t kWarpEntries = 8 * kColumns; // entries that it has at once
constexpr uint32_t kWarpsOfScores = kScoreThreads / 32;
constexpr uint32_t kWarpsOfChoice = kChooseThreads / 32;
// The first pass of the selection has bins of 2^15 neighbouring keys, 256 of them for a factor of two, of the scores
// from the largest down to a 256th of it.
constexpr uint32_t kNearShift = 15, kNearBins = 2048;

// Operands of the scores.
template <typename T> struct Scoring {
    const T *q;       // [tokens, heads, dim]
    const T *weights; // [tokens, heads]
    const T *entries; // [entry_pages, per_page, dim]
    float *scores;    // [gridDim.x, most]
    uint32_t heads, dim, ratio, entry_pages, k, most;
    OwnTokens own;
};

// Where entry `i` of a token begins; the last one in place of those that it does not see.
template <typename T>
__device__ __forceinline__ const T *entry_at(const Scoring<T> &x, const RaggedBatch &batch, const Sight &sight,
                                             uint32_t i) {
    uint32_t per_page = kPageTokens / x.ratio;
    return x.entries + entry_of(batch, sight.sequence.row, min(i, sight.entries - 1), per_page, x.entry_pages) * x.dim;
}

__device__ void score(const Scoring<bf16> &x, const RaggedBatch &batch) {
    Sight sight = sight_of(batch, x.own, x.ratio);
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
            float w[2] = {h < x.heads ? to_float(weights[h]) : 0.f, h + 8 < x.heads ? to_float(weights[h + 8]) : 0.f};
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

__device__ void score(const Scoring<float> &x, const RaggedBatch &batch) {
    Sight sight = sight_of(batch, x.own, x.ratio);
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
        const T *q,                           /* [tokens, heads, dim] */                                               \
        const T *weights,                     /* [tokens, heads] */                                                    \
        const T *entries,                     /* [entry_pages, 128 / ratio, dim] */                                    \
        RAGGED_BATCH_POINTERS, float *scores, /* [gridDim.x, most] */                                                  \
        uint32_t rows, uint32_t pages, uint32_t entry_pages, uint32_t ratio, uint32_t heads, uint32_t dim, uint32_t k, \
        uint32_t first_own, uint32_t rank, uint32_t ranks, uint32_t most) {                                            \
        start_after_predecessor();                                                                                     \
        score(                                                                                                         \
            Scoring<T>{                                                                                                \
                q, weights, entries, scores, heads, dim, ratio, entry_pages, k, most, {first_own, rank, ranks}},       \
            RAGGED_BATCH);                                                                                             \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)

// A radix selection of the k smallest distances in progress, where the distance of a score is that of its key from the
// largest one: those that begin like `prefix` in the bits of `mask` are still candidates, and the `missing` smallest of
// them belong to the chosen ones.
struct Selection {
    uint32_t prefix, mask, missing;
};

// Narrows the selection down to one of the bins, in which the block has counted the candidates with these bits from
// `shift` on. All threads call it; nothing changes if fewer than `missing` were counted. `totals`: [kWarpsOfChoice] in
// shared memory.
template <uint32_t Bins>
__device__ __forceinline__ void narrow_down(const uint32_t *bins, uint32_t shift, Selection &found, uint32_t *totals) {
    constexpr uint32_t kOwn = Bins < kChooseThreads ? 1 : Bins / kChooseThreads; // neighbouring bins of a thread
    const Selection s = found;
    uint32_t count[kOwn], own = 0;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; ++i) {
        const uint32_t bin = threadIdx.x * kOwn + i;
        own += count[i] = bin < Bins ? bins[bin] : 0;
    }
    const uint32_t inclusive = inclusive_scan(own);
    if (threadIdx.x % 32 == 31) totals[threadIdx.x / 32] = inclusive;
    __syncthreads();
    const uint32_t lane = threadIdx.x % 32;
    uint32_t before = reduce_lanes(lane < threadIdx.x / 32 ? totals[lane] : 0, 32, Add()) + inclusive - own;
#pragma unroll
    for (uint32_t i = 0; i < kOwn; before += count[i++])
        if (before < s.missing && s.missing <= before + count[i])
            found = {s.prefix | (threadIdx.x * kOwn + i) << shift, ~0u << shift, s.missing - before};
    __syncthreads();
}

// A warp's scores, neighbouring ones, as integers of their order, none of which is 0: that would be a NaN that no
// operation gives. A lane has every 32nd, in registers, or, Own = 0, in memory.
template <uint32_t Own> struct Keys {
    const float *scores; // of the warp
    uint32_t count;      // of the warp
    uint32_t own[Own > 0 ? Own : 1];

    __device__ __forceinline__ Keys(const float *scores, uint32_t count) : scores(scores), count(count) {
        if constexpr (Own > 0) {
#pragma unroll
            for (uint32_t j = 0; j < Own; ++j) {
                const uint32_t i = 32 * j + threadIdx.x % 32;
                own[j] = i < count ? ordered(scores[i]) : 0;
            }
        }
    }

    // Calls `each(i, key)` for this lane's scores in order; a warp calls it together for 32 neighbours, with key 0
    // behind the last one.
    template <typename Each> __device__ __forceinline__ void for_each(Each each) const {
        const uint32_t lane = threadIdx.x % 32;
        if constexpr (Own > 0) {
#pragma unroll
            for (uint32_t j = 0; j < Own; ++j) {
                if (32 * j >= count) break;
                each(32 * j + lane, own[j]);
            }
        } else {
#pragma unroll 8
            for (uint32_t i = lane; i < count + lane; i += 32) each(i, i < count ? ordered(scores[i]) : 0);
        }
    }
};

// Shared memory of a choice.
struct SelectionShared {
    uint32_t bins[kNearBins], larger[kWarpsOfChoice], equal[kWarpsOfChoice];
    Selection found;
};

// Finds the key of the last chosen score, and how many scores with that key are chosen.
template <uint32_t Own>
__device__ __forceinline__ void select_last(const Keys<Own> &keys, uint32_t k, SelectionShared &shared, uint32_t &last,
                                            uint32_t &ties) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t most = 0;
    keys.for_each([&](uint32_t, uint32_t key) { most = max(most, key); });
    most = __reduce_max_sync(kAll, most);
    if (lane == 0) shared.larger[threadIdx.x / 32] = most;
    if (threadIdx.x == 0) shared.found = {0, 0, k};
    __syncthreads();
    most = __reduce_max_sync(kAll, shared.larger[lane]);
    // Counts the candidates in bins of 2^shift distances each, and narrows the selection down to one of these.
    auto pass = [&](auto width, uint32_t shift) {
        constexpr uint32_t kWidth = decltype(width)::value;
        for (uint32_t i = threadIdx.x; i < kWidth; i += kChooseThreads) shared.bins[i] = 0;
        __syncthreads();
        const Selection s = shared.found;
        keys.for_each([&](uint32_t, uint32_t key) {
            const uint32_t distance = most - key, bin = (distance & ~s.mask) >> shift;
            const bool candidate = key != 0 && (distance & s.mask) == s.prefix;
            if (candidate && bin < kWidth) atomicAdd(&shared.bins[bin], 1);
        });
        __syncthreads();
        narrow_down<kWidth>(shared.bins, shift, shared.found, shared.equal);
    };
    pass(std::integral_constant<uint32_t, kNearBins>(), kNearShift);
    if (shared.found.mask != 0) {
        pass(std::integral_constant<uint32_t, 256>(), kNearShift - 8);
        pass(std::integral_constant<uint32_t, 128>(), 0);
    } else {
        // The last chosen score is farther from the largest.
#pragma unroll 1
        for (uint32_t shift = 32; shift > 0;) pass(std::integral_constant<uint32_t, 256>(), shift -= 8);
    }
    last = most - shared.found.prefix, ties = shared.found.missing;
}

// Writes the indices of all scores above `last` and of the first `ties` that are equal, in order. `first`: index of the
// warp's first score.
template <uint32_t Own>
__device__ __forceinline__ void write_chosen(const Keys<Own> &keys, uint32_t last, uint32_t ties, uint32_t first,
                                             SelectionShared &shared, uint32_t *chosen) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t more = 0, same = 0;
    keys.for_each([&](uint32_t, uint32_t key) { more += key > last, same += key == last; });
    more = reduce_lanes(more, 32, Add()), same = reduce_lanes(same, 32, Add());
    if (lane == 0) shared.larger[warp] = more, shared.equal[warp] = same;
    __syncthreads();
    more = lane < warp ? shared.larger[lane] : 0, same = lane < warp ? shared.equal[lane] : 0;
    more = reduce_lanes(more, 32, Add()), same = reduce_lanes(same, 32, Add());
    uint32_t to = more + min(same, ties);
    const uint32_t before = (1u << lane) - 1;
    keys.for_each([&](uint32_t i, uint32_t key) {
        if (!__any_sync(kAll, key >= last)) return;
        const uint32_t tied = __ballot_sync(kAll, key == last);
        const bool taken = key > last || (key == last && same + __popc(tied & before) < ties);
        const uint32_t all = __ballot_sync(kAll, taken);
        if (taken) chosen[to + __popc(all & before)] = first + i;
        to += __popc(all), same += __popc(tied);
    });
}

// The k best of a token's scores.
template <uint32_t Own>
__device__ __forceinline__ void choose(const RaggedBatch &batch, const float *scores, uint32_t *chosen, uint32_t ratio,
                                       uint32_t k, const OwnTokens &own, uint32_t most) {
    __shared__ SelectionShared shared;
    const uint32_t n = sight_of(batch, own, ratio).entries;
    chosen += size_t(own.first + blockIdx.x) * k, scores += size_t(blockIdx.x) * most;
    if (n <= k) {
        for (uint32_t i = threadIdx.x; i < k; i += kChooseThreads) chosen[i] = i < n ? i : kNoEntry;
        return;
    }
    // A warp has neighbouring entries, so that what it writes lies behind what the warps before it write.
    const uint32_t share = (n + kChooseThreads - 1) / kChooseThreads * 32, first = min(threadIdx.x / 32 * share, n);
    const Keys<Own> keys(scores + first, min(share, n - first));
    uint32_t last, ties;
    select_last(keys, k, shared, last, ties);
    write_chosen(keys, last, ties, first, shared, chosen);
}
static_assert(kWarpsOfChoice == 32, "a lane adds up the counts of a warp");

// As many scores as the name says a lane; any number of them without.
#define CHOOSE_KERNEL(NAME, OWN)                                                                                       \
    /* Grid: tokens of the launch. */                                                                                  \
    extern "C" __global__ __launch_bounds__(kChooseThreads) void NAME(                                                 \
        const float *scores,                     /* [gridDim.x, most] */                                               \
        RAGGED_BATCH_POINTERS, uint32_t *chosen, /* [own tokens, k] */                                                 \
        uint32_t rows, uint32_t pages, uint32_t ratio, uint32_t k, uint32_t first_own, uint32_t rank, uint32_t ranks,  \
        uint32_t most) {                                                                                               \
        start_after_predecessor();                                                                                     \
        choose<OWN>(RAGGED_BATCH, scores, chosen, ratio, k, {first_own, rank, ranks}, most);                           \
    }
CHOOSE_KERNEL(choose_entries, 0)
CHOOSE_KERNEL(choose_entries_8, 8)
CHOOSE_KERNEL(choose_entries_40, 40)
