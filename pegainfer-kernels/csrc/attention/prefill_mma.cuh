// Tiles of csrc/attention/prefill_mma.cu in shared memory, and the copies that fill them.
//
// A tile of queries, keys or values lies in columns of 64 dimensions; in each, rows are 128 bytes, whose vector p lies
// at p ^ row % 8, so that ldmatrix reads without bank conflicts. Keys and values keep the slabs of the cache
// (csrc/attention/kv_cache.cuh): a KV block of 16 tokens is one run of bytes. A lane's place in a tile is an offset
// whose bits 4 to 6 are its vector; the vector 2 i on is at that offset ^ 32 i.
#pragma once
#include "common/async.cuh"
#include "attention/fp8_kv.cuh"
#include "attention/query_tiles.cuh"

using namespace limits::prefill_mma;

template <int D, typename T> struct PrefillSizes {
    static constexpr bool kFp8 = sizeof(T) == sizeof(fp8);
    static constexpr bool kKeepsQueries = D > kLargeHead; // in registers; else in shared memory
    // Strips of 16 rows of a warp: each fragment of K and V serves them all.
    static constexpr int kStrips = kKeepsQueries ? 1 : 2;
    static constexpr uint32_t kWarps = kRows / (16 * kStrips);
    static constexpr uint32_t kKvBlocks = kTokens / kBlock;
    static constexpr uint32_t kBlockWarps = kWarps / kKvBlocks;  // that copy a KV block
    static constexpr uint32_t kSlab = kBlock * D * sizeof(bf16); // bytes of a KV block in a tile
    static constexpr uint32_t kQueries = kRows * D * sizeof(bf16);
    static constexpr uint32_t kTile = kTokens * D * sizeof(bf16);
    // Queries, keys, values; of a cache in FP8 codes of the next keys or values, and scales of both.
    static constexpr uint32_t kKeysAt = kKeepsQueries ? 0 : kQueries, kValuesAt = kKeysAt + kTile;
    static constexpr uint32_t kCodesAt = kValuesAt + kTile;
    static constexpr uint32_t kScalesAt = kCodesAt + kTokens * D;
    static constexpr uint32_t kBytes = kFp8 ? kScalesAt + 2 * kTokens * sizeof(float) : kCodesAt;
    static_assert(kWarps % kKvBlocks == 0, "a warp copies one KV block");
    static_assert(!kKeepsQueries || kQueries <= 2 * kTile, "queries pass through the tiles of keys and values");
};

// Starts the copies of a tile of queries; rows beyond the end repeat the last.
template <int D>
__device__ __forceinline__ void fetch_queries(uint8_t *to, const bf16 *q, const QueryTile &tile, uint32_t heads,
                                              uint32_t group) {
    constexpr uint32_t kVectors = D / 8;
    for (uint32_t i = threadIdx.x; i < kRows * kVectors; i += blockDim.x) {
        uint32_t r = i / kVectors, vector = i % kVectors, row = min(tile.row0 + r, tile.rows - 1);
        const bf16 *from = q + (size_t(tile.token0 + row / group) * heads + tile.kv_head * group + row % group) * D;
        copy16(to + vector / 8 * (kRows * 128) + r * 128 + (vector % 8 ^ r % 8) * 16, from + 8 * vector);
    }
}

// Copies keys and values, each warp a part of one KV block of a tile.
template <int D, typename T> struct KvFetcher {
    using Size = PrefillSizes<D, T>;
    static constexpr uint32_t kVectors = kBlock * D * sizeof(T) / 16 / Size::kBlockWarps; // of a warp
    static constexpr uint32_t kRowVectors = kCacheColumn * sizeof(T) / 16;                // of a row of a column
    const PrefillBatch &batch;
    const QueryTile &tile;
    uint8_t *shared;
    size_t slab; // that was looked up, in elements of the cache
    int left;    // tokens of its KV block, which may be none

    __device__ __forceinline__ KvFetcher(const PrefillBatch &batch, const QueryTile &tile, uint8_t *shared)
        : batch(batch), tile(tile), shared(shared) {}
    __device__ static uint32_t block() { return threadIdx.x / 32 / Size::kBlockWarps; }
    __device__ static uint32_t vector(uint32_t i) {
        return threadIdx.x / 32 % Size::kBlockWarps * kVectors + 32 * i + threadIdx.x % 32;
    }

    // Finds the warp's KV block of KV tile `kv`. A bad block id stops the kernel.
    __device__ __forceinline__ void look_up(uint32_t kv) {
        uint32_t index = kv * Size::kKvBlocks + block();
        left = int(tile.kv_len) - int(index * kBlock);
        slab = left > 0 ? size_t(batch.slab(tile.first_block + index) + tile.kv_head) * slab_size<T>(D) : 0;
    }

    // Starts the copies of the KV block that was looked up. Tokens beyond the end become 0: the cache may hold anything
    // there, and 0 * NaN is NaN.
    __device__ __forceinline__ void fetch(const T *cache, bool values) {
        constexpr uint32_t kBlockBytes = kBlock * D * sizeof(T);
        uint32_t at = Size::kFp8 ? Size::kCodesAt : values ? Size::kValuesAt : Size::kKeysAt;
#pragma unroll
        for (uint32_t i = 0; i < kVectors / 32; ++i) {
            uint32_t v = vector(i);
            bool inside = int(v / kRowVectors % kBlock) < left;
            copy16_or_zero(shared + at + block() * kBlockBytes + v * 16, cache + slab + v * (16 / sizeof(T)), inside);
        }
        if (Size::kFp8 && threadIdx.x / 32 % Size::kBlockWarps == 0 && threadIdx.x % 32 < kBlock / 4) {
            uint32_t token = threadIdx.x % 32 * 4, bytes = 4 * min(max(left - int(token), 0), 4);
            copy16_partly(scales(values) + block() * kBlock + token, cache + slab + kBlock * D + token * 4, bytes);
        }
        copies_commit();
    }

    // Widens the codes that this lane has copied.
    __device__ __forceinline__ void widen(bool values) const {
        uint8_t *to = shared + (values ? Size::kValuesAt : Size::kKeysAt) + block() * Size::kSlab;
#pragma unroll
        for (uint32_t i = 0; i < kVectors / 32; ++i) {
            uint32_t v = vector(i), token = v / kRowVectors % kBlock, pair = v % kRowVectors ^ token / 2 % 4;
            auto vector_at = [](uint8_t *at, uint32_t i) { return reinterpret_cast<uint4 *>(at) + i; };
            const uint4 codes = *vector_at(shared + Size::kCodesAt + block() * (kBlock * D), v);
            uint8_t *row = to + v / (kRowVectors * kBlock) * (kBlock * 128) + token * 128;
            *vector_at(row, 2 * pair ^ token % 8) = widen8_codes(make_uint2(codes.x, codes.y));
            *vector_at(row, (2 * pair + 1) ^ token % 8) = widen8_codes(make_uint2(codes.z, codes.w));
        }
    }

    __device__ __forceinline__ float *scales(bool values) const {
        return reinterpret_cast<float *>(shared + Size::kScalesAt) + (values ? kTokens : 0);
    }
};
