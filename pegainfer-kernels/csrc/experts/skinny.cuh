// What DeepSeek-V4's experts at few tokens (experts/skinny.cu) are made of: tiles of pairs, a block's run of units, the
// warps that fetch the weights of a unit, and the warpgroups that multiply them.
#pragma once
#include "deepseek_v4/skinny.cuh"
#include "experts/w4a8.cuh"
#include "limits.h"

namespace experts_limits = limits::deepseek_v4_experts_skinny;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using namespace skinny;
using namespace experts_limits;
using w4a8::shared8, w4a8::shared_word;

constexpr uint32_t kConsumers = 128 * kGroups; // threads that multiply; behind them, a warp for each warpgroup fetches
constexpr uint32_t kSharedCost = 2; // of a unit of the shared expert, in units of a routed one: FP8 has twice the bytes
constexpr uint32_t kNone = ~0u;
constexpr uint32_t kTileSums = kPairs * kTileRows; // of a warpgroup
constexpr uint32_t kFetchedFirst = 2; // stages that a warp fetches before the tokens of its first tile are there
constexpr uint32_t kBoxRows = kTileRows / 2, kRowBytes = 64; // of a box
static_assert(kStageBytes == kTileRows * kRowBytes, "bytes of a stage");

constexpr uint32_t kRings = kGroups * kStages * (kStageBytes + kTileRows * 4); // bytes of weights in shared memory

// The experts of this rank, and those that the tokens have chosen.
struct ChosenExperts {
    const uint32_t *chosen, *tiles, *pairs; // [tokens * k]; the lists of group_pairs, or null
    uint32_t tokens, k;                     // k: experts of a token
    uint32_t first, experts, shared;        // routed experts of this rank; whether it has the shared expert
};

// The tiles of pairs of routed experts, where group_pairs has not listed them.
struct Lists {
    uint32_t experts[kUnlisted];     // of each pair, from the rank's first one on; `experts` or more: on another rank
    uint32_t leaders[kUnlisted];     // the first pair of each tile
    uint32_t counts[kUnlisted / 32]; // of leaders among 32 pairs
};

// The pairs of the tile that a warpgroup works on.
struct OwnPairs {
    uint32_t count, pairs[kPairs];
    float weights[kPairs];
};

__device__ __forceinline__ uint32_t thread_of_group() { return threadIdx.x % 128; }

// Waits for all threads that multiply.
__device__ __forceinline__ void consumers_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(kGroups + 1), "n"(128 * kGroups) : "memory");
}

// The tiles of pairs: those of routed experts, then those of the shared one.
struct Tiles {
    const ChosenExperts &c;
    const Lists &lists;
    uint32_t routed; // their number

    __device__ __forceinline__ uint32_t shared() const { return c.shared ? (c.tokens + kPairs - 1) / kPairs : 0; }

    // The expert of tile `i`, numbered from the rank's first one on.
    __device__ __forceinline__ uint32_t expert(uint32_t i) const {
        return c.tiles ? __ldcg(c.tiles + 1 + 3 * i) : lists.experts[lists.leaders[i]];
    }

    // Lists the pairs of tile `i`: a warp calls it.
    __device__ void list(uint32_t i, OwnPairs &own) const {
        const uint32_t all = c.tokens * c.k, lane = threadIdx.x % 32;
        if (i >= routed || c.tiles) {
            const uint32_t token = (i - routed) * kPairs;
            const uint32_t *tile = c.tiles + 1 + 3 * i;
            const uint32_t count = i >= routed ? min(kPairs, c.tokens - token) : __ldcg(tile + 2);
            if (lane < count)
                own.pairs[lane] = i >= routed ? all + token + lane : __ldcg(c.pairs + __ldcg(tile + 1) + lane);
            if (lane == 0) own.count = count;
            return;
        }
        const uint32_t leader = lists.leaders[i], expert = lists.experts[leader];
        uint32_t count = 0;
        for (uint32_t from = leader / 32 * 32; from < all && count < kPairs; from += 32) {
            const uint32_t pair = from + lane;
            const bool is_own = pair >= leader && lists.experts[pair] == expert;
            const uint32_t found = __ballot_sync(kAll, is_own), place = count + __popc(found & ((1u << lane) - 1));
            if (is_own && place < kPairs) own.pairs[place] = pair;
            count += __popc(found);
        }
        if (lane == 0) own.count = min(count, kPairs);
    }
};

