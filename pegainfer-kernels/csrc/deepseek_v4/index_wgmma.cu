// DeepSeek-V4's indexer at many tokens, on Hopper: the scores of deepseek_v4/index.cu,
//
//   score[i] = Σ_h weights[h] relu(q[h] · entry[i])
//
// for 64 heads of 128 columns in bf16. A block has a tile of tokens and 256 entries, each of its four consumer
// warpgroups 64 of them, which stay in registers as operand A of wgmma. A producer warp fetches the queries of one
// token after the other by TMA: operand B, the heads as columns. Each lane adds up its 16 heads of an entry, then the
// four lanes of a quad theirs. While one warpgroup does so, others keep the tensor cores busy. Entries that no token of
// the tile sees are not computed, nor are tokens that see no more than k.
//
// A score depends on its token and entry alone, and its sum has one order; it is another one than that of
// `index_scores_bf16`. Bound by the tensor cores. Reference: src/cpu/deepseek_v4/index.rs.
#include "deepseek_v4/index.cuh"
#include "common/hopper.cuh"
#include "abi/deepseek_v4_index_wgmma.h"

using namespace limits::deepseek_v4_index_wgmma;

constexpr uint32_t kSteps = kDim / 16;       // wgmmas of a token
constexpr uint32_t kBoxBytes = kHeads * 128; // of 64 columns of a token's queries
constexpr uint32_t kConsumerWarps = kTileEntries / 16;
static_assert(kThreads == 32 * kConsumerWarps + 32, "a warp has 16 entries, and one fetches");

struct IndexShared {
    uint8_t q[kSlots][2][kBoxBytes]; // queries of a token, 64 columns each
    bf16 weights[kSlots][kHeads];
    uint64_t full[kSlots], empty[kSlots];
};
static_assert(sizeof(IndexShared) <= kSharedBytes);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Operands of the scores.
struct Scoring {
    RaggedBatch batch;
    const bf16 *entries; // [entry_pages, per_page, dim]
    float *scores;       // [tokens of the launch, most]
    OwnTokens own;
    uint32_t entry_pages, ratio, k, tokens, tile, most;

    // The first token of this block's tile. The others follow it in the step: a tile lies in one of the blocks that
    // ranks take in turn, or there is one rank.
    __device__ __forceinline__ uint32_t token() const { return own.token(blockIdx.y * tile); }
    // Where the scores of token `t` of the tile begin.
    __device__ __forceinline__ float *scores_of(uint32_t t) const {
        return scores + size_t(blockIdx.y * tile + t - token()) * most;
    }

    // Calls `each(sequence, first, end)` for the tokens of this block's tile that see more than `least` entries,
    // sequence by sequence.
    template <typename Each> __device__ __forceinline__ void for_each_span(uint32_t least, Each each) const {
        const uint32_t last = token() + min(tile, tokens - blockIdx.y * tile);
        for (uint32_t t = token(); t < last;) {
            const Sequence sequence = sequence_of(batch, t, limits::kv_cache::kNoSlot);
            if (t >= sequence.end) return; // behind the last row
            const uint32_t end = min(sequence.end, last);
            if (!sequence.pads()) {
                // The first position that sees so many.
                const uint32_t position = (least + 1) * ratio - 1;
                const uint32_t skipped = position > sequence.start ? position - sequence.start : 0;
                const uint32_t first = max(t, sequence.first + skipped);
                if (first < end) each(sequence, first, end);
            }
            t = end;
        }
    }
};

// Fetches the queries and head weights of all tokens in order. By one lane.
__device__ void fetch_queries(IndexShared &shared, const TensorMap &q, const bf16 *weights, const Scoring &x,
                              uint32_t least) {
    Ring<kSlots> slot;
    x.for_each_span(least, [&](const Sequence &, uint32_t first, uint32_t end) {
        for (uint32_t t = first; t < end; ++t, slot.next()) {
            uint64_t *full = &shared.full[slot.index];
            wait(&shared.empty[slot.index], slot.parity ^ 1);
            arrive_expecting(full, sizeof shared.q[0] + sizeof shared.weights[0]);
            copy_box(shared_address(shared.q[slot.index][0]), q, 0, t * kHeads, full);
            copy_box(shared_address(shared.q[slot.index][1]), q, 64, t * kHeads, full);
            copy_bulk(shared.weights[slot.index], weights + size_t(t) * kHeads, sizeof shared.weights[0], full);
        }
    });
}

// This warp's 16 entries from `first` on as operand A; the last of `seen` entries in place of those behind it.
__device__ __forceinline__ void load_entries(const Scoring &x, const Sequence &sequence, uint32_t first, uint32_t seen,
                                             uint4 (&a)[kSteps]) {
    const uint32_t lane = threadIdx.x % 32, per_page = kPageTokens / x.ratio;
    const uint32_t *row[2];
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        const uint32_t i = min(first + lane / 4 + 8 * r, seen - 1);
        const bf16 *entry = x.entries + entry_of(x.batch, sequence.row, i, per_page, x.entry_pages) * kDim;
        row[r] = reinterpret_cast<const uint32_t *>(entry) + lane % 4;
    }
