// Causal attention over the paged KV cache for sequences of many queries (prefill), on Hopper.
//
//   out = softmax(q kᵀ scale) v over the tokens that each query sees; scale includes log2(e), for base 2
// q, out: [tokens, heads * D] bf16; k, v: csrc/attention/kv_cache.cuh; prefill_widened: keys and values of some KV
// heads of a cache in FP8, which csrc/attention/widen_kv.cu has widened to bf16. Compute capability 9.0 (sm_90a), D of
// 64, 128 and 256, sequences of more than 16 matrix rows; the others of the batch are left to
// csrc/attention/decode_bulk.cu. Reference: src/cpu/attention/mod.rs. Other GPUs: csrc/attention/prefill_mma.cu.
//
// Techniques: FlashAttention-3 (arXiv 2407.08608): warp specialisation with register reallocation, wgmma, the softmax
// of one KV tile overlapped with the GEMM of the one before; bulk copies by the copy engine (TMA); persistent blocks
// that draw tiles from a counter, the longest first. Bound by the tensor cores: 635 TFLOP/s at 4k tokens, 681 at 8k, on
// an H200 with 700 W (lab/attention.md), of about 800 that large GEMMs reach.
//
// The queries of a sequence that share a KV head are one matrix: row r of it is query r / group, head r % group of the
// group, so that K and V are read once for the whole group. A tile is 128 such rows, 64 for each of two consumer
// warpgroups; a third warpgroup, the producer, fetches (csrc/attention/prefill_wgmma.cuh) and leaves its registers to
// the others.
//
// A consumer goes through the KV tiles from the last, which causality masks, to the first. It keeps two GEMMs in
// flight, S = q kᵀ of this KV tile and O += p v of the one before, and does the softmax of S while O is still being
// added.
#include "common/activation.cuh"
#include "attention/prefill_wgmma.cuh"
#include "attention/softmax.cuh"
#include "abi/attention_prefill_wgmma.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A consumer: one warpgroup, 64 rows of each tile.
template <int D> struct AttentionConsumer {
    using Size = Sizes<D>;
    PrefillShared<D> &shared;
    uint32_t consumer;
    float scale;
    Ring<Size::kSlots> slot;
    Ring<Size::kBuffers> buffer;
    float s[Size::kTokens / 2], o[Size::kParts][Size::kPart];
    uint4 p[Size::kTokens / 16];
    int last[2]; // the last token that each of a lane's rows sees, less the columns before the lane's first
    Softmax softmax;

    __device__ __forceinline__ void release(uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    }

    // s = q kᵀ, begun.
    __device__ __forceinline__ void scores(uint32_t keys) {
        uint64_t a = descriptor(shared_address(shared.q[buffer.index][consumer]), 0, 1024);
        uint64_t b = descriptor(shared_address(shared.kv[keys]), 0, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            // 16 columns are 32 bytes of a row; four times that, and the next column of 128 bytes begins.
            uint64_t ai = a + (i / 4 * (64 * 128) + i % 4 * 32) / 16;
            uint64_t bi = b + (i / 4 * (Size::kTokens * 128) + i % 4 * 32) / 16;
            if (i == 0) wgmma<true>(s, ai, bi);
            else wgmma<false>(s, ai, bi);
        }
        wgmma_commit();
    }

    // o += p v, begun.
    __device__ __forceinline__ void add_values(uint32_t values) {
        uint64_t b = descriptor(shared_address(shared.kv[values]), Size::kTokens * 128, 1024);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Size::kTokens / 16; ++i) {
#pragma unroll
            for (int part = 0; part < Size::kParts; ++part)
                wgmma_transposed(o[part], p[i], b + (part * 2 * Size::kTokens * 128 + i * 16 * 128) / 16);
        }
        wgmma_commit();
    }

    // Weights of KV tile `kv` from its scores. Returns what earlier weights are rescaled by.
    template <bool Masked> __device__ __forceinline__ float2 weigh(uint32_t kv) {
        int limits[2] = {last[0] - int(kv * Size::kTokens), last[1] - int(kv * Size::kTokens)};
        return softmax.template apply<Masked>(s, limits, scale);
    }

    __device__ __forceinline__ void narrow_weights() {
#pragma unroll
        for (int i = 0; i < Size::kTokens / 16; ++i)
            p[i] = make_uint4(narrow(s[8 * i], s[8 * i + 1]), narrow(s[8 * i + 2], s[8 * i + 3]),
                              narrow(s[8 * i + 4], s[8 * i + 5]), narrow(s[8 * i + 6], s[8 * i + 7]));
    }

    // The last KV tile, which comes first: `buffer` has the queries, `slot` will have the keys.
    __device__ __forceinline__ void begin(uint32_t kv) {
        softmax = Softmax();
#pragma unroll
        for (int part = 0; part < Size::kParts; ++part) {
#pragma unroll
            for (int i = 0; i < Size::kPart; ++i) o[part][i] = 0.f;
        }
        wait(&shared.kv_full[slot.index], slot.parity);
        scores(slot.index);
        wgmma_wait<0>();
        release(&shared.kv_empty[slot.index]);
        slot.next();
        weigh<true>(kv);
        narrow_weights();
        wait(&shared.kv_full[slot.index], slot.parity);
    }

    // Scores of KV tile `kv`, values of the one after it. `slot` has the keys already, the values come next.
    template <bool Masked> __device__ __forceinline__ void step(uint32_t kv) {
        uint32_t keys = slot.index;
        slot.next();
        scores(keys);
        wait(&shared.kv_full[slot.index], slot.parity);
        uint32_t values = slot.index;
        add_values(values);
        wgmma_wait<1>();
        release(&shared.kv_empty[keys]);
        float2 by = weigh<Masked>(kv);
        slot.next();
        // The next keys, or the last values. Waiting for them here also keeps the compiler from waiting for the wgmma
        // before the weights are computed.
        wait(&shared.kv_full[slot.index], slot.parity);
        wgmma_wait<0>();
        release(&shared.kv_empty[values]);
#pragma unroll
        for (int part = 0; part < Size::kParts; ++part) {
#pragma unroll
            for (int i = 0; i < Size::kPart; ++i) o[part][i] *= i % 4 < 2 ? by.x : by.y;
        }
        narrow_weights();
    }

    // Values of the first KV tile, which comes last.
    __device__ __forceinline__ void end() {
        add_values(slot.index);
        wgmma_wait<0>();
        release(&shared.kv_empty[slot.index]);
        slot.next();
    }
};

