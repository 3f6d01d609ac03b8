// Keys and values of a KV cache in FP8, widened to bf16 for csrc/attention/prefill_wgmma.cu: x = bf16(code scale).
//
// Of the sequences that prefill takes (more than 16 matrix rows), one KV block after the other, and of some KV heads,
// as many as the workspace has memory for. k, v: csrc/attention/kv_cache.cuh, in FP8; out_k, out_v: [capacity,
// heads_here, D / 64, 16, 64] bf16, the layout of a cache in bf16. Compute capability 9.0; a warp takes the keys and
// values of a KV block and head. Bound by memory: 6 bytes an element, 2 to 5 % of the attention that follows.
// Reference: src/cpu/attention/mod.rs, which multiplies by the scale in f32: the rounding here is that of a cache in
// bf16.
#include "attention/prefill_wgmma.cuh"
#include "attention/fp8_kv.cuh"
#include "abi/attention_widen_kv.h"

using namespace limits::widen_kv;

// A KV block of a sequence.
struct KvBlock {
    uint32_t row, block;
    bool exists;
};

// KV block `index` of all sequences, by a whole warp.
__device__ KvBlock find_kv_block(const PrefillBatch &batch, uint32_t index) {
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t base = 0; base < batch.rows; base += 32) {
        uint32_t kv_len = batch.kv_lens[min(base + lane, batch.rows - 1)];
        uint32_t here = batch.matrix_rows(base + lane) ? (kv_len + kBlock - 1) / kBlock : 0;
        uint32_t through = inclusive_scan(here), found = __ballot_sync(kAll, index < through);
        if (found == 0) {
            index -= __shfl_sync(kAll, through, 31);
            continue;
        }
        int owner = __ffs(found) - 1;
        return {base + owner, index - __shfl_sync(kAll, through - here, owner), true};
    }
    return {0, 0, false};
}

// Two values times a scale.
__device__ __forceinline__ uint32_t times(uint32_t pair, float scale) {
    float2 x = widen(pair);
    return narrow(x.x * scale, x.y * scale);
}

// Eight codes times a scale.
__device__ __forceinline__ uint4 widen_row(uint32_t low, uint32_t high, float scale) {
    uint4 x = widen8_codes(make_uint2(low, high));
    return make_uint4(times(x.x, scale), times(x.y, scale), times(x.z, scale), times(x.w, scale));
}

// A slab, by a whole warp. A lane has 16 codes of each column of two tokens.
template <int D> struct Slab {
    uint4 codes[D / 64][2];
    float scales[2];

    __device__ __forceinline__ void load(const fp8 *slab) {
        uint32_t lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scales[i] = cache_scales(slab, D)[lane / 4 + 8 * i];
#pragma unroll
            for (int c = 0; c < D / 64; ++c)
                codes[c][i] = *reinterpret_cast<const uint4 *>(slab + (2 * c + i) * (8 * kCacheColumn) + 16 * lane);
        }
    }

    __device__ __forceinline__ void store(bf16 *slab) const {
        uint32_t lane = threadIdx.x % 32, token = lane / 4, vector = 2 * (lane % 4 ^ token / 2 % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int c = 0; c < D / 64; ++c) {
                bf16 *row = slab + (c * kBlock + token + 8 * i) * kCacheColumn;
                uint4 x = codes[c][i];
                *reinterpret_cast<uint4 *>(row + (vector ^ token) * kVector) = widen_row(x.x, x.y, scales[i]);
                *reinterpret_cast<uint4 *>(row + (vector + 1 ^ token) * kVector) = widen_row(x.z, x.w, scales[i]);
            }
        }
    }
};

template <int D>
__device__ void widen_kv(const fp8 *k, const fp8 *v, const WidenedBatch &batch, bf16 *out_k, bf16 *out_v) {
    start_after_predecessor();
    uint32_t item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, index = item / batch.here;
    KvBlock found = find_kv_block(batch, index);
    if (!found.exists || index >= batch.capacity) return; // in the second case prefill stops
    uint32_t id = batch.block_tables[size_t(found.row) * batch.max_blocks + found.block];
    if (id >= batch.blocks) __trap();
    size_t from = (size_t(id) * batch.kv_heads + batch.first + item % batch.here) * slab_size<fp8>(D);
    size_t to = size_t(item) * slab_size<bf16>(D);
    Slab<D> keys, values;
    keys.load(k + from);
    values.load(v + from);
    keys.store(out_k + to);
    values.store(out_v + to);
}

// Grid: a warp for each of `capacity` KV blocks and `heads_here` KV heads from `first_head` on. A bad block id stops
// the kernel.
#define WIDEN_KV(D)                                                                                                    \
    extern "C" __global__ __launch_bounds__(kThreads) void widen_kv_##D(                                               \
        const fp8 *k,                /* [blocks, kv_heads, slab], csrc/attention/kv_cache.cuh */                       \
        const fp8 *v,                /* as k */                                                                        \
        BATCH_POINTERS, bf16 *out_k, /* [capacity, heads_here, D / 64, 16, 64] */                                      \
        bf16 *out_v,                 /* as out_k */                                                                    \
        uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks, uint32_t first_head,   \
        uint32_t heads_here, uint32_t capacity) {                                                                      \
        WidenedBatch batch{{{qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks}, heads, kv_heads},            \
                           first_head,                                                                                 \
                           heads_here,                                                                                 \
                           capacity};                                                                                  \
        widen_kv<D>(k, v, batch, out_k, out_v);                                                                        \
    }
WIDEN_KV(64)
WIDEN_KV(128)
WIDEN_KV(256)
