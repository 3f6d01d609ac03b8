// ops::gated_delta_chunks, second kernel: walks through the chunks of each chain with the state in registers.
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every product
// (the transposes of the formulas), each product's result is in registers what the next one takes: the warps that carry
// the state never wait for each other, only for chunks, which other warps of the block fetch ahead. Where there is
// enough shared memory, on Hopper, further warps compute the outputs, one chunk behind, and a warpgroup's warps multiply
// together.
#include "gated_delta_chunks.cuh"
#include "hopper.cuh"

// One stop of a walk.
struct Item {
    uint32_t first, tokens; // at most kChunk; none of an empty segment
    uint32_t chunk;
    uint32_t to; // slot of the state after it, or kNoState
    bool last;
};

// Operands of products from the warps that carry to those that read: the state before the chunk, and N.
struct Passed {
    uint4 state[kHead / 16][32], news[kBands][32];
};

template <bool Hopper> struct Shared {
    static constexpr uint32_t kRows = Hopper ? 64 : 32;      // of the state, elements of v
    static constexpr uint32_t kWarps = kRows / 16;           // that carry; as many read if others do
    static constexpr uint32_t kFetchers = Hopper ? 128 : 64; // threads
    static constexpr uint32_t kThreads = (Hopper ? 2 : 1) * kWarps * 32 + kFetchers;
    static constexpr uint32_t kAhead = Hopper ? 2 : 1; // chunks that are fetched ahead
    static constexpr uint32_t kRing = kAhead + 1;
    // Rows of values are 16 bytes apart from multiples of 32 words: tokens 2 c and elements 2 r touch all banks.
    static constexpr uint32_t kValues = kRows / 8 + 1;
    Tile k[kRing], q[kRing];
    uint4 v[kRing][kChunk * kValues];
    CarryPart carry[kRing];
    ReadPart read[kRing];
    Passed passed[Hopper ? 2 : 0][kWarps];
    Item items[4];
};

struct Operands {
    const bf16 *mixed;
    const Part *parts;
    const uint32_t *segments;
    uint32_t tokens, slots, key_heads, value_heads;
    uint32_t head, key_head, row; // of v: the block's first row of the state

    __device__ __forceinline__ size_t channels() const { return size_t(2 * key_heads + value_heads) * kHead; }
    // A head of q of the first token of a chunk; k is key_heads further.
    __device__ __forceinline__ const bf16 *query(const Item &item) const {
        return mixed + item.first * channels() + key_head * kHead;
    }
    // The block's elements of v.
    __device__ __forceinline__ const bf16 *value(const Item &item) const {
        return mixed + item.first * channels() + (2 * key_heads + head) * kHead + row;
    }
    // Where a lane has the first of its rows of the state; `warp_row`: the warp's first in the block's.
    __device__ __forceinline__ float *state_row(float *states, uint32_t slot, uint32_t warp_row) const {
        uint32_t at = row + warp_row + threadIdx.x % 32 / 4 * 2;
        return states + ((size_t(slot) * value_heads + head) * kHead + at) * kHead + threadIdx.x % 4 * 2;
    }
    __device__ __forceinline__ const Part *part(const Item &item) const {
        return parts + size_t(item.chunk) * value_heads + head;
    }
};

// The fetching threads' way through the segments of a chain.
struct Way {
    uint32_t segment, end, at; // segments; token
    Segment now;

