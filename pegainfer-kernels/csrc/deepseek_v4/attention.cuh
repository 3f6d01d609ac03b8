// What the kernels of DeepSeek-V4's sparse attention share (deepseek_v4/attention.cu, deepseek_v4/attention_chunks.cu):
// the list of keys of a token, a softmax over some of them, and the parts of heads and dimensions that warps have.
#pragma once
#include "deepseek_v4/batch.cuh"
#include "deepseek_v4/key_ring.cuh"

using namespace limits::deepseek_v4_attention;

constexpr uint32_t kSteps = kWarpDim / 32;          // vectors of a key that a lane has
constexpr uint32_t kMostWarps = kMaxDim / kWarpDim; // of a block
constexpr uint32_t kAccumulators = kWarpDim / 8;    // of the output, of a warp

// The code of a key: the tensor that has it in the upper two bits, and its row there.
constexpr uint32_t kFresh = 0u << 30, kKept = 1u << 30, kEntry = 2u << 30; // of this step, of a ring, compressed
constexpr uint32_t kNoKey = ~0u;

// Where the keys of tokens are.
template <typename T> struct Lists {
    RaggedBatch batch;
    const T *kv;            // [tokens, dim]
    const T *rings;         // [slot_count, ring, dim]
    const T *entries;       // [entry_pages, per_page, dim]; not read if per_page is 0
    const uint32_t *chosen; // [tokens, k]; not read if k is 0: all complete entries
    uint32_t dim, window, ring, slot_count, entry_pages, per_page, k;

    // The key with this code, which is not kNoKey.
    __device__ __forceinline__ const T *key(uint32_t code) const {
        const T *from = code < kKept ? kv : code < kEntry ? rings : entries;
        return from + size_t(code % kKept) * dim;
    }
};

// The parameters of a kernel that are its lists, besides `dim`; and the lists of these names.
#define LISTS_POINTERS(T) const T *kv, const T *rings, const T *entries, const uint32_t *chosen
#define LISTS_NUMBERS                                                                                                  \
    uint32_t rows, uint32_t pages, uint32_t slot_count, uint32_t window, uint32_t ring, uint32_t entry_pages,          \
        uint32_t per_page, uint32_t k
#define LISTS(T, DIM)                                                                                                  \
    Lists<T> { RAGGED_BATCH, kv, rings, entries, chosen, DIM, window, ring, slot_count, entry_pages, per_page, k }

__device__ __forceinline__ uint32_t code_of(uint32_t tensor, size_t row) {
    if (row >= kKept) __trap();
    return tensor | uint32_t(row);
}

// The list of one token.
template <typename T> struct List {
    Sequence sequence;
    const uint32_t *chosen;
    uint32_t oldest; // position of the first key
    uint32_t recent; // keys of the window
    uint32_t keys;   // all

    __device__ __forceinline__ List(const Lists<T> &x, uint32_t t) {
        sequence = sequence_of(x.batch, t, x.slot_count);
        keys = 0;
        if (sequence.pads()) return;
        uint32_t position = x.batch.positions[t];
        recent = min(position + 1, x.window), oldest = position + 1 - recent;
        uint32_t complete = x.per_page ? (position + 1) / (kPageTokens / x.per_page) : 0;
        keys = recent + (x.k ? min(complete, x.k) : complete);
        chosen = x.chosen + size_t(t) * x.k;
    }

    // The code of key `i`; kNoKey behind the end of the list.
    __device__ __forceinline__ uint32_t code(const Lists<T> &x, uint32_t i) const {
        if (i >= keys) return kNoKey;
        if (i < recent) {
            size_t at;
            bool fresh = is_fresh(sequence, oldest + i, x.ring, at);
            return code_of(fresh ? kFresh : kKept, at);
        }
        i -= recent;
        if (x.k) i = chosen[i];
        if (i == kNoEntry) return kNoKey;
        return code_of(kEntry, entry_of(x.batch, sequence.row, i, x.per_page, x.entry_pages));
    }

    // Key `i`; null behind the end of the list.
    __device__ __forceinline__ const T *key(const Lists<T> &x, uint32_t i) const {
        const uint32_t found = code(x, i);
        return found == kNoKey ? nullptr : x.key(found);
    }
};

