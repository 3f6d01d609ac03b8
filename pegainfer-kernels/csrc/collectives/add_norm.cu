// The end of a block on several ranks, in one launch: all-reduce, residual add and RMS norm, and rounding to FP8.
//
//   residual += bf16(Σ_r partial_r);  out = bf16(bf16(residual * rsqrt(mean(residual²) + eps)) * weight)
//
//   reduce_add_norm_ll:   a flag in each word           a row a cluster of one, two or four blocks; few rows
//   reduce_add_norm_rows: a flag for a part of some rows rows a block, pushed by warps of their own; any number of rows
//
// partial, residual: [rows, hidden] bf16, hidden a multiple of 8; weight: [hidden] bf16 or f32; out: [rows, hidden],
// csrc/common/activation.cuh. A thread has a vector of a row, as in csrc/rows/norm.cu, and squares are added in the
// same order: both kernels, and an all-reduce with that norm after it, give the same bits. Sums are f32 in rank order.
//
// Technique: one-shot all-reduce by pushes to peers with the norm in its epilogue (TensorRT-LLM, FlashInfer).
// Protocol: exchange.cuh. In reduce_add_norm_rows, the warps that push never wait: rows travel while the others
// normalise those that have come. Bounds: 1.2 us for a store to be seen by a peer and 370 GB/s a direction between
// H200s. Reference: src/cpu/norm.rs, pegainfer-core/src/parallel/local.rs.
#include "collectives/exchange.cuh"
#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/cluster.cuh"
#include "common/row_norm.cuh"

#include "abi/collectives_add_norm.h"

constexpr uint32_t kPushWarps = kPushThreads / 32;

// A thread's vector of a row, and what the norm needs of it.
template <typename W> struct RowNorm {
    ActivationOut out;
    uint32_t hidden, vector; // vector: its number in the row
    float eps;
    bool inside;
    NormWeights<W> weights;

    __device__ RowNorm(const W *weight, const ActivationOut &out, uint32_t hidden, float eps, uint32_t vector)
        : out(out), hidden(hidden), vector(vector), eps(eps), inside(kVector * vector < hidden) {
        if (inside) weights.load(weight + kVector * vector);
    }

    __device__ uint32_t width() const { return hidden / kVector; }    // in vectors
    __device__ uint32_t warps() const { return (width() + 31) / 32; } // of a row

    // The warp's part of the sum of squares.
    __device__ float squares(uint4 x) const { return warp_sum(inside ? sum_squares(x) : 0.f); }

    // Normalises a row of which this thread has `x`. `partials`: the sums of squares of the warps of the row.
    __device__ void write(uint32_t row, uint4 x, const float *partials) const {
        float squares = warp_sum(threadIdx.x % 32 < warps() ? partials[threadIdx.x % 32] : 0.f);
        float scale = inverse_rms(squares, hidden, eps);
        out.store8(row, kVector * vector, inside ? weights.times(x, scale) : make_uint4(0, 0, 0, 0), inside);
    }
};

// The sums of squares of the warps of a row, exchanged by the blocks of its cluster. Stores that carry their arrival
// need no fence, which would wait for the stores to the peers.
struct RowSums {
    float partials[32];
    uint64_t arrived;

