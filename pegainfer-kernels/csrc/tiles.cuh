// Tiles of bf16 in shared memory for the products of warps: 64 rows of 128 elements. They lie in two columns of 64
// elements; in each, rows are 128 bytes, whose 16-byte piece p lies at p ^ (row % 8). Vec8 rows of a column of pieces
// touch all banks once, and it is the swizzle that wgmma wants.
#pragma once
#include "async.cuh"

constexpr uint32_t kTileWidth = 128, kTileRows = 64, kTilePieces = kTileWidth / 8;
constexpr uint32_t kRowPieces = 8, kColumnPieces = kTileRows * kRowPieces; // of a column of 64 elements

using Tile = uint4[kTileRows * kTilePieces];

// Index of a 16-byte piece.
__device__ __forceinline__ uint32_t tile_vector(uint32_t row, uint32_t piece) {
    return piece / kRowPieces * kColumnPieces + row * kRowPieces + (piece % kRowPieces ^ row % 8);
}
