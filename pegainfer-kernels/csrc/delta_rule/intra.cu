// The chunked gated delta rule, first kernel: intra-chunk parts, for all chunks at once.
//
//   G = running sum of log decays;  a = 1 / |k|;  c = 128^-1/2 / |q|;  T = (I + A)^-1 diag(beta);  P
// Names: csrc/delta_rule/chunks.cuh. Heads of 128, at most 4 value heads a key head, all GPUs. A block of four warps
// takes one chunk and key head, with all value heads of the group, which share Q Kᵀ and K Kᵀ. GEMMs by mma.sync in
// bf16, the inverse by blocks in f32 and tf32 (csrc/delta_rule/solve.cuh). 12.9 us at 1k tokens, 32 at 4k, 103 at 16k
// on an H200 (docs/benchmarks/h200-qwen35-4b.md). Reference: src/cpu/gated_delta/chunked.rs.
#include "delta_rule/solve.cuh"
#include "common/math.cuh"
#include "common/norm_rope.cuh"
#include <type_traits>
#include "abi/delta_rule_intra.h"

struct IntraShared {
    union {
        struct {
            Tile q, k;
        } tiles;
        float matrix[kChunk * kPitch]; // A, and in its place the inverse of I + A
    };
    float sum[kGroup][kChunk]; // G in units of ln 2
    float beta[kGroup][kChunk];
    float queries[kChunk], keys[kChunk]; // c, a
    float columns[kChunk];               // a, decayed to the end of the band
};

// b and a of the tokens that a thread has, two heads apart.
struct RawGates {
    float b[kGroup / 2], a[kGroup / 2];
};

// `b`: of the chunk's first token and the group's first head, a being value_heads further.
__device__ __forceinline__ RawGates load_gates(const bf16 *b, uint32_t value_heads, size_t width, uint32_t tokens,
                                               uint32_t group) {
    RawGates raw = {};
    uint32_t t = threadIdx.x % kChunk;
#pragma unroll
    for (uint32_t i = 0; i < kGroup / 2; ++i) {
        uint32_t head = 2 * i + threadIdx.x / kChunk;
        if (head >= group || t >= tokens) continue;
        raw.b[i] = __bfloat162float(b[t * width + head]);
        raw.a[i] = __bfloat162float(b[t * width + head + value_heads]);
    }
    return raw;
}

// G and beta of the chunk's tokens for the heads of a group; beyond the last token G stays and beta is 0.
__device__ __forceinline__ void sum_gates(IntraShared &s, const RawGates &raw, const float *a_log, const float *dt_bias,
                                          uint32_t tokens, uint32_t group) {
    uint32_t t = threadIdx.x % kChunk, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < kGroup / 2; ++i) {
        uint32_t head = 2 * i + threadIdx.x / kChunk;
        if (head >= group) continue;
        s.sum[head][t] = t < tokens ? kLog2E * log_decay(raw.a[i], a_log[head], dt_bias[head]) : 0.f;
        s.beta[head][t] = t < tokens ? sigmoid(raw.b[i]) : 0.f;
    }
    __syncthreads();
    if (warp < group) {
        float2 &pair = reinterpret_cast<float2 *>(s.sum[warp])[lane];
        float sum = inclusive_scan(pair.x + pair.y);
        pair = make_float2(sum - pair.y, sum);
    }
}

// 1 / |q| and 1 / |k| of each token, times 128^-1/2 for q: one row a thread.
__device__ void load_lengths(IntraShared &s) {
    uint32_t t = threadIdx.x % kChunk;
    bool key = threadIdx.x >= kChunk;
    const uint4 *tile = key ? s.tiles.k : s.tiles.q;
    float squares = 0.f;
#pragma unroll
    for (uint32_t p = 0; p < kTileVectors; ++p) squares += sum_squares(tile[tile_vector(t, p)]);
    float scale = rsqrtf(squares + 1e-6f);
    if (key) {
        s.keys[t] = scale;
    } else {
        s.queries[t] = scale * rsqrtf(float(kHead));
    }
}

// Calls f with the warp as a constant: which blocks a warp has is then no arithmetic.
template <class F> __device__ __forceinline__ void as_constant(uint32_t warp, F f) {
    switch (warp) {
    case 0: f(std::integral_constant<int, 0>()); break;
    case 1: f(std::integral_constant<int, 1>()); break;
    case 2: f(std::integral_constant<int, 2>()); break;
    default: f(std::integral_constant<int, 3>());
    }
}

// Five blocks of 16 x 16, as accumulators: of Q Kᵀ band Warp up to the diagonal, then of K Kᵀ that of
// 3 - Warp.
using Scores = Accumulator[kBands + 1][2];

