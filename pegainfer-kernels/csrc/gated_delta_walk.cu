// ops::gated_delta_chunks, second kernel: walks through the chunks of each chain with the state in registers.
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every product
// (the transposes of the formulas), each product's result is in registers what the next one takes: the warps that carry
// the state never wait for each other, only for chunks, which other warps of the block fetch ahead. Where there is
// enough shared memory, further warps compute the outputs, one chunk behind.
#include "gated_delta_chunks.cuh"

constexpr uint32_t kFetchers = 64; // threads

// One stop of a walk.
struct Item {
    uint32_t first, tokens; // at most kChunk; none of an empty segment
    uint32_t chunk;
    uint32_t to; // slot of the state after it, or kNoState
    bool last;
};

// What carries the state over a chunk. Rows: of the state, elements of v.
template <int Rows> struct Carry {
    // Rows of values are 16 bytes apart from multiples of 32 words: tokens 2 c and elements 2 r touch all banks.
    static constexpr uint32_t kValues = Rows / 8 + 1;
    uint4 k[kChunk * kTilePieces];
    uint4 v[kChunk * kValues];
    CarryPart part;
};

// What gives the outputs of a chunk.
struct Read {
    uint4 q[kChunk * kTilePieces];
    ReadPart part;
};

// Operands of products from the warps that carry to those that read: the state before the chunk, and N.
struct Passed {
    uint4 state[kHead / 16][32], news[kBands][32];
};

