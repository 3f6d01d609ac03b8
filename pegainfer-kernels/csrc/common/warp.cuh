// Reductions and scans over the lanes of a warp, and sums over a block. All lanes of the warp call them, and every lane
// gets the result.
#pragma once
#include <cstdint>

constexpr uint32_t kAll = 0xffffffffu; // the mask of all lanes

struct Add {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// Over each aligned group of `lanes` lanes, a power of two: a butterfly, the farthest partner first.
template <typename T, typename Op> __device__ __forceinline__ T reduce_lanes(T x, uint32_t lanes, Op op) {
    for (uint32_t step = lanes / 2; step > 0; step /= 2) x = op(x, __shfl_xor_sync(kAll, x, step));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) { return reduce_lanes(x, 32, Add()); }

// The largest of 64-bit keys, by two reductions of words (compute capability 8.0).
__device__ __forceinline__ uint64_t largest_key(uint64_t key) {
    const uint32_t high = __reduce_max_sync(kAll, uint32_t(key >> 32));
    const uint32_t low = __reduce_max_sync(kAll, uint32_t(key >> 32) == high ? uint32_t(key) : 0);
    return uint64_t(high) << 32 | low;
}

// Over the four lanes of a quad, which hold one row of an accumulator (csrc/common/frag.cuh).
template <typename T, typename Op> __device__ __forceinline__ T reduce_quad(T x, Op op) {
    x = op(x, __shfl_xor_sync(kAll, x, 1));
    return op(x, __shfl_xor_sync(kAll, x, 2));
}

// Transposes the words of four lanes: first within pairs of lanes, then between the pairs.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4], uint32_t quad) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            if (t & step) continue;
            uint32_t got = __shfl_xor_sync(kAll, quad & step ? w[t] : w[t + step], step);
            if (quad & step) w[t] = got;
            else w[t + step] = got;
        }
    }
}

// Over the eight lanes with the same place in their quads, which hold one column of an accumulator.
template <typename T, typename Op> __device__ __forceinline__ T reduce_column(T x, Op op) {
    for (int step = 4; step < 32; step *= 2) x = op(x, __shfl_xor_sync(kAll, x, step));
    return x;
}

// The sum over this lane and all before it.
template <typename T> __device__ __forceinline__ T inclusive_scan(T x) {
    for (uint32_t step = 1; step < 32; step *= 2) {
        T before = __shfl_up_sync(kAll, x, step);
        if (threadIdx.x % 32 >= step) x += before;
    }
    return x;
}

// The sum over a block of whole warps, at most 32. `partials`: [32] in shared memory.
__device__ __forceinline__ float block_sum(float x, float *partials) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : 0.f;
    return warp_sum(x);
}
