// DeepSeek-V4's routed experts at many tokens on Hopper: grouped GEMMs of FP4 weights and FP8 activations (deepseek_v4_w4a8.cuh).
//
//   pack_and_group: x from bf16 to FP8, permuted, with scales; meanwhile one block lists the pairs of each expert
//   gate_up_wgmma:  h = weight silu(min(w1 x, limit)) clamp(w3 x, ±limit)
//   pack_fp8:       h from bf16 to FP8, in the same way
//   down_wgmma:     y = w2 h, a range of the columns of y at a time, so that they stay in the L2
//   add_columns:    the sum of a token's y, the same columns
//
// Tiles of pairs (deepseek_v4_pairs.cuh) have at most 32, 64 or 128 tokens. Rows of h are places in the
// list of pairs, so that the tokens of a tile are neighbours in down; rows of y are pairs. A block is persistent: two or four warpgroups
// with 64 rows of weights each, and a warpgroup that fetches steps of 128 columns into a ring, weights by TMA and the tile's tokens
// by cp.async. Half of the rows of a tile of gate_up are of w1 and the others the same of w3: a thread has both, so that SwiGLU needs no exchange.
// Neighbouring blocks take neighbouring rows of the same pairs: activations stay in the L2, and weights are read from memory once.
// Limit: issue slots (widening and promotion) at many tokens of an expert, memory at few. Reference:
// src/cpu/deepseek_v4/experts.rs.
#include "deepseek_v4.cuh"
#include "deepseek_v4_pairs.cuh"
#include "deepseek_v4_w4a8.cuh"
#include "abi/deepseek_v4_experts_wgmma.h"

