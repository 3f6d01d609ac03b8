// The gated RMS norm at the end of a gated delta rule layer: out = x / rms(x) * weight * silu(z), rounded once to bf16,
// for each head of 128, and to FP8 for the GEMM behind it.
//
// All GPUs; csrc/delta_rule/decode.cu fuses it for sequences of one token. Sixteen lanes a head, eight elements each.
// Bound by memory: 6.3 us for 1k tokens, 123 for 16k on an H200 (docs/benchmarks/h200-qwen35-4b.md). Reference:
// src/cpu/gated_norm.rs.
#include "common/activation.cuh"
#include "delta_rule/recurrent.cuh"
#include "abi/delta_rule_gated_norm.h"

constexpr uint32_t kHead = kDim;
constexpr uint32_t kHeadLanes = kHead / 8;

__device__ __forceinline__ float gated(float x, float weight, float z) { return x * weight * silu(z); }

extern "C" __global__ __launch_bounds__(kNormThreads) void gated_rms_norm(
    const float *x,                   // [tokens, heads * 128]
    const bf16 *projected,            // [tokens, width]: z begins at column `gate`
    const float *__restrict__ weight, // [128]
    void *out,                        // [tokens, heads * 128], csrc/common/activation.cuh
    uint32_t padded, uint32_t tokens, uint32_t heads,
    uint32_t group, // neighbouring heads that `out` separates; 1: the heads stay in order
    uint32_t gate, uint32_t width, float eps) {
    release_successor();
    uint32_t unit = blockIdx.x * (blockDim.x / kHeadLanes) + threadIdx.x / kHeadLanes,
             d = 8 * (threadIdx.x % kHeadLanes);
    // All lanes of a warp stay to the end: they add their squares.
    bool inside = unit < tokens * heads;
    uint32_t token = inside ? unit / heads : 0, head = inside ? unit % heads : 0;
    const float4 *w = reinterpret_cast<const float4 *>(weight + d);
    float4 scale[2] = {w[0], w[1]};
    wait_for_predecessor();
    x = written(x), projected = written(projected);
    size_t at = (size_t(token) * heads + head) * kHead + d;
    const float4 *from = reinterpret_cast<const float4 *>(x + at);
    float4 a = from[0], b = from[1];
    uint4 z = load16(projected + size_t(token) * width + gate + head * kHead + d);
    float squares = a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w + b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w;
    squares = reduce_lanes(squares, kHeadLanes, Add());
    float r = inverse_rms(squares, kHead, eps);
    float2 z0 = widen(z.x), z1 = widen(z.y), z2 = widen(z.z), z3 = widen(z.w);
    uint4 result = {narrow(gated(r * a.x, scale[0].x, z0.x), gated(r * a.y, scale[0].y, z0.y)),
                    narrow(gated(r * a.z, scale[0].z, z1.x), gated(r * a.w, scale[0].w, z1.y)),
                    narrow(gated(r * b.x, scale[1].x, z2.x), gated(r * b.y, scale[1].y, z2.y)),
                    narrow(gated(r * b.z, scale[1].z, z3.x), gated(r * b.w, scale[1].w, z3.y))};
    uint32_t column = output_head(head, heads, group) * kHead + d;
    ActivationOut{out, padded, heads * kHead}.store8(token, column, result, inside);
}
