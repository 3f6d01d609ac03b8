// Tiles of queries of prefill attention: which rows of the batch have them, and the KV tiles that they see.
//
// The queries of a sequence that share a KV head are one matrix: row r of it is query r / group, head r % group of the
// group, so that K and V are read once for the whole group. A tile is `Rows` such rows.
#pragma once
#include "attention/kv_cache.cuh"
#include "common/warp.cuh"
#include "limits.h"

using namespace limits::attention;

struct QueryTile {
    uint32_t rows; // matrix rows of the batch row; 0: there are no more tiles
    uint32_t row0, kv_head, token0, kv_len;
    uint32_t first_block; // of the sequence
    uint32_t first;       // the token that the batch row's first query sees last: itself
    uint32_t kv_tiles;
};

struct PrefillBatch : Batch {
    static constexpr bool kPacked = false; // the KV blocks of all sequences lie one after the other
    uint32_t heads, kv_heads;
    // The KV heads of this launch, and the slab of a KV block of the sequence and of the first of them.
    __device__ uint32_t first_head() const { return 0; }
    __device__ uint32_t heads_here() const { return kv_heads; }
    __device__ uint32_t slab(uint32_t index) const {
        uint32_t id = block_tables[index];
        if (id >= blocks) __trap();
        return id * kv_heads;
    }
    // Where the KV blocks of a sequence begin, of which there are `before` blocks of sequences before it.
    __device__ uint32_t first_block(uint32_t row, uint32_t) const { return row * max_blocks; }
    __device__ uint32_t kv_len(uint32_t row) const { return kv_lens[row]; }
    // Matrix rows of a row of the batch; none if it is not for prefill.
    __device__ uint32_t matrix_rows(uint32_t row) const {
        uint32_t b = min(row, rows - 1), matrix = (qo_indptr[b + 1] - qo_indptr[b]) * (heads / kv_heads);
        return row >= rows || matrix <= kDecodeRows ? 0 : matrix;
    }
    // The last token that a query of the tile's row sees: itself.
    static __device__ __forceinline__ uint32_t last(const QueryTile &tile, uint32_t query) {
        return tile.first + query;
    }
};

// Some KV heads of a cache in FP8, widened (csrc/attention/widen_kv.cu).
struct WidenedBatch : PrefillBatch {
    static constexpr bool kPacked = true;
    uint32_t first, here;
    uint32_t capacity; // KV blocks that there is memory for; more stop the kernel
    __device__ uint32_t first_head() const { return first; }
    __device__ uint32_t heads_here() const { return here; }
    __device__ uint32_t slab(uint32_t index) const {
        if (index >= capacity) __trap();
        return index * here;
    }
    __device__ uint32_t first_block(uint32_t, uint32_t before) const { return before; }
};

// Segments of rows that all see each other, keys and values packed in the same way.
struct SegmentBatch : WidenedBatch {
    __device__ uint32_t kv_len(uint32_t row) const { return qo_indptr[row + 1] - qo_indptr[row]; }
    __device__ uint32_t matrix_rows(uint32_t row) const { return row < rows ? kv_len(row) : 0; }
    static __device__ __forceinline__ uint32_t last(const QueryTile &tile, uint32_t) { return tile.kv_len - 1; }
};

// Tile number `ticket` of the batch, by a whole warp. Tiles are ordered by batch row, then from the last queries, which
// see most, to the first, then by KV head.
template <uint32_t Rows, uint32_t Tokens, typename B> __device__ QueryTile find_tile(const B &batch, uint32_t ticket) {
    uint32_t lane = threadIdx.x % 32, group = batch.heads / batch.kv_heads, kv_blocks = 0;
    for (uint32_t base = 0; base < batch.rows; base += 32) {
        uint32_t b = min(base + lane, batch.rows - 1), token0 = batch.qo_indptr[b], kv_len = batch.kv_len(b);
        uint32_t rows = batch.matrix_rows(base + lane);
        uint32_t through = inclusive_scan((rows + Rows - 1) / Rows * batch.heads_here());
        uint32_t found = __ballot_sync(kAll, ticket < through);
        uint32_t own_blocks = rows ? (kv_len + kBlock - 1) / kBlock : 0, blocks_through = 0;
        if constexpr (B::kPacked) blocks_through = kv_blocks + inclusive_scan(own_blocks);
        if (found == 0) {
            ticket -= __shfl_sync(kAll, through, 31);
            kv_blocks = __shfl_sync(kAll, blocks_through, 31);
            continue;
        }
        int owner = __ffs(found) - 1;
        ticket -= __shfl_sync(kAll, through - (rows + Rows - 1) / Rows * batch.heads_here(), owner);
        QueryTile tile;
        tile.rows = __shfl_sync(kAll, rows, owner);
        tile.token0 = __shfl_sync(kAll, token0, owner);
        tile.first_block = batch.first_block(base + owner, __shfl_sync(kAll, blocks_through - own_blocks, owner));
        tile.kv_len = __shfl_sync(kAll, kv_len, owner);
        uint32_t tiles = (tile.rows + Rows - 1) / Rows;
        tile.kv_head = batch.first_head() + ticket % batch.heads_here();
        tile.row0 = (tiles - 1 - ticket / batch.heads_here()) * Rows;
        tile.first = tile.kv_len - tile.rows / group;
        tile.kv_tiles = B::last(tile, (min(tile.row0 + Rows, tile.rows) - 1) / group) / Tokens + 1;
        return tile;
    }
    return QueryTile{};
}
