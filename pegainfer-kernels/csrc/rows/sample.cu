// Draws one token a row: temperature, min-p, top-k, top-p, one random number. A cluster of blocks a row (thread block
// clusters on compute capability 9.0 and later, else one block); a greedy row ends after the first pass.
//
// logits: [rows, vocab] f32. Bound by memory at many rows: 41 us for 128 greedy rows of 151,936 logits on an H200, 100
// at temperature 1 (lab/gemm.md). Reference: src/cpu/sampling.rs, the same tokens bit for
// bit.
#include "rows/cut.cuh"
#include "abi/rows_sample.h"

struct Draw {
    uint64_t random;     // uniform
    double min_p_offset; // the floor of min-p is max + this
    float scale;         // log2(e) / temperature; 0 is greedy
    uint32_t top_k;      // 0 keeps all
    float top_p;

    __device__ Draw(const uint32_t *words) {
        random = words[0] | uint64_t(words[1]) << 32;
        min_p_offset = __longlong_as_double(words[2] | uint64_t(words[3]) << 32);
        scale = __uint_as_float(words[4]);
        top_k = words[5];
        top_p = __uint_as_float(words[6]);
    }
};

// The smallest f32 that is not below max + offset.
__device__ float min_p_floor(float max, double offset) {
    return offset == -INFINITY ? -INFINITY : __double2float_ru(double(max) + offset);
}

// ceil(share * total), at least 1.
__device__ uint64_t share_of(float share, uint64_t total) {
    uint64_t fixed = __double2ull_rz(double(share) * 18446744073709551616.0); // 2^64
    uint64_t needed = __umul64hi(fixed, total) + (fixed * total != 0);
    return needed > 1 ? needed : 1;
}

// Goes through the kept tokens by id to the one that the random number names.
__device__ void pick(Exchange &shared, uint32_t &exchanges, const Row &row, const Weight &weight, uint64_t last,
                     uint64_t random, uint32_t *out) {
    auto kept = [&](float x, uint32_t id) { return token_key(x, id) >= last ? weight.of(x) : 0; };
    uint64_t own = 0;
    row.each([&](float x, uint32_t id) { own += kept(x, id); });
    const uint64_t *blocks = exchange(shared, exchanges, own, Add());
    uint64_t total = 0, before = 0;
    for (uint32_t i = 0; i < cluster_blocks(); ++i) {
        if (i == block_rank()) before = total;
        total += blocks[i];
    }
    uint64_t target = __umul64hi(random, total);
    for (uint32_t i = 0; i < threadIdx.x / 32; ++i) before += shared.warps[i];
    if (target < before || target - before >= shared.warps[threadIdx.x / 32]) return;
    // This warp has it.
    target -= before;
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t first = row.first; first < row.end; first += 128) {
        uint32_t id = first + 4 * lane;
        float4 x = id < row.end ? row.load(id) : make_float4(NAN, NAN, NAN, NAN);
        uint64_t w[4] = {kept(x.x, id), kept(x.y, id + 1), kept(x.z, id + 2), kept(x.w, id + 3)};
        uint64_t sum = w[0] + w[1] + w[2] + w[3];
        sum = inclusive_scan(sum);
        uint64_t all = __shfl_sync(kAll, sum, 31);
        if (target >= all) {
            target -= all;
            continue;
        }
        uint64_t at = sum - w[3] - w[2] - w[1] - w[0];
        for (uint32_t i = 0; i < 4; at += w[i++])
            if (at <= target && target < at + w[i]) *out = id + i;
        return;
    }
}

extern "C" __global__ __launch_bounds__(kThreads,
                                        2) void sample(const float *__restrict__ logits,   // [rows, vocab]
                                                       const uint32_t *__restrict__ draws, // [rows, kDrawWords]
                                                       uint32_t *__restrict__ out,         // [rows]
                                                       uint32_t vocab) {
    __shared__ Exchange slots;
    __shared__ Histogram histogram;
    uint32_t exchanges = 0, index = blockIdx.x / cluster_blocks();
    release_successor();
    histogram.clear();
    wait_for_predecessor();
    // Every block must have started before another one writes to it.
    cluster_sync();
    Draw draw(draws + kDrawWords * index);
    Row row(logits, vocab);
    Extent extent = own_extent(row);
    extent.best = reduce(slots, exchanges, extent.best, Max());
    float best = key_logit(extent.best);
    if (draw.scale == 0.f || !(best > -INFINITY)) {
        if (threadIdx.x == 0 && block_rank() == 0) out[index] = key_id(extent.best);
        return;
    }
    Weight weight = {best, draw.scale};
    float floor = min_p_floor(best, draw.min_p_offset);
    uint64_t last = floor_key(floor);
    bool top_k = 0 < draw.top_k && draw.top_k < vocab;
    if (top_k || draw.top_p < 1.f) {
        float least = key_logit(~reduce(slots, exchanges, ~uint64_t(ordered(extent.least)) << 32, Max()));
        // What weighs nothing is not drawn, so it need not be in the head either.
        Bins bins(best, fmaxf(fmaxf(floor, least), best + kNegligible / draw.scale));
        build(histogram, row, bins, weight);
        uint64_t total = histogram.masses[kBins - 1];
        if (top_k && draw.top_k < histogram.counts[kBins - 1]) {
            Cut cut = find(histogram, slots, exchanges, row, bins, weight, true, draw.top_k);
            last = cut.key;
            total = cut.mass;
        }
        if (draw.top_p < 1.f)
            last = find(histogram, slots, exchanges, row, bins, weight, false, share_of(draw.top_p, total)).key;
    }
    pick(slots, exchanges, row, weight, last, draw.random, out + index);
}