    // All threads of all blocks call it, before the first waits.
    __device__ void begin() {
#if __CUDA_ARCH__ >= 900
        if (cluster_blocks() == 1) return;
        if (threadIdx.x == 0) {
            barrier_init(&arrived, 1);
            barriers_ready();
            arrive_expecting(&arrived, cluster_blocks() * blockDim.x / 32 * sizeof(float));
        }
        __syncwarp();
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
    // Sends the sum of this warp, whose number in the row is `warp`, and waits for all.
    __device__ void exchange(float squares, uint32_t warp) {
        const uint32_t lane = threadIdx.x % 32;
        if (cluster_blocks() == 1) { // also where there are no clusters, and a launch without them has no st.async
            if (lane == 0) partials[warp] = squares;
            return __syncthreads();
        }
#if __CUDA_ARCH__ >= 900
        if (lane < cluster_blocks())
            asm volatile("{\n\t.reg .b32 to, barrier;\n\t"
                         "mapa.shared::cluster.u32 to, %0, %2;\n\t"
                         "mapa.shared::cluster.u32 barrier, %1, %2;\n\t"
                         "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %3, [barrier];\n\t}" ::"r"(
                             shared_address(partials + warp)),
                         "r"(shared_address(&arrived)), "r"(lane), "f"(squares)
                         : "memory");
        wait(&arrived, 0);
#endif
    }
};

// The row of the cluster, if there is one.
template <int kRanks, typename W>
__device__ __forceinline__ void reduce_add_norm_ll(Exchange<kRanks> exchange, const RowNorm<W> &norm, RowSums &sums,
                                                   const bf16 *partial, bf16 *residual, uint32_t first, uint32_t rows) {
    const uint32_t row = blockIdx.x / cluster_blocks();
    if (row < rows) {
        const uint32_t i = row * norm.width() + norm.vector;
        uint4 own = make_uint4(0, 0, 0, 0), before = own;
        if (norm.inside) own = load16(partial + kVector * i), before = load16(residual + kVector * i);
        const uint2 low = make_uint2(own.x, own.y), high = make_uint2(own.z, own.w);
        // Each half of 32 vectors is contiguous, so that the stores of a warp are.
        const uint32_t at = i / 32 * 128 + i % 32 * 2;
        Parts<kRanks> parts;
        uint32_t waits = 0; // for these sources
#pragma unroll
        for (int q = 0; q < kRanks; ++q) {
            parts.of[q] = own;
            if (!norm.inside || !exchange.is_peer(q)) continue;
            uint64_t *words = exchange.words(exchange.to[q]) + at;
            store_tagged(words, low, exchange.tag), store_tagged(words + 64, high, exchange.tag);
            waits |= 1u << q;
        }
        uint64_t deadline = 0;
        exchange.agree();
        for (uint32_t polls = 1; !exchange.failed; ++polls) {
#pragma unroll
            for (int q = 0; q < kRanks; ++q) {
                if (!(waits >> q & 1)) continue;
                const uint64_t *words = exchange.words(exchange.mailbox(q)) + at;
                uint2 a, b;
                bool has_both = load_tagged(words, a, exchange.tag) & load_tagged(words + 64, b, exchange.tag);
                if (has_both) parts.of[q] = make_uint4(a.x, a.y, b.x, b.y), waits &= ~(1u << q);
            }
            if (!__any_sync(kAllLanes, waits != 0)) break;
            if (polls % kPollsPerCheck == 0) exchange.gives_up(__reduce_or_sync(kAllLanes, waits), deadline);
        }
        uint4 x = add8(parts.template sum<bf16>(exchange.ranks), before);
        if (norm.inside) *reinterpret_cast<uint4 *>(residual + kVector * i) = x;
        sums.exchange(norm.squares(x), norm.vector / 32);
        norm.write(first + row, x, sums.partials);
    }
    exchange.end();
}

// The rows of a block: blockIdx.x and each gridDim.x further, in groups. A flag tells of a part of a group, because it
// takes as long as several rows until all stores before it are there.
struct Rows {
    static constexpr uint32_t kMaxGroup = 4;
    uint32_t count, width, group; // width: vectors of a row; group: rows

    __device__ Rows(uint32_t count, uint32_t width)
        : count(count), width(width), group(min(max(count / gridDim.x / 2, 1u), kMaxGroup)) {}

    // Whether a row, the n-th of the block, begins or ends a group.
    __device__ bool begins(uint32_t n) const { return n % group == 0; }
    __device__ bool ends(uint32_t row, uint32_t n) const { return begins(n + 1) || row + gridDim.x >= count; }
    // The flag of a part of the group of the n-th row of the block.
    __device__ uint32_t flag(uint32_t n, uint32_t part) const {
        return (n / group * gridDim.x + blockIdx.x) * kPushWarps + part;
    }
};

// Pushes part `warp` of each row of the block. The next row is fetched before a flag waits for the stores before it.
template <int kRanks>
__device__ __forceinline__ void push_rows(const Exchange<kRanks> &exchange, uint32_t warp, const uint4 *partial,
                                          const Rows &rows) {
    constexpr int kLoads = (kRowThreads - kPushThreads) / kPushThreads; // of a lane and row
    const uint32_t lane = threadIdx.x % 32, width = rows.width, part = (width + kPushWarps - 1) / kPushWarps;
    const uint32_t begin = warp * part + lane, end = min((warp + 1) * part, width);
    uint4 v[kLoads];
    auto each = [&](auto f) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            if (begin + 32 * j < end) f(v[j], begin + 32 * j);
    };
    auto fetch = [&](uint32_t row) {
        if (row < rows.count) each([&](uint4 &v, uint32_t i) { v = partial[row * width + i]; });
    };
    fetch(blockIdx.x);
    for (uint32_t row = blockIdx.x, n = 0; row < rows.count; row += gridDim.x, ++n) {
        each([&](const uint4 &v, uint32_t i) { push(exchange, v, row * width + i); });
        fetch(row + gridDim.x);
        if (!rows.ends(row, n)) continue;
        __syncwarp();
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (lane == q && exchange.is_peer(q))
                store_release(exchange.row_flag(exchange.to[q], rows.flag(n, warp)), exchange.tag);
    }
}

