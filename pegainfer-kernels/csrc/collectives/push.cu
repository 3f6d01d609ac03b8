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
// Every rank has an arena: a header, and a mailbox for each rank, to which only that rank writes. All that is waited
// for lies in the waiter's own arena.
//
// Why it is correct
// 1. Pairs. Grid and ranges depend on the shape alone, so block b of a rank needs from a peer only what block b of the
//   peer pushes, and that block pushes before it waits. Blocks of one GPU never wait for each other, and the grid is at
//   most one block a multiprocessor, so all blocks are resident and each one gets to push: blocks of kernels before it
//   end without it, and those of the next kernel start when all of its own have. One arena has one stream: its
//   collectives run one after the other, because each waits for the kernels before it before it reads the epoch.
// 2. Visible data. LL: a word of eight bytes carries four of data and the tag of its exchange, and is stored and loaded
//   at once (b64, relaxed, system scope; v2.b64 is two such accesses). A reader that sees the tag has the data. Blocks:
//   all threads store, __syncthreads, then one thread stores the flag with release at system scope, which covers the
//   stores of the block by cumulativity; the reader loads the flag with acquire at system scope, then __syncthreads,
//   then reads through the L2.
// 3. Reuse. The number of an exchange (its epoch) is counted in the header; all kinds of exchanges share it, and each
//   has one epoch a launch. Mailboxes have two halves; an exchange uses the half of its parity. Claim: when a rank
//   writes in epoch e + 1, no peer still reads what was written in epoch e - 1. Proof: the rank has completed e; it
//   waited there for something that every peer sends in e, so every peer has begun e, and so completed e - 1 on its
//   stream. What was written in e, which a peer may still read or wait for, is in the other half. A peer is never more
//   than one epoch ahead. Within an exchange, each place is written once: the two hops of two_shot have different flags
//   and different staging.
// 4. Stale words. Words and flags have places of their own, which hold nothing but tags or zero, and a tag is never
//   zero. Tags repeat after 2^31 exchanges: a word would have to be left alone for exactly as many to be taken for a
//   new one.
// 5. Counting. The header counts arrivals: each block adds kMaxBlocks / gridDim.x (a power of two) when all of its
//   threads have read the epoch, so a launch adds kMaxBlocks in all, and arrivals / kMaxBlocks is the same number for
//   each block however late it starts. A captured launch counts on with each replay.
// 6. Ends. Each wait ends when the time is over or the abort word is set (it is asked for once in kPollsPerCheck
//   polls). The first wait that ends so writes a record, sets the abort word, and marks the arena as failed: this
//   launch and all later ones go on with whatever is there, so that the streams drain. Results are then wrong, and the
//   host says so.
#include "common/base.cuh"
#include "limits.h"

#include "abi/collectives_push.h"

using namespace limits::collectives;

constexpr uint32_t kAllLanes = ~0u;

// What a rank keeps in front of its mailboxes.
struct Header {
    unsigned long long arrivals; // kMaxBlocks for each exchange
    unsigned long long failed;   // not zero: no wait makes sense any more
};
static_assert(sizeof(Header) <= kHeaderBytes, "the mailboxes follow");

