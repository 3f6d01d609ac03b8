// Logits processors of requests (repetition penalty, bias, grammar mask) on their rows of logits, in place. A block a
// row; not on the path of requests without any.
//
//   logit = (logit > 0 ? logit / scale : logit * scale) + add for each edit, then -inf where the mask has no bit
// All GPUs, f32. Reference: src/cpu/adjust.rs, bit for bit.
#include "common/base.cuh"
#include "abi/rows_adjust.h"
#include "limits.h"

using namespace limits::adjust;

// Rounded operations, never fused: the CPU gets the same bits.
__device__ __forceinline__ float apply(float logit, float scale, float add) {
    return __fadd_rn(logit > 0.f ? __fdiv_rn(logit, scale) : __fmul_rn(logit, scale), add);
}

extern "C" __global__ void adjust(float *logits,                      // [rows, vocab]
                                  const uint32_t *__restrict__ spans, // [rows, 3]: first edit, end, mask
                                  const uint32_t *__restrict__ edits, // [edits, 3]: token, scale, addend
                                  const uint32_t *__restrict__ masks, // [masks, words]
                                  uint32_t vocab) {
    const uint32_t *span = spans + kSpanWords * blockIdx.x;
    float *row = logits + size_t(blockIdx.x) * vocab;
    for (uint32_t e = span[0] + threadIdx.x; e < span[1]; e += blockDim.x) {
        const uint32_t *edit = edits + kEditWords * size_t(e);
        // No two edits of a row are for the same token.
        if (edit[0] < vocab) row[edit[0]] = apply(row[edit[0]], __uint_as_float(edit[1]), __uint_as_float(edit[2]));
    }
    if (span[2] == kNoMask) return;
    // The mask has the last word on tokens that an edit touched, too.
    __syncthreads();
    const uint32_t *mask = masks + size_t(span[2]) * ((vocab + 31) / 32);
    for (uint32_t token = threadIdx.x; token < vocab; token += blockDim.x)
        if (!(mask[token / 32] >> token % 32 & 1)) row[token] = -INFINITY;
}
