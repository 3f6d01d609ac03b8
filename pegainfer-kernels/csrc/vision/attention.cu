// Attention without a mask inside segments of rows, the patches of one image each, by mma.sync.
//
//   out = softmax(q kᵀ scale) v over the rows of a query's segment; scale includes log2(e), for base 2
// qkv: [n, 3, heads, head_dim] bf16, head_dim a multiple of 8 up to D; out: [n, heads, head_dim] bf16. Entry points for
// D of 64, 80 (heads of 72) and 128; elements beyond head_dim are 0. Compute capability 8.0 and later. Technique:
// FlashAttention-2 (arXiv 2307.08691): a block has 128 queries of a head, a warp 32 of them, so that each fragment of K
// and V serves two multiplications; V of a tile comes while its scores are computed, the next K while V is multiplied.
// Bound by the tensor cores and by reads of fragments from shared memory. Reference: src/cpu/vision/attention.rs.
#include "common/async.cuh"
#include "attention/softmax.cuh"
#include "abi/vision_attention.h"
#include "limits.h"

using namespace limits::vision_attention;

constexpr uint32_t kStrips = 2, kWarps = kRows / (16 * kStrips);

// A segment's part of a block, and the sizes of a row.
struct SegmentTile {
    const bf16 *qkv; // the head's first query of the segment
    uint32_t row0, rows, head_dim;
    size_t pitch, width; // elements of a row of qkv, and from a query to its key
};

template <int D> struct SegmentAttention {
    // Vectors of a row in shared memory: odd, so that ldmatrix reads eight rows without bank conflicts.
    static constexpr uint32_t kVectors = D / 8, kPitch = kVectors | 1, kRowBytes = 16 * kPitch;
    static constexpr uint32_t kBytes = (kRows + 2 * kTokens) * kRowBytes;
    static_assert(kBytes <= kSharedBytes);
    Accumulator o[kStrips][D / 8], s[kStrips][kTokens / 8];
    Softmax softmax[kStrips];
    uint32_t queries, keys, values; // the lane's places in the tiles

    __device__ __forceinline__ SegmentAttention(uint32_t shared) {
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, r = lane % 8;
        queries = shared + (warp * 16 * kStrips + matrix % 2 * 8 + r) * kRowBytes + matrix / 2 * 16;
        keys = shared + (kRows + matrix / 2 * 8 + r) * kRowBytes + matrix % 2 * 16;
        values = shared + (kRows + kTokens + matrix % 2 * 8 + r) * kRowBytes + matrix / 2 * 16;
#pragma unroll
        for (int m = 0; m < kStrips; ++m)
#pragma unroll
            for (int t = 0; t < D / 8; ++t) o[m][t] = Accumulator{};
    }

    // Starts the copies of `count` rows from row `first` of the segment on; rows and elements behind the end are 0.
    static __device__ __forceinline__ void fetch(uint32_t to, const bf16 *from, const SegmentTile &tile, uint32_t first,
                                                 uint32_t count) {
        for (uint32_t i = threadIdx.x; i < count * kVectors; i += blockDim.x) {
            uint32_t r = i / kVectors, vector = i % kVectors;
            bool inside = first + r < tile.rows && 8 * vector < tile.head_dim;
            const bf16 *at = from + size_t(min(first + r, tile.rows - 1)) * tile.pitch + (inside ? 8 * vector : 0);
            copy16_or_zero(to + r * kRowBytes + vector * 16, at, inside);
        }
        copies_commit();
    }

    // s = q kᵀ
    __device__ __forceinline__ void scores() {
#pragma unroll
        for (int m = 0; m < kStrips; ++m)
#pragma unroll
            for (int t = 0; t < int(kTokens) / 8; ++t) s[m][t] = Accumulator{};
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            uint4 a[kStrips];
#pragma unroll
            for (int m = 0; m < kStrips; ++m) a[m] = load_matrices(queries + m * 16 * kRowBytes + i * 32);
#pragma unroll
            for (int b = 0; b < int(kTokens) / 16; ++b) {
                uint4 k = load_matrices(keys + b * 16 * kRowBytes + i * 32);
#pragma unroll
                for (int m = 0; m < kStrips; ++m) {
                    mma(s[m][2 * b], a[m], k.x, k.y);
                    mma(s[m][2 * b + 1], a[m], k.z, k.w);
                }
            }
        }
    }

    // From scores to weights, of which there are `tokens`; rescales what is there of the output.
    template <bool Masked> __device__ __forceinline__ void weigh(uint32_t tokens, float scale) {
        int last = int(tokens) - 1 - int(Accumulator::column(threadIdx.x % 32, 0));
        const int limits[2] = {last, last};
#pragma unroll
        for (int m = 0; m < kStrips; ++m) {
            auto &scores = reinterpret_cast<float (&)[kTokens / 2]>(s[m]);
            float2 by = softmax[m].template apply<Masked>(scores, limits, scale);
#pragma unroll
            for (int t = 0; t < D / 8; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][t][i] *= i < 2 ? by.x : by.y;
        }
    }

    // o += p v
    __device__ __forceinline__ void add_values() {
#pragma unroll
        for (int b = 0; b < int(kTokens) / 16; ++b) {
            uint4 p[kStrips];
#pragma unroll
            for (int m = 0; m < kStrips; ++m) p[m] = operand_a(s[m][2 * b], s[m][2 * b + 1]);
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                uint4 v = load_matrices<true>(values + b * 16 * kRowBytes + i * 32);
#pragma unroll
                for (int m = 0; m < kStrips; ++m) {
                    mma(o[m][2 * i], p[m], v.x, v.y);
                    mma(o[m][2 * i + 1], p[m], v.z, v.w);
                }
            }
        }
    }

    // Writes o / sum. `out`: the head's first row of the segment.
    __device__ __forceinline__ void write(bf16 *out, const SegmentTile &tile) {
        uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int j = 0; j < 2 * kStrips; ++j) {
            int m = j / 2, r = j % 2;
            float inverse = 1.f / reduce_quad(softmax[m].sum[r], Add());
            uint32_t row = tile.row0 + warp * 16 * kStrips + 16 * m + Accumulator::row(lane, 2 * r);
            bf16 *to = out + size_t(row) * tile.width;
#pragma unroll
            for (int t = 0; t < D / 8; ++t) {
                const Accumulator &from = o[m][t];
                uint32_t d = 8 * t + Accumulator::column(lane, 0);
                if (row < tile.rows && d < tile.head_dim) put(to + d, from[2 * r] * inverse, from[2 * r + 1] * inverse);
            }
        }
    }
};

