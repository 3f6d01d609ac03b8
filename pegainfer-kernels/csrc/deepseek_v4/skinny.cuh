// Skinny GEMM of DeepSeek-V4 on Hopper: a tile of 64 rows of a weight times up to N tokens, for steps of few tokens.
//
// Technique: swap-AB wgmma with operand A in registers. The weights (operand A) go from global memory straight to the
// registers of the thread that multiplies them, several steps of 128 columns at a time, the first ones before the
// kernels before this one have ended (PDL); what these loads do not cover is fetched into the L2 cache meanwhile. The
// tokens (operand B) come as packed rows, or in bf16. Rows of a tile: warp w, lane 4 g + q has rows 16 w + g ("low")
// and 16 w + g + 8 ("high"). The experts' kernels (experts/skinny.cuh) share the operands and the wgmma, and have
// weights and an order of columns of their own.
//
// The order of columns: of each 128, lane quad q reads columns 32 q to 32 q + 31 of its rows, a run of 16 to 64 bytes.
// The sum over columns may take them in any order that both operands have: slot 16 h + 4 q + i of wgmma step s is
// column 32 q + 8 s + 4 h + i, and shared memory has the tokens' columns in the order of the slots (bf16: slot 8 h + 2
// q + i of step s is column 32 q + 4 s + 2 h + i).
//
// The order of sums: the tensor cores sum 128 columns from zero (in bf16: all of a segment). These sums, times both
// scales, are added in order within a segment of k; the segments are added, neighbours first. It depends on the
// weight's shape alone, so that a row's bits do not depend on the other rows of the step.
#pragma once
#include "deepseek_v4/rounding.cuh"
#include "common/cluster.cuh"
#include "common/hopper.cuh"
#include "common/weight_codes.cuh"
#include <cuda_fp16.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace skinny {

constexpr uint32_t kTileRows = 64;
constexpr uint32_t kDepth = 128; // columns of a step
constexpr uint32_t kLane = 32;   // columns of a step that a lane reads

// ---- weights

// Addresses of the first columns of a lane in its two rows, and of the rows' scales.
struct Weight {
    const uint8_t *low, *high, *low_scales, *high_scales;
};

