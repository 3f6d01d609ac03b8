// ops::gated_delta_chunks, second kernel: walks through the chunks of each chain with the state in registers.
//
// A warp has 16 rows of a head's state, which are elements of v, and all of k. With these as the rows of every product
// (the transposes of the formulas), each product's result is in registers what the next one takes: the warps that
// multiply never wait for each other, only for chunks, which other warps of the block fetch ahead.
#include "gated_delta_chunks.cuh"

constexpr uint32_t kFetchers = 64; // threads

// One stop of a walk.
struct Item {
    uint32_t first, tokens; // at most kChunk; none of an empty segment
    uint32_t to;            // slot of the state after it, or kNoState
    uint32_t last;
};

// Rows: of the state, elements of v.
template <int Rows> struct Stage {
    // Rows of values are 16 bytes apart from multiples of 32 words: tokens 2 c and elements 2 r touch all banks.
    static constexpr uint32_t kValues = Rows / 8 + 1;
    uint4 q[kChunk * kTilePieces], k[kChunk * kTilePieces];
    Part part;
    uint4 v[kChunk * kValues];
    Item item;
};

struct Operands {
    const bf16 *mixed;
    const Part *parts;
    const uint32_t *segments;
    uint32_t tokens, slots, key_heads, value_heads;
    uint32_t head, row; // of v: the block's first row of the state

    __device__ __forceinline__ size_t channels() const { return size_t(2 * key_heads + value_heads) * kHead; }
};

// The fetching threads' place.
struct Walk {
    uint32_t segment, end, at; // segments; token
    Segment now;
};

template <int Rows> __device__ __forceinline__ void fetch(Stage<Rows> &stage, const Operands &x, Walk &walk) {
    uint32_t thread = threadIdx.x % kFetchers;
    const Segment now = walk.now;
    uint32_t first = walk.at, here = min(now.end - first, kChunk);
    uint32_t chunk = first_chunk(now, walk.segment) + (first - now.first) / kChunk;
    bool done = first + here == now.end;
    if (here > 0) {
        size_t channels = x.channels();
        const bf16 *rows = x.mixed + first * channels;
        const bf16 *q = rows + x.head / (x.value_heads / x.key_heads) * kHead + thread % kTilePieces * 8;
#pragma unroll
        for (uint32_t i = 0; i < kChunk * kTilePieces / kFetchers; ++i) {
            uint32_t t = thread / kTilePieces + i * (kFetchers / kTilePieces);
            uint32_t to = tile_piece(t, thread % kTilePieces);
            const bf16 *from = q + (t < here ? t * channels : 0);
            copy16_or_zero(&stage.q[to], from, t < here);
            copy16_or_zero(&stage.k[to], from + x.key_heads * kHead, t < here);
        }
        constexpr uint32_t kPieces = Rows / 8;
        const bf16 *v = rows + (2 * x.key_heads + x.head) * kHead + x.row + thread % kPieces * 8;
#pragma unroll
        for (uint32_t i = 0; i < kChunk * kPieces / kFetchers; ++i) {
            uint32_t t = thread / kPieces + i * (kFetchers / kPieces);
            copy16_or_zero(&stage.v[t * Stage<Rows>::kValues + thread % kPieces], v + (t < here ? t * channels : 0),
                           t < here);
        }
        const uint4 *part = reinterpret_cast<const uint4 *>(x.parts + size_t(chunk) * x.value_heads + x.head);
        uint4 *to = reinterpret_cast<uint4 *>(&stage.part);
#pragma unroll
        for (uint32_t i = 0; i < sizeof(Part) / 16 / kFetchers; ++i) {
            copy16_or_zero(to + i * kFetchers + thread, part + i * kFetchers + thread, true);
        }
    }
    walk.at = first + here;
    if (done) ++walk.segment;
    if (thread == 0) stage.item = {first, here, done ? now.to : kNoState, walk.segment == walk.end};
    if (done && walk.segment < walk.end) {
        check_segment(x.segments, walk.segment, x.tokens, x.slots);
        walk.now = load_segment(x.segments, walk.segment);
    }
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

// One chunk for 16 rows: the outputs, and the state after it. `row`: first of the warp's rows in the stage, of v.
template <int Rows>
__device__ __forceinline__ void step(State &state, const Stage<Rows> &stage, uint32_t row, float *out, size_t width) {
    uint32_t lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const Part &part = stage.part;
    float news[kChunk / 8][4] = {}, read[kChunk / 8][4] = {};
    {
        uint32_t a[kHead / 16][4];
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) as_operand(a[c], state[2 * c], state[2 * c + 1]);
        multiply_tile(news, a, stage.k);
        multiply_tile(read, a, stage.q);
    }
    // What the state does not yet say of the values.
    const uint32_t *v = reinterpret_cast<const uint32_t *>(stage.v) + row / 2 + group;
    uint32_t a[kBands][4];
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float2 key = *reinterpret_cast<const float2 *>(&part.keys[token]);
        float2 query = *reinterpret_cast<const float2 *>(&part.queries[token]);
        float2 v0 = widen(v[token * Stage<Rows>::kValues * 4]), v1 = widen(v[(token + 1) * Stage<Rows>::kValues * 4]);
        news[t][0] = v0.x - key.x * news[t][0], news[t][1] = v1.x - key.y * news[t][1];
        news[t][2] = v0.y - key.x * news[t][2], news[t][3] = v1.y - key.y * news[t][3];
        read[t][0] *= query.x, read[t][1] *= query.y, read[t][2] *= query.x, read[t][3] *= query.y;
    }
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
        as_operand(a[j], news[2 * j], news[2 * j + 1]);
