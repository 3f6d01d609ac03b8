// Runs of words to scattered places: `write_runs`, which puts a step's new block ids into the block tables. One block a
// run.
//
//   out[to + i] = words[from + i] for i < count, for each run (from, to, count)
// All GPUs. Latency: most runs are one word. Reference: src/ops/write_runs.rs.
#include "common/base.cuh"
#include "abi/rows_write_runs.h"
#include "limits.h"

using namespace limits::write_runs;

// Starts when all kernels before it have ended, and does not release its successor early: attention of the step
// before reads what it writes, and attention of this step may read it before its own wait. A run that is not within its
// tensors stops the kernel.
extern "C" __global__ void write_runs(const uint32_t *__restrict__ runs,  // [gridDim.x, 3]: from, to, count
                                      const uint32_t *__restrict__ words, // [word_count]
                                      uint32_t *__restrict__ out,         // [elements]
                                      uint32_t word_count, uint32_t elements) {
    const uint32_t *run = runs + kRunFields * blockIdx.x;
    uint32_t from = run[0], to = run[1], count = run[2];
    if (count > word_count || from > word_count - count || count > elements || to > elements - count) __trap();
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) out[to + i] = words[from + i];
}