template <int D>
__device__ void attend(const bf16 *qkv, const uint32_t *indptr, bf16 *out, uint32_t segments, uint32_t heads,
                       uint32_t head_dim, float scale) {
    using Attention = SegmentAttention<D>;
    extern __shared__ __align__(128) uint8_t bytes[];
    start_after_predecessor();
    // The segment of this tile.
    uint32_t ticket = blockIdx.x, begin = indptr[0], end = begin, segment = 0;
    for (; segment < segments; ++segment) {
        begin = end, end = indptr[segment + 1];
        uint32_t tiles = (end - begin + kRows - 1) / kRows;
        if (ticket < tiles) break;
        ticket -= tiles;
    }
    if (segment == segments) return;
    size_t width = size_t(heads) * head_dim, first = size_t(blockIdx.y) * head_dim;
    SegmentTile tile = {qkv + begin * 3 * width + first, ticket * kRows, end - begin, head_dim, 3 * width, width};
    uint32_t shared = shared_address(bytes), keys = shared + kRows * Attention::kRowBytes;
    uint32_t values = keys + kTokens * Attention::kRowBytes;
    Attention attention(shared);
    Attention::fetch(shared, tile.qkv, tile, tile.row0, kRows);
    uint32_t kv = (tile.rows - 1) / kTokens; // from the last tile, which may be short, to the first
    Attention::fetch(keys, tile.qkv + width, tile, kv * kTokens, kTokens);
    for (bool masked = true;; --kv, masked = false) {
        copies_wait<0>();
        __syncthreads(); // the keys are there, and the values before are done with
        Attention::fetch(values, tile.qkv + 2 * width, tile, kv * kTokens, kTokens);
        attention.scores();
        copies_wait<0>();
        __syncthreads(); // the values are there, and the keys are done with
        if (kv > 0) Attention::fetch(keys, tile.qkv + width, tile, (kv - 1) * kTokens, kTokens);
        if (masked) attention.template weigh<true>(tile.rows - kv * kTokens, scale);
        else attention.template weigh<false>(kTokens, scale);
        attention.add_values();
        if (kv == 0) break;
    }
    attention.write(out + begin * width + first, tile);
}

// Grid: at least as many tiles of kRows rows as the segments have, then heads. Shared memory: `kBytes`.
#define SEGMENT_ATTENTION(D)                                                                                           \
    extern "C" __global__ __launch_bounds__(32 * kWarps, D > 80 ? 1 : 2) void segment_attention_##D(                   \
        const bf16 *qkv,                                                     /* [n, 3, heads, head_dim] */             \
        const uint32_t *indptr,                                              /* [segments + 1] */                      \
        bf16 *out,                                                           /* [n, heads, head_dim] */                \
        uint32_t segments, uint32_t heads, uint32_t head_dim, float scale) { /* of the scores, with log2(e) */         \
        attend<D>(qkv, indptr, out, segments, heads, head_dim, scale);                                                 \
    }
SEGMENT_ATTENTION(64)
SEGMENT_ATTENTION(80)
SEGMENT_ATTENTION(128)
