// The chunked gated delta rule, second kernel: inter-chunk scan. Goes through the chunks of each chain of segments with
// the state in registers, and computes the outputs.
//
//   N = T (V - diag(exp(G) a) K Sᵀ);  O = diag(exp(G) c) Q Sᵀ + P N
//   S' = exp(G_last) S + (diag(exp(G_last - G) a) N)ᵀ K
// Names and terms: csrc/delta_rule/chunks.cuh. Chains of more than 16 tokens, heads of 128; `gated_delta_scan_wgmma`
// on compute capability 9.0, `gated_delta_scan_mma` elsewhere. Reference: src/cpu/gated_delta/chunked.rs. Technique:
// warp specialisation (producers copy by cp.async; Hopper: register reallocation, wgmma with A in registers, outputs
// one chunk behind on warps of their own), persistent blocks that draw work items from a counter. Bound by the latency
// of the scan: with the first kernel 43 us at 1k tokens, 134 at 4k, 499 at 16k on an H200, 1.9 us a chunk
// (docs/benchmarks/h200-qwen35-4b.md).
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every GEMM
// (the transposes of the formulas), each GEMM's accumulators are the operand A of the next: the warps that update the
// state never wait for each other, only for chunks, which other warps of the block fetch ahead.
#include "delta_rule/step.cuh"
#include "abi/delta_rule_scan.h"

// All threads of the block meet in different places: once a chunk, and once more where a chunk's outputs are computed
// after the next one began. What was copied by threads is then there for wgmma too.
template <bool Hopper> __device__ __forceinline__ void block_sync() {
    asm volatile("bar.sync 0;" ::: "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (Hopper) fence_shared_for_async();
#endif
}

// A work item is a chain's scan for some rows of one head's state. False after the last one.
template <bool Hopper>
__device__ __forceinline__ bool next_item(const ScanShared<Hopper> &s, ScanOperands &x, ChainCursor &at,
                                          const Chains *chains, uint32_t count) {
    constexpr uint32_t kRowTiles = kHead / ScanShared<Hopper>::kRows;
    block_sync<Hopper>();
    uint32_t chain = s.scan / (x.value_heads * kRowTiles), row_tile = s.scan % (x.value_heads * kRowTiles);
    if (chain >= chains->count) return false;
    x.head = row_tile / kRowTiles;
    x.key_head = x.head / (x.value_heads / x.key_heads);
    x.row = row_tile % kRowTiles * ScanShared<Hopper>::kRows;
    uint32_t begin = chains->begin[chain];
    check_segment(x.segments, begin, x.tokens, x.slots);
    Segment now = load_segment(x.segments, begin);
    at = {begin, chain_end(x.segments, count, begin), now.first, now};
    return true;
}

template <bool Hopper>
__device__ __forceinline__ void run_fetch(ScanShared<Hopper> &s, const ScanOperands &x, ChainCursor at) {
    using S = ScanShared<Hopper>;
    uint32_t thread = threadIdx.x % S::kFetchers;
    ChunkItem behind = {}; // whose state terms are fetched, but not its output terms
    auto next = [&](uint32_t i) {
        ChunkItem item = {};
        if (at.segment < at.end) {
            item = at.next(x);
            if (thread == 0) s.items[i % 4] = item;
            if (item.tokens > 0) fetch_state_terms(s, i % S::kRing, x, item, thread);
        }
        if (!Hopper) behind = item;
        if (behind.tokens > 0) fetch_output_terms(s, (i - Hopper) % S::kRing, x, behind, thread);
        behind = item;
        copies_commit();
    };
    for (uint32_t i = 0; i < S::kAhead; ++i) next(i);
    for (uint32_t i = 0;; ++i) {
        copies_wait<S::kAhead - 1>();
        block_sync<false>();
        bool last = s.items[i % 4].last;
        next(i + S::kAhead);
        if (last) break;
    }
    if (Hopper) {
        copies_wait<0>();
        block_sync<false>();
    }
}

// `row`: first of the warp's rows in the block's.
template <bool Hopper>
__device__ __forceinline__ void run_state(ScanShared<Hopper> &s, const ScanOperands &x, State &state, float *states,
                                          float *out, uint32_t row) {
    size_t width = size_t(x.value_heads) * kHead;
    for (uint32_t i = 0;; ++i) {
        block_sync<Hopper>();
        const ChunkItem item = s.items[i % 4];
        if (item.tokens > 0) {
            uint32_t slot = i % ScanShared<Hopper>::kRing;
            StateOperand before;
            NewValuesOperand new_values;
            update_state(state, before, new_values, s, slot, row, Hopper ? &s.handoff[i % 2][row / 16] : nullptr);
            float *to = out + item.first * width;
            if (!Hopper) output<false>(before, new_values, s.q[slot], s.output_terms[slot], to, width, item.tokens);
        }
        if (item.to != kNoState) store_state(state, x.state_row(states, item.to, row));
        if (item.last) break;
    }
    if (Hopper) block_sync<Hopper>();
}

__device__ __forceinline__ void run_output(ScanShared<true> &s, const ScanOperands &x, float *out, uint32_t warp) {
    size_t width = size_t(x.value_heads) * kHead;
    block_sync<true>();
    for (uint32_t i = 0;; ++i) {
        const ChunkItem item = s.items[i % 4];
        block_sync<true>();
        if (item.tokens > 0) {
            uint32_t slot = i % ScanShared<true>::kRing;
            StateOperand before;
            NewValuesOperand new_values;
            receive(before, s.handoff[i % 2][warp].state);
            receive(new_values, s.handoff[i % 2][warp].new_values);
            output<true>(before, new_values, s.q[slot], s.output_terms[slot], out + item.first * width, width,
                         item.tokens);
        }
        if (item.last) break;
    }
}

// Registers go from the producer warpgroup to the consumers: 128 * 56 + 256 * 224 of the 65,536 of a multiprocessor.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

template <bool Hopper, bool IsConsumer> __device__ __forceinline__ void set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper && IsConsumer) registers_raise<kConsumerRegisters>();
    if constexpr (Hopper && !IsConsumer) registers_lower<kProducerRegisters>();
