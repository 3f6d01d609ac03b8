// Where the head of a row ends that holds so many tokens (top-k), or so much weight (top-p): a selection without a
// sort.
//
// The order is "larger logit first, then the lower id". A histogram over equal ranges of logits, built once, says in
// which range the head ends; the few tokens of that range are gathered in one block and compared with each other. A
// range with too many of them (ties, or a flat row) is halved by keys first (binary search).
#pragma once
#include "rows/row.cuh"

// One of each for a thread.
constexpr uint32_t kBins = kThreads; // of the histogram
constexpr uint32_t kList = kThreads; // tokens that are compared with each other

// The last token of a head, and the weight of the head.
struct Cut {
    uint64_t key;
    uint64_t mass;
};

struct Histogram {
    // Of this block: tokens, and the two halves of their weight.
    uint32_t count[kBins], low[kBins], high[kBins];
    // Of the row, this bin and all before it.
    uint32_t counts[kBins];
    uint64_t masses[kBins];
    // Scan.
    uint32_t warp_counts[kWarps];
    uint64_t warp_masses[kWarps];
    // Tokens of the bin in question, in the first block.
    uint64_t list[kList], weights[kList];
    uint32_t listed, bin;
    Cut cut;

    __device__ void clear() {
        count[threadIdx.x] = low[threadIdx.x] = high[threadIdx.x] = 0;
        if (threadIdx.x == 0) listed = 0;
    }
};

// Equal ranges of logits from `max` down to `floor`; what is below is in no bin, nor is NaN.
struct Bins {
    float max, floor, scale;
    __device__ Bins(float max, float floor) : max(max), floor(floor) {
        float width = max - floor;
        // A row of one value, or with an infinite one: all in the first bin, or what differs from it in the last.
        scale = width > 0.f ? fminf(float(kBins) / width, 3e38f) : 0.f;
    }
    __device__ __forceinline__ bool has(float x) const { return x >= floor; }
    __device__ __forceinline__ uint32_t of(float x) const {
        // Not a number for two equal infinities: 0.
        return min(__float2uint_rz((max - x) * scale), kBins - 1);
    }
};

// Sums up the histograms of the cluster's blocks, and over the bins before.
__device__ void accumulate(Histogram &shared) {
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = 0;
    uint64_t mass = 0;
    for (uint32_t i = 0; i < cluster_blocks(); ++i) {
        n += *in_block(&shared.count[threadIdx.x], i);
        mass += uint64_t(*in_block(&shared.high[threadIdx.x], i)) << 32;
        mass += *in_block(&shared.low[threadIdx.x], i);
    }
    n = inclusive_scan(n);
    mass = inclusive_scan(mass);
    if (lane == 31) shared.warp_counts[warp] = n, shared.warp_masses[warp] = mass;
    __syncthreads();
    for (uint32_t i = 0; i < warp; ++i) n += shared.warp_counts[i], mass += shared.warp_masses[i];
    shared.counts[threadIdx.x] = n;
    shared.masses[threadIdx.x] = mass;
    __syncthreads();
}

// Counts and weighs every token of `bins`. `shared` was cleared before the last `cluster_sync`.
__device__ void build(Histogram &shared, const Row &row, const Bins &bins, const Weight &weight) {
    row.each([&](float x, uint32_t) {
        if (!bins.has(x)) return;
        uint32_t bin = bins.of(x);
        uint64_t w = weight.of(x);
        atomicAdd(&shared.count[bin], 1);
        if (w == 0) return;
        // 64-bit sums from 32-bit atomics: whoever makes the lower half wrap carries.
        uint32_t part = uint32_t(w), old = atomicAdd(&shared.low[bin], part);
        uint32_t high = uint32_t(w >> 32) + (old + part < part);
        if (high) atomicAdd(&shared.high[bin], high);
    });
    cluster_sync();
    accumulate(shared);
}

// What is left of a search: the tokens of one bin with keys from `low` to `high`, `n` of them, and what is before them.
struct Range {
    uint64_t low, high;
    uint32_t n;
    uint64_t count_before, mass_before;
};