// Puts the addresses of the chunk's keys where the block finds them; ends with a barrier.
template <typename T>
__device__ __forceinline__ void find_keys(const Lists<T> &x, const List<T> &list, uint32_t first, const T **found) {
    __syncthreads(); // the chunk before was read
    for (uint32_t i = threadIdx.x; i < kChunk; i += blockDim.x) found[i] = list.key(x, first + i);
    __syncthreads();
}

// A softmax over some keys, in powers of two: denominator, and as many numerators, relative to 2^max.
struct Softmax {
    float max = -INFINITY, sum = 0.f;

    // What scores are relative to; without any key so far all weights are 0.
    __device__ __forceinline__ float base() const { return max == -INFINITY ? 0.f : max; }
    // 2^x relative to 2^max.
    __device__ __forceinline__ float relative(float x) const { return exp2_approx(x - base()); }

    // Adds another one. Numerators, too, become before times themselves plus `own` times the other's.
    __device__ __forceinline__ void merge(const Softmax &other, float &before, float &own) {
        float old = max;
        max = fmaxf(max, other.max);
        before = relative(old), own = relative(other.max);
        sum = fmaf(sum, before, other.sum * own);
    }

    // Adds the sink, a score without a value. Numerators times `before` over `sum` are the result.
    __device__ __forceinline__ void finish(float sink, float &before) {
        float own;
        merge({sink * kLog2E, 1.f}, before, own);
    }
};

// This warp's dimensions of 16 heads as operand A.
struct Queries {
    uint4 low[kSteps], high[kSteps];
};

// Adds the scores of 16 keys to a softmax and replaces them by weights. `present`: for this lane's four columns, those
// of both tiles, whether there is a key. `rescale`: by what numerators so far are multiplied.
__device__ __forceinline__ void weigh_tile(Accumulator (&s)[2], const bool (&present)[2][2], float scale,
                                           Softmax (&rows)[2], float (&rescale)[2]) {
#pragma unroll
    for (uint32_t r = 0; r < 2; ++r) {
        float before = rows[r].max, most = before;
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                float &x = s[n][2 * r + j];
                x = present[n][j] ? __fmul_rn(x, scale) : -INFINITY; // not fused: two kernels give the same bits
                most = fmaxf(most, x);
            }
        rows[r].max = reduce_quad(most, Max());
        const float base = rows[r].base();
        rescale[r] = exp2_approx(before - base);
        rows[r].sum = __fmul_rn(rows[r].sum, rescale[r]);
#pragma unroll
        for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
            for (uint32_t j = 0; j < 2; ++j) {
                float &x = s[n][2 * r + j];
                x = exp2_approx(x - base);
                rows[r].sum += x; // as it is; operand A is rounded
            }
    }
}

__device__ __forceinline__ void rescale_rows(Accumulator (&o)[kAccumulators], const float (&rescale)[2]) {
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) o[i][j] *= rescale[j / 2];
}

// What a block of the kernels by mma.sync has: a token, 16 heads, and of each warp its dimensions.
struct Part {
    uint32_t heads, dim, head[2]; // head of each row of this lane's accumulators
    uint32_t first_dim, steps;    // vectors of its dimensions

    // `group`: of 16 heads.
    __device__ __forceinline__ Part(uint32_t heads, uint32_t dim, uint32_t group = blockIdx.y)
        : heads(heads), dim(dim) {
        first_dim = threadIdx.x / 32 * kWarpDim, steps = min(dim - first_dim, kWarpDim) / 32;
        head[0] = group * kMmaHeads + threadIdx.x % 32 / 4, head[1] = head[0] + 8;
    }

    // Where the warp's dimensions of a row begin in [tokens, heads, dim]; heads beyond the end repeat the last one.
    __device__ __forceinline__ size_t row(uint32_t r) const {
        return (size_t(blockIdx.x) * heads + min(head[r], heads - 1)) * dim + first_dim;
    }

    __device__ __forceinline__ Queries load_queries(const bf16 *q) const {
        Queries out;
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r)
#pragma unroll
            for (uint32_t c = 0; c < kSteps; ++c)
                (r ? out.high : out.low)[c] =
                    c < steps ? load16(q + row(r) + 32 * c + threadIdx.x % 4 * 8) : make_uint4(0, 0, 0, 0);
        return out;
    }
};