__device__ __forceinline__ uint4 read_weights(const uint8_t *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// The addresses of rows `low` and `high` of a matrix of `k` columns, for this lane.
template <Format F>
__device__ __forceinline__ Weight weight_of(const uint8_t *codes, const uint8_t *scales, uint32_t low, uint32_t high,
                                            uint32_t k) {
    constexpr uint32_t kValues = Codes<F>::kValues; // of 16 bytes
    const uint32_t first = threadIdx.x % 4 * kLane / kValues * 16;
    auto row = [&](uint32_t r) { return codes + size_t(r) * k / kValues * 16 + first; };
    auto scale = [&](uint32_t r) { return scales + size_t(r / kDepth) * (k / kDepth); };
    return {row(low), row(high), scale(low), scale(high)};
}

// The columns of a step that a lane has of its two rows, as they are in memory, and their scales.
template <Format F> struct Stored {
    static constexpr uint32_t kReads = kLane / Codes<F>::kValues; // of 16 bytes
    uint4 low[kReads], high[kReads];
    uint32_t low_scale, high_scale;

    __device__ __forceinline__ void read(const Weight &w, uint32_t step) {
        const uint32_t at = step * (kDepth / Codes<F>::kValues * 16);
#pragma unroll
        for (uint32_t i = 0; i < kReads; ++i) {
            low[i] = read_weights(w.low + at + 16 * i), high[i] = read_weights(w.high + at + 16 * i);
        }
        if (F == Format::kFp8) low_scale = __ldg(w.low_scales + step), high_scale = __ldg(w.high_scales + step);
    }
};

// Operand A of a step: the registers of wgmma s are a[4 s] to a[4 s + 3]. The factors multiply the sums of the two
// rows.
template <Format F> struct Operand {
    uint32_t a[F == Format::kBf16 ? 32 : 16];
    float low_factor, high_factor;
};

template <Format F> __device__ __forceinline__ Operand<F> operand_of(const Stored<F> &stored) {
    Operand<F> out;
    out.low_factor = __uint_as_float(stored.low_scale << 23),
    out.high_factor = __uint_as_float(stored.high_scale << 23);
#pragma unroll
    for (uint32_t i = 0; i < Stored<F>::kReads; ++i) {
        const uint4 low = stored.low[i], high = stored.high[i];
        out.a[8 * i] = low.x, out.a[8 * i + 1] = high.x, out.a[8 * i + 2] = low.y, out.a[8 * i + 3] = high.y;
        out.a[8 * i + 4] = low.z, out.a[8 * i + 5] = high.z, out.a[8 * i + 6] = low.w, out.a[8 * i + 7] = high.w;
    }
    return out;
}

// ---- tokens

// The two e4m3 codes in the lower half of a word.
__device__ __forceinline__ float2 from_e4m3(uint32_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
    return __half22float2(reinterpret_cast<const __half2 &>(halves));
}

// The scale of the 128 values of a warp, a power of two; `largest`: the largest magnitude of this lane.
__device__ __forceinline__ float warp_power_of_two(float largest) {
    const uint32_t bits = __reduce_max_sync(kAll, __float_as_uint(largest));
    return ceil_power_of_two(fmaxf(__uint_as_float(bits), kLeastAmax) / E4M3::kMax);
}

// Bytes of a step's tokens in shared memory: N rows of 128 columns with the 128-byte swizzle.
template <Format F, int N> constexpr uint32_t kTokenBytes = N * kDepth * (F == Format::kBf16 ? 2 : 1);

// Puts 128 columns of token t into its row of a step's tokens: a warp calls it, with four columns a lane. `scales`: of
// the step's tokens. `some`: not all of them are known to be zeros.
// In FP8 the columns become e4m3 times a power of two; with `Split` the sum of two such values, in rows t and t + N /
// 2, which is as exact as bf16.
template <Format F, int N, bool Split>
__device__ __forceinline__ void put_token(uint8_t *tokens, float *scales, uint32_t t, uint2 pairs, bool some) {
    const uint32_t lane = threadIdx.x % 32;
    auto swizzled = [&](uint32_t row, uint32_t at) {
        return at / 128 * (N * 128) + row * 128 + ((at % 128 / 16) ^ (row % 8)) * 16 + at % 16;
    };
    if constexpr (F == Format::kBf16) {
        // Columns 4 lane on: quad lane / 8, step lane % 8, both halves.
        const uint32_t at = 32 * (lane % 8) + 4 * (lane / 8);
        *reinterpret_cast<uint32_t *>(tokens + swizzled(t, at)) = pairs.x;
        *reinterpret_cast<uint32_t *>(tokens + swizzled(t, at + 16)) = pairs.y;
    } else {
        const float2 low = widen(pairs.x), high = widen(pairs.y);
        float v[4] = {low.x, low.y, high.x, high.y};
        const uint32_t at = packed_place(lane);
#pragma unroll
        for (uint32_t part = 0; part < (Split ? 2 : 1); ++part) {
            const uint32_t row = t + part * (N / 2);
            if (!some) {
                *reinterpret_cast<uint32_t *>(tokens + swizzled(row, at)) = 0;
                if (lane == 0) scales[row] = 0.f;
                continue;
            }
            const float scale =
                warp_power_of_two(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
            const float inverse = 1.f / scale; // exact
            const uint32_t codes = encode4(v[0] * inverse, v[1] * inverse, v[2] * inverse, v[3] * inverse);
            *reinterpret_cast<uint32_t *>(tokens + swizzled(row, at)) = codes;
            if (lane == 0) scales[row] = scale;
            if (Split && part == 0) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float2 rounded = from_e4m3(codes >> (16 * i));
                    v[2 * i] -= rounded.x * scale, v[2 * i + 1] -= rounded.y * scale;
                }
            }
        }
    }
}

// ---- the GEMM of a warpgroup

