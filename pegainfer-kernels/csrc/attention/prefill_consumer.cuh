// The consumer warps of attention by wgmma: of csrc/attention/prefill_wgmma.cu, which is causal, and of
// csrc/vision/attention_wgmma.cu, where every row attends to its whole segment.
//
// A consumer goes through the KV tiles from the last, which causality masks, to the first. It keeps two GEMMs in
// flight, S = q kᵀ of this KV tile and O += p v of the one before, and does the softmax of S while O is still being
// added.
#pragma once
#include "attention/prefill_wgmma.cuh"
#include "attention/softmax.cuh"

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

// `write(consumer, batch, tile, row0)` writes a tile; a lane holds its rows row0 and row0 + 8.
template <int D, typename B, typename W>
__device__ void consume(PrefillShared<D> &shared, const B &batch, const W &write, float scale, uint32_t consumer) {
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
            c.last[r] = B::last(tile, min(row0 + 8 * r, tile.rows - 1) / group) - Accumulator::column(lane, 0);
        // KV tiles that all rows see whole.
        uint32_t clear = (B::last(tile, min(first_row, tile.rows - 1) / group) + 1) / Sizes<D>::kTokens;
        uint32_t kv = tile.kv_tiles - 1;
        wait(&shared.q_full[c.buffer.index][consumer], c.buffer.parity);
        c.begin(kv);
        while (kv > clear) c.template step<true>(--kv);
        while (kv > 0) c.template step<false>(--kv);
        c.release(&shared.q_empty[c.buffer.index][consumer]);
        c.end();
        write(c, batch, tile, row0);
    }
}

template <int D, typename B, typename W>
__device__ void prefill(const bf16 *q, const bf16 *k, const bf16 *v, const B &batch, const W &write, float scale) {
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
        consume<D>(shared, batch, write, scale, warpgroup - 1);
    }
}
#endif
