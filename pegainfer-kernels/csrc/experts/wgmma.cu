// DeepSeek-V4's routed experts at many tokens on Hopper: grouped GEMMs of FP4 weights and FP8 activations
// (experts/w4a8.cuh).
//
//   group_places:   lists the pairs of each expert; a pair's index in these lists is its place
//   pack_tokens:    x from bf16 to FP8, permuted, with scales: a row for each place
//   gate_up_wgmma:  h = weight silu(min(w1 x, limit)) clamp(w3 x, ±limit), a row for each place
//   pack_places:    h from bf16 to FP8, in the same way
//   down_wgmma:     y = w2 h, a row for each pair; a range of the columns of y at a time, so that most of them stay in
//                   the L2
//   add_columns:    the sum of a token's y and of a row of the shared expert, the same columns, rounded once
//
// Tiles of pairs (moe/pairs.cuh) have at most 48, 96 or 128 tokens: a tile costs about the same with few tokens as
// with many, so most experts should have one. A cluster of two persistent blocks has the same pairs and neighbouring
// rows of weights. A block has two or four warpgroups that multiply 64 rows of weights each, and a warpgroup that
// fetches steps of 128 columns (experts/wgmma.cuh). Half of the rows of a tile of gate_up are of w1 and the others the
// same of w3: a thread has both, so that SwiGLU needs no exchange. Neighbouring clusters take neighbouring rows of the
// same pairs: activations stay in the L2, and weights are read from memory once.
//
// Limit: the latencies of a warp's own instructions and wgmmas at many tokens of an expert, memory at few. Reference:
// src/cpu/deepseek_v4/experts.rs.
#include "deepseek_v4/rounding.cuh"
#include "experts/wgmma.cuh"
#include "moe/pairs.cuh"
#include "common/math.cuh"
#include "abi/experts_wgmma.h"

