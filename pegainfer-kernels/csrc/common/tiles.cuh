// Tiles of bf16 in shared memory: 64 rows of 128 elements. They lie in two columns of 64 elements; in each, rows are
// 128 bytes, whose vector p lies at p ^ (row % 8). So eight rows at one vector touch all banks once, and it is the
// 128-byte swizzle that wgmma wants.
#pragma once
#include "common/async.cuh"

constexpr uint32_t kTileWidth = 128, kTileRows = 64, kTileVectors = kTileWidth / 8;
constexpr uint32_t kRowVectors = 8, kColumnVectors = kTileRows * kRowVectors; // of a column of 64 elements

using Tile = uint4[kTileRows * kTileVectors];

// Index of a vector.
__device__ __forceinline__ uint32_t tile_vector(uint32_t row, uint32_t vector) {
    return vector / kRowVectors * kColumnVectors + row * kRowVectors + (vector % kRowVectors ^ row % 8);
}
