// SwiGLU: out = bf16(silu(gate)) * up, one vector a thread (csrc/common/math.cuh: rounding); bf16, or rounded to FP8.
//
// All GPUs, after a GEMM whose kernel does not fuse it. Bound by memory. Reference: src/cpu/swiglu.rs.
#include "common/activation.cuh"
#include "common/math.cuh"
#include "abi/rows_swiglu.h"

extern "C" __global__ void swiglu(const bf16 *__restrict__ gate_up, // [rows, 2 * width]
                                  void *out,                        // [rows, width], csrc/common/activation.cuh
                                  uint32_t padded, uint32_t width) {
    start_after_predecessor();
    uint32_t i = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    bool inside = i < width; // lanes that are not stay: a warp rounds together
    i = inside ? i : 0;
    const bf16 *row = gate_up + size_t(blockIdx.x) * 2 * width;
    uint4 gate = load16(row + i), up = load16(row + width + i);
    uint32_t *g = reinterpret_cast<uint32_t *>(&gate), *u = reinterpret_cast<uint32_t *>(&up);
#pragma unroll
    for (int j = 0; j < 4; ++j) g[j] = silu_times2(g[j], u[j]);
    ActivationOut{out, padded, width}.store8(blockIdx.x, i, gate, inside);
}