namespace {
using limits::deepseek_v4_experts_wgmma::kAddTokens;
using limits::deepseek_v4_experts_wgmma::kPackThreads;
using limits::deepseek_v4_experts_wgmma::kFewThreads;
using limits::deepseek_v4_experts_wgmma::kThreads;
using limits::deepseek_v4_gemm::kGroupThreads;
using limits::deepseek_v4_gemm::kMaxChosen;

constexpr uint32_t kProducers = 128;
constexpr uint32_t kSlots = 8;             // tiles whose lists are in shared memory
constexpr uint32_t kHalf = 64;             // tokens of the output that are staged at once
constexpr uint32_t kPadding = 16;          // bytes behind each row of scales and of the staged output, against bank conflicts
constexpr uint32_t kBoxRows = 64;          // of weights

// Some pairs of an expert (`count` from place `first` of the list on), and the first row of its weights (gate_up: first column of h).
struct Tile {
    uint32_t expert, first, count, row;
};

// A block whose tiles have at most TOKENS tokens: its warpgroups that multiply, each with 64 rows of a tile of weights. With few
// tokens a warpgroup waits more than it computes, and has few sums: there are four of them.
template <int TOKENS> struct Block {
    static constexpr uint32_t kGroups = TOKENS == 32 ? 4 : 2;
    static constexpr uint32_t kConsumers = 128 * kGroups, kThreads = kConsumers + kProducers;
    static constexpr uint32_t kRows = kBoxRows * kGroups, kHalfRows = kRows / 2; // of gate, and as many of up
};
static_assert(Block<32>::kThreads == kFewThreads && Block<128>::kThreads == kThreads, "threads of a block");

// The shared memory of such a block, with a ring of 6 or 9 steps.
template <int TOKENS> struct Shared : Block<TOKENS> {
    using Block<TOKENS>::kGroups, Block<TOKENS>::kRows;
    static constexpr int kStages = TOKENS == 64 ? 9 : 6;
    static constexpr int kInFlight = kStages / 2; // steps whose copies are under way
    static constexpr uint32_t kScaleBytes = kGroups * (18 << 10); // for the scales of the weights of two tiles or more
    uint8_t tokens[kStages][TOKENS * w4a8::kStep];
    uint8_t weights[kStages][kRows * w4a8::kRowBytes];
    float scales[kStages][TOKENS];
    uint8_t row_scales[kScaleBytes];
    uint8_t staged[kGroups][(TOKENS < kHalf ? TOKENS : kHalf) * (128 + kPadding)];
    uint2 table[w4a8::kTable];
    uint32_t rows[kSlots][TOKENS]; // of the activations (gate_up), pairs (down)
    float factors[kSlots][TOKENS]; // weights of the pairs
    Tile tiles[kSlots];
    uint64_t full[kStages], empty[kStages];
};
template <int TOKENS> constexpr bool kFits = sizeof(Shared<TOKENS>) + 1024 <= limits::deepseek_v4_experts_wgmma::kSharedBytes;
static_assert(kFits<32> && kFits<64> && kFits<128>, "shared memory of a block");

struct Problem {
    const uint8_t *x;             // [rows, k] codes, permuted
    const float *x_scales;        // [rows, k / 128]
    const TensorMap *w[2];        // gate and up, or down twice: [experts * rows_of_expert, k / 2]
    const uint8_t *w_scales[2];
    const uint32_t *tiles, *pairs;
    const float *weights;
    bf16 *out;
    uint32_t k, rows_of_expert, experts_of_token;
    uint32_t first_row, row_tiles; // of this launch
    uint32_t out_width;
    float limit;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The tiles of a block, one after another: each gridDim.x-th of all.
template <bool GATE_UP, int TOKENS> struct Schedule {
    const Problem &p;
    uint32_t at, end;
    __device__ __forceinline__ Schedule(const Problem &p) : p(p), at(blockIdx.x), end(p.tiles[0] * p.row_tiles) {}
    __device__ __forceinline__ bool any() const { return at < end; }
    __device__ __forceinline__ void next() { at += gridDim.x; }
    // The tile `later` tiles from here.
    __device__ __forceinline__ Tile tile(uint32_t later) const {
        uint32_t i = at + later * gridDim.x;
        if (i >= end) return {};
        const uint32_t *from = p.tiles + 1 + 3 * (i / p.row_tiles);
        return {from[0], from[1], from[2], p.first_row + i % p.row_tiles * (GATE_UP ? Block<TOKENS>::kHalfRows : Block<TOKENS>::kRows)};
    }
};

__device__ __forceinline__ uint32_t scale_stride(uint32_t k) { return k / w4a8::kScaled + kPadding; }
template <int TOKENS> __device__ __forceinline__ uint32_t scale_slots(uint32_t k) {
    return min(kSlots, Shared<TOKENS>::kScaleBytes / (Block<TOKENS>::kRows * scale_stride(k)));
}

// A barrier of the 128 threads of a warpgroup: the last one fetches, the others multiply.
__device__ __forceinline__ void group_sync(uint32_t group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// An address that the compiler does not compute again and again.
__device__ __forceinline__ uint32_t keep(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}

// One thread of the warpgroup that fetches.
template <bool GATE_UP, int TOKENS> struct Producer {
    using S = Shared<TOKENS>;
    S &s;
    const Problem &p;
    const uint32_t thread = threadIdx.x - S::kConsumers;
    Ring<S::kStages> ring, published;
    uint32_t issued = 0;

    __device__ __forceinline__ Producer(S &s, const Problem &p) : s(s), p(p) {}

    // What this thread copied becomes visible to the consumers, and to wgmma.
    __device__ __forceinline__ void publish() {
        fence_shared_for_async();
        arrive(&s.full[published.index]);
        published.next();
    }
    __device__ __forceinline__ void wait_empty() { wait(&s.empty[ring.index], ring.parity ^ 1); }

    // The scales of this thread's rows of the weights, and the weight of its pair.
    __device__ __forceinline__ void fetch_lists(const Tile &tile, uint32_t number, uint32_t pair) {
        const uint32_t bytes = p.k / w4a8::kScaled;
        for (uint32_t row = thread; row < S::kRows; row += kProducers) {
            const uint8_t *from = p.w_scales[row / S::kHalfRows];
            from += (size_t(tile.expert) * p.rows_of_expert + tile.row + (GATE_UP ? row % S::kHalfRows : row)) * bytes;
            uint32_t to = shared_address(s.row_scales) + (number % scale_slots<TOKENS>(p.k) * S::kRows + row) * scale_stride(p.k);
            if (bytes % 16 == 0)
                for (uint32_t i = 0; i < bytes; i += 16) copy16(to + i, from + i);
            else
                for (uint32_t i = 0; i < bytes; i += 4) copy4(to + i, from + i);
        }
        if (GATE_UP && thread < TOKENS) copy4(shared_address(&s.factors[number % kSlots][thread]), p.weights + pair);
    }

    // All steps of a tile of at most 16 PARTS tokens. The first one's stage is empty.
    template <int PARTS> __device__ __forceinline__ void fetch_steps(const Tile &tile, uint32_t slot, uint32_t own) {
        // Places of the tile without a token have the first one's row; nothing is stored of them.
        const uint8_t *from[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            uint32_t token = thread / 8 + 16 * i, real = token < tile.count ? token : 0;
            from[i] = p.x + size_t(GATE_UP ? s.rows[slot][real] : tile.first + real) * p.k + thread % 8 * 16;
        }
        const uint32_t steps = p.k / w4a8::kStep, weight_row = tile.expert * p.rows_of_expert + tile.row;
        const float *scale = p.x_scales + size_t(own) * steps;
        const uint32_t place = thread / 8 * 128 + ((thread ^ thread / 8) & 7) * 16; // with the 128-byte swizzle
#pragma unroll 2
        for (uint32_t j = 0; j < steps; ++j, ++issued) {
            if (j > 0) wait_empty();
            uint64_t *full = &s.full[ring.index];
            if (thread == 0) {
                const uint32_t to = shared_address(s.weights[ring.index]), column = j * (w4a8::kRowBytes / 2);
                arrive_expecting(full, sizeof(s.weights[0]));
#pragma unroll
                for (uint32_t row = 0; row < S::kRows; row += kBoxRows)
                    copy_box(to + row * w4a8::kRowBytes, *p.w[row / S::kHalfRows], column,
                             weight_row + (GATE_UP ? row % S::kHalfRows : row), full);
            }
            const uint32_t to = shared_address(s.tokens[ring.index]) + place;
#pragma unroll
            for (int i = 0; i < PARTS; ++i) copy16(to + i * 2048, from[i] + j * w4a8::kStep);
            if (thread < 16 * PARTS) copy4(shared_address(&s.scales[ring.index][thread]), scale + j);
            copies_commit();
            if (issued >= S::kInFlight) copies_wait<S::kInFlight>(), publish();
            ring.next();
        }
    }
    template <int PARTS> __device__ __forceinline__ void fetch_any(const Tile &tile, uint32_t slot, uint32_t own) {
        if constexpr (PARTS > 1)
            if (tile.count <= 16 * (PARTS - 1)) return fetch_any<PARTS - 1>(tile, slot, own);
        fetch_steps<PARTS>(tile, slot, own);
    }

    __device__ __forceinline__ uint32_t pair_of(const Tile &tile) const {
        return thread < tile.count ? p.pairs[tile.first + thread] : 0;
    }
    __device__ __forceinline__ void run() {
        Schedule<GATE_UP, TOKENS> schedule(p);
        Tile tile = schedule.tile(0), next = schedule.tile(1);
        uint32_t pair = pair_of(tile);
        for (uint32_t number = 0; schedule.any(); schedule.next(), ++number) {
            const uint32_t slot = number % kSlots;
            wait_empty(); // with this stage the slot is free
            // What the next tile needs is under way while this one's steps are.
            Tile after = schedule.tile(2);
            uint32_t next_pair = pair_of(next);
            const uint32_t own = GATE_UP ? pair / p.experts_of_token : tile.first + (thread < tile.count ? thread : 0);
            if (thread < TOKENS) s.rows[slot][thread] = GATE_UP ? own : pair;
            if (thread == 0) s.tiles[slot] = tile;
            group_sync(S::kGroups);
            fetch_lists(tile, number, pair);
            fetch_any<TOKENS / 16>(tile, slot, own);
            tile = next, next = after, pair = next_pair;
        }
        copies_wait_all();
        for (uint32_t i = 0; i < min(issued, uint32_t(S::kInFlight)); ++i) publish();
    }
};

// One thread of a warpgroup that multiplies: its numbers, its two rows and its place in the ring.
template <int TOKENS> struct Consumer {
    uint32_t group, thread, warp, lane;
    uint32_t top, bottom; // rows of the weights in shared memory
    Ring<Shared<TOKENS>::kStages> ring;
};

// The largest of the `bytes` scales at shared address `row`; the four lanes of a quad look at a part each, and all get it.
__device__ __forceinline__ uint32_t largest_scale(uint32_t row, uint32_t bytes, uint32_t quad) {
    uint32_t even = 0, odd = 0;
    for (uint32_t i = 4 * quad; i < bytes; i += 16) {
        uint32_t word = w4a8::shared_word(row + i);
        even = __vmaxu2(even, word & 0x00ff00ffu), odd = __vmaxu2(odd, word >> 8 & 0x00ff00ffu);
    }
    even = __vmaxu2(even, odd);
    return reduce_quad(max(even & 0xffffu, even >> 16), [](uint32_t a, uint32_t b) { return max(a, b); });
}

// Sums of a tile over k, for N tokens, times the scales of weights and tokens. The first step has arrived.
template <int N, int TOKENS>
__device__ __forceinline__ void multiply(float (&totals)[N / 2], Shared<TOKENS> &s, const Problem &p, Consumer<TOKENS> &c,
                                         uint32_t number) {
    const uint32_t steps = p.k / w4a8::kStep, stride = scale_stride(p.k), quad = c.lane % 4;
    const uint32_t scales = shared_address(s.row_scales) + number % scale_slots<TOKENS>(p.k) * Block<TOKENS>::kRows * stride;
    const uint32_t top_row = scales + c.top * stride, bottom_row = scales + c.bottom * stride;
    const uint32_t top_largest = largest_scale(top_row, p.k / w4a8::kScaled, quad);
    const uint32_t bottom_largest = largest_scale(bottom_row, p.k / w4a8::kScaled, quad);
    const uint32_t top_table = keep(shared_address(s.table) + 8 * top_largest);
    const uint32_t bottom_table = keep(shared_address(s.table) + 8 * bottom_largest);
    const uint32_t top_scale = keep(top_row + quad), bottom_scale = keep(bottom_row + quad);
    // The boxes have the 64-byte swizzle: vector p of row r lies at p ^ r / 2 % 4.
    const uint32_t codes = keep(shared_address(s.weights) + c.top * w4a8::kRowBytes + (quad ^ c.top / 2 % 4) * 16);
    const uint32_t below = (c.bottom - c.top) * w4a8::kRowBytes;
    const uint32_t tokens = keep(shared_address(s.tokens)), token_scales = keep(shared_address(s.scales) + quad * 8);
    float sums[N / 2];
    w4a8::OperandA a[4];
    w4a8::RowCodes next;
    auto load = [&](uint32_t j) { // step j, which has arrived
        uint32_t at = codes + c.ring.index * uint32_t(sizeof(s.weights[0]));
        uint32_t top = w4a8::shared_byte(top_scale + 4 * j), bottom = w4a8::shared_byte(bottom_scale + 4 * j);
        next.top = w4a8::shared16(at), next.bottom = w4a8::shared16(at + below);
        next.top_table = w4a8::shared8(top_table - 8 * top), next.bottom_table = w4a8::shared8(bottom_table - 8 * bottom);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i].set(next, i);
    for (uint32_t j = 0;; ++j) {
        const uint32_t stage = c.ring.index;
        const uint64_t b = descriptor(tokens + stage * uint32_t(sizeof(s.tokens[0])), 0, 1024);
        wgmma_fence();
        wgmma_fp8<true>(sums, a[0].x, b), wgmma_commit();
        wgmma_fp8<false>(sums, a[1].x, b + 2), wgmma_commit();
        wgmma_fp8<false>(sums, a[2].x, b + 4), wgmma_commit();
        wgmma_fp8<false>(sums, a[3].x, b + 6), wgmma_commit();
        c.ring.next();
        const bool more = j + 1 < steps;
        // The codes of the next step are widened while this one's GEMM runs, as soon as it has read the registers.
        if (more) {
            wait(&s.full[c.ring.index], c.ring.parity);
            load(j + 1);
            wgmma_wait<3>(), a[0].set(next, 0);
            wgmma_wait<2>(), a[1].set(next, 1);
            wgmma_wait<1>(), a[2].set(next, 2);
        }
        wgmma_wait<0>();
        w4a8::pin(sums);
        if (more) a[3].set(next, 3);
        w4a8::promote(totals, sums, token_scales + stage * uint32_t(sizeof(s.scales[0])));
        __syncwarp();
        if (c.lane == 0) arrive(&s.empty[stage]);
        if (!more) break;
    }
    const float top_factor = w4a8::row_factor(top_largest), bottom_factor = w4a8::row_factor(bottom_largest);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) totals[i] *= i % 4 < 2 ? top_factor : bottom_factor;
}

// Copies the staged output of up to kHalf tokens, from token `first` on, to memory: VECTORS vectors a token, those of token t to at(t).
template <uint32_t VECTORS, typename At>
__device__ __forceinline__ void store_staged(const uint8_t *staged, uint32_t thread, uint32_t first, uint32_t count, At at) {
    for (uint32_t t = thread / VECTORS; t < kHalf && first + t < count; t += 128 / VECTORS) {
        uint32_t vector = thread % VECTORS;
        uint4 v = *reinterpret_cast<const uint4 *>(staged + t * (VECTORS * 16 + kPadding) + vector * 16);
        *reinterpret_cast<uint4 *>(at(first + t) + vector * 8) = v;
    }
}

__device__ __forceinline__ float expert_swiglu(float gate, float up, float weight, float limit) {
    float g = fminf(round_bf16(gate), limit), u = fminf(fmaxf(round_bf16(up), -limit), limit);
    return weight * (g / (1.f + expf(-g))) * u;
}

template <int N, bool GATE_UP, int TOKENS>
__device__ __forceinline__ void consume(Shared<TOKENS> &s, const Problem &p, Consumer<TOKENS> &c, uint32_t number) {
    const uint32_t slot = number % kSlots, quad = c.lane % 4;
    const Tile tile = s.tiles[slot];
    float totals[N / 2] = {};
    multiply<N>(totals, s, p, c, number);
    uint8_t *staged = s.staged[c.group];
#pragma unroll
    for (int half = 0; half < (N + int(kHalf) - 1) / int(kHalf); ++half) {
        group_sync(c.group); // the rows that were staged are stored
#pragma unroll
        for (int b = half * 4; b < half * 4 + 4 && b < N / 16; ++b) {
            const uint32_t at = shared_address(staged);
            const uint32_t token = 16 * (b - half * 4);
            const float *t = totals + 8 * b;
            if (GATE_UP) {
                uint32_t h[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float2 weight = *reinterpret_cast<const float2 *>(&s.factors[slot][16 * b + 8 * i + 2 * quad]);
                    h[i] = narrow(expert_swiglu(t[4 * i], t[4 * i + 2], weight.x, p.limit),
                                  expert_swiglu(t[4 * i + 1], t[4 * i + 3], weight.y, p.limit));
                }
                store_columns(at + (token + c.lane % 16) * (64 + kPadding) + c.warp * 16, h);
            } else {
                uint32_t y[4] = {narrow(t[0], t[1]), narrow(t[2], t[3]), narrow(t[4], t[5]), narrow(t[6], t[7])};
                uint32_t row = token + c.lane / 16 * 8 + c.lane % 8, vector = 2 * c.warp + c.lane / 8 % 2;
                store_columns(at + row * (128 + kPadding) + vector * 16, y);
            }
        }
        group_sync(c.group);
        if (GATE_UP)
            store_staged<4>(staged, c.thread, half * kHalf, tile.count, [&](uint32_t t) {
                return p.out + size_t(tile.first + t) * p.out_width + tile.row + c.group * 32;
            });
        else
            store_staged<8>(staged, c.thread, half * kHalf, tile.count, [&](uint32_t t) {
                return p.out + size_t(s.rows[slot][t]) * p.out_width + tile.row - p.first_row + c.group * 64;
            });
    }
}

// `consume` with the smallest multiple of 16 that holds the tile's tokens.
template <int N, bool GATE_UP, int TOKENS>
__device__ __forceinline__ void consume_any(Shared<TOKENS> &s, const Problem &p, Consumer<TOKENS> &c, uint32_t number) {
    if constexpr (N > 16)
        if (s.tiles[number % kSlots].count <= N - 16) return consume_any<N - 16, GATE_UP>(s, p, c, number);
    consume<N, GATE_UP>(s, p, c, number);
}

template <bool GATE_UP, int TOKENS> __device__ __forceinline__ void run(const Problem &p) {
    using S = Shared<TOKENS>;
    extern __shared__ uint8_t dynamic[];
    S &s = *reinterpret_cast<S *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    release_successor();
    w4a8::fill_table(s.table, threadIdx.x, S::kThreads);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) barrier_init(&s.full[i], kProducers + 1), barrier_init(&s.empty[i], S::kConsumers / 32);
        barriers_ready();
    }
    __syncthreads();
    wait_for_predecessor();
    if (threadIdx.x >= S::kConsumers) {
        registers_lower<S::kGroups == 4 ? 40 : 72>();
        Producer<GATE_UP, TOKENS>(s, p).run();
        return;
    }
    registers_raise<S::kGroups == 4 ? 104 : 216>();
    Consumer<TOKENS> c;
    c.group = threadIdx.x / 128, c.thread = threadIdx.x % 128, c.warp = c.thread / 32, c.lane = threadIdx.x % 32;
    c.top = GATE_UP ? 32 * c.group + 8 * c.warp + c.lane / 4 : 64 * c.group + 16 * c.warp + c.lane / 4;
    c.bottom = c.top + (GATE_UP ? S::kHalfRows : 8);
    uint32_t number = 0;
    for (Schedule<GATE_UP, TOKENS> schedule(p); schedule.any(); schedule.next(), ++number) {
        wait(&s.full[c.ring.index], c.ring.parity);
        consume_any<TOKENS, GATE_UP>(s, p, c, number);
    }
}
#endif
} // namespace

