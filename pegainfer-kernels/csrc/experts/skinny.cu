// DeepSeek-V4's experts at few tokens on Hopper (experts/skinny.cuh): the routed experts, with weights in FP4, and the
// shared one, in FP8, in the same launches. A pair is a token with one of its k experts and has the number token * k +
// i; behind these pairs, each token has one with the shared expert, number tokens * k + token.
//
//   experts_gate_up: h = weight silu(min(w1 x, limit)) clamp(w3 x, ±limit)   [pairs, width]; x: packed rows
//   experts_down:    y = w2 h   [pairs, hidden]; h is rounded to e4m3 in groups of 128 columns as it is loaded
//   experts_add:     the sum of a token's y, in the order of the experts, the shared one last
//
// Up to 8 pairs of an expert are a tile of pairs; a unit of work is such a tile times 64 rows of weights. A block works
// through a run of neighbouring units. Each of its four warpgroups has a ring of steps of weights in shared memory,
// which a warp of its own fills by TMA, from the first unit to the last without a pause. In gate_up the four warpgroups
// share a unit, each with a quarter of k; in down each has units of its own. The blocks of experts_down list the tiles
// and begin to load weights while the last ones of experts_gate_up run.
//
// Of the 64 rows of a unit, gate_up has 32 of w1, then the same of w3: the lower of a lane's two rows is of w1, the
// upper one of w3.
//
// FP4 is widened by moving bits: E2M1's sign, exponent and mantissa are those of an e4m3 value 2^6 times smaller. A
// wgmma has the 32 columns of one scale, and its sums are multiplied by that scale in f32. Slot 16 h + 4 q + i of wgmma
// s is column 32 s + 8 q + 2 i + h then: a lane reads a word of eight codes a wgmma and row, of which the even ones
// become one register and the odd ones another. The tokens of a tile have this order in shared memory, for the shared
// expert that of packed rows.
//
// The order of sums depends on the weight's shape alone: steps of 128 columns in order, in gate_up within each quarter
// of k, and then the first two quarters, the last two, and both. Bound by memory: each chosen expert is read once for
// each 8 of its pairs. Reference: src/cpu/deepseek_v4/experts.rs.
#include "experts/skinny.cuh"
#include "abi/experts_skinny.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Lists the pairs of a tile for the warpgroup, whose threads are done with the tile before.
__device__ __forceinline__ void list_own(const Tiles &tiles, uint32_t tile, OwnPairs &own, uint32_t group) {
    group_sync(group);
    if (thread_of_group() < 32) tiles.list(tile, own);
    group_sync(group);
}

// Copies `steps` steps of the packed rows of the warpgroup's pairs, from step `first` on, in the order of format F.
// What tokens have that are not there does not matter: nobody reads their sums.
template <Format F>
__device__ __forceinline__ void copy_packed(const Tokens &tokens, const OwnPairs &own, const ChosenExperts &c,
                                            const uint8_t *x, uint32_t k, uint32_t first, uint32_t steps) {
    const uint32_t all = c.tokens * c.k, s = threadIdx.x % 4,
                   t = threadIdx.x / 4 % kPairs; // vectors 2 s and 2 s + 1 of token t
    if (t >= own.count) return;
    const uint32_t pair = own.pairs[t];
    const uint8_t *row = x + size_t(pair < all ? pair / c.k : pair - all) * packed_bytes(k);
#pragma unroll 2
    for (uint32_t step = thread_of_group() / (4 * kPairs); step < steps; step += 128 / (4 * kPairs)) {
        const uint32_t *from = reinterpret_cast<const uint32_t *>(row + (first + step) * kDepth);
        uint32_t vectors[2][4];
#pragma unroll
        for (uint32_t q = 0; q < 4; ++q) {
            // Columns 32 s + 8 q on in FP4, 32 q + 8 s on in FP8.
            const uint32_t at = F == Format::kFp4 ? 8 * q + s : 8 * s + q;
            const uint32_t low = __ldcg(from + at), high = __ldcg(from + at + 4);
            vectors[0][q] = F == Format::kFp4 ? __byte_perm(low, high, 0x6420) : low;
            vectors[1][q] = F == Format::kFp4 ? __byte_perm(low, high, 0x7531) : high;
        }
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i)
            *reinterpret_cast<uint4 *>(tokens.codes + step * kStepBytes + t * kDepth + ((2 * s + i) ^ t) * 16) =
                make_uint4(vectors[i][0], vectors[i][1], vectors[i][2], vectors[i][3]);
        if (s > 0) continue;
        const float scale = __ldcg(reinterpret_cast<const float *>(row + k) + first + step);
        tokens.scales[step * kPairs + t] = F == Format::kFp4 ? scale * kMoved : scale;
    }
}

