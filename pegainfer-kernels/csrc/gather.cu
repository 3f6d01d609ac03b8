// Rows by index: embedding and gather_rows.
#include "common.cuh"

// One block a row, 16 bytes a thread at a time. An index outside the table stops the kernel with an error.
extern "C" __global__ void gather(const bf16 *__restrict__ from,    // [from_rows, width]
                                  const uint32_t *__restrict__ ids, // [gridDim.x]
                                  bf16 *__restrict__ out,           // [gridDim.x, width]
                                  uint32_t from_rows, uint32_t width) {
    release_successor();
    wait_for_predecessor();
    uint32_t id = ids[blockIdx.x];
    if (id >= from_rows) __trap();
    const bf16 *row = from + size_t(id) * width;
    bf16 *to = out + size_t(blockIdx.x) * width;
    for (uint32_t i = 8 * threadIdx.x; i < width; i += 8 * blockDim.x)
        *reinterpret_cast<uint4 *>(to + i) = load16(row + i);
}
