// FP8 (e4m3) with f32 scales: what rounds weights and activations to it, and what widens weights again.
//
//   scale = largest magnitude of the block / 448, or 1 if that is 0;  code = e4m3(x / scale), nearest, ties to even
//
// Weights have a scale for each 128 x 128 values, activations for each 128 columns of a row. All GPUs, bound by memory.
// Reference: src/cpu/weights.rs.
#include "common/fp8_codes.cuh"
#include "common/weight_codes.cuh"
#include "common/warp.cuh"
#include "abi/gemm_fp8.h"
#include "limits.h"

using namespace limits::fp8;

constexpr uint32_t kColumns = 4 * 32; // of a block: a warp has four of a row in each lane
static_assert(kColumns == kBlock);

// Four values of a row from `column` on, zeros behind its end; columns come in multiples of four.
__device__ __forceinline__ uint2 load_quad(const bf16 *row, uint32_t column, uint32_t k) {
    return column < k ? *reinterpret_cast<const uint2 *>(row + column) : make_uint2(0, 0);
}

// Grid: blocks of columns, blocks of rows; kWeightThreads threads.
extern "C" __global__ __launch_bounds__(kWeightThreads) void quantize_weights(
    const bf16 *w,  // [n, k]
    uint8_t *codes, // [n, k]
    float *scales,  // [n / 128, k / 128], rounded up
    uint32_t n, uint32_t k) {
    __shared__ uint32_t most[kWeightThreads / 32];
    constexpr uint32_t kWarps = kWeightThreads / 32, kEach = kBlock / kWarps; // rows of a warp
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * kBlock + 4 * lane;
    uint32_t first = blockIdx.y * kBlock + warp;
    uint2 x[kEach];
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        uint32_t row = first + i * kWarps;
        x[i] = row < n ? load_quad(w + size_t(row) * k, column, k) : make_uint2(0, 0);
        amax = max(amax, max(magnitude(x[i].x), magnitude(x[i].y)));
    }
    amax = __reduce_max_sync(kAll, amax);
    if (lane == 0) most[warp] = amax;
    __syncthreads();
    for (uint32_t i = 0; i < kWarps; ++i) amax = max(amax, most[i]);
    float scale = amax_over_448(amax);
    if (threadIdx.x == 0) scales[size_t(blockIdx.y) * gridDim.x + blockIdx.x] = scale;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
        uint32_t row = first + i * kWarps;
        if (row < n && column < k)
            *reinterpret_cast<uint32_t *>(codes + size_t(row) * k + column) = encode4(x[i], scale);
    }
}

// A warp has a row of a group of `Blocks` blocks of columns, half a warp a block; rows behind the m-th become zeros.
template <uint32_t Blocks>
__device__ void round_rows(const bf16 *x, uint8_t *codes, float *scales, uint32_t first, uint32_t m, uint32_t padded,
                           uint32_t k) {
    constexpr uint32_t kLanes = kBlock / kVector;
    uint32_t lane = threadIdx.x % 32, row = blockIdx.x * (kActivationThreads / 32) + threadIdx.x / 32;
    start_after_predecessor();
    if (row >= padded) return;
    const bf16 *from = x + size_t(first + row) * k;
    uint8_t *to = codes + size_t(row) * k;
    uint32_t group = blockIdx.y * Blocks + lane / kLanes;
#pragma unroll
    for (uint32_t i = 0; i < Blocks; i += 32 / kLanes) {
        uint32_t b = group + i, column = b * kBlock + lane % kLanes * kVector;
        bool inside = b < k / kBlock;
        uint4 v = inside && row < m ? load16(from + column) : make_uint4(0, 0, 0, 0);
        uint32_t largest = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
        float scale = amax_over_448(reduce_lanes(largest, kLanes, [](uint32_t a, uint32_t b) { return max(a, b); }));
        if (!inside) continue;
        Divisor divisor(scale);
        uint2 eight = make_uint2(divisor.encode4(make_uint2(v.x, v.y)), divisor.encode4(make_uint2(v.z, v.w)));
        *reinterpret_cast<uint2 *>(to + column) = eight;
        if (lane % kLanes == 0) scales[size_t(b) * padded + row] = scale;
    }
}

// Grid: tiles of kActivationThreads / 32 of the padded rows, groups of BLOCKS blocks of columns: few for few rows,
// whose latency counts.
#define QUANTIZE_ACTIVATIONS(BLOCKS)                                                                                   \
    extern "C" __global__ __launch_bounds__(kActivationThreads) void quantize_activations_##BLOCKS(                    \
        const bf16 *x,  /* [first + m, k], k a multiple of 128; rows from `first` on */                                \
        uint8_t *codes, /* [padded, k] */                                                                              \
        float *scales,  /* [k / 128, padded] */                                                                        \
        uint32_t first, uint32_t m, uint32_t padded, uint32_t k) {                                                     \
        round_rows<BLOCKS>(x, codes, scales, first, m, padded, k);                                                     \
    }
QUANTIZE_ACTIVATIONS(2)
QUANTIZE_ACTIVATIONS(8)

// Grid: elements / 16 over threads of a block. out = bf16(code * scale), rows of w from `first` on.
extern "C" __global__ __launch_bounds__(kWidenThreads) void widen_weights(
    const uint8_t *codes, // [n, k], k a multiple of 16
    const float *scales,  // [n / 128, k / 128], rounded up
    bf16 *out,            // [rows, k]
    uint32_t first, uint32_t rows, uint32_t k) {
    size_t i = size_t(blockIdx.x) * kWidenThreads + threadIdx.x;
    if (i >= size_t(rows) * k / 16) return;
    uint32_t row = i / (k / 16), column = (i - size_t(row) * (k / 16)) * 16;
    uint4 from = load16(reinterpret_cast<const bf16 *>(codes + size_t(first + row) * k + column)), wide[2];
    Codes<Format::kFp8>::widen(from, 127, wide);
    float scale = scales[size_t((first + row) / kBlock) * ((k + kBlock - 1) / kBlock) + column / kBlock];
    auto times = [&](uint32_t pair) {
        float2 v = widen(pair);
        return narrow(v.x * scale, v.y * scale);
    };
    uint4 *to = reinterpret_cast<uint4 *>(out + size_t(row) * k + column);
#pragma unroll
    for (int j = 0; j < 2; ++j)
        to[j] = make_uint4(times(wide[j].x), times(wide[j].y), times(wide[j].z), times(wide[j].w));
}
