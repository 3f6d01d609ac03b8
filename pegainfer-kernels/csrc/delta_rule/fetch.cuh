// What a block of the inter-chunk scan has in shared memory, and the cp.async copies that bring it there: the producer
// half of csrc/delta_rule/scan.cu.
#pragma once
#include "delta_rule/chunks.cuh"

// One chunk of a scan.
struct ChunkItem {
    uint32_t first, tokens; // at most kChunk; none of an empty segment
    uint32_t chunk;
    uint32_t to; // slot of the state after it, or kNoState
    bool last;
};

// Operands A from the warps that update the state to those that compute outputs: the state before the chunk, and N.
struct Handoff {
    uint4 state[kHead / 16][32], new_values[kBands][32];
};

template <bool Hopper> struct ScanShared {
    static constexpr uint32_t kRows = Hopper ? 64 : 32; // of the state, elements of v
    static constexpr uint32_t kWarps = kRows / 16;      // that update the state; as many compute outputs if others do
    static constexpr uint32_t kFetchers = Hopper ? 128 : 64; // threads
    static constexpr uint32_t kThreads = (Hopper ? 2 : 1) * kWarps * 32 + kFetchers;
    static constexpr uint32_t kAhead = Hopper ? 2 : 1; // chunks that are fetched ahead
    static constexpr uint32_t kRing = kAhead + 1;
    // Rows of values are 16 bytes apart from multiples of 32 words: tokens 2 c and elements 2 r touch all banks.
    static constexpr uint32_t kValues = kRows / 8 + 1;
    Tile k[kRing], q[kRing];
    uint4 v[kRing][kChunk * kValues];
    StateTerms state_terms[kRing];
    OutputTerms output_terms[kRing];
    Handoff handoff[Hopper ? 2 : 0][kWarps];
    ChunkItem items[4];
    uint32_t scan; // the block's present work item
};

struct ScanOperands {
    const bf16 *mixed;
    const IntraChunk *parts;
    const uint32_t *segments;
    uint32_t tokens, slots, key_heads, value_heads;
    uint32_t head, key_head, row; // of v: the block's first row of the state

    __device__ __forceinline__ size_t channels() const { return size_t(2 * key_heads + value_heads) * kHead; }
    // A head of q of the first token of a chunk; k is key_heads further.
    __device__ __forceinline__ const bf16 *query(const ChunkItem &item) const {
        return mixed + item.first * channels() + key_head * kHead;
    }
    // The block's elements of v.
    __device__ __forceinline__ const bf16 *value(const ChunkItem &item) const {
        return mixed + item.first * channels() + (2 * key_heads + head) * kHead + row;
    }
    // Where a lane has the first of its rows of the state; `warp_row`: the warp's first in the block's.
    __device__ __forceinline__ float *state_row(float *states, uint32_t slot, uint32_t warp_row) const {
        uint32_t at = row + warp_row + threadIdx.x % 32 / 4 * 2;
        return states + ((size_t(slot) * value_heads + head) * kHead + at) * kHead + threadIdx.x % 4 * 2;
    }
    __device__ __forceinline__ const IntraChunk *part(const ChunkItem &item) const {
        return parts + size_t(item.chunk) * value_heads + head;
    }
};

// The producers' place in the segments of a chain.
struct ChainCursor {
    uint32_t segment, end, at; // segments; token
    Segment now;

    __device__ __forceinline__ ChunkItem next(const ScanOperands &x) {
        uint32_t here = min(now.end - at, kChunk), chunk = first_chunk(now, segment) + (at - now.first) / kChunk;
        bool done = at + here == now.end;
        ChunkItem item = {at, here, chunk, done ? now.to : kNoState, done && segment + 1 == end};
        at += here;
        if (done && ++segment < end) {
            check_segment(x.segments, segment, x.tokens, x.slots);
            now = load_segment(x.segments, segment);
        }
        return item;
    }
};

// The block's elements of v, as a tile is fetched.
template <bool Hopper>
__device__ __forceinline__ void fetch_values(uint4 *to, const bf16 *from, size_t channels, uint32_t tokens,
                                             uint32_t thread) {
    using S = ScanShared<Hopper>;
    constexpr uint32_t kVectors = S::kRows / 8, kAtOnce = S::kFetchers / kVectors;
    uint32_t t = thread / kVectors, vector = thread % kVectors;
    from += t * channels + 8 * vector;
    to += t * S::kValues + vector;
    int32_t left = int32_t(tokens) - int32_t(t);
#pragma unroll
    for (uint32_t i = 0; i < kChunk / kAtOnce; ++i) {
        copy16_or_zero(to + i * kAtOnce * S::kValues, from, int32_t(i * kAtOnce) < left);
        from += kAtOnce * channels;
    }
}

template <uint32_t Threads, class T>
__device__ __forceinline__ void fetch_terms(T &to, const T &from, uint32_t thread) {
    constexpr uint32_t kVectors = sizeof(T) / 16, kRounds = kVectors / Threads;
    const uint4 *source = reinterpret_cast<const uint4 *>(&from) + thread;
    uint4 *sink = reinterpret_cast<uint4 *>(&to) + thread;
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) copy16_or_zero(sink + i * Threads, source + i * Threads, true);
    constexpr uint32_t kDone = kRounds * Threads;
    if (thread < kVectors - kDone) copy16_or_zero(sink + kDone, source + kDone, true);
}

// What updates the state over a chunk.
template <bool Hopper>
__device__ __forceinline__ void fetch_state_terms(ScanShared<Hopper> &s, uint32_t slot, const ScanOperands &x,
                                                  const ChunkItem &item, uint32_t thread) {
    constexpr uint32_t kFetchers = ScanShared<Hopper>::kFetchers;
    fetch_tile<kFetchers>(s.k[slot], x.query(item) + x.key_heads * kHead, x.channels(), item.tokens, thread);
    fetch_values<Hopper>(s.v[slot], x.value(item), x.channels(), item.tokens, thread);
    fetch_terms<kFetchers>(s.state_terms[slot], x.part(item)->state, thread);
}

// What the outputs of a chunk take.
template <bool Hopper>
__device__ __forceinline__ void fetch_output_terms(ScanShared<Hopper> &s, uint32_t slot, const ScanOperands &x,
                                                   const ChunkItem &item, uint32_t thread) {
    constexpr uint32_t kFetchers = ScanShared<Hopper>::kFetchers;
    fetch_tile<kFetchers>(s.q[slot], x.query(item), x.channels(), item.tokens, thread);
    fetch_terms<kFetchers>(s.output_terms[slot], x.part(item)->output, thread);
}
