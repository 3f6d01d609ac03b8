// From the fused QKV projection to rotated queries and a written KV cache: one warp a head of a token.
#include "common.cuh"

constexpr int kPairs = 4; // rotation pairs of a lane: heads up to 256 wide

constexpr uint32_t kNoSlot = 0xffffffffu; // a token that stays out of the cache

// A bad slot or position stops the kernel.
extern "C" __global__ __launch_bounds__(256) void qk_norm_rope_write_kv(
    const bf16 *__restrict__ qkv,           // [tokens, (heads + 2 kv_heads) * head_dim]
    const bf16 *__restrict__ q_norm,        // [head_dim]
    const bf16 *__restrict__ k_norm,        // [head_dim]
    const float *__restrict__ rope,         // [positions, head_dim]: cosines, then sines
    const uint32_t *__restrict__ positions, // [tokens]
    const uint32_t *__restrict__ slots,     // [tokens]
    bf16 *__restrict__ q,                   // [tokens, heads * head_dim]
    bf16 *__restrict__ k, bf16 *__restrict__ v, uint32_t heads, uint32_t kv_heads, uint32_t head_dim,
    uint32_t max_position, uint32_t max_slot, float eps) {
    release_successor();
    wait_for_predecessor();
    uint32_t token = blockIdx.x, lane = threadIdx.x % 32;
    uint32_t head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= heads + 2 * kv_heads) return;
    uint32_t position = positions[token], slot = slots[token];
    if (position >= max_position || (slot >= max_slot && slot != kNoSlot)) __trap();
    if (slot == kNoSlot && head >= heads) return;
    const bf16 *x = qkv + (size_t(token) * (heads + 2 * kv_heads) + head) * head_dim;
    uint32_t block = slot / kBlock, offset = slot % kBlock, half = head_dim / 2;

    if (head >= heads + kv_heads) {
        bf16 *to = v + (size_t(block) * kv_heads + head - heads - kv_heads) * head_dim * kBlock;
        for (uint32_t d = lane; d < head_dim; d += 32) to[cache_piece(offset, d / 8) + d % 8] = x[d];
        return;
    }
    float low[kPairs], high[kPairs], squares = 0.f;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        uint32_t d = lane + 32 * p;
        low[p] = d < half ? __bfloat162float(x[d]) : 0.f;
        high[p] = d < half ? __bfloat162float(x[d + half]) : 0.f;
        squares += low[p] * low[p] + high[p] * high[p];
    }
    float scale = 1.f / sqrtf(warp_sum(squares) / float(head_dim) + eps);
    const bf16 *weight = head < heads ? q_norm : k_norm;
    bool query = head < heads;
    bf16 *to = query ? q + (size_t(token) * heads + head) * head_dim
                     : k + (size_t(block) * kv_heads + head - heads) * head_dim * kBlock;
    const float *angles = rope + size_t(position) * head_dim;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        uint32_t d = lane + 32 * p;
        if (d >= half) break;
        float a = round_bf16(round_bf16(low[p] * scale) * __bfloat162float(weight[d]));
        float b = round_bf16(round_bf16(high[p] * scale) * __bfloat162float(weight[d + half]));
        float cosine = angles[d], sine = angles[d + half];
        uint32_t first = query ? d : cache_piece(offset, d / 8) + d % 8;
        uint32_t second = query ? d + half : cache_piece(offset, (d + half) / 8) + (d + half) % 8;
        to[first] = __float2bfloat16_rn(a * cosine - b * sine);
        to[second] = __float2bfloat16_rn(b * cosine + a * sine);
    }
}