namespace {
using limits::moe::kGroupThreads;
using limits::moe::kMaxChosen;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// One thread of a warpgroup that multiplies: its numbers, its two rows and its place in the ring.
template <int TOKENS> struct ExpertConsumer {
    uint32_t group, thread, warp, lane;
    uint32_t top, bottom; // rows of the weights in shared memory
    Ring<BlockShared<TOKENS>::kWeightStages> weights;
    Ring<BlockShared<TOKENS>::kTokenStages> tokens;
};

// The largest of the `bytes` scales at shared address `row`; the four lanes of a quad look at a part each, and all get
// it.
__device__ __forceinline__ uint32_t largest_scale(uint32_t row, uint32_t bytes, uint32_t quad) {
    uint32_t even = 0, odd = 0;
    for (uint32_t i = 4 * quad; i < bytes; i += 16) {
        uint32_t word = w4a8::shared_word(row + i);
        even = __vmaxu2(even, word & 0x00ff00ffu), odd = __vmaxu2(odd, word >> 8 & 0x00ff00ffu);
    }
    even = __vmaxu2(even, odd);
    return reduce_quad(max(even & 0xffffu, even >> 16), [](uint32_t a, uint32_t b) { return max(a, b); });
}

// Sums of a tile over k, for N tokens, times the scales of weights and tokens. While a step's wgmmas run, operand A of
// the next step is widened, from codes that were read a step before.
template <int N, int TOKENS>
__device__ __forceinline__ void multiply(float (&totals)[N / 2], BlockShared<TOKENS> &s, const Problem &p,
                                         ExpertConsumer<TOKENS> &c, uint32_t slot) {
    constexpr uint32_t stride = BlockShared<TOKENS>::kScaleStride;
    const uint32_t steps = p.k / w4a8::kStep, quad = c.lane % 4;
    const uint32_t scales = shared_address(s.row_scales[slot]);
    const uint32_t top_row = scales + c.top * stride, bottom_row = scales + c.bottom * stride;
    const uint32_t top_largest = largest_scale(top_row, p.k / w4a8::kScaled, quad);
    const uint32_t bottom_largest = largest_scale(bottom_row, p.k / w4a8::kScaled, quad);
    const uint32_t top_table = keep(shared_address(s.table) + 8 * top_largest);
    const uint32_t bottom_table = keep(shared_address(s.table) + 8 * bottom_largest);
    uint32_t top_scale = keep(top_row + quad), bottom_scale = keep(bottom_row + quad);
    // The boxes have the 64-byte swizzle: vector p of row r lies at p ^ r / 2 % 4.
    const uint32_t codes = keep(shared_address(s.weights) + c.top * w4a8::kRowBytes + (quad ^ c.top / 2 % 4) * 16);
    const uint32_t below = (c.bottom - c.top) * w4a8::kRowBytes;
    const uint32_t tokens = keep(shared_address(s.tokens)), token_scales = keep(shared_address(s.scales) + quad * 8);
    auto weights = c.weights, multiplied = weights; // next steps: whose codes are read, and that is multiplied
    auto step = c.tokens;
    float sums[N / 2];
    w4a8::RowCodes next;
    auto load = [&] {
        wait(&s.weights_full[weights.index], weights.parity);
        const uint32_t at = codes + weights.index * uint32_t(sizeof(s.weights[0]));
        const uint32_t top = w4a8::shared_byte(top_scale), bottom = w4a8::shared_byte(bottom_scale);
        next.top = w4a8::shared16(at), next.bottom = w4a8::shared16(at + below);
        next.top_table = w4a8::shared8(top_table - 8 * top),
        next.bottom_table = w4a8::shared8(bottom_table - 8 * bottom);
        top_scale += 4, bottom_scale += 4;
        weights.next();
    };
    // Operand A of the step that was read.
    auto widen = [&](w4a8::OperandA(&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i].set(next, i);
    };
    // A step, whose operand A is `a`. Meanwhile the next one's is widened to `then`, and the codes of the one after it
    // are read.
    auto multiply_step = [&](const w4a8::OperandA(&a)[4], w4a8::OperandA(&then)[4], bool more, bool reads) {
        wait(&s.tokens_full[step.index], step.parity);
        const uint64_t b = descriptor(tokens + step.index * uint32_t(sizeof(s.tokens[0])), 0, 1024);
        wgmma_fence();
        wgmma_fp8<true>(sums, a[0].x, b), wgmma_fp8<false>(sums, a[1].x, b + 2);
        wgmma_fp8<false>(sums, a[2].x, b + 4), wgmma_fp8<false>(sums, a[3].x, b + 6);
        wgmma_commit();
        if (more) widen(then);
        if (reads) load();
        wgmma_wait<0>();
        w4a8::pin(sums);
        w4a8::promote(totals, sums, token_scales + step.index * uint32_t(sizeof(s.scales[0])));
        // The stages may be filled again, that of the tokens when both blocks have read it. The weights were used by
        // now: with an arrival right behind the loads from shared memory, whose results it does not wait for, some
        // calls multiplied weights of another step.
        __syncwarp();
        if (c.lane < kBlocks) arrive_in_block(&s.tokens_empty[step.index], c.lane);
        if (c.lane == 0) arrive(&s.weights_empty[multiplied.index]);
        step.next(), multiplied.next();
    };
    w4a8::OperandA even[4], odd[4];
    load();
    widen(even);
    load();
    for (uint32_t j = 2;; j += 2) {
        const bool more = j < steps;
        multiply_step(even, odd, true, more);
        multiply_step(odd, even, more, more);
        if (!more) break;
    }
    c.weights = weights, c.tokens = step;
    const float top_factor = w4a8::row_factor(top_largest), bottom_factor = w4a8::row_factor(bottom_largest);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) totals[i] *= i % 4 < 2 ? top_factor : bottom_factor;
}

// Copies the staged output of up to kStagedTokens tokens, from token `first` on, to memory: VECTORS vectors a token,
// those of token t to at(t).
template <uint32_t VECTORS, typename At>
__device__ __forceinline__ void store_staged(const uint8_t *staged, uint32_t thread, uint32_t first, uint32_t count,
                                             At at) {
    for (uint32_t t = thread / VECTORS; t < kStagedTokens && first + t < count; t += 128 / VECTORS) {
        uint32_t vector = thread % VECTORS;
        uint4 v = *reinterpret_cast<const uint4 *>(staged + t * (VECTORS * 16 + kPadding) + vector * 16);
        *reinterpret_cast<uint4 *>(at(first + t) + vector * 8) = v;
    }
}

__device__ __forceinline__ float expert_swiglu(float gate, float up, float weight, float limit) {
    float g = fminf(round_bf16(gate), limit), u = fminf(fmaxf(round_bf16(up), -limit), limit);
    return weight * silu(g) * u;
}

