// The causal depthwise convolution of width 4 before the gated delta rule, with SiLU, for segments of any length.
//
//   out[t, c] = silu(sum_i weight[i, c] x[t - 3 + i, c]), f32 sums, rounded to bf16
// A slot keeps the last 3 inputs of a sequence, its convolution state. All GPUs; tiles of 4 tokens below 1,024 tokens
// of a step, 16 from there on. Bound by memory: 9.7 us for 1k tokens, 152 for 16k on an H200
// (docs/benchmarks/h200-qwen35-4b.md). Reference: src/cpu/causal_conv.rs.
//
// A thread takes eight channels of a tile of tokens, and keeps the last inputs in registers. Blocks run in any order,
// so within a chain of segments the inputs come from the projection, and only before its first token from the
// convolution state in a slot. The tile in which a chain begins does all that has to do with slots: it computes the
// tokens that still see the convolution state, and then leaves those of the chain's segments. Each thread reads its
// channels of a convolution state before it writes them, so a chain may end in the slot that it began with.
#include "delta_rule/recurrent.cuh"
#include "common/vec8.cuh"
#include "abi/delta_rule_causal_conv.h"

constexpr uint32_t kHistory = kWidth - 1; // tokens of a convolution state, and those that see one

// The newest inputs, that of token i at i % kWidth, and the weights.
struct Window {
    Vec8 input[kWidth], weight[kWidth];

    __device__ __forceinline__ void load_weights(const float *at, uint32_t channels) {
#pragma unroll
        for (uint32_t step = 0; step < kWidth; ++step) weight[step] = load8(at + step * channels);
    }

    __device__ __forceinline__ uint4 convolve(uint32_t token) const {
        float sum[8] = {};
#pragma unroll
        for (uint32_t step = 0; step < kWidth; ++step)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                sum[j] = fmaf(input[(token + 1 + step) % kWidth].x[j], weight[step].x[j], sum[j]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[j] = silu(sum[j]);
        return make_uint4(narrow(sum[0], sum[1]), narrow(sum[2], sum[3]), narrow(sum[4], sum[5]),
                          narrow(sum[6], sum[7]));
    }
};

// What a tile knows of the segments.
template <uint32_t TILE> struct TilePlan {
    // By token, from kHistory - 1 before the tile to as many behind it: 1 + the segment that begins a chain there, or
    // 0.
    uint32_t begins[TILE + 2 * (kHistory - 1)];
    // The segments that begin in the tile; those at the end of the step belong to the last one.
    uint32_t first, end;

    __device__ __forceinline__ void make(const uint32_t *__restrict__ segments, uint32_t count, uint32_t tokens,
                                         uint32_t slots) {
        constexpr uint32_t kSeen = TILE + 2 * (kHistory - 1);
        if (threadIdx.x < kSeen) begins[threadIdx.x] = 0;
        if (threadIdx.x == 0) first = count, end = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < count; i += kConvThreads) {
            check_segment(segments, i, tokens, slots);
            Segment s = load_segment(segments, i);
            if (i == count - 1 && s.end != tokens) __trap();
            uint32_t seen = s.first + kHistory - 1 - blockIdx.y * TILE; // wraps for what is long before
            if (seen < kSeen && begins_chain(segments, i)) atomicMax(begins + seen, i + 1);
            if (min(s.first / TILE, gridDim.y - 1) == blockIdx.y) atomicMin(&first, i), atomicMax(&end, i + 1);
        }
        __syncthreads();
    }

    // Of a token of the tile, or one of the kHistory - 1 before or behind it.
    __device__ __forceinline__ uint32_t begins_at(int token) const { return begins[token + int(kHistory) - 1]; }
};

// What a thread reads of a step, and its first channel.
struct ConvOperands {
    const bf16 *projected;                 // [tokens, width]
    const uint32_t *__restrict__ segments; // [count, 4]
    bf16 *conv_states;                     // [slots, 3, channels]
    uint32_t channels, width, count, channel;

    __device__ __forceinline__ uint4 input(uint32_t token) const {
        return load16(projected + size_t(token) * width + channel);
    }

    __device__ __forceinline__ uint4 *conv_state(uint32_t slot, uint32_t i) const {
        return reinterpret_cast<uint4 *>(conv_states + (size_t(slot) * kHistory + i) * channels + channel);
    }

    __device__ __forceinline__ uint4 conv_state_or_zeros(uint32_t slot, uint32_t i) const {
        return slot == kNoState ? make_uint4(0, 0, 0, 0) : *conv_state(slot, i);
    }

