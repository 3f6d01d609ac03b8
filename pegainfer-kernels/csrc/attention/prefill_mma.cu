// Causal attention over the paged KV cache for sequences of many queries (prefill), on every GPU but Hopper, which has
// csrc/attention/prefill_wgmma.cu.
//
// Formula, layouts and technique (FlashAttention-2 by mma.sync): csrc/attention/mma.cuh. Head sizes 64, 128 and 256;
// sequences with more than 16 matrix rows, the others are left to the decode kernels. Each warp has 16 matrix rows of
// its own, and the warps of a block read the same K and V, from the L1. Bound by arithmetic and by loads that no copy
// engine makes: 75 TFLOP/s of the H200's 800 at 4k tokens. Reference: src/cpu/attention/mod.rs.
#include "attention/mma.cuh"
#include "abi/attention_prefill_mma.h"
#include "limits.h"

using namespace limits::attention;
using namespace limits::prefill_mma;

// Grid: tiles of 64 matrix rows (the last ones first: they see most), kv_heads, rows of the batch. Rows of the batch
// with at most kDecodeRows matrix rows are left to `decode`.
template <int D, typename T>
__device__ void prefill(const bf16 *q, const T *k, const T *v, Batch batch, bf16 *out, uint32_t heads, float scale) {
    uint32_t kv_heads = gridDim.y, kv_head = blockIdx.y, group = heads / kv_heads, b = blockIdx.z;
    uint32_t token0 = batch.qo_indptr[b], tokens = batch.qo_indptr[b + 1] - token0, kv_len = batch.kv_lens[b];
    uint32_t row0 = (gridDim.x - 1 - blockIdx.x) * kWarpRows * kWarps + threadIdx.x / 32 * kWarpRows;
    uint32_t rows = tokens * group;
    if (rows <= kDecodeRows || row0 >= rows) return;
    Queries<D> queries = load_queries<D>(q, token0, tokens, kv_len, row0, heads, kv_head * group, group);
    uint32_t end = (kv_len - tokens + min(row0 + kWarpRows - 1, rows - 1) / group) / kBlock + 1;
    const uint32_t *table = batch.block_tables + size_t(b) * batch.max_blocks;
    Partial<D> partial = attend<D, T>(queries, k, v, table, batch.blocks, kv_heads, kv_head, kv_len, 0, end, 1, scale);
    uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t row = row0 + Accumulator::row(lane, 2 * r);
        if (row >= rows) continue;
        bf16 *to = out + (size_t(token0 + row / group) * heads + kv_head * group + row % group) * D;
        float inverse = 1.f / partial.sum[r];
#pragma unroll
        for (int t = 0; t < D / 8; ++t) {
            uint32_t pair = narrow(partial.o[t][2 * r] * inverse, partial.o[t][2 * r + 1] * inverse);
            *reinterpret_cast<uint32_t *>(to + dimension(t)) = pair;
        }
    }
}

#define PREFILL(SUFFIX, D, T)                                                                                          \
    extern "C" __global__ __launch_bounds__(32 * kWarps) void prefill_mma##SUFFIX##_##D(                               \
        const bf16 *q,                                                       /* [tokens, heads * D] */                 \
        const T *k,                                                          /* csrc/attention/kv_cache.cuh */         \
        const T *v,                                                          /* as k */                                \
        BATCH_POINTERS, bf16 *out,                                           /* [tokens, heads * D] */                 \
        uint32_t heads, uint32_t max_blocks, uint32_t blocks, float scale) { /* of the scores, with log2(e) */         \
        start_after_predecessor();                                                                                     \
        prefill<D, T>(q, k, v, {qo_indptr, kv_lens, block_tables, gridDim.z, max_blocks, blocks}, out, heads, scale);  \
    }
PREFILL(, 64, bf16)
PREFILL(, 128, bf16)
PREFILL(, 256, bf16)
PREFILL(_fp8, 64, fp8)
PREFILL(_fp8, 128, fp8)
PREFILL(_fp8, 256, fp8)