// Packs vector `i` of `vectors` of x. Whole warps call it: half a warp has the 128 columns of a scale.
__device__ __forceinline__ void pack(const bf16 *x, uint8_t *codes, float *scales, uint32_t i, uint32_t vectors) {
    const uint32_t lane = threadIdx.x % 16;
    if (i / 32 * 32 >= vectors) return;
    uint4 v = i < vectors ? load16(x + size_t(i) * 8) : make_uint4(0, 0, 0, 0);
    uint32_t most = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
    for (uint32_t step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(kAll, most, step));
    if (i >= vectors) return;
    float scale = ceil_power_of_two(fmaxf(__uint_as_float(most << 16), kLeastAmax) / E4M3::kMax), inverse = 1.f / scale;
    auto four = [&](uint32_t a, uint32_t b) {
        float2 low = widen(a), high = widen(b);
        return encode2(low.x * inverse, low.y * inverse) | encode2(high.x * inverse, high.y * inverse) << 16;
    };
    uint32_t *to = reinterpret_cast<uint32_t *>(codes) + size_t(i / 16) * 32;
    to[w4a8::permuted(2 * lane)] = four(v.x, v.y), to[w4a8::permuted(2 * lane + 1)] = four(v.z, v.w);
    if (lane == 0) scales[i / 16] = scale;
}

