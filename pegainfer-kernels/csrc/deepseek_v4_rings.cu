// Rings of the newest tokens of each sequence, and copies of a slot; elements in bf16 or f32:
//
//   write_ring: ring[slot, position % ring] = fresh[t] of the newest `ring` tokens of each row     one block a token
//   copy_slot:  ring[to] = ring[from]                                                              one thread an element
//
// All GPUs. Bound by memory. Reference: src/cpu/deepseek_v4/batch.rs, src/ops/deepseek_v4/batch.rs.
#include "deepseek_v4_batch.cuh"
#include "abi/deepseek_v4_rings.h"

using namespace limits::deepseek_v4;

template <typename T>
__device__ void write_ring(const T *__restrict__ fresh, T *__restrict__ rings, const Batch &batch, uint32_t slots,
                           uint32_t ring, uint32_t width) {
    uint32_t t = blockIdx.x;
    Sequence s = sequence_of(batch, t, slots);
    // An older token would have its row overwritten by a newer one of this step.
    if (s.pads() || t + ring < s.end) return;
    rings += (size_t(s.slot) * ring + batch.positions[t] % ring) * width;
    fresh += size_t(t) * width;
    for (uint32_t i = threadIdx.x; i < width; i += blockDim.x) rings[i] = fresh[i];
}

#define KERNELS(SUFFIX, T)                                                                                             \
    /* Grid: tokens. */                                                                                                \
    extern "C" __global__ __launch_bounds__(kRowThreads) void write_ring_##SUFFIX(                                     \
        const T *fresh,                /* [tokens, width] */                                                           \
        const uint32_t *qo_indptr,     /* [rows + 1] */                                                                \
        const uint32_t *positions,     /* [tokens] */                                                                  \
        const uint32_t *slots,         /* [rows] */                                                                    \
        const uint32_t *page_tables,   /* [rows, pages], not read */                                                   \
        T *rings,                      /* [slot_count, ring, width] */                                                 \
        uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t ring, uint32_t width) {                           \
        start_after_predecessor();                                                                                     \
        write_ring(fresh, rings, {qo_indptr, positions, slots, page_tables, rows, pages}, slot_count, ring, width);    \
    }                                                                                                                  \
    /* Grid: elements of a slot over threads. */                                                                       \
    extern "C" __global__ __launch_bounds__(kRowThreads) void copy_slot_##SUFFIX(                                      \
        T *rings,                      /* [slots, elements] */                                                         \
        uint32_t from, uint32_t to, uint32_t elements) {                                                               \
        start_after_predecessor();                                                                                     \
        uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;                                                            \
        if (i < elements) rings[size_t(to) * elements + i] = rings[size_t(from) * elements + i];                       \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)
