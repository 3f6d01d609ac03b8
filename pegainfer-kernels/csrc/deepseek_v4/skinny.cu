// DeepSeek-V4's GEMM at few tokens on Hopper (deepseek_v4/skinny.cuh): out = x wᵀ. The rows of w may be in groups, each
// with its own columns of x.
//
// w: [n, k] in FP8 with E8M0 scales [n / 128, k / 128], or bf16. Entry points by what x is:
//
//   skinny_packed:   packed rows (deepseek_v4/rounding.cuh), activations in e4m3; w in FP8
//   skinny_split:    pairs of packed rows, activations as sums of two e4m3 values; w in FP8
//   skinny_exact:    bf16 activations; w in bf16
//   skinny_project:  several weights times the same tokens
//   pack_rows:       bf16 activations to packed rows: groups of 128 columns are rounded to e4m3 times a power of two
//   pack_split_rows: bf16 activations to pairs of packed rows: the second row has what the first one loses
//
// Bound by memory and latency. Reference: src/cpu/deepseek_v4/matmul.rs.
#include "deepseek_v4/skinny.cuh"
#include "abi/deepseek_v4_skinny.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
using namespace skinny;

// A weight of `n` rows, and where its results go.
struct Matrix {
    const uint8_t *codes, *scales;
    void *out; // [m, n]
    uint32_t n;
    bool to_f32;
};

__device__ __forceinline__ Matrix bf16_matrix(const bf16 *w, void *out, uint32_t n, bool to_f32) {
    return {reinterpret_cast<const uint8_t *>(w), nullptr, out, n, to_f32};
}

// The tiles of the weight from row `first_row` on times the tokens of this block, which `fill(memory, first token)`
// puts into shared memory: tile blockIdx.y of the tokens or, with Loops, each gridDim.y-th one from there on.
template <Format F, int N, bool Split, bool Loops, typename Fill>
__device__ __forceinline__ void gemm_tiles(const Matrix &w, uint32_t first_row, uint32_t m, uint32_t k,
                                           const ClusterShare &share, Fill fill) {
    extern __shared__ __align__(1024) uint8_t shared[];
    constexpr uint32_t kTokens = Split ? N / 2 : N;
    const uint32_t row = first_row + share.row();
    const Weight weight = weight_of<F>(w.codes, w.scales, min(row, w.n - 1), min(row + 8, w.n - 1), k);
    Stored<F> stored[kAhead<F>];
    read_ahead(stored, weight, share);
    if (share.count > kAhead<F>) prefetch<F>(w.codes, first_row, w.n, k, share);
    wait_for_predecessor();
    const Memory<F, N> memory(shared, share);
    for (uint32_t first_token = blockIdx.y * kTokens; first_token < m; first_token += gridDim.y * kTokens) {
        fill(memory, first_token);
        const auto sums = multiply_share<F, N, Split>(memory, share, stored, weight);
        for (uint32_t i = sums.begin() + threadIdx.x; i < sums.end(); i += blockDim.x) {
            const uint32_t at = first_row + i / sums.kElements * kTileRows + i % kTileRows;
            const uint32_t token = first_token + i % sums.kElements / kTileRows;
            if (at >= w.n || token >= m) continue;
            const size_t to = size_t(token) * w.n + at;
            if (w.to_f32) static_cast<float *>(w.out)[to] = sums[i];
            else put(static_cast<bf16 *>(w.out) + to, sums[i]);
        }
        if (!Loops || first_token + gridDim.y * kTokens >= m) break;
        __syncwarp();
        share.begin(); // the block's sums are read
        if (share.count > kAhead<F>) read_ahead(stored, weight, share);
    }
}

template <int N>
__device__ void gemm_exact(const bf16 *x, const Matrix &w, uint32_t m, uint32_t k, uint32_t stride, uint32_t group_rows,
                           uint32_t splits) {
    const ClusterShare share(k, splits);
    release_successor();
    share.begin();
    const uint32_t first_row = share.first_tile * kTileRows;
    const bf16 *columns = x + size_t(first_row / group_rows) * k;
    gemm_tiles<Format::kBf16, N, false, false>(
        w, first_row, m, k, share, [&](const Memory<Format::kBf16, N> &memory, uint32_t first_token) {
            put_tokens<Format::kBf16, N, false>(memory, share, [&](uint32_t t) {
                return first_token + t < m ? columns + size_t(first_token + t) * stride : nullptr;
            });
        });
}

