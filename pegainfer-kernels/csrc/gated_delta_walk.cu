// ops::gated_delta_chunks, second kernel: walks through the chunks of each chain with the state in registers.
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every product
// (the transposes of the formulas), each product's result is in registers what the next one takes: the warps that carry
// the state never wait for each other, only for chunks, which other warps of the block fetch ahead. Where there is
// enough shared memory, further warps compute the outputs, one chunk behind.
#include "gated_delta_chunks.cuh"
#include "hopper.cuh"

constexpr uint32_t kFetchers = 64; // threads

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

// Rows: of the state, elements of v.
template <int Rows, bool Split> struct Shared {
    static constexpr int kAhead = Split ? 2 : 1; // chunks that are fetched ahead
    static constexpr int kRing = kAhead + 1;
    // Rows of values are 16 bytes apart from multiples of 32 words: tokens 2 c and elements 2 r touch all banks.
    static constexpr uint32_t kValues = Rows / 8 + 1;
    Tile k[kRing], q[kRing];
    uint4 v[kRing][kChunk * kValues];
    CarryPart carry[kRing];
    ReadPart read[kRing];
    Passed passed[Split ? 2 : 0][Rows / 16];
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
template <int Rows>
__device__ __forceinline__ void fetch_values(uint4 *to, const bf16 *from, size_t channels, uint32_t tokens) {
    constexpr uint32_t kPieces = Rows / 8, kRows = kFetchers / kPieces, kPitch = Shared<Rows, false>::kValues;
    uint32_t t = threadIdx.x % kFetchers / kPieces, piece = threadIdx.x % kPieces;
    from += t * channels + 8 * piece;
    to += t * kPitch + piece;
    int32_t left = int32_t(tokens) - int32_t(t);
#pragma unroll
    for (uint32_t i = 0; i < kChunk / kRows; ++i) {
        copy16_or_zero(to + i * kRows * kPitch, from, int32_t(i * kRows) < left);
        from += kRows * channels;
    }
}

template <class T> __device__ __forceinline__ void fetch_part(T &to, const T &from) {
    constexpr uint32_t kPieces = sizeof(T) / 16;
    const uint4 *source = reinterpret_cast<const uint4 *>(&from) + threadIdx.x % kFetchers;
    uint4 *sink = reinterpret_cast<uint4 *>(&to) + threadIdx.x % kFetchers;
#pragma unroll
    for (uint32_t i = 0; i < kPieces / kFetchers; ++i) copy16_or_zero(sink + i * kFetchers, source + i * kFetchers, true);
    constexpr uint32_t kDone = kPieces / kFetchers * kFetchers;
    if (threadIdx.x % kFetchers < kPieces - kDone) copy16_or_zero(sink + kDone, source + kDone, true);
}

// What carries the state over a chunk.
template <int Rows, bool Split>
__device__ __forceinline__ void fetch_carry(Shared<Rows, Split> &s, uint32_t slot, const Operands &x, const Item &item) {
    const bf16 *k = x.query(item) + x.key_heads * kHead;
    fetch_tile<kFetchers>(s.k[slot], k, x.channels(), item.tokens, threadIdx.x % kFetchers);
    fetch_values<Rows>(s.v[slot], x.value(item), x.channels(), item.tokens);
    fetch_part(s.carry[slot], x.part(item)->carry);
}

// What gives the outputs of a chunk.
template <int Rows, bool Split>
__device__ __forceinline__ void fetch_read(Shared<Rows, Split> &s, uint32_t slot, const Operands &x, const Item &item) {
    fetch_tile<kFetchers>(s.q[slot], x.query(item), x.channels(), item.tokens, threadIdx.x % kFetchers);
    fetch_part(s.read[slot], x.part(item)->read);
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

// d[16, 64] += a[16, 128] tileᵀ for each warp; a warpgroup's four do it at once on Hopper.
template <bool Hopper>
__device__ __forceinline__ void multiply_tile(float (&d)[kChunk / 8][4], uint32_t (&a)[kHead / 16][4],
                                              const Tile &tile) {
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
        wgmma_wait<0>();
        return;
    }
#endif
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
template <bool Hopper>
__device__ __forceinline__ void multiply_by_rows(State &d, const uint32_t (&a)[kBands][4], const Tile &tile) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper) {
        uint64_t b = operand(shared_address(tile), kColumnPieces * 16, 1024);
        wgmma_fence();
#pragma unroll
        for (uint32_t j = 0; j < kBands; ++j) {
            wgmma_transposed(reinterpret_cast<float(&)[kHead / 2]>(d), a[j], b + j * 16 * 128 / 16);
        }
        wgmma_commit();
        wgmma_wait<0>();
        return;
    }
#endif
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
__device__ __forceinline__ void multiply_triangle(float (&d)[kChunk / 8][4], const uint32_t (&a)[kBands][4],
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

// The state as operand a of all products of a chunk.
using StateOperand = uint32_t[kHead / 16][4];
using NewsOperand = uint32_t[kBands][4];

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

// Carries 16 rows of the state over a chunk. Gives the state before it and N, in registers and, if split, to the warps
// that read. `row`: first of the warp's rows in the block's.
template <bool Hopper, int Rows, bool Split>
__device__ __forceinline__ void carry(State &state, StateOperand &before, NewsOperand &news, const Shared<Rows, Split> &s,
                                      uint32_t slot, uint32_t row, Passed *passed) {
    uint32_t group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const CarryPart &part = s.carry[slot];
#pragma unroll
    for (uint32_t c = 0; c < kHead / 16; ++c) as_operand(before[c], state[2 * c], state[2 * c + 1]);
    float d[kChunk / 8][4] = {};
    multiply_tile<Hopper>(d, before, s.k[slot]);
    if (Split) pass(passed->state, before);
    // What the state does not yet say of the values.
    const uint32_t *v = reinterpret_cast<const uint32_t *>(s.v[slot]) + row / 2 + group;
    constexpr uint32_t kPitch = Shared<Rows, Split>::kValues * 4;
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float2 key = *reinterpret_cast<const float2 *>(&part.keys[token]);
        float2 v0 = widen(v[token * kPitch]), v1 = widen(v[(token + 1) * kPitch]);
        d[t][0] = v0.x - key.x * d[t][0], d[t][1] = v1.x - key.y * d[t][1];
        d[t][2] = v0.y - key.x * d[t][2], d[t][3] = v1.y - key.y * d[t][3];
    }
    NewsOperand a;
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
        as_operand(a[j], d[2 * j], d[2 * j + 1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) d[2 * j + e / 4][e % 4] = 0.f;
    }
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
    if (Split) pass(passed->news, news);
    multiply_by_rows<Hopper>(state, a, s.k[slot]);
}

// The outputs of a chunk, 16 elements of v. `out`: at the warp's elements of the first token.
template <bool Hopper>
__device__ __forceinline__ void read(StateOperand &before, const NewsOperand &news, const Tile &q,
                                     const ReadPart &part, float *out, size_t width, uint32_t tokens) {
    uint32_t group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    float d[kChunk / 8][4] = {};
    multiply_tile<Hopper>(d, before, q);
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        float2 query = *reinterpret_cast<const float2 *>(&part.queries[8 * t + 2 * quad]);
        d[t][0] *= query.x, d[t][1] *= query.y, d[t][2] *= query.x, d[t][3] *= query.y;
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

// All threads of the block, which take part in different places.
__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

// The three kinds of warps. They meet once a chunk, and once more where chunks are read one later than carried.
template <bool Hopper, int Rows, bool Split>
__device__ __forceinline__ void run_fetch(Shared<Rows, Split> &s, const Operands &x, Way way) {
    using S = Shared<Rows, Split>;
    Item behind = {}; // fetched for carrying but not for reading
    auto next = [&](uint32_t i) {
        Item item = {};
        if (way.segment < way.end) {
            item = way.next(x);
            if (threadIdx.x % kFetchers == 0) s.items[i % 4] = item;
            if (item.tokens > 0) fetch_carry(s, i % S::kRing, x, item);
        }
        if (!Split) behind = item;
        if (behind.tokens > 0) fetch_read(s, (i - Split) % S::kRing, x, behind);
        behind = item;
        copies_commit();
    };
    auto arrived = [&] {
        copies_wait_until<S::kAhead - 1>();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
        if (Hopper) fence_shared_for_async();
#endif
        meet();
    };
    for (uint32_t i = 0; i < S::kAhead; ++i) next(i);
    for (uint32_t i = 0;; ++i) {
        arrived();
        bool last = s.items[i % 4].last;
        next(i + S::kAhead);
        if (last) break;
    }
    if (Split) arrived();
}

// `row`: first of the warp's rows in the block's.
template <bool Hopper, int Rows, bool Split>
__device__ __forceinline__ void run_carry(Shared<Rows, Split> &s, const Operands &x, State &state, float *states,
                                          float *out, uint32_t row) {
    size_t width = size_t(x.value_heads) * kHead;
    for (uint32_t i = 0;; ++i) {
        meet();
        const Item item = s.items[i % 4];
        if (item.tokens > 0) {
            uint32_t slot = i % Shared<Rows, Split>::kRing;
            StateOperand before;
            NewsOperand news;
            carry<Hopper>(state, before, news, s, slot, row, Split ? &s.passed[i % 2][row / 16] : nullptr);
            float *to = out + item.first * width;
            if (!Split) read<Hopper>(before, news, s.q[slot], s.read[slot], to, width, item.tokens);
        }
        if (item.to != kNoState) store_state(state, x.state_row(states, item.to, row));
        if (item.last) break;
    }
    if (Split) meet();
}

template <bool Hopper, int Rows>
__device__ __forceinline__ void run_read(Shared<Rows, true> &s, const Operands &x, float *out, uint32_t warp) {
    size_t width = size_t(x.value_heads) * kHead;
    meet();
    for (uint32_t i = 0;; ++i) {
        const Item item = s.items[i % 4];
        meet();
        if (item.tokens > 0) {
            uint32_t slot = i % Shared<Rows, true>::kRing;
            StateOperand before;
            NewsOperand news;
            receive(before, s.passed[i % 2][warp].state);
            receive(news, s.passed[i % 2][warp].news);
            read<Hopper>(before, news, s.q[slot], s.read[slot], out + item.first * width, width, item.tokens);
        }
        if (item.last) break;
    }
}

// grid: (value heads * 128 / Rows, segments); Rows / 16 warps that carry, as many that read if Split, those that fetch.
template <int Rows, bool Split, bool Hopper>
__device__ __forceinline__ void walk(Operands x, float *states, float *out, uint32_t count, uint32_t longest) {
    release_successor();
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<Rows, Split> &s = *reinterpret_cast<Shared<Rows, Split> *>(memory);
    constexpr uint32_t kSlices = kHead / Rows, kWarps = Rows / 16;
    uint32_t begin = blockIdx.y;
    if (!begins_chain(x.segments, begin)) return;
    uint32_t end = chain_end(x.segments, count, begin);
    check_segment(x.segments, begin, x.tokens, x.slots);
    Segment now = load_segment(x.segments, begin);
    if (load_segment(x.segments, end - 1).end - now.first <= longest) return;
    x.head = blockIdx.x / kSlices;
    x.key_head = x.head / (x.value_heads / x.key_heads);
    x.row = blockIdx.x % kSlices * Rows;

    uint32_t warp = threadIdx.x / 32;
    if (warp < kWarps) {
        // No other kernel of a step writes segments, nor states of this chain.
        State state = {};
        uint32_t row = 16 * warp;
        if (now.from != kNoState) load_state(state, x.state_row(states, now.from, row));
        wait_for_predecessor();
        run_carry<Hopper>(s, x, state, states, out + x.head * kHead + x.row + row, row);
        return;
    }
    wait_for_predecessor();
    if constexpr (Split) {
        if (warp < 2 * kWarps) {
            warp -= kWarps;
            run_read<Hopper>(s, x, out + x.head * kHead + x.row + 16 * warp, warp);
            return;
        }
    }
    run_fetch<Hopper>(s, x, {begin, end, now.first, now});
}

#define WALK(name, rows, split, hopper)                                                                                \
    extern "C" __global__ void __launch_bounds__(kFetchers + rows * 2 * (1 + split), split ? 1 : 2)                    \
        name(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states, float *out,               \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads,                \
             uint32_t longest) {                                                                                       \
        walk<rows, split, hopper>({mixed, parts, segments, tokens, slots, key_heads, value_heads}, states, out, count, \
                                  longest);                                                                            \
    }
WALK(gated_delta_walk, 32, false, false)
WALK(gated_delta_walk_split, 32, true, false)
WALK(gated_delta_walk_hopper, 64, true, true)
