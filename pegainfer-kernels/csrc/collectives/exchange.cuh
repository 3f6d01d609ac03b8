// Exchanges of the GPUs of one process, which write to each other's memory: arenas, mailboxes, waits, timeouts.
//
// Every rank has an arena: a header, and a mailbox for each other rank, to which only that rank writes. All that is
// waited for lies in the waiter's own arena.
//
// Why it is correct
// 1. Pairs. Grid and ranges depend on the shape alone, so block b of a rank needs from a peer only what block b of the
//   peer pushes, and that block pushes before it waits. Blocks of one GPU never wait for each other, and the grid is at
//   most one block a multiprocessor, so all blocks become resident, clusters too, and each one gets to push: blocks of
//   kernels before it end without it, and those of the next kernel start when all of its own have. One arena has one
//   stream: its collectives run one after the other, because each waits for the kernels before it before it reads the
//   epoch.
// 2. Visible data. LL: a word of eight bytes carries four of data and the tag of its exchange, and is stored and loaded
//   at once (b64, relaxed, system scope; v2.b64 is two such accesses). A reader that sees the tag has the data. Blocks:
//   all threads store, __syncthreads, then one thread stores the flag with release at system scope, which covers the
//   stores of the block by cumulativity; the reader loads the flag with acquire at system scope, then __syncthreads,
//   then reads through the L2. Rows: the same in a warp, with __syncwarp and a flag for the warp's part of one or more
//   rows.
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
#pragma once
#include "common/base.cuh"
#include "limits.h"

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
// A mailbox: flags [2 halves][2 hops][kMaxBlocks] u32; words [2 halves][kLlWords] u64; flags of rows [2
// halves][kRowFlags] u32; staging [2 halves][stage_bytes].
template <int kRanks> struct Exchange {
    uint32_t rank, ranks, op, stage_bytes;
    uint8_t *arena;
    uint8_t *to[kRanks]; // this rank's mailbox at each peer
    uint32_t *status;
    uint64_t timeout; // nanoseconds
    uint32_t tag = 0, half = 0;
    bool failed = false; // after `agree`: the same in all lanes of a warp, which wait together

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
        this->failed = failed != 0;
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
        return arena + kHeaderBytes +
               (source - (source > rank)) * (uint64_t(kMailboxBytes) + 2 * uint64_t(stage_bytes));
    }
    __device__ uint32_t *flag(uint8_t *mailbox, uint32_t hop) const {
        return reinterpret_cast<uint32_t *>(mailbox) + (2 * half + hop) * kMaxBlocks + blockIdx.x;
    }
    __device__ uint64_t *words(uint8_t *mailbox) const {
        return reinterpret_cast<uint64_t *>(mailbox + kFlagBytes) + half * kLlWords;
    }
    __device__ uint32_t *row_flag(uint8_t *mailbox, uint32_t i) const {
        return reinterpret_cast<uint32_t *>(mailbox + kFlagBytes + 2 * 8 * kLlWords) + half * kRowFlags + i;
    }
    __device__ uint4 *stage(uint8_t *mailbox, uint32_t hop = 0) const {
        return reinterpret_cast<uint4 *>(
            mailbox + kMailboxBytes + uint64_t(half) * stage_bytes + hop * (stage_bytes / 2));
    }

    // Begins a wait. Not in the constructor: what is loaded after it does not wait for the header.
    __device__ void agree() { failed = __any_sync(kAllLanes, failed); }

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

    // Waits in a warp until the flag at `at`, if any, is set by source `q`.
    __device__ void poll(const uint32_t *at, uint32_t q) {
        uint64_t deadline = 0;
        agree();
        for (uint32_t polls = 1; !failed; ++polls) {
            bool waits = at && load_acquire(at) != tag;
            uint32_t missing = __reduce_or_sync(kAllLanes, waits ? 1u << q : 0u);
            if (missing == 0) break;
            if (!waits) at = nullptr;
            if (polls % kPollsPerCheck == 0) gives_up(missing, deadline);
        }
    }

    // Waits for what the same block of each peer pushes to this rank.
    __device__ void await(uint32_t hop) {
        const uint32_t q = threadIdx.x;
        if (q < 32) poll(is_peer(q) ? flag(mailbox(q), hop) : nullptr, q);
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

// A vector of all ranks.
template <int kRanks> struct Parts {
    uint4 of[kRanks];

    // This rank's vector, and the same one in the staging of all peers.
    __device__ void load(const Exchange<kRanks> &exchange, uint4 own, uint32_t i) {
#pragma unroll
        for (int q = 0; q < kRanks; ++q) {
            of[q] = own;
            if (exchange.is_peer(q)) of[q] = __ldcg(exchange.stage(exchange.mailbox(q)) + i);
        }
    }
    template <typename T> __device__ uint4 sum(uint32_t ranks) const {
        Sum<T> sum;
#pragma unroll
        for (int q = 0; q < kRanks; ++q)
            if (q < ranks) sum.add(of[q], q == 0);
        return sum.rounded();
    }
};

// The sum of a vector of x and of the same one in the staging of all peers.
template <int kRanks, typename T>
__device__ __forceinline__ uint4 staged_sum(const Exchange<kRanks> &exchange, uint4 own, uint32_t i) {
    Parts<kRanks> parts;
    parts.load(exchange, own, i);
    return parts.template sum<T>(exchange.ranks);
}

// Stores a vector to the staging of all peers.
template <int kRanks>
__device__ __forceinline__ void push(const Exchange<kRanks> &exchange, uint4 v, uint32_t i, uint32_t hop = 0) {
#pragma unroll
    for (int q = 0; q < kRanks; ++q)
        if (exchange.is_peer(q)) exchange.stage(exchange.to[q], hop)[i] = v;
}

// Parameters of the link in a kernel, and the exchange that they make.
#define EXCHANGE(N, OP)                                                                                                \
    uint64_t *const to[kMaxRanks] = {to_0, to_1, to_2, to_3, to_4, to_5, to_6, to_7};                                  \
    Exchange<N> exchange(OP, rank, ranks, arena, to, stage_bytes, status, timeout);
#define LINK                                                                                                           \
    uint32_t rank, uint32_t ranks, uint64_t *arena, uint64_t *to_0, uint64_t *to_1, uint64_t *to_2, uint64_t *to_3,    \
        uint64_t *to_4, uint64_t *to_5, uint64_t *to_6, uint64_t *to_7, uint32_t stage_bytes, uint32_t *status,        \
        uint64_t timeout
