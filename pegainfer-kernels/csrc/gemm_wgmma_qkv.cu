// QKV projection with QK norm, rotary embedding and KV cache write in its epilogue, for many rows, on Hopper.
//
//   [q, k, v] = x wᵀ, rounded to bf16;  q, k = rope(norm(.)) as csrc/qkv.cu;  k, v to the cache
// Heads of 128, from 1,024 rows on; main loop and techniques: csrc/gemm_wgmma.cuh. 190 us at 4,096 rows of Qwen3-4B on
// an H200, where cuBLASLt and csrc/qkv.cu take 211; its main loop alone takes 159
// (lab/gemm.md). Reference: src/cpu/linear/mod.rs, src/cpu/qkv.rs.
//
// A tile has two heads. All of a row that a head's norm sums is in the four lanes of a quad, and what rotates together,
// 64 columns apart, is in one of them.
#include "kv_cache.cuh"
#include "gemm_wgmma.cuh"
#include "norm_rope.cuh"
#include "abi/gemm_wgmma_qkv.h"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr uint32_t kHead = kQkvHead;        // dimensions
constexpr int kGroups = kHead / 2 / 8; // of 8 columns that rotate with 8 others
constexpr int kHalf = kGroups / 2;     // those whose angles are in shared memory at once
constexpr int kParts = kGroups + 4;    // see `Consumer::part`
static_assert(kParts == kQkvParts);

struct QkvOperands {
    const bf16 *q_norm, *k_norm;
    const float *rope;
    const uint32_t *positions, *slots;
    bf16 *q, *k, *v;
    uint32_t m, heads, kv_heads, max_position, max_slot;
    float eps;
};

struct SharedHeads : GemmShared {
    bf16 norms[2][kHead]; // of queries and keys
};
static_assert(sizeof(SharedHeads) == kQkvSharedBytes);

// Cosines and sines of two neighbouring columns, of a lane's two rows.
struct Angles {
    float2 cosine[2], sine[2];
};

// `inverse_rms` of a head. A call: inlined, it makes the compiler move addresses from uniform registers to those of the
// threads, and spill 112 bytes.
__device__ __noinline__ float head_scale(float squares, float eps) { return inverse_rms(squares, kHead, eps); }

struct Consumer : GemmConsumer {
    const QkvOperands &op;
    const bf16 (&norms)[2][kHead];
    uint32_t words[2][32]; // rounded: for each head and 8 columns two words, of a lane's rows as in the d of `mma`
    float scale[2][2];     // of a head and row
    uint32_t angles, slot; // of row lane % 16 of this warp: where they begin in the table, and its place in the cache
    uint32_t row, head, heads; // of what is rounded: the first row of this warp, the first head, and how many are there