template <int N, bool GATE_UP, int TOKENS>
__device__ __forceinline__ void consume(BlockShared<TOKENS> &s, const Problem &p, ExpertConsumer<TOKENS> &c,
                                        const ExpertTile &tile, uint32_t slot) {
    const uint32_t quad = c.lane % 4;
    float totals[N / 2] = {};
    multiply<N>(totals, s, p, c, slot);
    constexpr int kStagedBlocks = kStagedTokens / 16;
    uint8_t *staged = s.staged[c.group];
#pragma unroll
    for (int part = 0; part < (N + int(kStagedTokens) - 1) / int(kStagedTokens); ++part) {
        group_sync(c.group); // the rows that were staged are stored
#pragma unroll
        for (int b = part * kStagedBlocks; b < (part + 1) * kStagedBlocks && b < N / 16; ++b) {
            const uint32_t at = shared_address(staged);
            const uint32_t token = 16 * (b - part * kStagedBlocks);
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
        const uint32_t column = tile.row - p.first_row + c.group * (GATE_UP ? 32 : 64); // of the output
        if (GATE_UP)
            store_staged<4>(staged, c.thread, part * kStagedTokens, tile.count,
                            [&](uint32_t t) { return p.out + size_t(tile.first + t) * p.out_width + column; });
        else
            store_staged<8>(staged, c.thread, part * kStagedTokens, tile.count,
                            [&](uint32_t t) { return p.out + size_t(s.rows[slot][t]) * p.out_width + column; });
    }
}

// `consume` with the smallest multiple of 16 that holds the tile's tokens.
template <int N, bool GATE_UP, int TOKENS>
__device__ __forceinline__ void consume_any(BlockShared<TOKENS> &s, const Problem &p, ExpertConsumer<TOKENS> &c,
                                            const ExpertTile &tile, uint32_t slot) {
    if constexpr (N > 16)
        if (tile.count <= N - 16) return consume_any<N - 16, GATE_UP>(s, p, c, tile, slot);
    consume<N, GATE_UP>(s, p, c, tile, slot);
}

template <bool GATE_UP, int TOKENS> __device__ __forceinline__ void run(const Problem &p) {
    using S = BlockShared<TOKENS>;
    extern __shared__ uint8_t dynamic[];
    S &s = *reinterpret_cast<S *>(dynamic + (1024 - shared_address(dynamic) % 1024) % 1024);
    release_successor();
    w4a8::fill_table(s.table, threadIdx.x, S::kThreads);
    if (threadIdx.x == 0) {
        constexpr uint32_t kWarps = S::kConsumers / 32;
        for (int i = 0; i < S::kWeightStages; ++i)
            barrier_init(&s.weights_full[i], 1), barrier_init(&s.weights_empty[i], kWarps);
        for (int i = 0; i < S::kTokenStages; ++i)
            barrier_init(&s.tokens_full[i], 1), barrier_init(&s.tokens_empty[i], kBlocks * kWarps);
        for (uint32_t i = 0; i < kSlots; ++i)
            barrier_init(&s.lists_full[i], kListThreads), barrier_init(&s.lists_empty[i], kWarps);
        barriers_ready();
    }
    cluster_sync();
    wait_for_predecessor();
    if (threadIdx.x >= S::kConsumers) {
        registers_lower<S::kGroups == 4 ? 32 : 40>();
        const uint32_t thread = threadIdx.x - S::kConsumers;
        if (thread == 0) fetch_weights<GATE_UP, TOKENS>(s, p);
        if (thread == 32) fetch_tokens<GATE_UP, TOKENS>(s, p);
        if (thread >= 64) fetch_lists<GATE_UP, TOKENS>(s, p, thread - 64);
    } else {
        registers_raise<S::kGroups == 4 ? 112 : 232>();
        ExpertConsumer<TOKENS> c;
        c.group = threadIdx.x / 128, c.thread = threadIdx.x % 128, c.warp = c.thread / 32, c.lane = threadIdx.x % 32;
        c.top = GATE_UP ? 32 * c.group + 8 * c.warp + c.lane / 4 : 64 * c.group + 16 * c.warp + c.lane / 4;
        c.bottom = c.top + (GATE_UP ? S::kHalfRows : 8);
        for (Schedule<GATE_UP, TOKENS> schedule(p); schedule.any(); schedule.next()) {
            const uint32_t slot = schedule.slot();
            const ExpertTile tile = schedule.tile();
            wait(&s.lists_full[slot], schedule.parity());
            consume_any<TOKENS, GATE_UP>(s, p, c, tile, slot);
            __syncwarp();
            if (c.lane == 0) arrive(&s.lists_empty[slot]);
        }
    }
    cluster_sync(); // the other block's copies and arrivals have come
}
#endif
} // namespace

