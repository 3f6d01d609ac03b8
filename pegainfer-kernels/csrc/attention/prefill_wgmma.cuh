// What the warps of csrc/attention/prefill_wgmma.cu share, and its producer warps.
//
// A tile is 128 rows of queries (a row: one query, one head of a KV head's group) against the KV tiles that they see.
// Blocks draw tiles from a counter, the longest first. One warp draws, tells the others and fetches keys, one fetches
// values, and one for each consumer fetches queries; buffers go round between producers and consumers with two
// mbarriers each, full and empty. The cache's layout is the one that wgmma wants, so that keys and values come as bulk
// copies of 16 tokens by 128 bytes. Of a cache in FP8 the keys and values of the sequences lie widened to bf16 in the
// workspace, in the same layout (csrc/attention/widen_kv.cu).
#pragma once
#include "common/hopper.cuh"
#include "attention/query_tiles.cuh"
#include "common/math.cuh"
#include "limits.h"

using namespace limits::attention;
using namespace limits::prefill_wgmma;

// Of a thread after setmaxnreg: 128 * 56 + 256 * 224 of the 65,536 of a multiprocessor.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

template <int D> struct Sizes {
    // Tokens of a KV tile. A GEMM of 64 columns would want more of the shared memory than it gives.
    static constexpr int kTokens = D > 128 ? 80 : 128;
    static constexpr int kColumns = D / 64;                       // columns of 128 bytes
    static constexpr int kSlots = D == 64 ? 8 : D == 128 ? 5 : 4; // KV tiles, K or V, in flight
    static constexpr int kBuffers = D > 128 ? 1 : 2;              // tiles of queries in flight
    static constexpr int kSlab = int(kBlock) * D * 2;             // bytes of a KV block's keys, or values, of one head
    static constexpr int kColumnBytes = int(kBlock) * 128;        // bytes of a slab's column
    static constexpr int kPart = D > 128 ? 64 : D / 2;            // accumulators of a thread in one wgmma with V
    static constexpr int kParts = D / 2 / kPart;
};

template <int D> struct PrefillShared {
    using Size = Sizes<D>;
    uint8_t kv[Size::kSlots][Size::kColumns][Size::kTokens * 128];
    uint8_t q[Size::kBuffers][kConsumers][Size::kColumns][64 * 128];
    uint64_t kv_full[Size::kSlots], kv_empty[Size::kSlots];
    uint64_t q_full[Size::kBuffers][kConsumers], q_empty[Size::kBuffers][kConsumers];
    uint64_t tile_full[2], tile_empty[2];
    QueryTile tiles[2];
};
static_assert(sizeof(PrefillShared<64>) <= kShared64 && sizeof(PrefillShared<128>) <= kShared128);
static_assert(sizeof(PrefillShared<256>) <= kShared256);

// Tickets of a launch: the next tile, and how many blocks have drawn their last; the last one resets both.
__device__ uint32_t tickets[2];

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What fetches K or V, by a whole warp. The slabs of the next tile are looked up before they are needed.
template <int D, bool Values> struct Fetcher {
    using Size = Sizes<D>;
    static constexpr uint32_t kBlocks = Size::kTokens / kBlock;
    Ring<Size::kSlots> slot;
    uint32_t slab; // that lane i copies, of block i of the next tile

    // Looks up the slabs of a KV tile. A bad block stops the kernel.
    template <typename B>
    __device__ __forceinline__ void look_up(const B &batch, const QueryTile &tile, uint32_t index) {
        uint32_t block = index * kBlocks + threadIdx.x % 32 % kBlocks;
        if (block * kBlock >= tile.kv_len) return;
        slab = batch.slab(tile.first_block + block) + (tile.kv_head - batch.first_head());
    }

    // Copies the KV tile that was looked up, and looks up the one before it.
    template <typename B>
    __device__ __forceinline__ void fetch(PrefillShared<D> &shared, const bf16 *cache, const B &batch,
                                          const QueryTile &tile, uint32_t index) {
        uint32_t tokens = min(tile.kv_len - index * Size::kTokens, uint32_t(Size::kTokens));
        uint32_t whole = Values ? tokens / kBlock : (tokens + kBlock - 1) / kBlock; // blocks to copy as they are
        uint32_t now = slab;
        if (index > 0) look_up(batch, tile, index - 1);
        wait(&shared.kv_empty[slot.index], slot.parity ^ 1);
        if (Values && whole < kBlocks) fill(shared, cache, tokens, whole, now);
        uint32_t slabs[kBlocks];
#pragma unroll
        for (uint32_t i = 0; i < kBlocks; ++i) slabs[i] = __shfl_sync(kAll, now, i);
        // One lane copies them all: its addresses stay in uniform registers, while copies of several lanes would be
        // issued lane by lane. The others arrive for what they filled.
        uint64_t *full = &shared.kv_full[slot.index];
        if (elected()) {
            arrive_expecting(full, whole * Size::kSlab);
#pragma unroll
            for (uint32_t i = 0; i < kBlocks; ++i) {
                if (i >= whole) break;
                const uint8_t *from = reinterpret_cast<const uint8_t *>(cache) + size_t(slabs[i]) * Size::kSlab;
#pragma unroll
                for (int column = 0; column < Size::kColumns; ++column)
                    copy_bulk(shared.kv[slot.index][column] + i * Size::kColumnBytes,
                              from + column * Size::kColumnBytes, Size::kColumnBytes, full);
            }
        } else {
            arrive(full);
        }
        __syncwarp();
        slot.next();
    }

    // Values behind kv_len may be anything, and 0 * NaN is NaN: clears them, and copies the block that they begin in.
    __device__ void fill(PrefillShared<D> &shared, const bf16 *cache, uint32_t tokens, uint32_t whole, uint32_t now) {
        uint32_t last = __shfl_sync(kAll, now, whole);
        const uint8_t *from = reinterpret_cast<const uint8_t *>(cache) + size_t(last) * Size::kSlab;
        for (uint32_t i = threadIdx.x % 32; i < (kBlocks - whole) * (Size::kSlab / 16); i += 32) {
            uint32_t block = whole + i / (Size::kSlab / 16), at = i % (Size::kSlab / 16) * 16;
            uint32_t token = block * kBlock + at % Size::kColumnBytes / 128;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (token < tokens) v = *reinterpret_cast<const uint4 *>(from + at);
            uint8_t *to =
                shared.kv[slot.index][at / Size::kColumnBytes] + block * Size::kColumnBytes + at % Size::kColumnBytes;
            *reinterpret_cast<uint4 *>(to) = v;
        }
        fence_shared_for_async();
        __syncwarp();
    }
};

