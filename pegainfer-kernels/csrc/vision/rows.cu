// The ops of a vision tower that go over rows: patches of pixels, learned positions, layer norm, what follows the sums
// of a GEMM, and rotary positions of two dimensions.
//
//   unfold_patches   out = 2 v - 255 for the bytes v of a patch, thrice
//   add_positions    x += sum over four corners of weight * table row
//   layer_norm       out = (x - mean) rsqrt(mean((x - mean)²) + eps) weight + bias
//   add_bias         out = x + bias; or out += x + bias; or out = gelu(x + bias), by tanh or by the error function
//   copy_rows        to[first + i] = from[start + i]
//   rotate_grid      low' = low cos - high sin, high' = high cos + low sin for queries and keys, angles by row and
//   column
// All GPUs, bf16 with f32 arithmetic and one rounding. Bound by memory. References: src/cpu/vision/.
#include "common/gelu.cuh"
#include "common/vec8.cuh"
#include "common/warp.cuh"
#include "abi/vision_rows.h"
#include "limits.h"

using namespace limits::vision;

// Grid: patches; a thread has eight neighbouring pixels of a colour.
extern "C" __global__ __launch_bounds__(kPatchValues / 8) void unfold_patches(
    const uint8_t *__restrict__ pixels,   // RGB bytes of all images
    const uint32_t *__restrict__ patches, // [n, 2]: first byte, bytes of a row of pixels
    bf16 *__restrict__ out,               // [n, 3, kPatchValues]: each a colour, a row, a column
    uint32_t bytes) {                     // of pixels; a patch outside stops the kernel
    start_after_predecessor();
    uint32_t first = patches[2 * blockIdx.x], stride = patches[2 * blockIdx.x + 1], i = 8 * threadIdx.x;
    uint32_t colour = i / (kPatch * kPatch), y = i / kPatch % kPatch, x = i % kPatch;
    size_t at = size_t(first) + size_t(y) * stride + 3 * x + colour;
    if (at + 21 >= bytes) __trap();
    Vec8 values;
#pragma unroll
    for (int j = 0; j < 8; ++j) values.x[j] = 2.f * float(pixels[at + 3 * j]) - 255.f;
    bf16 *to = out + size_t(blockIdx.x) * kCopies * kPatchValues + i;
#pragma unroll
    for (uint32_t copy = 0; copy < kCopies; ++copy)
        *reinterpret_cast<uint4 *>(to + copy * kPatchValues) = narrow8(values);
}

// Grid: rows of x, then enough blocks for a row; a thread has eight elements. A row outside the table stops the kernel.
extern "C" __global__ __launch_bounds__(kThreads) void add_positions(
    const bf16 *__restrict__ table,    // [positions, hidden]
    const uint32_t *__restrict__ rows, // [n, 4]
    const float *__restrict__ weights, // [n, 4]
    bf16 *__restrict__ x,              // [n, hidden]
    uint32_t positions, uint32_t hidden) {
    start_after_predecessor();
    uint32_t i = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= hidden) return;
    uint4 corners = reinterpret_cast<const uint4 *>(rows)[blockIdx.x];
    float4 by = reinterpret_cast<const float4 *>(weights)[blockIdx.x];
    if (max(max(corners.x, corners.y), max(corners.z, corners.w)) >= positions) __trap();
    bf16 *to = x + size_t(blockIdx.x) * hidden + i;
    Vec8 sum = widen8(load16(to));
    auto add = [&](uint32_t row, float weight) {
        Vec8 values = widen8(load16(table + size_t(row) * hidden + i));
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.x[j] = fmaf(values.x[j], weight, sum.x[j]);
    };
    add(corners.x, by.x), add(corners.y, by.y), add(corners.z, by.z), add(corners.w, by.w);
    *reinterpret_cast<uint4 *>(to) = narrow8(sum);
}

// Grid: rows; a row stays in registers.
extern "C" __global__ __launch_bounds__(kNormThreads) void layer_norm(
    const bf16 *__restrict__ x,       // [rows, hidden]
    const float *__restrict__ weight, // [hidden]
    const float *__restrict__ bias,   // [hidden]
    bf16 *__restrict__ out,           // [rows, hidden]
    uint32_t hidden, float eps) {
    __shared__ float sums[32], squares[32];
    start_after_predecessor();
    size_t first = size_t(blockIdx.x) * hidden;
    Vec8 row[kNormVectors];
    float sum = 0.f, square = 0.f;
#pragma unroll
    for (int p = 0; p < kNormVectors; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * blockDim.x);
        row[p] = i < hidden ? widen8(load16(x + first + i)) : Vec8{};
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += row[p].x[j];
    }
    float mean = block_sum(sum, sums) / float(hidden);