// Grid: threads over vectors of x, and a block that groups the pairs.
extern "C" __global__ __launch_bounds__(kGroupThreads) void pack_and_group(
    const bf16 *x,    // [rows, k]
    uint8_t *codes,   // [rows, k], permuted within each 128 columns
    float *scales,    // [rows, k / 128]
    uint32_t vectors, // rows * k / 8
    const uint32_t *chosen, uint32_t *pairs, uint32_t *tiles, uint32_t count, uint32_t first, uint32_t experts,
    uint32_t tokens) { // see group_by_expert
    release_successor();
    wait_for_predecessor();
    if (blockIdx.x == 0) group_by_expert(chosen, pairs, tiles, count, first, experts, tokens);
    else pack(x, codes, scales, (blockIdx.x - 1) * kGroupThreads + threadIdx.x, vectors);
}

// Grid: threads over vectors of x. Arguments as of pack_and_group.
extern "C" __global__ __launch_bounds__(kPackThreads) void pack_fp8(const bf16 *x, uint8_t *codes, float *scales,
                                                                    uint32_t vectors) {
    release_successor();
    wait_for_predecessor();
    pack(x, codes, scales, blockIdx.x * kPackThreads + threadIdx.x, vectors);
}

// The sum of a token's y, in the order of the experts, some of its columns. A block has kAddTokens tokens, and a thread eight columns.
// Grid: tokens, columns over those of a block.
extern "C" __global__ __launch_bounds__(1024) void add_columns(
    const bf16 *y,          // [tokens * k, columns]
    const uint32_t *chosen, // [tokens, k]
    float *out,             // [tokens, hidden]
    uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts, // those that are here
    uint32_t first_column, uint32_t columns) {
    __shared__ uint32_t order[kAddTokens][kMaxChosen], counts[kAddTokens];
    release_successor();
    wait_for_predecessor();
    const uint32_t threads = blockDim.x / kAddTokens, own = threadIdx.x / threads, i = threadIdx.x % threads;
    const uint32_t token = blockIdx.x * kAddTokens + own, column = (blockIdx.y * threads + i) * 8;
    if (token < tokens && i < k) { // a place of the token's list a thread
        const uint32_t *keys = chosen + size_t(token) * k;
        const uint32_t key = keys[i];
        uint32_t before = 0, here = 0;
        for (uint32_t j = 0; j < k; ++j) {
            uint32_t other = keys[j];
            if (other - first >= experts) continue;
            ++here, before += other < key || (other == key && j < i);
        }
        if (key - first < experts) order[own][before] = i;
        if (i == 0) counts[own] = here;
    }
    __syncthreads();
    if (token >= tokens) return;
    float sum[8] = {};
    for (uint32_t i = 0; i < counts[own]; ++i) {
        uint4 v = load16(y + (size_t(token) * k + order[own][i]) * columns + column);
        const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float2 two = widen(pairs[c]);
            sum[2 * c] += two.x, sum[2 * c + 1] += two.y;
        }
    }
    float4 *to = reinterpret_cast<float4 *>(out + size_t(token) * hidden + first_column + column);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RUN(GATE_UP, TOKENS, ...)                                                                                      \
    const Problem p = {__VA_ARGS__};                                                                                   \
    run<GATE_UP, TOKENS>(p)