// A wgmma accumulator: tokens 8 j + 2 q and the next of the low row, then of the high one.
template <int N> using WgmmaSums = float[N / 2];

// Adds a step to `total`. `b`: descriptor of its tokens; `scales`: of the tokens.
template <Format F, int N>
__device__ __forceinline__ void add_step(WgmmaSums<N> &total, const Operand<F> &operand, uint64_t b,
                                         const float *scales) {
    wgmma_fence();
    if constexpr (F == Format::kBf16) {
#pragma unroll
        for (int s = 0; s < 8; ++s) wgmma<false>(total, operand.a + 4 * s, b + (s / 4 * (N * 128) + s % 4 * 32) / 16);
        wgmma_commit();
        wgmma_wait<0>();
    } else {
        WgmmaSums<N> sums;
        wgmma_fp8<true>(sums, operand.a, b);
#pragma unroll
        for (int s = 1; s < 4; ++s) wgmma_fp8<false>(sums, operand.a + 4 * s, b + 2 * s);
        wgmma_commit();
        wgmma_wait<0>();
        const float *x = scales + threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            const float2 token = *reinterpret_cast<const float2 *>(x + 8 * i);
            total[4 * i] += sums[4 * i] * (operand.low_factor * token.x);
            total[4 * i + 1] += sums[4 * i + 1] * (operand.low_factor * token.y);
            total[4 * i + 2] += sums[4 * i + 2] * (operand.high_factor * token.x);
            total[4 * i + 3] += sums[4 * i + 3] * (operand.high_factor * token.y);
        }
    }
}

// Adds `count` steps, from step `first` of the matrix on, to `total`. `stored` has the loads of the first AHEAD steps
// under way. The loads of the next AHEAD steps start when all of these are multiplied: the compiler waits for all loads
// under way when it needs one of them, so that a load a step would be waited for in each step. `tokens`, `scales`: of
// the first step.
template <Format F, int N, int AHEAD>
__device__ __forceinline__ void multiply(WgmmaSums<N> &total, Stored<F> (&stored)[AHEAD], const Weight &weight,
                                         uint32_t first, uint32_t count, const uint8_t *tokens, const float *scales) {
    uint64_t b = descriptor(shared_address(tokens), 0, 1024);
    for (uint32_t base = 0; base < count; base += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            if (base + j >= count) break;
            add_step<F, N>(total, operand_of<F>(stored[j]), b, scales + (base + j) * N);
            b += kTokenBytes<F, N> / 16;
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (base + AHEAD + j < count) stored[j].read(weight, first + base + AHEAD + j);
    }
}

// ---- sums over the segments

// Writes a warpgroup's sums of one segment to shared memory: [N, 64], the rows of a token side by side.
template <int N> __device__ __forceinline__ void put_sums(float *segment, const WgmmaSums<N> &sums) {
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 8; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            segment[(8 * i + lane % 4 * 2 + j % 2) * kTileRows + row + j / 2 * 8] = sums[4 * i + j];
}

// What a block works on: `tiles` tiles of 64 rows, each by `splits` warpgroups with a segment of k each, of which the
// blocks of the cluster have `splits` each.
struct ClusterShare {
    uint32_t blocks, rank;        // of the cluster
    uint32_t splits, tile, split; // segments of the block; tile and segment of this warpgroup among those of the block
    uint32_t first_tile;          // of the block
    uint32_t block_first, block_steps; // steps of the block
    uint32_t block_most;               // steps of the block that has the most
    uint32_t first, count;             // steps of this warpgroup among those of the block

    __device__ __forceinline__ ClusterShare(uint32_t k, uint32_t splits) : splits(splits) {
        // The compiler then knows that it is the warp's.
        const uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0);
        blocks = cluster_blocks(), rank = block_rank();
        tile = warpgroup / splits, split = warpgroup % splits;
        first_tile = blockIdx.x / blocks * (blockDim.x / 128 / splits);
        const uint32_t all = k / kDepth, each = (all + blocks * splits - 1) / (blocks * splits);
        block_most = min(splits * each, all);
        block_first = min(rank * splits * each, all), block_steps = min(splits * each, all - block_first);
        first = min(split * each, block_steps), count = min(each, block_steps - first);
    }
    // The block tells the others of its cluster that it has begun; `multiply_share` waits for that.
    __device__ __forceinline__ void begin() const {
        if (blocks > 1) cluster_arrive();
    }
    // Tiles of a block.
    __device__ __forceinline__ uint32_t tiles() const { return blockDim.x / 128 / splits; }
    // The lane's lower row among those of the block's tiles.
    __device__ __forceinline__ uint32_t row() const {
        return tile * kTileRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    }
};