#pragma unroll
    for (int p = 0; p < kNormVectors; ++p) {
        if (8 * (threadIdx.x + p * blockDim.x) >= hidden) break;
#pragma unroll
        for (int j = 0; j < 8; ++j) row[p].x[j] -= mean, square = fmaf(row[p].x[j], row[p].x[j], square);
    }
    float scale = inverse_rms(block_sum(square, squares), hidden, eps);
#pragma unroll
    for (int p = 0; p < kNormVectors; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * blockDim.x);
        if (i >= hidden) break;
        Vec8 w = load8(weight + i), b = load8(bias + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) row[p].x[j] = fmaf(row[p].x[j] * scale, w.x[j], b.x[j]);
        *reinterpret_cast<uint4 *>(out + first + i) = narrow8(row[p]);
    }
}

template <bool Reads, typename After>
__device__ __forceinline__ void after_sums(const float *x, const float *bias, bf16 *out, uint32_t width, After after) {
    start_after_predecessor();
    uint32_t i = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= width) return;
    size_t at = size_t(blockIdx.x) * width + i;
    Vec8 sum = load8(x + at), b = load8(bias + i), before = Reads ? widen8(load16(out + at)) : Vec8{};
#pragma unroll
    for (int j = 0; j < 8; ++j) sum.x[j] = after(sum.x[j] + b.x[j], before.x[j]);
    *reinterpret_cast<uint4 *>(out + at) = narrow8(sum);
}

// Grid: rows, then enough blocks for a row; a thread has eight elements.
#define AFTER(NAME, READS, FUNCTION)                                                                                   \
    extern "C" __global__ __launch_bounds__(kThreads) void NAME(                                                       \
        const float *__restrict__ x,    /* [rows, width] */                                                            \
        const float *__restrict__ bias, /* [width] */                                                                  \
        bf16 *__restrict__ out,         /* [rows, width] */                                                            \
        uint32_t width) {                                                                                              \
        after_sums<READS>(x, bias, out, width, FUNCTION());                                                            \
    }
AFTER(add_bias, false, Store)
AFTER(add_bias_residual, true, AddTo)
AFTER(bias_gelu_tanh, false, GeluTanh)
AFTER(bias_gelu_erf, false, GeluErf)

// Grid: rows, then enough blocks for a row.
extern "C" __global__ __launch_bounds__(kThreads) void copy_rows(const bf16 *__restrict__ from, // [.., hidden]
                                                                 bf16 *__restrict__ to,         // [.., hidden]
                                                                 uint32_t start, uint32_t first, uint32_t hidden) {
    start_after_predecessor();
    uint32_t i = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= hidden) return;
    *reinterpret_cast<uint4 *>(to + size_t(first + blockIdx.x) * hidden + i) =
        load16(from + size_t(start + blockIdx.x) * hidden + i);
}

// Grid: rows, then enough blocks for the pairs of a row's queries and keys; a thread has two neighbouring elements and
// the two that they rotate with. A position outside the table stops the kernel.
extern "C" __global__ __launch_bounds__(kThreads) void rotate_grid(
    const float *__restrict__ table,        // [sides, half]: cosines, then sines, of half / 2 angles
    const uint32_t *__restrict__ positions, // [n, 2]: row and column
    bf16 *__restrict__ qkv,                 // [n, 3, heads, 2 * half]
    uint32_t heads, uint32_t half, uint32_t sides) {
    start_after_predecessor();
    uint32_t i = blockIdx.y * blockDim.x + threadIdx.x, head = i / (half / 2), d = i % (half / 2) * 2;
    if (head >= 2 * heads) return;
    uint32_t quarter = half / 2, axis = d / quarter, position = positions[2 * blockIdx.x + axis];
    if (position >= sides) __trap();
    const float *angles = table + size_t(position) * half + d % quarter;
    float2 cosine = {angles[0], angles[1]}, sine = {angles[quarter], angles[quarter + 1]};
    bf16 *at = qkv + (size_t(blockIdx.x) * 3 * heads + head) * 2 * half + d;
    uint32_t *to_low = reinterpret_cast<uint32_t *>(at), *to_high = reinterpret_cast<uint32_t *>(at + half);
    float2 low = widen(*to_low), high = widen(*to_high);
    *to_low = narrow(low.x * cosine.x - high.x * sine.x, low.y * cosine.y - high.y * sine.y);
    *to_high = narrow(high.x * cosine.x + low.x * sine.x, high.y * cosine.y + low.y * sine.y);
}