#else
#define RUN(GATE_UP, TOKENS, ...)
#endif

// Grids: as many blocks as there are multiprocessors.
#define BY_TOKENS(TOKENS)                                                                                              \
    extern "C" __global__ __launch_bounds__(Block<TOKENS>::kThreads, 1) void gate_up_wgmma_##TOKENS(                  \
        const __grid_constant__ TensorMap gate, /* [experts * width, k / 2] bytes of E2M1 */                           \
        const __grid_constant__ TensorMap up,                                                                          \
        const uint8_t *x, const float *x_scales,              /* of pack_fp8: [tokens, k], [tokens, k / 128] */        \
        const uint8_t *gate_scales, const uint8_t *up_scales, /* [experts * width, k / 32] E8M0 */                     \
        const uint32_t *tiles, const uint32_t *pairs,         /* of group_pairs */                                     \
        const float *weights,                                 /* of the pairs */                                       \
        bf16 *out,                                            /* [places in the list of pairs, width] */               \
        uint32_t experts_of_token, uint32_t width,            /* a multiple of 128 */                                  \
        uint32_t k,                                           /* a multiple of 256, at most 4096 */                    \
        float limit) {                                                                                                 \
        RUN(true, TOKENS, x, x_scales, {&gate, &up}, {gate_scales, up_scales}, tiles, pairs, weights, out, k, width,   \
            experts_of_token, 0, width / Block<TOKENS>::kHalfRows, width, limit);                                      \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(Block<TOKENS>::kThreads, 1) void down_wgmma_##TOKENS(                     \
        const __grid_constant__ TensorMap w,     /* [experts * hidden, k / 2] bytes of E2M1 */                         \
        const uint8_t *h, const float *h_scales, /* of pack_fp8: [places in the list of pairs, k], [.., k / 128] */    \
        const uint8_t *scales,                   /* [experts * hidden, k / 32] E8M0 */                                 \
        const uint32_t *tiles, const uint32_t *pairs,                                                                  \
        bf16 *out,                               /* [pairs, columns] */                                                \
        uint32_t hidden, uint32_t k,             /* k: as above */                                                     \
        uint32_t first, uint32_t columns) {      /* columns of y that are written; multiples of 256 */                 \
        RUN(false, TOKENS, h, h_scales, {&w, &w}, {scales, scales}, tiles, pairs, nullptr, out, k, hidden, 1, first,   \
            columns / Block<TOKENS>::kRows, columns, 0.f);                                                             \
    }
BY_TOKENS(32)
BY_TOKENS(64)
BY_TOKENS(128)