#endif
}

template <bool Hopper> __device__ __forceinline__ void scan(ScanOperands x, float *states, float *out, uint32_t count) {
    using S = ScanShared<Hopper>;
    release_successor();
    extern __shared__ __align__(1024) unsigned char memory[];
    S &s = *reinterpret_cast<S *>(memory);
    wait_for_predecessor();
    Chains *chains = chains_behind(x.parts, x.tokens, count, x.value_heads);
    uint32_t warp = threadIdx.x / 32, row = warp % S::kWarps * 16;
    auto columns = [&] { return out + x.head * kHead + x.row + row; };
    ChainCursor at;
    if (warp < S::kWarps) {
        set_registers<Hopper, true>();
        while (next_item(s, x, at, chains, count)) {
            State state = {};
            if (at.now.from != kNoState) load_state(state, x.state_row(states, at.now.from, row));
            run_state(s, x, state, states, columns(), row);
        }
    } else if (Hopper && warp < 2 * S::kWarps) {
        set_registers<Hopper, true>();
        while (next_item(s, x, at, chains, count)) {
            if constexpr (Hopper) run_output(s, x, columns(), warp - S::kWarps);
        }
    } else {
        set_registers<Hopper, false>();
        auto take = [&] {
            if (threadIdx.x % S::kFetchers == 0) s.scan = atomicAdd(&chains->taken, 1);
        };
        for (take(); next_item(s, x, at, chains, count); take()) run_fetch(s, x, at);
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false; // the launcher takes gated_delta_scan_mma
#endif

// Grid: as many blocks as are resident at once, or fewer; they share the work items. A bad segment stops the kernel.
#define SCAN(name, hopper)                                                                                             \
    extern "C" __global__ void __launch_bounds__(ScanShared<hopper>::kThreads, hopper ? 1 : 2)                         \
        name(const bf16 *mixed,       /* [tokens, (2 key_heads + value_heads) * 128]: q, k, v after the convolution */ \
             const IntraChunk *parts, /* [tokens / 64 + count, value_heads], then `Chains` */                          \
             const uint32_t *segments, /* [count, 4], csrc/delta_rule/segments.cuh */                                  \
             float *states,            /* [slots, value_heads, 128, 128]: v, k */                                      \
             float *out,               /* [tokens, value_heads * 128] */                                               \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads) {              \
        ScanOperands x = {mixed, parts, segments, tokens, slots, key_heads, value_heads};                              \
        if constexpr (hopper && !kHopper) __trap();                                                                    \
        else scan<hopper>(x, states, out, count);                                                                      \
    }
SCAN(gated_delta_scan_mma, false)
SCAN(gated_delta_scan_wgmma, true)
static_assert(sizeof(ScanShared<false>) == kMmaScanBytes && sizeof(ScanShared<true>) == kWgmmaScanBytes);
static_assert(ScanShared<false>::kThreads == kMmaScanThreads && ScanShared<true>::kThreads == kWgmmaScanThreads);
static_assert(ScanShared<false>::kRows == kMmaScanRows && ScanShared<true>::kRows == kWgmmaScanRows);
