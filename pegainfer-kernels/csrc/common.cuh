// What the kernels share: bf16 in 16-byte pieces, reductions, tensor-core products.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

constexpr uint32_t kBlock = 16;           // tokens of a KV block
constexpr uint32_t kNoSlot = 0xffffffffu; // of a token whose key and value are not written to the cache
constexpr uint32_t kAll = 0xffffffffu;

// The paged cache of one layer: K and V are [blocks, kv_heads, D / 64, 16, 64]. In each row of 64 dimensions, 128 bytes,
// the 16-byte piece p of token t lies at piece p ^ t % 8. So a plain copy of 2 KB gives the 128-byte swizzle that wgmma
// wants in shared memory, and that ldmatrix reads without bank conflicts.

// First element of dimensions 8 piece ... of a token of the block, relative to the slab of its block and KV head.
__device__ __forceinline__ uint32_t cache_piece(uint32_t token, uint32_t piece) {
    return ((piece / 8 * kBlock + token) * 8 + (piece % 8 ^ token % 8)) * 8;
}

// Programmatic dependent launch. A kernel of a step first lets the next one start: its blocks become resident as soon
// as there is room, and can fetch weights. Before a kernel touches anything that another kernel of the step writes or
// reads, it waits until the ones before it are complete. (Decode attention beside prefill: see csrc/decode.cuh.)
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Two bf16 of one register, widened: bf16 is the upper half of f32.
__device__ __forceinline__ float2 widen(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Two f32 to two bf16, round to nearest even, the first in the lower half.
__device__ __forceinline__ uint32_t narrow(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t &>(pair);
}

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ uint4 load16(const bf16 *at) { return *reinterpret_cast<const uint4 *>(at); }

// Read once: weights. It leaves the L1 to what is read again.
__device__ __forceinline__ uint4 stream16(const bf16 *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
    return x;
}

// The sum over a block of whole warps, at most 32; every thread gets it. `parts`: [32] shared.
__device__ __forceinline__ float block_sum(float x, float *parts) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.f;
    return warp_sum(x);
}

// Eight elements of the residual stream plus those of the slices of a product, `stride` apart. The product is rounded
// once, then the sum.
__device__ __forceinline__ uint4 add_slices(uint4 residual, const float *slices, uint32_t count, size_t stride) {
    float sum[8] = {};
#pragma unroll 4
    for (uint32_t s = 0; s < count; ++s) {
        float4 a = reinterpret_cast<const float4 *>(slices + s * stride)[0];
        float4 b = reinterpret_cast<const float4 *>(slices + s * stride)[1];
        sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w;
        sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
    }
    uint32_t *v = reinterpret_cast<uint32_t *>(&residual);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 r = widen(v[j]), d = widen(narrow(sum[2 * j], sum[2 * j + 1]));
        v[j] = narrow(r.x + d.x, r.y + d.y);
    }
    return residual;
}

__device__ __forceinline__ float sum_squares(uint4 row) {
    const uint32_t *v = reinterpret_cast<const uint32_t *>(&row);
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]);
        squares += a.x * a.x + a.y * a.y;
    }
    return squares;
}

// Eight elements of a norm: scaled, rounded, and multiplied by the weight.
__device__ __forceinline__ uint4 scaled(uint4 row, float scale, uint4 weight) {
    uint32_t *v = reinterpret_cast<uint32_t *>(&row), *w = reinterpret_cast<uint32_t *>(&weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]), b = widen(w[j]);
        v[j] = narrow(round_bf16(a.x * scale) * b.x, round_bf16(a.y * scale) * b.y);
    }
    return row;
}

// d[16, 8] += a[16, 16] b[16, 8] for one warp. With group = lane / 4 and quad = lane % 4: a0, a1 hold rows group and
// group + 8 at columns 2 quad and 2 quad + 1, a2, a3 the same at columns 8 further; b0, b1 hold column group at rows
// 2 quad, 2 quad + 1 and 8 further; d0, d1 hold row group at columns 2 quad, 2 quad + 1, d2, d3 row group + 8.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 32 columns of the sum at once, from 16-byte loads: each lane holds 8 neighbouring columns of its rows. The columns
// enter in another order than the instruction's, the same for a and b, which the sum over them does not see.
__device__ __forceinline__ void mma32(float (&d)[4], uint4 low, uint4 high, uint4 b) {
    mma(d, low.x, high.x, low.y, high.y, b.x, b.y);
    mma(d, low.z, high.z, low.w, high.w, b.z, b.w);
}
