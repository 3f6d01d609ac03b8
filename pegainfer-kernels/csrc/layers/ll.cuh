// How the blocks of csrc/layers/decode.cu exchange results: NCCL's LL protocol inside one GPU.
//
// Results of one block that all others need, such as its rows of a GEMV, go through the L2 as words of eight bytes: two
// bf16 and a flag, the number of the exchange (its epoch). Whoever reads the flag has the values too, because an
// aligned word is read and written at once; so there is no barrier of all blocks and no fence, and a reader waits for
// nothing but what it reads. (With barriers of all blocks a step of Qwen3-4B took 2.35 ms on an H200, with flags 2.29.)
//
// A block overwrites the words of an exchange only when it has all words of a later one in which every block has a
// share, and gives its own after it has read what is overwritten. (Attended values are the work of some blocks, but
// they need all of the projection before them, in which every block has a share.)
#pragma once
#include "common/async.cuh"
#include "attention/kv_cache.cuh"

// `Layer`: device pointers of a layer. Matrices are [rows, columns], gate_up with all rows of the gate first.
//
// `Step`: the kernel's arguments.
//   layers [n_layers]; final_norm [hidden]; rope [positions, D]: cosines, then sines
//   slots [M]: kNoSlot for a token that is in the cache already; qo_indptr [M + 1]; kv_lens [M]
//   block_tables [M, max_blocks]; residual, normed [M, hidden]
//   epochs [gridDim.x]: exchanges so far; flagged: words of all exchanges, see `ExchangeBuffers`
//   partials [kv_heads, gridDim.x / kv_heads, 8, D + 4]
//   arrived [kv_heads, gridDim.x / kv_heads]: zero between launches
//   blocks: of the cache; stages: of the ring of weights; scale: of the scores, with log2(e)
#include "abi/layers_decode.h"

#if __CUDA_ARCH__ >= 900
// Where each exchange writes, [M, width / 2] words. Each number of rows has words and epochs of its own, and every
// launch writes all of them: a flag in memory is never old enough to come again, although flags wrap around.
template <int M, int D> struct ExchangeBuffers {
    uint64_t *residual, *qkv, *attended, *activated;
    __device__ explicit ExchangeBuffers(const Step &step) {
        residual = step.flagged;
        qkv = residual + M * step.hidden / 2;
        attended = qkv + M * (step.heads + 2 * step.kv_heads) * D / 2;
        activated = attended + M * step.heads * D / 2;
    }
};

__device__ __forceinline__ void store_flagged(uint64_t *to, uint32_t pair, uint32_t flag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t(flag) << 32 | pair) : "memory");
}

__device__ __forceinline__ uint64_t load_flagged(const uint64_t *from) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ ulonglong2 load_flagged2(const uint64_t *from) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ bool has_flag(uint64_t word, uint32_t flag) { return uint32_t(word >> 32) == flag; }

constexpr uint32_t kMaxPolls = 1u << 23; // of 0.2 us and more each: about two seconds

// Gives up on a word that does not come, after kMaxPolls: a block is lost, or state and launch do not fit. Waits
// inside a block need no such limit, because each depends on a thread that waits here.
class PollLimit {
    uint32_t polls = 0;

  public:
    __device__ __forceinline__ void poll() {
        if (++polls == kMaxPolls) __trap();
    }
};

// Waits for the first word that a warp will load of a row of `width` values, before it asks for all of them: what
// blocks ask for in vain delays what others wait for.
__device__ __forceinline__ void await_first(const uint64_t *flagged, uint32_t width, uint32_t flag) {
    uint32_t warp = threadIdx.x / 32;
    if (4 * 32 * warp >= width) return;
    for (PollLimit limit; !has_flag(load_flagged(flagged + 2 * 32 * warp), flag); limit.poll()) {
    }
}

// Loads four values from each of N places, as soon as they have the flag; `at(i)` is null where there is none.
template <int N, typename At>
__device__ __forceinline__ void await_quads(uint2 (&out)[N], uint32_t flag, const At &at) {
    ulonglong2 v[N];
    bool missing = true;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i].x = v[i].y = uint64_t(flag - 1) << 32;
    for (PollLimit limit; missing; limit.poll()) {
        missing = false;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const uint64_t *from = at(i);
            if (from && !(has_flag(v[i].x, flag) && has_flag(v[i].y, flag))) v[i] = load_flagged2(from);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) missing |= at(i) && !(has_flag(v[i].x, flag) && has_flag(v[i].y, flag));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = make_uint2(uint32_t(v[i].x), uint32_t(v[i].y));
}
#endif