    // The scales of the norms.
    __device__ __forceinline__ void measure() {
        float squares[4] = {}, own = 0.f;
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            uint32_t &word = words[i / 32][i % 32];
            float2 a = widen(word);
            float &sum = squares[i / 32 * 2 + i % 2];
            sum = fmaf(a.x, a.x, fmaf(a.y, a.y, sum));
            // The compiler shall widen it again for the rotation, and not hold it until then.
            asm volatile("" : "+r"(word));
        }
        // Each lane of a quad finds one of them.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            squares[i] = reduce_quad(squares[i], Add());
            if (thread() % 4 == i) own = squares[i];
        }
        own = head_scale(own, op.eps);
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = __shfl_sync(kAll, own, i, 4);
    }

    // Finds the angles of the tile that begins at this row.
    __device__ __forceinline__ void locate(uint32_t tile_row) {
        uint32_t token = min(tile_row + first_row() + thread() % 16, op.m - 1);
        angles = min(op.positions[token], op.max_position - 1) * kHead;
    }

    // Finds the slots of what is rounded.
    __device__ __forceinline__ void find_slots() { slot = op.slots[min(row + thread() % 16, op.m - 1)]; }

    // Begins to copy half of the angles that were located to shared memory.
    __device__ __forceinline__ void fetch_angles(int half) {
        uint32_t lane = thread() % 32, vector = lane % 8;
        __syncwarp(); // what was there was read
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t own = 4 * i + lane / 8;
            const float *from = op.rope + __shfl_sync(kAll, angles, own) + half * (kHead / 4) + 4 * vector;
            copy16(vector_at(box(0), own, vector), from);
            copy16(vector_at(box(1), own, vector), from + kHead / 2);
        }
    }

    // Of 8 columns.
    __device__ __forceinline__ Angles fetched_angles(int group) {
        uint32_t own = thread() % 32 / 4, quad = thread() % 4;
        uint32_t at = vector_at(box(0), own, group % (kGroups / 2) * 2 + quad / 2) + quad % 2 * 8;
        uint32_t sines = kStoreRows * 128, below = 8 * 128;
        return {{load_pair(at), load_pair(at + below)}, {load_pair(at + sines), load_pair(at + sines + below)}};
    }

    // The same from memory.
    __device__ __forceinline__ Angles load_angles(int group) {
        Angles out;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t own = thread() % 32 / 4 + 8 * r;
            const float *at = op.rope + __shfl_sync(kAll, angles, own) + 8 * group + 2 * (thread() % 4);
            out.cosine[r] = *reinterpret_cast<const float2 *>(at);
            out.sine[r] = *reinterpret_cast<const float2 *>(at + kHead / 2);
        }
        return out;
    }

    // Norm and rotation of 8 columns, and of those that rotate with them.
    __device__ __forceinline__ void rotate(int group, const Angles &by) {
        uint32_t column = 8 * group + 2 * (thread() % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (head + h >= op.heads + op.kv_heads) continue;
            const bf16 *weight = &norms[head + h >= op.heads][column];
            uint32_t low_weight = *reinterpret_cast<const uint32_t *>(weight);
            uint32_t high_weight = *reinterpret_cast<const uint32_t *>(weight + kHead / 2);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t &low = words[h][2 * group + r], &high = words[h][16 + 2 * group + r];
                float2 a = widen(norm2(low, scale[h][r], low_weight)), b = widen(norm2(high, scale[h][r], high_weight));
                float2 first = ::rotate(a.x, b.x, by.cosine[r].x, by.sine[r].x);
                float2 second = ::rotate(a.y, b.y, by.cosine[r].y, by.sine[r].y);
                low = narrow(first.x, second.x), high = narrow(first.y, second.y);
            }
        }
    }

    // One head, to the queries or to the cache. Through shared memory, so that 8 lanes write 64 columns of a row.
    __device__ __forceinline__ void write(int h) {
        if (h >= heads) return;
        uint32_t lane = thread() % 32, vector = lane % 8, all = head + h;
        __syncwarp(); // what was there was read
        uint32_t to = vector_at(box(0), lane % 16, lane / 16);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t four[4] = {words[h][4 * i], words[h][4 * i + 1], words[h][4 * i + 2], words[h][4 * i + 3]};
            store_matrices((to ^ i % 4 * 32) + i / 4 * (kStoreRows * 128), four);
        }
        __syncwarp();
        bool query = all < op.heads, key = all < op.heads + op.kv_heads;
        uint32_t kv_head = all - op.heads - (key ? 0 : op.kv_heads);
        bf16 *out = op.v;
        if (key) out = op.k;
        if (query) out = op.q;
        uint32_t high = (query ? kBox : kBox * kBlock) / 8; // vectors from a head's lower half to its upper one
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t own = 4 * i + lane / 8, token = row + own;
            uint32_t place = __shfl_sync(kAll, slot, own);
            // Of the head's first element in `out`, in heads, and of the vector in it.
            size_t first = query ? size_t(token) * op.heads + all
                                 : (size_t(place / kBlock) * op.kv_heads + kv_head) * kBlock;
            uint32_t then = query ? vector : cache_vector(place % kBlock, vector) / 8;
            // No slot is beyond the last, too.
            if (token >= op.m || (!query && place >= op.max_slot)) continue;
            uint4 *at = reinterpret_cast<uint4 *>(out) + first * (kHead / 8) + then;
            uint32_t from = vector_at(box(0), own, vector);
            at[0] = load_shared(from);
            at[high] = load_shared(from + kStoreRows * 128);
        }
    }

    // What is done between steps of the next tile: scales, half of the rotation, a pause in which the angles of the
    // rest arrive, that rest, and a write of each head. On the way the angles of the next tile are found and fetched.
    __device__ __forceinline__ void part(int i, uint32_t next_row) {
        if (i == kHalf + 1) locate(next_row);
        if (heads > 0) {
            if (i == 0) {
                measure();
            } else if (i <= kGroups + 1 && i != kHalf + 1) {
                int group = i <= kHalf ? i - 1 : i - 2;
                if (group % kHalf == 0) {
                    copies_wait_all();
                    __syncwarp();
                }
                rotate(group, fetched_angles(group));
                if (group == kGroups - 1) find_slots();
                if (group == kHalf - 1) fetch_angles(1);
            } else if (i > kGroups + 1) {
                write(i - kGroups - 2);
            }
        }
        if (i == kParts - 1) fetch_angles(0);
    }

    // The main loop of this tile, with the epilogue of the one before. Half: its first head.
    template <bool Half> __device__ __forceinline__ void run(const Tiles<kWeights> &next) {
        tile<Half, kParts>([&](int i) { part(i, next.row); });
#pragma unroll
        for (int h = 0; h < (Half ? 1 : 2); ++h) {
#pragma unroll
            for (int i = 0; i < 32; ++i) words[h][i] = narrow(acc[64 * h + 2 * i], acc[64 * h + 2 * i + 1]);
        }
        row = next.row + first_row();
        head = next.column / kHead;
        heads = min(Half ? 1 : 2, op.heads + 2 * op.kv_heads - head);
    }

    // The rest of the last tile. There are registers to spare for its angles.
    __device__ __forceinline__ void finish() {
        if (heads == 0) return;
        Angles late[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) late[i] = load_angles(kHalf + i);
        find_slots();
        measure();
        copies_wait_all();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kHalf; ++i) rotate(i, fetched_angles(i));
