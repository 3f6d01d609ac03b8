// A plain read of memory: the bandwidth that a step which streams its weights cannot beat, for the benchmarks.
#include "common/base.cuh"
#include "abi/rows_read.h"
#include "limits.h"

using namespace limits::read;

extern "C" __global__ __launch_bounds__(kThreads) void read_all(
    const bf16 *__restrict__ data, // [8 * vectors]
    bf16 *__restrict__ out,        // [1], practically never written
    uint32_t vectors) {
    uint32_t sum = 0;
    const uint32_t stride = gridDim.x * blockDim.x;
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < vectors && i + 3 * stride > i; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) v[u] = stream16(data + 8 * size_t(i + u * stride));
#pragma unroll
        for (int u = 0; u < 4; ++u) sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < vectors; i += stride) {
        uint4 v = stream16(data + 8 * size_t(i));
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x5eed5eedu) *out = __float2bfloat16_rn(1.f);
}