template <int kRanks, typename W>
__device__ __forceinline__ void reduce_add_norm_rows(Exchange<kRanks> exchange, const RowNorm<W> &norm,
                                                     const bf16 *partial, bf16 *residual, uint32_t first,
                                                     uint32_t count) {
    __shared__ float partials[2][32]; // alternate rows
    const Rows rows(count, norm.width());
    const uint32_t warps = norm.warps(), warp = threadIdx.x / 32;
    if (warp >= warps) {
        push_rows(exchange, warp - warps, reinterpret_cast<const uint4 *>(partial), rows);
        return exchange.end();
    }
    auto sync = [&] { asm volatile("bar.sync 1, %0;" ::"r"(32 * warps) : "memory"); }; // of the threads that normalise
    uint4 own = make_uint4(0, 0, 0, 0), before = own;
    auto fetch = [&](uint32_t row) {
        const uint32_t i = kVector * (row * rows.width + norm.vector);
        if (norm.inside && row < count) own = load16(partial + i), before = load16(residual + i);
    };
    auto await = [&](uint32_t row, uint32_t n) {
        if (warp != 0 || row >= count || !rows.begins(n)) return;
        const uint32_t q = threadIdx.x / kPushWarps, flag = rows.flag(n, threadIdx.x % kPushWarps);
        exchange.poll(exchange.is_peer(q) ? exchange.row_flag(exchange.mailbox(q), flag) : nullptr, q);
    };
    Parts<kRanks> parts;
    auto load = [&](uint32_t row) {
        if (norm.inside && row < count) parts.load(exchange, own, row * rows.width + norm.vector);
    };
    // What the next row needs is on its way while this one is normalised.
    fetch(blockIdx.x), await(blockIdx.x, 0), sync(), load(blockIdx.x);
    for (uint32_t row = blockIdx.x, n = 0; row < count; ++n) {
        const uint32_t next = row + gridDim.x;
        uint4 x = before;
        fetch(next);
        x = add8(parts.template sum<bf16>(exchange.ranks), x);
        if (norm.inside) *reinterpret_cast<uint4 *>(residual + kVector * (row * rows.width + norm.vector)) = x;
        float squares = norm.squares(x);
        if (threadIdx.x % 32 == 0) partials[n % 2][warp] = squares;
        await(next, n + 1), sync(), load(next);
        norm.write(first + row, x, partials[n % 2]);
        row = next;
    }
    exchange.end();
}
static_assert(kMaxRanks * kPushWarps == 32, "a lane polls a flag");

// For up to N ranks. Grid of _rows: a power of two, at most kMaxBlocks and one block a multiprocessor; threads: one a
// vector of a row, rounded up to whole warps, and kPushThreads. Grid of _ll: the same, of clusters, one at least a row;
// threads: the same without those that push, shared by the blocks of a cluster in whole warps.
#define PARAMETERS(W)                                                                                                  \
    const bf16 *partial, bf16 *residual, const W *weight, void *out, uint32_t padded, uint32_t hidden, float eps,      \
        uint32_t first, uint32_t rows, LINK
#define ROW_OFFSET size_t(first) * hidden
#define REDUCE_ADD_NORM(N, SUFFIX, W)                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads, 1) void reduce_add_norm_ll_##SUFFIX##_##N(PARAMETERS(W)) {    \
        release_successor();                                                                                           \
        __shared__ RowSums sums;                                                                                       \
        sums.begin();                                                                                                  \
        const uint32_t vector = block_rank() * blockDim.x + threadIdx.x;                                               \
        const RowNorm<W> norm(weight, {out, padded, hidden}, hidden, eps, vector);                                     \
        wait_for_predecessor();                                                                                        \
        EXCHANGE(N, kReduceAddNorm)                                                                                    \
        reduce_add_norm_ll(exchange, norm, sums, partial + ROW_OFFSET, residual + ROW_OFFSET, first, rows);            \
    }                                                                                                                  \
    extern "C" __global__ __launch_bounds__(kRowThreads, 1) void reduce_add_norm_rows_##SUFFIX##_##N(PARAMETERS(W)) {  \
        release_successor();                                                                                           \
        const RowNorm<W> norm(weight, {out, padded, hidden}, hidden, eps, threadIdx.x);                                \
        wait_for_predecessor();                                                                                        \
        EXCHANGE(N, kReduceAddNorm)                                                                                    \
        reduce_add_norm_rows(exchange, norm, partial + ROW_OFFSET, residual + ROW_OFFSET, first, rows);                \
    }
#define RANKS(N)                                                                                                       \
    REDUCE_ADD_NORM(N, bf16, bf16)                                                                                     \
    REDUCE_ADD_NORM(N, f32, float)
RANKS(2)
RANKS(4)
RANKS(8)
