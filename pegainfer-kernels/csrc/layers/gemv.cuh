// The GEMVs of csrc/layers/decode.cu: out = x wᵀ for M rows of x, with x in shared memory and the weights on their way
// through a ring.
//
// Every block has an even share of the rows of each matrix. Warp specialisation: four producer warps do nothing but
// start bulk copies by the copy engine (TMA), through all GEMVs of all layers: while the block waits for x, the ring
// fills with the weights of the next GEMV. (Copies of a whole run of a row read 4.6 TB/s on an H200, where 16 bytes a
// thread read 4.2.) Eight consumer warps multiply, each with an eighth of the columns of every stage; their partial
// sums meet in shared memory.
#pragma once
#include "layers/ll.cuh"
#include "limits.h"

using namespace limits::decode_layers;

// Stages of 8 rows whose copies are under way, while the block multiplies and while it waits for x: more delay the
// words that blocks wait for.
constexpr uint32_t kInFlight = 3, kInFlightWaiting = 1;
constexpr uint32_t kGroups = kStageColumns / 32 / kWarps; // of 32 columns, of a warp in a stage

#if __CUDA_ARCH__ >= 900
// A barrier of the consumer warps.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

// The block's share of a GEMV: `out` results for each row of x from result `first` on, which are sums of `rows` rows
// of w. Gated: the rows of the gate, then those of up, which are `n` rows further in w. Columns come in equal chunks.
struct Gemv {
    const bf16 *w;
    uint32_t n, k, first, out, rows, chunks, chunk;

    __device__ Gemv(const bf16 *w, uint32_t n, uint32_t k, bool gated) : w(w), n(n), k(k) {
        first = n / 2 * blockIdx.x / gridDim.x * 2; // pairs, which make a word
        out = n / 2 * (blockIdx.x + 1) / gridDim.x * 2 - first;
        rows = gated ? 2 * out : out;
        chunks = (k + kStageColumns - 1) / kStageColumns;
        chunk = (k / 32 + chunks - 1) / chunks * 32;
    }
    __device__ const bf16 *row(uint32_t r) const { return w + size_t(r < out ? first + r : n + first + r - out) * k; }
    __device__ uint32_t width(uint32_t c) const { return min(chunk, k - c * chunk); }
    __device__ uint32_t padded_rows() const { return (rows + kStageRows - 1) / kStageRows * kStageRows; }
};

enum Projection { kQkv, kOutput, kGateUp, kDown };

template <int D> __device__ __forceinline__ Gemv gemv_of(const Step &step, const Layer &layer, uint32_t i) {
    switch (i) {
    case kQkv: return Gemv(layer.qkv, (step.heads + 2 * step.kv_heads) * D, step.hidden, false);
    case kOutput: return Gemv(layer.o, step.hidden, step.heads * D, false);
    case kGateUp: return Gemv(layer.gate_up, step.intermediate, step.hidden, true);
    default: return Gemv(layer.down, step.hidden, step.intermediate, false);
    }
}

// Stages of 8 rows and up to kStageColumns columns. `full` completes when the copies of all producers are there,
// `empty` when all threads that compute have read them: each arrives for itself, so that racecheck can follow. The
// phases of the barrier `phases` are alternately waiting for x and computing, a hint to producers that may be seen
// late.
struct WeightRing {
    uint64_t *full, *empty; // [kMaxStages]
    uint8_t *bytes;         // [stages, kStageRows, kPitch]
    uint32_t stages;
    uint64_t *phases;
};

// One of the threads that start copies, of rows `sub` and `sub` + kProducers of each stage.
struct Producer {
    const WeightRing &ring;
    uint32_t sub;
    RingCursor next, oldest; // the oldest whose copies may be under way
    uint32_t flying = 0;     // stages from it on, at most

    __device__ void run(const Gemv &p) {
        constexpr uint32_t kEach = kStageRows / kProducers;
        for (uint32_t row = sub; row < p.rows + sub; row += kStageRows) {
            const bf16 *from[kEach];
            uint32_t mine = 0;
#pragma unroll
            for (uint32_t j = 0; j < kEach; ++j) {
                bool has = row + j * kProducers < p.rows;
                from[j] = p.row(has ? row + j * kProducers : 0), mine += has;
            }
            // As many bytes of stages with fewer rows; never the whole ring, whose parities would be ambiguous.
            uint32_t most = min(kInFlight * kStageRows / min(p.rows - (row - sub), kStageRows), ring.stages - 1);
            for (uint32_t c = 0; c < p.chunks; ++c) {
                uint32_t allowed = phase_over(ring.phases, 0) ? most : kInFlightWaiting;
                for (; flying >= allowed; --flying) {
                    wait(ring.full + oldest.index, oldest.parity);
                    oldest.next(ring.stages);
                }
                ++flying;
                uint32_t bytes = p.width(c) * sizeof(bf16);
                wait(ring.empty + next.index, next.parity ^ 1);
                arrive_expecting(ring.full + next.index, mine * bytes);
                uint8_t *to = ring.bytes + next.index * kStageBytes + sub * kPitch;
#pragma unroll
                for (uint32_t j = 0; j < kEach; ++j) {
                    if (j < mine) copy_bulk(to + j * kProducers * kPitch, from[j], bytes, ring.full + next.index);
                    from[j] += p.chunk;
                }
                next.next(ring.stages);
            }
        }
    }
};

