// What a step takes from the host and leaves for it: copies between pinned memory and the device. A copy engine and the
// kernels around it wait for each other through memory, which takes longer than most of these copies.
#include "common.cuh"

constexpr uint32_t kWords = 8; // of a thread, as in cuda::copy

// A piece of row blockIdx.x, blockIdx.y pieces from its front. The rows begin `stride` words apart on their side.
template <bool kFromHost>
__device__ __forceinline__ void copy(const uint32_t *from, uint32_t *to, uint32_t width, uint64_t from_stride,
                                     uint64_t to_stride) {
    from += blockIdx.x * from_stride;
    to += blockIdx.x * to_stride;
    uint32_t first = blockIdx.y * kWords * blockDim.x + threadIdx.x, words[kWords];
    release_successor();
    // The host has written before the launch, so its memory, which is far, can be read at once.
    if (!kFromHost) wait_for_predecessor();
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i)
        if (first + i * blockDim.x < width) words[i] = from[first + i * blockDim.x];
    if (kFromHost) wait_for_predecessor();
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i)
        if (first + i * blockDim.x < width) to[first + i * blockDim.x] = words[i];
}

extern "C" __global__ void upload(const uint32_t *from, // pinned, [gridDim.x, from_stride]
                                  uint32_t *to,         // [gridDim.x, to_stride]
                                  uint32_t width, uint64_t from_stride, uint64_t to_stride) {
    copy<true>(from, to, width, from_stride, to_stride);
}

extern "C" __global__ void land(const uint32_t *from, // [gridDim.x, from_stride]
                                uint32_t *to,         // pinned, [gridDim.x, to_stride]
                                uint32_t width, uint64_t from_stride, uint64_t to_stride) {
    copy<false>(from, to, width, from_stride, to_stride);
}