// Where the packed rows of the tokens from `first` on are, of one of `groups` groups of columns; null behind the last
// token. With Split, N / 2 tokens have two rows each: those of their first parts come first.
template <int N, bool Split> struct PackedRows {
    const uint8_t *rows;
    uint32_t first, m, k, group, groups;
    __device__ __forceinline__ const uint8_t *operator()(uint32_t t) const {
        const uint32_t part = Split && t >= N / 2, token = first + t - part * (N / 2);
        const size_t row = (size_t(token) * groups + group) * (Split ? 2 : 1) + part;
        return token < m ? rows + row * packed_bytes(k) : nullptr;
    }
};

template <int N, bool Split>
__device__ void gemm_packed(const uint8_t *x, const Matrix &w, uint32_t m, uint32_t k, uint32_t group_rows,
                            uint32_t splits) {
    const ClusterShare share(k, splits);
    release_successor();
    share.begin();
    const uint32_t first_row = share.first_tile * kTileRows;
    gemm_tiles<Format::kFp8, N, Split, Split && N == 32>(
        w, first_row, m, k, share, [&](const Memory<Format::kFp8, N> &memory, uint32_t first_token) {
            copy_tokens(memory, share, k,
                        PackedRows<N, Split>{x, first_token, m, k, first_row / group_rows, w.n / group_rows});
        });
}

// The tile of this block among those of several matrices, one tile a block.
template <int N>
__device__ void project(const bf16 *exact, const uint8_t *packed, const Matrix (&low)[2], const Matrix (&high)[5],
                        uint32_t m, uint32_t k, uint32_t splits) {
    const ClusterShare share(k, splits);
    release_successor();
    share.begin();
    uint32_t tile = share.first_tile;
    Matrix w = {};
    bool found = false, is_low = false;
    auto look = [&](const Matrix &at, bool low_precision) {
        const uint32_t tiles = (at.n + kTileRows - 1) / kTileRows;
        if (!found && tile < tiles) w = at, found = true, is_low = low_precision;
        if (!found) tile -= tiles;
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) look(low[i], true);
#pragma unroll
    for (int i = 0; i < 5; ++i) look(high[i], false);
    if (is_low) {
        gemm_tiles<Format::kFp8, N, false, false>(
            w, tile * kTileRows, m, k, share, [&](const Memory<Format::kFp8, N> &memory, uint32_t first_token) {
                copy_tokens(memory, share, k, PackedRows<N, false>{packed, first_token, m, k, 0, 1});
            });
    } else {
        gemm_tiles<Format::kBf16, N, false, false>(
            w, tile * kTileRows, m, k, share, [&](const Memory<Format::kBf16, N> &memory, uint32_t first_token) {
                put_tokens<Format::kBf16, N, false>(memory, share, [&](uint32_t t) {
                    return first_token + t < m ? exact + size_t(first_token + t) * k : nullptr;
                });
            });
    }
}
#define EXACT(N) gemm_exact<N>(x, bf16_matrix(w, out, n, to_f32 != 0), m, k, stride, group_rows, splits)
#define PACKED(N, SPLIT) gemm_packed<N, SPLIT>(x, {w, scales, out, n, to_f32 != 0}, m, k, group_rows, splits)
#define PROJECT(N)                                                                                                     \
    project<N>(x, packed, {{w0, scales0, out0, n0, false}, {w1, scales1, out1, n1, false}},                            \
               {bf16_matrix(w2, out2, n2, true), bf16_matrix(w3, out3, n2, true), bf16_matrix(w4, out4, n4, true),     \
                bf16_matrix(w5, out5, n4, true), bf16_matrix(w6, out6, n6, false)},                                    \
               m, k, splits)
#else
#define EXACT(N) __trap() // the launcher takes another kernel
#define PACKED(N, SPLIT) __trap()
#define PROJECT(N) __trap()
#endif

// Grid: tiles of rows, times blocks of a cluster; tiles of tokens. skinny_split_16: a block has each gridDim.y-th of
// these.
#define PACKED_KERNEL(name, N, SPLIT)                                                                                  \
    extern "C" __global__ __launch_bounds__(512, 1) void name(                                                         \
        const uint8_t *x,      /* [m, groups, packed rows of k], where a group has `group_rows` rows of w */           \
        const uint8_t *w,      /* [n, k] */                                                                            \
        const uint8_t *scales, /* [n / 128, k / 128] */                                                                \
        void *out,             /* [m, n] bf16 or f32, see `to_f32` */                                                  \
        uint32_t m, uint32_t n, uint32_t k, uint32_t group_rows, /* a multiple of 64, or n */                          \
        uint32_t splits,                                         /* segments of k of a block */                        \
        uint32_t to_f32) {                                                                                             \
        PACKED(N, SPLIT);                                                                                              \
    }
