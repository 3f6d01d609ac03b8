// Where a kernel writes an activation [rows, k]: bf16, or rounded to FP8 for the GEMM behind it, as csrc/gemm/fp8.cu
// rounds what is there in bf16. The same codes and scales, without a pass over memory.
#pragma once
#include "common/fp8_codes.cuh"
#include "common/warp.cuh"

struct ActivationOut {
    void *at;        // [rows, k] bf16, or codes [padded, k] and behind them f32 scales [k / 128, padded]
    uint32_t padded; // rows, in multiples of four; 0: bf16
    uint32_t k;      // rounded, a multiple of 128

    __device__ __forceinline__ bool rounds() const { return padded != 0; }
    __device__ __forceinline__ bf16 *values(uint32_t row, uint32_t column) const {
        return static_cast<bf16 *>(at) + size_t(row) * k + column;
    }
    __device__ __forceinline__ uint8_t *codes(uint32_t row, uint32_t column) const {
        return static_cast<uint8_t *>(at) + size_t(row) * k + column;
    }
    // The scale of the block that begins at `column`.
    __device__ __forceinline__ float *scale(uint32_t row, uint32_t column) const {
        return reinterpret_cast<float *>(static_cast<uint8_t *>(at) + size_t(padded) * k) +
               size_t(column / 128) * padded + row;
    }

    // Eight columns from `column` on, of which 16 neighbouring lanes have a block. All lanes of the warp take part;
    // those that are not `inside` write nothing.
    __device__ __forceinline__ void store8(uint32_t row, uint32_t column, uint4 v, bool inside = true) const {
        if (!rounds()) {
            if (inside) *reinterpret_cast<uint4 *>(values(row, column)) = v;
            return;
        }
        float by = amax_over_448(reduce_lanes(inside ? largest_bits(v) : 0, 16, MaxBits()));
        if (!inside) return;
        *reinterpret_cast<uint2 *>(codes(row, column)) = encode8(v, by);
        if (column % 128 == 0) *scale(row, column) = by;
    }

    // The same of four columns, of which the warp has a block.
    __device__ __forceinline__ void store4(uint32_t row, uint32_t column, uint2 v) const {
        if (!rounds()) {
            *reinterpret_cast<uint2 *>(values(row, column)) = v;
            return;
        }
        float by = amax_over_448(__reduce_max_sync(kAll, max(magnitude(v.x), magnitude(v.y))));
        *reinterpret_cast<uint32_t *>(codes(row, column)) = encode4(v, by);
        if (column % 128 == 0) *scale(row, column) = by;
    }

    // One column, of which 128 threads from a multiple of 128 on have a block; `shared` is theirs.
    __device__ __forceinline__ void store1(uint32_t row, uint32_t column, bf16 v, uint32_t (&shared)[4],
                                           uint32_t barrier) const {
        if (!rounds()) {
            *values(row, column) = v;
            return;
        }
        uint32_t largest = __reduce_max_sync(kAll, __bfloat16_as_ushort(v) & 0x7fffu);
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = largest;
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
        float by = amax_over_448(max(max(shared[0], shared[1]), max(shared[2], shared[3])));
        *codes(row, column) = uint8_t(encode2(Divisor(by).divide(__bfloat162float(v)), 0.f));
        if (column % 128 == 0) *scale(row, column) = by;
    }
};
