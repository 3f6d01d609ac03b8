// Rows by index: `embedding`, and `gather`, which keeps the rows that are sampled. One block a row, a vector a thread.
//
// All GPUs. Bound by memory. Reference: src/ops/embedding.rs, src/ops/gather_rows.rs.
#include "common/base.cuh"
#include "abi/rows_gather.h"
#include "limits.h"

using namespace limits::gather;

// Row `id` of a table of `rows` rows, 16 bytes a thread at a time. An index outside it stops the kernel with an error.
__device__ __forceinline__ void copy_row(const bf16 *__restrict__ from, bf16 *__restrict__ to, uint32_t id,
                                         uint32_t rows, uint32_t width) {
    if (id >= rows) __trap();
    const bf16 *row = from + size_t(id) * width;
    for (uint32_t i = 8 * threadIdx.x; i < width; i += 8 * blockDim.x)
        *reinterpret_cast<uint4 *>(to + i) = load16(row + i);
}

// One block a row.
extern "C" __global__ void gather(const bf16 *__restrict__ from,    // [from_rows, width]
                                  const uint32_t *__restrict__ ids, // [gridDim.x]
                                  bf16 *__restrict__ out,           // [gridDim.x, width]
                                  uint32_t from_rows, uint32_t width) {
    start_after_predecessor();
    copy_row(from, out + size_t(blockIdx.x) * width, ids[blockIdx.x], from_rows, width);
}

// One block a token. An id with the top bit is a placeholder: an index into the tokens that the previous step drew,
// because the host launches a step before it knows them.
extern "C" __global__ void embedding(const bf16 *__restrict__ table,        // [vocab, width]
                                     const uint32_t *__restrict__ ids,      // [gridDim.x]
                                     const uint32_t *__restrict__ previous, // [previous_rows]
                                     bf16 *__restrict__ out,                // [gridDim.x, width]
                                     uint32_t vocab, uint32_t previous_rows, uint32_t width) {
    start_after_predecessor();
    uint32_t id = ids[blockIdx.x];
    if (id & kPlaceholder) {
        id ^= kPlaceholder;
        if (id >= previous_rows) __trap();
        id = previous[id];
    }
    copy_row(table, out + size_t(blockIdx.x) * width, id, vocab, width);
}
