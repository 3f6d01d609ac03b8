// The gated delta rule token by token (csrc/delta_rule/recurrent.cuh: formula), for chains of few tokens: a block has
// half a head's matrix in registers, and goes through the segments of one chain.
//
// All GPUs, heads of 128. ops::gated_delta_rule takes it for chains of any length, ops::gated_delta_chunks for chains
// of up to 16 tokens beside longer ones. Bound by memory (the state) at one token, by latency beyond. Reference:
// src/cpu/gated_delta/recurrent.rs.
#include "delta_rule/recurrent.cuh"
#include "abi/delta_rule_recurrent.h"

constexpr int kRows = 4;                                  // of a thread
constexpr uint32_t kPart = kRuleThreads / kLanes * kRows; // rows of a block
static_assert(kPart * kRuleParts == kDim, "the blocks of a head");

// What the rule needs of one token.
struct Token {
    uint2 q[4], k[4], v;
    bf16 b, a;
};

__device__ __forceinline__ Columns widen_columns(const uint2 (&x)[4]) {
    Columns out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 low = widen(x[i].x), high = widen(x[i].y);
        out.quarter[i] = make_float4(low.x, low.y, high.x, high.y);
    }
    return out;
}

// Grid: parts of a head, value heads, segments. Blocks whose segment begins no chain, or one of more than `longest`
// tokens, have nothing to do. Slots and tokens that there are not stop the kernel.
extern "C" __global__ __launch_bounds__(kRuleThreads) void delta_recurrent(
    const bf16 *mixed,                     // [tokens, channels]
    const bf16 *projected,                 // [tokens, width]: b and a come after z
    const float *__restrict__ a_log,       // [value_heads]
    const float *__restrict__ dt_bias,     // [value_heads]
    const uint32_t *__restrict__ segments, // [gridDim.z, 4]
    float *__restrict__ states,            // [slots, value_heads, 128, 128]
    float *__restrict__ out,               // [tokens, value_heads * 128]
    uint32_t key_heads, uint32_t width, uint32_t tokens, uint32_t slots, uint32_t longest) {
    uint32_t head = blockIdx.y, value_heads = gridDim.y, segment = blockIdx.z;
    uint32_t lane = threadIdx.x % kLanes, row = blockIdx.x * kPart + threadIdx.x / kLanes * kRows;
    uint32_t key_head = head / (value_heads / key_heads), channels = (2 * key_heads + value_heads) * kDim;
    release_successor();
    check_segment(segments, segment, tokens, slots);
    // Blocks without work wait too: the kernel is complete when it and those before it are.
    if (!begins_chain(segments, segment)) return wait_for_predecessor();
    uint32_t end = chain_end(segments, gridDim.z, segment);
    uint32_t token = load_segment(segments, segment).first, last = load_segment(segments, end - 1).end;
    if (last - token > longest) return wait_for_predecessor();
    auto state = [&](uint32_t slot) {
        return states + ((size_t(slot) * value_heads + head) * kDim + row) * kDim + 4 * lane;
    };
    uint32_t from = load_segment(segments, segment).from;
    Rows<kRows> rows;
    // No other kernel of the step writes this chain's slots.
    rows.load(from == kNoState ? nullptr : state(from));
    float rate = a_log[head], bias = dt_bias[head];
    wait_for_predecessor();
    mixed = written(mixed), projected = written(projected);
    auto fetch = [&](uint32_t t) {
        Token x;
        const bf16 *at = mixed + size_t(t) * channels + key_head * kDim + 4 * lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x.q[i] = *reinterpret_cast<const uint2 *>(at + 32 * i);
            x.k[i] = *reinterpret_cast<const uint2 *>(at + key_heads * kDim + 32 * i);
        }
        x.v = *reinterpret_cast<const uint2 *>(mixed + size_t(t) * channels + (2 * key_heads + head) * kDim + row);
        const bf16 *gates = projected + size_t(t) * width + channels + value_heads * kDim + head;
        x.b = gates[0], x.a = gates[value_heads];
        return x;
    };
    Token next;
    if (token < last) next = fetch(token);
    for (; segment < end; ++segment) {
        Segment s = load_segment(segments, segment);
        for (; token < s.end; ++token) {
            Token x = next;
            if (token + 1 < last) next = fetch(token + 1);
            float2 low = widen(x.v.x), high = widen(x.v.y);
            float v[kRows] = {low.x, low.y, high.x, high.y}, o[kRows];
            Gates gates(__bfloat162float(x.b), __bfloat162float(x.a), rate, bias);
            rows.step(widen_columns(x.q), widen_columns(x.k), v, gates, o);
            if (lane < kRows) out[(size_t(token) * value_heads + head) * kDim + row + lane] = pick(o, lane);
        }
        if (s.to != kNoState) rows.store(state(s.to));
    }
}