// Rounds 128 columns of token t to e4m3 in the order of FP4 weights: a warp calls it, with four columns a lane.
__device__ __forceinline__ void put_moved(uint8_t *tokens, float *scales, uint32_t t, uint2 pairs) {
    const uint32_t lane = threadIdx.x % 32;
    const float2 a = widen(pairs.x), b = widen(pairs.y);
    const float scale = warp_power_of_two(fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)))),
                inverse = 1.f / scale; // exact
    const uint32_t codes = encode4(a.x * inverse, a.y * inverse, b.x * inverse, b.y * inverse);
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t at = lane % 8 / 2 * 4 + lane % 2 * 2; // of vector 2 s + h, where s is lane / 8
        *reinterpret_cast<uint16_t *>(tokens + t * kDepth + ((lane / 8 * 2 + h) ^ t) * 16 + at) =
            uint16_t(__byte_perm(codes, 0, h ? 0x31 : 0x20));
    }
    if (lane == 0) scales[t] = scale * kMoved;
}

__device__ __forceinline__ float swiglu(float gate, float up, float weight, float limit) {
    const float g = fminf(round_bf16(gate), limit), u = fminf(fmaxf(round_bf16(up), -limit), limit);
    return weight * exact_silu(g) * u;
}

// A format as a value.
template <Format F> struct Of {
    static constexpr Format kFormat = F;
};

// What the threads of a block share: lists, and the barriers of the rings.
struct SharedLists {
    Lists lists;
    OwnPairs own[kGroups];
    uint64_t barriers[kGroups][2][kStages];
    uint64_t filled[kGroups]; // the first tokens of a warpgroup are there

    // All threads of the block call it.
    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (uint32_t i = 0; i < kGroups * kStages; ++i) {
                const uint32_t group = i / kStages, stage = i % kStages;
                barrier_init(&barriers[group][0][stage], 1 + 32), barrier_init(&barriers[group][1][stage], 4);
            }
            for (uint32_t group = 0; group < kGroups; ++group) barrier_init(filled + group, 128);
            barriers_ready();
        }
        __syncthreads();
    }
};

// The warpgroup of a thread that multiplies, or fetches for it.
__device__ __forceinline__ uint32_t group_of() {
    return threadIdx.x < kConsumers ? threadIdx.x / 128 : (threadIdx.x - kConsumers) / 32;
}

