// The base of all kernels: bf16 pairs and vectors, and programmatic dependent launch.
//
// A vector is 16 bytes, 8 elements of bf16: what one load or store of a lane takes. A pair is two bf16 in one register.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

constexpr uint32_t kVector = 8; // elements of a vector

// Programmatic dependent launch (PDL; CUDA programming guide, "Programmatic Dependent Launch and Synchronization"). A
// kernel of a step first releases its successor: the successor's blocks become resident as soon as blocks of this
// kernel leave multiprocessors free, and may fetch what no kernel of the step writes (weights, segments, KV blocks of
// earlier steps). Before a kernel touches anything that another kernel of the step writes or reads, it waits until all
// kernels before it are complete. Decode attention overlapped with prefill attention is the one exception: see
// csrc/attention/decode.cuh.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The beginning of a kernel that fetches nothing before its wait: its blocks are resident when the kernels before it
// end.
__device__ __forceinline__ void start_after_predecessor() {
    release_successor();
    wait_for_predecessor();
}

// Counts arrivals, of which there are `all`; true for the last, who sees what the others wrote before. The counter is
// zero again after it.
__device__ __forceinline__ bool arrive_last(uint32_t *counter, uint32_t all) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(all - 1)
                 : "memory");
    return before == all - 1;
}

// A pointer to what the kernel before this one wrote, once that kernel is complete. Through a pointer that is const and
// __restrict__ the compiler may read earlier, because it takes for constant what this kernel does not write.
template <typename T> __device__ __forceinline__ const T *written(const T *at) {
    asm volatile("" : "+l"(at)::"memory");
    __builtin_assume(__isGlobal(at));
    return at;
}

// A value, such as an address, that the compiler does not compute again and again.
__device__ __forceinline__ uint32_t keep(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// A pair, widened to f32: bf16 is the upper half of f32.
__device__ __forceinline__ float2 widen(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Two f32 to a pair, rounded to nearest even, the first in the lower half.
__device__ __forceinline__ uint32_t narrow(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t &>(pair);
}

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ uint4 load16(const bf16 *at) { return *reinterpret_cast<const uint4 *>(at); }

// A vector that is read once, of weights: it leaves the L1 to what is read again.
__device__ __forceinline__ uint4 stream16(const bf16 *at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// Results, in the type of the output: one element, and two neighbours.
__device__ __forceinline__ void put(float *at, float value) { *at = value; }
__device__ __forceinline__ void put(bf16 *at, float value) { *at = __float2bfloat16_rn(value); }
__device__ __forceinline__ void put(bf16 *at, float a, float b) { *reinterpret_cast<uint32_t *>(at) = narrow(a, b); }
__device__ __forceinline__ void put(float *at, float a, float b) {
    *reinterpret_cast<float2 *>(at) = make_float2(a, b);
}