    __device__ __forceinline__ Item next(const Operands &x) {
        uint32_t here = min(now.end - at, kChunk), chunk = first_chunk(now, segment) + (at - now.first) / kChunk;
        bool done = at + here == now.end;
        Item item = {at, here, chunk, done ? now.to : kNoState, done && segment + 1 == end};
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
    using S = Shared<Hopper>;
    constexpr uint32_t kPieces = S::kRows / 8, kAtOnce = S::kFetchers / kPieces;
    uint32_t t = thread / kPieces, piece = thread % kPieces;
    from += t * channels + 8 * piece;
    to += t * S::kValues + piece;
    int32_t left = int32_t(tokens) - int32_t(t);
#pragma unroll
    for (uint32_t i = 0; i < kChunk / kAtOnce; ++i) {
        copy16_or_zero(to + i * kAtOnce * S::kValues, from, int32_t(i * kAtOnce) < left);
        from += kAtOnce * channels;
    }
}

template <uint32_t Threads, class T>
__device__ __forceinline__ void fetch_part(T &to, const T &from, uint32_t thread) {
    constexpr uint32_t kPieces = sizeof(T) / 16, kRounds = kPieces / Threads;
    const uint4 *source = reinterpret_cast<const uint4 *>(&from) + thread;
    uint4 *sink = reinterpret_cast<uint4 *>(&to) + thread;
#pragma unroll
    for (uint32_t i = 0; i < kRounds; ++i) copy16_or_zero(sink + i * Threads, source + i * Threads, true);
    if (thread < kPieces - kRounds * Threads) copy16_or_zero(sink + kRounds * Threads, source + kRounds * Threads, true);
}

// What carries the state over a chunk.
template <bool Hopper>
__device__ __forceinline__ void fetch_carry(Shared<Hopper> &s, uint32_t slot, const Operands &x, const Item &item,
                                            uint32_t thread) {
    constexpr uint32_t kFetchers = Shared<Hopper>::kFetchers;
    fetch_tile<kFetchers>(s.k[slot], x.query(item) + x.key_heads * kHead, x.channels(), item.tokens, thread);
    fetch_values<Hopper>(s.v[slot], x.value(item), x.channels(), item.tokens, thread);
    fetch_part<kFetchers>(s.carry[slot], x.part(item)->carry, thread);
}

// What gives the outputs of a chunk.
template <bool Hopper>
__device__ __forceinline__ void fetch_read(Shared<Hopper> &s, uint32_t slot, const Operands &x, const Item &item,
                                           uint32_t thread) {
    constexpr uint32_t kFetchers = Shared<Hopper>::kFetchers;
    fetch_tile<kFetchers>(s.q[slot], x.query(item), x.channels(), item.tokens, thread);
    fetch_part<kFetchers>(s.read[slot], x.part(item)->read, thread);
}

// 16 rows of the state, as the results of products: elements 0, 1 of tile t are row 2 r at columns 8 t + 2 c, + 1, those
// at 2, 3 are row 2 r + 1, for lane 4 r + c. Neighbouring rows in a lane make pairs of what is read and written by row.
using State = float[kHead / 8][4];

__device__ __forceinline__ void load_state(State &state, const float *row) {
#pragma unroll
    for (int t = 0; t < int(kHead / 8); ++t) {
        float2 even = *reinterpret_cast<const float2 *>(row + 8 * t);
        float2 odd = *reinterpret_cast<const float2 *>(row + kHead + 8 * t);
        state[t][0] = even.x, state[t][1] = even.y, state[t][2] = odd.x, state[t][3] = odd.y;
    }
}

__device__ __forceinline__ void store_state(const State &state, float *row) {
#pragma unroll
    for (int t = 0; t < int(kHead / 8); ++t) {
        *reinterpret_cast<float2 *>(row + 8 * t) = make_float2(state[t][0], state[t][1]);
        *reinterpret_cast<float2 *>(row + kHead + 8 * t) = make_float2(state[t][2], state[t][3]);
    }
}

// Two tiles of results, 16 columns, as operand a.
__device__ __forceinline__ void as_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = narrow(low[0], low[1]), a[1] = narrow(low[2], low[3]);
    a[2] = narrow(high[0], high[1]), a[3] = narrow(high[2], high[3]);
}

// The state, and N, as operands a of all products of a chunk.
using StateOperand = uint32_t[kHead / 16][4];
using NewsOperand = uint32_t[kBands][4];

__device__ __forceinline__ void clear(float (&d)[kChunk / 8][4]) {
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.f;
}

