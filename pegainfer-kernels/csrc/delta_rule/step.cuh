// One chunk of the inter-chunk scan, for the 16 rows of the state that a warp has: the GEMMs of
// csrc/delta_rule/scan.cu.
#pragma once
#include "delta_rule/fetch.cuh"
#include "common/hopper.cuh"

// 16 rows of the state, as accumulators: elements 0, 1 of tile t are row 2 r at columns 8 t + 2 c, + 1,
// those at 2, 3 are row 2 r + 1, for lane 4 r + c. Neighbouring rows in a lane make pairs of what is read and written
// by row.
using State = Accumulator[kHead / 8];

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

// The state, and N, as operands A of all GEMMs of a chunk.
using StateOperand = uint4[kHead / 16];
using NewValuesOperand = uint4[kBands];

__device__ __forceinline__ void clear(Accumulator (&d)[kChunk / 8]) {
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) d[t][0] = d[t][1] = d[t][2] = d[t][3] = 0.f;
}

// d[16, 64] = a[16, 128] tileᵀ for each warp, and `meanwhile`; a warpgroup's four do it at once on Hopper.
template <bool Hopper, class F>
__device__ __forceinline__ void multiply_tile(Accumulator (&d)[kChunk / 8], StateOperand &a, const Tile &tile,
                                              F meanwhile) {
    clear(d);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper) {
        uint64_t b = descriptor(shared_address(tile), 0, 1024);
        // All operands are in registers before the first wgmma: what is moved in between serialises them.
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            asm volatile("" : "+r"(a[c].x), "+r"(a[c].y), "+r"(a[c].z), "+r"(a[c].w));
        }
        wgmma_fence();
#pragma unroll
        for (uint32_t c = 0; c < kHead / 16; ++c) {
            uint64_t at = b + (c / 4 * kColumnVectors * 16 + c % 4 * 32) / 16;
            if (c == 0) wgmma<true>(reinterpret_cast<float (&)[kChunk / 2]>(d), a[c], at);
            else wgmma<false>(reinterpret_cast<float (&)[kChunk / 2]>(d), a[c], at);
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
            uint4 b = load_matrices(&tile[tile_vector(16 * t + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2)]);
            mma(d[2 * t], a[c], b.x, b.y);
            mma(d[2 * t + 1], a[c], b.z, b.w);
        }
    }
}

// d[16, 128] += a[16, 64] tile, as above.
template <bool Hopper, class F>
__device__ __forceinline__ void multiply_by_rows(State &d, NewValuesOperand &a, const Tile &tile, F meanwhile) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (Hopper) {
        uint64_t b = descriptor(shared_address(tile), kColumnVectors * 16, 1024);
        wgmma_fence();
#pragma unroll
        for (uint32_t j = 0; j < kBands; ++j) {
            wgmma_transposed(reinterpret_cast<float (&)[kHead / 2]>(d), a[j], b + j * 16 * 128 / 16);
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
            uint4 b = load_matrices<true>(&tile[tile_vector(token, 2 * c + lane / 16)]);
            mma(d[2 * c], a[j], b.x, b.y);
            mma(d[2 * c + 1], a[j], b.z, b.w);
        }
    }
}

// d[16, 64] += a[16, 64] triangleᵀ
__device__ __forceinline__ void multiply_triangle(Accumulator (&d)[kChunk / 8], const NewValuesOperand &a,
                                                  const uint4 (*triangle)[32]) {
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) {
#pragma unroll
        for (uint32_t i = j; i < kBands; ++i) {
            uint4 b = triangle[block_index(i, j)][threadIdx.x % 32];
            mma(d[2 * i], a[j], b.x, b.y);
            mma(d[2 * i + 1], a[j], b.z, b.w);
        }
    }
}

template <uint32_t N> __device__ __forceinline__ void hand_over(uint4 (&to)[N][32], const uint4 (&a)[N]) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) to[i][threadIdx.x % 32] = a[i];
}

template <uint32_t N> __device__ __forceinline__ void receive(uint4 (&a)[N], const uint4 (&from)[N][32]) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) a[i] = from[i][threadIdx.x % 32];
}

