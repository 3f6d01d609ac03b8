// A gated delta rule layer between its two GEMMs, for sequences of one token: convolution, gates, rule, gated norm, in
// one launch.
//
//   x = silu(conv(q, k, v));  rule: csrc/delta_rule/recurrent.cuh;  out = rms_norm(read) * weight * silu(z)
// All GPUs, heads of 128, convolution width 4. Bound by memory, the states: 140 us for 128 sequences on an H200, 129 at
// its 4.3 TB/s (92 %); 3.0 us for one (docs/benchmarks/h200-qwen35-4b.md). Reference: src/cpu/causal_conv.rs,
// src/cpu/gated_delta/recurrent.rs, src/cpu/gated_norm.rs.
//
// A block has a value head of a sequence, with the whole matrix in registers: all of it is under way from memory while
// the kernel before still computes the projection (programmatic dependent launch). Its warps stay independent of each
// other but for q and k, and the norm. The value heads that share a key head each compute the convolution of its q and
// k; the last of them to have read their convolution state, by a counter, overwrites it.
#include "common/activation.cuh"
#include "delta_rule/recurrent.cuh"
#include "abi/delta_rule_decode.h"

constexpr int kRows = 4; // of a thread
static_assert(kDecodeThreads == kDim / kRows * kLanes, "a block has a head");
constexpr uint32_t kWarps = kDecodeThreads / 32;
constexpr uint32_t kFours = kDim / 4; // of channels: q is one warp's, k the next one's, v the third's

// Four neighbouring channels of the convolution: the inputs, the newest one last, and the weights.
struct Channels {
    uint2 x[kWidth];
    float4 weight[kWidth];

    // `conv_state`: [3, channels], or nullptr for zeros; `conv`: [4, channels]; both from the first of these channels
    // on.
    __device__ __forceinline__ void load(const bf16 *conv_state, const float *conv, uint32_t channels) {
#pragma unroll
        for (uint32_t step = 0; step < kWidth - 1; ++step)
            x[step] = conv_state ? *reinterpret_cast<const uint2 *>(conv_state + step * channels) : make_uint2(0, 0);
#pragma unroll
        for (uint32_t step = 0; step < kWidth; ++step)
            weight[step] = *reinterpret_cast<const float4 *>(conv + step * channels);
    }

    __device__ __forceinline__ void keep(bf16 *conv_state, uint32_t channels) const {
#pragma unroll
        for (uint32_t step = 0; step < kWidth - 1; ++step)
            *reinterpret_cast<uint2 *>(conv_state + step * channels) = x[step + 1];
    }

    __device__ __forceinline__ float4 convolve() const {
        float sum[4] = {};
#pragma unroll
        for (uint32_t step = 0; step < kWidth; ++step) {
            float2 low = widen(x[step].x), high = widen(x[step].y);
            const float4 &w = weight[step];
            sum[0] = fmaf(low.x, w.x, sum[0]), sum[1] = fmaf(low.y, w.y, sum[1]);
            sum[2] = fmaf(high.x, w.z, sum[2]), sum[3] = fmaf(high.y, w.w, sum[3]);
        }
        return make_float4(round_bf16(silu(sum[0])), round_bf16(silu(sum[1])), round_bf16(silu(sum[2])),
                           round_bf16(silu(sum[3])));
    }
};

