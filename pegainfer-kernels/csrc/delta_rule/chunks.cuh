// The gated delta rule in chunks of 64 tokens (Yang et al., Gated Delta Networks, arXiv 2412.06464), for heads of 128.
//
// Per chunk and value head, with G_i the running sum of the log decays, D_ij = exp(G_i - G_j) for j <= i, S [v, k] the
// state before the chunk, and q, k as they come (a = 1 / |k|, c = 128^-1/2 / |q|, both per token):
//
//   T = (I + A)^-1 diag(beta)     A_ij = beta_i a_i a_j (k_i . k_j) D_ij for j < i, else 0
//   N = T (V - diag(exp(G) a) K S^T)
//   O = diag(exp(G) c) Q S^T + P N           P_ij = c_i a_j (q_i . k_j) D_ij
//   S' = exp(G_last) S + (diag(exp(G_last - G) a) N)^T K
//
// This is the WY form with U = T V and W = T diag(exp(G) a) K never formed: the inter-chunk scan reads T, and K once
// for two GEMMs; N are the chunk's new values. The lengths scale sums, so that the tensor cores see q, k and v
// unrounded. T and P do not depend on the state: the first kernel (csrc/delta_rule/intra.cu, intra-chunk) makes them
// for all chunks at once, the second (csrc/delta_rule/scan.cu, inter-chunk scan) then goes through the chunks of each
// chain of segments.
#pragma once
#include "delta_rule/segments.cuh"
#include "common/tiles.cuh"
#include "limits.h"

using namespace limits::delta_chunks;

static_assert(kChunk == kTileRows, "a chunk of a head is a tile");
constexpr uint32_t kHead = kTileWidth; // elements of a head
// Of 16 rows, and of 16 x 16 elements of a lower triangle.
constexpr uint32_t kBands = kChunk / 16, kBlocks = kBands * (kBands + 1) / 2;

// What the inter-chunk scan needs of a chunk and head. Block (i, j) of a triangle is at i (i + 1) / 2 + j, as the
// operands B of two mma: lane 4 r + c holds rows r and r + 8 at columns 2 c, 2 c + 1 and 8 further.
struct StateTerms {
    uint4 solve[kBlocks][32];  // T
    float keys[kChunk];        // exp(G) a
    float keys_to_end[kChunk]; // exp(G_last - G) a
    float decay[4];            // exp(G_last) in the first; the rest is unused
};
struct OutputTerms {
    uint4 weights[kBlocks][32]; // P
    float queries[kChunk];      // exp(G) c
};
struct IntraChunk {
    StateTerms state;
    OutputTerms output;
};
static_assert(sizeof(IntraChunk) == kIntraChunkBytes);

// The chains to scan, which lie behind the intra-chunk parts: those of more than `longest` tokens, in any order.
struct Chains {
    uint32_t taken; // work items so far
    uint32_t count;
    uint32_t begin[]; // first segments
};

__device__ __forceinline__ uint32_t block_index(uint32_t i, uint32_t j) { return i * (i + 1) / 2 + j; }

// Chunks are numbered without counting those of earlier segments: segment i takes at most end / 64 - first / 64 + 1
// numbers from this one on. Some stay unused.
__device__ __forceinline__ uint32_t first_chunk(const Segment &segment, uint32_t i) {
    return segment.first / kChunk + i;
}

__device__ __forceinline__ Chains *chains_behind(const IntraChunk *parts, uint32_t tokens, uint32_t count,
                                                 uint32_t value_heads) {
    return reinterpret_cast<Chains *>(const_cast<IntraChunk *>(parts) + size_t(tokens / kChunk + count) * value_heads);
}

// Fetches a head of 64 tokens by `Threads` threads, of which this is `thread`; zeros after the last token. `channels`:
// elements from one token to the next. Few instructions a copy, because few warps copy for many.
template <uint32_t Threads>
__device__ __forceinline__ void fetch_tile(uint4 *to, const bf16 *from, size_t channels, uint32_t tokens,
                                           uint32_t thread) {
    constexpr uint32_t kRows = Threads / kTileVectors; // at once; rows 8 apart have their vectors in the same order
    static_assert(kRows == 4 || kRows == 8);
    uint32_t t = thread / kTileVectors, vector = thread % kTileVectors;
    from += t * channels + 8 * vector;
    int32_t left = int32_t(tokens) - int32_t(t);
    uint4 *even = to + tile_vector(t, vector), *odd = to + tile_vector(t + kRows, vector);
#pragma unroll
    for (uint32_t i = 0; i < kChunk / kRows; ++i) {
        copy16_or_zero((i % 2 ? odd : even) + i / 2 * 2 * kRows * kRowVectors, from, int32_t(i * kRows) < left);
        from += kRows * channels;
    }
}

// Whether the chain of segment i has at most `longest` tokens: then the recurrence takes it.
__device__ __forceinline__ bool short_chain(const uint32_t *segments, uint32_t count, uint32_t i, uint32_t longest) {
    Segment segment = load_segment(segments, i);
    while (segment.end - segment.first <= longest && !begins_chain(segments, i)) {
        segment.first = load_segment(segments, --i).first;
    }
    return segment.end - segment.first <= longest &&
           load_segment(segments, chain_end(segments, count, i) - 1).end - segment.first <= longest;
}