// Waits for the next tile and frees its place.
template <int D> __device__ __forceinline__ QueryTile next_tile(PrefillShared<D> &shared, Ring<2> &place) {
    wait(&shared.tile_full[place.index], place.parity);
    QueryTile tile = shared.tiles[place.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&shared.tile_empty[place.index]);
    place.next();
    return tile;
}

// Draws tiles, tells the others, and fetches keys. The ring has a tile's first keys, then keys and values in turn, then
// its last values.
template <int D, typename B> __device__ void fetch_keys(PrefillShared<D> &shared, const bf16 *k, const B &batch) {
    Fetcher<D, false> fetcher;
    Ring<2> place;
    uint32_t lane = threadIdx.x % 32, ticket = blockIdx.x;
    for (;; place.next()) {
        QueryTile tile = find_tile<kRows, Sizes<D>::kTokens>(batch, ticket);
        if (tile.rows) fetcher.look_up(batch, tile, tile.kv_tiles - 1);
        wait(&shared.tile_empty[place.index], place.parity ^ 1);
        if (lane == 0) {
            shared.tiles[place.index] = tile;
            arrive(&shared.tile_full[place.index]);
        }
        if (tile.rows == 0) break;
        for (uint32_t i = tile.kv_tiles; i-- > 0;) {
            // Drawn only now: a block that is late leaves the rest to the others.
            if (i == 0 && lane == 0) ticket = gridDim.x + atomicAdd(&tickets[0], 1);
            fetcher.fetch(shared, k, batch, tile, i);
            if (i + 1 < tile.kv_tiles) fetcher.slot.next();
        }
        fetcher.slot.next();
        ticket = __shfl_sync(kAll, ticket, 0);
    }
    if (lane == 0 && atomicAdd(&tickets[1], 1) == gridDim.x - 1) tickets[0] = tickets[1] = 0;
}

template <int D, typename B> __device__ void fetch_values(PrefillShared<D> &shared, const bf16 *v, const B &batch) {
    Fetcher<D, true> fetcher;
    Ring<2> place;
    for (;;) {
        QueryTile tile = next_tile<D>(shared, place);
        if (tile.rows == 0) return;
        fetcher.look_up(batch, tile, tile.kv_tiles - 1);
        fetcher.slot.next();
        for (uint32_t i = tile.kv_tiles; i-- > 0;) {
            if (i > 0) fetcher.slot.next();
            fetcher.fetch(shared, v, batch, tile, i);
        }
    }
}

// Fetches the queries of one consumer, by one warp; rows beyond the end repeat the last.
template <int D>
__device__ void fetch_queries(PrefillShared<D> &shared, const bf16 *q, const PrefillBatch &batch, uint32_t consumer) {
    constexpr uint32_t kVectors = D / 8;
    Ring<2> place;
    Ring<Sizes<D>::kBuffers> buffer;
    uint32_t lane = threadIdx.x % 32, group = batch.heads / batch.kv_heads;
    for (;; buffer.next()) {
        QueryTile tile = next_tile<D>(shared, place);
        if (tile.rows == 0) return;
        wait(&shared.q_empty[buffer.index][consumer], buffer.parity ^ 1);
        for (uint32_t i = lane; i < 64 * kVectors; i += 32) {
            uint32_t r = i / kVectors, vector = i % kVectors;
            uint32_t row = min(tile.row0 + 64 * consumer + r, tile.rows - 1), token = tile.token0 + row / group;
            const bf16 *from = q + (size_t(token) * batch.heads + tile.kv_head * group + row % group) * D + 8 * vector;
            copy16(shared.q[buffer.index][consumer][vector / 8] + r * 128 + (vector % 8 ^ r % 8) * 16, from);
        }
        copies_wait_all();
        fence_shared_for_async();
        __syncwarp();
        if (lane == 0) arrive(&shared.q_full[buffer.index][consumer]);
    }
}
#endif