template <int Warp> __device__ __forceinline__ void multiply(const IntraShared &s, Scores &d) {
    constexpr int kOther = kBands - 1 - Warp;
    uint32_t lane = threadIdx.x % 32, row = lane % 8;
    const uint4 *q = &s.tiles.q[(16 * Warp + lane % 16) * kRowVectors];
    const uint4 *k = &s.tiles.k[(16 * kOther + lane % 16) * kRowVectors];
    const uint4 *columns = &s.tiles.k[(lane / 16 * 8 + row) * kRowVectors];
#pragma unroll
    for (uint32_t c = 0; c < kTileVectors; c += 2) {
        uint32_t column = c / kRowVectors * kColumnVectors, vector = c % kRowVectors;
        uint32_t at = column + (vector + lane / 16 ^ row), other_half = column + (vector + lane / 8 % 2 ^ row);
        uint4 a = load_matrices(q + at), other = load_matrices(k + at);
#pragma unroll
        for (int j = 0; j < int(kBands); ++j) {
            if (j > Warp && j > kOther) continue;
            uint4 b = load_matrices(columns + 16 * j * kRowVectors + other_half);
            if (j <= Warp) {
                mma(d[j][0], a, b.x, b.y);
                mma(d[j][1], a, b.z, b.w);
            }
            if (j <= kOther) {
                mma(d[Warp + 1 + j][0], other, b.x, b.y);
                mma(d[Warp + 1 + j][1], other, b.z, b.w);
            }
        }
    }
}

// What the columns of a head's decays have in common, and the vectors that scale the scan's sums.
__device__ __forceinline__ void scale_columns(IntraShared &s, const float *sum, IntraChunk *part) {
    uint32_t t = threadIdx.x;
    if (t >= kChunk) return;
    float last = sum[kChunk - 1];
    s.columns[t] = s.keys[t] * exp2_approx(sum[t | 15] - sum[t]);
    part->state.keys[t] = exp2_approx(sum[t]) * s.keys[t];
    part->state.keys_to_end[t] = exp2_approx(last - sum[t]) * s.keys[t];
    part->output.queries[t] = exp2_approx(sum[t]) * s.queries[t];
    if (t == 0) part->state.decay[0] = exp2_approx(last);
}

// One block of Q Kᵀ or K Kᵀ under the decays: of P with its diagonal, of A without. `scale`: of rows lane / 4 and 8
// further.
template <bool Diagonal, bool Strict>
__device__ __forceinline__ void decay_block(Accumulator (&to)[2], const Accumulator (&d)[2], const IntraShared &s,
                                            const float *sum, uint32_t band, uint32_t column, const float (&scale)[2]) {
    uint32_t lane = threadIdx.x % 32, row = Accumulator::row(lane, 0), first = Accumulator::column(lane, 0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        uint32_t at = 16 * column + 8 * n + first;
        float2 factor = *reinterpret_cast<const float2 *>(Diagonal ? &s.keys[at] : &s.columns[at]);
        float2 base = *reinterpret_cast<const float2 *>(&sum[at]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float here = sum[16 * band + row + 8 * r];
            float &low = to[n][2 * r], &high = to[n][2 * r + 1];
            if (!Diagonal) {
                // A decay of the row times one of the column, from and to the column's last token.
                float weight = scale[r] * exp2_approx(here - sum[16 * column + 15]);
                low = d[n][2 * r] * weight * factor.x, high = d[n][2 * r + 1] * weight * factor.y;
                continue;
            }
            // A power that is not wanted may be infinite, so it is chosen, not multiplied.
            bool below = n < r;
            float x = d[n][2 * r] * scale[r], y = d[n][2 * r + 1] * scale[r];
            low = below || first + Strict <= row ? x * exp2_approx(here - base.x) * factor.x : 0.f;
            high = below || first + 1 + Strict <= row ? y * exp2_approx(here - base.y) * factor.y : 0.f;
            if (n > r) low = high = 0.f;
        }
    }
}

