// Skinny GEMM by wgmma: out = x wᵀ for up to 96 rows of x, every weight read once.
//
// x: [m, k] bf16, w: [n, k] bf16, out: [m, n] bf16 or f32, [m, n / 2] bf16(silu(gate)) * up (gated: rows of the gate
// first), or f32 partials [splits, m, n] that csrc/rows/norm.cu adds. Hopper (sm_90a); 1 to 96 rows, where it beats
// csrc/gemm/gemv_splitk.cu and cuBLASLt. Reference: src/cpu/linear/mod.rs.
//
// Techniques: swap-AB (the weight matrix is operand A: 64 output features a tile; all rows of x are operand B); split-K
// where a matrix has few rows; warp specialisation with one warp that fetches w and one that fetches x by TMA boxes;
// mbarrier rings; programmatic dependent launch with weights fetched ahead. Bound by memory: 25.2 us for the gate and
// up of Qwen3-4B (99.6 MB, 4.0 of 4.46 TB/s) at one row, 26.5 at 32, 32 at 96
// (lab/gemm.md).
//
// Each block has an even share of the rows of w, of a split of their columns, and deals it to its one or two warpgroups
// in tiles of at most 64 rows. Tiles need not be full: the tensor cores then multiply what lies behind, and nobody
// reads the result.
//
// The producers fetch 128 columns at a time: tiles of w from before the kernels that produce x are done, and x, which
// all warpgroups share. A step has as many columns as that because waiting for it and giving it back costs a warpgroup
// as much time as 128 columns of wgmma of 32 rows.
#include "gemm/skinny_wgmma.cuh"
#include "abi/gemm_skinny_wgmma.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
template <int N, int T, Epilogue E, typename O>
__device__ void multiply(const SkinnyShape &shape, const SkinnyShare<T, E> &share, const Rings<N, Format::kBf16> &rings,
                         O *out) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0); // the compiler then knows that it is the warp's
    RingCursor place{warpgroup}, x_place{0};
    uint64_t *w_held = nullptr, *x_held = nullptr; // barriers of the slots that unfinished wgmma read
    const uint64_t a0 = descriptor(rings.w, 0, 1024), b0 = descriptor(rings.x, 0, 1024);
    const uint32_t a_box = rings.w_box / 16, b_box = N * 128 / 16; // of operands
    auto release = [](uint64_t *barrier) {
        if (threadIdx.x % 32 == 0) arrive(barrier);
    };
    for (uint32_t pass = 0; pass < shape.passes; ++pass) {
        float acc[T][N / 2];
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[t][i] = 0.f;
        for (uint32_t step = 0; step < share.steps; ++step) {
            wait(rings.x_full + x_place.index, x_place.parity);
            uint64_t b = b0 + x_place.index * (kBoxes * b_box);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                if (share.is_past_end(shape, pass, t)) continue;
                wait(rings.w_full + place.index, place.parity);
                uint64_t a = a0 + place.index * (kBoxes * a_box);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4 * kBoxes; ++i)
                    wgmma<false>(acc[t], a + i / 4 * a_box + i % 4 * 2, b + i / 4 * b_box + i % 4 * 2);
                wgmma_commit();
                if (step > 0 || t > 0) {
                    wgmma_wait<1>();
                    release(w_held);
                    if (t == 0) release(x_held);
                }
                w_held = rings.w_empty + place.index;
                place.advance(share.warpgroups, shape.slots);
            }
            x_held = rings.x_empty + x_place.index;
            x_place.advance(1, shape.x_slots);
        }
        wgmma_wait<0>();
        release(w_held);
        release(x_held);
#pragma unroll
        for (int t = 0; t < (E == kGated ? 1 : T); ++t) {
            uint32_t row = share.tile_row(shape, pass, t, warpgroup), end = min(row + shape.rows, share.end);
            write<N, E>(acc[t], acc[E == kGated ? T - 1 : t], shape, row, end, out);
        }
    }
}

// out: [m, n], gated [m, n / 2], or, of O float, one such matrix for each split of the columns.
template <int N, int T, Epilogue E, typename O>
__device__ void wide(const TensorMap &x, const TensorMap &w, O *out, const SkinnyShape &shape) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const SkinnyShare<T, E> share(shape, kStep<Format::kBf16>);
    Rings<N, Format::kBf16> rings(shared, shape);
    uint32_t warp = threadIdx.x / 32, fetcher = share.warpgroups * 4;
    release_successor();
    rings.init(shape, share.warpgroups);
    __syncthreads();
    if (sizeof(O) == 4) out += size_t(blockIdx.y) * shape.m * shape.n;
    if (warp < fetcher) multiply<N, T, E>(shape, share, rings, out);
    else if (warp == fetcher && elected()) fetch_weights<N, T, E>(w, shape, share, rings);
    else if (warp == fetcher + 1 && elected()) fetch_inputs<N, T, E>(x, shape, share, rings);
}
#define BODY(...) wide<__VA_ARGS__>(x, w, out, {m, n, k, pitch, split, rows, passes, slots, x_slots, ahead})
#else
#define BODY(...) __trap() // the launcher takes another kernel
#endif

// Grid: blocks, splits. For up to N rows of x; the parameters after k are those of `SkinnyShape`.
#define WIDE(name, N, T, E, O)                                                                                         \
    extern "C" __global__ __launch_bounds__(kMaxWarpgroups * 128 + kFetchers, 1) void name##_##N(                      \
        const __grid_constant__ TensorMap x, /* [m, k] in boxes of m rows */                                           \
        const __grid_constant__ TensorMap w, /* [n, k] in boxes of `rows` rows */                                      \
        O *out,                              /* [m, n], gated [m, n / 2], f32 [gridDim.y, m, n]; rows `pitch` apart */ \
        uint32_t m, uint32_t n, uint32_t k, uint32_t pitch, uint32_t split, uint32_t rows, uint32_t passes,            \
        uint32_t slots, uint32_t x_slots, uint32_t ahead) {                                                            \
        BODY(N, T, E, O);                                                                                              \
    }
// Logits have many rows of w: LONG tiles at once.
#define KERNELS(N, LONG)                                                                                               \
    WIDE(skinny_wgmma_bf16, N, 1, kPlain, bf16)                                                                        \
    WIDE(skinny_wgmma_f32, N, 1, kPlain, float)                                                                        \
    WIDE(skinny_wgmma_gated, N, 2, kGated, bf16)                                                                       \
    WIDE(skinny_wgmma_logits, N, LONG, kLogits, float)
KERNELS(32, 4)
KERNELS(64, 2)
KERNELS(96, 2)
