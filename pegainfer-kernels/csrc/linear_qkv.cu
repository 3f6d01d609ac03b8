// The QKV projection of many rows with what follows it, on Hopper's warpgroups: per-head norm and rotation of queries and
// keys, and the write of keys and values to the paged cache. Heads of 128.
//
// A tile (csrc/many.cuh) has two heads. A warp lays 16 rows of a head in shared memory, and while the next tile is
// multiplied it takes four of them at a time as csrc/qkv.cu does: a lane has 8 neighbouring columns and the 8 that they
// rotate with. So it adds in the same order, and what it does is one short loop: code that runs once is slow to fetch.
#include "eight.cuh"
#include "many.cuh"

constexpr uint32_t kHead = 128; // dimensions
constexpr uint32_t kLanes = 8;  // of a row of a head
constexpr int kPasses = 4;      // over the rows of a head
constexpr int kParts = 2 * kPasses + 1;

struct Operands {
    const bf16 *q_norm, *k_norm;
    const float *rope;
    const uint32_t *positions, *slots;
    bf16 *q, *k, *v;
    uint32_t m, heads, kv_heads, max_position, max_slot;
    float eps;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct SharedHeads : Shared {
    bf16 norms[2][kHead]; // of queries and keys
};

// Eight elements of a norm: scaled, rounded, multiplied by the weight, and rounded. A product of two bf16 is exact in
// f32, so rounding it is one instruction with the multiplication.
__device__ __forceinline__ Eight normed(uint4 row, float scale, uint4 weight) {
    uint32_t *v = reinterpret_cast<uint32_t *>(&row);
    const __nv_bfloat162 *w = reinterpret_cast<const __nv_bfloat162 *>(&weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float2 a = widen(v[j]);
        uint32_t rounded = narrow(a.x * scale, a.y * scale);
        __nv_bfloat162 product = __hmul2(reinterpret_cast<__nv_bfloat162 &>(rounded), w[j]);
        v[j] = reinterpret_cast<uint32_t &>(product);
    }
    return widen8(row);
}

struct Consumer : Multiplier {
    const Operands &op;
    const bf16 (&norms)[2][kHead];
    uint32_t second[32];       // head of the last tile, rounded: two words for each 8 columns, as in the d of `mma`
    uint32_t row, head, heads; // of that tile: the first row of this warp, the first head, and how many are there
    uint32_t angles, place;    // of row lane % 16 of this warp: where its angles begin, and its slot

    // 16 rows of a head to shared memory.
    __device__ __forceinline__ void lay(const uint32_t (&words)[32]) {
        uint32_t lane = thread() % 32, to = piece_at(box(0), lane % 16, lane / 16);
        __syncwarp(); // what was there was read
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t four[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
            store_matrices((to ^ i % 4 * 32) + i / 4 * (kStoreRows * 128), four);
        }
        __syncwarp();
    }

    // Finds angles and slots of the tile that begins at this row.
    __device__ __forceinline__ void locate(uint32_t tile_row) {
        uint32_t token = min(tile_row + first_row() + thread() % 16, op.m - 1);
        angles = min(op.positions[token], op.max_position - 1) * kHead;
        place = op.slots[token];
    }

    // Norm and rotation of N times four rows of a head.
    template <int N>
    __device__ __forceinline__ void norm_rope(uint4 (&low)[N], uint4 (&high)[N], const bf16 *weight, int first) {
        uint32_t lane = thread() % 32, d = 8 * (lane % kLanes);
        Eight cosine[N], sine[N];
        float squares[N], scale = 0.f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float *at = op.rope + __shfl_sync(kAll, angles, 4 * (first + n) + lane / kLanes) + d;
            cosine[n] = load8(at), sine[n] = load8(at + kHead / 2);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            squares[n] = sum_squares(low[n]) + sum_squares(high[n]);
            for (uint32_t step = kLanes / 2; step > 0; step /= 2)
                squares[n] += __shfl_xor_sync(kAll, squares[n], step);
            // Each lane of a row finds the scale of one.
            if (n == 0 || lane % N == n) scale = squares[n];
        }
        scale = 1.f / sqrtf(scale / float(kHead) + op.eps);
        uint4 low_weight = load16(weight + d), high_weight = load16(weight + d + kHead / 2);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float by = N == 1 ? scale : __shfl_sync(kAll, scale, n, kLanes);
            Eight a = normed(low[n], by, low_weight), b = normed(high[n], by, high_weight), c, d;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                c.x[j] = a.x[j] * cosine[n].x[j] - b.x[j] * sine[n].x[j];
                d.x[j] = b.x[j] * cosine[n].x[j] + a.x[j] * sine[n].x[j];
            }
            low[n] = narrow8(c), high[n] = narrow8(d);
        }
    }

    // N times four rows of the head that is laid out: to the queries, or to the cache.
    template <int N> __device__ __forceinline__ void pass(int h, int first) {
        if (h >= heads) return;
        uint32_t lane = thread() % 32, piece = lane % kLanes, all = head + h;
        bool query = all < op.heads, key = all < op.heads + op.kv_heads;
        uint4 low[N], high[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint32_t from = piece_at(box(0), 4 * (first + n) + lane / kLanes, piece);
            low[n] = load_shared(from), high[n] = load_shared(from + kStoreRows * 128);
        }
        if (key) norm_rope<N>(low, high, norms[!query], first);
        uint32_t kv_head = all - op.heads - (key ? 0 : op.kv_heads);
        bf16 *out = op.v;
        if (key) out = op.k;
        if (query) out = op.q;
        uint32_t to_high = (query ? kBox : kBox * kBlock) / 8;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint32_t own = 4 * (first + n) + lane / kLanes, token = row + own, slot = __shfl_sync(kAll, place, own);
            size_t slab = (size_t(slot / kBlock) * op.kv_heads + kv_head) * kBlock;
            uint4 *to = reinterpret_cast<uint4 *>(out);
            if (query) to += (size_t(token) * op.heads + all) * (kHead / 8) + piece;
            else to += slab * (kHead / 8) + cache_piece(slot % kBlock, piece) / 8;
            // No slot is beyond the last one, too.
            if (token < op.m && (query || slot < op.max_slot)) to[0] = low[n], to[to_high] = high[n];
        }
    }

    // What is done while the next tile is multiplied.
    __device__ __forceinline__ void part(int i, uint32_t next_row) {
        if (i == 2 * kPasses) return locate(next_row);
        if (i == kPasses) lay(second);
        pass<1>(i / kPasses, i % kPasses);
    }

    // Multiplies this tile and does the rest of the one before. Half: its first head.
    template <bool Half> __device__ __forceinline__ void run(const Tiles<kWeights> &next) {
        tile<Half, kParts, false>([&](int i) { part(i, next.row); });
        uint32_t first[32];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            first[i] = narrow(acc[2 * i], acc[2 * i + 1]);
            if (!Half) second[i] = narrow(acc[64 + 2 * i], acc[64 + 2 * i + 1]);
        }
        lay(first);
        row = next.row + first_row();
        head = next.column / kHead;
        heads = min(Half ? 1 : 2, op.heads + 2 * op.kv_heads - head);
    }

    // The last tile's.
    __device__ __forceinline__ void finish() {
        pass<kPasses>(0, 0);
        lay(second);
        pass<kPasses>(1, 0);
    }
};

