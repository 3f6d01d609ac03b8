// The boundary between two blocks of DeepSeek-V4 in two kernels (formulas: deepseek_v4/hyper.cuh):
//
//   hyper_merge_products: merges the block's output into the streams, in place, and multiplies 64 columns of all
//                         streams with the function (split-K)
//   hyper_mix_norm:       adds the splits, then mixes and normalises
//   hyper_output_mixing:  at many tokens, how the next output goes back (Sinkhorn); else hyper_mix_norm does that, too
//
// All GPUs; hidden a multiple of 256, at most 7,936. A warp keeps the function's 16 columns of four streams as operand
// B in registers, loaded before the wait (PDL), and runs over tiles of 16 tokens, which the block fetches by cp.async
// while it computes the tile before: a lane has four columns of two tokens in all streams, merges them, stores them and
// has with them operand A. In the second kernel a block has a token, and where tokens are few a warp of its own does
// Sinkhorn's iteration beside those that mix and normalise. That has the longest latency, and every lane computes the
// same: at many tokens a third kernel does it with a lane a token. Bound by latency at few tokens, by memory at many.
// References: src/cpu/deepseek_v4/{hyper,norm,kv_quant}.rs.
#include "deepseek_v4/hyper.cuh"
#include "abi/deepseek_v4_hyper.h"

constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kSplitsOfWarp = kNormWarpColumns / kColumns; // whose columns a warp of hyper_mix_norm has
static_assert(kWarps * kSlice == kColumns && kNormWarpColumns == 32 * kVector, "a slice a warp; a vector a lane");

// A block's 64 columns of 16 tokens as they are in memory.
struct StagedTile {
    uint4 stream[kStreams][kTileTokens][kColumns / kVector], output[kTileTokens][kColumns / kVector];
    float4 post[kTileTokens], comb[kTileTokens][kStreams];

    // Where a vector of a token is: lanes that read a warp's columns of neighbouring tokens at once have different
    // banks.
    static __device__ __forceinline__ uint32_t place(uint32_t token, uint32_t vector) { return vector ^ token % 4 * 2; }

    // Begins to copy the tile, columns `column` on. `token`: that of each row. Eight threads a row.
    template <typename Token>
    __device__ __forceinline__ void fetch(const bf16 *f, const float *post_at, const float *comb_at,
                                          const bf16 *streams, uint32_t hidden, uint32_t column, Token token) {
        static_assert(kThreads == 8 * kTileTokens && kColumns == 8 * kVector, "a vector of each stream a thread");
        const uint32_t row = threadIdx.x / 8, vector = threadIdx.x % 8;
        const size_t at = token(row);
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j)
            copy16(&stream[j][row][place(row, vector)],
                   streams + (at * kStreams + j) * hidden + column + vector * kVector);
        copy16(&output[row][place(row, vector)], f + at * hidden + column + vector * kVector);
        if (threadIdx.x < kTileTokens * kStreams)
            copy16(&comb[threadIdx.x / kStreams][threadIdx.x % kStreams],
                   comb_at + (token(threadIdx.x / kStreams) * kStreams + threadIdx.x % kStreams) * kStreams);
        else if (threadIdx.x < kTileTokens * (kStreams + 1))
            copy16(&post[threadIdx.x - kTileTokens * kStreams],
                   post_at + token(threadIdx.x - kTileTokens * kStreams) * kStreams);
    }

    // This lane's columns of a row: those of quad among the 16 of the warp.
    __device__ __forceinline__ Columns columns(uint32_t row, uint32_t warp) const {
        const uint32_t quad = threadIdx.x % 4,
                       place_of = place(row, warp * 2 + quad / 2) * 2 + quad % 2; // in half vectors
        Columns out;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j)
            out.stream[j] = reinterpret_cast<const uint2 *>(stream[j][row])[place_of];
        out.output = reinterpret_cast<const uint2 *>(output[row])[place_of];
        return out;
    }

    __device__ __forceinline__ Mixing mixing(uint32_t row) const { return {&post[row].x, &comb[row][0].x}; }
};

// Grid: splits of 64 columns, groups of tokens. Tokens `first` to `first + tokens - 1`.
extern "C" __global__ __launch_bounds__(kThreads, 3) void hyper_merge_products(
    const bf16 *f,         // [.., hidden]
    const float *post,     // [.., 4]
    const float *comb,     // [.., 4, 4]
    bf16 *streams,         // [.., 4, hidden], in place
    const float *function, // [24, 4 hidden]
    float *partial,        // [tokens, splits, 32]: 24 sums, that of squares, 7 without a use
    uint32_t first, uint32_t tokens, uint32_t hidden) {
    __shared__ __align__(16) float sums[2][kWarps][kTileTokens][kPitch];
    __shared__ __align__(128) StagedTile staged[2];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t column = blockIdx.x * kColumns + warp * kSlice + lane % 4 * 4;
    release_successor();
    Summands b[kStreams][kTiles];
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j)
#pragma unroll
        for (uint32_t n = 0; n < kTiles; ++n)
            b[j][n] = Summands(early4(function + (8 * n + lane / 4) * size_t(kStreams * hidden) + j * hidden + column));
    uint32_t digest = 0;