// The block's shared memory, as SkinnyPlan::shared counts it.
template <Format F, int N> struct Memory {
    uint8_t *tokens; // [steps, kTokenBytes]
    float *scales;   // [steps, N]
    float *segments; // [tiles, splits, N, 64]: sums of this block's segments
    // [blocks, elements / blocks]: sums of each block of the cluster, of this block's part of the elements.
    float *parts;

    __device__ __forceinline__ Memory(uint8_t *shared, const ClusterShare &share) {
        tokens = shared, scales = reinterpret_cast<float *>(shared + share.block_most * kTokenBytes<F, N>);
        segments = scales + share.block_most * N, parts = segments + blockDim.x / 128 * (N * kTileRows);
    }
};

// Fills the block's steps of the tile's tokens from bf16 values. `token(t)`: where the row of token t begins, null for
// zeros.
template <Format F, int N, bool Split, typename Token>
__device__ __forceinline__ void put_tokens(const Memory<F, N> &memory, const ClusterShare &share, Token token) {
    constexpr uint32_t kTokens = Split ? N / 2 : N, kAtOnce = 4;
    const uint32_t warps = blockDim.x / 32;
    for (uint32_t step = threadIdx.x / 32; step < share.block_steps; step += warps) {
        const uint32_t column = (share.block_first + step) * kDepth + 4 * (threadIdx.x % 32);
#pragma unroll 1
        for (uint32_t first = 0; first < kTokens; first += kAtOnce) {
            uint2 pairs[kAtOnce];
            bool some[kAtOnce];
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                const bf16 *row = token(first + i);
                some[i] = row != nullptr;
                pairs[i] = row ? *reinterpret_cast<const uint2 *>(row + column) : make_uint2(0, 0);
            }
#pragma unroll
            for (uint32_t i = 0; i < kAtOnce; ++i)
                put_token<F, N, Split>(
                    memory.tokens + step * kTokenBytes<F, N>, memory.scales + step * N, first + i, pairs[i], some[i]);
        }
    }
    fence_shared_for_async();
    __syncthreads();
}

// Copies the block's steps of the tile's tokens from packed rows of `k` columns (deepseek_v4/rounding.cuh). `token(t)`:
// as above.
template <int N, typename Token>
__device__ __forceinline__ void copy_tokens(const Memory<Format::kFp8, N> &memory, const ClusterShare &share,
                                            uint32_t k, Token token) {
    constexpr uint32_t kVectors = kDepth / 16; // of a step
    for (uint32_t i = threadIdx.x; i < N * share.block_steps * kVectors; i += blockDim.x) {
        const uint32_t t = i / kVectors % N, step = i / (kVectors * N), vector = i % kVectors;
        const uint8_t *row = token(t);
        const uint32_t to = step * kTokenBytes<Format::kFp8, N> + t * kDepth + (vector ^ (t % 8)) * 16;
        if (row) copy16(memory.tokens + to, row + (share.block_first + step) * kDepth + vector * 16);
        else *reinterpret_cast<uint4 *>(memory.tokens + to) = make_uint4(0, 0, 0, 0);
        if (vector) continue;
        float *scale = memory.scales + step * N + t;
        if (row) copy4(shared_address(scale), row + k + (share.block_first + step) * sizeof(float));
        else *scale = 0.f;
    }
    copies_wait_all();
    fence_shared_for_async();
    __syncthreads();
}

