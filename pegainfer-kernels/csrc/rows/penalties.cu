// Counts of the tokens of sequences, and the penalties that depend on them. Not on the path of requests without any.
//
// A count is 16 bits: how often the token was generated, at most 32,767, and whether the prompt has it.
//   logit = (logit > 0 ? logit / repetition : logit * repetition) - (presence + frequency * generated)
// All GPUs, f32. Bound by memory. Reference: src/cpu/penalties.rs, bit for bit.
#include "common/base.cuh"
#include "abi/rows_penalties.h"
#include "limits.h"

using namespace limits::penalties;

constexpr uint32_t kMaxGenerated = kInPrompt - 1;

// Adds one to the count in the upper or lower half of a word, unless it is the largest.
__device__ __forceinline__ void add_one(uint32_t *word, uint32_t shift) {
    uint32_t old = *word, seen;
    do {
        seen = old;
        if ((seen >> shift & kMaxGenerated) == kMaxGenerated) return;
        old = atomicCAS(word, seen, seen + (1u << shift));
    } while (old != seen);
}

// A block an update. A token with the top bit is a placeholder: an index into the tokens that the step before drew.
extern "C" __global__ void count_tokens(uint32_t *counts,                     // [slots, words]
                                        const uint32_t *__restrict__ updates, // [gridDim.x, 5]
                                        const uint32_t *__restrict__ tokens,
                                        const uint32_t *__restrict__ sampled, // [samples]
                                        uint32_t words, uint32_t vocab, uint32_t samples) {
    const uint32_t *update = updates + kUpdateWords * blockIdx.x;
    uint32_t *row = counts + size_t(update[0]) * words;
    if (update[1])
        for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) row[i] = 0;
    __syncthreads();
    for (uint32_t i = update[2] + threadIdx.x; i < update[4]; i += blockDim.x) {
        uint32_t token = tokens[i];
        if (token & limits::gather::kPlaceholder) {
            token ^= limits::gather::kPlaceholder;
            if (token >= samples) __trap();
            token = sampled[token];
        }
        if (token >= vocab) __trap();
        uint32_t shift = token % 2 * 16;
        if (i < update[3]) atomicOr(row + token / 2, kInPrompt << shift);
        else add_one(row + token / 2, shift);
    }
}

// Rounded operations, never fused: the CPU gets the same bits.
__device__ __forceinline__ float penalized(float logit, uint32_t generated, float presence, float frequency,
                                           float repetition) {
    float scaled = logit > 0.f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    if (generated == 0) return scaled;
    return __fsub_rn(scaled, __fadd_rn(presence, __fmul_rn(frequency, float(generated))));
}

// Blocks in x share a row of logits, rows in y; a thread has the tokens of one vector of counts.
extern "C" __global__ void penalize(float *logits,                          // [gridDim.y, vocab]
                                    const uint32_t *__restrict__ counts,    // [slots, words]
                                    const uint32_t *__restrict__ penalties, // [gridDim.y, 6]
                                    const uint32_t *__restrict__ drafts, uint32_t vocab, uint32_t words) {
    const uint32_t *penalty = penalties + kPenaltyWords * blockIdx.y;
    uint32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * kCounts;
    if (penalty[0] == kNoSlot || first >= vocab) return;
    uint4 vector = *reinterpret_cast<const uint4 *>(counts + size_t(penalty[0]) * words + first / 2);
    uint32_t pairs[] = {vector.x, vector.y, vector.z, vector.w};
    bool has_drafts = penalty[1] < penalty[2];
    if (!has_drafts && !(pairs[0] | pairs[1] | pairs[2] | pairs[3])) return;
    float presence = __uint_as_float(penalty[3]), frequency = __uint_as_float(penalty[4]);
    float repetition = __uint_as_float(penalty[5]);
    float *row = logits + size_t(blockIdx.y) * vocab;
#pragma unroll
    for (uint32_t i = 0; i < kCounts; i++) {
        uint32_t token = first + i, count = pairs[i / 2] >> i % 2 * 16 & 0xffff;
        uint32_t generated = count & kMaxGenerated;
        for (uint32_t d = penalty[1]; d < penalty[2]; d++) generated += drafts[d] == token;
        generated = min(generated, kMaxGenerated);
        if (token >= vocab || (generated == 0 && count == 0)) continue;
        row[token] = penalized(row[token], generated, presence, frequency, repetition);
    }
}