// Halves the range by keys until the list can hold it.
template <typename In>
__device__ void halve(Exchange &slots, uint32_t &exchanges, const Row &row, const Weight &weight, In in, bool by_count,
                      uint64_t goal, Range &range) {
    uint64_t low = ~0ull, high = 0;
    row.each([&](float x, uint32_t id) {
        if (in(x)) low = min(low, token_key(x, id)), high = max(high, token_key(x, id));
    });
    range.low = ~reduce(slots, exchanges, ~low, Max());
    range.high = reduce(slots, exchanges, high, Max());
    while (range.n > kList) {
        uint64_t middle = range.low + (range.high - range.low) / 2 + 1, n = 0, mass = 0;
        row.each([&](float x, uint32_t id) {
            uint64_t key = token_key(x, id);
            if (in(x) && middle <= key && key <= range.high) n += 1, mass += weight.of(x);
        });
        n = reduce(slots, exchanges, n, Add());
        mass = reduce(slots, exchanges, mass, Add());
        if (goal <= (by_count ? range.count_before + n : range.mass_before + mass)) {
            range.low = middle;
            range.n = uint32_t(n);
        } else {
            range.high = middle - 1;
            range.n -= uint32_t(n);
            range.count_before += n;
            range.mass_before += mass;
        }
    }
}

// Compares the listed tokens with each other; the thread that has the one at which the head reaches `goal` tells all.
__device__ void choose(Histogram &shared, const Weight &weight, bool by_count, uint64_t goal, const Range &range) {
    uint64_t own = threadIdx.x < range.n ? shared.list[threadIdx.x] : 0;
    uint64_t own_weight = weight.of(key_logit(own));
    shared.weights[threadIdx.x] = own_weight;
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    if (threadIdx.x >= range.n) return;
    uint64_t count = range.count_before, mass = range.mass_before;
    for (uint32_t i = 0; i < range.n; ++i)
        if (shared.list[i] > own) count += 1, mass += shared.weights[i];
    uint64_t before = by_count ? count : mass;
    if (before >= goal || goal > before + (by_count ? 1 : own_weight)) return;
    Cut cut = {own, mass + own_weight};
    for (uint32_t i = 0; i < cluster_blocks(); ++i) *in_block(&shared.cut, i) = cut;
}

// The shortest head of what the histogram has that reaches `goal`: so many tokens with `by_count`, so much weight
// without. `goal` is from 1 to what all of it has.
__device__ Cut find(Histogram &shared, Exchange &slots, uint32_t &exchanges, const Row &row, const Bins &bins,
                    const Weight &weight, bool by_count, uint64_t goal) {
    auto reached = [&](uint32_t bin) { return by_count ? uint64_t(shared.counts[bin]) : shared.masses[bin]; };
    uint32_t before = threadIdx.x - 1;
    if (goal <= reached(threadIdx.x) && (threadIdx.x == 0 || reached(before) < goal)) shared.bin = threadIdx.x;
    __syncthreads();
    uint32_t bin = shared.bin;
    auto in = [&](float x) { return bins.has(x) && bins.of(x) == bin; };
    Range range = {0, ~0ull, shared.counts[bin], 0, 0};
    if (bin > 0) {
        range.count_before = shared.counts[bin - 1];
        range.mass_before = shared.masses[bin - 1];
        range.n -= shared.counts[bin - 1];
    }
    if (range.n > kList) halve(slots, exchanges, row, weight, in, by_count, goal, range);
    row.each([&](float x, uint32_t id) {
        uint64_t key = token_key(x, id);
        if (!in(x) || key < range.low || key > range.high) return;
        uint32_t at = atomicAdd(in_block(&shared.listed, 0), 1);
        in_block(shared.list, 0)[at] = key;
    });
    cluster_sync();
    if (block_rank() == 0) choose(shared, weight, by_count, goal, range);
    cluster_sync();
    return shared.cut;
}
