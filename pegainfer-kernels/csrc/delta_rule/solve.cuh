// The inverse of I + A for a chunk, 64 x 64 and strictly lower triangular A, by a block of four warps, in
// csrc/delta_rule/intra.cu: block forward substitution. Diagonal blocks of 16 x 16 are inverted in f32, the others are
// GEMMs in tf32 (mma.m16n8k8).
#pragma once
#include "delta_rule/chunks.cuh"

constexpr uint32_t kPitch = 68; // floats from row to row: banks apart for the lanes of an operand

// Rounded to tf32.
__device__ __forceinline__ float tf32(float x) {
    uint32_t out;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(out) : "f"(x));
    return __uint_as_float(out);
}

// d[16, 8] += a[16, 8] b[8, 8] of rounded operands; a0, a1 hold rows group and group + 8 at column quad, a2, a3 at
// quad + 4, b0, b1 column group at rows quad and quad + 4.
__device__ __forceinline__ void mma_tf32(Accumulator &d, float a0, float a1, float a2, float a3, float b0, float b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
                   "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// A block of 16 x 16, as accumulators, to operand B; columns scaled.
__device__ __forceinline__ uint4 operand_b(const Accumulator (&d)[2], const float *scale) {
    float2 low = reinterpret_cast<const float2 *>(scale)[threadIdx.x % 4];
    float2 high = reinterpret_cast<const float2 *>(scale)[threadIdx.x % 4 + 4];
    return make_uint4(narrow(d[0][0] * low.x, d[0][1] * low.y), narrow(d[1][0] * high.x, d[1][1] * high.y),
                      narrow(d[0][2] * low.x, d[0][3] * low.y), narrow(d[1][2] * high.x, d[1][3] * high.y));
}

// A block of the matrix from and to accumulators. Off the diagonal it is only an operand: rounded to tf32.
__device__ __forceinline__ float *block_rows(float *matrix, uint32_t i, uint32_t j) {
    uint32_t lane = threadIdx.x % 32;
    return matrix + (16 * i + Accumulator::row(lane, 0)) * kPitch + 16 * j + Accumulator::column(lane, 0);
}

__device__ __forceinline__ void load_block(Accumulator (&d)[2], float *matrix, uint32_t i, uint32_t j) {
    const float *at = block_rows(matrix, i, j);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        float2 pair = *reinterpret_cast<const float2 *>(at + e / 2 % 2 * 8 * kPitch + e / 4 * 8);
        d[e / 4][e % 4] = pair.x, d[e / 4][e % 4 + 1] = pair.y;
    }
}

__device__ __forceinline__ void store_block(float *matrix, uint32_t i, uint32_t j, const Accumulator (&d)[2]) {
    float *at = block_rows(matrix, i, j);
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        float low = d[e / 4][e % 4], high = d[e / 4][e % 4 + 1];
        if (i != j) low = tf32(low), high = tf32(high);
        *reinterpret_cast<float2 *>(at + e / 2 % 2 * 8 * kPitch + e / 4 * 8) = make_float2(low, high);
    }
}

// Inverts the diagonal block of each warp, in place, by forward substitution: a lane has a column.
__device__ __forceinline__ void invert_diagonal(float *matrix) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *block = matrix + 16 * warp * (kPitch + 1);
    float column[16];
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
        float4 sum = make_float4(i == lane % 16, 0.f, 0.f, 0.f);
#pragma unroll
        for (uint32_t j = 0; j < i; j += 4) {
            // Beyond the diagonal A is zero.
            float4 a = *reinterpret_cast<const float4 *>(block + i * kPitch + j);
            sum.x -= a.x * column[j];
            if (j + 1 < i) sum.y -= a.y * column[j + 1];
            if (j + 2 < i) sum.z -= a.z * column[j + 2];
            if (j + 3 < i) sum.w -= a.w * column[j + 3];
        }
        column[i] = (sum.x + sum.y) + (sum.z + sum.w);
    }
    __syncwarp();
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) block[i * kPitch + lane % 16] = tf32(column[i]);
    __syncwarp();
}

// Block (i, j) of the inverse where bands split - N to split - 1 and split to split + N - 1 are inverted: minus the
// inverse of the lower ones times A times the inverse of the upper ones. The first GEMM's columns enter the second
// one's sum in the order in which they lie in registers.
template <int N>
__device__ __forceinline__ void corner(const float *matrix, uint32_t i, uint32_t j, uint32_t split,
                                       Accumulator (&d)[2]) {
    uint32_t group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    auto at = [&](uint32_t row, uint32_t column) { return matrix[row * kPitch + column]; };
    Accumulator p[N][2] = {};
#pragma unroll
    for (uint32_t m = 0; m < 2 * N; ++m) {
        uint32_t row = 16 * i + group, middle = 16 * split + 8 * m + quad;
        if (split + m / 2 > i) break;
        float a0 = at(row, middle), a1 = at(row + 8, middle);
        float a2 = at(row, middle + 4), a3 = at(row + 8, middle + 4);
#pragma unroll
        for (uint32_t n = 0; n < 2 * N; ++n) {
            uint32_t column = 16 * (split - N) + 8 * n + group;
            mma_tf32(p[n / 2][n % 2], a0, a1, a2, a3, at(middle, column), at(middle + 4, column));
        }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) d[e / 4][e % 4] = 0.f;
#pragma unroll
    for (uint32_t n = 0; n < 2 * N; ++n) {
        uint32_t row = 16 * (split - N) + 8 * n + 2 * quad;
        if (split - N + n / 2 < j) continue;
        const Accumulator &a = p[n / 2][n % 2];
        float a0 = tf32(-a[0]), a1 = tf32(-a[2]), a2 = tf32(-a[1]), a3 = tf32(-a[3]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            uint32_t column = 16 * j + 8 * c + group;
            mma_tf32(d[c], a0, a1, a2, a3, at(row, column), at(row + 1, column));
        }
    }
}

// (I + A)^-1 diag(beta), from A in shared memory: diagonal blocks, then the corners of 2 x 2 blocks, then that of
// 4 x 4.
__device__ void solve(float *matrix, const float *beta, IntraChunk *part) {
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Accumulator block[2];
    invert_diagonal(matrix);
    load_block(block, matrix, warp, warp);
    part->state.solve[block_index(warp, warp)][lane] = operand_b(block, beta + 16 * warp);
    __syncthreads();
    if (warp < 2) {
        uint32_t i = 2 * warp + 1, j = 2 * warp;
        corner<1>(matrix, i, j, i, block);
        __syncwarp();
        store_block(matrix, i, j, block);
        part->state.solve[block_index(i, j)][lane] = operand_b(block, beta + 16 * j);
    }
    __syncthreads();
    uint32_t i = 2 + warp / 2, j = warp % 2;
    corner<2>(matrix, i, j, 2, block);
    part->state.solve[block_index(i, j)][lane] = operand_b(block, beta + 16 * j);
}