PACKED_KERNEL(skinny_packed_8, 8, false)
PACKED_KERNEL(skinny_packed_16, 16, false)
PACKED_KERNEL(skinny_packed_32, 32, false)
PACKED_KERNEL(skinny_split_8, 16, true)
PACKED_KERNEL(skinny_split_16, 32, true)

// The grid is that of the kernels above.
#define KERNELS(N)                                                                                                     \
    extern "C" __global__ __launch_bounds__(512, 1) void skinny_exact_##N(                                             \
        const bf16 *x, /* [m, stride] */                                                                               \
        const bf16 *w, /* [n, k] */                                                                                    \
        void *out,     /* [m, n] bf16 or f32, see `to_f32` */                                                          \
        uint32_t m, uint32_t n, uint32_t k, uint32_t stride,                                                           \
        uint32_t group_rows, /* of w with the same columns of x, a multiple of 64, or n */                             \
        uint32_t splits, uint32_t to_f32) {                                                                            \
        EXACT(N);                                                                                                      \
    }                                                                                                                  \
    /* Several weights times the same tokens: w0 and w1 in FP8 with packed tokens, the others in bf16. */              \
    /* Grid: tiles of all of them, times blocks of a cluster; tiles of tokens. */                                      \
    extern "C" __global__ __launch_bounds__(512, 1) void skinny_project_##N(                                           \
        const bf16 *x,         /* [m, k] */                                                                            \
        const uint8_t *packed, /* [m, packed row of k] */                                                              \
        const uint8_t *w0, const uint8_t *scales0, const uint8_t *w1, const uint8_t *scales1, /* [n0, k], [n1, k] */   \
        const bf16 *w2, const bf16 *w3,                                                       /* [n2, k] */            \
        const bf16 *w4, const bf16 *w5,                                                       /* [n4, k] */            \
        const bf16 *w6,                                                                       /* [n6, k] */            \
        bf16 *out0, bf16 *out1, float *out2, float *out3, float *out4, float *out5,                                    \
        bf16 *out6, /* [m, n of its weight] */                                                                         \
        uint32_t m, uint32_t k, uint32_t splits, uint32_t n0, uint32_t n1, uint32_t n2, uint32_t n4, uint32_t n6) {    \
        PROJECT(N);                                                                                                    \
    }
KERNELS(8)
KERNELS(16)
KERNELS(32)

#if __CUDA_ARCH__ >= 890
// Packs this warp's group of 128 columns of [rows, k]. Split: to two rows, of which the second has what the first one
// loses.
template <bool Split>
__device__ __forceinline__ void pack_columns(const bf16 *x, uint8_t *out, uint32_t rows, uint32_t k) {
    const uint32_t group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = group / (k / kGroup);
    start_after_predecessor();
    if (row >= rows) return;
    const uint2 pairs = *reinterpret_cast<const uint2 *>(x + size_t(group) * kGroup + 4 * (threadIdx.x % 32));
    const float2 low = widen(pairs.x), high = widen(pairs.y);
    const float4 v = make_float4(low.x, low.y, high.x, high.y);
    if constexpr (Split) return pack_split_group(out + size_t(row) * 2 * packed_bytes(k), k, group % (k / kGroup), v);
    const float own = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    const float amax = fmaxf(reduce_lanes(own, 32, Max()), kLeastAmax);
    pack_group(out + size_t(row) * packed_bytes(k), k, group % (k / kGroup), v, amax);
}
#define PACK(SPLIT) pack_columns<SPLIT>(x, out, rows, k)
#else
#define PACK(SPLIT) __trap() // not launched: takes_packed_rows is false here
#endif

// Grid of both: groups of 128 columns over warps of a block.
extern "C" __global__ __launch_bounds__(128) void pack_rows(const bf16 *x, // [rows, k]
                                                            uint8_t *out,  // [rows, packed row of k]
                                                            uint32_t rows, uint32_t k) {
    PACK(false);
}
extern "C" __global__ __launch_bounds__(128) void pack_split_rows(const bf16 *x, // [rows, k]
                                                                  uint8_t *out,  // [rows, 2, packed row of k]
                                                                  uint32_t rows, uint32_t k) {
    PACK(true);
}