__device__ __forceinline__ void store_release(uint32_t *to, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *from) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void store_host(uint32_t *to, uint32_t value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_host(const uint32_t *from) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
// Two words, each with its tag in the upper half.
__device__ __forceinline__ void store_tagged(uint64_t *to, uint2 data, uint32_t tag) {
    uint64_t a = uint64_t(tag) << 32 | data.x, b = uint64_t(tag) << 32 | data.y;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ bool load_tagged(const uint64_t *from, uint2 &data, uint32_t tag) {
    uint64_t a, b;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(from) : "memory");
    data = make_uint2(uint32_t(a), uint32_t(b));
    return uint32_t(a >> 32) == tag && uint32_t(b >> 32) == tag;
}
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

// One rank's view of the exchange that this launch is.
//
// A mailbox: flags [2 halves][2 hops][kMaxBlocks] u32; words [2 halves][kLlWords] u64; staging [2 halves][stage_bytes].
template <int kRanks> struct Exchange {
    uint32_t rank, ranks, op, stage_bytes;
    uint8_t *arena;
    uint8_t *to[kRanks]; // this rank's mailbox at each peer
    uint32_t *status;
    uint64_t timeout; // nanoseconds
    uint32_t tag = 0, half = 0;
    bool failed = false;

    // `to`: as many as kRanks.
    __device__ Exchange(uint32_t op, uint32_t rank, uint32_t ranks, uint64_t *arena, uint64_t *const (&to)[kMaxRanks],
                        uint32_t stage_bytes, uint32_t *status, uint64_t timeout)
        : rank(rank), ranks(ranks), op(op), stage_bytes(stage_bytes), arena(reinterpret_cast<uint8_t *>(arena)),
          status(status), timeout(timeout) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q) this->to[q] = reinterpret_cast<uint8_t *>(to[q]);
        const Header *header = reinterpret_cast<const Header *>(arena);
        uint64_t arrivals, failed;
        asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                     : "=l"(arrivals), "=l"(failed)
                     : "l"(header)
                     : "memory");
        uint32_t epoch = uint32_t(arrivals / kMaxBlocks);
        tag = epoch | 1u << 31, half = epoch % 2;
        this->failed = __any_sync(kAllLanes, failed != 0); // the same in all lanes, which wait together
    }

    // The block has nothing more to do.
    __device__ void end() const {
        __syncthreads();
        if (threadIdx.x == 0)
            asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(arena), "l"(uint64_t(kMaxBlocks / gridDim.x))
                         : "memory");
    }

    __device__ bool is_peer(uint32_t q) const { return q < ranks && q != rank; }

    __device__ uint8_t *mailbox(uint32_t source) const {
        return arena + kHeaderBytes + source * (uint64_t(kMailboxBytes) + 2 * uint64_t(stage_bytes));
    }
    __device__ uint32_t *flag(uint8_t *mailbox, uint32_t hop) const {
        return reinterpret_cast<uint32_t *>(mailbox) + (2 * half + hop) * kMaxBlocks + blockIdx.x;
    }
    __device__ uint64_t *words(uint8_t *mailbox) const {
        return reinterpret_cast<uint64_t *>(mailbox + kFlagBytes) + half * kLlWords;
    }
    __device__ uint4 *stage(uint8_t *mailbox, uint32_t hop = 0) const {
        return reinterpret_cast<uint4 *>(
            mailbox + kMailboxBytes + uint64_t(half) * stage_bytes + hop * (stage_bytes / 2));
    }

    // Whether a wait for the sources of `missing` (bits; equal in all lanes) has to end. All lanes of a warp call it.
    __device__ bool gives_up(uint32_t missing, uint64_t &deadline) {
        uint32_t over = 0;
        if (threadIdx.x % 32 == 0) {
            uint64_t now = nanoseconds();
            if (deadline == 0) deadline = now + timeout;
            bool late = now >= deadline;
            over = late || load_host(status) != 0;
            unsigned long long *mark = &reinterpret_cast<Header *>(arena)->failed;
            if (over && atomicExch(mark, 1ull) == 0 && late) {
                uint32_t *record = status + kRecordWords * (1 + rank);
                store_host(record + 1, op);
                store_host(record + 2, __ffs(missing) - 1);
                store_host(record + 3, tag & ~(1u << 31));
                __threadfence_system();
                store_host(record, 1);
                __threadfence_system();
                store_host(status, 1);
            }
        }
        return failed = __shfl_sync(kAllLanes, over, 0) != 0;
    }

    // Tells the peers that what this block has pushed to them is there.
    __device__ void publish(uint32_t hop) const {
        __syncthreads();
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (threadIdx.x == q && is_peer(q)) store_release(flag(to[q], hop), tag);
    }

    // Waits for what the same block of each peer pushes to this rank.
    __device__ void await(uint32_t hop) {
        if (threadIdx.x < 32 && !failed) {
            uint64_t deadline = 0;
            const uint32_t *at = is_peer(threadIdx.x) ? flag(mailbox(threadIdx.x), hop) : nullptr;
            for (uint32_t polls = 1;; ++polls) {
                bool waits = at && load_acquire(at) != tag;
                uint32_t missing = __ballot_sync(kAllLanes, waits);
                if (missing == 0) break;
                if (!waits) at = nullptr;
                if (polls % kPollsPerCheck == 0 && gives_up(missing, deadline)) break;
            }
        }
        __syncthreads();
    }
};

