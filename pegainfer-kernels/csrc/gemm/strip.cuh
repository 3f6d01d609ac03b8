// Results of 16 rows of w (gated: 8 of the gate and 8 of up) that a warp has multiplied by mma.sync with up to 8 TILES
// rows of x: gemm/gemv_int4.cu and skinny_int4_mma.cu.
#pragma once
#include "common/frag.cuh"
#include "common/math.cuh"

// Writes rows `row` to before `end` of w to columns of `out`, [m, pitch].
template <bool Gated, int TILES, typename T>
__device__ __forceinline__ void write_strip(const Accumulator (&acc)[TILES], uint32_t m, uint32_t pitch, uint32_t row,
                                            uint32_t end, T *out) {
    uint32_t lane = threadIdx.x % 32, at = row + Accumulator::row(lane, 0);
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t token = 8 * t + Accumulator::column(lane, i);
            if (token >= m) continue;
            T *to = out + size_t(token) * pitch + at;
            if (Gated) {
                if (at < end) put(to, silu_times(round_bf16(acc[t][i]), round_bf16(acc[t][2 + i])));
            } else {
                if (at < end) put(to, acc[t][i]);
                if (at + 8 < end) put(to + 8, acc[t][2 + i]);
            }
        }
}
