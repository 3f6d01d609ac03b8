// RMS norm, alone and fused with the residual add before it. One block a row; the row stays in registers.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kPieces = 8; // of 8 elements a thread: rows up to 16,384 wide

template <bool ADD>
__device__ void norm(const bf16 *__restrict__ x,      // [rows, hidden]
                     bf16 *__restrict__ residual,     // [rows, hidden], with ADD
                     const bf16 *__restrict__ weight, // [hidden]
                     bf16 *__restrict__ out,          // [rows, hidden]
                     uint32_t hidden, float eps) {
    __shared__ float parts[32];
    size_t first = size_t(blockIdx.x) * hidden;
    uint4 row[kPieces];
    float squares = 0.f;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * kThreads);
        if (i >= hidden) break;
        row[p] = load16(x + first + i);
        uint32_t *v = reinterpret_cast<uint32_t *>(&row[p]);
        if (ADD) {
            uint4 r = load16(residual + first + i);
            const uint32_t *rv = reinterpret_cast<const uint32_t *>(&r);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 a = widen(v[j]), b = widen(rv[j]);
                v[j] = narrow(a.x + b.x, a.y + b.y);
            }
            *reinterpret_cast<uint4 *>(residual + first + i) = row[p];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 a = widen(v[j]);
            squares += a.x * a.x + a.y * a.y;
        }
    }
    float scale = 1.f / sqrtf(block_sum(squares, parts) / float(hidden) + eps);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
        uint32_t i = 8 * (threadIdx.x + p * kThreads);
        if (i >= hidden) break;
        uint4 w = load16(weight + i);
        uint32_t *v = reinterpret_cast<uint32_t *>(&row[p]), *wv = reinterpret_cast<uint32_t *>(&w);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 a = widen(v[j]), b = widen(wv[j]);
            v[j] = narrow(round_bf16(a.x * scale) * b.x, round_bf16(a.y * scale) * b.y);
        }
        *reinterpret_cast<uint4 *>(out + first + i) = row[p];
    }
}

extern "C" __global__ __launch_bounds__(kThreads) void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out,
                                                                uint32_t hidden, float eps) {
    norm<false>(x, nullptr, weight, out, hidden, eps);
}

extern "C" __global__ __launch_bounds__(kThreads) void add_rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight,
                                                                    bf16 *out, uint32_t hidden, float eps) {
    norm<true>(x, residual, weight, out, hidden, eps);
}