template <int Rows, bool Split> struct Shared {
    // Chunks that are fetched ahead.
    static constexpr int kAhead = Split ? 2 : 1;
    Carry<Rows> carry[kAhead + 1];
    Read read[kAhead + 1];
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

// What fetching costs is addresses: it is the warps with the fewest instructions that keep up.

// 64 rows of a head, one a token; zeros after the last token.
__device__ __forceinline__ void fetch_tile(uint4 *to, const bf16 *from, size_t channels, uint32_t tokens) {
    constexpr uint32_t kRows = kFetchers / kTilePieces; // at once
    uint32_t t = threadIdx.x % kFetchers / kTilePieces, piece = threadIdx.x % kTilePieces;
    from += t * channels + 8 * piece;
    int32_t left = int32_t(tokens) - int32_t(t);
    uint4 *even = to + tile_piece(t, piece), *odd = to + tile_piece(t + kRows, piece);
#pragma unroll
    for (int32_t i = 0; i < int32_t(kChunk / kRows); ++i) {
        copy16_or_zero((i % 2 ? odd : even) + i / 2 * 8 * kTilePieces, from, i * int32_t(kRows) < left);
        from += kRows * channels;
    }
}

// The block's elements of v, as above.
template <int Rows>
__device__ __forceinline__ void fetch_values(uint4 *to, const bf16 *from, size_t channels, uint32_t tokens) {
    constexpr uint32_t kPieces = Rows / 8, kRows = kFetchers / kPieces;
    uint32_t t = threadIdx.x % kFetchers / kPieces, piece = threadIdx.x % kPieces;
    from += t * channels + 8 * piece;
    to += t * Carry<Rows>::kValues + piece;
    int32_t left = int32_t(tokens) - int32_t(t);
#pragma unroll
    for (int32_t i = 0; i < int32_t(kChunk / kRows); ++i) {
        copy16_or_zero(to + i * kRows * Carry<Rows>::kValues, from, i * int32_t(kRows) < left);
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

template <int Rows>
__device__ __forceinline__ void fetch(Carry<Rows> &to, const Operands &x, const Item &item) {
    fetch_tile(to.k, x.query(item) + x.key_heads * kHead, x.channels(), item.tokens);
    fetch_values<Rows>(to.v, x.value(item), x.channels(), item.tokens);
    fetch_part(to.part, x.part(item)->carry);
}

__device__ __forceinline__ void fetch(Read &to, const Operands &x, const Item &item) {
    fetch_tile(to.q, x.query(item), x.channels(), item.tokens);
    fetch_part(to.part, x.part(item)->read);
}

// 16 rows of the state, as the results of products: elements 0, 1 of tile t are row 2 r at columns 8 t + 2 c, + 1, those
// at 2, 3 are row 2 r + 1, for lane 4 r + c. Neighbouring rows in a lane make pairs of what is read and written by row.
using State = float[kHead / 8][4];

__device__ __forceinline__ float *state_row(float *states, uint32_t value_heads, uint32_t slot, uint32_t head,
                                            uint32_t row) {
    return states + ((size_t(slot) * value_heads + head) * kHead + row) * kHead + threadIdx.x % 4 * 2;
}

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

// d[16, 64] += a[16, 128] tileᵀ
__device__ __forceinline__ void multiply_tile(float (&d)[kChunk / 8][4], const uint32_t (&a)[kHead / 16][4],
                                              const uint4 *tile) {
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

// Carries 16 rows of the state over a chunk; gives N. `row`: first of the warp's rows in the block's.
template <int Rows>
__device__ __forceinline__ void carry(State &state, const StateOperand &before, NewsOperand &news,
                                      const Carry<Rows> &chunk, uint32_t row) {
    uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    float d[kChunk / 8][4] = {};
    multiply_tile(d, before, chunk.k);
    // What the state does not yet say of the values.
    const uint32_t *v = reinterpret_cast<const uint32_t *>(chunk.v) + row / 2 + group;
    constexpr uint32_t kPitch = Carry<Rows>::kValues * 4;
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float2 key = *reinterpret_cast<const float2 *>(&chunk.part.keys[token]);
        float2 v0 = widen(v[token * kPitch]), v1 = widen(v[(token + 1) * kPitch]);
        d[t][0] = v0.x - key.x * d[t][0], d[t][1] = v1.x - key.y * d[t][1];
        d[t][2] = v0.y - key.x * d[t][2], d[t][3] = v1.y - key.y * d[t][3];
    }
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
        as_operand(news[j], d[2 * j], d[2 * j + 1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) d[2 * j + e / 4][e % 4] = 0.f;
    }
    multiply_triangle(d, news, chunk.part.solve);
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) as_operand(news[j], d[2 * j], d[2 * j + 1]);
    float decay = chunk.part.decay[0];
#pragma unroll
    for (uint32_t t = 0; t < kHead / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[t][e] *= decay;
    }
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
#pragma unroll
        for (uint32_t t = 2 * j; t < 2 * j + 2; ++t) {
            float2 scale = *reinterpret_cast<const float2 *>(&chunk.part.carry[8 * t + 2 * quad]);
            d[t][0] *= scale.x, d[t][1] *= scale.y, d[t][2] *= scale.x, d[t][3] *= scale.y;
        }
        uint32_t a[4];
        as_operand(a, d[2 * j], d[2 * j + 1]);
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            uint32_t token = 16 * j + lane / 8 % 2 * 8 + lane % 8;
            uint4 b = load_transposed(&chunk.k[tile_piece(token, 2 * c + lane / 16)]);
            mma(state[2 * c], a[0], a[1], a[2], a[3], b.x, b.y);
            mma(state[2 * c + 1], a[0], a[1], a[2], a[3], b.z, b.w);
        }
    }
}

// The outputs of a chunk, 16 elements of v. `out`: at the warp's elements of the first token.
__device__ __forceinline__ void read(const StateOperand &before, const NewsOperand &news, const Read &chunk, float *out,
                                     size_t width, uint32_t tokens) {
    uint32_t group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    float d[kChunk / 8][4] = {};
    multiply_tile(d, before, chunk.q);
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        float2 query = *reinterpret_cast<const float2 *>(&chunk.part.queries[8 * t + 2 * quad]);
        d[t][0] *= query.x, d[t][1] *= query.y, d[t][2] *= query.x, d[t][3] *= query.y;
    }
    multiply_triangle(d, news, chunk.part.weights);
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float *to = out + token * width + 2 * group;
        if (token < tokens) *reinterpret_cast<float2 *>(to) = make_float2(d[t][0], d[t][2]);
        if (token + 1 < tokens) *reinterpret_cast<float2 *>(to + width) = make_float2(d[t][1], d[t][3]);
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