#pragma unroll
        for (int i = 0; i < kHalf; ++i) rotate(kHalf + i, late[i]);
        write(0);
        write(1);
    }
};

__device__ void consume(const QkvOperands &op, uint32_t k, Tiles<kWeights> tiles, SharedHeads &shared) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the warp's
    Consumer c = {{shared, warpgroup, (k + kBox - 1) / kBox}, op, shared.norms};
#pragma unroll
    for (int i = 0; i < 32; ++i) c.words[0][i] = c.words[1][i] = 0;
    c.row = c.head = c.heads = 0; // before the first tile there is none
    while (tiles.next()) {
        if (tiles.half) c.run<true>(tiles);
        else c.run<false>(tiles);
    }
    c.finish();
}

// A bad slot or position stops the kernel. Consumers only pass over it: a branch to a trap in the middle would cost
// them registers.
__device__ void check(const QkvOperands &op) {
    for (uint32_t i = blockIdx.x * 32 + threadIdx.x % 32; i < op.m; i += gridDim.x * 32) {
        uint32_t slot = op.slots[i];
        if (op.positions[i] >= op.max_position || (slot >= op.max_slot && slot != kNoSlot)) __trap();
    }
}

// A barrier of all consumers.
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * 128) : "memory"); }

__device__ void linear_qkv(const TensorMap &x, const TensorMap &w, const QkvOperands &op, uint32_t k, uint32_t group) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    SharedHeads &shared = *reinterpret_cast<SharedHeads *>(bytes);
    release_successor();
    shared.init();
    Tiles<kWeights> tiles(op.m, (op.heads + 2 * op.kv_heads) * kHead, group);
    if (threadIdx.x < 128) {
        registers_lower<kProducerRegisters>();
        auto place = [](const Tiles<kWeights> &tile, uint32_t i) { return tile.column + i * kBox; };
        if (threadIdx.x / 32 == 0 && elected()) fetch(x, w, tiles, k, shared, place);
        if (threadIdx.x / 32 == 1) {
            wait_for_predecessor();
            check(op);
        }
    } else {
        // Weights, which need not wait for the kernel before.
        uint32_t i = threadIdx.x % kHead;
        shared.norms[0][i] = op.q_norm[i], shared.norms[1][i] = op.k_norm[i];
        consumers_sync();
        wait_for_predecessor();
        registers_raise<kConsumerRegisters>();
        consume(op, k, tiles, shared);
    }
}
#define BODY()                                                                                                         \
    QkvOperands op = {q_norm, k_norm, rope, positions, slots, q, k, v,                                                 \
                      m, heads, kv_heads, max_position, max_slot, eps};                                                \
    linear_qkv(x, w, op, columns, group)
#else
#define BODY() __trap() // the launcher takes a GEMM and csrc/qkv.cu
#endif

// Grid: as many blocks as multiprocessors, whatever the shape. columns: at least kParts steps. A bad slot or position
// stops the kernel.
extern "C" __global__ __launch_bounds__(kThreads, 1) void gemm_wgmma_qkv(
    const __grid_constant__ TensorMap x,        // [m, columns] in boxes of 128 rows
    const __grid_constant__ TensorMap w,        // [(heads + 2 kv_heads) * 128, columns] in boxes of 64 rows
    const bf16 *__restrict__ q_norm,            // [128]
    const bf16 *__restrict__ k_norm,            // [128]
    const float *__restrict__ rope,             // [max_position, 128]: cosines, then sines
    const uint32_t *__restrict__ positions,     // [m]
    const uint32_t *__restrict__ slots,         // [m], or kNoSlot
    bf16 *__restrict__ q,                       // [m, heads * 128]
    bf16 *__restrict__ k, bf16 *__restrict__ v, // [blocks, kv_heads, 2, 16, 64], csrc/kv_cache.cuh
    uint32_t m, uint32_t columns, uint32_t heads, uint32_t kv_heads, uint32_t max_position, uint32_t max_slot,
    float eps,
    uint32_t group) { // tiles along the rows that are done before the next columns
    BODY();
}