// The number of tiles of pairs of routed experts. Without the lists of group_pairs it fills `lists`: each kPairs-th
// pair of an expert leads a tile. All threads of a block call it.
__device__ uint32_t list_tiles(const ChosenExperts &c, Lists &lists) {
    if (c.tiles) return __ldcg(c.tiles);
    const uint32_t all = c.tokens * c.k, pair = threadIdx.x, warp = pair / 32;
    if (pair < kUnlisted)
        lists.experts[pair] = pair < all ? __ldcg(c.chosen + pair) - c.first : kNone; // below `first` it wraps
    __syncthreads();
    uint32_t before = 0, own = kNone;
    if (pair < all) {
        own = lists.experts[pair];
        for (uint32_t other = 0; other < warp * 32 + 31; ++other) before += other < pair && lists.experts[other] == own;
    }
    const bool leads = own < c.experts && before % kPairs == 0;
    const uint32_t leaders = __ballot_sync(kAll, leads);
    if (warp < kUnlisted / 32) lists.counts[warp] = __popc(leaders);
    __syncthreads();
    uint32_t place = __popc(leaders & ((1u << pair % 32) - 1)), count = 0;
    for (uint32_t i = 0; i < kUnlisted / 32; ++i) {
        if (i < warp) place += lists.counts[i];
        count += lists.counts[i];
    }
    if (leads) lists.leaders[place] = pair;
    __syncthreads();
    return count;
}

// A block's part of all units: those of routed experts, then those of the shared one.
struct Run {
    uint32_t first, last, shared_first, shared_last; // the last ones are not of the block

    // `row_tiles`: units of a tile of pairs.
    __device__ __forceinline__ Run(const Tiles &tiles, uint32_t row_tiles) {
        const uint32_t routed = tiles.routed * row_tiles, all = routed + tiles.shared() * row_tiles * kSharedCost;
        const uint32_t from = uint64_t(all) * blockIdx.x / gridDim.x, to = uint64_t(all) * (blockIdx.x + 1) / gridDim.x;
        auto shared = [&](uint32_t cost) {
            return routed + (max(cost, routed) - routed + kSharedCost - 1) / kSharedCost;
        };
        // The compiler then knows that they are the warp's: wgmma does not allow divergent branches.
        auto of_warp = [](uint32_t unit) { return __shfl_sync(kAll, unit, 0); };
        first = of_warp(min(from, routed)), last = of_warp(min(to, routed));
        shared_first = of_warp(shared(from)), shared_last = of_warp(shared(to));
    }
};

// A warpgroup's weights in shared memory: stages of 64 rows of 64 bytes, with the 64-byte swizzle, and in FP4 a word of
// scales a row. A step is a stage in FP4, and two in FP8.
struct WeightRing {
    uint8_t *codes;         // [kStages, kStageBytes]
    uint32_t *scales;       // [kStages, kTileRows]
    uint64_t *full, *empty; // barriers: [kStages]

    // Of warpgroup `group`. `rings`: the codes of all, then their scales.
    __device__ __forceinline__ WeightRing(uint8_t *rings, uint64_t (*barriers)[2][kStages], uint32_t group) {
        codes = rings + group * kStages * kStageBytes;
        scales = reinterpret_cast<uint32_t *>(rings + kGroups * kStages * kStageBytes) + group * (kStages * kTileRows);
        full = barriers[group][0], empty = barriers[group][1];
    }
};
template <Format F> constexpr uint32_t kParts = F == Format::kFp8 ? 2 : 1; // stages of a step

using Place = Ring<kStages>; // of a ring

// A matrix of all routed experts, one behind the other, or that of the shared one.
struct Source {
    const TensorMap *map;
    const uint8_t *scales;
};

// The two boxes of rows of a unit: `low` of the first 32 rows, `high` of the others; the first row of each.
struct Boxes {
    uint32_t low, high;
};

// What a warpgroup works on: each `stride`-th unit from `first` on, `steps` steps of each from `first_step` on.
struct Units {
    uint32_t first, last, stride, first_step, steps;
};

// A warp that fetches the weights of a warpgroup's units. `boxes(unit)`: its rows. `before(stage)`: called before the
// stage with this number is fetched, among those of the call.
template <Format F, typename BoxesOf, typename Before>
__device__ __forceinline__ void fetch_units(const WeightRing &ring, Place &place, const Units &units, const Source &low,
                                            const Source &high, uint32_t k, BoxesOf boxes, Before before) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t stage = 0;
    for (uint32_t unit = units.first; unit < units.last; unit += units.stride) {
        const Boxes rows = boxes(unit);
        // Of row `lane` of each box.
        const uint8_t *low_scales = low.scales + size_t(rows.low + lane) * (k / 32),
                      *high_scales = high.scales + size_t(rows.high + lane) * (k / 32);
        for (uint32_t part = units.first_step * kParts<F>; part < (units.first_step + units.steps) * kParts<F>;
             ++part) {
            before(stage++);
            wait(ring.empty + place.index, place.parity ^ 1);
            uint64_t *full = ring.full + place.index;
            if (lane == 0) {
                const uint32_t to = shared_address(ring.codes + place.index * kStageBytes),
                               column = part * (kRowBytes / 2);
                arrive_expecting(full, kStageBytes);
                copy_box(to, *low.map, column, rows.low, full);
                copy_box(to + kStageBytes / 2, *high.map, column, rows.high, full);
            }
            if (F == Format::kFp4) {
                const uint32_t to = shared_address(ring.scales + place.index * kTileRows + lane);
                copy4(to, low_scales + 4 * part), copy4(to + 4 * kBoxRows, high_scales + 4 * part);
            }
            arrive_after_copies(full);
            place.next();
        }
    }
}

