// The KV cache in FP8: rows rounded to e4m3 codes under a scale, and codes widened to bf16.
//
//   scale = amax / 448 (1 where that is 0);  code = e4m3(x / scale), to nearest even;  x' = code * scale
// A row is the key (after norm and rotation) or the value of one token and KV head, in bf16. Bit for bit as the
// reference, src/cpu/kv_cache.rs, but for the codes of rows that are not finite: their scale is not finite either.
#pragma once
#include "common/fp8_codes.cuh"
#include "attention/kv_cache.cuh"
#include "common/warp.cuh"

// ---- What the kernels do with a cache of either format

// The scale of a row that `lanes` neighbours share, of which this lane has 8 elements, or 16 in two vectors; all lanes
// of the warp take part. A cache in bf16 has none.
template <typename T> __device__ __forceinline__ float row_scale(uint4 a, uint4 b, bool inside, uint32_t lanes) {
    if constexpr (sizeof(T) != sizeof(fp8)) return 1.f;
    uint32_t largest = inside ? max(largest_bits(a), largest_bits(b)) : 0;
    return amax_over_448(reduce_lanes(largest, lanes, MaxBits()));
}

// Writes elements 8 vector to 8 vector + 7 of a token to its slab; the one of the row's first vector writes the scale.
__device__ __forceinline__ void store_row(bf16 *slab, uint32_t, uint32_t token, uint32_t vector, uint4 x, float) {
    *reinterpret_cast<uint4 *>(slab + cache_vector(token, vector)) = x;
}
__device__ __forceinline__ void store_row(fp8 *slab, uint32_t head_dim, uint32_t token, uint32_t vector, uint4 x,
                                          float scale) {
    *reinterpret_cast<uint2 *>(slab + cache_codes(token, vector / 2) + vector % 2 * 8) = encode8(x, scale);
    if (vector == 0) cache_scales(slab, head_dim)[token] = scale;
}

// Elements 8 vector to 8 vector + 7 of a token, without its scale.
__device__ __forceinline__ uint4 load_row(const bf16 *slab, uint32_t token, uint32_t vector) {
    return load16(slab + cache_vector(token, vector));
}
__device__ __forceinline__ uint4 load_row(const fp8 *slab, uint32_t token, uint32_t vector) {
    const fp8 *at = slab + cache_codes(token, vector / 2) + vector % 2 * 8;
    return widen8_codes(*reinterpret_cast<const uint2 *>(at));
}

// The scales of four tokens from `token` on, a multiple of four.
__device__ __forceinline__ float4 load_scales(const bf16 *, uint32_t, uint32_t) {
    return make_float4(1.f, 1.f, 1.f, 1.f);
}
__device__ __forceinline__ float4 load_scales(const fp8 *slab, uint32_t head_dim, uint32_t token) {
    return *reinterpret_cast<const float4 *>(cache_scales(slab, head_dim) + token);
}