// d[16, 64] = a[16, 128] tileᵀ for each warp, and `meanwhile`; a warpgroup's four do it at once on Hopper.
template <bool Hopper, class F>
__device__ __forceinline__ void multiply_tile(float (&d)[kChunk / 8][4], StateOperand &a, const Tile &tile,
                                              F meanwhile) {
    clear(d);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper) {
        uint64_t b = operand(shared_address(tile), 0, 1024);
        // All operands are in registers before the first product: what is moved in between serialises them.
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            asm volatile("" : "+r"(a[c][0]), "+r"(a[c][1]), "+r"(a[c][2]), "+r"(a[c][3]));
        }
        wgmma_fence();
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            uint64_t at = b + (c / 4 * kColumnPieces * 16 + c % 4 * 32) / 16;
            if (c == 0) wgmma<true>(reinterpret_cast<float(&)[kChunk / 2]>(d), a[c], at);
            else wgmma<false>(reinterpret_cast<float(&)[kChunk / 2]>(d), a[c], at);
        }
        wgmma_commit();
        meanwhile();
        wgmma_wait<0>();
        return;
    }
#endif
    meanwhile();
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t c = 0; c < kHead / 16; ++c) {
#pragma unroll
        for (uint32_t t = 0; t < kBands; ++t) {
            uint4 b = load_matrices(&tile[tile_piece(16 * t + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2)]);
            mma(d[2 * t], a[c][0], a[c][1], a[c][2], a[c][3], b.x, b.y);
            mma(d[2 * t + 1], a[c][0], a[c][1], a[c][2], a[c][3], b.z, b.w);
        }
    }
}

// d[16, 128] += a[16, 64] tile, as above.
template <bool Hopper, class F>
__device__ __forceinline__ void multiply_by_rows(State &d, NewsOperand &a, const Tile &tile, F meanwhile) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper) {
        uint64_t b = operand(shared_address(tile), kColumnPieces * 16, 1024);
        wgmma_fence();
#pragma unroll
        for (uint32_t j = 0; j < kBands; ++j) {
            wgmma_transposed(reinterpret_cast<float(&)[kHead / 2]>(d), a[j], b + j * 16 * 128 / 16);
        }
        wgmma_commit();
        meanwhile();
        wgmma_wait<0>();
        return;
    }
#endif
    meanwhile();
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            uint32_t token = 16 * j + lane / 8 % 2 * 8 + lane % 8;
            uint4 b = load_transposed(&tile[tile_piece(token, 2 * c + lane / 16)]);
            mma(d[2 * c], a[j][0], a[j][1], a[j][2], a[j][3], b.x, b.y);
            mma(d[2 * c + 1], a[j][0], a[j][1], a[j][2], a[j][3], b.z, b.w);
        }
    }
}

// d[16, 64] += a[16, 64] triangleᵀ
__device__ __forceinline__ void multiply_triangle(float (&d)[kChunk / 8][4], const NewsOperand &a,
                                                  const uint4 (*triangle)[32]) {
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
#pragma unroll
        for (uint32_t i = j; i < kBands; ++i) {
            uint4 b = triangle[block_index(i, j)][threadIdx.x % 32];
            mma(d[2 * i], a[j][0], a[j][1], a[j][2], a[j][3], b.x, b.y);
            mma(d[2 * i + 1], a[j][0], a[j][1], a[j][2], a[j][3], b.z, b.w);
        }
    }
}

template <uint32_t N> __device__ __forceinline__ void pass(uint4 (&to)[N][32], const uint32_t (&a)[N][4]) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) to[i][threadIdx.x % 32] = make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]);
}

template <uint32_t N> __device__ __forceinline__ void receive(uint32_t (&a)[N][4], const uint4 (&from)[N][32]) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
        uint4 v = from[i][threadIdx.x % 32];
        a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
    }
}

