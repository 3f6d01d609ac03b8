// The ragged batch of a DeepSeek-V4 step, as its kernels read it: everything about lengths comes from device memory, so
// that a grid depends on shapes alone. See `ops::deepseek_v4::Batch`; reference: src/cpu/deepseek_v4/batch.rs.
//
// A row whose slot is kNoSlot pads the step: it has no state, and its positions and pages may hold anything. So may
// tokens behind the last row. Any other slot or page outside of its tensor stops the kernel.
#pragma once
#include "deepseek_v4/rounding.cuh"
#include "limits.h"

constexpr uint32_t kPageTokens = 128; // of a page of compressed entries

struct RaggedBatch {
    const uint32_t *indptr;    // [rows + 1]: row b owns tokens indptr[b] to indptr[b + 1] - 1
    const uint32_t *positions; // [tokens], in a row one after another
    const uint32_t *slots;     // [rows]
    const uint32_t *tables;    // [rows, pages]
    uint32_t rows, pages;
};

// The parameters of a kernel that are its batch, besides `rows` and `pages`; and the batch of these names.
#define RAGGED_BATCH_POINTERS                                                                                          \
    const uint32_t *qo_indptr, const uint32_t *positions, const uint32_t *slots, const uint32_t *page_tables
#define RAGGED_BATCH                                                                                                   \
    RaggedBatch { qo_indptr, positions, slots, page_tables, rows, pages }

// The row of one token.
struct Sequence {
    uint32_t row;
    uint32_t first, end; // its tokens of this step
    uint32_t start;      // position of the first of them
    uint32_t slot;       // kNoSlot: the row pads the step

    __device__ __forceinline__ bool pads() const { return slot == limits::kv_cache::kNoSlot; }
};

// The row of token `t`: that of its number where all rows up to it decode, else by binary search. `slots`: how many
// there are. What a row that decodes needs is loaded at once, so that these kernels, which are bound by latency, wait
// once.
__device__ __forceinline__ Sequence sequence_of(const RaggedBatch &batch, uint32_t t, uint32_t slots) {
    const uint32_t own = min(t, batch.rows - 1);
    const uint32_t first = batch.indptr[own], end = batch.indptr[own + 1], slot = batch.slots[own],
                   position = batch.positions[own];
    Sequence s = {own, first, end, position, slot};
    if (own != t || first != t || end != t + 1) {
        uint32_t row = 0;
        for (uint32_t last = batch.rows; last - row > 1;) {
            uint32_t middle = (row + last) / 2;
            if (batch.indptr[middle] <= t) row = middle;
            else last = middle;
        }
        s = {row, batch.indptr[row], batch.indptr[row + 1], 0, batch.slots[row]};
        if (t >= s.end) s.slot = limits::kv_cache::kNoSlot;
        if (!s.pads()) s.start = batch.positions[s.first];
    }
    if (!s.pads() && s.slot >= slots) __trap();
    return s;
}

// Whether the row of `position`, of which a ring of `ring` rows a slot keeps the newest, is among the tokens of this
// step; `at` is its row there, or among the rows of all rings.
__device__ __forceinline__ bool is_fresh(const Sequence &s, uint32_t position, uint32_t ring, size_t &at) {
    bool fresh = position >= s.start;
    at = fresh ? s.first + (position - s.start) : size_t(s.slot) * ring + position % ring;
    return fresh;
}

// Index of compressed entry `i` of a row in a cache of `pages` pages with `per_page` entries each.
__device__ __forceinline__ size_t entry_of(const RaggedBatch &batch, uint32_t row, uint32_t i, uint32_t per_page,
                                           uint32_t pages) {
    uint32_t column = i / per_page;
    if (column >= batch.pages) __trap();
    uint32_t page = batch.tables[size_t(row) * batch.pages + column];
    if (page >= pages) __trap();
    return size_t(page) * per_page + i % per_page;
}
