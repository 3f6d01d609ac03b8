// Tiles of 16 keys of DeepSeek-V4's sparse attention in shared memory, by cp.async. A warp copies, reads and overwrites
// only its own 128 dimensions of a tile, so that no barrier of the block is needed between these.
//
// A vector is 16 bytes, and a warp has 16 of each key. Vector v of key r is at v ^ turn(r). A copy writes 8
// neighbouring vectors of 4 keys, the first GEMM reads 4 of 8 keys, the second GEMM reads one of 8 keys (ldmatrix):
// none of them has bank conflicts.
#pragma once
#include "common/async.cuh"
#include "limits.h"

constexpr uint32_t kTile = 16;                                               // keys
constexpr uint32_t kKeyBytes = 2 * limits::deepseek_v4_attention::kMaxDim;   // from one key of a tile to the next
constexpr uint32_t kWarpBytes = 2 * limits::deepseek_v4_attention::kWarpDim; // of a key, of one warp

// A vector of shared memory, and a pair.
__device__ __forceinline__ uint4 load_vector(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ void store_pair(uint32_t to, uint32_t pair) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
}

// One warp's dimensions of a tile.
struct KeyTile {
    uint32_t at; // shared address of its dimensions of the first key; a multiple of 128

    __device__ __forceinline__ explicit KeyTile(const void *tile)
        : at(shared_address(tile) + threadIdx.x / 32 * kWarpBytes) {}

    static __device__ __forceinline__ uint32_t turn(uint32_t key) { return key % 2 * 4 + key / 2 % 4; }
    // Address of a vector below 8.
    __device__ __forceinline__ uint32_t address(uint32_t key, uint32_t vector) const {
        return at + key * kKeyBytes + (vector ^ turn(key)) * 16;
    }
    // Address of the vector `by` further, which has no bit in common with that of `address`.
    static __device__ __forceinline__ uint32_t further(uint32_t address, uint32_t by) {
        return (address ^ by % 8 * 16) + by / 8 * 128;
    }

    // Begins to copy 16 keys of `dim` dimensions to the tile. `key(i, exists)`: an address, and whether it is that of
    // key `i`; else zeros take its place.
    template <typename Key> __device__ __forceinline__ void copy(Key key, uint32_t dim) const {
        const uint32_t lane = threadIdx.x % 32, first = address(lane / 8, lane % 8);
        const uint32_t first_dim = threadIdx.x / 32 * limits::deepseek_v4_attention::kWarpDim + lane % 8 * kVector;
#pragma unroll
        for (uint32_t i = 0; i < kTile / 4; ++i) {
            bool exists;
            const bf16 *from = key(lane / 8 + 4 * i, exists);
            const uint32_t to = (first ^ i % 2 * 32) + i * 4 * kKeyBytes; // turn(key + 4) = turn(key) ^ 2
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                const uint32_t vector = first_dim + 64 * half;
                copy16_or_zero(to + 128 * half, from + min(vector, dim - kVector), exists && vector < dim);
            }
        }
    }

    // Dimensions 32 c + 8 quad to 32 c + 8 quad + 7 of key 8 n + group.
    __device__ __forceinline__ uint4 row(uint32_t n, uint32_t c) const {
        const uint32_t lane = threadIdx.x % 32;
        return load_vector(further(address(lane / 4, lane % 4), 4 * c) + n * 8 * kKeyBytes);
    }

    // Operands B of the second GEMM: of dimensions 16 m to 16 m + 7 in x and y, of the eight behind them in z and w.
    __device__ __forceinline__ uint4 columns(uint32_t m) const {
        const uint32_t lane = threadIdx.x % 32;
        return load_matrices<true>(further(address(lane % 16, lane / 16), 2 * m));
    }
};