// Carries 16 rows of the state over a chunk. Gives the state before it and N, in registers, or to the warps that read.
// `row`: first of the warp's rows in the block's.
template <bool Hopper>
__device__ __forceinline__ void carry(State &state, StateOperand &before, NewsOperand &news, const Shared<Hopper> &s,
                                      uint32_t slot, uint32_t row, Passed *passed) {
    constexpr uint32_t kPitch = Shared<Hopper>::kValues * 4;
    uint32_t quad = threadIdx.x % 4;
    const uint32_t *v = reinterpret_cast<const uint32_t *>(s.v[slot]) + row / 2 + threadIdx.x % 32 / 4;
    const CarryPart &part = s.carry[slot];
    float d[kChunk / 8][4];
    float2 keys[kChunk / 8];
    uint32_t values[kChunk / 8][2];
#pragma unroll
    for (uint32_t c = 0; c < kHead / 16; ++c) as_operand(before[c], state[2 * c], state[2 * c + 1]);
    multiply_tile<Hopper>(d, before, s.k[slot], [&] {
#pragma unroll
        for (uint32_t t = 0; t < kChunk / 8; ++t) {
            uint32_t token = 8 * t + 2 * quad;
            keys[t] = *reinterpret_cast<const float2 *>(&part.keys[token]);
            values[t][0] = v[token * kPitch], values[t][1] = v[(token + 1) * kPitch];
        }
        if (Hopper) pass(passed->state, before);
    });
    // What the state does not yet say of the values.
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        float2 v0 = widen(values[t][0]), v1 = widen(values[t][1]);
        d[t][0] = v0.x - keys[t].x * d[t][0], d[t][1] = v1.x - keys[t].y * d[t][1];
        d[t][2] = v0.y - keys[t].x * d[t][2], d[t][3] = v1.y - keys[t].y * d[t][3];
    }
    NewsOperand a;
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) as_operand(a[j], d[2 * j], d[2 * j + 1]);
    clear(d);
    multiply_triangle(d, a, part.solve);
    float decay = part.decay[0];
#pragma unroll
    for (uint32_t t = 0; t < kHead / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[t][e] *= decay;
    }
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
        as_operand(news[j], d[2 * j], d[2 * j + 1]);
#pragma unroll
        for (uint32_t t = 2 * j; t < 2 * j + 2; ++t) {
            float2 scale = *reinterpret_cast<const float2 *>(&part.carry[8 * t + 2 * quad]);
            d[t][0] *= scale.x, d[t][1] *= scale.y, d[t][2] *= scale.x, d[t][3] *= scale.y;
        }
        as_operand(a[j], d[2 * j], d[2 * j + 1]);
    }
    multiply_by_rows<Hopper>(state, a, s.k[slot], [&] {
        if (Hopper) pass(passed->news, news);
    });
}

// The outputs of a chunk, 16 elements of v. `out`: at the warp's elements of the first token.
template <bool Hopper>
__device__ __forceinline__ void read(StateOperand &before, const NewsOperand &news, const Tile &q, const ReadPart &part,
                                     float *out, size_t width, uint32_t tokens) {
    uint32_t group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    float d[kChunk / 8][4];
    float2 queries[kChunk / 8];
    multiply_tile<Hopper>(d, before, q, [&] {
#pragma unroll
        for (uint32_t t = 0; t < kChunk / 8; ++t) {
            queries[t] = *reinterpret_cast<const float2 *>(&part.queries[8 * t + 2 * quad]);
        }
    });
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        d[t][0] *= queries[t].x, d[t][1] *= queries[t].y, d[t][2] *= queries[t].x, d[t][3] *= queries[t].y;
    }
    multiply_triangle(d, news, part.weights);
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float *to = out + token * width + 2 * group;
        if (token < tokens) *reinterpret_cast<float2 *>(to) = make_float2(d[t][0], d[t][2]);
        if (token + 1 < tokens) *reinterpret_cast<float2 *>(to + width) = make_float2(d[t][1], d[t][3]);
    }
}

// All threads of the block meet in different places: once a chunk, and once more where a chunk is read after the next one
// began. What was copied by threads is then there for the warpgroups' products too.
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
