// Log-softmax of raw logits at the sampled token, its rank, and the most likely tokens. A cluster of blocks a row; rows
// that did not ask end at once.
//
//   logprob(t) = x_t - max - log(sum exp(x - max)), sums in fixed point, the logarithm in f64; rank: 1 + how many are
//   larger
// logits: [rows, vocab] f32. 30 us for one row, 221 for 128 on an H200 (lab/gemm.md).
// Reference: src/cpu/sampling.rs.
#include "rows/cut.cuh"
#include "abi/rows_logprobs.h"

constexpr float kLog2e = 1.44269504f;
// Words of a row's result, see ops/logprobs.rs: log-probability, rank, then ids and log-probabilities of the best
// tokens.

struct LogSoftmax {
    float max;
    double log_sum;
    __device__ uint32_t of(float x) const {
        double p = x == max ? -log_sum : double(x) - double(max) - log_sum;
        return __float_as_uint(float(p));
    }
};

// Writes the best `top` tokens, best first, and no token (all ones) where the row has no more.
__device__ void report_top(Histogram &histogram, Exchange &slots, uint32_t &exchanges, const Row &row, const Bins &bins,
                           const LogSoftmax &softmax, uint32_t top, uint32_t *out) {
    Weight weight = {softmax.max, kLog2e};
    build(histogram, row, bins, weight);
    uint32_t n = min(top, histogram.counts[kBins - 1]);
    uint64_t last = n == 0 ? ~0ull : find(histogram, slots, exchanges, row, bins, weight, true, n).key;
    row.each([&](float x, uint32_t id) {
        uint64_t key = token_key(x, id);
        if (key < last) return;
        uint32_t at = atomicAdd(in_block(&histogram.listed, 0), 1);
        in_block(histogram.list, 0)[at] = key;
    });
    cluster_sync();
    if (block_rank() > 0 || threadIdx.x >= top) return;
    uint32_t place = threadIdx.x;
    uint2 token = make_uint2(~0u, 0);
    if (place < n) {
        uint64_t own = histogram.list[place];
        place = 0;
        for (uint32_t i = 0; i < n; ++i) place += histogram.list[i] > own;
        token = make_uint2(key_id(own), softmax.of(key_logit(own)));
    }
    out[2 * place] = token.x;
    out[2 * place + 1] = token.y;
}

extern "C" __global__ __launch_bounds__(
    kThreads,
    2) void logprobs(const float *__restrict__ logits,    // [rows, vocab]
                     const uint32_t *__restrict__ draws,  // [rows, kDrawWords]
                     const uint32_t *__restrict__ tokens, // [rows]: sampled
                     uint32_t *__restrict__ out,          // [rows, kReportWords]
                     uint32_t vocab) {
    __shared__ Exchange slots;
    __shared__ Histogram histogram;
    uint32_t exchanges = 0, index = blockIdx.x / cluster_blocks();
    release_successor();
    histogram.clear();
    wait_for_predecessor();
    // 0 did not ask, n + 1 asked for n.
    uint32_t wanted = draws[kDrawWords * index + 7];
    if (wanted == 0) return;
    cluster_sync();
    Row row(logits, vocab);
    Extent extent = own_extent(row);
    uint64_t best = reduce(slots, exchanges, extent.best, Max());
    float least = key_logit(~reduce(slots, exchanges, ~uint64_t(ordered(extent.least)) << 32, Max()));
    float max = best >> 32 ? key_logit(best) : -INFINITY, own = row.logits[tokens[index]];
    Weight weight = {max, kLog2e};
    uint64_t mass = 0, larger = 0;
    row.each([&](float x, uint32_t) {
        mass += weight.of(x);
        larger += x > (isnan(own) ? -INFINITY : own);
    });
    mass = reduce(slots, exchanges, mass, Add());
    larger = reduce(slots, exchanges, larger, Add());
    LogSoftmax softmax = {max, log(double(mass) * (1.0 / (1ull << 40)))};
    out += size_t(kReportWords) * index;
    if (threadIdx.x == 0 && block_rank() == 0) {
        out[0] = softmax.of(isnan(own) ? -INFINITY : own);
        out[1] = uint32_t(larger) + 1;
    }
    // -inf is a candidate, too: it is in the last bin.
    Bins bins(max, fminf(max, least));
    bins.floor = -INFINITY;
    if (wanted > 1) report_top(histogram, slots, exchanges, row, bins, softmax, min(wanted - 1, kMaxLogprobs), out + 2);
}
