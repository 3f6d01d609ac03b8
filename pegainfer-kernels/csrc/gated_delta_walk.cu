// ops::gated_delta_chunks, second kernel: walks through the chunks of each chain with the state in registers.
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every product
// (the transposes of the formulas), each product's result is in registers what the next one takes: the warps that carry
// the state never wait for each other, only for chunks, which other warps of the block fetch ahead. Where there is
// enough shared memory, on Hopper, further warps compute the outputs, one chunk behind, and a warpgroup's warps
// multiply together.
#include "gated_delta_step.cuh"

// All threads of the block meet in different places: once a chunk, and once more where a chunk is read after the next
// one began. What was copied by threads is then there for the warpgroups' products too.
template <bool Hopper> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync 0;" ::: "memory");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (Hopper) fence_shared_for_async();
#endif
}

// One walk is a chain's for some rows of one head's state. False after the last one.
template <bool Hopper>
__device__ __forceinline__ bool next_walk(const Shared<Hopper> &s, Operands &x, Way &way, const Chains *chains,
                                          uint32_t count) {
    constexpr uint32_t kSlices = kHead / Shared<Hopper>::kRows;
    meet<Hopper>();
    uint32_t chain = s.walk / (x.value_heads * kSlices), slice = s.walk % (x.value_heads * kSlices);
    if (chain >= chains->count) return false;
    x.head = slice / kSlices;
    x.key_head = x.head / (x.value_heads / x.key_heads);
    x.row = slice % kSlices * Shared<Hopper>::kRows;
    uint32_t begin = chains->begin[chain];
    check_segment(x.segments, begin, x.tokens, x.slots);
    Segment now = load_segment(x.segments, begin);
    way = {begin, chain_end(x.segments, count, begin), now.first, now};
    return true;
}

template <bool Hopper> __device__ __forceinline__ void run_fetch(Shared<Hopper> &s, const Operands &x, Way way) {
    using S = Shared<Hopper>;
    uint32_t thread = threadIdx.x % S::kFetchers;
    Item behind = {}; // fetched for carrying but not for reading
    auto next = [&](uint32_t i) {
        Item item = {};
        if (way.segment < way.end) {
            item = way.next(x);
            if (thread == 0) s.items[i % 4] = item;
            if (item.tokens > 0) fetch_carry(s, i % S::kRing, x, item, thread);
        }
        if (!Hopper) behind = item;
        if (behind.tokens > 0) fetch_read(s, (i - Hopper) % S::kRing, x, behind, thread);
        behind = item;
        copies_commit();
    };
    for (uint32_t i = 0; i < S::kAhead; ++i) next(i);
    for (uint32_t i = 0;; ++i) {
        copies_wait<S::kAhead - 1>();
        meet<false>();
        bool last = s.items[i % 4].last;
        next(i + S::kAhead);
        if (last) break;
    }
    if (Hopper) {
        copies_wait<0>();
        meet<false>();
    }
}

// `row`: first of the warp's rows in the block's.
template <bool Hopper>
__device__ __forceinline__ void run_carry(Shared<Hopper> &s, const Operands &x, State &state, float *states, float *out,
                                          uint32_t row) {
    size_t width = size_t(x.value_heads) * kHead;
    for (uint32_t i = 0;; ++i) {
        meet<Hopper>();
        const Item item = s.items[i % 4];
        if (item.tokens > 0) {
            uint32_t slot = i % Shared<Hopper>::kRing;
            StateOperand before;
            NewsOperand news;
            carry(state, before, news, s, slot, row, Hopper ? &s.passed[i % 2][row / 16] : nullptr);
            float *to = out + item.first * width;
            if (!Hopper) read<false>(before, news, s.q[slot], s.read[slot], to, width, item.tokens);
        }
        if (item.to != kNoState) store_state(state, x.state_row(states, item.to, row));
        if (item.last) break;
    }
    if (Hopper) meet<Hopper>();
}

__device__ __forceinline__ void run_read(Shared<true> &s, const Operands &x, float *out, uint32_t warp) {
    size_t width = size_t(x.value_heads) * kHead;
    meet<true>();
    for (uint32_t i = 0;; ++i) {
        const Item item = s.items[i % 4];
        meet<true>();
        if (item.tokens > 0) {
            uint32_t slot = i % Shared<true>::kRing;
            StateOperand before;
            NewsOperand news;
            receive(before, s.passed[i % 2][warp].state);
            receive(news, s.passed[i % 2][warp].news);
            read<true>(before, news, s.q[slot], s.read[slot], out + item.first * width, width, item.tokens);
        }
        if (item.last) break;
    }
}

// Registers go from the warpgroup that fetches to those that multiply.
template <bool Hopper, bool Many> __device__ __forceinline__ void registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper && Many) registers_raise<224>();
    if constexpr (Hopper && !Many) registers_lower<56>();
#endif
}

template <bool Hopper>
__device__ __forceinline__ void walk(Operands x, float *states, float *out, uint32_t count) {
    using S = Shared<Hopper>;
    release_successor();
    extern __shared__ __align__(1024) unsigned char memory[];
    S &s = *reinterpret_cast<S *>(memory);
    wait_for_predecessor();
    Chains *chains = chains_behind(x.parts, x.tokens, count, x.value_heads);
    uint32_t warp = threadIdx.x / 32, row = warp % S::kWarps * 16;
    auto columns = [&] { return out + x.head * kHead + x.row + row; };
    Way way;
    if (warp < S::kWarps) {
        registers<Hopper, true>();
        while (next_walk(s, x, way, chains, count)) {
            State state = {};
            if (way.now.from != kNoState) load_state(state, x.state_row(states, way.now.from, row));
            run_carry(s, x, state, states, columns(), row);
        }
    } else if (Hopper && warp < 2 * S::kWarps) {
        registers<Hopper, true>();
        while (next_walk(s, x, way, chains, count)) {
            if constexpr (Hopper) run_read(s, x, columns(), warp - S::kWarps);
        }
    } else {
        registers<Hopper, false>();
        auto take = [&] {
            if (threadIdx.x % S::kFetchers == 0) s.walk = atomicAdd(&chains->taken, 1);
        };
        for (take(); next_walk(s, x, way, chains, count); take()) run_fetch(s, x, way);
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false; // the launcher takes gated_delta_walk
#endif

// grid: as many blocks as run at once, or fewer; they share the walks.
#define WALK(name, hopper)                                                                                             \
    extern "C" __global__ void __launch_bounds__(Shared<hopper>::kThreads, hopper ? 1 : 2)                             \
        name(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states, float *out,                \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads) {              \
        Operands x = {mixed, parts, segments, tokens, slots, key_heads, value_heads};                                  \
        if constexpr (hopper && !kHopper) __trap();                                                                    \
        else walk<hopper>(x, states, out, count);                                                                      \
    }
WALK(gated_delta_walk, false)
WALK(gated_delta_walk_hopper, true)
static_assert(sizeof(Shared<false>) == 97920 && sizeof(Shared<true>) == 208272, "cuda/delta_chunks.rs");
static_assert(Shared<false>::kThreads == 128 && Shared<true>::kThreads == 384, "cuda/delta_chunks.rs");
