// All layers of a decode step of one or two rows in one launch (a megakernel), on Hopper: from the residual stream
// after the embedding to its value under the final norm.
//
// Qwen3's layers: heads of 128, at most 8 heads a KV head, hidden up to 4,096, bf16. Each op and its rounding are those
// of the separate kernels (csrc/rows/norm.cu, gemm/skinny_wgmma.cu, attention/decode.cuh). Techniques: cooperative
// persistent blocks; LL flag protocol between them (csrc/layers/ll.cuh); weights streamed across GEMVs and layers by
// bulk copies (csrc/layers/gemv.cuh); FlashDecoding split-KV (csrc/layers/attention.cuh). Bound by memory: 2.07 ms a
// step of Qwen3-4B at 1,100 tokens on an H200, where a chain of kernels takes 2.38 and the plain read of its 7.26 GB
// 1.63 (docs/benchmarks/h200-kernels.md). Reference: the ops' (src/cpu/linear, norm.rs, qkv.rs, attention, swiglu.rs).
//
// One block on every multiprocessor, all of them resident. A layer is five exchanges between them: queries, keys and
// values; attended values; the residual stream; the activated MLP; the residual stream. Each block computes its rows of
// the four GEMVs, and its split of attention. Every block computes the norms for itself.
//
// A chain of kernels loses about 13 us a layer of Qwen3-4B, while the memory is idle between a GEMV and the next. Every
// block reads all of x with its flags, twice its size, which is why the chain is faster from four rows on.
//
// The launch is cooperative: it fails, or all blocks are resident. The successor may start at once, because its blocks
// can become resident only after all of this kernel's have.
#include "layers/attention.cuh"

#if __CUDA_ARCH__ >= 900

// The block's statically allocated shared memory.
template <int M> struct Small {
    uint64_t full[kMaxStages], empty[kMaxStages], kv[kWarps], phases; // barriers
    float squares[M][kWarps];
    bf16 own[M][kMaxOwn]; // the residual stream, where the block adds to it
};

// kQuads: groups of four elements of a row that a thread normalises.
template <int M, int kQuads> struct Layers {
    const Step &step;
    Small<M> &small;
    GemvConsumer<M> consumer;
    const ExchangeBuffers<M, kHead> &flagged;
    uint32_t epoch; // exchanges so far

    // The weights of a norm for the thread's elements; fetched while the block waits for other things.
    using Scales = uint2[kQuads];
    __device__ void load_scales(Scales &scales, const bf16 *weight) const {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            uint32_t quad = threadIdx.x + i * kConsumers;
            if (4 * quad < step.hidden) scales[i] = reinterpret_cast<const uint2 *>(weight)[quad];
        }
    }

    // x = norm(residual stream), which is in memory before the first layer, then in the newest exchange.
    __device__ void stage_norm(const Scales &scales, bool from_memory, bf16 *out) {
        if (!from_memory) await_first(flagged.residual, step.hidden, epoch);
        uint2 rows[M][kQuads] = {};
        auto inside = [&](int i) { return 4 * (threadIdx.x + i * kConsumers) < step.hidden; };
#pragma unroll
        for (int t = 0; t < M; ++t) {
            const uint2 *memory = reinterpret_cast<const uint2 *>(step.residual + t * step.hidden) + threadIdx.x;
            const uint64_t *from = flagged.residual + t * step.hidden / 2 + 2 * threadIdx.x;
            if (from_memory) {
#pragma unroll
                for (int i = 0; i < kQuads; ++i)
                    if (inside(i)) rows[t][i] = memory[i * kConsumers];
            } else {
                await_quads(rows[t], epoch, [&](int i) { return inside(i) ? from + 2 * i * kConsumers : nullptr; });
            }
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < kQuads; ++i)
                if (inside(i)) squares += sum_squares(make_uint4(rows[t][i].x, rows[t][i].y, 0, 0));
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) small.squares[t][threadIdx.x / 32] = squares;
        }
        consumers_sync();
