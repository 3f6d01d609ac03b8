// Collectives of several GPUs of one process, which write to each other's memory (peer access, NVLink or PCIe):
//
//   all_reduce_ll:       x = Σ_r x_r, one hop, a flag in each word       one pair of words a thread; short messages
//   all_reduce_one_shot: the same, one hop, a flag for each block        a range of x a block
//   all_reduce_two_shot: the same, reduce-scatter and all-gather         a range of each rank's part of x a block
//   all_gather_columns:  whole[row] = part_0[row] | part_1[row] | ...    a range of the part a block
//   reduce_scatter:      part r of x = Σ_q part r of x_q on rank r       a range of a part a block
//   all_gather_rows:     part q of x = part q of x_q on all ranks        a range of a part a block
//
// x: [elements] f32 or bf16, in place, of the last two [ranks, part]; part: [rows, width] f32, whole: [rows, ranks *
// width] f32. Vectors are 16 bytes. Sums are f32, (x_0 + x_1) + x_2 ..., and rounded once: all ranks hold the same
// bits, and those of the CPU (pegainfer-core/src/parallel/local.rs). Techniques: NCCL's LL protocol; one-shot and
// two-shot all-reduce by pushes to peers (as in TensorRT-LLM and vLLM). Bounds: 1.2 us for a store to be seen by a peer
// and 370 GB/s a direction between H200s.
//
// Protocol, and why it is correct: exchange.cuh.
#include "collectives/exchange.cuh"

#include "abi/collectives_push.h"

template <int kRanks, typename T>
__device__ __forceinline__ void all_reduce_ll(Exchange<kRanks> exchange, T *x, uint32_t vectors) {
    uint2 *pairs = reinterpret_cast<uint2 *>(x); // half a vector each
    uint32_t i = blockIdx.x * kLlThreads + threadIdx.x;
    bool inside = i < 2 * vectors;
    uint2 parts[kRanks] = {};
    uint2 own = inside ? pairs[i] : make_uint2(0, 0);
#pragma unroll
    for (int q = 0; q < kRanks; ++q) {
        if (inside && exchange.is_peer(q)) store_tagged(exchange.words(exchange.to[q]) + 2 * i, own, exchange.tag);
        if (q == exchange.rank) parts[q] = own;
    }
    uint32_t waits = 0; // for these sources
#pragma unroll
    for (int q = 0; q < kRanks; ++q) waits |= uint32_t(inside && exchange.is_peer(q)) << q;
    uint64_t deadline = 0;
    exchange.agree();
    for (uint32_t polls = 1; !exchange.failed; ++polls) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q) {
            if (!(waits >> q & 1)) continue;
            if (load_tagged(exchange.words(exchange.mailbox(q)) + 2 * i, parts[q], exchange.tag)) waits &= ~(1u << q);
        }
        if (!__any_sync(kAllLanes, waits != 0)) break;
        if (polls % kPollsPerCheck == 0) exchange.gives_up(__reduce_or_sync(kAllLanes, waits), deadline);
    }
    Sum<T> sum;
#pragma unroll
    for (int q = 0; q < kRanks; ++q)
        if (q < exchange.ranks) sum.add(make_uint4(parts[q].x, parts[q].y, 0, 0), q == 0);
    uint4 rounded = sum.rounded();
    if (inside) pairs[i] = make_uint2(rounded.x, rounded.y);
    exchange.end();
}

// The block's range of `count`.
struct Range {
    uint32_t begin, end;
    __device__ explicit Range(uint32_t count) {
        uint32_t each = (count + gridDim.x - 1) / gridDim.x;
        begin = min(blockIdx.x * each, count), end = min(begin + each, count);
    }
};

template <int kRanks, typename T>
__device__ __forceinline__ void all_reduce_one_shot(Exchange<kRanks> exchange, T *x, uint32_t vectors) {
    uint4 *data = reinterpret_cast<uint4 *>(x);
    const Range range(vectors);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) push(exchange, data[i], i);
    exchange.publish(0);
    exchange.await(0);
#pragma unroll 2
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads)
        data[i] = staged_sum<kRanks, T>(exchange, data[i], i);
    exchange.end();
}

// Rank q owns part q of x; each part is as long as the first, but for the last ones. A block has a range of each part.
template <int kRanks, typename T>
__device__ __forceinline__ void all_reduce_two_shot(Exchange<kRanks> exchange, T *x, uint32_t vectors) {
    uint4 *data = reinterpret_cast<uint4 *>(x);
    const uint32_t part = (vectors + exchange.ranks - 1) / exchange.ranks;
    const Range range(part);
    const uint32_t each = range.end - range.begin, peers = exchange.ranks - 1;
    // The j-th vector of the block in the parts of the peers, beginning behind the own one: `f(peer, in its part, in
    // x)`.
    auto of_peers = [&](auto f) {
#pragma unroll 4
        for (uint32_t j = threadIdx.x; j < peers * each; j += kThreads) {
            uint32_t q = exchange.rank + 1 + j / each;
            if (q >= exchange.ranks) q -= exchange.ranks;
            uint32_t i = range.begin + j % each, at = q * part + i;
            if (at < vectors) f(q, i, at);
        }
    };
    of_peers([&](uint32_t q, uint32_t i, uint32_t at) {
        uint8_t *to = exchange.to[0];
#pragma unroll
        for (int k = 1; k < kRanks; ++k)
            if (k == q) to = exchange.to[k];
        exchange.stage(to)[i] = data[at];
    });
    exchange.publish(0);
    exchange.await(0);
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
        uint32_t at = exchange.rank * part + i;
        if (at >= vectors) break;
        uint4 sum = staged_sum<kRanks, T>(exchange, data[at], i);
        push(exchange, sum, i, 1);
        data[at] = sum;
    }
    exchange.publish(1);
    exchange.await(1);
    of_peers([&](uint32_t q, uint32_t i, uint32_t at) {
        data[at] = __ldcg(exchange.stage(exchange.mailbox(q), 1) + i);
    });
    exchange.end();
}

