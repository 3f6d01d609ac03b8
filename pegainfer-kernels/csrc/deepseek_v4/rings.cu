// Rings of the newest tokens of each sequence, and copies of a slot; elements in bf16 or f32:
//
//   write_ring: ring[slot, position % ring] = fresh[t] of the newest `ring` tokens of each row     one block a token
//   copy_slots: ring[to] = ring[from], of all layers                                               some vectors a
//   thread
//
// All GPUs. Bound by memory. Reference: src/cpu/deepseek_v4/batch.rs, src/ops/deepseek_v4/{batch,copy_slots}.rs.
#include "deepseek_v4/batch.cuh"
#include "abi/deepseek_v4_rings.h"

using namespace limits::deepseek_v4;

template <typename T>
__device__ void write_ring(const T *__restrict__ fresh, T *__restrict__ rings, const RaggedBatch &batch, uint32_t slots,
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
        const T *fresh,                  /* [tokens, width] */                                                         \
        RAGGED_BATCH_POINTERS, T *rings, /* [slot_count, ring, width] */                                               \
        uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t ring, uint32_t width) {                           \
        start_after_predecessor();                                                                                     \
        write_ring(fresh, rings, RAGGED_BATCH, slot_count, ring, width);                                               \
    }
KERNELS(bf16, bf16)
KERNELS(f32, float)

// Grid: rings, shares of a slot. What the table points to is written: `rings` is no more than where it is.
extern "C" __global__ __launch_bounds__(kRowThreads) void copy_slots(
    const uint32_t
        *rings, // [rings, 4]: address of [slots, vectors of 16 bytes], and how many vectors a slot has; low words first
    uint32_t from, uint32_t to) {
    const uint4 own = reinterpret_cast<const uint4 *>(rings)[blockIdx.x];
    uint4 *slots = reinterpret_cast<uint4 *>(uint64_t(own.y) << 32 | own.x);
    const size_t vectors = uint64_t(own.w) << 32 | own.z;
    start_after_predecessor();
    for (size_t i = size_t(blockIdx.y) * blockDim.x + threadIdx.x; i < vectors; i += size_t(gridDim.y) * blockDim.x)
        slots[to * vectors + i] = slots[from * vectors + i];
}