// The consumer warps: x to shared memory, the sums of a GEMV, and its results.
template <int M> struct GemvConsumer {
    const WeightRing &ring;
    uint8_t *x;  // [M, k bf16 and kInputPad bytes]
    float *sums; // [kWarps, M, rows of the GEMV in whole stages]
    RingCursor next;
    bool computing = true; // or about to: the first GEMV's weights may come before x does
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __device__ uint2 *input(uint32_t row, uint32_t k, uint32_t quad) const {
        return reinterpret_cast<uint2 *>(x + row * (2 * k + kInputPad) + 8 * quad);
    }

    // x = the values of an exchange, [M, k]
    __device__ void stage(const uint64_t *flagged, uint32_t k, uint32_t flag) const {
        constexpr int kBatch = 5; // loads under way
        await_first(flagged, k, flag);
        for (uint32_t row = 0; row < M; ++row)
            for (uint32_t first = threadIdx.x; first < k / 4; first += kBatch * kConsumers) {
                uint2 v[kBatch];
                const uint64_t *from = flagged + (size_t(row) * k + 4 * first) / 2;
                auto inside = [&](int i) { return first + i * kConsumers < k / 4; };
                await_quads<kBatch>(v, flag, [&](int i) { return inside(i) ? from + 2 * i * kConsumers : nullptr; });
#pragma unroll
                for (int i = 0; i < kBatch; ++i)
                    if (inside(i)) *input(row, k, first + i * kConsumers) = v[i];
            }
        consumers_sync();
    }

    // sums = x wᵀ, a partial sum from each warp
    __device__ void compute(const Gemv &p) {
        if (threadIdx.x == 0 && !computing) arrive(ring.phases);
        uint32_t pad = p.padded_rows();
        const uint8_t *columns = x + lane / 4 * (2 * p.k + kInputPad) + lane % 4 * 16 + warp * 64;
#pragma unroll 1
        for (uint32_t row = 0; row < pad; row += kStageRows) {
            Accumulator d[4] = {}; // mma that do not wait for each other
            const uint8_t *in = columns;
#pragma unroll 1
            for (uint32_t c = 0; c < p.chunks; ++c, in += 2 * p.chunk) add_stage(d, in, p.width(c) / 32);
            if (lane / 4 < M)
                *reinterpret_cast<float2 *>(sums + (warp * M + lane / 4) * pad + row + Accumulator::column(lane, 0)) =
                    make_float2((d[0][0] + d[1][0]) + (d[2][0] + d[3][0]), (d[0][1] + d[1][1]) + (d[2][1] + d[3][1]));
        }
        if (threadIdx.x == 0) arrive(ring.phases);
        computing = false;
        consumers_sync();
    }

    // Adds a stage of `groups` groups of 32 columns. Rows of x are the rows of operand A, rows of w the columns
    // of operand B.
    __device__ __forceinline__ void add_stage(Accumulator (&d)[4], const uint8_t *in, uint32_t groups) {
        uint4 w[kGroups], v[kGroups];
        const uint8_t *at = ring.bytes + next.index * kStageBytes + lane / 4 * kPitch + lane % 4 * 16 + warp * 64;
        wait(ring.full + next.index, next.parity);
#pragma unroll
        for (uint32_t j = 0; j < kGroups; ++j) {
            bool inside = warp + kWarps * j < groups;
            w[j] = v[j] = make_uint4(0, 0, 0, 0);
            if (inside) w[j] = *reinterpret_cast<const uint4 *>(at + 64 * kWarps * j);
            if (inside && lane / 4 < M) v[j] = *reinterpret_cast<const uint4 *>(in + 64 * kWarps * j);
        }
#pragma unroll
        for (uint32_t j = 0; j < kGroups; ++j) {
            mma(d[2 * j % 4], make_uint4(v[j].x, 0, v[j].y, 0), w[j].x, w[j].y);
            mma(d[(2 * j + 1) % 4], make_uint4(v[j].z, 0, v[j].w, 0), w[j].z, w[j].w);
        }
        arrive(ring.empty + next.index);
        next.next(ring.stages);
    }

    // Row `row` of the block's rows of w with row `token` of x.
    __device__ float sum(const Gemv &p, uint32_t token, uint32_t row) const {
        const float *from = sums + token * p.padded_rows() + row;
        float s = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) s += from[w * M * p.padded_rows()];
        return s;
    }

    // Tells all blocks value(row of x, result of the block) of all results.
    template <typename F>
    __device__ void publish(const Gemv &p, uint64_t *flagged, uint32_t flag, const F &value) const {
        for (uint32_t i = threadIdx.x; i < M * p.out / 2; i += kConsumers) {
            uint32_t token = i / (p.out / 2), r = 2 * (i - token * (p.out / 2));
            uint64_t *to = flagged + (size_t(token) * p.n + p.first + r) / 2;
            store_flagged(to, narrow(value(token, r), value(token, r + 1)), flag);
        }
    }
};
#endif