#pragma unroll
        for (int e = 0; e < 8; ++e) news[2 * j + e / 4][e % 4] = 0.f;
    }
    multiply_triangle(news, a, part.solve);
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) as_operand(a[j], news[2 * j], news[2 * j + 1]);
    multiply_triangle(read, a, part.weights);
    float decay = part.decay[0];
#pragma unroll
    for (uint32_t t = 0; t < kHead / 8; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state[t][e] *= decay;
    }
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
#pragma unroll
        for (uint32_t t = 2 * j; t < 2 * j + 2; ++t) {
            float2 carry = *reinterpret_cast<const float2 *>(&part.carry[8 * t + 2 * quad]);
            news[t][0] *= carry.x, news[t][1] *= carry.y, news[t][2] *= carry.x, news[t][3] *= carry.y;
        }
        as_operand(a[j], news[2 * j], news[2 * j + 1]);
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            uint32_t token = 16 * j + lane / 8 % 2 * 8 + lane % 8;
            uint4 b = load_transposed(&stage.k[tile_piece(token, 2 * c + lane / 16)]);
            mma(state[2 * c], a[j][0], a[j][1], a[j][2], a[j][3], b.x, b.y);
            mma(state[2 * c + 1], a[j][0], a[j][1], a[j][2], a[j][3], b.z, b.w);
        }
    }
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + 2 * quad;
        float *to = out + (stage.item.first + token) * width + 2 * group;
        if (token < stage.item.tokens) *reinterpret_cast<float2 *>(to) = make_float2(read[t][0], read[t][2]);
        if (token + 1 < stage.item.tokens) *reinterpret_cast<float2 *>(to + width) = make_float2(read[t][1], read[t][3]);
    }
}

// grid: (value heads * 128 / Rows, segments); Rows / 16 warps that multiply, then those that fetch.
template <int Rows, int Stages>
__device__ __forceinline__ void walk(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states,
                                     float *out, uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads,
                                     uint32_t value_heads, uint32_t longest) {
    release_successor();
    extern __shared__ __align__(16) unsigned char memory[];
    Stage<Rows> *stages = reinterpret_cast<Stage<Rows> *>(memory);
    constexpr uint32_t kMultipliers = Rows * 2, kSlices = kHead / Rows;
    wait_for_predecessor();
    uint32_t begin = blockIdx.y;
    if (!begins_chain(segments, begin)) return;
    uint32_t end = chain_end(segments, count, begin);
    check_segment(segments, begin, tokens, slots);
    Segment now = load_segment(segments, begin);
    if (load_segment(segments, end - 1).end - now.first <= longest) return;
    Operands x = {mixed, parts, segments, tokens, slots, key_heads, value_heads, blockIdx.x / kSlices,
                  blockIdx.x % kSlices * Rows};

    bool fetches = threadIdx.x >= kMultipliers;
    Walk walk = {begin, end, now.first, now};
    State state = {};
    uint32_t row = threadIdx.x / 32 * 16; // of the block's
    uint32_t lane_row = x.row + row + threadIdx.x % 32 / 4 * 2;
    if (fetches) {
#pragma unroll
        for (int i = 0; i < Stages - 1; ++i) {
            if (walk.segment < end) fetch(stages[i], x, walk);
            copies_commit();
        }
    } else if (now.from != kNoState) {
        load_state(state, state_row(states, value_heads, now.from, x.head, lane_row));
    }
    size_t width = size_t(value_heads) * kHead;
    out += x.head * kHead + x.row + row;
    uint32_t stage = 0, free = Stages - 1;
    for (bool last = false; !last;) {
        if (fetches) copies_wait_until<Stages - 2>();
        __syncthreads();
        const Item item = stages[stage].item;
        if (fetches) {
            if (walk.segment < end) fetch(stages[free], x, walk);
            copies_commit();
        } else {
            if (item.tokens > 0) step(state, stages[stage], row, out, width);
            if (item.to != kNoState) store_state(state, state_row(states, value_heads, item.to, x.head, lane_row));
        }
        last = item.last;
        free = stage;
        stage = stage + 1 == Stages ? 0 : stage + 1;
    }
}

#define WALK(name, rows, stages, blocks)                                                                               \
    extern "C" __global__ void __launch_bounds__(rows * 2 + kFetchers, blocks)                                         \
        name(const bf16 *mixed, const Part *parts, const uint32_t *segments, float *states, float *out,               \
             uint32_t tokens, uint32_t slots, uint32_t count, uint32_t key_heads, uint32_t value_heads,                \
             uint32_t longest) {                                                                                       \
        walk<rows, stages>(mixed, parts, segments, states, out, tokens, slots, count, key_heads, value_heads,          \
                           longest);                                                                                   \
    }
WALK(gated_delta_walk_32, 32, 2, 2)
WALK(gated_delta_walk_32_deep, 32, 4, 1)
WALK(gated_delta_walk_64, 64, 2, 1)
WALK(gated_delta_walk_64_deep, 64, 4, 1)