// The sums of a block's tiles over all segments: elements [tiles, kTokens, 64], of which each block of the cluster has
// a part.
template <Format F, int N, bool Split> struct Result {
    static constexpr uint32_t kElements = (Split ? N / 2 : N) * kTileRows; // of a tile
    const Memory<F, N> &memory;
    const ClusterShare &share;

    // Elements of a part, the first of this block's, and the first behind it.
    __device__ __forceinline__ uint32_t part() const { return share.tiles() * kElements / share.blocks; }
    __device__ __forceinline__ uint32_t begin() const { return share.rank * part(); }
    __device__ __forceinline__ uint32_t end() const { return begin() + part(); }

    // Adds a block's segments, of which there are 1, 2 or 4: neighbours first.
    __device__ __forceinline__ float add(const float *at) const {
        constexpr uint32_t kNext = N * kTileRows;
        if (share.splits == 1) return at[0];
        const float sum = at[0] + at[kNext];
        return share.splits == 2 ? sum : sum + (at[2 * kNext] + at[3 * kNext]);
    }

    // Element `i` added up over the block's segments, [tiles, splits, N, 64].
    __device__ __forceinline__ float of_block(uint32_t i) const {
        const float *at = memory.segments + i / kElements * share.splits * (N * kTileRows) + i % kElements;
        return Split ? add(at) + add(at + kElements) : add(at);
    }

    // Element `i` of this block's part.
    __device__ __forceinline__ float operator[](uint32_t i) const {
        if (share.blocks == 1) return of_block(i);
        const float *at = memory.parts + i - begin();
        float sum = at[0];
        for (uint32_t block = 1; block < share.blocks; ++block) sum += at[block * part()];
        return sum;
    }

    // Sends to every block of the cluster this block's sums of that block's part.
    __device__ __forceinline__ void exchange() const {
        cluster_wait(); // all blocks have begun
        for (uint32_t i = threadIdx.x; i < share.tiles() * kElements; i += blockDim.x)
            store_to_peer(memory.parts + share.rank * part() + i % part(), i / part(), of_block(i));
        cluster_arrive();
        cluster_wait();
    }
};

// Multiplies the block's share and adds up all segments.
template <Format F, int N, bool Split, int AHEAD>
__device__ __forceinline__ Result<F, N, Split> multiply_share(const Memory<F, N> &memory, const ClusterShare &share,
                                                              Stored<F> (&stored)[AHEAD], const Weight &weight) {
    WgmmaSums<N> total;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[i] = 0.f;
    multiply<F, N, AHEAD>(total, stored, weight, share.block_first + share.first, share.count,
                          memory.tokens + share.first * kTokenBytes<F, N>, memory.scales + share.first * N);
    put_sums<N>(memory.segments + (share.tile * share.splits + share.split) * (N * kTileRows), total);
    __syncthreads();
    const Result<F, N, Split> result{memory, share};
    if (share.blocks > 1) result.exchange();
    return result;
}

// Fetches the block's share of its first tile into the L2 cache, from row `first_row` of a matrix of `n` rows and `k`
// columns on: a thread has a row.
template <Format F>
__device__ __forceinline__ void prefetch(const uint8_t *codes, uint32_t first_row, uint32_t n, uint32_t k,
                                         const ClusterShare &share) {
    constexpr uint32_t kStepBytes = kDepth / Codes<F>::kValues * 16;
    if (threadIdx.x >= kTileRows || first_row + threadIdx.x >= n || share.block_steps == 0) return;
    const uint8_t *at = codes + (size_t(first_row + threadIdx.x) * (k / kDepth) + share.block_first) * kStepBytes;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(share.block_steps * kStepBytes)
                 : "memory");
}

// Starts the loads of the weights of the warpgroup's first steps.
template <Format F, int AHEAD>
__device__ __forceinline__ void read_ahead(Stored<F> (&stored)[AHEAD], const Weight &weight,
                                           const ClusterShare &share) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (i < share.count) stored[i].read(weight, share.block_first + share.first + i);
}

// Steps whose weights a lane has under way.
template <Format F> constexpr int kAhead = F == Format::kBf16 ? 2 : 4;
} // namespace skinny
#endif