// The shared memory of a warpgroup's tokens: [steps] of operand B, and [steps, kPairs] scales.
struct Tokens {
    uint8_t *codes;
    float *scales;
};
constexpr uint32_t kStepBytes = kTokenBytes<Format::kFp8, kPairs>;

// The barriers of a ring, by shared addresses that are computed once.
struct RingBarriers {
    uint32_t full, empty;

    __device__ __forceinline__ explicit RingBarriers(const WeightRing &ring)
        : full(keep(shared_address(ring.full))), empty(keep(shared_address(ring.empty))) {}

    // Waits until the stage at `place` is full.
    __device__ __forceinline__ void wait_full(const Place &place) const {
        wait(full + place.index * sizeof(uint64_t), place.parity);
    }
    // Frees the stage.
    __device__ __forceinline__ void free(const Place &place) const { arrive(empty + place.index * sizeof(uint64_t)); }
};

// A lane's words of a step of its two rows, in FP4: eight codes for each wgmma, and the four scales.
struct Words {
    uint32_t low[4], high[4], low_scales, high_scales;
};

// Where a lane's rows `low` and `low + DISTANCE` are in a ring: shared addresses in stage 0.
template <uint32_t DISTANCE> struct LaneRows {
    uint32_t codes[4], scales; // the word of wgmma s

    __device__ __forceinline__ LaneRows(const WeightRing &ring, uint32_t low) {
        static_assert(DISTANCE % 8 == 0, "both rows have their vectors at the same places");
#pragma unroll
        for (uint32_t s = 0; s < 4; ++s)
            codes[s] =
                keep(shared_address(ring.codes) + low * kRowBytes + (s ^ low / 2 % 4) * 16 + threadIdx.x % 4 * 4);
        scales = keep(shared_address(ring.scales + low));
    }
    __device__ __forceinline__ Words read(uint32_t stage) const {
        Words words;
#pragma unroll
        for (uint32_t s = 0; s < 4; ++s) {
            const uint32_t at = codes[s] + stage * kStageBytes;
            words.low[s] = shared_word(at), words.high[s] = shared_word(at + DISTANCE * kRowBytes);
        }
        const uint32_t at = scales + stage * (kTileRows * 4);
        words.low_scales = shared_word(at), words.high_scales = shared_word(at + DISTANCE * 4);
        return words;
    }
};

// Eight codes of E2M1 as e4m3 values 2^6 times smaller: the even columns and the odd ones. Of an even one, adding moves
// the sign from bit 5 of its byte to bit 7, which takes an instruction less than two shifts. `four`: 4 that is not
// known to the compiler, which then multiplies in the pipe that is less busy.
__device__ __forceinline__ void move_fp4(uint32_t word, uint32_t four, uint32_t &even, uint32_t &odd) {
    even = ((word & 0x0f0f0f0fu) * four + 0x60606060u) & 0x9c9c9c9cu;
    odd = (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu);
}
constexpr float kMoved = 64.f; // what the tokens' scales are multiplied by for that

// The E8M0 scale of wgmma `s` among the four of a word, as a float.
__device__ __forceinline__ float scale_in(uint32_t scales, int s) {
    return __uint_as_float((s == 3 ? scales >> 1 : scales << (23 - 8 * s)) & 0x7f800000u);
}