// Transposes the half words of four lanes, in two words: eight bytes that lie side by side.
__device__ __forceinline__ uint2 transpose_quad(uint2 w, uint32_t quad) {
    uint32_t other = __shfl_xor_sync(kAll, quad & 2 ? w.x : w.y, 2), own = quad & 2 ? w.y : w.x;
    uint32_t low = quad & 2 ? other : own, high = quad & 2 ? own : other; // of lanes quad & 1 and (quad & 1) + 2
    uint32_t keep = __byte_perm(low, high, quad & 1 ? 0x7632 : 0x5410),
             give = __byte_perm(low, high, quad & 1 ? 0x5410 : 0x7632);
    uint32_t got = __shfl_xor_sync(kAll, give, 1);
    uint32_t even = quad & 1 ? got : keep, odd = quad & 1 ? keep : got;
    return make_uint2(__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632));
}

// Writes o / sum. The lanes of a quad exchange what they hold so that each writes eight neighbouring elements.
template <int D>
__device__ void write(AttentionConsumer<D> &c, const PrefillBatch &batch, const QueryTile &tile, uint32_t row0,
                      const ActivationOut &out) {
    using Size = Sizes<D>;
    uint32_t group = batch.heads / batch.kv_heads, quad = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float inverse = 1.f / reduce_quad(c.softmax.sum[r], Add());
        uint32_t row = row0 + 8 * r, token = tile.token0 + row / group;
        uint32_t column = (tile.kv_head * group + row % group) * D + 8 * quad;
        bool inside = row < tile.rows;
        auto pair = [&](int t) { // of columns 8 t + 2 quad
            const float *from = &c.o[t * 4 / Size::kPart][t * 4 % Size::kPart + 2 * r];
            return narrow(from[0] * inverse, from[1] * inverse);
        };
        if (D >= 128 && out.rounds()) {
#pragma unroll
            for (int block = 0; block < D / 128; ++block) {
                uint32_t w[16], largest = 0;
#pragma unroll
                for (int t = 0; t < 16; ++t)
                    w[t] = pair(16 * block + t), largest = __vmaxu2(largest, w[t] & 0x7fff7fffu);
                Divisor by(amax_over_448(reduce_quad(max(largest & 0xffffu, largest >> 16), MaxBits())));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint2 codes = transpose_quad(make_uint2(by.encode4(make_uint2(w[4 * i], w[4 * i + 1])),
                                                            by.encode4(make_uint2(w[4 * i + 2], w[4 * i + 3]))),
                                                 quad);
                    if (inside) *reinterpret_cast<uint2 *>(out.codes(token, column + 128 * block + 32 * i)) = codes;
                }
                if (inside && quad == 0) *out.scale(token, column + 128 * block) = by.scale;
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            uint32_t w[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) w[t] = pair(4 * i + t);
            transpose_quad(w, quad);
            if (inside)
                *reinterpret_cast<uint4 *>(out.values(token, column + 32 * i)) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

template <int D>
__device__ void consume(PrefillShared<D> &shared, const PrefillBatch &batch, const ActivationOut &out, float scale,
                        uint32_t consumer) {
    AttentionConsumer<D> c = {shared, consumer, scale};
    Ring<2> place;
    uint32_t lane = threadIdx.x % 32, group = batch.heads / batch.kv_heads;
    for (;; c.buffer.next()) {
        QueryTile tile = next_tile<D>(shared, place);
        if (tile.rows == 0) break;
        uint32_t first_row = tile.row0 + 64 * consumer,
                 row0 = first_row + threadIdx.x / 32 % 4 * 16 + Accumulator::row(lane, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            c.last[r] = tile.first + min(row0 + 8 * r, tile.rows - 1) / group - Accumulator::column(lane, 0);
        // KV tiles that all rows see whole.
        uint32_t clear = (tile.first + min(first_row, tile.rows - 1) / group + 1) / Sizes<D>::kTokens;
        uint32_t kv = tile.kv_tiles - 1;
        wait(&shared.q_full[c.buffer.index][consumer], c.buffer.parity);
        c.begin(kv);
        while (kv > clear) c.template step<true>(--kv);
        while (kv > 0) c.template step<false>(--kv);
        c.release(&shared.q_empty[c.buffer.index][consumer]);
        c.end();
        write<D>(c, batch, tile, row0, out);
    }
}

template <int D, typename B>
__device__ void prefill(const bf16 *q, const bf16 *k, const bf16 *v, const B &batch, const ActivationOut &out,
                        float scale) {
    using Size = Sizes<D>;
    extern __shared__ __align__(1024) uint8_t bytes[];
    PrefillShared<D> &shared = *reinterpret_cast<PrefillShared<D> *>(bytes);
    if (threadIdx.x == 0) {
        constexpr uint32_t kWarps = kWarpgroup / 32;
        for (int i = 0; i < Size::kSlots; ++i) {
            barrier_init(&shared.kv_full[i], 32); // the lanes of the warp that fetches
            barrier_init(&shared.kv_empty[i], kConsumers * kWarps);
        }
        for (int i = 0; i < Size::kBuffers * kConsumers; ++i) {
            barrier_init(&shared.q_full[0][i], 1);
            barrier_init(&shared.q_empty[0][i], kWarps);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(&shared.tile_full[i], 1);
            barrier_init(&shared.tile_empty[i], kConsumers * (kWarps + 1) + 1);
        }
        barriers_ready();
    }
    __syncthreads();
    wait_for_predecessor();
    // Only now: decode attention, if that is next and overlapped, takes its start for the end of all kernels before
    // this one.
    release_successor();
    uint32_t warpgroup = threadIdx.x / kWarpgroup, warp = threadIdx.x / 32;
    if (warpgroup == 0) {
        registers_lower<kProducerRegisters>();
        if (warp == 0) fetch_keys<D>(shared, k, batch);
        else if (warp == 1) fetch_values<D>(shared, v, batch);
        else fetch_queries<D>(shared, q, batch, warp - 2);
    } else {
        registers_raise<kConsumerRegisters>();
        consume<D>(shared, batch, out, scale, warpgroup - 1);
    }
}

#define BODY(D)                                                                                                        \
    prefill<D>(q, k, v, PrefillBatch{{qo_indptr, kv_lens, block_tables, rows, max_blocks, blocks}, heads, kv_heads},   \
               {out, padded, heads * D}, scale)
#define WIDENED_BODY(D)                                                                                                \
    prefill<D>(                                                                                                        \
        q, k, v,                                                                                                       \
        WidenedBatch{{{qo_indptr, kv_lens, nullptr, rows, 0, 0}, heads, kv_heads}, first_head, heads_here, capacity},  \
        {out, padded, heads * D}, scale)
#else
#define WIDENED_BODY(D) __trap()
#define BODY(D) __trap() // the launcher takes csrc/attention/prefill_mma.cu
#endif

// Grid: as many blocks as multiprocessors, fewer where decode attention is overlapped. A bad block id stops the kernel.
#define PREFILL(D)                                                                                                     \
    extern "C" __global__ __launch_bounds__((1 + kConsumers) * kWarpgroup, 1) void prefill_##D(                        \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        const bf16 *k,             /* [blocks, kv_heads, D / 64, 16, 64], csrc/attention/kv_cache.cuh */               \
        const bf16 *v,             /* as k */                                                                          \
        BATCH_POINTERS, void *out, /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t max_blocks, uint32_t blocks,       \
        float scale) { /* of the scores, with log2(e) */                                                               \
        BODY(D);                                                                                                       \
    }
PREFILL(64)
PREFILL(128)
PREFILL(256)

// The same over `heads_here` KV heads from `first_head` on.
#define PREFILL_WIDENED(D)                                                                                             \
    extern "C" __global__ __launch_bounds__((1 + kConsumers) * kWarpgroup, 1) void prefill_widened_##D(                \
        const bf16 *q,             /* [tokens, heads * D] */                                                           \
        const bf16 *k,             /* [capacity, heads_here, D / 64, 16, 64], csrc/attention/kv_cache.cuh */           \
        const bf16 *v,             /* as k */                                                                          \
        const uint32_t *qo_indptr, /* [rows + 1] */                                                                    \
        const uint32_t *kv_lens,   /* [rows] */                                                                        \
        void *out,                 /* [tokens, heads * D], csrc/common/activation.cuh */                               \
        uint32_t padded, uint32_t heads, uint32_t kv_heads, uint32_t rows, uint32_t first_head, uint32_t heads_here,   \
        uint32_t capacity, float scale) { /* of the scores, with log2(e) */                                            \
        WIDENED_BODY(D);                                                                                               \
    }
PREFILL_WIDENED(64)
PREFILL_WIDENED(128)
PREFILL_WIDENED(256)
