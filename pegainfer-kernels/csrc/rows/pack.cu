// Rows of several tensors to one place and back, with the sums of their words: `pack` and `unpack`, for copies of KV
// blocks outside the device. A part lies within a row of one tensor.
//
//   packed[j, at + i] = part[rows[j] * stride + i] for each byte i of each part; unpack: the other way
//   sums[j] = Σ w_i, Σ (i + 1) w_i mod 2^64 over the 32-bit words of packed[j], which is `kv::tiers::Checksum`
// All GPUs. Bound by memory. Reference: src/ops/pack_rows.rs.
#include "common/base.cuh"
#include "abi/rows_pack.h"
#include "limits.h"

using namespace limits::pack;

struct Part {
    char *rows; // of the first row
    uint64_t stride, at, bytes;
};

struct Sums {
    uint64_t a = 0, b = 0;

    // Adds the word with this number.
    __device__ __forceinline__ void add(uint64_t word, uint64_t number) {
        a += word;
        b += word * (number + 1);
    }
};

__device__ __forceinline__ void add_words(Sums &sums, uint4 v, uint64_t number) {
    sums.add(v.x, number);
    sums.add(v.y, number + 1);
    sums.add(v.z, number + 2);
    sums.add(v.w, number + 3);
}

__device__ __forceinline__ void add_words(Sums &sums, uint32_t v, uint64_t number) { sums.add(v, number); }

// Copies `bytes` bytes, a `V` a thread at a time. `number`: of the first word.
template <typename V>
__device__ __forceinline__ void copy(const char *from, char *to, uint64_t bytes, uint64_t number, Sums &sums) {
    uint32_t count = uint32_t(bytes / sizeof(V));
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        V v = reinterpret_cast<const V *>(from)[i];
        reinterpret_cast<V *>(to)[i] = v;
        add_words(sums, v, number + uint64_t(i) * (sizeof(V) / 4));
    }
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) v += __shfl_xor_sync(~0u, v, lane);
    return v;
}

// Sums of a row until all its parts have arrived; zero between kernels.
struct Totals {
    unsigned long long a, b;
    uint32_t arrived, unused;
};

// Adds the sums of all threads of all blocks of a row. The last block to arrive writes them, and leaves `totals` zero.
__device__ __forceinline__ void write_sums(Sums sums, Totals *totals, uint64_t *out) {
    sums.a = warp_sum(sums.a);
    sums.b = warp_sum(sums.b);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&totals->a, (unsigned long long)sums.a);
        atomicAdd(&totals->b, (unsigned long long)sums.b);
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0 && arrive_last(&totals->arrived, gridDim.x)) {
        out[0] = atomicExch(&totals->a, 0ull);
        out[1] = atomicExch(&totals->b, 0ull);
    }
}

template <bool kPack>
__device__ __forceinline__ void pack_part(const uint32_t *parts, char *packed, const uint32_t *rows, uint32_t pitch,
                                          uint64_t *sums_out, uint64_t *totals) {
    const Part part = reinterpret_cast<const Part *>(parts)[blockIdx.x];
    // The bytes of a segment are numbered from its first part on.
    const uint64_t at = part.at - reinterpret_cast<const Part *>(parts)[0].at + uint64_t(blockIdx.y) * pitch;
    char *in_tensor = part.rows + rows[blockIdx.y] * part.stride, *in_packed = packed + at;
    const char *from = kPack ? in_tensor : in_packed;
    char *to = kPack ? in_packed : in_tensor;
    Sums sums;
    if ((reinterpret_cast<uint64_t>(in_tensor) | at | part.bytes) % sizeof(uint4) == 0) {
        copy<uint4>(from, to, part.bytes, part.at / 4, sums);
    } else {
        copy<uint32_t>(from, to, part.bytes, part.at / 4, sums);
    }
    write_sums(sums, reinterpret_cast<Totals *>(totals) + blockIdx.y, sums_out + 2 * blockIdx.y);
}

// One block a part and row.
extern "C" __global__ void __launch_bounds__(kThreads)
    pack(const uint32_t *__restrict__ parts, // [gridDim.x, 8]
         uint8_t *__restrict__ packed,       // [gridDim.y, pitch]
         const uint32_t *__restrict__ rows,  // [gridDim.y]
         uint64_t *__restrict__ sums,        // [gridDim.y, 2], memory of the host
         uint64_t *__restrict__ totals, uint32_t pitch) {
    pack_part<true>(parts, reinterpret_cast<char *>(packed), rows, pitch, sums, totals);
}

// One block a part and row.
extern "C" __global__ void __launch_bounds__(kThreads)
    unpack(const uint32_t *__restrict__ parts, // [gridDim.x, 8]
           uint8_t *__restrict__ packed,       // [gridDim.y, pitch]
           const uint32_t *__restrict__ rows,  // [gridDim.y]
           uint64_t *__restrict__ sums,        // [gridDim.y, 2], memory of the host
           uint64_t *__restrict__ totals, uint32_t pitch) {
    pack_part<false>(parts, reinterpret_cast<char *>(packed), rows, pitch, sums, totals);
}