__device__ __forceinline__ void gate_up(const ChosenExperts &choice, const uint8_t *x, const Source (&gate)[2],
                                        const Source (&up)[2], const float *weights, bf16 *h, uint32_t width,
                                        uint32_t k, float limit) {
    __shared__ SharedLists s;
    extern __shared__ __align__(1024) uint8_t memory[];
    constexpr uint32_t kColumns = kTileRows / 2; // of h of a unit
    s.init();
    wait_for_predecessor();
    release_successor(); // so late that the next kernel may read what was chosen before it waits
    const Tiles tiles{choice, s.lists, list_tiles(choice, s.lists)};
    const uint32_t group = __shfl_sync(kAll, group_of(), 0); // the compiler then knows that it is the warp's
    const uint32_t all = k / kDepth, each = (all + kGroups - 1) / kGroups, first = min(group * each, all),
                   steps = min(each, all - first);
    const uint32_t row_tiles = width / kColumns;
    const Run run(tiles, row_tiles);
    const Units routed{run.first, run.last, 1, first, steps},
        shared{run.shared_first, run.shared_last, 1, first, steps};
    const WeightRing ring(memory, s.barriers, group);
    Place place;
    if (threadIdx.x >= kConsumers) {
        // Tokens that are asked for behind a whole ring of weights come when these have come.
        auto before = [&](uint32_t stage) {
            if (stage == kFetchedFirst) wait(s.filled + group, 0);
        };
        fetch_units<Format::kFp4>(
            ring, place, routed, gate[0], up[0], k,
            [&](uint32_t unit) {
                const uint32_t row = tiles.expert(unit / row_tiles) * width + unit % row_tiles * kColumns;
                return Boxes{row, row};
            },
            before);
        fetch_units<Format::kFp8>(
            ring, place, shared, gate[1], up[1], k,
            [&](uint32_t unit) { return Boxes{unit % row_tiles * kColumns, unit % row_tiles * kColumns}; }, before);
        return;
    }
    float *scales = reinterpret_cast<float *>(memory + kRings + kGroups * each * kStepBytes);
    float *sums = scales + kGroups * each * kPairs; // [2, kGroups, kTileSums]: of a unit, and of the next
    const Tokens tokens{memory + kRings + group * each * kStepBytes, scales + group * each * kPairs};
    OwnPairs &own = s.own[group];
    bool is_first = true;
    auto fill = [&](auto format, uint32_t tile) {
        list_own(tiles, tile, own, group);
        const uint32_t i = thread_of_group(), pair = i < own.count ? own.pairs[i] : kNone;
        const float weight = pair < choice.tokens * choice.k ? weights[pair] : 1.f;
        copy_packed<decltype(format)::kFormat>(tokens, own, choice, x, k, first, steps);
        if (i < own.count) own.weights[i] = weight;
        fence_shared_for_async();
        group_sync(group);
        if (is_first) arrive(s.filled + group);
        is_first = false;
    };
    uint32_t buffer = 0;
    auto store = [&](uint32_t row_tile, const WgmmaSums<kPairs> &total) {
        float *of_unit = sums + buffer * kGroups * kTileSums;
        put_sums<kPairs>(of_unit + group * kTileSums, total);
        consumers_sync(); // also: all have read the sums of the unit before the last
        // Two warpgroups store a unit, the others the next: gate and up of an element are 8 rows apart.
        const uint32_t i = threadIdx.x % (kConsumers / 2), t = i / kColumns,
                       column = row_tile * kColumns + i % kColumns;
        if (threadIdx.x / (kConsumers / 2) == buffer && t < own.count) {
            const float *at = of_unit + t * kTileRows + i % kColumns / 8 * 16 + i % 8;
            auto sum = [](const float *at) {
                return (at[0] + at[kTileSums]) + (at[2 * kTileSums] + at[3 * kTileSums]);
            };
            put(h + size_t(own.pairs[t]) * width + column, swiglu(sum(at), sum(at + 8), own.weights[t], limit));
        }
        buffer ^= 1;
    };
    const uint32_t row = thread_of_group() / 32 * 8 + threadIdx.x % 32 / 4; // of each box
    auto of_shared = [&](uint32_t unit, uint32_t step) {
        const uint32_t at = (unit % row_tiles * kColumns + row) / kDepth * all + step;
        return make_uint2(__ldg(gate[1].scales + at), __ldg(up[1].scales + at));
    };
    multiply_fp4<kBoxRows>(
        ring, place, routed, row_tiles, row, tokens, [&](uint32_t tile) { fill(Of<Format::kFp4>(), tile); }, store);
    multiply_fp8<kBoxRows>(
        ring, place, shared, row_tiles, row, tokens, of_shared, [&](uint32_t tile) { fill(Of<Format::kFp8>(), tile); },
        store);
}

