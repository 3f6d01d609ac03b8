// Attention without a mask inside segments of rows, with rotary positions of two dimensions before it, on Hopper.
//
//   q, k = rotate(q, k) by row and column;  out = softmax(q kᵀ scale) v over the rows of a query's segment
// qkv: [n, 3, heads, head_dim] bf16, head_dim a multiple of 8 up to D; out: [n, heads, head_dim] bf16. D is 64 or 128.
// pack_grid rotates queries and keys and gives keys and values the layout of the KV cache, with zeros behind head_dim;
// attend_grid is csrc/attention/prefill_wgmma.cu without causality. Heads of 72 take as long as heads of 128. Other
// GPUs: csrc/vision/rows.cu, csrc/vision/attention.cu. References: src/cpu/vision/positions.rs, attention.rs.
#include "attention/prefill_consumer.cuh"
#include "abi/vision_attention_wgmma.h"
#include "common/vec8.cuh"
#include "limits.h"

using namespace limits::vision_attention_wgmma;

// Grid: rows, then enough blocks for the vectors of all heads. A thread has a vector of a head's queries, keys and
// values. A position outside the table or a slot outside the packed memory stops the kernel.
template <int D>
__device__ void pack(const float *table, const uint32_t *positions, const uint32_t *slots, const bf16 *qkv, bf16 *q,
                     bf16 *k, bf16 *v, uint32_t heads, uint32_t head_dim, uint32_t sides, uint32_t capacity) {
    start_after_predecessor();
    uint32_t i = blockIdx.y * blockDim.x + threadIdx.x, head = i / (D / 8), d = i % (D / 8) * 8;
    if (head >= heads) return;
    uint32_t row = blockIdx.x, slot = slots[row], half = head_dim / 2, quarter = half / 2;
    uint32_t at_row = positions[2 * row], at_column = positions[2 * row + 1];
    if (max(at_row, at_column) >= sides || slot / kBlock >= capacity) __trap();
    const bf16 *from = qkv + (size_t(row) * 3 * heads + head) * head_dim;
    size_t next = size_t(heads) * head_dim;
    uint4 vectors[3] = {};
    if (d < head_dim) {
        Vec8 x[2] = {widen8(load16(from + d)), widen8(load16(from + next + d))};
#pragma unroll
        for (int j = 0; j < 8; ++j) { // the two halves of a head may meet within a vector
            uint32_t e = d + j, pair = e % half, f = pair % quarter;
            const float *angles = table + size_t(pair < quarter ? at_row : at_column) * half + f;
            float cosine = angles[0], sine = e < half ? -angles[quarter] : angles[quarter];
            uint32_t other = e < half ? e + half : e - half;
#pragma unroll
            for (int part = 0; part < 2; ++part)
                x[part].x[j] = x[part].x[j] * cosine + __bfloat162float(from[part * next + other]) * sine;
        }
        vectors[0] = narrow8(x[0]), vectors[1] = narrow8(x[1]), vectors[2] = load16(from + 2 * next + d);
    }
    *reinterpret_cast<uint4 *>(q + (size_t(row) * heads + head) * D + d) = vectors[0];
    size_t slab = (size_t(slot / kBlock) * heads + head) * slab_size<bf16>(D) + cache_vector(slot % kBlock, d / 8);
    *reinterpret_cast<uint4 *>(k + slab) = vectors[1];
    *reinterpret_cast<uint4 *>(v + slab) = vectors[2];
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Writes o / sum, without what lies behind head_dim.
template <int D> struct SegmentWriter {
    bf16 *out; // [n, heads, head_dim]
    uint32_t head_dim;

    __device__ void operator()(AttentionConsumer<D> &c, const SegmentBatch &batch, const QueryTile &tile,
                               uint32_t row0) const {
        using Size = Sizes<D>;
        uint32_t quad = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float inverse = 1.f / reduce_quad(c.softmax.sum[r], Add());
            uint32_t row = row0 + 8 * r;
            bf16 *to = out + (size_t(tile.token0 + row) * batch.heads + tile.kv_head) * head_dim + 8 * quad;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                uint32_t w[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const float *from = &c.o[(4 * i + t) * 4 / Size::kPart][(4 * i + t) * 4 % Size::kPart + 2 * r];
                    w[t] = narrow(from[0] * inverse, from[1] * inverse);
                }
                transpose_quad(w, quad);
                if (row < tile.rows && 32 * i + 8 * quad < head_dim)
                    *reinterpret_cast<uint4 *>(to + 32 * i) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
};
#define BODY(D)                                                                                                        \
    prefill<D>(q, k, v,                                                                                                \
               SegmentBatch{{{{indptr, nullptr, nullptr, segments, 0, 0}, heads, heads}, 0, heads, capacity}},         \
               SegmentWriter<D>{out, head_dim}, scale)
#else
#define BODY(D) __trap() // the launcher takes csrc/vision/attention.cu
#endif

// pack_grid: grid and threads as above. attend_grid: as many blocks as multiprocessors.
#define GRID_ATTENTION(D)                                                                                              \
    extern "C" __global__ __launch_bounds__(kThreads) void pack_grid_##D(                                              \
        const float *table,        /* [sides, head_dim / 2]: cosines, then sines */                                    \
        const uint32_t *positions, /* [n, 2]: row and column */                                                        \
        const uint32_t *slots,     /* [n]: places in k and v */                                                        \
        const bf16 *qkv,           /* [n, 3, heads, head_dim] */                                                       \
        bf16 *q,                   /* [n, heads, D] */                                                                 \
        bf16 *k,                   /* [capacity, heads, D / 64, 16, 64], csrc/attention/kv_cache.cuh */                \
        bf16 *v,                   /* as k */                                                                          \
        uint32_t heads, uint32_t head_dim, uint32_t sides, uint32_t capacity) {                                        \
        pack<D>(table, positions, slots, qkv, q, k, v, heads, head_dim, sides, capacity);                              \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__((1 + kConsumers) * kWarpgroup, 1) void attend_grid_##D(                    \
        const bf16 *q,          /* [n, heads, D] */                                                                    \
        const bf16 *k,          /* [capacity, heads, D / 64, 16, 64] */                                                \
        const bf16 *v,          /* as k */                                                                             \
        const uint32_t *indptr, /* [segments + 1] */                                                                   \
        bf16 *out,              /* [n, heads, head_dim] */                                                             \
        uint32_t segments, uint32_t heads, uint32_t head_dim, uint32_t capacity,                                       \
        float scale) { /* of the scores, with log2(e) */                                                               \
        BODY(D);                                                                                                       \
    }
GRID_ATTENTION(64)
GRID_ATTENTION(128)