// Grid: value heads, rows. A segment that is not its row's one token, or goes on from another one, stops the kernel.
extern "C" __global__ __launch_bounds__(kDecodeThreads, 2) void decode_delta(
    const bf16 *__restrict__ projected,    // [rows, channels + value_heads * 130], rounded up to 8: q, k, v, z, b, a
    const float *__restrict__ conv,        // [4, channels]
    const float *__restrict__ a_log,       // [value_heads]
    const float *__restrict__ dt_bias,     // [value_heads]
    const float *__restrict__ norm,        // [128]
    const uint32_t *__restrict__ segments, // [rows, 4]
    float *states,                         // [slots, value_heads, 128, 128]
    bf16 *conv_states,                     // [slots, 3, channels]
    void *out,                             // [rows, value_heads * 128], csrc/common/activation.cuh
    uint32_t padded,
    uint32_t *counters, // [rows, key_heads, 2], all 0
    uint32_t key_heads,
    uint32_t output_group, // neighbouring heads that `out` separates; 1: the heads stay in order
    uint32_t slots, float eps) {
    __shared__ float4 qkv[3 * kFours];
    __shared__ float read[kDim], squares[kWarps]; // what q reads, and the parts of its squared length
    __shared__ Gates gates;
    __shared__ uint32_t largest[kDim / 32];
    uint32_t row = blockIdx.y, head = blockIdx.x, value_heads = gridDim.x;
    uint32_t group = value_heads / key_heads, key_head = head / group;
    // Whole vectors of eight values.
    uint32_t channels = (2 * key_heads + value_heads) * kDim, width = (channels + value_heads * (kDim + 2) + 7) & ~7u;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes * kRows;
    release_successor();

    // No other kernel of the step writes segments, states and convolution states: they need not wait.
    Segment segment = load_segment(segments, row);
    check_segment(segments, row, gridDim.y, slots);
    if (segment.first != row || segment.end != row + 1 || !begins_chain(segments, row)) __trap();
    auto state = [&](uint32_t slot) {
        return states + ((size_t(slot) * value_heads + head) * kDim + first) * kDim + 4 * lane;
    };
    bool zeros = segment.from == kNoState, kept = segment.to != kNoState;
    bool convolves = warp < 3;
    uint32_t part = warp == 0 ? key_head : warp == 1 ? key_heads + key_head : 2 * key_heads + head;
    uint32_t channel = part * kDim + threadIdx.x % 32 * 4;
    auto conv_state = [&](uint32_t slot) { return conv_states + size_t(slot) * (kWidth - 1) * channels + channel; };
    Channels c;
    if (convolves) c.load(zeros ? nullptr : conv_state(segment.from), conv + channel, channels);
    Rows<kRows> matrix;
    matrix.load(zeros ? nullptr : state(segment.from));
    bool writes = threadIdx.x < kDim, opens = threadIdx.x == kDecodeThreads - 1; // an output, and the gates
    float scale = 0.f, rate = 0.f, bias = 0.f;
    if (writes) scale = norm[threadIdx.x];
    if (opens) rate = a_log[head], bias = dt_bias[head];

    wait_for_predecessor();
    const bf16 *token = written(projected) + size_t(row) * width, *gate = token + channels + value_heads * kDim + head;
    if (convolves) c.x[kWidth - 1] = *reinterpret_cast<const uint2 *>(token + channel);
    bf16 z = writes ? token[channels + head * kDim + threadIdx.x] : bf16();
    if (opens) gates = Gates(__bfloat162float(gate[0]), __bfloat162float(gate[value_heads]), rate, bias);
    bool shares = warp < 2 && group > 1; // a convolution state, with other blocks
    uint32_t *counter = counters + (row * key_heads + key_head) * 2 + warp, before = 0;
    if (convolves) {
        qkv[threadIdx.x] = c.convolve();
        __syncwarp();
        // The convolution state has been read: it has been used.
        if (shares && threadIdx.x % 32 == 0) before = atomicAdd(counter, 1);
        if (kept && !shares) c.keep(conv_state(segment.to), channels);
    }
    __syncthreads();

    Columns q, k;
#pragma unroll
    for (int i = 0; i < 4; ++i) q.quarter[i] = qkv[8 * i + lane], k.quarter[i] = qkv[kFours + 8 * i + lane];
    float4 values = qkv[2 * kFours + first / kRows];
    float v[kRows] = {values.x, values.y, values.z, values.w}, o[kRows], square = 0.f;
    matrix.step(q, k, v, gates, o);
    if (kept) matrix.store(state(segment.to));
    if (lane < kRows) read[first + lane] = pick(o, lane);
#pragma unroll
    for (int r = 0; r < kRows; ++r) square = fmaf(o[r], o[r], square);
    square = warp_sum(lane == 0 ? square : 0.f);
    if (threadIdx.x % 32 == 0) squares[warp] = square;
    __syncthreads();

    if (writes) {
        float sum = 0.f;
#pragma unroll
        for (uint32_t w = 0; w < kWarps; ++w) sum += squares[w];
        float normed = read[threadIdx.x] * inverse_rms(sum, kDim, eps) * scale;
        bf16 result = __float2bfloat16_rn(normed * silu(__bfloat162float(z)));
        uint32_t column = output_head(head, value_heads, output_group) * kDim + threadIdx.x;
        ActivationOut{out, padded, value_heads * kDim}.store1(row, column, result, largest, 1);
    }
    if (!shares || __shfl_sync(kAll, before, 0) < group - 1) return;
    if (kept) c.keep(conv_state(segment.to), channels);
    if (threadIdx.x % 32 == 0) *counter = 0;
}