    // Leaves the convolution states of the chain that segment i begins.
    __device__ __forceinline__ void keep(uint32_t i) const {
        Segment begin = load_segment(segments, i);
        uint4 before[kHistory];
#pragma unroll
        for (uint32_t r = 0; r < kHistory; ++r) before[r] = conv_state_or_zeros(begin.from, r);
        for (uint32_t end = chain_end(segments, count, i); i < end; ++i) {
            Segment s = load_segment(segments, i);
            uint32_t length = s.end - begin.first; // of the chain so far
#pragma unroll
            for (uint32_t r = 0; r < kHistory; ++r) {
                uint4 kept = r + length >= kHistory ? input(s.end - kHistory + r) : before[0];
#pragma unroll
                for (uint32_t b = 1; b < kHistory; ++b)
                    if (r + length == b) kept = before[b];
                if (s.to != kNoState) *conv_state(s.to, r) = kept;
            }
        }
    }
};

template <uint32_t TILE, uint32_t AHEAD>
__device__ __forceinline__ void convolve(ConvOperands at, const float *__restrict__ weight, bf16 *__restrict__ out,
                                         uint32_t tokens, uint32_t slots) {
    __shared__ TilePlan<TILE> plan;
    release_successor();
    plan.make(at.segments, at.count, tokens, slots);
    uint32_t first = blockIdx.y * TILE;
    at.channel = 8 * (blockIdx.x * kConvThreads + threadIdx.x);
    if (at.channel >= at.channels) return;
    Window window;
    window.load_weights(weight + at.channel, at.channels);
    wait_for_predecessor();
    at.projected = written(at.projected);
    if (first > 0) // a tile is longer than a window
#pragma unroll
        for (uint32_t i = 1; i < kWidth; ++i) window.input[i] = widen8(at.input(first - kWidth + i));
    // Tokens since the chain began, as far as that matters, and whether it began in this tile.
    uint32_t age = plan.begins_at(-1) ? 1 : plan.begins_at(-2) ? 2 : kHistory;
    bool mine = false;
    auto token = [&](uint32_t i, uint4 newest) {
        if (uint32_t begins = plan.begins_at(i)) {
            uint32_t from = load_segment(at.segments, begins - 1).from;
#pragma unroll
            for (uint32_t r = 0; r < kHistory; ++r)
                window.input[(i + 1 + r) % kWidth] = widen8(at.conv_state_or_zeros(from, r));
            age = 0, mine = true;
        }
        window.input[i % kWidth] = widen8(newest);
        if (i < TILE ? mine || age >= kHistory : age < kHistory)
            *reinterpret_cast<uint4 *>(out + size_t(first + i) * at.channels + at.channel) = window.convolve(i);
        ++age;
    };
    // AHEAD loads are under way at once.
#pragma unroll 1
    for (uint32_t i = 0; i < TILE; i += AHEAD) {
        uint4 ahead[AHEAD];
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; ++j)
            if (first + i + j < tokens) ahead[j] = at.input(first + i + j);
#pragma unroll
        for (uint32_t j = 0; j < AHEAD; ++j)
            if (first + i + j < tokens) token(i + j, ahead[j]);
    }
    // What a chain that began here has of the next tile.
#pragma unroll
    for (uint32_t i = TILE; i < TILE + kHistory - 1; ++i) {
        mine = mine && first + i < tokens && !plan.begins_at(i);
        if (mine) token(i, at.input(first + i));
    }
    for (uint32_t i = plan.first; i < plan.end; ++i)
        if (begins_chain(at.segments, i)) at.keep(i);
}

// Grid: channels / 1024, tokens / TILE, both rounded up. Bad segments stop the kernel.
#define CONVOLVE(TILE, AHEAD)                                                                                          \
    extern "C" __global__ __launch_bounds__(kConvThreads) void causal_conv1d_##TILE(                                   \
        const bf16 *projected,    /* [tokens, width]: its first `channels` columns are the inputs */                   \
        const float *weight,      /* [4, channels] */                                                                  \
        const uint32_t *segments, /* [count, 4], csrc/delta_rule/segments.cuh */                                       \
        bf16 *conv_states,        /* [slots, 3, channels] */                                                           \
        bf16 *out,                /* [tokens, channels] */                                                             \
        uint32_t channels, uint32_t width, uint32_t tokens, uint32_t count, uint32_t slots) {                          \
        convolve<TILE, AHEAD>({projected, segments, conv_states, channels, width, count, 0}, weight, out, tokens,      \
                              slots);                                                                                  \
    }
CONVOLVE(4, 4)
CONVOLVE(16, 8)