#pragma unroll
        for (int t = 0; t < M; ++t) {
            float squares = 0.f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) squares += small.squares[t][w];
            float scale = inverse_rms(squares, step.hidden, step.eps);
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                if (!inside(i)) continue;
                uint32_t quad = threadIdx.x + i * kConsumers;
                uint4 y = scaled(make_uint4(rows[t][i].x, rows[t][i].y, 0, 0), scale,
                                 make_uint4(scales[i].x, scales[i].y, 0, 0));
                *consumer.input(t, step.hidden, quad) = make_uint2(y.x, y.y);
                if (out && blockIdx.x == t)
                    reinterpret_cast<uint2 *>(out + t * step.hidden)[quad] = make_uint2(y.x, y.y);
            }
        }
        consumers_sync();
    }

    __device__ void load_own(const Gemv &p) {
        for (uint32_t i = threadIdx.x; i < M * p.out; i += kConsumers)
            small.own[i / p.out][i % p.out] = step.residual[i / p.out * step.hidden + p.first + i % p.out];
    }

    __device__ void project_qkv(const Layer &layer) {
        const Gemv p = gemv_of<kHead>(step, layer, kQkv);
        consumer.compute(p);
        consumer.publish(p, flagged.qkv, ++epoch, [&](uint32_t t, uint32_t r) { return consumer.sum(p, t, r); });
        consumers_sync(); // the sums are read: attention takes their place
    }

    // Adds a GEMV to the residual stream.
    __device__ void add(const Layer &layer, Projection projection, bool to_memory) {
        const Gemv p = gemv_of<kHead>(step, layer, projection);
        consumer.compute(p);
        consumer.publish(p, flagged.residual, ++epoch, [&](uint32_t t, uint32_t r) {
            bf16 &own = small.own[t][r];
            own = __float2bfloat16_rn(__bfloat162float(own) + round_bf16(consumer.sum(p, t, r)));
            if (to_memory) step.residual[t * step.hidden + p.first + r] = own;
            return __bfloat162float(own);
        });
    }

    __device__ void activate(const Layer &layer) {
        const Gemv p = gemv_of<kHead>(step, layer, kGateUp);
        consumer.compute(p);
        consumer.publish(p, flagged.activated, ++epoch, [&](uint32_t t, uint32_t r) {
            float gate = round_bf16(consumer.sum(p, t, r)), up = round_bf16(consumer.sum(p, t, p.out + r));
            return silu_times(gate, up);
        });
    }

    __device__ void run(Attention<M, kHead> &attention) {
        Scales scales = {};
        load_own(gemv_of<kHead>(step, step.layers[0], kOutput));
        load_scales(scales, step.layers[0].input_norm);
        for (uint32_t l = 0; l < step.n_layers; ++l) {
            const Layer &layer = step.layers[l];
            bool end = l + 1 == step.n_layers;
            stage_norm(scales, l == 0, nullptr);
            attention.load_norms(layer);
            project_qkv(layer);
            attention.begin(layer);
            attention.run(layer, epoch++);
            load_scales(scales, layer.post_norm);
            consumers_sync(); // attention is done with its scratch: x comes back
            consumer.stage(flagged.attended, step.heads * kHead, epoch);
            add(layer, kOutput, false);
            stage_norm(scales, false, nullptr);
            activate(layer);
            consumer.stage(flagged.activated, step.intermediate, epoch);
            add(layer, kDown, end);
            load_scales(scales, end ? step.final_norm : step.layers[l + 1].input_norm);
        }
        stage_norm(scales, false, step.normed);
    }
};

template <int M, int kQuads> __device__ void decode_layers(const Step &step) {
    extern __shared__ __align__(128) uint8_t raw[]; // the ring, then x and the sums, or the scratch of attention
    __shared__ Small<M> small;
    const WeightRing ring = {small.full, small.empty, raw, step.stages, &small.phases};
    uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < kMaxStages; ++i) {
            barrier_init(small.full + i, kProducers);
            barrier_init(small.empty + i, kConsumers);
        }
        for (int i = 0; i < kWarps; ++i) barrier_init(small.kv + i, 1);
        barrier_init(&small.phases, 1);
        barriers_ready();
        arrive(&small.phases);
    }
    release_successor();
    __syncthreads();
    if (warp >= kWarps) {
        if (threadIdx.x % 32 != 0) return;
        Producer producer = {ring, warp - kWarps};
        for (uint32_t l = 0; l < step.n_layers; ++l)
            for (uint32_t i = kQkv; i <= kDown; ++i) producer.run(gemv_of<kHead>(step, step.layers[l], i));
        return;
    }
    static_assert(sizeof(AttentionScratch<kHead>) == kAttentionBytes);
    uint8_t *x = raw + step.stages * kStageBytes;
    uint32_t widest = max(max(step.hidden, step.heads * kHead), step.intermediate);
    float *sums = reinterpret_cast<float *>(x + M * (2 * widest + kInputPad));
    const ExchangeBuffers<M, kHead> flagged(step);
    Attention<M, kHead> attention(step, *reinterpret_cast<AttentionScratch<kHead> *>(x), flagged, small.kv + warp);
    wait_for_predecessor();
    Layers<M, kQuads> layers = {step, small, {ring, x, sums}, flagged, step.epochs[blockIdx.x]};
    layers.run(attention);
    if (threadIdx.x == 0) step.epochs[blockIdx.x] = layers.epoch;
}
#endif

// Grid: one block a multiprocessor, at most hidden / 2, launched cooperatively; kConsumers + 32 kProducers threads. For
// M rows of up to WIDTH elements.
#define DECODE_LAYERS(M, WIDTH)                                                                                        \
    extern "C" __global__ __launch_bounds__(kConsumers + 32 * kProducers, 1) void decode_layers_##M##_##WIDTH(         \
        const __grid_constant__ Step step) {                                                                           \
        DECODE_LAYERS_BODY(M, WIDTH)                                                                                   \
    }
#if __CUDA_ARCH__ >= 900
#define DECODE_LAYERS_BODY(M, WIDTH) decode_layers<M, WIDTH / (4 * kConsumers)>(step);
#else
#define DECODE_LAYERS_BODY(M, WIDTH)
#endif
DECODE_LAYERS(1, 3072)
DECODE_LAYERS(2, 3072)
DECODE_LAYERS(1, 4096)
DECODE_LAYERS(2, 4096)
