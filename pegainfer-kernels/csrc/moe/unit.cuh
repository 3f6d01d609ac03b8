// A warp's sums of 16 rows of weights and up to 8 tokens: swap-AB mma.sync with weights straight from memory to
// registers (moe/gemv.cu, moe/route.cu).
#pragma once
#include "moe/experts.cuh"

namespace moe {
using limits::moe_gemv::kUnits;

// 16 rows x 128 columns of weights: the vectors of 16 bytes of a lane's two rows.
template <Format F> struct Unit {
    static constexpr uint32_t kValues = Codes<F>::kValues, kStep = 4 * kValues, kSteps = kBlock / kStep;
    uint4 upper[kSteps], lower[kSteps];
    uint4 x[kSteps][Codes<F>::kVectors]; // of the lane's token
    float2 scale;                        // of the upper row and of the lower one

    // First of the columns that a lane has in a step of unit `unit`.
    static __device__ __forceinline__ uint32_t column(uint32_t unit, uint32_t step) {
        return unit * kBlock + step * kStep + threadIdx.x % 4 * kValues;
    }

    __device__ __forceinline__ void load(const void *w, const float *scales, const Rows &rows, uint32_t k,
                                         uint32_t unit) {
        const uint8_t *codes = static_cast<const uint8_t *>(w);
        auto vector = [&](uint32_t row, uint32_t at, bool is_there) {
            if (!is_there || at >= k) return make_uint4(0, 0, 0, 0);
            return stream16(reinterpret_cast<const bf16 *>(codes + (size_t(row) * k + at) * 16 / kValues));
        };
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s) {
            upper[s] = vector(rows.upper, column(unit, s), rows.has_upper);
            lower[s] = vector(rows.lower, column(unit, s), rows.has_lower);
        }
        scale = scales_of<F>(scales, rows, unit, (k + kBlock - 1) / kBlock);
    }

    // `from`: the row of the lane's token; null if there is none.
    __device__ __forceinline__ void load_x(const bf16 *from, uint32_t k, uint32_t unit) {
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s)
#pragma unroll
            for (uint32_t j = 0; j < Codes<F>::kVectors; ++j) {
                const uint32_t at = column(unit, s) + j * kVector;
                x[s][j] = from && at < k ? load16(from + at) : make_uint4(0, 0, 0, 0);
            }
    }

    __device__ __forceinline__ Accumulator sums() const {
        Accumulator sums = {};
#pragma unroll
        for (uint32_t s = 0; s < kSteps; ++s) {
            uint4 high[Codes<F>::kVectors], low[Codes<F>::kVectors];
            Codes<F>::widen(upper[s], kUnscaled, high);
            Codes<F>::widen(lower[s], kUnscaled, low);
#pragma unroll
            for (uint32_t j = 0; j < Codes<F>::kVectors; ++j) mma32(sums, high[j], low[j], x[s][j]);
        }
        return sums;
    }
};

// A warp's sums of 16 rows of w and up to 8 tokens, over units `first`, `first + stride`, ... of 128 columns. `x()` is
// called when the first weights are under way, and points to the row of token lane / 4, or is null if there is none.
template <Format F, typename X>
__device__ __forceinline__ Accumulator sums_of_warp(const void *w, const float *scales, const Rows &rows, uint32_t k,
                                                    uint32_t first, uint32_t stride, X x) {
    const uint32_t units = (k + kBlock - 1) / kBlock;
    Accumulator total = {};
    const bf16 *row = nullptr;
    for (uint32_t unit = first; unit == first || unit < units; unit += kUnits * stride) {
        Unit<F> parts[kUnits];
#pragma unroll
        for (uint32_t i = 0; i < kUnits; ++i) parts[i].load(w, scales, rows, k, unit + i * stride);
        if (unit == first) row = x();
#pragma unroll
        for (uint32_t i = 0; i < kUnits; ++i) parts[i].load_x(row, k, unit + i * stride);
#pragma unroll
        for (uint32_t i = 0; i < kUnits; ++i) add_scaled(total, parts[i].sums(), parts[i].scale);
    }
    return total;
}
} // namespace moe
