// What the kernels of DeepSeek-V4's indexer share (deepseek_v4/index.cu, deepseek_v4/index_wgmma.cu): what a token
// sees.
#pragma once
#include "deepseek_v4/batch.cuh"

using namespace limits::deepseek_v4_attention;

// The tokens of a launch: some of the rank's own, from number `first` of these on. Ranks take turns with blocks of
// kShareTokens tokens.
struct OwnTokens {
    uint32_t first, rank, ranks;

    // Token of the step that is number `i` of the launch; it may lie behind the last one.
    __device__ __forceinline__ uint32_t token(uint32_t i) const {
        const uint32_t own = first + i;
        return (own / kShareTokens * ranks + rank) * kShareTokens + own % kShareTokens;
    }
};

// What a token of the launch, that of this block, sees: nothing if it is padding or behind the last one.
struct Sight {
    Sequence sequence;
    uint32_t token, entries;
};

__device__ __forceinline__ Sight sight_of(const RaggedBatch &batch, const OwnTokens &own, uint32_t ratio) {
    Sight sight;
    sight.token = own.token(blockIdx.x);
    sight.sequence = sequence_of(batch, sight.token, limits::kv_cache::kNoSlot);
    sight.entries = sight.sequence.pads() ? 0 : (batch.positions[sight.token] + 1) / ratio;
    return sight;
}