__device__ __forceinline__ void down(const ChosenExperts &choice, const bf16 *h, const Source (&w2)[2], bf16 *y,
                                     uint32_t hidden, uint32_t k) {
    __shared__ SharedLists s;
    extern __shared__ __align__(1024) uint8_t memory[];
    release_successor();
    s.init();
    // What was chosen is there: experts_gate_up has waited before it let this kernel start. h is not.
    const Tiles tiles{choice, s.lists, list_tiles(choice, s.lists)};
    const uint32_t group = __shfl_sync(kAll, group_of(), 0), steps = k / kDepth, row_tiles = hidden / kTileRows;
    const Run run(tiles, row_tiles);
    const Units routed{run.first + group, run.last, kGroups, 0, steps},
        shared{run.shared_first + group, run.shared_last, kGroups, 0, steps};
    const WeightRing ring(memory, s.barriers, group);
    Place place;
    if (threadIdx.x >= kConsumers) {
        auto boxes = [&](uint32_t expert, uint32_t unit) {
            const uint32_t row = expert * hidden + unit % row_tiles * kTileRows;
            return Boxes{row, row + kBoxRows};
        };
        // Nothing holds them back: they are there long before the tokens.
        auto before = [](uint32_t) {};
        fetch_units<Format::kFp4>(
            ring, place, routed, w2[0], w2[0], k,
            [&](uint32_t unit) { return boxes(tiles.expert(unit / row_tiles), unit); }, before);
        fetch_units<Format::kFp8>(
            ring, place, shared, w2[1], w2[1], k, [&](uint32_t unit) { return boxes(0, unit); }, before);
        wait_for_predecessor();
        return;
    }
    float *scales = reinterpret_cast<float *>(memory + kRings + kGroups * steps * kStepBytes);
    const Tokens tokens{memory + kRings + group * steps * kStepBytes, scales + group * steps * kPairs};
    OwnPairs &own = s.own[group];
    const uint32_t warp = thread_of_group() / 32, row = warp * 16 + threadIdx.x % 32 / 4;
    auto fill = [&](auto format, uint32_t tile) {
        list_own(tiles, tile, own, group);
        wait_for_predecessor();
        // Of four tokens, the next two steps of this warp are loaded at once.
        constexpr uint32_t kTokens = 4, kAtOnce = 2 * kTokens;
        for (uint32_t first = 0; first < own.count; first += kTokens)
            for (uint32_t from = warp; from < steps; from += 8) {
                uint2 pairs[kAtOnce];
                auto is_real = [&](uint32_t j) {
                    return first + j % kTokens < own.count && from + j / kTokens * 4 < steps;
                };
#pragma unroll
                for (uint32_t j = 0; j < kAtOnce; ++j) {
                    const bf16 *at = h + size_t(own.pairs[first + j % kTokens]) * k + (from + j / kTokens * 4) * kDepth;
                    if (is_real(j)) pairs[j] = __ldcg(reinterpret_cast<const uint2 *>(at) + threadIdx.x % 32);
                }
#pragma unroll
                for (uint32_t j = 0; j < kAtOnce; ++j) {
                    if (!is_real(j)) continue;
                    const uint32_t step = from + j / kTokens * 4, t = first + j % kTokens;
                    uint8_t *codes = tokens.codes + step * kStepBytes;
                    float *scales = tokens.scales + step * kPairs;
                    if (decltype(format)::kFormat == Format::kFp4) put_moved(codes, scales, t, pairs[j]);
                    else put_token<Format::kFp8, kPairs, false>(codes, scales, t, pairs[j], true);
                }
            }
        fence_shared_for_async();
        group_sync(group);
    };
    auto store = [&](uint32_t row_tile, const WgmmaSums<kPairs> &total) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t t = threadIdx.x % 4 * 2 + i % 2, at = row_tile * kTileRows + row + i / 2 * 8;
            if (t < own.count) put(y + size_t(own.pairs[t]) * hidden + at, total[i]);
        }
    };
    auto of_shared = [&](uint32_t unit, uint32_t step) {
        // Both rows are in one block of 128 rows.
        const uint32_t scale = __ldg(w2[1].scales + (unit % row_tiles * kTileRows + row) / kDepth * steps + step);
        return make_uint2(scale, scale);
    };
    multiply_fp4<8>(
        ring, place, routed, row_tiles, row, tokens, [&](uint32_t tile) { fill(Of<Format::kFp4>(), tile); }, store);
    multiply_fp8<8>(
        ring, place, shared, row_tiles, row, tokens, of_shared, [&](uint32_t tile) { fill(Of<Format::kFp8>(), tile); },
        store);
    wait_for_predecessor(); // also without units: the kernels behind this one rely on it
}
#define GATE_UP()                                                                                                      \
    gate_up({chosen, tiles, pairs, tokens, experts_of_token, first, experts, has_shared}, x,                           \
            {{&gate, gate_scales}, {&shared_gate, shared_gate_scales}},                                                \
            {{&up, up_scales}, {&shared_up, shared_up_scales}}, weights, h, width, k, limit)
#define DOWN()                                                                                                         \
    down({chosen, tiles, pairs, tokens, experts_of_token, first, experts, has_shared}, h,                              \
         {{&w, scales}, {&shared_w, shared_scales}}, y, hidden, k)
#else
#define GATE_UP() __trap() // the launcher takes another kernel
#define DOWN() __trap()
#endif