// 128 columns of a row in FP8, by half a warp: two words of a lane, in the order in which they are stored, and the
// scale.
struct Packed {
    uint32_t words[2];
    float scale;
    // `v`: a vector of the columns a lane. Whole warps call it.
    __device__ __forceinline__ explicit Packed(const uint4 &v) {
        uint32_t most = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
        for (uint32_t step = 8; step > 0; step /= 2) most = max(most, __shfl_xor_sync(kAll, most, step));
        scale = ceil_power_of_two(fmaxf(__uint_as_float(most << 16), kLeastAmax) / E4M3::kMax);
        const float inverse = 1.f / scale;
        auto four = [&](uint32_t a, uint32_t b) {
            float2 low = widen(a), high = widen(b);
            return encode2(low.x * inverse, low.y * inverse) | encode2(high.x * inverse, high.y * inverse) << 16;
        };
        const uint32_t even = four(v.x, v.y), odd = four(v.z, v.w), lane = threadIdx.x % 16;
        // Words 2 lane and 2 lane + 1 of the permuted ones (w4a8::permuted) are words 8 c + 2 (lane / 4) + lane / 2 % 2
        // of the columns, with neighbouring c.
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t from = (lane % 2 * 2 + i) * 4 + lane / 4;
            const uint32_t a = __shfl_sync(kAll, even, from, 16), b = __shfl_sync(kAll, odd, from, 16);
            words[i] = lane / 2 % 2 ? b : a;
        }
    }
    // Stores vector `vector` of a row.
    __device__ __forceinline__ void store(uint8_t *row, float *scales, uint32_t pitch, uint32_t vector) const {
        reinterpret_cast<uint2 *>(row)[vector] = make_uint2(words[0], words[1]);
        if (vector % 16 == 0) scales[size_t(vector / 16) * pitch] = scale;
    }
};

// Lists the pairs of each expert, their tiles, and where each pair is in the lists. Grid: blocks, each of
// which lists the pairs of some experts.
extern "C" __global__ __launch_bounds__(kGroupThreads) void group_places(
    const uint32_t *chosen, uint32_t *pairs, uint32_t *places, uint32_t *tiles, uint32_t count, uint32_t first,
    uint32_t experts,
    uint32_t tokens) { // see group_by_expert
    start_after_predecessor();
    group_by_expert(chosen, pairs, tiles, count, first, experts, tokens, kListAlign, places, blockIdx.x, gridDim.x);
}

// Grid: threads over vectors of x; a row is stored at each place of its token.
extern "C" __global__ __launch_bounds__(kPackThreads) void pack_tokens(
    const bf16 *x,                                  // [tokens, k]
    const uint32_t *chosen, const uint32_t *places, // [tokens, experts_of_token]
    uint8_t *codes,                                 // [places, k], permuted within each 128 columns
    float *scales,                                  // [k / 128, pitch]
    uint32_t vectors, uint32_t k, uint32_t pitch, uint32_t experts_of_token, uint32_t first, uint32_t experts) {
    start_after_predecessor();
    const uint32_t i = blockIdx.x * kPackThreads + threadIdx.x, token = i / (k / 8), vector = i % (k / 8);
    const Packed packed(i < vectors ? load16(x + size_t(i) * 8) : make_uint4(0, 0, 0, 0));
    if (i >= vectors) return;
    for (uint32_t c = 0; c < experts_of_token; ++c) {
        if (chosen[token * experts_of_token + c] - first >= experts) continue;
        const uint32_t place = places[token * experts_of_token + c];
        packed.store(codes + size_t(place) * k, scales + place, pitch, vector);
    }
}

// Grid: threads over vectors of h; nothing is read behind the last place.
extern "C" __global__ __launch_bounds__(kPackThreads) void pack_places(
    const bf16 *h, const uint32_t *tiles, uint8_t *codes, float *scales, uint32_t k,
    uint32_t pitch) { // as above
    start_after_predecessor();
    const uint32_t all = tiles[0], *last = tiles + 1 + 3 * (all - 1), end = all == 0 ? 0 : last[1] + last[2];
    const uint32_t i = blockIdx.x * kPackThreads + threadIdx.x, place = i / (k / 8), vector = i % (k / 8);
    if (i / 32 * 32 / (k / 8) >= end) return;
    const Packed packed(place < end ? load16(h + size_t(i) * 8) : make_uint4(0, 0, 0, 0));
    if (place < end) packed.store(codes + size_t(place) * k, scales + place, pitch, vector);
}

