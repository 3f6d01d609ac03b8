// QK norm, rotary embedding and KV cache write, from the fused QKV projection: one block a token, all GPUs.
//
//   q, k = rope(bf16(bf16(x / rms(x)) * weight)) for each head; v as it is; csrc/common/norm_rope.cuh: rounding
// Runs where csrc/attention/decode_bulk.cu does not fuse it: prefill. Bound by memory. Reference: src/cpu/qkv.rs.
// rope_write_kv is the same for models without QK norm.
//
// A lane has the 8 elements of vector l of its head's lower half and the 8 that they rotate with, D / 2 further; the
// next power of two from D / 16 lanes share a head. So every access to memory is a vector, and the angles, which are
// the same for all heads of a token, are loaded once.
#include "attention/fp8_kv.cuh"
#include "common/norm_rope.cuh"
#include "common/vec8.cuh"
#include "abi/attention_qkv.h"
#include "limits.h"

using namespace limits::qkv;

// Normalises a head of D elements, of which `lanes` neighbours have a part each, if the model has QK norm, and rotates
// it.
template <bool kNorm>
__device__ __forceinline__ void norm_rope(uint4 &low, uint4 &high, bool inside, uint32_t lanes, uint32_t head_dim,
                                          float eps, uint4 low_weight, uint4 high_weight, const Vec8 &cosine,
                                          const Vec8 &sine) {
    Vec8 a, b;
    if constexpr (kNorm) {
        float squares = reduce_lanes(inside ? sum_squares(low) + sum_squares(high) : 0.f, lanes, Add());
        float scale = inverse_rms(squares, head_dim, eps);
        a = widen8(scaled(low, scale, low_weight)), b = widen8(scaled(high, scale, high_weight));
    } else {
        a = widen8(low), b = widen8(high);
    }
    Vec8 first, second;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 rotated = rotate(a.x[j], b.x[j], cosine.x[j], sine.x[j]);
        first.x[j] = rotated.x, second.x[j] = rotated.y;
    }
    low = narrow8(first), high = narrow8(second);
}

// A bad slot or position stops the kernel.
template <bool kNorm, typename T>
__device__ __forceinline__ void rotate_write_kv(
    const bf16 *__restrict__ qkv,           // [tokens, (heads + 2 kv_heads) * head_dim]
    const bf16 *__restrict__ q_norm,        // [head_dim]; not read without kNorm
    const bf16 *__restrict__ k_norm,        // [head_dim]; not read without kNorm
    const float *__restrict__ rope,         // [positions, head_dim]: cosines, then sines
    const uint32_t *__restrict__ positions, // [tokens]
    const uint32_t *__restrict__ slots,     // [tokens]
    bf16 *__restrict__ q,                   // [tokens, heads * head_dim]
    T *__restrict__ k, T *__restrict__ v,   // csrc/attention/kv_cache.cuh
    uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t max_position, uint32_t max_slot, float eps,
    uint32_t lanes) {
    start_after_predecessor();
    uint32_t token = blockIdx.x, all = heads + 2 * kv_heads, half = head_dim / 2, high_vector = half / 8;
    uint32_t position = positions[token], slot = slots[token];
    if (position >= max_position || (slot >= max_slot && slot != kNoSlot)) __trap();
    uint32_t lane = threadIdx.x % lanes, d = 8 * lane;
    bool inside = d < half;
    if (!inside) d = 0;
    const float *angles = rope + size_t(position) * head_dim + d;
    Vec8 cosine = load8(angles), sine = load8(angles + half);
    size_t block = slot / kBlock;
    uint32_t offset = slot % kBlock;
    // All lanes of a warp stay to the end: they add their squares.
#pragma unroll 2
    for (uint32_t first = 0; first < all; first += blockDim.x / lanes) {
        uint32_t head = first + threadIdx.x / lanes;
        bool there = inside && head < all, query = head < heads, key = !query && head < heads + kv_heads;
        const bf16 *x = qkv + (size_t(token) * all + min(head, all - 1)) * head_dim + d;
        const bf16 *weight = (query ? q_norm : k_norm) + d;
        uint4 low = load16(x), high = load16(x + half), low_weight = {}, high_weight = {};
        if constexpr (kNorm) low_weight = load16(weight), high_weight = load16(weight + half);
        uint4 low_value = low, high_value = high;
        norm_rope<kNorm>(low, high, inside, lanes, head_dim, eps, low_weight, high_weight, cosine, sine);
        uint4 low_row = key ? low : low_value, high_row = key ? high : high_value; // of the cache
        float scale = row_scale<T>(low_row, high_row, inside, lanes);
        if (!there || (!query && slot == kNoSlot)) continue;
        if (query) {
            bf16 *to = q + (size_t(token) * heads + head) * head_dim + d;
            *reinterpret_cast<uint4 *>(to) = low;
            *reinterpret_cast<uint4 *>(to + half) = high;
            continue;
        }
        uint32_t kv_head = head - heads - (key ? 0 : kv_heads), vector = d / 8;
        T *to = (key ? k : v) + (block * kv_heads + kv_head) * slab_size<T>(head_dim);
        store_row(to, head_dim, offset, vector, low_row, scale);
        store_row(to, head_dim, offset, vector + high_vector, high_row, scale);
    }
}

#define WRITE_KV(SUFFIX, T)                                                                                            \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void qk_norm_rope_write_kv##SUFFIX(                           \
        const bf16 *__restrict__ qkv, const bf16 *__restrict__ q_norm, const bf16 *__restrict__ k_norm,                \
        const float *__restrict__ rope, const uint32_t *__restrict__ positions, const uint32_t *__restrict__ slots,    \
        bf16 *__restrict__ q, T *__restrict__ k, T *__restrict__ v, uint32_t heads, uint32_t kv_heads,                 \
        uint32_t head_dim, uint32_t max_position, uint32_t max_slot, float eps, uint32_t lanes) {                      \
        rotate_write_kv<true>(qkv, q_norm, k_norm, rope, positions, slots, q, k, v, heads, kv_heads, head_dim,         \
                              max_position, max_slot, eps, lanes);                                                     \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void rope_write_kv##SUFFIX(                                   \
        const bf16 *__restrict__ qkv, const float *__restrict__ rope, const uint32_t *__restrict__ positions,          \
        const uint32_t *__restrict__ slots, bf16 *__restrict__ q, T *__restrict__ k, T *__restrict__ v,                \
        uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t max_position, uint32_t max_slot,                \
        uint32_t lanes) {                                                                                              \
        rotate_write_kv<false>(qkv, qkv, qkv, rope, positions, slots, q, k, v, heads, kv_heads, head_dim,              \
                               max_position, max_slot, 0.f, lanes);                                                    \
    }
WRITE_KV(, bf16)
WRITE_KV(_fp8, fp8)