// From Q Kᵀ and K Kᵀ to P, which is written, and A, which goes to shared memory.
template <int Warp>
__device__ __forceinline__ void decay(IntraShared &s, const Scores &scores, const float *sum, const float *beta,
                                      IntraChunk *part) {
    constexpr int kOther = kBands - 1 - Warp;
    uint32_t lane = threadIdx.x % 32;
    float query[2], key[2];
    Accumulator d[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t row = Accumulator::row(lane, 2 * r), i = 16 * kOther + row;
        query[r] = s.queries[16 * Warp + row];
        key[r] = beta[i] * s.keys[i];
    }
#pragma unroll
    for (int j = 0; j <= Warp; ++j) {
        if (j < Warp) decay_block<false, false>(d, scores[j], s, sum, Warp, j, query);
        else decay_block<true, false>(d, scores[j], s, sum, Warp, j, query);
        part->output.weights[block_index(Warp, j)][lane] = make_uint4(
            narrow(d[0][0], d[0][1]), narrow(d[1][0], d[1][1]), narrow(d[0][2], d[0][3]), narrow(d[1][2], d[1][3]));
    }
#pragma unroll
    for (int j = 0; j <= kOther; ++j) {
        if (j < kOther) decay_block<false, true>(d, scores[Warp + 1 + j], s, sum, kOther, j, key);
        else decay_block<true, true>(d, scores[Warp + 1 + j], s, sum, kOther, j, key);
        store_block(s.matrix, kOther, j, d);
    }
}

// Lists the chains to scan.
__device__ void list_chains(Chains *chains, const uint32_t *segments, uint32_t count, uint32_t longest) {
    __shared__ uint32_t listed;
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        bool scanned = begins_chain(segments, i) && !short_chain(segments, count, i, longest);
        if (scanned) chains->begin[atomicAdd(&listed, 1)] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) chains->count = listed, chains->taken = 0;
}

// Grid: chunk numbers, key heads. Chains of at most `longest` tokens are left to csrc/delta_rule/recurrent.cu.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    gated_delta_intra(const bf16 *mixed, // [tokens, (2 key_heads + value_heads) * 128]: q, k, v after the convolution
                      const bf16 *projected,    // [tokens, width]: b and a come after z
                      const float *a_log,       // [value_heads]
                      const float *dt_bias,     // [value_heads]
                      const uint32_t *segments, // [count, 4], csrc/delta_rule/segments.cuh
                      IntraChunk *parts,        // [gridDim.x, value_heads], then `Chains`
                      uint32_t tokens, uint32_t count, uint32_t key_heads, uint32_t value_heads, uint32_t longest) {
    release_successor();
    __shared__ __align__(16) IntraShared s;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        wait_for_predecessor();
        list_chains(chains_behind(parts, tokens, count, value_heads), segments, count, longest);
    }
    // No kernel of a step writes segments.
    uint32_t begun = 0;
    for (uint32_t base = 0; base < count; base += kThreads) {
        uint32_t i = base + threadIdx.x;
        begun += __syncthreads_count(i < count && first_chunk(load_segment(segments, i), i) <= blockIdx.x);
    }
    if (begun == 0) __trap();
    uint32_t index = begun - 1;
    Segment segment = load_segment(segments, index);
    uint32_t first = segment.first + (blockIdx.x - first_chunk(segment, index)) * kChunk;
    if (segment.end > tokens) __trap();
    // Blocks without work wait too: the kernel is complete when it and those before it are.
    if (first >= segment.end || short_chain(segments, count, index, longest)) return wait_for_predecessor();
    uint32_t here = min(segment.end - first, kChunk), group = value_heads / key_heads, head = blockIdx.y;
    size_t channels = size_t(2 * key_heads + value_heads) * kHead;
    size_t gates_at = channels + size_t(value_heads) * kHead, width = (gates_at + 2 * value_heads + 7) & ~size_t(7);

    wait_for_predecessor();
    const bf16 *b = projected + first * width + gates_at + head * group;
    RawGates gates = load_gates(b, value_heads, width, here, group);
    const bf16 *q = mixed + first * channels + head * kHead;
    fetch_tile<kThreads>(s.tiles.q, q, channels, here, threadIdx.x);
    fetch_tile<kThreads>(s.tiles.k, q + key_heads * kHead, channels, here, threadIdx.x);
    copies_commit();
    sum_gates(s, gates, a_log + head * group, dt_bias + head * group, here, group);
    copies_wait<0>();
    __syncthreads();
    load_lengths(s);
    __syncthreads();
    Scores scores = {};
    uint32_t warp = threadIdx.x / 32;
    as_constant(warp, [&](auto w) { multiply<w>(s, scores); });
    for (uint32_t h = 0; h < group; ++h) {
        IntraChunk *part = parts + size_t(blockIdx.x) * value_heads + head * group + h;
        const float *sum = s.sum[h], *beta = s.beta[h];
        scale_columns(s, sum, part);
        __syncthreads();
        as_constant(warp, [&](auto w) { decay<w>(s, scores, sum, beta, part); });
        __syncthreads();
        solve(s.matrix, beta, part);
    }
}