#pragma unroll
    for (uint32_t c = 0; c < kSteps; ++c)
        a[c] = make_uint4(row[0][8 * c], row[1][8 * c], row[0][8 * c + 4], row[1][8 * c + 4]);
}

// The sum over heads of this lane's quad: of row group in lanes 0 and 2 of the quad, of row group + 8 in lanes 1 and 3.
__device__ __forceinline__ float add_heads(const float (&dot)[32], const uint32_t (&weights)[8]) {
    float sum[2][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
        const float2 w = widen(weights[i]);
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            sum[r][0] = fmaf(w.x, fmaxf(dot[4 * i + 2 * r], 0.f), sum[r][0]);
            sum[r][1] = fmaf(w.y, fmaxf(dot[4 * i + 2 * r + 1], 0.f), sum[r][1]);
        }
    }
    const float low = sum[0][0] + sum[0][1], high = sum[1][0] + sum[1][1];
    const bool odd = threadIdx.x % 2;
    const float total = (odd ? high : low) + __shfl_xor_sync(kAll, odd ? low : high, 1);
    return total + __shfl_xor_sync(kAll, total, 2);
}

// Scores of this warpgroup's entries for all tokens.
__device__ void score_entries(IndexShared &shared, const Scoring &x, uint32_t first_entry, uint32_t least) {
    const uint32_t lane = threadIdx.x % 32, first = first_entry + threadIdx.x / 32 * 16;
    const uint32_t own = first + lane / 4 + lane % 2 * 8; // the entry that this lane stores
    Ring<kSlots> slot;
    x.for_each_span(least, [&](const Sequence &sequence, uint32_t begin, uint32_t end) {
        // Of the last token.
        const uint32_t seen = (sequence.start + (end - 1 - sequence.first) + 1) / x.ratio;
        uint4 a[kSteps];
        load_entries(x, sequence, first, seen, a);
        float *to = x.scores_of(begin) + own;
        const bool stores = lane % 4 < 2 && own < seen;
        for (uint32_t t = begin; t < end; ++t, to += x.most, slot.next()) {
            const uint64_t b = descriptor(shared_address(shared.q[slot.index]), 0, 1024);
            float dot[32];
            wait(&shared.full[slot.index], slot.parity);
            wgmma_fence();
            wgmma<true>(dot, a[0], b);
#pragma unroll
            for (uint32_t c = 1; c < kSteps; ++c) wgmma<false>(dot, a[c], b + c / 4 * (kBoxBytes / 16) + c % 4 * 2);
            wgmma_commit();
            uint32_t weights[8];
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i)
                weights[i] = reinterpret_cast<const uint32_t *>(shared.weights[slot.index])[4 * i + lane % 4];
            wgmma_wait<0>();
            const float total = add_heads(dot, weights);
            __syncwarp(); // all lanes have the weights: an arrival overtakes loads from shared memory that wait behind
                          // stores
            if (lane == 0) arrive(&shared.empty[slot.index]);
            if (stores) *to = total;
        }
    });
}
#endif

// Grid: tiles of entries, tiles of tokens.
extern "C" __global__ __launch_bounds__(kThreads, 1) void index_scores_wgmma(
    const __grid_constant__ TensorMap q, // [tokens of the step * heads, dim], boxes of 64 rows
    const bf16 *weights,                 // [tokens of the step, heads]
    const bf16 *entries,                 // [entry_pages, 128 / ratio, dim]
    RAGGED_BATCH_POINTERS,
    float *scores, // [tokens, most]
    uint32_t rows, uint32_t pages, uint32_t entry_pages, uint32_t ratio, uint32_t k, uint32_t first_own, uint32_t rank,
    uint32_t ranks, uint32_t tokens, uint32_t tile, uint32_t most) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t memory[];
    IndexShared &shared = *reinterpret_cast<IndexShared *>(memory);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < kSlots; ++i)
            barrier_init(&shared.full[i], 1), barrier_init(&shared.empty[i], kConsumerWarps);
        barriers_ready();
    }
    __syncthreads();
    start_after_predecessor();
    const Scoring x = {RAGGED_BATCH, entries, scores, {first_own, rank, ranks}, entry_pages, ratio, k,
                       tokens,       tile,    most};
    // What tokens must see beyond: all that is chosen without scores, and the entries before this block's.
    const uint32_t first_entry = blockIdx.x * kTileEntries, least = max(k, first_entry);
    if (threadIdx.x / 32 < kConsumerWarps) score_entries(shared, x, first_entry, least);
    else if (elected()) fetch_queries(shared, q, weights, x, least);
#endif
}