// grid: (value heads * 128 / Rows, segments); the warps that fetch, Rows / 16 that carry, and as many that read if Split.
template <int Rows, bool Split>
__device__ __forceinline__ void walk(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states,
                                     float *out, uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads,
                                     uint32_t value_heads, uint32_t longest) {
    release_successor();
    extern __shared__ __align__(16) unsigned char memory[];
    using S = Shared<Rows, Split>;
    S &s = *reinterpret_cast<S *>(memory);
    constexpr uint32_t kSlices = kHead / Rows, kWarps = Rows / 16, kRing = S::kAhead + 1;
    uint32_t begin = blockIdx.y;
    if (!begins_chain(segments, begin)) return;
    uint32_t end = chain_end(segments, count, begin);
    check_segment(segments, begin, tokens, slots);
    Segment now = load_segment(segments, begin);
    if (load_segment(segments, end - 1).end - now.first <= longest) return;
    uint32_t head = blockIdx.x / kSlices;
    Operands x = {mixed, parts, segments, tokens, slots, key_heads, value_heads, head, head / (value_heads / key_heads),
                  blockIdx.x % kSlices * Rows};

    uint32_t warp = threadIdx.x / 32 - kFetchers / 32; // of those that multiply
    bool fetches = threadIdx.x < kFetchers, reads = warp >= kWarps;
    warp %= kWarps;
    Way way = {begin, end, now.first, now};
    Item behind = {}; // what was fetched for carrying but not for reading
    // Fetches chunk i, in a split kernel for reading the one before it.
    auto fetch_next = [&](uint32_t i) {
        Item item = {};
        if (way.segment < end) {
            item = way.next(x);
            if (threadIdx.x == 0) s.items[i % 4] = item;
            if (item.tokens > 0) fetch(s.carry[i % kRing], x, item);
        }
        if (!Split) behind = item;
        if (behind.tokens > 0) fetch(s.read[(i - Split) % kRing], x, behind);
        behind = item;
        copies_commit();
    };
    // No other kernel of a step writes segments, nor states of this chain.
    State state = {};
    uint32_t row = x.row + 16 * warp + threadIdx.x % 32 / 4 * 2;
    if (!fetches && !reads && now.from != kNoState) {
        load_state(state, state_row(states, value_heads, now.from, x.head, row));
    }
    wait_for_predecessor();
    if (fetches) {
#pragma unroll
        for (uint32_t i = 0; i < S::kAhead; ++i) fetch_next(i);
    }
    size_t width = size_t(value_heads) * kHead;
    out += x.head * kHead + x.row + 16 * warp;
    Item item = {};
    for (uint32_t i = 0;; ++i) {
        if (fetches) copies_wait_until<S::kAhead - 1>();
        __syncthreads();
        const Item before = item;
        if (!before.last) item = s.items[i % 4];
        StateOperand a;
        NewsOperand news;
        if (fetches) {
            fetch_next(i + S::kAhead);
        } else if (reads) {
            if (before.tokens > 0) {
                const Passed &passed = s.passed[(i - 1) % 2][warp];
                receive(a, passed.state);
                receive(news, passed.news);
                read(a, news, s.read[(i - 1) % kRing], out + before.first * width, width, before.tokens);
            }
        } else if (!before.last) {
            if (item.tokens > 0) {
#pragma unroll
                for (uint32_t c = 0; c < kHead / 16; ++c) as_operand(a[c], state[2 * c], state[2 * c + 1]);
                if (Split) pass(s.passed[i % 2][warp].state, a);
                carry(state, a, news, s.carry[i % kRing], 16 * warp);
                if (Split) {
                    pass(s.passed[i % 2][warp].news, news);
                } else {
                    read(a, news, s.read[i % kRing], out + item.first * width, width, item.tokens);
                }
            }
            if (item.to != kNoState) store_state(state, state_row(states, value_heads, item.to, x.head, row));
        }
        if (Split ? before.last : item.last) break;
    }
}

#define WALK(name, rows, split)                                                                                        \
    extern "C" __global__ void __launch_bounds__(kFetchers + rows * 2 * (1 + split), split ? 1 : 2)                    \
        name(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states, float *out,               \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads,                \
             uint32_t longest) {                                                                                       \
        walk<rows, split>(mixed, parts, segments, states, out, tokens, slots, count, key_heads, value_heads, longest); \
    }                                                                                                                  \
    static_assert(sizeof(Shared<rows, split>) == (split ? 171392 : 97904), "shared_memory in cuda/delta_chunks.rs");
WALK(gated_delta_walk, 32, false)
WALK(gated_delta_walk_split, 32, true)