// Multiplies the units of a warpgroup in FP4. `low`: a lane's lower row of a unit; `fill(tile)`: puts the tokens of a
// tile of pairs into shared memory; `store(row tile, sums)`: takes a unit's sums.
template <uint32_t DISTANCE, typename Fill, typename Store>
__device__ __forceinline__ void multiply_fp4(const WeightRing &ring, Place &place, const Units &units,
                                             uint32_t row_tiles, uint32_t low, const Tokens &tokens, Fill fill,
                                             Store store) {
    const LaneRows<DISTANCE> rows(ring, low);
    const RingBarriers barriers(ring);
    const uint32_t four = blockDim.x / (experts_limits::kThreads / 4);
    const uint64_t first_b = descriptor(shared_address(tokens.codes), 0, 1024);
    auto read = [&] {
        barriers.wait_full(place);
        return rows.read(place.index);
    };
    Words words = {};
    uint32_t tile = kNone;
    for (uint32_t unit = units.first; unit < units.last; unit += units.stride) {
        if (unit / row_tiles != tile) tile = unit / row_tiles, fill(tile);
        if (unit == units.first && units.steps > 0) words = read();
        WgmmaSums<kPairs> total = {};
        uint32_t b = uint32_t(first_b); // the upper half is the same for all steps
        uint32_t token_scales = shared_address(tokens.scales + threadIdx.x % 4 * 2);
        for (uint32_t step = 0; step < units.steps; ++step, b += kStepBytes / 16, token_scales += kPairs * 4) {
            uint32_t a[16];
            float low_scale[4], high_scale[4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                move_fp4(words.low[s], four, a[4 * s], a[4 * s + 2]),
                    move_fp4(words.high[s], four, a[4 * s + 1], a[4 * s + 3]);
                low_scale[s] = scale_in(words.low_scales, s), high_scale[s] = scale_in(words.high_scales, s);
            }
            __syncwarp(); // all lanes have read the stage
            if (threadIdx.x % 32 == 0) barriers.free(place);
            place.next();
            WgmmaSums<kPairs> sums[4];
            // Nothing of this is computed between the wgmmas: the compiler would wait for each of them.
#pragma unroll
            for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i]));
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) wgmma_fp8<true>(sums[s], a + 4 * s, first_b >> 32 << 32 | (b + 2 * s));
            wgmma_commit();
            // The next step's words are on their way while this one is multiplied.
            if (step + 1 < units.steps || unit + units.stride < units.last) words = read();
            const uint2 token = shared8(token_scales);
            wgmma_wait<0>();
#pragma unroll
            for (int s = 0; s < 4; ++s) w4a8::pin(sums[s]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *scale = i < 2 ? low_scale : high_scale;
                float sum = sums[0][i] * scale[0];
#pragma unroll
                for (int s = 1; s < 4; ++s) sum += sums[s][i] * scale[s];
                total[i] += sum * __uint_as_float(i % 2 ? token.y : token.x);
            }
        }
        store(unit % row_tiles, total);
    }
}

// This lane's columns of two rows of a step in FP8, whose stages are `first` and `second`, without their scales.
__device__ __forceinline__ Stored<Format::kFp8> read_fp8(const WeightRing &ring, uint32_t first, uint32_t second,
                                                         uint32_t low, uint32_t high) {
    Stored<Format::kFp8> stored;
    const uint32_t quad = threadIdx.x % 4;
    const uint8_t *codes = ring.codes + (quad < 2 ? first : second) * kStageBytes;
    auto vector = [&](uint32_t row, uint32_t i) {
        return *reinterpret_cast<const uint4 *>(codes + row * kRowBytes + ((quad * 2 + i) % 4 ^ row / 2 % 4) * 16);
    };
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) stored.low[i] = vector(low, i), stored.high[i] = vector(high, i);
    return stored;
}

// The same in FP8. `scales(unit, step)`: of the rows.
template <uint32_t DISTANCE, typename Scales, typename Fill, typename Store>
__device__ __forceinline__ void multiply_fp8(const WeightRing &ring, Place &place, const Units &units,
                                             uint32_t row_tiles, uint32_t low, const Tokens &tokens, Scales scales,
                                             Fill fill, Store store) {
    uint32_t tile = kNone;
    for (uint32_t unit = units.first; unit < units.last; unit += units.stride) {
        if (unit / row_tiles != tile) tile = unit / row_tiles, fill(tile);
        WgmmaSums<kPairs> total = {};
        uint64_t b = descriptor(shared_address(tokens.codes), 0, 1024);
        for (uint32_t step = 0; step < units.steps; ++step, b += kStepBytes / 16) {
            const uint2 of_rows = scales(unit, units.first_step + step);
            Place second = place;
            second.next();
            wait(ring.full + place.index, place.parity), wait(ring.full + second.index, second.parity);
            Stored<Format::kFp8> stored = read_fp8(ring, place.index, second.index, low, low + DISTANCE);
            stored.low_scale = of_rows.x, stored.high_scale = of_rows.y;
            const Operand<Format::kFp8> operand = operand_of<Format::kFp8>(stored);
            __syncwarp(); // all lanes have read the stages
            if (threadIdx.x % 32 == 0) arrive(ring.empty + place.index), arrive(ring.empty + second.index);
            place = second, place.next();
            add_step<Format::kFp8, kPairs>(total, operand, b, tokens.scales + step * kPairs);
        }
        store(unit % row_tiles, total);
    }
}
#endif
