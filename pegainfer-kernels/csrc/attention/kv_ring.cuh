// The ring of stages in shared memory through which KV blocks reach a warp of decode attention: bulk copies by the copy
// engine (TMA) with an mbarrier a stage from compute capability 9.0 on, else cp.async with a group a stage.
#pragma once
#include "common/async.cuh"
#include "attention/fp8_kv.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::attention;

// Keys or values of one head in a block of the cache.
template <int D, typename T = bf16> using Slab = T[slab_size<T>(D)];
// Slabs of a stage: of a KV block the keys and the values. Of large heads in bf16 one of them, so that as many blocks
// of threads fit a multiprocessor.
template <int D, typename T = bf16> constexpr int kSlabs = D > kLargeHead && sizeof(T) == sizeof(bf16) ? 1 : 2;
template <int D, typename T = bf16> using Stage = Slab<D, T>[kSlabs<D, T>];

// The KV blocks of one warp, `count` of them, one in `Warps` of its row's, on their way through its stages.
template <int D, int S, uint32_t Warps, typename T = bf16> struct KvRing {
    static constexpr uint32_t kStages = 2 / kSlabs<D, T>; // of a KV block
    Stage<D, T> *stages;
    uint64_t *barriers;
    const T *k, *v; // this KV head's slabs of block 0
    size_t stride;  // elements from one block's slab to the next block's
    const uint32_t *table;
    uint32_t count, blocks;
    uint32_t ids, ahead; // of 32 blocks, one a lane, and of the 32 after them

    __device__ uint32_t load_id(uint32_t n) const {
        n += threadIdx.x % 32;
        if (n >= count) return 0;
        uint32_t id = table[n * Warps];
        if (id >= blocks) __trap();
        return id;
    }

    // Before the first copies.
    __device__ void load_ids() { ids = load_id(0), ahead = load_id(32); }

    // Starts the copies that fill stage number n; called in order, by the whole warp.
    __device__ void fetch(uint32_t n) {
        uint32_t block = n / kStages;
        if (n > 0 && n % (32 * kStages) == 0) {
            ids = ahead;
            ahead = load_id(block + 32);
        }
        uint32_t id = __shfl_sync(kAll, ids, block % 32), stage = n % S;
        const T *first = (n % kStages == 0 ? k : v) + id * stride, *second = v + id * stride;
        constexpr uint32_t kBytes = sizeof(Slab<D, T>);
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 != 0) return;
        arrive_expecting(barriers + stage, kSlabs<D, T> * kBytes);
        copy_bulk(stages[stage][0], first, kBytes, barriers + stage);
        if constexpr (kStages == 1) copy_bulk(stages[stage][1], second, kBytes, barriers + stage);
#else
        constexpr uint32_t kElements = 16 / sizeof(T);
#pragma unroll
        for (uint32_t i = threadIdx.x % 32; i < kBytes / 16; i += 32) {
            copy16(stages[stage][0] + i * kElements, first + i * kElements);
            if constexpr (kStages == 1) copy16(stages[stage][1] + i * kElements, second + i * kElements);
        }
        copies_commit();
#endif
    }

    // Before the first copies.
    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        if (threadIdx.x % 32 < S) barrier_init(barriers + threadIdx.x % 32, 1);
        barriers_ready();
#endif
        __syncwarp();
    }

    // Stage number n has nothing to fetch. Without barriers every stage has a group of copies, which may be empty.
    __device__ void skip() {
#if __CUDA_ARCH__ < 900
        copies_commit();
#endif
    }

    // What came with stage number n.
    __device__ Slab<D, T> *await(uint32_t n) {
#if __CUDA_ARCH__ >= 900
        wait(barriers + n % S, n / S % 2);
#else
        copies_wait<S - 1>(); // groups S - 1 later than that of n were begun
        __syncwarp();
#endif
        return stages[n % S];
    }

    // Gives stage number n to the next copies.
    __device__ void refill(uint32_t n) {
        __syncwarp(); // all lanes have read it
        if (n + S < count * kStages) fetch(n + S);
        else skip();
    }
};
