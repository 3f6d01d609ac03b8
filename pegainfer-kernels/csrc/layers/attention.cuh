// Decode attention as a phase of csrc/layers/decode.cu: from the flagged QKV projection to the flagged attended values.
// The tiles, the online softmax and how blocks split a sequence are those of csrc/attention/decode.cuh.
#pragma once
#include "attention/decode_partials.cuh"
#include "layers/gemv.cuh"
#include "common/norm_rope.cuh"

#if __CUDA_ARCH__ >= 900
// Takes the place of x and of the sums of a GEMV.
template <int D> struct AttentionScratch {
    alignas(128) Stage<D> kv[kWarps][1];
    bf16 q[8 * D];
    bf16 fresh[2][D]; // key and value of the new token
    uint32_t arrived;
};

// A head from flagged words: the elements of a lane as in `load_pairs`.
template <int D> __device__ __forceinline__ Pairs<D> await_head(const uint64_t *from, uint32_t flag) {
    constexpr int kWords = D / 32;
    uint32_t lane = threadIdx.x % 32;
    uint64_t v[kWords];
    bool missing = true;
    for (PollLimit limit; missing; limit.poll()) {
        missing = false;
#pragma unroll
        for (int i = 0; i < kWords; ++i) v[i] = load_flagged(from + (lane + 32 * i) / 2);
#pragma unroll
        for (int i = 0; i < kWords; ++i) missing |= !has_flag(v[i], flag);
    }
    Pairs<D> out;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        float2 two = widen(uint32_t(v[i]));
        float mine = lane % 2 ? two.y : two.x;
        if (i < D / 64) out.low[i] = mine;
        else out.high[i - D / 64] = mine;
    }
    return out;
}