#pragma unroll
    for (uint32_t i = 0; i < kStreams * kTiles; ++i) digest ^= b[i / kTiles][i % kTiles].digest();
    settle(digest);
    wait_for_predecessor();
    // A tile is fetched while the one before it is computed. Rows behind the last token take that token again; their
    // results are not kept.
    auto fetch = [&](uint32_t tile, StagedTile &to) {
        if (tile * kTileTokens < tokens)
            to.fetch(f, post, comb, streams, hidden, blockIdx.x * kColumns,
                     [&](uint32_t row) { return size_t(first + min(tile * kTileTokens + row, tokens - 1)); });
        copies_commit();
    };
    fetch(blockIdx.y, staged[0]);
    copies_wait_all();
    __syncthreads();
    fetch(blockIdx.y + gridDim.y, staged[1]);
    uint32_t buffer = 0;
    for (uint32_t tile = blockIdx.y; tile * kTileTokens < tokens; tile += gridDim.y, buffer ^= 1) {
        Columns token[2];
        float squares[2];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = lane / 4 + 8 * i, at = tile * kTileTokens + row;
            token[i] = staged[buffer].columns(row, warp);
            squares[i] = token[i].merge(staged[buffer].mixing(row));
            if (at < tokens) token[i].store(streams + size_t(first + at) * kStreams * hidden + column, hidden);
        }
        MixSums mixes;
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j)
            mixes.add(
                make_uint4(token[0].stream[j].x, token[1].stream[j].x, token[0].stream[j].y, token[1].stream[j].y),
                b[j]);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) mixes.store(sums[buffer][warp][lane / 4 + 8 * i], i, squares[i]);
        copies_wait_all();
        __syncthreads(); // the block has read this tile, and has all of the next one
        fetch(tile + 2 * gridDim.y, staged[buffer]);
        // Eight threads a token, four sums each; those behind the squares are not used.
        const uint32_t row = threadIdx.x / 8, value = threadIdx.x % 8 * 4;
        if (value > kMixes || tile * kTileTokens + row >= tokens) continue;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) {
            float4 v = *reinterpret_cast<const float4 *>(&sums[buffer][w][row][value]);
            total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
        }
        *reinterpret_cast<float4 *>(
            partial + (size_t(tile * kTileTokens + row) * gridDim.x + blockIdx.x) * kStride + value) = total;
    }
}

// A barrier of the warps that have columns.
__device__ __forceinline__ void sync_columns(uint32_t threads) {
    asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// The largest magnitude of 128 columns, at least kLeastAmax, of which 16 lanes have eight neighbouring ones each. Whole
// warps call it.
__device__ __forceinline__ float group_amax(const float (&v)[kVector]) {
    float amax = kLeastAmax;
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) amax = fmaxf(amax, fabsf(v[i]));
    return reduce_lanes(amax, kGroup / kVector, Max());
}

// A lane's eight values of a group with this largest magnitude, rounded to FP8, in bf16.
__device__ __forceinline__ uint4 round_group(const float (&v)[kVector], float amax) {
    float low[kVector];
#if __CUDA_ARCH__ >= 890
    const float scale = ceil_power_of_two(amax / E4M3::kMax), inverse = 1.f / scale; // exact
#pragma unroll
    for (uint32_t i = 0; i < kVector; i += 2) {
        const float2 pair = round_e4m3(v[i] * inverse, v[i + 1] * inverse);
        low[i] = pair.x * scale, low[i + 1] = pair.y * scale;
    }
#else
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) low[i] = quantize<E4M3>(v[i], amax);
#endif
    return make_uint4(narrow(low[0], low[1]), narrow(low[2], low[3]), narrow(low[4], low[5]), narrow(low[6], low[7]));
}

