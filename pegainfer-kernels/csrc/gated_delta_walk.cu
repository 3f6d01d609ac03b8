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
        copies_wait_until<S::kAhead - 1>();
        meet<false>();
        bool last = s.items[i % 4].last;
        next(i + S::kAhead);
        if (last) break;
    }
    if (Hopper) {
        copies_wait_until<0>();
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
__device__ __forceinline__ void walk(Operands x, float *states, float *out, uint32_t count, uint32_t longest) {
    using S = Shared<Hopper>;
    release_successor();
    extern __shared__ __align__(1024) unsigned char memory[];
    S &s = *reinterpret_cast<S *>(memory);
    constexpr uint32_t kSlices = kHead / S::kRows;
    uint32_t begin = blockIdx.y;
    // Blocks without work wait too: the kernel is complete when it and those before it are.
    if (!begins_chain(x.segments, begin)) return wait_for_predecessor();
    uint32_t end = chain_end(x.segments, count, begin);
    check_segment(x.segments, begin, x.tokens, x.slots);
    Segment now = load_segment(x.segments, begin);
    if (load_segment(x.segments, end - 1).end - now.first <= longest) return wait_for_predecessor();
    x.head = blockIdx.x / kSlices;
    x.key_head = x.head / (x.value_heads / x.key_heads);
    x.row = blockIdx.x % kSlices * S::kRows;

    uint32_t warp = threadIdx.x / 32, row = warp % S::kWarps * 16;
    out += x.head * kHead + x.row + row;
    if (warp < S::kWarps) {
        registers<Hopper, true>();
        // No other kernel of a step writes segments, nor states of this chain.
        State state = {};
        if (now.from != kNoState) load_state(state, x.state_row(states, now.from, row));
        wait_for_predecessor();
        run_carry(s, x, state, states, out, row);
    } else if (Hopper && warp < 2 * S::kWarps) {
        registers<Hopper, true>();
        wait_for_predecessor();
        if constexpr (Hopper) run_read(s, x, out, warp - S::kWarps);
    } else {
        registers<Hopper, false>();
        wait_for_predecessor();
        run_fetch(s, x, {begin, end, now.first, now});
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false; // the launcher takes gated_delta_walk
#endif

// grid: (value heads * 128 / kRows, segments).
#define WALK(name, hopper)                                                                                             \
    extern "C" __global__ void __launch_bounds__(Shared<hopper>::kThreads, hopper ? 1 : 2)                             \
        name(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states, float *out,                \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads,                \
             uint32_t longest) {                                                                                       \
        Operands x = {mixed, parts, segments, tokens, slots, key_heads, value_heads};                                  \
        if constexpr (hopper && !kHopper) __trap();                                                                    \
        else walk<hopper>(x, states, out, count, longest);                                                             \
    }
WALK(gated_delta_walk, false)
WALK(gated_delta_walk_hopper, true)
static_assert(sizeof(Shared<false>) == 97904 && sizeof(Shared<true>) == 208256, "cuda/delta_chunks.rs");
static_assert(Shared<false>::kThreads == 128 && Shared<true>::kThreads == 384, "cuda/delta_chunks.rs");