// Adds the vectors of the ranks in their order.
template <typename T> struct Sum {
    static constexpr int kCount = 16 / sizeof(T);
    float values[kCount];

    __device__ static void widened(uint4 v, float (&out)[kCount]) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(T) == 4) {
                out[i] = __uint_as_float(words[i]);
            } else {
                float2 pair = widen(words[i]);
                out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
            }
        }
    }
    __device__ void add(uint4 v, bool first) {
        float x[kCount];
        widened(v, x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i] = first ? x[i] : values[i] + x[i];
    }
    __device__ uint4 rounded() const {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(T) == 4) words[i] = __float_as_uint(values[i]);
            else words[i] = narrow(values[2 * i], values[2 * i + 1]);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

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

// The sum of a vector of x and of the same one in the staging of all peers.
template <int kRanks, typename T>
__device__ __forceinline__ uint4 staged_sum(const Exchange<kRanks> &exchange, uint4 own, uint32_t i) {
    uint4 parts[kRanks];
#pragma unroll
    for (int q = 0; q < kRanks; ++q) {
        parts[q] = own;
        if (exchange.is_peer(q)) parts[q] = __ldcg(exchange.stage(exchange.mailbox(q)) + i);
    }
    Sum<T> sum;
#pragma unroll
    for (int q = 0; q < kRanks; ++q)
        if (q < exchange.ranks) sum.add(parts[q], q == 0);
    return sum.rounded();
}

// Stores a vector to the staging of all peers.
template <int kRanks>
__device__ __forceinline__ void push(const Exchange<kRanks> &exchange, uint4 v, uint32_t i, uint32_t hop = 0) {
#pragma unroll
    for (int q = 0; q < kRanks; ++q)
        if (exchange.is_peer(q)) exchange.stage(exchange.to[q], hop)[i] = v;
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
struct Parts {
    uint4 *x;
    uint32_t part, first, count, alone;

    // Vector `i` of those that are exchanged, in part `q`.
    __device__ uint4 &at(uint32_t q, uint32_t i) const { return x[size_t(q) * part + first + i]; }
};

template <int kRanks, typename T>
__device__ __forceinline__ void reduce_scatter(Exchange<kRanks> exchange, const Parts &parts) {
    const Range range(parts.count);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (exchange.is_peer(q)) exchange.stage(exchange.to[q])[i] = parts.at(parts.alone ? exchange.rank : q, i);
    }
    exchange.publish(0);
    exchange.await(0);
#pragma unroll 2
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
        uint4 &own = parts.at(exchange.rank, i);
        own = staged_sum<kRanks, T>(exchange, own, i);
    }
    exchange.end();
}

template <int kRanks, typename>
__device__ __forceinline__ void all_gather_rows(Exchange<kRanks> exchange, const Parts &parts) {
    const Range range(parts.count);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads)
        push(exchange, parts.at(exchange.rank, i), i);
    exchange.publish(0);
    exchange.await(0);
#pragma unroll 4
    for (uint32_t i = range.begin + threadIdx.x; i < range.end; i += kThreads) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (exchange.is_peer(q)) parts.at(q, i) = __ldcg(exchange.stage(exchange.mailbox(q)) + i);
    }
    exchange.end();
}

#define EXCHANGE(N, OP)                                                                                                \
    uint64_t *const to[kMaxRanks] = {to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7};                                  \
    Exchange<N> exchange(OP, rank, ranks, arena, to, stage_bytes, status, timeout);
#define LINK                                                                                                           \
    uint32_t rank, uint32_t ranks, uint64_t *arena, uint64_t *to_0, uint64_t *to_1, uint64_t *to_2, uint64_t *to_3,    \
        uint64_t *to_4, uint64_t *to_5, uint64_t *to_6, uint64_t *to_7, uint32_t stage_bytes, uint32_t *status,        \
        uint64_t timeout

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
        NAME<N, T>(exchange, Parts{reinterpret_cast<uint4 *>(x), part, first, count, alone});                          \
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
