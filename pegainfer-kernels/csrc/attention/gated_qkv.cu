// Two ops around attention with output gates, where csrc/attention/decode_gated.cu does not fuse them: all GPUs, any
// number of tokens.
//
// gated_qk_norm_rope_write_kv: QK norm, partial rotary embedding (csrc/attention/gated_head.cuh: formula) and the write
// to the cache; one block a token. attention_gate: attended *= sigmoid(gate). All accesses are vectors; bound by
// memory. Reference: src/cpu/gated_qkv.rs, src/cpu/gate.rs.
#include "attention/fp8_kv.cuh"
#include "attention/gated_head.cuh"
#include "abi/attention_gated_qkv.h"
#include "limits.h"

using namespace limits::gated_qkv;

// `lanes` of a head: the next power of two from head_dim / 8. A bad slot or position stops the kernel. Grid: three
// positions of a token.
template <bool Grid, typename T>
__device__ __forceinline__ void rotate_write_kv(
    const bf16 *__restrict__ projected,     // [tokens, (2 heads + 2 kv_heads) * head_dim]
    const float *__restrict__ q_norm,       // [head_dim]
    const float *__restrict__ k_norm,       // [head_dim]
    const float *__restrict__ rope,         // [positions, rotary]: cosines, then sines
    const uint32_t *__restrict__ positions, // [tokens], or [tokens, 3]: time, row, column
    const uint32_t *__restrict__ slots,     // [tokens]
    bf16 *__restrict__ q,                   // [tokens, heads * head_dim]
    T *__restrict__ k, T *__restrict__ v,   // csrc/attention/kv_cache.cuh
    uint32_t heads, uint32_t kv_heads, uint32_t head_dim, uint32_t rotary, uint32_t max_position, uint32_t max_slot,
    float eps, uint32_t lanes) {
    start_after_predecessor();
    uint32_t token = blockIdx.x, all = heads + 2 * kv_heads, slot = slots[token];
    uint32_t lane = threadIdx.x % lanes, at_once = blockDim.x / lanes, other = rotates_with(lane, rotary);
    bool inside = 8 * lane < head_dim;
    uint32_t vector = inside ? lane : 0;
    const bf16 *row = projected + size_t(token) * (2 * heads + 2 * kv_heads) * head_dim + 8 * vector;
    Factors by_q, by_k;
    // All lanes of a warp stay to the end: they add their squares.
    for (uint32_t first = 0; first < all; first += kPasses * at_once) {
        uint32_t head = first + threadIdx.x / lanes;
        uint4 x[kPasses];
#pragma unroll
        for (uint32_t i = 0; i < kPasses; ++i) {
            uint32_t from = min(head + i * at_once, all - 1);
            x[i] = load16(row + size_t(from < heads ? 2 * from : heads + from) * head_dim);
            if (!inside) x[i] = make_uint4(0, 0, 0, 0);
        }
        if (first == 0) { // behind the first loads
            if (slot >= max_slot && slot != kNoSlot) __trap();
            auto angles_at = [&](uint32_t i) {
                uint32_t position = positions[i];
                if (position >= max_position) __trap();
                return rope + size_t(position) * rotary;
            };
            auto load = [&](const auto &angles) {
                by_q = load_factors(q_norm, angles, vector, rotary);
                by_k = load_factors(k_norm, angles, vector, rotary);
            };
            if constexpr (Grid)
                load(GridAngles{angles_at(3 * token), angles_at(3 * token + 1), angles_at(3 * token + 2)});
            else load(Angles{angles_at(token)});
        }
#pragma unroll
        for (uint32_t i = 0; i < kPasses; ++i) {
            uint32_t h = head + i * at_once;
            bool query = h < heads, key = !query && h < heads + kv_heads;
            uint4 y = norm_rope(x[i], select(query, by_q, by_k), other, lanes, head_dim, eps);
            float scale = row_scale<T>(key ? y : x[i], make_uint4(0, 0, 0, 0), inside, lanes);
            if (!inside || h >= all || (!query && slot == kNoSlot)) continue;
            if (query) {
                *reinterpret_cast<uint4 *>(q + (size_t(token) * heads + h) * head_dim + 8 * vector) = y;
                continue;
            }
            size_t slab = size_t(slot / kBlock) * kv_heads + h - heads - (key ? 0 : kv_heads);
            T *to = (key ? k : v) + slab * slab_size<T>(head_dim);
            store_row(to, head_dim, slot % kBlock, vector, key ? y : x[i], scale);
        }
    }
}

#define WRITE_KV(SUFFIX, GRID, T)                                                                                      \
    extern "C" __global__ __launch_bounds__(kMaxThreads) void gated_qk_norm_rope_write_kv##SUFFIX(                     \
        const bf16 *__restrict__ projected, const float *__restrict__ q_norm, const float *__restrict__ k_norm,        \
        const float *__restrict__ rope, const uint32_t *__restrict__ positions, const uint32_t *__restrict__ slots,    \
        bf16 *__restrict__ q, T *__restrict__ k, T *__restrict__ v, uint32_t heads, uint32_t kv_heads,                 \
        uint32_t head_dim, uint32_t rotary, uint32_t max_position, uint32_t max_slot, float eps, uint32_t lanes) {     \
        rotate_write_kv<GRID>(projected, q_norm, k_norm, rope, positions, slots, q, k, v, heads, kv_heads, head_dim,   \
                              rotary, max_position, max_slot, eps, lanes);                                             \
    }
WRITE_KV(, false, bf16)
WRITE_KV(_fp8, false, fp8)
WRITE_KV(_grid, true, bf16)
WRITE_KV(_grid_fp8, true, fp8)

// attended *= sigmoid(gate), 8 elements a thread. Grid: tokens, then enough blocks for a row.
extern "C" __global__ __launch_bounds__(kGateThreads) void attention_gate(
    const bf16 *__restrict__ projected, // [tokens, (2 heads + 2 kv_heads) * head_dim]
    bf16 *__restrict__ attended,        // [tokens, heads * head_dim]
    uint32_t heads, uint32_t kv_heads, uint32_t head_dim) {
    start_after_predecessor();
    uint32_t column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), head = column / head_dim;
    if (head >= heads) return;
    const bf16 *row = projected + size_t(blockIdx.x) * (2 * heads + 2 * kv_heads) * head_dim;
    uint4 gate = load16(row + column + (head + 1) * head_dim);
    uint4 *to = reinterpret_cast<uint4 *>(attended + size_t(blockIdx.x) * heads * head_dim + column), x = *to;
    *to = make_uint4(gated(x.x, gate.x), gated(x.y, gate.y), gated(x.z, gate.z), gated(x.w, gate.w));
}