// The sum of a token's y, in the order of the experts, and then of `shared`, some of its columns. A block has
// kAddTokens tokens, and a thread eight columns.
// Grid: tokens, columns over those of a block.
extern "C" __global__ __launch_bounds__(1024) void add_columns(
    const bf16 *y,                                                                  // [tokens * k, columns]
    const uint32_t *chosen,                                                         // [tokens, k]
    const bf16 *shared,                                                             // [tokens, hidden]; null: none
    bf16 *out,                                                                      // [tokens, hidden]
    uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts, // those that are here
    uint32_t first_column, uint32_t columns) {
    __shared__ uint32_t order[kAddTokens][kMaxChosen], counts[kAddTokens];
    start_after_predecessor();
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
    const size_t to = size_t(token) * hidden + first_column + column;
    float sum[8] = {};
    auto add = [&](const uint4 &eight) {
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float2 two = widen(pairs[c]);
            sum[2 * c] += two.x, sum[2 * c + 1] += two.y;
        }
    };
    const uint4 last = shared ? load16(written(shared) + to) : make_uint4(0, 0, 0, 0);
    constexpr uint32_t kLoads = 4; // under way at once
    for (uint32_t from = 0; from < counts[own]; from += kLoads) {
        uint4 loaded[kLoads];
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i)
            if (from + i < counts[own])
                loaded[i] = load16(y + (size_t(token) * k + order[own][from + i]) * columns + column);
#pragma unroll
        for (uint32_t i = 0; i < kLoads; ++i) {
            if (from + i >= counts[own]) break;
            add(loaded[i]);
        }
    }
    if (shared) add(last);
    *reinterpret_cast<uint4 *>(out + to) =
        make_uint4(narrow(sum[0], sum[1]), narrow(sum[2], sum[3]), narrow(sum[4], sum[5]), narrow(sum[6], sum[7]));
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define RUN(GATE_UP, TOKENS, ...)                                                                                      \
    const Problem p = {__VA_ARGS__};                                                                                   \
    run<GATE_UP, TOKENS>(p)
#else
#define RUN(GATE_UP, TOKENS, ...)
#endif

// Grids: as many blocks as there are multiprocessors, rounded down to whole clusters.
#define BY_TOKENS(TOKENS)                                                                                              \
    extern "C" __global__ __launch_bounds__(Block<TOKENS>::kThreads, 1) void gate_up_wgmma_##TOKENS(                   \
        const __grid_constant__ TensorMap gate, /* [experts * width, k / 2] bytes of E2M1 */                           \
        const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap x, /* [places, k], of pack_tokens */   \
        const float *x_scales,                                                     /* [k / 128, pitch] */              \
        const uint8_t *gate_scales, const uint8_t *up_scales, /* [experts * width, k / 32] E8M0 */                     \
        const uint32_t *tiles, const uint32_t *pairs,         /* of group_places */                                    \
        const float *weights,                                 /* of the pairs */                                       \
        bf16 *out,                                            /* [places, width] */                                    \
        uint32_t width,                                       /* a multiple of 256 */                                  \
        uint32_t k,                                           /* a multiple of 256, at most 4096 */                    \
        uint32_t pitch, float limit) {                                                                                 \
        RUN(true, TOKENS, &x, x_scales, {&gate, &up}, {gate_scales, up_scales}, tiles, pairs, weights, out, k, width,  \
            pitch, 0, width / Block<TOKENS>::kHalfRows, width, limit);                                                 \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(Block<TOKENS>::kThreads, 1) void down_wgmma_##TOKENS(                      \
        const __grid_constant__ TensorMap w,                     /* [experts * hidden, k / 2] bytes of E2M1 */         \
        const __grid_constant__ TensorMap h,                     /* [places, k], of pack_places */                     \
        const float *h_scales,                                   /* [k / 128, pitch] */                                \
        const uint8_t *scales,                                   /* [experts * hidden, k / 32] E8M0 */                 \
        const uint32_t *tiles, const uint32_t *pairs, bf16 *out, /* [pairs, columns] */                                \
        uint32_t hidden, uint32_t k,                             /* k: as above */                                     \
        uint32_t pitch, uint32_t first, uint32_t columns) {      /* columns of y that are written; multiples of 512 */ \
        RUN(false, TOKENS, &h, h_scales, {&w, &w}, {scales, scales}, tiles, pairs, nullptr, out, k, hidden, pitch,     \
            first, columns / Block<TOKENS>::kRows, columns, 0.f);                                                      \
    }
BY_TOKENS(48)
BY_TOKENS(96)
BY_TOKENS(128)
