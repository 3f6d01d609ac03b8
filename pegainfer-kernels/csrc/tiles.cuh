// Tiles of bf16 in shared memory for the products of warps: 64 rows of 128 elements. They lie in two columns of 64
// elements; in each, rows are 128 bytes, whose 16-byte piece p lies at p ^ (row % 8). Eight rows of a column of pieces
// touch all banks once, and it is the swizzle that wgmma wants.
#pragma once
#include "common.cuh"

constexpr uint32_t kTileWidth = 128, kTileRows = 64, kTilePieces = kTileWidth / 8;
constexpr uint32_t kRowPieces = 8, kColumnPieces = kTileRows * kRowPieces; // of a column of 64 elements

using Tile = uint4[kTileRows * kTilePieces];

// Index of a 16-byte piece.
__device__ __forceinline__ uint32_t tile_piece(uint32_t row, uint32_t piece) {
    return piece / kRowPieces * kColumnPieces + row * kRowPieces + (piece % kRowPieces ^ row % 8);
}

// Four 8 x 8 matrices, one a register; lane 8 i + r gives the address of row r of matrix i. A lane gets row lane / 4 at
// columns 2 (lane % 4), + 1 ...
__device__ __forceinline__ uint4 load_matrices(const uint4 *row) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                 : "r"(uint32_t(__cvta_generic_to_shared(row))));
    return m;
}

// ... and here rows 2 (lane % 4), + 1 at column lane / 4.
__device__ __forceinline__ uint4 load_transposed(const uint4 *row) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                 : "r"(uint32_t(__cvta_generic_to_shared(row))));
    return m;
}

// 16 bytes, global to shared, by the thread itself; zeros unless `real`, and then `from` is not read.
__device__ __forceinline__ void copy16_or_zero(uint4 *to, const void *from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of the groups that this thread committed are unfinished.
template <int N> __device__ __forceinline__ void copies_wait_until() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