// Rows of `width` vectors.
template <int kRanks>
__device__ __forceinline__ void gather_columns(Exchange<kRanks> exchange, const float *part, float *whole,
                                               uint32_t rows, uint32_t width) {
    const uint4 *from = reinterpret_cast<const uint4 *>(part);
    uint4 *to = reinterpret_cast<uint4 *>(whole);
    const Range range(rows * width);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) push(exchange, from[i], i);
    exchange.publish(0);
    exchange.await(0);
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
        uint4 *row = to + size_t(i / width) * exchange.ranks * width + i % width;
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (q < exchange.ranks)
                row[q * width] = q == exchange.rank ? from[i] : __ldcg(exchange.stage(exchange.mailbox(q)) + i);
    }
    exchange.end();
}

// Parts of x, `part` vectors each, of which this launch exchanges `count` from vector `first` on. `alone`: what comes
// back as a peer's has to be this rank's own part.
struct Slices {
    uint4 *x;
    uint32_t part, first, count, alone;

    // Vector `i` of those that are exchanged, in part `q`.
    __device__ uint4 &at(uint32_t q, uint32_t i) const { return x[size_t(q) * part + first + i]; }
};

template <int kRanks, typename T>
__device__ __forceinline__ void reduce_scatter(Exchange<kRanks> exchange, const Slices &slices) {
    const Range range(slices.count);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (exchange.is_peer(q)) exchange.stage(exchange.to[q])[i] = slices.at(slices.alone ? exchange.rank : q, i);
    }
    exchange.publish(0);
    exchange.await(0);
#pragma unroll 2
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
        uint4 &own = slices.at(exchange.rank, i);
        own = staged_sum<kRanks, T>(exchange, own, i);
    }
    exchange.end();
}

template <int kRanks, typename>
__device__ __forceinline__ void all_gather_rows(Exchange<kRanks> exchange, const Slices &slices) {
    const Range range(slices.count);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads)
        push(exchange, slices.at(exchange.rank, i), i);
    exchange.publish(0);
    exchange.await(0);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (exchange.is_peer(q)) slices.at(q, i) = __ldcg(exchange.stage(exchange.mailbox(q)) + i);
    }
    exchange.end();
}

// For up to N ranks. Grid: a power of two, at most kMaxBlocks and one block a multiprocessor.
#define ALL_REDUCE(NAME, THREADS, N, SUFFIX, T)                                                                        \
    extern "C" __global__ __launch_bounds__(THREADS, 1) void NAME##_##SUFFIX##_##N(                                    \
        T *x, uint64_t first, uint32_t vectors, LINK) {                                                                \
        start_after_predecessor();                                                                                     \
        EXCHANGE(N, kAllReduce)                                                                                        \
        NAME<N, T>(exchange, x + first * (16 / sizeof(T)), vectors);                                                   \
    }
#define KINDS(N, SUFFIX, T)                                                                                            \
    ALL_REDUCE(all_reduce_ll, kLlThreads, N, SUFFIX, T)                                                                \
    ALL_REDUCE(all_reduce_one_shot, kThreads, N, SUFFIX, T)                                                            \
    ALL_REDUCE(all_reduce_two_shot, kThreads, N, SUFFIX, T)
#define OF_PARTS(NAME, OP, N, SUFFIX, T)                                                                               \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void NAME##_##SUFFIX##_##N(                                   \
        T *x, uint32_t part, uint32_t first, uint32_t count, uint32_t alone, LINK) {                                   \
        start_after_predecessor();                                                                                     \
        EXCHANGE(N, OP)                                                                                                \
        NAME<N, T>(exchange, Slices{reinterpret_cast<uint4 *>(x), part, first, count, alone});                         \
    }
#define RANKS(N)                                                                                                       \
    KINDS(N, f32, float)                                                                                               \
    KINDS(N, bf16, bf16)                                                                                               \
    OF_PARTS(reduce_scatter, kReduceScatter, N, f32, float)                                                            \
    OF_PARTS(reduce_scatter, kReduceScatter, N, bf16, bf16)                                                            \
    OF_PARTS(all_gather_rows, kAllGatherRows, N, f32, float)                                                           \
    OF_PARTS(all_gather_rows, kAllGatherRows, N, bf16, bf16)                                                           \
    extern "C" __global__ __launch_bounds__(kThreads, 1) void all_gather_columns_##N(                                  \
        const float *part, float *whole, uint32_t first, uint32_t rows, uint32_t width, LINK) {                        \
        start_after_predecessor();                                                                                     \
        EXCHANGE(N, kAllGather)                                                                                        \
        size_t at = size_t(first) * width * 4;                                                                         \
        gather_columns<N>(exchange, part + at, whole + ranks * at, rows, width);                                       \
    }
RANKS(2)
RANKS(4)
RANKS(8)