// Updates 16 rows of the state over a chunk. Gives the state before it and N, in registers, or to the warps that
// compute outputs. `row`: first of the warp's rows in the block's.
template <bool Hopper>
__device__ __forceinline__ void update_state(State &state, StateOperand &before, NewValuesOperand &new_values,
                                             const ScanShared<Hopper> &s, uint32_t slot, uint32_t row,
                                             Handoff *handoff) {
    constexpr uint32_t kPitch = ScanShared<Hopper>::kValues * 4;
    uint32_t lane = threadIdx.x % 32;
    const uint32_t *v = reinterpret_cast<const uint32_t *>(s.v[slot]) + row / 2 + Accumulator::row(lane, 0);
    const StateTerms &part = s.state_terms[slot];
    Accumulator d[kChunk / 8];
    float2 keys[kChunk / 8];
    uint32_t values[kChunk / 8][2];
#pragma unroll
    for (uint32_t c = 0; c < kHead / 16; ++c) before[c] = operand_a(state[2 * c], state[2 * c + 1]);
    multiply_tile<Hopper>(d, before, s.k[slot], [&] {
#pragma unroll
        for (uint32_t t = 0; t < kChunk / 8; ++t) {
            uint32_t token = 8 * t + Accumulator::column(lane, 0);
            keys[t] = *reinterpret_cast<const float2 *>(&part.keys[token]);
            values[t][0] = v[token * kPitch], values[t][1] = v[(token + 1) * kPitch];
        }
        if (Hopper) hand_over(handoff->state, before);
    });
    // The values, less what the state already gives for their keys.
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        float2 v0 = widen(values[t][0]), v1 = widen(values[t][1]);
        d[t][0] = v0.x - keys[t].x * d[t][0], d[t][1] = v1.x - keys[t].y * d[t][1];
        d[t][2] = v0.y - keys[t].x * d[t][2], d[t][3] = v1.y - keys[t].y * d[t][3];
    }
    NewValuesOperand a;
#pragma unroll
    for (uint32_t j = 0; j < kBands; ++j) a[j] = operand_a(d[2 * j], d[2 * j + 1]);
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
        new_values[j] = operand_a(d[2 * j], d[2 * j + 1]);
#pragma unroll
        for (uint32_t t = 2 * j; t < 2 * j + 2; ++t) {
            float2 scale = *reinterpret_cast<const float2 *>(&part.keys_to_end[8 * t + Accumulator::column(lane, 0)]);
            d[t][0] *= scale.x, d[t][1] *= scale.y, d[t][2] *= scale.x, d[t][3] *= scale.y;
        }
        a[j] = operand_a(d[2 * j], d[2 * j + 1]);
    }
    multiply_by_rows<Hopper>(state, a, s.k[slot], [&] {
        if (Hopper) hand_over(handoff->new_values, new_values);
    });
}

// The outputs of a chunk, 16 elements of v. `out`: at the warp's elements of the first token.
template <bool Hopper>
__device__ __forceinline__ void output(StateOperand &before, const NewValuesOperand &new_values, const Tile &q,
                                       const OutputTerms &part, float *out, size_t width, uint32_t tokens) {
    uint32_t lane = threadIdx.x % 32;
    Accumulator d[kChunk / 8];
    float2 queries[kChunk / 8];
    multiply_tile<Hopper>(d, before, q, [&] {
#pragma unroll
        for (uint32_t t = 0; t < kChunk / 8; ++t) {
            queries[t] = *reinterpret_cast<const float2 *>(&part.queries[8 * t + Accumulator::column(lane, 0)]);
        }
    });
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        d[t][0] *= queries[t].x, d[t][1] *= queries[t].y, d[t][2] *= queries[t].x, d[t][3] *= queries[t].y;
    }
    multiply_triangle(d, new_values, part.weights);
#pragma unroll
    for (uint32_t t = 0; t < kChunk / 8; ++t) {
        uint32_t token = 8 * t + Accumulator::column(lane, 0);
        float *to = out + token * width + 2 * Accumulator::row(lane, 0);
        if (token < tokens) *reinterpret_cast<float2 *>(to) = make_float2(d[t][0], d[t][2]);
        if (token + 1 < tokens) *reinterpret_cast<float2 *>(to + width) = make_float2(d[t][1], d[t][3]);
    }
}