__device__ void consume(const Operands &op, uint32_t k, Tiles<kWeights> tiles, SharedHeads &shared) {
    uint32_t warpgroup = __shfl_sync(kAll, threadIdx.x / 128, 0) - 1; // the compiler then knows that it is the warp's
    Consumer c = {{shared, warpgroup, (k + kBox - 1) / kBox}, op, shared.norms};
#pragma unroll
    for (int i = 0; i < 32; ++i) c.second[i] = 0;
    c.row = c.head = c.heads = 0; // before the first tile there is none
    c.angles = c.place = 0;
    while (tiles.next()) {
        if (tiles.half) c.run<true>(tiles);
        else c.run<false>(tiles);
    }
    c.finish();
}

// A bad slot or position stops the kernel. What multiplies only passes over it: a branch to a trap in the middle would
// cost it registers.
__device__ void check(const Operands &op) {
    for (uint32_t i = blockIdx.x * 32 + threadIdx.x % 32; i < op.m; i += gridDim.x * 32) {
        uint32_t slot = op.slots[i];
        if (op.positions[i] >= op.max_position || (slot >= op.max_slot && slot != kNoSlot)) __trap();
    }
}

__device__ void linear_qkv(const TensorMap &x, const TensorMap &w, const Operands &op, uint32_t k, uint32_t group) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    SharedHeads &shared = *reinterpret_cast<SharedHeads *>(bytes);
    release_successor();
    shared.init();
    Tiles<kWeights> tiles(op.m, (op.heads + 2 * op.kv_heads) * kHead, group);
    if (threadIdx.x < 128) {
        registers_lower<40>();
        auto place = [](const Tiles<kWeights> &tile, uint32_t i) { return tile.column + i * kBox; };
        if (threadIdx.x / 32 == 0 && elected()) fetch(x, w, tiles, k, shared, place);
        if (threadIdx.x / 32 == 1) {
            wait_for_predecessor();
            check(op);
        }
    } else {
        // Weights need not wait for the kernel before.
        uint32_t i = threadIdx.x % kHead;
        shared.norms[0][i] = op.q_norm[i], shared.norms[1][i] = op.k_norm[i];
        asm volatile("bar.sync 1, 256;" ::: "memory");
        wait_for_predecessor();
        registers_raise<232>();
        consume(op, k, tiles, shared);
    }
}
#define BODY()                                                                                                         \
    linear_qkv(x, w, {q_norm, k_norm, rope, positions, slots, q, k, v, m, heads, kv_heads, max_position, max_slot, eps}, \
               columns, group)
#else
#define BODY() __trap() // the launcher takes a product and csrc/qkv.cu
#endif

// Grid: as many blocks as multiprocessors, whatever the shape. x: [m, columns] in boxes of 128 rows, w: [(heads + 2
// kv_heads) * 128, columns] in boxes of 64 rows, columns: at least kParts steps; the others as in csrc/qkv.cu. A bad slot
// or position stops the kernel.
extern "C" __global__ __launch_bounds__(kThreads, 1) void linear_qkv_many(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const bf16 *__restrict__ q_norm,
    const bf16 *__restrict__ k_norm, const float *__restrict__ rope, const uint32_t *__restrict__ positions,
    const uint32_t *__restrict__ slots, bf16 *__restrict__ q, bf16 *__restrict__ k, bf16 *__restrict__ v, uint32_t m,
    uint32_t columns, uint32_t heads, uint32_t kv_heads, uint32_t max_position, uint32_t max_slot, float eps,
    uint32_t group) {
    BODY();
}