// Grid: tokens, from `first` on. A thread has eight columns; one warp more, which has none, does Sinkhorn's iteration.
// Without that warp the token's first 32 partial sums are replaced by its 24 mixing values and 8 without a use.
extern "C" __global__ __launch_bounds__(kMaxNormThreads) void hyper_mix_norm(
    const bf16 *streams, // [.., 4, hidden]
    float *partial,      // [gridDim.x, splits, 32]
    const float *base,   // [24]
    const float *scale,  // [3]
    const bf16 *weight,  // [hidden]
    float *post,         // [.., 4]
    float *comb,         // [.., 4, 4]
    bf16 *out,           // [.., hidden]
    bf16 *low,           // [.., hidden], `out` rounded to FP8; null: none
    uint8_t *packed,     // [.., packed row of hidden] (deepseek_v4/rounding.cuh), of `low`; null: none
    uint32_t first, uint32_t hidden, uint32_t iters, float eps, float streams_eps, float norm_eps) {
    __shared__ float sums[32][kStride], squares[32];
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = hidden / kNormWarpColumns;
    const uint32_t column = threadIdx.x * kVector, columns = 32 * warps;
    const bool mixes = warp < warps;
    const size_t token = first + blockIdx.x;
    release_successor();
    // Of a lane's mixing value.
    const float value_scale = early(scale + min(lane / kStreams, 2)), value_base = early(base + min(lane, kMixes - 1));
    const float4 w = early4(reinterpret_cast<const float *>(weight + min(column, hidden - kVector)));
    wait_for_predecessor();
    uint4 x[kStreams];
    if (mixes) {
        const float *at = written(const_cast<const float *>(partial)) +
                          (size_t(blockIdx.x) * warps + warp) * kSplitsOfWarp * kStride + lane;
        const bf16 *from = written(streams) + token * kStreams * hidden + column;
        float part[kSplitsOfWarp];
#pragma unroll
        for (uint32_t i = 0; i < kSplitsOfWarp; ++i) part[i] = at[i * kStride];
#pragma unroll
        for (uint32_t j = 0; j < kStreams; ++j) x[j] = load16(from + j * hidden);
#pragma unroll
        for (uint32_t i = 1; i < kSplitsOfWarp; ++i) part[0] += part[i];
        sums[warp][lane] = part[0];
    }
    __syncthreads();
    float m = 0.f;
#pragma unroll 4
    for (uint32_t i = 0; i < warps; ++i) m += sums[i][lane];
    m = mixing_value(m, __shfl_sync(kAll, m, kMixes), kStreams * hidden, streams_eps, value_scale, value_base);
    if (!mixes) return output_mixing(m, post + token * kStreams, comb + token * kStreams * kStreams, iters, eps);
    if (warp == 0 && blockDim.x == columns) partial[size_t(blockIdx.x) * warps * kSplitsOfWarp * kStride + lane] = m;
    const float input = exact_sigmoid(m) + eps;
    float v[kVector] = {};
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j) {
        const float pre = __shfl_sync(kAll, input, j);
        const uint32_t *pairs = reinterpret_cast<const uint32_t *>(&x[j]);
#pragma unroll
        for (uint32_t i = 0; i < kVector; ++i)
            v[i] = fmaf(pre, i % 2 ? widen(pairs[i / 2]).y : widen(pairs[i / 2]).x, v[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) v[i] = round_bf16(v[i]);
    const float sum = near_sum(square4(v) + square4(v + 4));
    if (lane == 0) squares[warp] = sum;
    sync_columns(columns);
    const float norm = inverse_rms(warp_sum(lane < warps ? squares[lane] : 0.f), hidden, norm_eps);
    const uint32_t *weights = reinterpret_cast<const uint32_t *>(&w);
    uint4 y;
#pragma unroll
    for (uint32_t i = 0; i < kVector; i += 2) {
        const float2 g = widen(weights[i / 2]);
        const uint32_t pair = narrow(v[i] * norm * g.x, v[i + 1] * norm * g.y);
        v[i] = widen(pair).x, v[i + 1] = widen(pair).y;
        reinterpret_cast<uint32_t *>(&y)[i / 2] = pair;
    }
    *reinterpret_cast<uint4 *>(out + token * hidden + column) = y;
    if (!low) return;
    const float amax = group_amax(v);
    *reinterpret_cast<uint4 *>(low + token * hidden + column) = round_group(v, amax);
#if __CUDA_ARCH__ >= 890
    if (packed) pack_eight(packed + token * packed_bytes(hidden), hidden, column, v, amax);
#endif
}

// How outputs go back, of tokens from `first` on. Grid: tokens in groups of 32, for Sinkhorn's iteration a lane each.
extern "C" __global__ __launch_bounds__(kMixingThreads) void hyper_output_mixing(
    const float *partial, // [tokens, splits, 32]: of each token the mixing values, by hyper_mix_norm
    float *post,          // [.., 4]
    float *comb,          // [.., 4, 4]
    uint32_t first, uint32_t tokens, uint32_t hidden, uint32_t iters, float eps) {
    start_after_predecessor();
    constexpr uint32_t kValues = kStreams * kStreams;
    __shared__ float mixing[kMixingTokens][kValues + 1];
    const uint32_t lane = threadIdx.x % 32, block = blockIdx.x * kMixingTokens;
    for (uint32_t i = threadIdx.x / 32; i < kMixingTokens && block + i < tokens; i += kMixingThreads / 32) {
        const float m = partial[size_t(block + i) * (hidden / kColumns) * kStride + lane];
        const float c = begin_mixing(m, post + size_t(first + block + i) * kStreams, eps);
        if (lane >= 2 * kStreams && lane < kMixes) mixing[i][lane - 2 * kStreams] = c;
    }
    __syncthreads();
    if (threadIdx.x >= kMixingTokens || block + threadIdx.x >= tokens) return;
    float c[kStreams][kStreams];
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) c[i / kStreams][i % kStreams] = mixing[threadIdx.x][i];
    sinkhorn(c, iters, eps);
    float4 *to = reinterpret_cast<float4 *>(comb + size_t(first + block + threadIdx.x) * kValues);
#pragma unroll
    for (uint32_t j = 0; j < kStreams; ++j) to[j] = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
}