// What a block does in every layer: the same split of the same row and KV head.
template <int M, int D> struct Attention {
    const Step &step;
    AttentionScratch<D> &scratch;
    const ExchangeBuffers<M, D> &flagged;
    Pair pair;
    Place place;
    KvRing<D, 1, kWarps> ring; // of this warp
    uint32_t ids, ahead;       // the ring's before its first block
    uint32_t fetched = 0;      // blocks of this warp in the layers so far
    bool fresh, last;          // the new token has to be written; the row's last KV block is this block's
    size_t newest_slab;        // of the row's last KV block in the cache
    Pairs<D> angles, q_norm, k_norm;

    // May run before the predecessor is complete. `barrier`: of this warp.
    __device__ Attention(const Step &step, AttentionScratch<D> &scratch, const ExchangeBuffers<M, D> &flagged,
                         uint64_t *barrier)
        : step(step), scratch(scratch), flagged(flagged) {
        uint32_t group = step.heads / step.kv_heads, warp = threadIdx.x / 32;
        place = {blockIdx.x / step.kv_heads, gridDim.x / step.kv_heads, blockIdx.x % step.kv_heads, step.kv_heads};
        pair = find_pair<kWarps>(
            {step.qo_indptr, step.kv_lens, step.block_tables, M, step.max_blocks, step.blocks}, place, group, 8);
        if (pair.splits == 0) return;
        uint32_t total = (pair.kv_len + kBlock - 1) / kBlock, newest = pair.kv_len - 1;
        uint32_t first = pair.split * total / pair.splits + warp, end = (pair.split + 1) * total / pair.splits;
        const uint32_t *table = step.block_tables + size_t(pair.row) * step.max_blocks;
        if (newest >= step.positions || pair.tokens != 1 || table[newest / kBlock] >= step.blocks) __trap();
        ring.stages = scratch.kv[warp];
        ring.barriers = barrier;
        ring.stride = size_t(pair.kv_heads) * kBlock * D;
        ring.table = table + first;
        ring.count = first < end ? (end - first + kWarps - 1) / kWarps : 0;
        ring.blocks = step.blocks;
        ring.load_ids();
        ids = ring.ids, ahead = ring.ahead;
        last = end == total;
        fresh = last && step.slots[pair.token0] != kNoSlot;
        newest_slab = table[newest / kBlock] * ring.stride + size_t(pair.kv_head) * kBlock * D;
        angles = load_pairs<D>(step.rope + size_t(newest) * D);
    }

    // The weights of a layer that this will want.
    __device__ void load_norms(const Layer &layer) {
        if (pair.splits == 0) return;
        q_norm = load_pairs<D>(layer.q_norm);
        k_norm = load_pairs<D>(layer.k_norm);
    }

    // Starts the copies of each warp's first KV block; the scratch is free.
    __device__ void begin(const Layer &layer) {
        if (pair.splits == 0) return;
        size_t slab = size_t(pair.kv_head) * kBlock * D;
        ring.k = layer.k + slab, ring.v = layer.v + slab;
        ring.ids = ids, ring.ahead = ahead;
        fetch(0);
    }

    // Copies write where this warp and others have read and written.
    __device__ __forceinline__ void fetch(uint32_t n) {
        fence_shared_for_async();
        __syncwarp();
        if (n < ring.count) ring.fetch(n);
    }

    // Normalises and rotates the queries of the projection with `flag`, and, with the row's last KV block, the new key;
    // copies the value. Waits for both even if they are in the cache already: whoever has the attended values of all
    // rows knows that no block still reads the residual stream.
    __device__ void stage(uint32_t flag) {
        constexpr int kItems = (8 + kWarps) / kWarps; // heads of a warp: queries, then the key
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, items = pair.group + last;
        uint32_t heads = pair.kv_heads * pair.group;
        const uint64_t *token = flagged.qkv + size_t(pair.token0) * (heads + 2 * pair.kv_heads) * (D / 2);
        const uint64_t *q = token + pair.kv_head * pair.group * (D / 2), *k = token + (heads + pair.kv_head) * (D / 2);
        Pairs<D> x[kItems];
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            uint32_t item = min(warp + j * kWarps, items - 1);
            x[j] = await_head<D>(item < pair.group ? q + item * (D / 2) : k, flag);
        }
        // Columns without a query: as in attention/decode.cuh.
        for (uint32_t i = pair.group * (D / 8) + threadIdx.x; i < D; i += kConsumers)
            *reinterpret_cast<uint4 *>(scratch.q + query_vector<1>(i / (D / 8), i % (D / 8))) = make_uint4(0, 0, 0, 0);
        if (last && warp == kWarps - 1) {
            static_assert(D == 128, "four elements a lane");
            uint2 value[1];
            await_quads<1>(value, flag, [&](int) { return k + pair.kv_heads * (D / 2) + 2 * lane; });
            *reinterpret_cast<uint2 *>(scratch.fresh[1] + 4 * lane) = value[0];
        }
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
            uint32_t item = warp + j * kWarps;
            if (item >= items) break;
            bool query = item < pair.group;
            Pairs<D> y = norm_rope<D>(x[j], select(query, q_norm, k_norm), angles, step.eps);
            bf16 *to = query ? scratch.q : scratch.fresh[0];
#pragma unroll
            for (int p = 0; p < D / 64; ++p) {
                uint32_t low = lane + 32 * p, high = low + D / 2;
                to[query ? query_vector<1>(item, low / 8) + low % 8 : low] = __float2bfloat16_rn(y.low[p]);
                to[query ? query_vector<1>(item, high / 8) + high % 8 : high] = __float2bfloat16_rn(y.high[p]);
            }
        }
        consumers_sync();
    }

    // The projection has `flag`; the attended values get the next.
    __device__ void run(const Layer &layer, uint32_t flag) {
        if (pair.splits == 0) return;
        stage(flag);
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, newest = pair.kv_len - 1;
        uint32_t first = uint32_t(ring.table - step.block_tables) - pair.row * step.max_blocks;
        uint4 q[1][D / 32];
        Partial<D, 1> partial = {};
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
            q[0][c] = load_matrices(scratch.q + query_vector<1>(lane % 8, 4 * c + lane / 8));
#pragma unroll
        for (int j = 0; j < 2; ++j) partial.max[0][j] = -INFINITY, partial.last[0][j] = newest;
        const bf16(*added)[D] = fresh ? scratch.fresh : nullptr;
        Slab<D> *tile = scratch.kv[warp][0];
        for (uint32_t n = 0; n < ring.count; ++n) {
            uint32_t token = (first + n * kWarps) * kBlock, weights[1][2];
            wait(ring.barriers, (fetched + n) % 2);
            bool end = token + kBlock >= pair.kv_len;
            if (end) complete_tile<D, 0, 1>(tile, newest - token, added, layer.k + newest_slab, layer.v + newest_slab);
            weigh<D, 1>(weights, partial, q, tile[0], token, end, step.scale);
            add_values<D, 1>(partial, weights, tile[1]);
            if (n + 1 < ring.count) fetch(n + 1);
        }
        fetched += ring.count;
        __syncwarp();
        store_partial<D, 1>(partial, reinterpret_cast<float *>(scratch.kv[warp]), pair.columns);
        consumers_sync();
        finish(flag + 1);
    }

    // Merges the partial softmaxes of the warps; the last block of the pair to arrive merges those of the blocks.
    __device__ void finish(uint32_t flag) {
        constexpr uint32_t kVectors = D / 4, kStride = sizeof(scratch.kv[0]) / sizeof(float), kPartial = 8 * (D + 4);
        const float *warps = reinterpret_cast<const float *>(scratch.kv);
        size_t index = size_t(pair.kv_head) * place.items + place.item - pair.split; // of the pair's first block
        float *partials = step.partials + index * kPartial;
        for (uint32_t i = threadIdx.x; i < pair.columns * kVectors; i += kConsumers) {
            uint32_t column = i / kVectors, vector = i % kVectors;
            const float *from = warps + column * (D + 4);
            float4 o[1];
            float2 total = merge_partials<kWarps>(o, from + D, kStride, from + 4 * vector, 0, kStride, kWarps);
            if (pair.splits == 1) {
                output(column, vector, o[0], total.y, flag);
                continue;
            }
            float *to = partials + pair.split * kPartial + column * (D + 4);
            *reinterpret_cast<float4 *>(to + 4 * vector) = o[0];
            if (vector == 0) *reinterpret_cast<float2 *>(to + D) = total;
        }
        if (pair.splits == 1) return;
        consumers_sync();
        if (threadIdx.x == 0) scratch.arrived = arrive_last(step.arrived + index, pair.splits);
        consumers_sync();
        if (!scratch.arrived) return;
        for (uint32_t i = threadIdx.x; i < pair.columns * kVectors; i += kConsumers) {
            uint32_t column = i / kVectors, vector = i % kVectors;
            const float *from = partials + column * (D + 4);
            float4 o[1];
            float2 total = merge_partials<16>(o, from + D, kPartial, from + 4 * vector, 0, kPartial, pair.splits);
            output(column, vector, o[0], total.y, flag);
        }
    }

    __device__ void output(uint32_t column, uint32_t vector, float4 o, float sum, uint32_t flag) const {
        float inverse = __fdividef(1.f, sum);
        uint64_t *to = flagged.attended + (pair.head(column) * D + 4 * vector) / 2;
        store_flagged(to, narrow(o.x * inverse, o.y * inverse), flag);
        store_flagged(to + 1, narrow(o.z * inverse, o.w * inverse), flag);
    }
};
#endif