// Grid: blocks, each with a part of the units. The maps of the shared expert are read if there is one.
extern "C" __global__ __launch_bounds__(experts_limits::kThreads, 1) void experts_gate_up(
    const __grid_constant__ TensorMap gate, // [experts * width, k / 2] bytes of E2M1
    const __grid_constant__ TensorMap up,
    const __grid_constant__ TensorMap shared_gate, // [width, k] e4m3
    const __grid_constant__ TensorMap shared_up,
    const uint8_t *x,                                                   // [tokens, packed row of k]
    const uint8_t *gate_scales, const uint8_t *up_scales,               // [experts * width, k / 32] E8M0
    const uint8_t *shared_gate_scales, const uint8_t *shared_up_scales, // [width / 128, k / 128] E8M0
    const uint32_t *chosen,                                             // [tokens, experts_of_token]
    const float *weights,                                               // the same of the pairs
    const uint32_t *tiles, const uint32_t *pairs, // of group_pairs; null with at most kUnlisted pairs
    bf16 *h,                                      // [pairs, width]
    uint32_t tokens, uint32_t experts_of_token, uint32_t first, uint32_t experts,
    uint32_t has_shared,        // 0: no shared expert
    uint32_t width, uint32_t k, // multiples of 128
    float limit) {
    GATE_UP();
}

// Grid: as above.
extern "C" __global__ __launch_bounds__(
    experts_limits::kThreads,
    1) void experts_down(const __grid_constant__ TensorMap w,        // [experts * hidden, k / 2] bytes of E2M1
                         const __grid_constant__ TensorMap shared_w, // [hidden, k] e4m3
                         const bf16 *h,                              // [pairs, k]
                         const uint8_t *scales,                      // [experts * hidden, k / 32] E8M0
                         const uint8_t *shared_scales,               // [hidden / 128, k / 128] E8M0
                         const uint32_t *chosen, const uint32_t *tiles, const uint32_t *pairs,
                         bf16 *y, // [pairs, hidden]
                         uint32_t tokens, uint32_t experts_of_token, uint32_t first, uint32_t experts,
                         uint32_t has_shared, uint32_t hidden, uint32_t k) { // multiples of 128
    DOWN();
}

constexpr uint32_t kMostChosen = limits::moe::kMaxChosen;

// Grid: tokens, columns over threads of a block.
extern "C" __global__ __launch_bounds__(128) void experts_add(
    const bf16 *y,          // [pairs, hidden]
    const uint32_t *chosen, // [tokens, k]
    bf16 *out,              // [tokens, hidden]
    uint32_t tokens, uint32_t hidden, uint32_t k, uint32_t first, uint32_t experts,
    uint32_t shared) { // whether the tokens have pairs with the shared expert
    constexpr uint32_t kThreads = 128;
    __shared__ uint32_t keys[kMostChosen], order[kMostChosen], values[kMostChosen][kThreads];
    start_after_predecessor();
    const uint32_t t = blockIdx.x, c = 2 * (blockIdx.y * kThreads + threadIdx.x);
    // Everything is read at once; what experts of other ranks have is not used.
    if (threadIdx.x < k) keys[threadIdx.x] = chosen[size_t(t) * k + threadIdx.x];
    auto read = [&](uint32_t pair) {
        return c < hidden ? __ldcg(reinterpret_cast<const uint32_t *>(y + size_t(pair) * hidden + c)) : 0;
    };
    const uint32_t last = shared ? read(tokens * k + t) : 0;
    for (uint32_t from = 0; from < k; from += 8) {
        uint32_t own[8];
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) own[i] = from + i < k ? read(t * k + from + i) : 0;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i)
            if (from + i < k) values[from + i][threadIdx.x] = own[i];
    }
    __syncthreads();
    if (threadIdx.x < k) {
        uint32_t before = 0;
        for (uint32_t j = 0; j < k; ++j) // a table of hash routing may name an expert twice
            before += keys[j] < keys[threadIdx.x] || (keys[j] == keys[threadIdx.x] && j < threadIdx.x);
        order[before] = threadIdx.x;
    }
    __syncthreads();
    if (c >= hidden) return;
    float2 sum = make_float2(0.f, 0.f);
    for (uint32_t i = 0; i < k; ++i) {
        const uint32_t pair = order[i];
        if (keys[pair] - first >= experts) continue;
        const float2 v = widen(values[pair][threadIdx.x]);
        sum.x += v.x, sum.y += v.y;
    }
    if (shared) {
        const float2 v = widen(last);
        sum = make_float2(v.x + sum.x, v.y + sum.y);
    }
    put(out + size_t(t) * hidden + c, sum.x, sum.y);
}
